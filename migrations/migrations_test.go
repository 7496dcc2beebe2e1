package migrations_test

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestConcurrentProcessesMigrateOnce(t *testing.T) {
	t.Parallel()
	url := pgtest.EmptyURL(t)
	var mu sync.Mutex
	applied := make(map[string]int)
	var starting sync.WaitGroup
	for range 4 {
		db, err := postgres.Open(t.Context(), url, postgres.Options{MaxConns: 4})
		require.NoError(t, err)
		defer db.Close()
		starting.Go(func() {
			names, err := migrations.Up(t.Context(), db)
			assert.NoError(t, err)
			assert.NoError(t, migrations.Check(t.Context(), db), "after Up")
			mu.Lock()
			defer mu.Unlock()
			for _, n := range names {
				applied[n]++
			}
		})
	}
	starting.Wait()
	if applied["baseline"] != 1 || len(applied) != 1+len(changeFiles(t)) {
		t.Errorf("applied %v, want the baseline and %d changes", applied, len(changeFiles(t)))
	}
	for name, n := range applied {
		assert.Equal(t, 1, n, name)
	}
}

func TestCheckAcceptsOnlyThisVersion(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change string
		want   error
	}{
		"same": {change: `select 1`},
		"newer": {`insert into agent_migrations (version, name, hash) select max(version) + 1, 'x', 'x'
			from agent_migrations`, migrations.ErrNewer},
		"changed": {`update agent_migrations set hash = 'x' where version = 270`, migrations.ErrChanged},
	} {
		t.Run(name, func(t *testing.T) {
			db := pgtest.DB(t)
			pgtest.Exec(t, db, test.change)
			assert.ErrorIs(t, migrations.Check(t.Context(), db), test.want)
			names, err := migrations.Up(t.Context(), db)
			assert.Truef(t, errors.Is(err, test.want) && len(names) == 0, "Up: %v, %v, want %v", names, err, test.want)
		})
	}
}

func TestSchemaWithMissingCodeIsOutdated(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `delete from agent_schema_code where name = (select max(name) from agent_schema_code)`)
	assert.ErrorIs(t, migrations.Check(t.Context(), db), migrations.ErrOutdated)
}

func TestSchemaWithoutRiverIsOutdated(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `drop schema river cascade`)
	assert.ErrorIs(t, migrations.Check(t.Context(), db), migrations.ErrOutdated)
	_, err := migrations.Up(t.Context(), db)
	require.NoError(t, err)
	assert.NoError(t, migrations.Check(t.Context(), db))
}

func TestCheckOfEmptyDatabaseWritesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	assert.ErrorIs(t, migrations.Check(t.Context(), db), migrations.ErrOutdated)
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from pg_tables where schemaname = 'public'`))
}

// Up writes nothing to the database of another program.
func TestDatabaseOfOtherProgramIsRejected(t *testing.T) {
	t.Parallel()
	for name, theirs := range map[string]string{
		"a table":    `create table agent_activity (id int)`,
		"a view":     `create view agent_spend as select 1 as cost`,
		"a sequence": `create sequence agent_events`,
		"a function": `create function why(about text) returns text language sql as 'select about'`,
		"a domain":   `create domain agent_surface as text`,
		"a schema":   `create schema lanekeeper`,
	} {
		t.Run(name, func(t *testing.T) {
			db := pgtest.Empty(t)
			pgtest.Exec(t, db, theirs)
			const there = `select count(*) from pg_class where relnamespace = 'public'::regnamespace`
			want := pgtest.Value[int](t, db, there)
			if _, err := migrations.Up(t.Context(), db); err == nil || !strings.Contains(err.Error(), "a database of its own") {
				t.Errorf("got %v", err)
			}
			assert.Equal(t, want, pgtest.Value[int](t, db, there), "relations")
			assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from pg_namespace where nspname = 'river'`))
		})
	}
}

// The agent would share the queue of another program's River, and migrate it.
func TestRiverOfOtherProgramIsRejected(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	pgtest.Exec(t, db, `create schema river; create table river.river_job (id int)`, pgx.QueryExecModeSimpleProtocol)
	_, err := migrations.Up(t.Context(), db)
	assert.ErrorContains(t, err, "the database has the relation river.river_job of another program")
	assert.Equal(t, 1, pgtest.Value[int](t, db, `select count(*) from pg_class
		where relnamespace in (to_regnamespace('river'), to_regnamespace('public'))`))
}

// A dump of the schema alone has the tables without a version.
func TestTablesWithoutVersionAreRejected(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `delete from agent_migrations`)
	_, err := migrations.Up(t.Context(), db)
	assert.ErrorContains(t, err, "restored without their rows")
}

