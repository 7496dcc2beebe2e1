package skills_test

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

type sqlAnswer struct {
	Rows      []map[string]any `json:"rows"`
	RowCount  int              `json:"row_count"`
	Truncated bool             `json:"truncated"`
}

func invokeSQL(
	t *testing.T, pool *pgxpool.Pool, query, args string, config map[string]any, parameters map[string]any,
) (sqlAnswer, error) {
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

func TestSQLArgumentsAreParameters(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `create table notes (id int, body text, at timestamptz, tags text[], doc jsonb);
		insert into notes values (1, 'one', '2026-01-02 03:04:05+00', '{a,b}', '{"k": 1}'), (2, 'two', null, '{}', null)`)
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
		"number and point": {"id = @x", `{"x": 1.0}`, one},
		"exponent":         {"id = any(@x)", `{"x": [1e0, 7.0]}`, one},
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
			got, err := invokeSQL(t, pool, "select id from notes where "+test.where, test.args, nil,
				map[string]any{"x": map[string]any{}})
			require.NoError(t, err)
			assert.NoDiff(t, test.want, got.Rows)
		})
	}
}

func TestSQLDefaults(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	got, err := invokeSQL(t, pool, "select @n::int as n", `{}`, nil,
		map[string]any{"n": map[string]any{"type": "integer", "default": 7}})
	assert.Truef(t, err == nil && got.Rows[0]["n"] == 7.0, "got %v, %v", got, err)
}

func TestSQLIsReadOnly(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `create table notes (id int);
		create function sneak() returns int language sql volatile as 'insert into notes values (1) returning id'`)
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
			if got, err := invokeSQL(t, pool, query, `{}`, nil, nil); errorClass(err) != skills.ClassSQL {
				t.Errorf("got %v, %v of class %q", got, err, errorClass(err))
			}
		})
	}
	pgtest.Equal(t, pool, 0, "select count(*) from notes")
}

func TestSQLRowLimit(t *testing.T) {
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
			assert.Truef(t, err == nil && got.RowCount == test.rows && len(got.Rows) == test.rows &&
				got.Truncated == test.truncated, "got %d rows, truncated %v, %v", got.RowCount, got.Truncated, err)
		})
	}
	_, err := invokeSQL(t, pool, "select repeat('x', 300000)", `{}`, nil, nil)
	assert.Truef(t, errorClass(err) == skills.ClassTooLarge, "one huge row: %v", err)
}

func TestSQLValuesAsJSON(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	got, err := invokeSQL(t, pool, `select 1::bigint as int, 1.50::numeric as num, 'NaN'::float8 as nan, true as yes,
		null as nothing,
		'2026-01-02 03:04:05+02'::timestamptz as at, '2026-01-02'::date as day, array[1, 2] as list, '{"k": [1]}'::jsonb
		  as doc,
		interval '90 minutes' as span, '00000000-0000-0000-0000-000000000001'::uuid as id`, `{}`, nil, nil)
	require.NoError(t, err)
	want := []map[string]any{{
		"int": 1.0, "num": 1.5, "nan": "NaN", "yes": true, "nothing": nil, "at": "2026-01-02T01:04:05+00:00",
		"day":  "2026-01-02",
		"list": []any{1.0, 2.0}, "doc": map[string]any{"k": []any{1.0}}, "span": "01:30:00",
		"id": "00000000-0000-0000-0000-000000000001",
	}}
	assert.NoDiff(t, want, got.Rows)
}

// isRunning reports whether a query with the marker runs on the server.
func isRunning(t *testing.T, pool *pgxpool.Pool, marker string) bool {
	t.Helper()
	return pgtest.Value[bool](t, pool, `select count(*) > 0 from pg_stat_activity
		where datname = current_database() and state = 'active' and query like '%' || $1 || '%'
		and pid <> pg_backend_pid()`, marker)
}

func TestSQLTimeoutCancelsQuery(t *testing.T) {
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
			start := time.Now()
			_, err := registry(t, skills.Options{Pool: pool}).Invoke(t.Context(), skills.Call{Skill: s})
			if errorClass(err) != skills.ClassTimeout || time.Since(start) > 50*time.Second {
				t.Errorf("got %v of class %q after %s", err, errorClass(err), time.Since(start))
			}
			pgtest.Eventually(t, func() bool { return !isRunning(t, pool, marker) }, "the query still runs")
		})
	}
}

