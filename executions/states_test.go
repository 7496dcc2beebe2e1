package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
)

// transitions is the state machine: the states that may follow each state.
var transitions = map[executions.Status][]executions.Status{
	executions.Pending: {executions.Running, executions.Cancelled},
	executions.Running: {
		executions.Waiting, executions.Completed, executions.Failed, executions.Timeout,
		executions.Cancelled,
	},
	executions.Waiting:   {executions.Running, executions.Timeout, executions.Failed, executions.Cancelled},
	executions.Completed: nil, executions.Failed: nil, executions.Timeout: nil, executions.Cancelled: nil,
}

var allStatuses = slices.Sorted(maps.Keys(transitions))

// testExecution is an execution in a state, with its last claim.
type testExecution struct {
	id    string
	claim int64
}

// newInState creates an execution and brings it to a state with the public functions.
func newInState(t *testing.T, db postgres.DB, s executions.Status) testExecution {
	t.Helper()
	x := testExecution{id: pgtest.Value[string](t, db, `
		insert into agent_executions (trace_id, surface, flow) values ($1, 'flow', 'states')
		  returning id::text`, string(trace.New(trace.Flow)))}
	if s == executions.Pending {
		return x
	}
	if s == executions.Cancelled {
		pgtest.Exec(t, db, `select cancel_agent_execution($1::uuid, 'somebody', 'a reason')`, x.id)
		return x
	}
	w := pgtest.Value[string](t, db, `
		insert into agent_workers (expires_at) values (clock_timestamp() + interval '10 minutes') returning id::text`)
	x.claim = mustClaim(t, db, x.id, w)
	switch s {
	case executions.Running, executions.Pending, executions.Cancelled:
	case executions.Waiting:
		pgtest.Exec(t, db, `select lanekeeper.wait_agent_execution($1::uuid, $2, 'wait', 'event', $1::text, '1 hour',
			'{"why": "test"}')`, x.id, x.claim)
	case executions.Completed, executions.Failed, executions.Timeout:
		pgtest.Exec(t, db, `select lanekeeper.complete_agent_execution($1::uuid, $2, $3, 'said', null, $4, null)`, x.id,
			x.claim, string(s), "an error")
	}
	return x
}

// recordTransitionsSQL records every committed transition.
const recordTransitionsSQL = `
create table state_log (n bigint generated always as identity, id uuid, old text, new text);
create function watch_states() returns trigger language plpgsql as $$
begin insert into state_log (id, old, new) values (new.id, old.status, new.status); return null; end $$;
create trigger watch_states after update of status on agent_executions for each row when (old.status <> new.status)
  execute function watch_states()`

// rowText returns everything about an execution.
func rowText(t *testing.T, db postgres.DB, id string) string {
	t.Helper()
	return pgtest.Value[string](t, db, `select to_jsonb(x)::text || x.xmin::text from agent_executions x
		where x.id = $1::uuid`, id)
}

// wantEnd checks the record of an execution. An ended one must be complete and have emitted its end once; a live one
// must have emitted none.
func wantEnd(t *testing.T, db postgres.DB, id string) {
	t.Helper()
	x := getExecution(t, db, id)
	types := map[executions.Status]string{
		executions.Completed: "success", executions.Failed: "failure", executions.Timeout: "timeout",
		executions.Cancelled: "cancelled",
	}
	assert.Truef(t, postgres.Deref(x.ResultType) == types[x.Status] && (x.CompletedAt != nil) == x.Status.Ended(),
		"%s: result type %q, completed at %v", x.Status, postgres.Deref(x.ResultType), x.CompletedAt)
	if x.ClaimedBy != nil && x.Status != executions.Running {
		t.Errorf("%s, and claimed by %s", x.Status, *x.ClaimedBy)
	}
	waits := x.WaitingUntil != nil // plain SQL may omit the kind of wait
	if waits != (x.Status == executions.Waiting) || waits && time.Until(*x.WaitingUntil) > 8*24*time.Hour {
		t.Errorf("%s: waiting for %q until %v", x.Status, postgres.Deref(x.WaitingFor), x.WaitingUntil)
	}
	want := 0
	if x.Status.Ended() {
		want = 1
	}
	assert.Equal(t, want, countCompletions(t, db, id), x.Status)
}