// These are the functions that other programs call, with their parameters; see DESIGN.md.
func TestPublicFunctions(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for name, arguments := range map[string]string{
		"try_acquire_agent_lock": "p_lane text, p_locked_by text, p_ttl_seconds integer DEFAULT 300",
		"acquire_agent_lock":     "p_lane text, p_locked_by text, p_ttl_seconds integer DEFAULT 300",
		"await_agent_lock": "p_lane text, p_locked_by text, p_ttl_seconds integer DEFAULT 300, p_patience_seconds " +
			"integer DEFAULT 5",
		"leave_agent_lock_queue": "p_lane text, p_locked_by text",
		"renew_agent_lock":       "p_lane text, p_locked_by text, p_fencing_token bigint, p_ttl_seconds integer",
		"release_agent_lock":     "p_lane text, p_locked_by text, p_fencing_token bigint DEFAULT NULL::bigint",
		"is_agent_lock_held":     "p_lane text",
		"fence_agent_lock":       "p_lane text, p_fencing_token bigint",
		"break_agent_lock":       "p_lane text, p_reason text",
		"agent_uuid7":            "p_at timestamp with time zone DEFAULT clock_timestamp()",
		"agent_uuid7_floor":      "p_at timestamp with time zone",
		"fence_agent_execution":  "p_id uuid, p_claim bigint",
		"claim_agent_execution":  "p_id uuid, p_worker uuid",
		"cancel_agent_execution": "p_id uuid, p_cancelled_by text, p_reason text",
	} {
		got := pgtest.Value[string](t, db, `
			select coalesce(string_agg(distinct pg_get_function_arguments(p.oid), ' / '), 'no such function') from pg_proc p
			 where p.proname = $1 and p.pronamespace = coalesce((
			   select q.pronamespace from pg_proc q where q.proname = $1 and q.pronamespace = 'public'::regnamespace limit 1),
			     'lanekeeper'::regnamespace)`, name)
		assert.Equal(t, arguments, got, name)
	}
	pgtest.Equal(t, db, "", `
		select coalesce(string_agg(t.proname, ', '), '') from (
		  select p.proname from pg_proc p where p.pronamespace in ('public'::regnamespace, 'lanekeeper'::regnamespace)
		   group by p.pronamespace, p.proname having count(*) > 1) t`)
}

func TestUUID7(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	if !pgtest.Value[bool](t, db, `
		with made as (select n, lanekeeper.agent_uuid7('2026-01-02 03:04:05.999700+00'::timestamptz + n * interval '1 microsecond') as id
		                from generate_series(0, 2000) n)
		select bool_and(id > before) from (select id, lag(id) over (order by n) as before from made) t
		  where before is not null`) {
		t.Error("ids of consecutive microseconds are out of order")
	}
	assert.True(t, pgtest.Value[bool](t, db,
		`select bool_and(lanekeeper.agent_uuid7()::text ~ '^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab]')
			from generate_series(1, 500)`), "wrong version or variant")
	assert.Equal(t, 5000, pgtest.Value[int](t, db, `select count(distinct lanekeeper.agent_uuid7('2026-01-01'))
		from generate_series(1, 5000)`))
	assert.True(t, pgtest.Value[bool](t, db, `
		select bool_and(lanekeeper.agent_uuid7(at) >= lanekeeper.agent_uuid7_floor(at)
		  and lanekeeper.agent_uuid7(at - interval '1 ms') < lanekeeper.agent_uuid7_floor(at))
		  from (select '2026-01-02 03:04:05.678'::timestamptz + n * interval '1.1 ms' as at
		    from generate_series(1, 500) n) t`), "agent_uuid7_floor is not between two milliseconds")
	plan := strings.Join(pgtest.Column[string](t, db,
		"explain (verbose, costs off) select lanekeeper.agent_uuid7_floor(clock_timestamp())"), "\n")
	assert.True(t, !strings.Contains(plan, "agent_uuid7_floor"), "the planner does not inline agent_uuid7_floor:", plan)
}

func TestTraceIDsOfSQLAreValid(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	seen := make(map[trace.ID]bool)
	for range 50 {
		text := pgtest.Value[string](t, db, `select lanekeeper.agent_trace_id('op')`)
		id, err := trace.Parse(text)
		require.NoError(t, err)
		assert.Truef(t, !seen[id], "%s was made twice", id)
		assert.Equal(t, text, string(id))
		assert.Equal(t, trace.Operate, id.Surface())
		if age := time.Since(id.Time()); age < -time.Minute || age > time.Minute {
			t.Errorf("%s is from %s", id, id.Time())
		}
		seen[id] = true
	}
}

func insertExecution(t *testing.T, db *pgxpool.Pool) string {
	t.Helper()
	return pgtest.Value[string](t, db, `insert into agent_executions (trace_id, surface, flow) values ('fl_x', 'flow', 'f')
		returning id::text`)
}

// PostgreSQL reads a body only when it runs. Without this test, a caller would find the call of a missing function.
func TestFunctionsCallExistingFunctions(t *testing.T) {
	t.Parallel()
	gone := pgtest.Column[string](t, pgtest.DB(t), `
		select distinct p.proname || ' calls ' || m[1] from pg_proc p
		 cross join lateral regexp_matches(p.prosrc, 'lanekeeper\.(\w+)\s*\(', 'g') m
		 where p.pronamespace in ('public'::regnamespace, 'lanekeeper'::regnamespace)
		   and not exists (select from pg_proc q where q.pronamespace = 'lanekeeper'::regnamespace and q.proname = m[1])`)
	assert.Truef(t, len(gone) == 0, "functions that do not exist: %v", gone)
}
