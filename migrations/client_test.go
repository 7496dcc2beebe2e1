package migrations_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// client is a connection as the role of other programs.
func client(t *testing.T, config *pgx.ConnConfig) *pgx.Conn {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), config.Copy())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	pgtest.Exec(t, conn, `set role `+migrations.ClientRole)
	return conn
}

// A worker in any language needs nothing but the role: it runs a whole execution, with a wait in it.
func TestAWorkerOutsideNeedsOnlyTheContract(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := client(t, db.Config().ConnConfig)
	id := pgtest.Value[string](t, conn, `select start_agent_execution('external:sum', '{"start": 10}', 'the key')::text`)
	assert.Equal(t, id, pgtest.Value[string](t, conn,
		`select start_agent_execution('external:sum', '{}', 'the key')::text`))
	// Nothing that a caller makes comes before the tables that a function of the contract asks.
	pgtest.Exec(t, conn, `create temp table agent_executions (id uuid); create temp table agent_workers (id uuid)`)
	lock := `select lock_id from lock_agent_execution($1::text::uuid, 'worker 1')`
	first := pgtest.Value[string](t, conn, lock, id)
	says(t, conn, []asked{
		{
			`select (r.input ->> 'start') || ' ' || r.checkpoints::text from read_agent_execution($1::text::uuid, $2) r`,
			"10 {}",
		},
		{`select checkpoint_agent_execution($1::text::uuid, $2, 'add', '11')`, "created"},
		{`select status from beat_agent_locks(array[$2], $1::text::uuid)`, "running"},
		{`select unlock_agent_execution($1::text::uuid, $2, 'waiting', p_kind => 'event', p_key => 'paid',
			p_timeout => '1 hour')`, "waiting"},
		{`select waiting_key from agent_executions_waiting where id = $1::text::uuid and $2 <> ''`, "paid"},
		{`select execution_id::text from deliver_agent_event('EVENT_COMPLETED', 'paid', '{"amount": 3}') where $1 <> $2`, id},
	}, id, first)
	second := pgtest.Value[string](t, conn, lock, id)
	says(t, conn, []asked{
		{
			`select r.checkpoints -> 'wait event 1' -> 'data' ->> 'amount' from read_agent_execution($1::text::uuid, $2) r`,
			"3",
		},
		{`select unlock_agent_execution($1::text::uuid, $2, 'completed', 'the sum is 14')`, "completed"},
		{`select refused from lock_agent_execution($1::text::uuid, 'worker 2') where $2 <> ''`, "ended"},
	}, id, second)
	_, err := conn.Exec(t.Context(), `select read_agent_execution($1::text::uuid, $2)`, id, first)
	assert.Truef(t, postgres.IsCode(err, "LK001"), "read under a void lock: %v", err)
}

// asked is a question and its answer.
type asked struct{ ask, want string }

// says asks one question after the other.
func says(t *testing.T, conn *pgx.Conn, list []asked, args ...any) {
	t.Helper()
	for _, q := range list {
		assert.Equal(t, q.want, pgtest.Value[string](t, conn, q.ask, args...), q.ask)
	}
}

// Beside the contract there is nothing that the role can see: no table, no other function, no other schema.
func TestTheClientCanDoNothingElse(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := client(t, db.Config().ConnConfig)
	got := pgtest.Value[string](t, conn, `
		select coalesce(string_agg(c.relname || ' ' || p.privilege, ', '), '') from pg_class c
		 cross join unnest(array['select', 'insert', 'update', 'delete', 'truncate', 'references', 'trigger']) p (privilege)
		 where c.relnamespace in ('public'::regnamespace, 'lanekeeper'::regnamespace) and c.relkind in ('r', 'p', 'v')
		   and not (c.relkind = 'v' and p.privilege = 'select') and has_table_privilege(c.oid, p.privilege)`)
	assert.Equal(t, "", got, "rights beyond reading views")
	called := `
		select count(*)::text from pg_proc p where p.pronamespace in ('public'::regnamespace, 'lanekeeper'::regnamespace)
		   and has_schema_privilege(p.pronamespace, 'usage') and has_function_privilege(p.oid, 'execute')`
	assert.Equal(t, "21", pgtest.Value[string](t, conn, called))
	assert.Equal(t, "0", pgtest.Value[string](t, db, `
		select coalesce(string_agg(p.proname, ', '), '') || count(*) from pg_proc p
		 where p.pronamespace = 'public'::regnamespace
		   and (not p.prosecdef or obj_description(p.oid, 'pg_proc') is null)`))
	n := pgtest.Value[int](t, db, `select count(*) from pg_proc where pronamespace = 'public'::regnamespace`)
	assert.Truef(t, n <= 30, "the contract has %d functions, want at most 30", n)
	for what, sql := range map[string]string{
		"a table":         `select from agent_executions`,
		"a write":         `update agent_executions set status = 'completed'`,
		"the other room":  `select lanekeeper.agent_uuid7()`,
		"a pause":         `select resume_agent('me', '')`,
		"an approval":     `select decide_agent_approval(gen_random_uuid(), true, 'me', '')`,
		"a function's":    `create or replace function why(trace text, most int) returns int language sql as 'select 1'`,
		"River":           `select from river.river_job`,
		"another's limit": `select set_agent_limits('{}')`,
	} {
		_, err := conn.Exec(t.Context(), sql)
		assert.Truef(t, postgres.IsCode(err, "42501"), "%s: %v, want SQLSTATE 42501", what, err)
	}
	views := pgtest.Column[string](t, db, `
		select c.relname::text from pg_class c
		 where c.relnamespace = 'public'::regnamespace and c.relkind = 'v'
		   and has_table_privilege('agent_client', c.oid, 'select')`)
	require.Equal(t, 13, len(views), views)
	for _, view := range views {
		_, err := conn.Exec(t.Context(), `select * from `+view)
		assert.NoError(t, err, view)
	}
}
