package skills_test

import (
	"context"
	"encoding/json"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/skills"
)

type sqlAnswer struct {
	Rows      []map[string]any `json:"rows"`
	RowCount  int              `json:"row_count"`
	Truncated bool             `json:"truncated"`
}

func invokeSQL(t *testing.T, pool *pgxpool.Pool, query, args string, config map[string]any, parameters map[string]any) (sqlAnswer, error) {
	t.Helper()
	if config == nil {
		config = map[string]any{}
	}
	config["query"] = query
	r := registry(t, skills.Options{Pool: pool})
	s := row(t, skills.Definition{Name: "q", Handler: "sql:", Config: config, Parameters: object(parameters)})
	raw, err := r.Invoke(t.Context(), skills.Call{Skill: s, Args: json.RawMessage(args)})
	var answer sqlAnswer
	if err == nil {
		err = json.Unmarshal(raw, &answer)
	}
	return answer, err
}

func TestSQLArgumentsAreOnlyEverParameters(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	if _, err := pool.Exec(t.Context(), `create table notes (id int, body text, at timestamptz, tags text[], doc jsonb);
		insert into notes values (1, 'one', '2026-01-02 03:04:05+00', '{a,b}', '{"k": 1}'), (2, 'two', null, '{}', null)`); err != nil {
		t.Fatal(err)
	}
	one := []map[string]any{{"id": 1.0}}
	none := []map[string]any{}
	tests := map[string]struct {
		where, args string
		want        []map[string]any
	}{
		"text":             {"body = @x", `{"x": "one"}`, one},
		"injection quote":  {"body = @x", `{"x": "' or true --"}`, none},
		"injection drop":   {"body = @x", `{"x": "one'; drop table notes; --"}`, none},
		"injection escape": {"body = @x", `{"x": "\\' or 1=1 --"}`, none},
		"injection dollar": {"body = @x", `{"x": "$$ or true"}`, none},
		"placeholder text": {"body = @x", `{"x": "@x"}`, none},
		"number":           {"id = @x", `{"x": 1}`, one},
		"number as text":   {"body = 'one' and @x = '1.50'", `{"x": 1.50}`, one},
		"boolean":          {"id = 1 and @x", `{"x": true}`, one},
		"timestamp":        {"at = @x", `{"x": "2026-01-02T04:04:05+01:00"}`, one},
		"array":            {"body = any(@x)", `{"x": ["one", "x\"},{\\", null]}`, one},
		"number array":     {"id = any(@x)", `{"x": [1, 7]}`, one},
		"document":         {"doc @> @x", `{"x": {"k": 1}}`, one},
		"document list":    {"id = 1 and @x::jsonb = '[1,2]'", `{"x": [1, 2]}`, one},
		"absent":           {"id = 1 and @x::text is null", `{}`, one},
		"null":             {"id = 1 and @x::text is null", `{"x": null}`, one},
		"twice":            {"body = @x or body = @x || 'x'", `{"x": "one"}`, one},
		"in a string":      {"id = 1 and '@y' <> @x /* @z */", `{"x": ""}`, one},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := invokeSQL(t, pool, "select id from notes where "+test.where, test.args, nil, map[string]any{"x": map[string]any{}})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got.Rows); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestSQLDefaultsFillAbsentArguments(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	got, err := invokeSQL(t, pool, "select @n::int as n", `{}`, nil, map[string]any{"n": map[string]any{"type": "integer", "default": 7}})
	if err != nil || got.Rows[0]["n"] != 7.0 {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestSQLOnlyReads(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	if _, err := pool.Exec(t.Context(), `create table notes (id int);
		create function sneak() returns int language sql volatile as 'insert into notes values (1) returning id'`); err != nil {
		t.Fatal(err)
	}
	for name, query := range map[string]string{
		"insert":           "insert into notes values (1) returning id",
		"insert in with":   "with i as (insert into notes values (1) returning id) select id from i",
		"volatile":         "select sneak()",
		"two statements":   "select 1; insert into notes values (1)",
		"two by breaking":  "select 1) x; insert into notes values (1); select (1",
		"leave read-only":  "select set_config('transaction_read_only', 'off', false), sneak()",
		"commit":           "commit",
		"a line comment":   "select 1 --; \n) x; drop table notes; --",
		"does not exist":   "select nothing from nowhere",
		"divides by zero":  "select 1 / 0",
		"wrong type":       "select 'x'::int",
		"sequence":         "select nextval('river.river_job_id_seq')",
		"row lock":         "select id from notes for update",
		"temporary table":  "create temp table t (id int)",
		"set by statement": "set default_transaction_read_only = off",
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := invokeSQL(t, pool, query, `{}`, nil, nil); class(err) != skills.ClassSQL {
				t.Errorf("got %v, %v of class %q", got, err, class(err))
			}
		})
	}
	var n int
	if err := pool.QueryRow(t.Context(), "select count(*) from notes").Scan(&n); err != nil || n != 0 {
		t.Errorf("%d rows were written, %v", n, err)
	}
}

func TestSQLBoundsItsRows(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, test := range map[string]struct {
		query     string
		limit     int
		rows      int
		truncated bool
	}{
		"fewer":     {"select generate_series(1, 4) n", 5, 4, false},
		"exactly":   {"select generate_series(1, 5) n", 5, 5, false},
		"more":      {"select generate_series(1, 6) n", 5, 5, true},
		"default":   {"select generate_series(1, 500) n", 0, 100, true},
		"own limit": {"select generate_series(1, 6) n limit 2", 5, 2, false},
		"by size":   {"select repeat('x', 100000) from generate_series(1, 9)", 0, 2, true},
		"none":      {"select 1 where false", 0, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := invokeSQL(t, pool, test.query, `{}`, map[string]any{"row_limit": test.limit}, nil)
			if err != nil || got.RowCount != test.rows || len(got.Rows) != test.rows || got.Truncated != test.truncated {
				t.Errorf("got %d rows, truncated %v, %v", got.RowCount, got.Truncated, err)
			}
		})
	}
	if _, err := invokeSQL(t, pool, "select repeat('x', 300000)", `{}`, nil, nil); class(err) != skills.ClassTooLarge {
		t.Errorf("one huge row: %v", err)
	}
}