func TestSQLCancelStopsQuery(t *testing.T) {
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
	pgtest.Eventually(t, func() bool { return isRunning(t, pool, marker) }, "the query does not start")
	cause := errors.New("lane lost")
	cancel(cause)
	assert.ErrorIs(t, <-ended, cause)
	pgtest.Eventually(t, func() bool { return !isRunning(t, pool, marker) }, "the query still runs")
	// The pool stays usable.
	_, err := invokeSQL(t, pool, "select 1", `{}`, nil, nil)
	assert.NoError(t, err)
}

func TestSQLResetsSession(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := invokeSQL(t, pool, "select 1", `{}`, map[string]any{"statement_timeout_ms": 1234}, nil)
	require.NoError(t, err)
	_, err = invokeSQL(t, pool, "select set_config('statement_timeout', '1234', false)", `{}`, nil, nil)
	require.NoError(t, err)
	// Before version 16, a read-only transaction may create a large object.
	_, err = invokeSQL(t, pool, "select lo_create(0)::text", `{}`, nil, nil)
	require.True(t, err == nil || strings.Contains(err.Error(), "25006"), err)
	pgtest.Equal(t, pool, 0, "select count(*) from pg_largeobject_metadata")
	for range 3 {
		var timeout, readOnly string
		require.NoError(t, pool.QueryRow(t.Context(), "select current_setting('statement_timeout'), "+
			"current_setting('transaction_read_only')").Scan(&timeout, &readOnly))
		assert.Truef(t, !strings.Contains(timeout, "1234") && readOnly == "off",
			"the session keeps %s, %s", timeout, readOnly)
	}
}

// The server limits the size of rows, so the process never loads a row of 30 MB. The test measures the allocations of
// the process, so it must not run in parallel with others.
func TestSQLServerLimitsRowSize(t *testing.T) {
	pool := pgtest.DB(t)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := invokeSQL(t, pool, `select repeat('x', 30000000) as big`, `{}`,
		map[string]any{"statement_timeout_ms": 30000}, nil)
	runtime.ReadMemStats(&after)
	failed, is := errors.AsType[*skills.CallError](err)
	assert.Truef(t, is && failed.Class == skills.ClassTooLarge && strings.Contains(err.Error(), "30000"), "got %v", err)
	used := after.TotalAlloc - before.TotalAlloc
	assert.Truef(t, used <= 20<<20, "the call allocated %d bytes", used)
	got, err := invokeSQL(t, pool, `select n, repeat('x', 100000) as big from generate_series(1, 9) n`, `{}`, nil, nil)
	assert.Truef(t, err == nil && len(got.Rows) == 2 && got.Truncated && got.Rows[1]["n"] == 2.0,
		"%d rows, truncated %v, %v", len(got.Rows), got.Truncated, err)
}

func TestSQLReleasesAdvisoryLocks(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, query := range map[string]string{
		"that ends":  `select pg_advisory_lock(4711)::text as locked`,
		"that fails": `select pg_advisory_lock(4711)::text as locked, 1 / (random() * 0)::int as n`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := invokeSQL(t, pool, query, `{}`, nil, nil)
			require.Equal(t, strings.HasSuffix(name, "fails"), (err != nil), err)
			pgtest.Equal(t, pool, 0, `select count(*) from pg_locks where locktype = 'advisory' and objid = 4711
				and database = (select oid from pg_database where datname = current_database())`)
		})
	}
}

// A skill repeats its query after a restart of the database.
func TestSQLRetriesAfterDisconnect(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := enginetest.New(t, pool)
	const marker = "/* broken off */"
	r := registry(t, skills.Options{Pool: pool})
	skill := put(t, pool, skills.Definition{
		Name: "asked", Handler: "sql:", Timeout: "60s",
		Config: map[string]any{"query": "select pg_sleep(case when exists (select from broken) then 0 else 50 end)::text " +
			"as slept " + marker},
	})
	pgtest.Exec(t, pool, `create table broken ()`)
	enginetest.Register(t, e, "asks", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		got, err := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "asked"}, Idempotent: true},
			func(ctx context.Context, _ *executions.Effect) (json.RawMessage, error) {
				return r.Invoke(ctx, skills.Call{Skill: skill})
			})
		return executions.Result{Value: got}, err
	})
	testkit.Run(t, e.Run)
	x, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "asks", Surface: trace.Flow})
	require.NoError(t, err)
	pgtest.Eventually(t, func() bool { return isRunning(t, pool, marker) }, "the query does not start")
	pgtest.Exec(t, pool, `insert into broken default values`)
	pgtest.Exec(t, pool, `
		select pg_terminate_backend(pid) from pg_stat_activity
		 where datname = current_database() and query like '%' || $1 || '%' and pid <> pg_backend_pid()`, marker)
	var status, message string
	pgtest.Eventually(t, func() bool {
		err := pool.QueryRow(t.Context(), `select status, coalesce(error_message, '') from agent_executions where id = $1`,
			x.ID).Scan(&status, &message)
		return err == nil && (status == "completed" || status == "failed")
	}, "the run does not end")
	assert.Equal(t, "completed", status, message)
}

