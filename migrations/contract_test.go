package migrations_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/schemadoc"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// insertClaimed returns an execution under the first claim of a live worker.
func insertClaimed(t *testing.T, db *pgxpool.Pool) string {
	t.Helper()
	id := insertExecution(t, db)
	pgtest.Exec(t, db, `
		with w as (insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 hour') returning id)
		update agent_executions set status = 'running', claim = 1, claimed_by = (select id from w) where id = $1::uuid`, id)
	return id
}

// Writes for the first claim of an execution.
const (
	writeCheckpoint = `insert into agent_checkpoints (execution_id, step, claim) values ($1::uuid, 'in flight', 1)`
	writeActivity   = `insert into agent_activity (trace_id, execution_id, claim, skill_name) values ('fl_1', $1::uuid, 1, 's')`
)

// beginWrite opens a transaction that writes for the first claim of an execution.
func beginWrite(t *testing.T, db *pgxpool.Pool, write, id string) pgx.Tx {
	t.Helper()
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, write, id)
	return tx
}

// A statement that takes away a claim waits for a running write under it. The write may need a stronger lock of the
// row, as for a message in a thread lent by a parent. It does not wait for the waiting statement.
func TestTakeoverDoesNotBlockWrites(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	given, logged := insertClaimed(t, db), insertClaimed(t, db)
	over := pgtest.Value[string](t, db, `insert into agent_executions (trace_id, surface, flow)
		values ('fl_1', 'flow', 'external') returning id::text`)
	pgtest.Exec(t, db, `select lock_agent_execution($1::uuid, 'somebody')`, over)
	for id, take := range map[string]string{
		given:  `select lanekeeper.release_agent_claim($1::uuid, 1)`,
		logged: `select lanekeeper.release_agent_claim($1::uuid, 1)`,
		over:   `select lock_agent_execution($1::uuid, 'somebody else')`,
	} {
		write := writeCheckpoint
		if id == logged {
			write = writeActivity
		}
		tx := beginWrite(t, db, write, id)
		if id == over {
			pgtest.Exec(t, db, `update agent_workers set expires_at = clock_timestamp() where execution_id = $1::uuid`, id)
		}
		took := make(chan error, 1)
		go func() {
			_, err := db.Exec(t.Context(), take, id)
			took <- err
		}()
		pgtest.AwaitBlocked(t, db, 1, take)
		pgtest.Exec(t, tx, `select from agent_executions where id = $1::uuid for no key update`, id)
		assert.NoError(t, tx.Commit(t.Context()), take, "the write")
		assert.NoError(t, <-took, take)
		assert.Equal(t, 2, pgtest.Value[int](t, db, `select claim from agent_executions where id = $1::uuid`, id), take)
	}
}

const park = `select lanekeeper.wait_agent_execution($1::uuid, 1, $2, 'event', $2, '1 hour', null)`

func TestConcurrentWaitsOfClaimDoNotDeadlock(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertClaimed(t, db)
	tx := beginWrite(t, db, writeCheckpoint, id)
	codes := make(chan string, 2)
	for _, step := range []string{"one", "two"} {
		go func() {
			_, err := db.Exec(t.Context(), park, id, step)
			codes <- postgres.Code(err)
		}()
	}
	pgtest.AwaitBlocked(t, db, 2, "wait_agent_execution")
	require.NoError(t, tx.Commit(t.Context()))
	assert.Equal(t, "LK001", <-codes+<-codes)
}

func TestCompletionWaitsForWritesAndRejectsLaterOnes(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertClaimed(t, db)
	tx := beginWrite(t, db, writeCheckpoint, id)
	ended := make(chan error, 1)
	go func() {
		_, err := db.Exec(t.Context(), `select lanekeeper.complete_agent_execution($1::uuid, 1, 'completed', '', null, null,
			null)`, id)
		ended <- err
	}()
	pgtest.AwaitBlocked(t, db, 1, "complete_agent_execution")
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-ended)
	assert.True(t, !pgtest.Value[bool](t, db, `select bool_or(c.created_at > x.completed_at) from agent_checkpoints c
		join agent_executions x on x.id = c.execution_id`), "a checkpoint is younger than the end of its execution")
}

func TestInvalidEndsAndWaitsChangeNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertClaimed(t, db)
	for name, query := range map[string]string{
		"end as waiting":     `select lanekeeper.complete_agent_execution($1::uuid, 1, 'waiting', '', null, null, null)`,
		"end as running":     `select lanekeeper.complete_agent_execution($1::uuid, 1, 'running', '', null, null, null)`,
		"end as null":        `select lanekeeper.complete_agent_execution($1::uuid, 1, null, '', null, null, null)`,
		"wait for null":      `select lanekeeper.wait_agent_execution($1::uuid, 1, 's', null, 'k', '1 hour', null)`,
		"wait for unknown":   `select lanekeeper.wait_agent_execution($1::uuid, 1, 's', 'moon', 'k', '1 hour', null)`,
		"wait without key":   `select lanekeeper.wait_agent_execution($1::uuid, 1, 's', 'event', null, '1 hour', null)`,
		"wait with no key":   `select lanekeeper.wait_agent_execution($1::uuid, 1, 's', 'event', '', '1 hour', null)`,
		"wait without step":  `select lanekeeper.wait_agent_execution($1::uuid, 1, null, 'event', 'k', '1 hour', null)`,
		"wait for ever":      `select lanekeeper.wait_agent_execution($1::uuid, 1, 's', 'delay', 'k', null, null)`,
		"wait into the past": `select lanekeeper.wait_agent_execution($1::uuid, 1, 's', 'event', 'k', '-1 second', null)`,
		"wait too long":      `select lanekeeper.wait_agent_execution($1::uuid, 1, 's', 'event', 'k', '31 days', null)`,
		"wait with long key": `select lanekeeper.wait_agent_execution($1::uuid, 1, 's', 'event', repeat($1::uuid::text, 99),
			'1 hour', null)`,
		"the end's event id": `select deliver_agent_event('EVENT_COMPLETED', 'k', '{}', 'completed ' || $1::text)`,
		"the end's raised":   `select raise_agent_event('moon', 'k', '{}', 'completed ' || $1::text, '')`,
		"a decision's id":    `select deliver_agent_event('EVENT_COMPLETED', 'k', '{}', 'approval ' || $1::text)`,
		"a forged end":       `select deliver_agent_event('AGENT_COMPLETED', $1::text)`,
		"a forged decision":  `select deliver_agent_event('APPROVAL_DECIDED', $1::text, '{}', 'approval ' || $1::text)`,
		"an end raised":      `select raise_agent_event('AGENT_COMPLETED', $1::text, '{}', null, '')`,
		"a decision raised":  `select raise_agent_event('APPROVAL_DECIDED', $1::text, '{}', null, '')`,
		"no decision":        `select decide_agent_approval($1::uuid, null, 'ana', '')`,
		"no event":           `select raise_agent_event(null, $1::text, '{}', null, '')`,
		"long key raised":    `select raise_agent_event('moon', repeat($1::text, 99), '{}', null, '')`,
		"long key":           `select deliver_agent_event('EVENT_COMPLETED', repeat($1::text, 99))`,
		"long start key":     `select start_agent_execution('external', '{}', repeat($1::text, 99))`,
		"start in no trace":  `select start_agent_execution('external', '{}', null, $1::text)`,
		"start unknown loss": `select start_agent_execution('external', '{}', null, null, $1::text)`,
		"start to resume":    `select start_agent_execution('external', nullif('{}', $1::text)::jsonb, null, null, 'resume')`,
		"outcome recorded":   `select checkpoint_agent_execution($1::uuid, 'lock', 'wait event 1', null)`,
		"large input":        `select start_agent_execution('external', to_jsonb(repeat($1::uuid::text, 500000)))`,
		"large output": `
			select checkpoint_agent_execution($1::uuid, 'lock', 's', to_jsonb(repeat($1::uuid::text, 500000)))`,
		"large result": `
			select unlock_agent_execution($1::uuid, 'lock', 'completed', p_result => to_jsonb(repeat($1::uuid::text, 500000)))`,
		"large summary": `
			select unlock_agent_execution($1::uuid, 'lock', 'completed', repeat($1::uuid::text, 500000))`,
		"large error": `
			select unlock_agent_execution($1::uuid, 'lock', 'failed', p_error => repeat($1::uuid::text, 500000))`,
		"large event":        `select deliver_agent_event('EVENT_COMPLETED', 'k', to_jsonb(repeat($1::uuid::text, 500000)))`,
		"large raised event": `select raise_agent_event('moon', 'k', to_jsonb(repeat($1::uuid::text, 500000)), null, '')`,
		"long cancel":        `select cancel_agent_execution($1::uuid, 'ana', repeat($1::uuid::text, 99))`,
		"long break":         `select break_agent_lock('x', repeat($1::text, 99))`,
		"long decision":      `select decide_agent_approval($1::uuid, true, 'ana', repeat($1::uuid::text, 99))`,
		"half a limit":       `select set_agent_limits(format('[{"kind": "flow", "name": %s}]', to_json($1::text))::jsonb)`,
		"limit of a moon": `
			select set_agent_limits(jsonb_build_array(jsonb_build_object('kind', 'moon', 'name', $1::text, 'running', 1)))`,
		"limit of no name": `
			select set_agent_limits('[{"kind": "flow", "name": "", "running": 1}]') from (select $1::text) x`,
		"limit below 0": `
			select set_agent_limits(jsonb_build_array(jsonb_build_object('kind', 'flow', 'name', $1::text, 'running', -1)))`,
		"limit of words": `
			select set_agent_limits(jsonb_build_array(jsonb_build_object('kind', 'flow', 'name', 'a', 'running', $1::text)))`,
		"limit given twice": `
			select set_agent_limits(jsonb_build_array(l, l))
			  from jsonb_build_object('kind', 'flow', 'name', $1::text, 'running', 1) l`,
		"null limits": `select set_agent_limits(nullif(to_jsonb($1::text), to_jsonb($1::text)))`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := db.Exec(t.Context(), query, id)
			assert.Truef(t, postgres.IsCode(err, "22023"), "error %v, want SQLSTATE 22023", err)
		})
	}
	assert.Equal(t, "running10", pgtest.Value[string](t, db, `select status || claim || (select count(*) from agent_events)
		from agent_executions`), "status, claim and events", "want them unchanged")
}