// Of all 49 pairs of states, plain SQL may make only the legal transitions. A rejected one changes nothing.
func TestPlainSQLFollowsStateMachine(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, from := range allStatuses {
		for _, to := range allStatuses {
			if from == to {
				continue
			}
			x := newInState(t, pool, from)
			before := rowText(t, pool, x.id)
			_, err := pool.Exec(t.Context(), `update agent_executions set status = $2 where id = $1::uuid`, x.id, string(to))
			if !slices.Contains(transitions[from], to) {
				if !postgres.IsCode(err, "LK002") || rowText(t, pool, x.id) != before {
					t.Errorf("%s to %s: %v; from %s to %s", from, to, err, before, rowText(t, pool, x.id))
				}
				continue
			}
			got := getExecution(t, pool, x.id)
			assert.Truef(t, err == nil && got.Status == to, "%s to %s: %v, the status is %s", from, to, err, got.Status)
			wantEnd(t, pool, x.id)
		}
	}
}

// operation is an SQL function on an execution, with its transitions.
type operation struct {
	sql         string
	args        int // how many of (id, claim) it takes
	transitions map[executions.Status]executions.Status
}

var operations = map[string]operation{
	"claim": {
		`select lanekeeper.claim_agent_execution($1::uuid, (select id from agent_workers order by expires_at desc limit 1))`,
		1,
		map[executions.Status]executions.Status{executions.Pending: executions.Running},
	},
	"complete": {
		`select lanekeeper.complete_agent_execution($1::uuid, $2, 'completed', 'said', null, null, null)`, 2,
		map[executions.Status]executions.Status{executions.Running: executions.Completed},
	},
	"fail": {
		`select lanekeeper.complete_agent_execution($1::uuid, $2, 'failed', '', null, 'no', 'step')`, 2,
		map[executions.Status]executions.Status{executions.Running: executions.Failed},
	},
	"time out": {
		`select lanekeeper.complete_agent_execution($1::uuid, $2, 'timeout', '', null, null, null)`, 2,
		map[executions.Status]executions.Status{executions.Running: executions.Timeout},
	},
	"cancel": {
		`select cancel_agent_execution($1::uuid, 'somebody', 'a reason')`, 1,
		map[executions.Status]executions.Status{
			executions.Pending: executions.Cancelled, executions.Running: executions.Cancelled,
			executions.Waiting: executions.Cancelled,
		},
	},
	"park": {
		`select lanekeeper.wait_agent_execution($1::uuid, $2, 'wait', 'event', $1::text, '1 hour', null)`, 2,
		map[executions.Status]executions.Status{executions.Running: executions.Waiting},
	},
	"resume": {resumeSQL, 1, map[executions.Status]executions.Status{executions.Waiting: executions.Running}},
	"deliver": {
		`select deliver_agent_event('EVENT_COMPLETED', $1::text)`, 1,
		map[executions.Status]executions.Status{executions.Waiting: executions.Running},
	},
	"hand back": {`select lanekeeper.release_agent_claim($1::uuid, $2)`, 2, nil},
	"lose": {
		`select lanekeeper.lose_agent_claims(claimed_by) from agent_executions where id = $1::uuid and claimed_by is not null`, 1, nil,
	},
	"checkpoint": {`insert into agent_checkpoints (execution_id, step, claim) values ($1::uuid, 'late', $2)`, 2, nil},
	"wake":       {`select lanekeeper.resume_agent_waiters('agent', $1::text)`, 1, nil},
}