// newShopDatabase returns a registry with the named databases shop and read, and a pool of their database. Its table
// has an account with the amount 100.
func newShopDatabase(t *testing.T, role string) (*skills.Registry, *pgxpool.Pool) {
	t.Helper()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		create table account (id int, amount int); insert into account values (1, 100)`)
	r := registry(t, skills.Options{Databases: func(_ context.Context, name string) (skills.Database, error) {
		switch name {
		case "shop":
			return skills.Database{Pool: db, Writes: true, Role: role}, nil
		case "read":
			return skills.Database{Pool: db, Role: role}, nil
		}
		return skills.Database{}, skills.NewConfigError("set %s_URL", name)
	}})
	return r, db
}

// newPaySkill returns a skill that debits the account.
func newPaySkill(t *testing.T, query string, config map[string]any) skills.Skill {
	t.Helper()
	all := map[string]any{"database": "shop", "writes": true, "query": query}
	maps.Copy(all, config)
	return row(t, skills.Definition{
		Name: "pay", Handler: "sql:", Config: all,
		Parameters: object(map[string]any{"n": map[string]any{"type": "integer"}}),
	})
}

const payQuery = `update account set amount = amount - @n where id = 1 returning amount`

func readAmount(t *testing.T, db *pgxpool.Pool) int {
	t.Helper()
	return pgtest.Value[int](t, db, `select amount from account where id = 1`)
}

func TestRepeatedKeyWritesOnce(t *testing.T) {
	t.Parallel()
	r, db := newShopDatabase(t, "")
	s := newPaySkill(t, payQuery, nil)
	group, ctx := errgroup.WithContext(t.Context())
	answers := make([]string, 8)
	for i := range answers {
		group.Go(func() error {
			raw, err := r.Invoke(ctx, skills.Call{Skill: s, Args: json.RawMessage(`{"n": 7}`), IdempotencyKey: "k1"})
			answers[i] = string(raw)
			return err
		})
	}
	require.NoError(t, group.Wait())
	for _, answer := range answers {
		var got sqlAnswer
		err := json.Unmarshal([]byte(answer), &got)
		assert.Truef(t, err == nil && got.RowCount == 1 && got.Rows[0]["amount"] == 93.0, "answer %s, %v", answer, err)
	}
	assert.Equal(t, 93, readAmount(t, db))
	_, err := r.Invoke(t.Context(), skills.Call{Skill: s, Args: json.RawMessage(`{"n": 8}`), IdempotencyKey: "k1"})
	assert.Equal(t, skills.ClassRefused, errorClass(err), err)
	for range 2 { // without a key, each call is separate
		_, err := r.Invoke(t.Context(), skills.Call{Skill: s, Args: json.RawMessage(`{"n": 1}`)})
		require.NoError(t, err)
	}
	assert.Equal(t, 91, readAmount(t, db))
}

func TestFailedWriteLeavesNothing(t *testing.T) {
	t.Parallel()
	r, db := newShopDatabase(t, "")
	call := func(query string) error {
		_, err := r.Invoke(t.Context(), skills.Call{
			Skill: newPaySkill(t, query, nil), Args: json.RawMessage(`{"n": 1}`), IdempotencyKey: "k2",
		})
		return err
	}
	for name, query := range map[string]string{
		"divides by zero": `with x as (select pg_advisory_lock(7))
			update account set amount = amount / (@n - 1) from x`,
		"no such table":    `insert into nowhere values (@n)`,
		"two statements":   `update account set amount = @n; select 1`,
		"a transaction":    `commit --@n`,
		"returns too much": `update account set amount = amount - @n returning repeat('x', 300000) as x`,
	} {
		assert.Error(t, call(query), name, "no error")
	}
	var held int
	err := db.QueryRow(t.Context(), `
		select (select count(*) from pg_locks where locktype = 'advisory' and database = (
		         select oid from pg_database where datname = current_database()))
		     + (select count(*) from agent_effects)`).Scan(&held)
	if got := readAmount(t, db); got != 100 || held != 0 || err != nil {
		t.Errorf("the account has %d, %d locks and effects are left, %v", got, held, err)
	}
	if err := call(payQuery); err != nil || readAmount(t, db) != 99 {
		t.Errorf("the retry: %d, %v", readAmount(t, db), err)
	}
}

func TestWritingSkillResult(t *testing.T) {
	t.Parallel()
	r, db := newShopDatabase(t, "")
	pgtest.Exec(t, db, `
		create function book(n int) returns int language sql as
		'update account set amount = amount - n where id = 1 returning amount'`)
	for query, want := range map[string]string{
		`update account set amount = amount + @n - @n where id = 1`: `{"rows":[],"row_count":1,"truncated":false}`,
		`select book(@n * 0) as left from generate_series(1, 3)`: `
			{"rows":[{"left":100},{"left":100}],"row_count":2,"truncated":true}`,
		`insert into account select @n, x from generate_series(2,4) x returning amount`: `
			{"rows":[{"amount":2},{"amount":3}],"row_count":2,"truncated":true}`,
	} {
		raw, err := r.Invoke(t.Context(), skills.Call{
			Skill: newPaySkill(t, query, map[string]any{"row_limit": 2}), Args: json.RawMessage(`{"n": 5}`),
		})
		var got, wanted any
		if err == nil {
			err = errors.Join(json.Unmarshal(raw, &got), json.Unmarshal([]byte(want), &wanted))
		}
		if a, b := marshal(t, got), marshal(t, wanted); err != nil || a != b {
			t.Errorf("%s: %s, %v, want %s", query, a, err, b)
		}
	}
}

func marshal(t *testing.T, value any) string {
	t.Helper()
	raw, err := json.Marshal(value)
	require.NoError(t, err)
	return string(raw)
}

func TestNamedDatabaseIsReadOnlyByDefault(t *testing.T) {
	t.Parallel()
	r, db := newShopDatabase(t, "")
	call := func(query string, config map[string]any) error {
		_, err := r.Invoke(t.Context(), skills.Call{Skill: newPaySkill(t, query, config), Args: json.RawMessage(`{"n": 5}`)})
		return err
	}
	if err := call(payQuery, map[string]any{"database": "read"}); errorClass(err) != skills.ClassConfiguration {
		t.Errorf("a writing skill: %v", err)
	}
	if err := call(payQuery, map[string]any{"writes": false}); errorClass(err) != skills.ClassSQL {
		t.Errorf("an update in a skill that reads: %v", err)
	}
	err := call(payQuery, map[string]any{"database": "SHOP"})
	assert.Truef(t, errorClass(err) == skills.ClassConfiguration && err.Error() == "set SHOP_URL",
		"without the setting: %v", err)
	writingFunction := `select setval('s', @n)`
	pgtest.Exec(t, db, `create sequence s`)
	err = call(writingFunction, map[string]any{"writes": false})
	assert.Truef(t, errorClass(err) == skills.ClassSQL && strings.Contains(err.Error(), "read-only"),
		"a function that writes: %v", err)
}

func TestNamedDatabaseRole(t *testing.T) {
	t.Parallel()
	const role = "lanekeeper_test_reader"
	r, db := newShopDatabase(t, role)
	pgtest.Exec(t, db, `
		do $$ begin create role `+role+`; exception when duplicate_object or unique_violation then null; end $$;
		grant select on account to `+role)
	who := newPaySkill(t, `select current_user as who from account where id = @n`, map[string]any{"writes": false})
	raw, err := r.Invoke(t.Context(), skills.Call{Skill: who, Args: json.RawMessage(`{"n": 1}`)})
	assert.Truef(t, err == nil && strings.Contains(string(raw), role), "it runs as %s, %v", raw, err)
	_, err = r.Invoke(t.Context(), skills.Call{Skill: newPaySkill(t, payQuery, nil), Args: json.RawMessage(`{"n": 1}`)})
	assert.Truef(t, errorClass(err) == skills.ClassSQL && strings.Contains(err.Error(), "permission denied"),
		"a write that the role may not make: %v", err)
	pgtest.Exec(t, db, `grant update on account to `+role)
	_, err = r.Invoke(t.Context(), skills.Call{Skill: newPaySkill(t, payQuery, nil), Args: json.RawMessage(`{"n": 1}`)})
	assert.NoError(t, err)
}