// An empty id or key is none, so a client that always passes one loses no event and no start.
func TestEmptyIDsDoNotDeduplicate(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for range 2 {
		pgtest.Exec(t, db, `select deliver_agent_event('EVENT_COMPLETED', 'k', '{}', '')`)
		pgtest.Exec(t, db, `select raise_agent_event('moon', 'k', '{}', '', '')`)
		pgtest.Exec(t, db, `select start_agent_execution('external', '{}', '', '')`)
	}
	pgtest.Equal(t, db, "4 2", `
		select (select count(*) from agent_events) || ' ' || (select count(*) from agent_executions)`)
}

// void_agent_leases refuses to work beside another session of the owner, or of a member of its role. Afterwards old
// claims and tokens are void.
func TestLeasesOfRestoredCopyAreVoid(t *testing.T) {
	t.Parallel()
	db := pgtest.Pool(t, pgtest.URL(t), postgres.Options{MaxConns: 1})
	id := insertClaimed(t, db)
	pgtest.Equal(t, db, true, `select try_acquire_agent_lock('pipeline:prices', 'old')`)
	login := pgtest.Value[string](t, db, `select lower(current_database()) || '_login'`)
	pgtest.Exec(t, db, `create role `+login+` login; create role `+login+`_group; grant `+login+`_group to `+login,
		pgx.QueryExecModeSimpleProtocol)
	t.Cleanup(func() {
		pgtest.Exec(t, db, `reassign owned by `+login+`_group to current_user; drop owned by `+login+`_group;
			drop role `+login+`, `+login+`_group`, pgx.QueryExecModeSimpleProtocol)
	})
	connect := func(user, name string) *pgx.Conn {
		config := db.Config().ConnConfig.Copy()
		config.User, config.RuntimeParams["application_name"] = user, name
		conn, err := pgx.ConnectConfig(t.Context(), config)
		require.NoError(t, err)
		return conn
	}
	refused := func(beside *pgx.Conn, name string) {
		t.Helper()
		_, err := db.Exec(t.Context(), `select void_agent_leases()`)
		assert.Truef(t, postgres.IsCode(err, "55000"), "beside %s: %v, want SQLSTATE 55000", name, err)
		assert.ErrorContains(t, err, fmt.Sprintf("pid %d (%s)", beside.PgConn().PID(), name))
		require.NoError(t, beside.Close(t.Context()))
	}
	refused(connect(db.Config().ConnConfig.User, "lanekeeper-blue"), "lanekeeper-blue")
	pgtest.Exec(t, db, `alter function void_agent_leases owner to `+login+`_group`)
	refused(connect(login, "member"), "member")
	refused(connect(db.Config().ConnConfig.User, "agent"), "agent")
	pgtest.Exec(t, db, `alter function void_agent_leases owner to current_user`)
	board := connect(login, "agent-board")
	var err error
	pgtest.Eventually(t, func() bool {
		_, err = db.Exec(t.Context(), `select void_agent_leases()`)
		return err == nil
	}, "void_agent_leases works beside a session of another role")
	require.NoError(t, board.Close(t.Context()))
	_, err = db.Exec(t.Context(), `select fence_agent_execution($1::uuid, 1)`, id)
	assert.Truef(t, postgres.IsCode(err, "LK001"), "a write under the old claim: %v, want SQLSTATE LK001", err)
	pgtest.Equal(t, db, false, `select is_agent_lock_held('pipeline:prices')`)
}