func (d operation) run(ctx context.Context, db postgres.DB, x testExecution) error {
	_, err := db.Exec(ctx, d.sql, []any{x.id, x.claim}[:d.args]...)
	return err
}

// Each function in each state makes a transition of the state machine or none. An ended row does not change.
func TestSQLFunctionsFollowStateMachine(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, d := range operations {
		for _, from := range allStatuses {
			x := newInState(t, pool, from)
			before := rowText(t, pool, x.id)
			err := d.run(t.Context(), pool, x)
			assert.Truef(t, err == nil || postgres.IsCode(err, "LK001"), "%s in %s: %v", name, from, err)
			want, leads := d.transitions[from]
			if !leads {
				want = from
			}
			if got := getExecution(t, pool, x.id); got.Status != want || leads && err != nil {
				t.Errorf("%s in %s: %s, want %s; %v", name, from, got.Status, want, err)
			}
			assert.Truef(t, !from.Ended() || rowText(t, pool, x.id) == before, "%s changed a row that was %s", name, from)
			wantEnd(t, pool, x.id)
		}
	}
}

// Two functions run at once, in all pairs, from all live states. The committed transitions are legal, with at most one
// end.
func TestConcurrentTransitionsAreLegal(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, recordTransitionsSQL)
	for _, from := range []executions.Status{executions.Pending, executions.Running, executions.Waiting} {
		for first, one := range operations {
			for second, two := range operations {
				if first > second || one.transitions[from] == "" && two.transitions[from] == "" {
					continue
				}
				x := newInState(t, pool, from)
				runConcurrently(t, pool, x, one, two)
				wantLegalTransitions(t, pool, x.id, fmt.Sprintf("%s and %s in %s", first, second, from))
			}
		}
	}
}

// runConcurrently runs two operations at once. The second is rejected or finds nothing to do.
func runConcurrently(t *testing.T, pool *pgxpool.Pool, x testExecution, one, two operation) {
	t.Helper()
	group, ctx := errgroup.WithContext(t.Context())
	for _, d := range []operation{one, two} {
		group.Go(func() error {
			err := postgres.InTx(ctx, pool, func(tx pgx.Tx) error { return d.run(ctx, tx, x) })
			if postgres.IsCode(err, "LK001") || postgres.IsCode(err, "LK002") {
				return nil
			}
			return err
		})
	}
	err := group.Wait()
	assert.Truef(t, err == nil, "%s\n%s\n%v", one.sql, two.sql, err)
}

// wantLegalTransitions checks the committed transitions of an execution.
func wantLegalTransitions(t *testing.T, pool *pgxpool.Pool, id, what string) {
	t.Helper()
	type step struct{ Old, New executions.Status }
	steps := pgtest.Rows[step](t, pool, `select old, new from state_log where id = $1::uuid order by n`, id)
	at := executions.Pending
	if len(steps) > 0 && steps[0].Old == executions.Running {
		at = executions.Running // it started claimed
	}
	for _, s := range steps {
		assert.Truef(t, s.Old == at && slices.Contains(transitions[s.Old], s.New), "%s: went %v", what, steps)
		at = s.New
	}
	assert.Equal(t, at, getExecution(t, pool, id).Status, what, steps)
	wantEnd(t, pool, id)
}

// A later wait for an end that has happened ends too.
func TestWaitForEndedExecutionReturnsAtOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	child := newInState(t, pool, executions.Completed)
	for range 2 {
		x := newInState(t, pool, executions.Running)
		assert.True(t, pgtest.Value[bool](t, pool, `
			select lanekeeper.wait_agent_execution($1::uuid, $2, 'wait', 'agent', $3::text, '1 hour',
			  null) ->> 'event' = 'AGENT_COMPLETED'`,
			x.id, x.claim, child.id), "one waits for an execution that has ended")
	}
}