func TestSQLValuesAreSensibleJSON(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	got, err := invokeSQL(t, pool, `select 1::bigint as int, 1.50::numeric as num, 'NaN'::float8 as nan, true as yes, null as nothing,
		'2026-01-02 03:04:05+02'::timestamptz as at, '2026-01-02'::date as day, array[1, 2] as list, '{"k": [1]}'::jsonb as doc,
		interval '90 minutes' as span, '00000000-0000-0000-0000-000000000001'::uuid as id`, `{}`, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []map[string]any{{
		"int": 1.0, "num": 1.5, "nan": "NaN", "yes": true, "nothing": nil, "at": "2026-01-02T01:04:05+00:00", "day": "2026-01-02",
		"list": []any{1.0, 2.0}, "doc": map[string]any{"k": []any{1.0}}, "span": "01:30:00", "id": "00000000-0000-0000-0000-000000000001",
	}}
	if diff := cmp.Diff(want, got.Rows); diff != "" {
		t.Error(diff)
	}
}

// sleeping reports whether a query of the test's marker runs on the server.
func sleeping(t *testing.T, pool *pgxpool.Pool, marker string) bool {
	t.Helper()
	var n int
	err := pool.QueryRow(t.Context(), `select count(*) from pg_stat_activity
		where datname = current_database() and state = 'active' and query like '%' || $1 || '%' and pid <> pg_backend_pid()`, marker).Scan(&n)
	if err != nil {
		t.Fatal(err)
	}
	return n > 0
}

func TestSQLTimeoutsStopTheQueryOnTheServer(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	tests := map[string]struct {
		timeoutMS int
		config    map[string]any
	}{
		"skill":     {300, map[string]any{}},
		"statement": {60000, map[string]any{"statement_timeout_ms": 300}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			marker := "/* sleeper " + name + " */"
			test.config["query"] = "select pg_sleep(60) " + marker
			s := row(t, skills.Definition{Name: "q", Handler: "sql:", Config: test.config})
			s.TimeoutMS = test.timeoutMS
			began := time.Now()
			_, err := registry(t, skills.Options{Pool: pool}).Invoke(t.Context(), skills.Call{Skill: s})
			if class(err) != skills.ClassTimeout || time.Since(began) > 50*time.Second {
				t.Errorf("got %v of class %q after %s", err, class(err), time.Since(began))
			}
			pgtest.Eventually(t, 90*time.Second, func() bool { return !sleeping(t, pool, marker) }, "the query still runs")
		})
	}
}

