package migrations_test

import (
	"context"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// connectClient opens a connection as the role of other programs.
func connectClient(t *testing.T, config *pgx.ConnConfig) *pgx.Conn {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), config.Copy())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	pgtest.Exec(t, conn, `set role `+migrations.ClientRole)
	return conn
}

// A worker in any language needs only the role: it runs a whole execution with a wait.
func TestContractSufficesForExternalWorker(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := connectClient(t, db.Config().ConnConfig)
	id := pgtest.Value[string](t, conn, `select start_agent_execution('external:sum', '{"start": 10}', 'the key')::text`)
	assert.Equal(t, id, pgtest.Value[string](t, conn,
		`select start_agent_execution('external:sum', '{}', 'the key', '')::text`))
	// No object of a caller hides the tables that a function of the contract reads.
	pgtest.Exec(t, conn, `create temp table agent_executions (id uuid); create temp table agent_workers (id uuid)`)
	lock := `select lock_id from lock_agent_execution($1::text::uuid, 'worker 1')`
	first := pgtest.Value[string](t, conn, lock, id)
	assertResults(t, conn, []query{
		{
			`select (r.input ->> 'start') || ' ' || r.checkpoints::text from read_agent_execution($1::text::uuid, $2) r`,
			"10 {}",
		},
		{`select checkpoint_agent_execution($1::text::uuid, $2, 'add', '11')`, "created"},
		{`select ((select event_id from raise_agent_event('order', '7', '{}', $1, '')) =
			(select event_id from raise_agent_event('order', '7', '{}', $1, '')))::text where $2 <> ''`, "true"},
		{`select count(*)::text from raise_agent_event('order', '8') where $1 || $2 <> ''`, "1"},
		{`select status from beat_agent_locks(array[$2], $1::text::uuid)`, "running"},
		{`select unlock_agent_execution($1::text::uuid, $2, 'waiting', p_kind => 'event', p_key => 'paid',
			p_timeout => '1 hour')`, "waiting"},
		{`select waiting_key from agent_executions_waiting where id = $1::text::uuid and $2 <> ''`, "paid"},
		{`select execution_id::text from deliver_agent_event('EVENT_COMPLETED', 'paid', '{"amount": 3}') where $1 <> $2`, id},
	}, id, first)
	second := pgtest.Value[string](t, conn, lock, id)
	_, err := conn.Exec(t.Context(), `select unlock_agent_execution($1::text::uuid, $2, 'waiting', p_kind => 'agent',
		p_key => '018f0000-0000-7000-8000-000000000000')`, id, second)
	assert.Truef(t, postgres.IsCode(err, "P0002"), "a wait for no execution: %v", err)
	assertResults(t, conn, []query{
		{
			`select r.checkpoints -> 'wait event 1' -> 'data' ->> 'amount' from read_agent_execution($1::text::uuid, $2) r`,
			"3",
		},
		{`select unlock_agent_execution($1::text::uuid, $2, 'completed', 'the sum is 14', '', '', '')`, "completed"},
		{`select refused from lock_agent_execution($1::text::uuid, 'worker 2') where $2 <> ''`, "ended"},
	}, id, second)
	_, err = conn.Exec(t.Context(), `select read_agent_execution($1::text::uuid, $2)`, id, first)
	assert.ErrorContains(t, err, "the lock of execution "+id+" is stale")
	assert.Truef(t, postgres.IsCode(err, "LK001"), "read under a void lock: %v", err)
}

// A release whose values belong to another status changes nothing, as over HTTP.
func TestContradictoryReleaseIsRefused(t *testing.T) {
	t.Parallel()
	conn := connectClient(t, pgtest.DB(t).Config().ConnConfig)
	id := pgtest.Value[string](t, conn, `select start_agent_execution('external')::text`)
	lock := pgtest.Value[string](t, conn, `select lock_id from lock_agent_execution($1::text::uuid, 'w')`, id)
	for _, release := range []string{
		`'completed', p_kind => 'event'`, `'completed', p_key => 'k'`, `'failed', p_timeout => '1 day'`,
		`'completed', p_error => 'x'`,
	} {
		_, err := conn.Exec(t.Context(), `select unlock_agent_execution($1::text::uuid, $2, `+release+`)`, id, lock)
		assert.Truef(t, postgres.IsCode(err, "22023"), "%s: %v", release, err)
	}
	pgtest.Equal(t, conn, "t running", `
		select concat(live, ' ', status) from beat_agent_locks(array[$2], $1::text::uuid)`, id, lock)
}