// A change to or from daylight saving time does not change the length of a wait or of an approval.
func TestTimeoutsIgnoreDaylightSaving(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertClaimed(t, db)
	tx := pgtest.Begin(t, db)
	// Daylight saving time begins within the next two days, and lasts for eight days.
	pgtest.Exec(t, tx, `select set_config('timezone', format('AAA0BBB,J%s/0,J%s/0', day % 365 + 1, (day + 8) % 365 + 1), true)
		from (select extract(doy from clock_timestamp() at time zone 'UTC')::int as day) today`)
	pgtest.Exec(t, tx, `select lanekeeper.wait_agent_execution($1::uuid, 1, 'wait', 'delay', '', '3 days', null)`, id)
	pgtest.Equal(t, tx, 72, `
		select round(extract(epoch from waiting_until - updated_at) / 3600)::int from agent_executions`)
	pgtest.Exec(t, tx, `insert into agent_skills (name, tool_definition, handler) values ('pay', '{}', 'builtin:x')`)
	approval := pgtest.Value[string](t, tx, `
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, created_at, expires_at)
		select 'fl_1', 'pay', 1, '{}', '', t, t + interval '72 hours' from clock_timestamp() t returning id::text`)
	pgtest.Equal(t, tx, 72, `
		select round(extract(epoch from expires_at - decided_at) / 3600)::int
		  from decide_agent_approval($1::uuid, true, 'root', '')`, approval)
}

func TestPartitionsAreCreatedBesideReader(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, `select count(*) from agent_activity`)
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Timeout)
	defer cancel()
	_, err := migrations.EnsureMonths(ctx, db, nil, 5)
	require.NoError(t, err, "partitions beside a reader")
	pgtest.Exec(t, db, `insert into agent_activity (id, trace_id, skill_name)
		values (lanekeeper.agent_uuid7(clock_timestamp() + interval '5 months'), 'fl_x', 'x')`)
}

func TestDayOfSpendUsesIndex(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, `set local enable_seqscan = off`)
	plan := pgtest.Column[string](t, tx, `explain (costs off) select * from agent_spend where day = current_date`)
	text := strings.Join(plan, "\n")
	assert.Truef(t, !strings.Contains(text, "Seq Scan"), "the plan reads whole partitions:\n%s", text)
}

func TestBudgetOfTodayUsesIndex(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `insert into agent_budgets (scope, created_at)
		select 'run:' || n, clock_timestamp() - n * interval '1 hour' from generate_series(1, 5000) n; analyze agent_budgets`)
	plan := strings.Join(pgtest.Column[string](t, db, `explain (costs off) select * from agent_budget_today`), "\n")
	assert.Truef(t, strings.Contains(plan, "agent_budgets_age"), "the plan reads all budgets:\n%s", plan)
}

func TestWaitingClaimCannotReleaseLane(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertClaimed(t, db)
	pgtest.Exec(t, db, `select acquire_agent_lock('thread:1', $1 || '#1', 60)`, id)
	pgtest.Exec(t, db, park, id, "wait")
	assert.True(t, !pgtest.Value[bool](t, db, `select release_agent_lock('thread:1', $1 || '#1')`, id) &&
		pgtest.Value[bool](t, db, `select is_agent_lock_held('thread:1')`),
		"a claim that is over released the lane that its execution keeps while it waits")
}