// A rejected completion does not affect others of its batch.
func TestRejectedCompletionFailsAlone(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	gathered := make(chan struct{})
	p := startEngine(t, pool, map[string]executions.Func{"flow": func(ctx context.Context,
		input json.RawMessage,
	) (executions.Result, error) {
		<-gathered
		if string(input) == "3" {
			return executions.Result{Value: json.RawMessage(`1e999999`)}, nil // valid JSON, but too large for jsonb
		}
		return executions.Result{Value: input}, nil
	}}, neverSweep, func(o *executions.Options) { o.Workers = 12 })
	ids := make([]string, 12)
	for i := range ids {
		ids[i] = p.startWithInput(t, i)
	}
	pgtest.Until(t, pool, len(ids), `select count(*) from agent_executions where claimed_by is not null`)
	close(gathered)
	for i, id := range ids {
		want := executions.Completed
		if i == 3 {
			want = executions.Failed
		}
		if x := enginetest.Await(t, pool, id, want); want == executions.Completed && string(x.Result) != fmt.Sprint(i) {
			t.Errorf("the result of %d is %s", i, x.Result)
		}
	}
}

func TestRejectedEventFailsAlone(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, eventFlow())
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	group, ctx := errgroup.WithContext(t.Context())
	for caller := range 8 {
		group.Go(func() error {
			for i := range 25 {
				id, invalid := fmt.Sprint(caller, "-", i), (caller+i)%5 == 0
				if invalid {
					id = "completed " + id // reserved
				}
				_, err := p.Deliver(ctx, pool, "EVENT_COMPLETED", fmt.Sprint(caller, "-", i), nil, id)
				if invalid != postgres.IsCode(err, "22023") || !invalid && err != nil {
					return fmt.Errorf("event %s: %w", id, err)
				}
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())
	assert.Equal(t, 160, pgtest.Value[int](t, pool, `select count(*) from agent_events where event = 'EVENT_COMPLETED'`))
}

// The closed sets are domains, so they hold for every writer.
func TestColumnConstraints(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := insertPending(t, pool)
	for column, bad := range map[string]string{
		"trace_id": `''`, "surface": `'page'`, "flow": `''`, "queue": `'slow'`, "priority": `5`,
		"max_attempts": `0`, "on_lost": `'hope'`,
		"progress_seconds": `-1`, "waiting_for": `'godot'`, "result_type": `'fine'`, "status": `'sleeping'`,
	} {
		_, err := pool.Exec(t.Context(), `update agent_executions set `+column+` = `+bad+` where id = $1`, id)
		assert.Truef(t, postgres.IsCode(err, "23514"), "%s = %s: %v", column, bad, err)
		if column == "trace_id" || column == "surface" || column == "flow" {
			continue
		}
		_, err = pool.Exec(t.Context(), `insert into agent_executions (trace_id, surface, flow, `+column+
			`) values ($1, 'flow', 'flow', `+bad+`)`, string(trace.New(trace.Flow)))
		assert.Truef(t, postgres.IsCode(err, "23514"), "a row with %s = %s: %v", column, bad, err)
	}
}

// forbiddenWrites are writes that no rule allows, whatever the state of execution $1. Each one fails, or writes no row.
var forbiddenWrites = map[string]string{
	"no status":   `update agent_executions set status = 'banana' where id = $1`,
	"null status": `update agent_executions set status = null where id = $1`,
	"begins ended": `insert into agent_executions (trace_id, surface, flow, status) select 't', 'flow', 'f',
		'completed' where $1::uuid is not null`,
	"begins waiting": `insert into agent_executions (trace_id, surface, flow, status) select 't', 'flow', 'f',
		'waiting' where $1::uuid is not null`,
	"unknown surface": `insert into agent_executions (trace_id, surface, flow) select 't', 'page', 'f'
		where $1::uuid is not null`,
	"claim goes back":  `update agent_executions set claim = claim - 1 where id = $1`,
	"unknown wait":     `update agent_executions set waiting_for = 'godot' where id = $1`,
	"unknown result":   `update agent_executions set result_type = 'fine' where id = $1`,
	"stale checkpoint": `insert into agent_checkpoints (execution_id, step, claim) values ($1, 'stolen', 99)`,
	"old checkpoint":   `insert into agent_checkpoints (execution_id, step, claim) values ($1, 'stolen', -1)`,
	"checkpoint of none": `insert into agent_checkpoints (execution_id, step, claim) select gen_random_uuid(), 'stolen',
		1 where $1::uuid is not null`,
	"checkpoint moved": `update agent_checkpoints set claim = 99 where execution_id = $1`,
	"begins while paused": `insert into agent_executions (trace_id, surface, flow, status, claimed_by) select 't', 'flow',
		'f', 'running', gen_random_uuid() where $1::uuid is not null`,
	"claimed while paused": `update agent_executions set status = 'running', claimed_by = gen_random_uuid() where id = $1
		and status = 'pending'`,
	"stale activity": `insert into agent_activity (trace_id, execution_id, claim, kind, agent, surface, skill_name,
		status) values ('t', $1, 99, 'note', 'a', 'flow', 's', 'success')`,
	// A pause does not hold back the surface operate.
	"claimed without run": `update agent_executions set claimed_by = gen_random_uuid(), surface = 'operate' where id = $1
		and status <> 'running'`,
	"ended without an end": `update agent_executions set completed_at = clock_timestamp() where id = $1
		and completed_at is null`,
	"end taken back": `update agent_executions set completed_at = null where id = $1 and completed_at is not null`,
}

// settingNames returns all names of settings that the code has ever set or read to bypass a rule.
func settingNames(t *testing.T) []string {
	t.Helper()
	names := map[string]bool{}
	for _, n := range []string{"valid", "follows", "fenced", "unpaused", "changed", "claimed", "missed", "trial"} {
		names["lanekeeper."+n] = true
	}
	paths, err := filepath.Glob("../migrations/schema/*.sql")
	require.Truef(t, err == nil && len(paths) > 0, "no schema: %v", err)
	for _, p := range paths {
		text, err := os.ReadFile(p)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`'(lanekeeper\.[a-z_]+)'`).FindAllStringSubmatch(string(text), -1) {
			names[m[1]] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// No role below superuser can write past a rule: with no setting, in no state, with all rights on the tables.
func TestNoSettingOrRoleBypassesRules(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	role := "attacker_" + strings.ToLower(pgtest.Value[string](t, pool, `select current_database()`))
	pgtest.Exec(t, pool, fmt.Sprintf(`create role %q`, role))
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		_, err := pool.Exec(ctx, fmt.Sprintf(`drop owned by %[1]q; drop role %[1]q`, role), pgx.QueryExecModeSimpleProtocol)
		assert.NoError(t, err)
	})
	pgtest.Exec(t, pool, fmt.Sprintf(`
		grant all on all tables in schema public to %[1]q;
		grant usage on schema lanekeeper to %[1]q;
		grant execute on all functions in schema lanekeeper to %[1]q`, role))
	subjects := map[executions.Status]testExecution{}
	for _, s := range allStatuses {
		subjects[s] = newInState(t, pool, s)
	}
	pgtest.Exec(t, pool, `insert into agent_checkpoints (execution_id, step, claim) values ($1, 'done', $2)`,
		subjects[executions.Running].id, subjects[executions.Running].claim)
	pgtest.Exec(t, pool, `select pause_agent('an attack')`)
	everything := `select md5(string_agg(to_jsonb(x)::text, '' order by x.id)) || (select count(*) from agent_checkpoints)
		from agent_executions x`
	before := pgtest.Value[string](t, pool, everything)
	direct := pgtest.DirectURL(t, pool.Config().ConnString()) // a pooler shares what a session sets
	for _, as := range []string{"owner", role} {
		for _, value := range []string{"", "yes", "on", "{}"} {
			tryForbiddenWrites(t, direct, as, value, subjects)
		}
	}
	assert.Equal(t, before, pgtest.Value[string](t, pool, everything))
}

// tryForbiddenWrites tries each attack on an execution in each state, with every setting at a value.
func tryForbiddenWrites(t *testing.T, url, role, value string, subjects map[executions.Status]testExecution) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	for _, name := range settingNames(t) {
		pgtest.Exec(t, conn, `select set_config($1, $2, false)`, name, value)
	}
	if role != "owner" {
		pgtest.Exec(t, conn, fmt.Sprintf(`set role %q`, role))
	}
	for state, x := range subjects {
		for what, sql := range forbiddenWrites {
			tag, err := conn.Exec(t.Context(), sql, x.id)
			if err == nil && tag.RowsAffected() > 0 || err != nil && !isRuleViolation(err) {
				t.Errorf("%s with settings %q: %s of one that is %s: %v, %d rows", role, value, what, state,
					err, tag.RowsAffected())
			}
		}
		for _, to := range allStatuses {
			if to == state || slices.Contains(transitions[state], to) {
				continue
			}
			_, err := conn.Exec(t.Context(), `update agent_executions set status = $2 where id = $1`, x.id, string(to))
			assert.Truef(t, isRuleViolation(err), "%s with settings %q: from %s to %s: %v", role, value, state, to, err)
		}
		tryCopy(t, conn, x)
	}
}

// tryCopy tries to load rows past the rules with COPY.
func tryCopy(t *testing.T, conn *pgx.Conn, x testExecution) {
	t.Helper()
	id, err := conn.PgConn().EscapeString(x.id)
	require.NoError(t, err)
	for what, from := range map[string][2]string{
		"an execution that ended": {
			`copy agent_executions (trace_id, surface, flow, status) from stdin`,
			"t\tflow\tf\tcompleted\n",
		},
		"a stale checkpoint": {`copy agent_checkpoints (execution_id, step, claim) from stdin`, id + "\tstolen\t99\n"},
	} {
		_, err := conn.PgConn().CopyFrom(t.Context(), strings.NewReader(from[1]), from[0])
		assert.Truef(t, isRuleViolation(err), "%s was copied: %v", what, err)
	}
}

// isRuleViolation reports whether a rule caused an error, not syntax, rights or the connection.
func isRuleViolation(err error) bool {
	var e *pgconn.PgError
	return errors.As(err, &e) && slices.Contains([]string{"LK001", "LK002", "LK003", "23502", "23514"}, e.Code)
}

// logLines collects a program's log.
type logLines struct{ testkit.Log }

func (l *logLines) capture(o *executions.Options) { o.Logger = slog.New(slog.NewJSONHandler(l, nil)) }

// The log has every transition, also if SQL or a sweep ended a wait.
func TestTransitionsAreLogged(t *testing.T) {
	t.Parallel()
	for name, wake := range map[string]string{
		"by SQL": `select deliver_agent_event('EVENT_COMPLETED', 'key', '{}')`,
		"by a sweep": `
			with due as (update agent_executions set waiting_until = clock_timestamp() where status = 'waiting' returning id)
			select count(*) from due`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			l := &logLines{}
			p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
				if _, err := executions.Lane(ctx, "thread:x"); err != nil {
					return executions.Result{}, err
				}
				return resultOf(executions.Wait(ctx, "event", executions.Event("key", 0)))
			}), l.capture)
			id := p.startFlow(t, "flow")
			pgtest.Eventually(t, func() bool { return len(l.Records(t, "execution waiting")) > 0 }, "the wait is logged")
			pgtest.Exec(t, pool, wake)
			enginetest.Await(t, pool, id, executions.Completed)
			pgtest.Eventually(t, func() bool { return len(l.Records(t, "locks released")) > 0 }, "the end is logged")
			var seen []string
			for _, record := range l.Records(t, "execution started", "action requires wait",
				"execution waiting", "execution resumed",
				"continuing from checkpoint", "execution completed", "event emitted", "locks released") {
				seen = append(seen, record["msg"].(string))
			}
			want := []string{
				"execution started", "action requires wait", "execution waiting", "execution resumed", "continuing from checkpoint",
				"execution completed", "event emitted", "locks released",
			}
			assert.Truef(t, slices.Equal(seen, want), "log lines %q", seen)
			_, named := l.Records(t, "execution resumed")[0]["event"]
			assert.Truef(t, named != (name == "by a sweep"), "an event is named: %t", named)
			for message, attribute := range map[string][2]any{
				"execution waiting":          {"waiting_for", "event"},
				"execution resumed":          {"timed_out", name == "by a sweep"},
				"continuing from checkpoint": {"checkpoints", 1.0},
				"execution completed":        {"result_type", "success"},
				"event emitted":              {"event", "AGENT_COMPLETED"},
				"locks released":             {"count", 1.0},
			} {
				if records := l.Records(t, message); len(records) != 1 || records[0][attribute[0].(string)] != attribute[1] {
					t.Errorf("%s: %v, want %v", message, records, attribute)
				}
			}
		})
	}
}