// A worker cannot use a key that started an execution of a flow: it gets neither a new execution nor that one.
func TestKeyOfOtherStartIsRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := connectClient(t, db.Config().ConnConfig)
	pgtest.Exec(t, db, `insert into agent_executions (trace_id, surface, flow, dedupe_key)
		values ('fl_1', 'flow', 'f', 'prices 1')`)
	_, err := conn.Exec(t.Context(), `select start_agent_execution('external', '{}', 'prices 1')`)
	assert.Truef(t, postgres.IsCode(err, "22023"), "the key of another start: %v, want SQLSTATE 22023", err)
}

// A run that waits for the end of another execution gets the values of its own child, and of no other execution.
func TestExternalWorkerReadsOnlyChildsValues(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := connectClient(t, db.Config().ConnConfig)
	for _, other := range []struct{ what, end, parent, want string }{
		{"a child", "before", "$1::uuid", "secret secret secret secret"},
		{"a child", "after", "$1::uuid", "secret secret secret secret"},
		{
			"a child of the original of a fork", "before", "(select forked_from from agent_executions where id = $1::uuid)",
			"secret secret secret secret",
		},
		{"another's execution", "before", "null", ""},
		{"another's execution", "after", "null", ""},
	} {
		id := pgtest.Value[string](t, conn, `select start_agent_execution('external:sum')::text`)
		lock := pgtest.Value[string](t, conn, `select lock_id from lock_agent_execution($1::text::uuid, 'w')`, id)
		pgtest.Exec(t, db, `
			with original as (
			  insert into agent_executions (trace_id, surface, flow)
			  select trace_id, 'flow', 'f' from agent_executions where id = $1::uuid returning id)
			update agent_executions x set forked_from = o.id, forked_step = '' from original o where x.id = $1::uuid`, id)
		awaited := pgtest.Value[string](t, db, `
			insert into agent_executions (trace_id, surface, flow, parent_id)
			select trace_id, 'flow', 'f', `+other.parent+` from agent_executions where id = $1::uuid returning id::text`, id)
		end := func() {
			pgtest.Exec(t, db, `update agent_executions set status = 'running' where id = $1`, awaited)
			pgtest.Exec(t, db, `
				update agent_executions set status = 'completed', variables = '{"a": "secret"}', result = '"secret"',
				       error_message = 'secret', result_summary = 'secret' where id = $1`, awaited)
		}
		if other.end == "before" {
			end()
		}
		pgtest.Exec(t, conn, `select unlock_agent_execution($1::text::uuid, $2, 'waiting', p_kind => 'agent', p_key => $3)`,
			id, lock, awaited)
		if other.end == "after" {
			end()
			pgtest.Exec(t, db, `select lanekeeper.resume_agent_waiters('agent', $1)`, awaited)
		}
		lock = pgtest.Value[string](t, conn, `select lock_id from lock_agent_execution($1::text::uuid, 'w')`, id)
		assert.Equal(t, "completed "+other.want, pgtest.Value[string](t, conn, `
			select concat_ws(' ', d ->> 'status', coalesce(d #>> '{variables,a}', ''), d ->> 'result', d ->> 'error_message',
			                 d ->> 'result_summary')
			  from (select r.checkpoints -> 'wait agent 1' -> 'data' as d
			          from read_agent_execution($1::text::uuid, $2) r) o`, id, lock), other.what, other.end)
	}
}

// A worker cannot read a visitor's next message by a wait in the visitor's thread.
func TestExternalWorkerCannotWaitInVisitorsThread(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := connectClient(t, db.Config().ConnConfig)
	pgtest.Exec(t, db, `insert into agent_threads (id, channel, owner, owner_kind)
		values ('talk', 'chat', 'site', 'key')`)
	id := pgtest.Value[string](t, conn, `select start_agent_execution('external')::text`)
	lock := pgtest.Value[string](t, conn, `select lock_id from lock_agent_execution($1::text::uuid, 'w')`, id)
	_, err := conn.Exec(t.Context(),
		`select unlock_agent_execution($1::text::uuid, $2, 'waiting', p_kind => 'response', p_key => 'talk')`, id, lock)
	assert.Truef(t, postgres.IsCode(err, "P0002"), "a wait in a visitor's thread: %v", err)
}