func TestSQLCancelStopsTheQueryOnTheServer(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	const marker = "/* cancelled sleeper */"
	s := row(t, skills.Definition{Name: "q", Handler: "sql:select pg_sleep(60) " + marker})
	s.TimeoutMS = 60000
	r := registry(t, skills.Options{Pool: pool})
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := r.Invoke(ctx, skills.Call{Skill: s})
		ended <- err
	}()
	pgtest.Eventually(t, 90*time.Second, func() bool { return sleeping(t, pool, marker) }, "the query does not start")
	gone := errors.New("lane lost")
	cancel(gone)
	if err := <-ended; !errors.Is(err, gone) {
		t.Errorf("got %v", err)
	}
	pgtest.Eventually(t, 90*time.Second, func() bool { return !sleeping(t, pool, marker) }, "the query still runs")
	// The pool is as good as before.
	if _, err := invokeSQL(t, pool, "select 1", `{}`, nil, nil); err != nil {
		t.Error(err)
	}
}

func TestSQLLeavesNothingInTheSession(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	if _, err := invokeSQL(t, pool, "select 1", `{}`, map[string]any{"statement_timeout_ms": 1234}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := invokeSQL(t, pool, "select set_config('statement_timeout', '1234', false)", `{}`, nil, nil); err != nil {
		t.Fatal(err)
	}
	// Before 16, a transaction that only reads may make a large object.
	if _, err := invokeSQL(t, pool, "select lo_create(0)::text", `{}`, nil, nil); err != nil && !strings.Contains(err.Error(), "25006") {
		t.Fatal(err)
	}
	var objects int
	if err := pool.QueryRow(t.Context(), "select count(*) from pg_largeobject_metadata").Scan(&objects); err != nil || objects > 0 {
		t.Errorf("%d large objects, %v", objects, err)
	}
	for range 3 {
		var timeout, readOnly string
		if err := pool.QueryRow(t.Context(), "select current_setting('statement_timeout'), current_setting('transaction_read_only')").Scan(&timeout, &readOnly); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(timeout, "1234") || readOnly != "off" {
			t.Errorf("the session keeps %s, %s", timeout, readOnly)
		}
	}
}

// What the server would send is bounded there: a row of 30 MB never comes into memory.
func TestSQLRowsAreBoundedBeforeTheyAreSent(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := invokeSQL(t, pool, `select repeat('x', 30000000) as big`, `{}`, map[string]any{"statement_timeout_ms": 30000}, nil)
	runtime.ReadMemStats(&after)
	if failed, is := errors.AsType[*skills.CallError](err); !is || failed.Class != skills.ClassTooLarge || !strings.Contains(err.Error(), "30000") {
		t.Errorf("got %v", err)
	}
	if used := after.TotalAlloc - before.TotalAlloc; used > 20<<20 {
		t.Errorf("it took %d bytes", used)
	}
	got, err := invokeSQL(t, pool, `select n, repeat('x', 100000) as big from generate_series(1, 9) n`, `{}`, nil, nil)
	if err != nil || len(got.Rows) != 2 || !got.Truncated || got.Rows[1]["n"] != 2.0 {
		t.Errorf("%d rows, truncated %v, %v", len(got.Rows), got.Truncated, err)
	}
}

func TestSQLKeepsNoLock(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, query := range map[string]string{
		"that ends":  `select pg_advisory_lock(4711)::text as locked`,
		"that fails": `select pg_advisory_lock(4711)::text as locked, 1 / (random() * 0)::int as n`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := invokeSQL(t, pool, query, `{}`, nil, nil)
			if fails := strings.HasSuffix(name, "fails"); (err != nil) != fails {
				t.Fatal(err)
			}
			var held int
			if err := pool.QueryRow(t.Context(), `select count(*) from pg_locks where locktype = 'advisory' and objid = 4711 and database = (
				select oid from pg_database where datname = current_database())`).Scan(&held); err != nil || held != 0 {
				t.Errorf("%d locks are held, %v", held, err)
			}
		})
	}
}