// The log names the owner that acquired the lane.
func TestReleasedLaneIsLoggedWithOwner(t *testing.T) {
	t.Parallel()
	l := &logLines{}
	flows := flowMap(func(ctx context.Context) (executions.Result, error) {
		_, err := executions.Lane(ctx, "objective:7")
		return executions.Result{}, err
	})
	p := newEngine(t, pgtest.DB(t), flows, l.capture)
	x, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
	require.NoError(t, err)
	records := l.Records(t, "lane released")
	assert.Truef(t, len(records) == 1 && records[0]["owner"] == x.ID+"#1", "%v, want the owner %s#1", records, x.ID)
}

// An end that happens outside the run is logged once.
func TestEndOutsideRunIsLogged(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		result string
		end    func(t *testing.T, p *testEngine, id string)
	}{
		"a cancel": {"cancelled", func(t *testing.T, p *testEngine, id string) {
			_, err := p.Cancel(t.Context(), id, "ana", "not wanted")
			require.NoError(t, err)
		}},
		"a cancel in a transaction": {"cancelled", func(t *testing.T, p *testEngine, id string) {
			var ended []executions.Ended
			require.NoError(t, postgres.InTx(t.Context(), p.pool, func(tx pgx.Tx) (err error) {
				_, ended, err = executions.CancelTx(t.Context(), tx, id, "ana", "not wanted")
				return err
			}))
			p.LogEnded(t.Context(), ended)
		}},
		"a cancel after a lost claim": {"cancelled", func(t *testing.T, p *testEngine, id string) {
			pgtest.Exec(t, p.pool, `update agent_executions set on_lost = 'hand_on' where id = $1`, id)
			expireLease(t, p.pool, id)
			require.NoError(t, p.Sweep(t.Context()))
			_, err := p.Cancel(t.Context(), id, "ana", "not wanted")
			require.NoError(t, err)
		}},
		"a sweep": {"failure", func(t *testing.T, p *testEngine, id string) {
			expireLease(t, p.pool, id)
			require.NoError(t, p.Sweep(t.Context()))
		}},
		"an unlock": {"failure", func(t *testing.T, p *testEngine, id string) {
			lock := pgtest.Value[string](t, p.pool, `select w.lock_id from agent_workers w where w.execution_id = @id`,
				postgres.Strict{"id": id})
			_, _, err := p.UnlockRun(t.Context(), id, lock, executions.UnlockParams{Status: executions.Failed, Error: "x"})
			require.NoError(t, err)
		}},
		"a lock that settles the last": {"failure", func(t *testing.T, p *testEngine, id string) {
			expireLease(t, p.pool, id)
			_, err := p.LockRun(t.Context(), id, "second", time.Minute)
			require.ErrorIs(t, err, executions.ErrEnded)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := &logLines{}
			p := newEngine(t, pgtest.DB(t), nil, l.capture)
			id, others := p.startExternal(t), p.startExternal(t)
			p.lock(t, id, "first")
			pgtest.Exec(t, p.pool, `
				insert into agent_events (id, event, key)
				  values (lanekeeper.agent_uuid7_floor(now() + interval '1 minute'), 'AGENT_COMPLETED', @id)`,
				postgres.Strict{"id": others}) // at the same time, another writer emits it
			pgtest.Exec(t, p.pool, `select acquire_agent_lock('thread:x', @owner)`, postgres.Strict{"owner": id + "#1"})
			c.end(t, p, id)
			_, err := p.Cancel(t.Context(), id, "ana", "again")
			require.NoError(t, err)
			for message, attribute := range map[string][2]any{
				"execution completed": {"result_type", c.result},
				"event emitted":       {"key", id},
				"locks released":      {"count", 1.0},
				"lane released":       {"lane", "thread:x"},
			} {
				records := l.Records(t, message)
				assert.Truef(t, len(records) == 1 && records[0]["execution_id"] == id &&
					records[0][attribute[0].(string)] == attribute[1], "%s: %v, want %v", message, records, attribute)
			}
			for _, released := range l.Records(t, "lane released") {
				assert.Truef(t, released["owner"] == id+"#1", "%v, want the owner %s#1", released, id)
			}
		})
	}
}