// why shows a worker no result of a conversation. It shows the owner every result.
func TestClientReadsNoResultOfConversation(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := connectClient(t, db.Config().ConnConfig)
	pgtest.Exec(t, conn, `reset role; set session authorization `+migrations.ClientRole, pgx.QueryExecModeSimpleProtocol)
	pgtest.Exec(t, db, `
		insert into agent_threads (id, channel) values ('talk', 'chat');
		insert into agent_executions (trace_id, surface, flow, thread_id, status) values
		  ('chat', 'chat', 'turn', null, 'running'),
		  ('operate', 'operate', 'turn', null, 'running'), ('call', 'operate', 'skill_call', null, 'running'),
		  ('call of a thread', 'operate', 'skill_call', 'talk', 'running'), ('flow', 'flow', 'f', null, 'running'),
		  ('flow of a thread', 'flow', 'f', 'talk', 'running'), ('task', 'flow', 'delegate', null, 'running');
		update agent_executions set status = 'completed', result_summary = 'secret'`)
	traces := pgtest.Column[string](t, db, `select trace_id from agent_executions order by id`)
	results := func(by postgres.DB) string {
		var of []string
		for _, id := range traces {
			if strings.HasSuffix(pgtest.Value[string](t, by, `select what from why($1) where part = 'did'`, id), ": secret") {
				of = append(of, id)
			}
		}
		return strings.Join(of, ", ")
	}
	assert.Equal(t, "call, flow", results(conn))
	assert.Equal(t, strings.Join(traces, ", "), results(db))
}

// query is a query and its result.
type query struct{ sql, want string }

// assertResults compares the results of queries.
func assertResults(t *testing.T, conn *pgx.Conn, list []query, args ...any) {
	t.Helper()
	for _, q := range list {
		assert.Equal(t, q.want, pgtest.Value[string](t, conn, q.sql, args...), q.sql)
	}
}

// A client cannot pass for another actor in the log.
func TestClientCannotSetActor(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := connectClient(t, db.Config().ConnConfig)
	pgtest.Exec(t, conn, `reset role; set session authorization `+migrations.ClientRole+
		`; set lanekeeper.actor = '{"by": "root"}'`, pgx.QueryExecModeSimpleProtocol)
	for by, want := range map[string]string{
		"admin": "role agent_client: admin", "role owner": "role agent_client: role owner",
		strings.Repeat("x", 300): "role agent_client: " + strings.Repeat("x", 255-len("role agent_client: ")),
	} {
		id := pgtest.Value[string](t, conn, `select start_agent_execution('external')::text`)
		pgtest.Exec(t, db, `insert into agent_executions (trace_id, surface, flow, parent_id, awaited)
			values ('fl_1', 'flow', 'child', $1::uuid, true)`, id)
		pgtest.Exec(t, conn, `select cancel_agent_execution($1::text::uuid, $2, '')`, id, by)
		pgtest.Equal(t, db, want+" 2", `select max(cancelled_by) || ' ' || count(*) from agent_executions
			where (id = $1::uuid or parent_id = $1::uuid) and cancelled_by = $2`, id, want)
	}
	pgtest.Equal(t, db, 0, `select count(*)::int from agent_activity where skill_name = 'cancel_execution'`)
	id := pgtest.Value[string](t, conn, `select start_agent_execution('external')::text`)
	pgtest.Exec(t, pgtest.Begin(t, db), `select from agent_executions for update`)
	pgtest.Exec(t, conn, `select cancel_agent_execution($1::text::uuid, 'admin', '')`, id)
	pgtest.Equal(t, db, `role agent_client: admin {"via": "sql"}`,
		`select cancelled_by || ' ' || actor from agent_cancel_requests`)
}