func TestWaitingClaimCannotFenceLane(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertClaimed(t, db)
	token := pgtest.Value[int64](t, db, `select fencing_token from acquire_agent_lock('thread:1', $1 || '#1', 60)`, id)
	pgtest.Exec(t, db, park, id, "wait")
	if _, err := db.Exec(t.Context(), `select fence_agent_lock('thread:1', $1)`, token); !postgres.IsCode(err, "LK001") {
		t.Errorf("a write under the token of the claim that parked: %v, want SQLSTATE LK001", err)
	}
	next := pgtest.Value[int64](t, db, `select fencing_token from agent_locks where lane = 'thread:1'`)
	assert.Truef(t, next > token, "the parked lane's token is %d, not more than %d", next, token)
}

var update = flag.Bool("update", false, "write docs/schema.md")

func TestTheSchemaPageIsThatOfTheDatabase(t *testing.T) {
	t.Parallel()
	nouns, err := schemadoc.Read(t.Context(), pgtest.DB(t), migrations.Files())
	require.NoError(t, err)
	if missing := schemadoc.Missing(nouns); len(missing) > 0 {
		t.Errorf("without a comment in migrations/schema, or a table: %s", strings.Join(missing, ", "))
	}
	const path = "../docs/schema.md"
	want := schemadoc.Page(nouns)
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(want), 0o644))
	}
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "", cmp.Diff(strings.Split(string(got), "\n"), strings.Split(want, "\n")), path)
}

func TestThePageShowsWhatAChangeAddsAndAsksForItsComments(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		create domain agent_mood as text check (value is null or value in ('glad', 'sad'));
		create table agent_webhook_moods (
		  execution_id uuid primary key references agent_executions (id), mood agent_mood, size int);
		create index agent_webhook_moods_size on agent_webhook_moods (size);
		comment on column agent_webhook_moods.size is 'In | bytes.'`)
	nouns, err := schemadoc.Read(t.Context(), db, migrations.Files())
	require.NoError(t, err)
	missing := "agent_mood, agent_webhook_moods, agent_webhook_moods.mood, agent_webhook_moods_size"
	assert.Equal(t, missing, strings.Join(schemadoc.Missing(nouns), ", "))
	page := schemadoc.Page(nouns)
	assert.Contains(t, page, "| `size` | integer, *null* |  | In \\| bytes. |", "`agent_mood` (glad, sad)",
		"  agent_webhook_moods {\n    key execution_id PK\n  }\n",
		`agent_executions ||--o{ agent_webhook_moods : "execution_id"`)
}

// beginWithoutPartitions returns a transaction, never committed, of a session in a time zone. The activity log has no
// partitions in it.
func beginWithoutPartitions(t *testing.T, zone string) pgx.Tx {
	t.Helper()
	tx := pgtest.Begin(t, pgtest.DB(t))
	pgtest.Exec(t, tx, `select set_config('TimeZone', $1, true)`, zone)
	pgtest.Exec(t, tx, `do $$ declare p text; begin
		for p in select partition from agent_activity_partitions loop execute 'drop table ' || p; end loop; end $$`)
	return tx
}

const (
	// unaligned lists partitions whose range is not the month of UTC in their name.
	unaligned = `
		select count(*) from agent_activity_partitions p,
		  lateral (select to_date(right(p.partition, 7), 'YYYY_MM')::timestamp) t (m)
		 where (p.lower_id, p.upper_id) is distinct
		   from (lanekeeper.agent_uuid7_floor(m at time zone 'UTC'),
		     lanekeeper.agent_uuid7_floor((m + interval '1 month') at time zone 'UTC'))`
)

// The months of the log are months of UTC, for any time zone of the server.
func TestMonthsAreUTC(t *testing.T) {
	t.Parallel()
	for _, zone := range []string{"America/New_York", "Europe/Berlin", "Pacific/Auckland"} {
		tx := beginWithoutPartitions(t, zone)
		for month := range 14 {
			at := time.Date(2027, time.Month(1+month), 1, 0, 30, 0, 0, time.UTC)
			_, err := migrations.EnsureMonths(t.Context(), tx, &at, 3)
			require.NoError(t, err)
		}
		assert.Equal(t, 18, pgtest.Value[int](t, tx, `select count(*) from agent_activity_partitions`), zone)
		assert.Equal(t, 0, pgtest.Value[int](t, tx, unaligned), zone)
	}
}