// The sweep releases and logs an expired lane before it passes the thread to the next sender.
func TestSweepReleasesThreadBeforeItsQueue(t *testing.T) {
	t.Parallel()
	l := &logLines{}
	p := newEngine(t, pgtest.DB(t), nil, l.capture)
	pgtest.Exec(t, p.pool, `insert into agent_threads (id, channel) values ('x', 'chat')`)
	first, ended := p.startExternal(t), p.startExternal(t)
	send := func(id, owner string) executions.RunLock {
		lock := p.lock(t, id, owner)
		pgtest.Exec(t, p.pool, `
			select lanekeeper.send_agent_message('x', x.id, x.claim, 'hello') from agent_executions x where x.id = $1`, id)
		return lock
	}
	send(first, "one")
	lock := send(ended, "two")
	_, _, err := p.UnlockRun(t.Context(), ended, lock.LockID, executions.UnlockParams{Status: executions.Completed})
	require.NoError(t, err)
	pgtest.Exec(t, p.pool, `update agent_locks set expires_at = clock_timestamp() where lane = 'thread:x'`)
	require.NoError(t, p.Sweep(t.Context()))
	assert.Equal(t, 1, len(l.Records(t, "lane stale, clearing")))
	pgtest.Equal(t, p.pool, 0, `select count(*) from agent_messages where status = 'queued'`)
	pgtest.Equal(t, p.pool, 0, `select count(*) from agent_locks where lane = 'thread:x' and locked_by <> ''`)
}

func TestSweepLogsReleasedThreads(t *testing.T) {
	t.Parallel()
	l := &logLines{}
	p := newEngine(t, pgtest.DB(t), nil, l.capture)
	id := p.startExternal(t)
	pgtest.Exec(t, p.pool, `select acquire_agent_lock('thread:x', $1)`, id+"#1")
	pgtest.Exec(t, p.pool, `update agent_locks set expires_at = clock_timestamp() - interval '1 hour'
		where lane = 'thread:x'`)
	require.NoError(t, p.Sweep(t.Context()))
	freed := l.Records(t, "lane stale, clearing")
	assert.Truef(t, len(freed) == 1 && freed[0]["lane"] == "thread:x" && freed[0]["holder"] == id+"#1" &&
		freed[0]["age"] != nil, "%v", freed)
}