// The log has a row for an admin's cancel, whatever its reason, and none for the children that end with it.
func TestEachCancelOfAdminIsRecorded(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		insert into agent_executions (trace_id, surface, flow) values ('fl_1', 'flow', 'parent'), ('fl_2', 'flow', 'other');
		insert into agent_executions (trace_id, surface, flow, parent_id, awaited)
		select 'fl_1', 'flow', 'child', id, true from agent_executions where flow = 'parent';
		select cancel_agent_execution(id, 'admin', 'enough') from agent_executions where flow = 'parent';
		select cancel_agent_execution(id, 'admin', 'its parent was cancelled: no') from agent_executions where flow = 'other'`)
	assert.Equal(t, "other, parent", pgtest.Value[string](t, db, `
		select string_agg(input ->> 'flow', ', ' order by input ->> 'flow')
		  from agent_activity where skill_name = 'cancel_execution'`))
	assert.Equal(t, 3, pgtest.Value[int](t, db, `select count(*) from agent_executions where status = 'cancelled'`))
}

// The role sees only the contract: no table, no other function, no other schema.
func TestClientHasNoOtherPrivileges(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	conn := connectClient(t, db.Config().ConnConfig)
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
	assert.Equal(t, "", pgtest.Value[string](t, db, `
		select coalesce(string_agg(c.relname || '.' || a.attname, ', '), '') from pg_class c
		  join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
		 where c.relnamespace = 'public'::regnamespace and col_description(c.oid, a.attnum) is null
		   and (c.relkind = 'v' or c.relkind in ('r', 'p') and has_table_privilege('agent_client', c.oid, 'select'))`),
		"columns without a comment")
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
	assert.Equal(t, "", pgtest.Value[string](t, db, `
		select coalesce(string_agg(c.relname, ', '), '') from pg_class c
		 where c.relnamespace = 'public'::regnamespace and c.relkind = 'v'
		   and has_table_privilege('agent_client', c.oid, 'select')
		       = (obj_description(c.oid, 'pg_class') like '%Not granted to agent_client.')`),
		"views whose comments are wrong about the role")
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

// After a restore without privileges, every role may call every function, and the client may read no view. A migration
// repairs both.
func TestMissingPrivilegesAreGrantedAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `grant execute on all functions in schema public, lanekeeper to public`)
	pgtest.Exec(t, db, `revoke select on agent_locks_live from agent_client`)
	_, err := migrations.Up(t.Context(), db)
	require.NoError(t, err)
	assert.Equal(t, 0, pgtest.Value[int](t, db, `
		select count(*) from pg_proc p where has_function_privilege('public', p.oid, 'execute')
		   and (p.pronamespace = 'lanekeeper'::regnamespace or p.proname = 'void_agent_leases')`))
	assert.True(t, pgtest.Value[bool](t, db, `select has_table_privilege('agent_client', 'agent_locks_live', 'select')`))
}

// newDatabase opens pools on a new database, after some statements of its owner. The sessions of db have a search path.
func newDatabase(t *testing.T, path, before string) (db *pgxpool.Pool, owner *pgxpool.Pool) {
	t.Helper()
	at := pgtest.EmptyURL(t)
	open := func(at string) *pgxpool.Pool {
		pool := pgtest.Pool(t, at, postgres.Options{MaxConns: 4})
		return pool
	}
	owner = open(at)
	pgtest.Exec(t, owner, before)
	u, err := url.Parse(at)
	require.NoError(t, err)
	query := u.Query()
	query.Set("search_path", path)
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20")
	return open(u.String()), owner
}

const written = `
	select count(*) from pg_class c join pg_namespace n on n.oid = c.relnamespace
	  where n.nspname not in ('pg_catalog', 'information_schema', 'pg_toast')`

// Up rejects a search path in which it cannot create the schema, before it writes anything.
func TestInvalidSchemaIsRejectedBeforeWrites(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ path, before, says string }{
		"none":     {"nowhere", `select 1`, "no schema of the search path is there"},
		"capitals": {`"App"`, `create schema "App"; create schema app`, `"App"`},
		"a space":  {`"my app"`, `create schema "my app"`, `"my app"`},
		"an agent's tables are in another": {
			"mine, public", `create schema mine; create table agent_migrations (version int)`,
			"add search_path=public to DATABASE_URL",
		},
	} {
		t.Run(name, func(t *testing.T) {
			db, owner := newDatabase(t, c.path, c.before)
			there := pgtest.Value[int](t, owner, written)
			_, err := migrations.Up(t.Context(), db)
			assert.Truef(t, err != nil && strings.Contains(err.Error(), c.says), "got %v, want %q", err, c.says)
			if got := pgtest.Value[int](t, owner, written); got != there ||
				pgtest.Value[bool](t, owner, `select exists (select from pg_namespace where nspname = 'river')`) {
				t.Errorf("%d relations are there, want %d and no schema of River's", got, there)
			}
		})
	}
}

func TestOtherSchemaIsMigrated(t *testing.T) {
	t.Parallel()
	db, owner := newDatabase(t, "nowhere, mine",
		`create schema mine; create schema another; create table another.agent_locks (id int)`)
	pgtest.Exec(t, owner, `do $$ begin
		execute format('alter database %I set default_tablespace = pg_default', current_database()); end $$`)
	db.Reset()
	for range 2 {
		_, err := migrations.Up(t.Context(), db)
		require.NoError(t, err)
	}
	assert.NoError(t, migrations.Check(t.Context(), db))
	assert.Equal(t, 0, pgtest.Value[int](t, owner,
		`select count(*) from pg_class where relnamespace = 'public'::regnamespace`))
}

// A user without the right to create tables gets an error with the remedy.
func TestErrorNamesMissingCreatePrivilege(t *testing.T) {
	t.Parallel()
	db, _ := newDatabase(t, "public", `revoke create on schema public from public`)
	weak := db.Config()
	weak.ConnConfig.RuntimeParams["role"] = "pg_monitor"
	pool, err := pgxpool.NewWithConfig(t.Context(), weak)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	_, err = migrations.Up(t.Context(), pool)
	assert.Truef(t, err != nil &&
		strings.Contains(err.Error(), `"pg_monitor" may not create tables in the schema "public"`), "got %v", err)
}

// Up rejects a user other than the owner at once, not after the last month of the log. A member of the owner's
// role may act as the owner.
func TestErrorNamesMissingOwnership(t *testing.T) {
	t.Parallel()
	db, owner := newDatabase(t, "public", `select 1`)
	_, err := migrations.Up(t.Context(), db)
	require.NoError(t, err)
	assert.NoError(t, migrations.Rights(t.Context(), db), "the owner")
	user, database := pgtest.Value[string](t, owner, `select current_user`),
		pgtest.Value[string](t, owner, `select current_database()`)
	other := pgx.Identifier{database + "_login"}.Sanitize()
	pgtest.Exec(t, owner, `create role `+other+` login`)
	t.Cleanup(func() {
		_, err := owner.Exec(context.WithoutCancel(t.Context()), `drop owned by `+other+`; drop role `+other,
			pgx.QueryExecModeSimpleProtocol)
		assert.NoError(t, err)
	})
	as := func() *pgxpool.Pool {
		config := db.Config()
		config.ConnConfig.User = database + "_login"
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		return pool
	}
	assert.ErrorContains(t, migrations.Check(t.Context(), as()), `belong to the superuser "`+user+`"`)
	pgtest.Exec(t, owner, `grant select, insert, update, delete on all tables in schema public to `+other)
	pgtest.Exec(t, owner, `grant all on schema public, river to `+other)
	pgtest.Exec(t, owner, `grant create on database `+pgx.Identifier{database}.Sanitize()+` to `+other)
	_, err = migrations.UpWith(t.Context(), as(), withChanges(t, map[string]string{"9001_more.sql": `create table more (id int)`}))
	assert.ErrorContains(t, err, "migrate as that user")
	err = migrations.Rights(t.Context(), as())
	assert.ErrorContains(t, err, "pg_restore --no-owner", "the superuser's role is not granted")
	plain := pgx.Identifier{database + "_owner"}.Sanitize()
	pgtest.Exec(t, owner, `create role `+plain)
	t.Cleanup(func() {
		_, err := owner.Exec(context.WithoutCancel(t.Context()), `reassign owned by `+plain+` to current_user; drop owned by `+
			plain+`; drop role `+plain, pgx.QueryExecModeSimpleProtocol)
		assert.NoError(t, err)
	})
	pgtest.Exec(t, owner, `alter table agent_activity owner to `+plain)
	err = migrations.Rights(t.Context(), as())
	assert.ErrorContains(t, err, "belong to "+plain)
	_, todo, _ := strings.Cut(err.Error(), "or run: ")
	for statement := range strings.SplitSeq(todo, "; ") {
		pgtest.Exec(t, owner, statement)
	}
	assert.NoError(t, migrations.Rights(t.Context(), as()), "a member that did as it was told")
	assert.ErrorContains(t, migrations.Rights(t.Context(),
		openWith(t, db.Config().ConnString(), "default_transaction_read_only", "on")), "nothing can be written")
}

// Hidden rows, for example of a pause, and disabled triggers are errors. Otherwise the agent would continue, and do
// forbidden work.
func TestChangedTablesAreReported(t *testing.T) {
	t.Parallel()
	db, owner := newDatabase(t, "public", `select 1`)
	_, err := migrations.Up(t.Context(), db)
	require.NoError(t, err)
	// row-level security does not hold for a superuser
	plain := pgtest.Value[string](t, owner, `select lower(current_database() || '_plain')`)
	pgtest.Exec(t, owner, `create role `+plain)
	t.Cleanup(func() {
		_, err := owner.Exec(context.WithoutCancel(t.Context()),
			`reassign owned by `+plain+` to current_user; drop owned by `+plain+`; drop role `+plain,
			pgx.QueryExecModeSimpleProtocol)
		assert.NoError(t, err)
	})
	pgtest.Exec(t, owner, `alter table agent_activity owner to `+plain)
	pgtest.Exec(t, owner, `alter table agent_pauses owner to `+plain)
	as := openWith(t, owner.Config().ConnString(), "role", plain)
	rights := func(stage string) {
		t.Helper()
		err := migrations.Rights(t.Context(), as)
		assert.Truef(t, (err == nil) == (stage == "") && (err == nil || strings.Contains(err.Error(), stage)),
			"got %v, not %q", err, stage)
	}
	rights("")
	pgtest.Exec(t, owner, `alter table agent_pauses enable row level security`)
	rights("") // row-level security does not apply to the owner
	pgtest.Exec(t, owner, `alter table agent_pauses force row level security`)
	rights("alter table agent_pauses disable row level security")
	pgtest.Exec(t, owner, `alter table agent_pauses disable row level security`)
	rights("")
	pgtest.Exec(t, owner, `alter table agent_executions disable trigger user`)
	rights("alter table agent_executions enable trigger user")
	pgtest.Exec(t, owner, `alter table agent_executions enable trigger user`)
	rights("")
	replica := openWith(t, db.Config().ConnString(), "session_replication_role", "replica")
	pgtest.Exec(t, owner, `alter table agent_activity owner to current_user`)
	assert.ErrorContains(t, migrations.Rights(t.Context(), replica), "session_replication_role is replica")
}

// A role that may create objects beside the tables can make the owner's sessions call its code.
func TestRoleThatCanCreateObjectsIsReported(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `revoke create on schema public from public`) // PostgreSQL 14 grants it
	require.NoError(t, migrations.CheckCreators(t.Context(), db))
	pgtest.Exec(t, db, `grant create on schema lanekeeper to agent_client`)
	assert.ErrorContains(t, migrations.CheckCreators(t.Context(), db), "the role agent_client may create functions and "+
		"operators in the schema lanekeeper, which then run as ")
	assert.ErrorContains(t, migrations.CheckCreators(t.Context(), db),
		"; run, as the owner of the schema: grant create on schema lanekeeper to ")
	pgtest.Exec(t, db, `grant create on schema public to public`)
	err := migrations.CheckCreators(t.Context(), db)
	assert.ErrorContains(t, err, "every login may create functions and operators in the schema public")
	assert.ErrorContains(t, err, "; revoke create on schema public from public")
}

// A restore without its last part loses indexes and triggers, although every row is there.
func TestMissingObjectsAreReported(t *testing.T) {
	t.Parallel()
	for name, drop := range map[string]string{
		"agent_executions_changed": `drop trigger agent_executions_changed on agent_executions`,
		"why":                      `drop function why(text, integer)`,
		"agent_spend":              `drop view agent_spend cascade`,
		"agent_memory":             `drop table agent_memory cascade`,
		"agent_threads_of_channel": `drop index agent_threads_of_channel`,
		"lanekeeper.agent_actor":   `drop function lanekeeper.agent_actor cascade`,
	} {
		t.Run(name, func(t *testing.T) {
			db := pgtest.DB(t)
			require.NoError(t, migrations.CheckObjects(t.Context(), db))
			pgtest.Exec(t, db, drop)
			assert.ErrorContains(t, migrations.CheckObjects(t.Context(), db), " "+name)
		})
	}
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `drop function why(text, integer); delete from agent_schema_code`, pgx.QueryExecModeSimpleProtocol)
	_, err := migrations.Up(t.Context(), db)
	require.NoError(t, err)
	assert.NoError(t, migrations.CheckObjects(t.Context(), db), "the remedy")
}
