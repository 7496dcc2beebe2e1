package executions_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// next is the state machine: which state may follow which.
var next = map[executions.Status][]executions.Status{
	executions.Pending:   {executions.Running, executions.Cancelled},
	executions.Running:   {executions.Waiting, executions.Completed, executions.Failed, executions.Timeout, executions.Cancelled},
	executions.Waiting:   {executions.Running, executions.Timeout, executions.Failed, executions.Cancelled},
	executions.Completed: nil, executions.Failed: nil, executions.Timeout: nil, executions.Cancelled: nil,
}

var states = slices.Sorted(maps.Keys(next))

// subject is an execution in a state, and what somebody who ran it last would know.
type subject struct {
	id    string
	claim int64
}

// inState makes an execution and brings it to a state by the public functions.
func inState(t *testing.T, db postgres.DB, s executions.Status) subject {
	t.Helper()
	x := subject{id: value[string](t, db, `
		insert into agent_executions (trace_id, surface, flow) values ($1, 'flow', 'states') returning id::text`, string(trace.New(trace.Flow)))}
	if s == executions.Pending {
		return x
	}
	if s == executions.Cancelled {
		exec(t, db, `select cancel_agent_execution($1::uuid, 'somebody', 'a reason')`, x.id)
		return x
	}
	w := value[string](t, db, `
		insert into agent_workers (expires_at) values (clock_timestamp() + interval '10 minutes') returning id::text`)
	x.claim = mustClaim(t, db, x.id, w)
	switch s {
	case executions.Running, executions.Pending, executions.Cancelled:
	case executions.Waiting:
		exec(t, db, `select lanekeeper.wait_agent_execution($1::uuid, $2, 'wait', 'event', $1::text, '1 hour', '{"why": "test"}')`, x.id, x.claim)
	case executions.Completed, executions.Failed, executions.Timeout:
		exec(t, db, `select lanekeeper.complete_agent_execution($1::uuid, $2, $3, 'said', null, $4, null)`, x.id, x.claim, string(s), "an error")
	}
	return x
}

// watchStates records every transition that is committed.
const watchStates = `
create table state_log (n bigint generated always as identity, id uuid, old text, new text);
create function watch_states() returns trigger language plpgsql as $$
begin insert into state_log (id, old, new) values (new.id, old.status, new.status); return null; end $$;
create trigger watch_states after update of status on agent_executions for each row when (old.status <> new.status)
  execute function watch_states()`

// whole is everything about an execution.
func whole(t *testing.T, db postgres.DB, id string) string {
	t.Helper()
	return value[string](t, db, `select to_jsonb(x)::text || x.xmin::text from agent_executions x where x.id = $1::uuid`, id)
}

// terminal fails unless the record of an ended execution is complete, and its end was emitted once; for one that lives,
// not at all.
func terminal(t *testing.T, db postgres.DB, id string) {
	t.Helper()
	x := get(t, db, id)
	types := map[executions.Status]string{
		executions.Completed: "success", executions.Failed: "failure", executions.Timeout: "timeout", executions.Cancelled: "cancelled",
	}
	if str(x.ResultType) != types[x.Status] || (x.CompletedAt != nil) != x.Status.Ended() {
		t.Errorf("%s: result type %q, completed at %v", x.Status, str(x.ResultType), x.CompletedAt)
	}
	if x.ClaimedBy != nil && x.Status != executions.Running {
		t.Errorf("%s, and claimed by %s", x.Status, *x.ClaimedBy)
	}
	if waits := x.WaitingUntil != nil; waits != (x.Status == executions.Waiting) { // plain SQL need not say for what
		t.Errorf("%s: waiting for %q until %v", x.Status, str(x.WaitingFor), x.WaitingUntil)
	}
	want := 0
	if x.Status.Ended() {
		want = 1
	}
	if got := completions(t, db, id); got != want {
		t.Errorf("%s: AGENT_COMPLETED %d times", x.Status, got)
	}
}

// Plain SQL: of all 49 pairs of states only the legal ones pass; what is refused changes nothing.
func TestPlainSQLChangesStatesOnlyAsTheyMay(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, from := range states {
		for _, to := range states {
			if from == to {
				continue
			}
			x := inState(t, pool, from)
			before := whole(t, pool, x.id)
			_, err := pool.Exec(t.Context(), `update agent_executions set status = $2 where id = $1::uuid`, x.id, string(to))
			if !slices.Contains(next[from], to) {
				if !postgres.IsCode(err, "LK002") || whole(t, pool, x.id) != before {
					t.Errorf("%s to %s: %v; from %s to %s", from, to, err, before, whole(t, pool, x.id))
				}
				continue
			}
			if got := get(t, pool, x.id); err != nil || got.Status != to {
				t.Errorf("%s to %s: %v, it is %s", from, to, err, got.Status)
			}
			terminal(t, pool, x.id)
		}
	}
}

// deed is something that is done to an execution by a function of the database, and where it leads from each state in
// which it does anything.
type deed struct {
	sql   string
	args  int // how many of id, claim
	leads map[executions.Status]executions.Status
}

var deeds = map[string]deed{
	"claim": {
		`select lanekeeper.claim_agent_execution($1::uuid, (select id from agent_workers order by expires_at desc limit 1))`, 1,
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
			executions.Pending: executions.Cancelled, executions.Running: executions.Cancelled, executions.Waiting: executions.Cancelled,
		},
	},
	"park": {
		`select lanekeeper.wait_agent_execution($1::uuid, $2, 'wait', 'event', $1::text, '1 hour', null)`, 2,
		map[executions.Status]executions.Status{executions.Running: executions.Waiting},
	},
	"resume": {
		`select lanekeeper.resume_agent_execution(x.id, x.wait_number, '{}') from agent_executions x where x.id = $1::uuid`, 1,
		map[executions.Status]executions.Status{executions.Waiting: executions.Running},
	},
	"deliver": {
		`select deliver_agent_event('EVENT_COMPLETED', $1::text)`, 1,
		map[executions.Status]executions.Status{executions.Waiting: executions.Running},
	},
	"hand back": {`select lanekeeper.release_agent_claim($1::uuid, $2)`, 2, nil},
	"lose": {
		`select lanekeeper.lose_agent_claims(claimed_by) from agent_executions where id = $1::uuid and claimed_by is not null`, 1, nil,
	},
	"checkpoint": {`insert into agent_checkpoints (execution_id, step, claim) values ($1::uuid, 'late', $2)`, 2, nil},
	"wake":       {`select lanekeeper.deliver_agent_completion($1::uuid)`, 1, nil},
}

func (d deed) do(ctx context.Context, db postgres.DB, x subject) error {
	_, err := db.Exec(ctx, d.sql, []any{x.id, x.claim}[:d.args]...)
	return err
}

// Every function in every state: it leads where the state machine says, or nowhere; and an ended row stays as it is.
func TestTheFunctionsChangeStatesOnlyAsTheyMay(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, d := range deeds {
		for _, from := range states {
			x := inState(t, pool, from)
			before := whole(t, pool, x.id)
			err := d.do(t.Context(), pool, x)
			if err != nil && !postgres.IsCode(err, "LK001") {
				t.Errorf("%s in %s: %v", name, from, err)
			}
			want, leads := d.leads[from]
			if !leads {
				want = from
			}
			if got := get(t, pool, x.id); got.Status != want || leads && err != nil {
				t.Errorf("%s in %s: %s, want %s; %v", name, from, got.Status, want, err)
			}
			if from.Ended() && whole(t, pool, x.id) != before {
				t.Errorf("%s changed a row that was %s", name, from)
			}
			terminal(t, pool, x.id)
		}
	}
}

// Two at the same moment, all pairs from all states that live: what is committed is a way through the state machine, with
// at most one end.
func TestTwoTransitionsRace(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	exec(t, pool, watchStates)
	for _, from := range []executions.Status{executions.Pending, executions.Running, executions.Waiting} {
		for first, one := range deeds {
			for second, two := range deeds {
				if first > second || one.leads[from] == "" && two.leads[from] == "" {
					continue
				}
				x := inState(t, pool, from)
				raced(t, pool, x, one, two)
				ways(t, pool, x.id, fmt.Sprintf("%s and %s in %s", first, second, from))
			}
		}
	}
}

// raced does two things at once. The losing one is refused, or finds nothing to do.
func raced(t *testing.T, pool *pgxpool.Pool, x subject, one, two deed) {
	t.Helper()
	group, ctx := errgroup.WithContext(t.Context())
	for _, d := range []deed{one, two} {
		group.Go(func() error {
			err := postgres.InTx(ctx, pool, func(tx pgx.Tx) error { return d.do(ctx, tx, x) })
			if postgres.IsCode(err, "LK001") || postgres.IsCode(err, "LK002") {
				return nil
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Errorf("%s\n%s\n%v", one.sql, two.sql, err)
	}
}

// ways checks what was committed of an execution's transitions.
func ways(t *testing.T, pool *pgxpool.Pool, id, what string) {
	t.Helper()
	rows, err := pool.Query(t.Context(), `select old, new from state_log where id = $1::uuid order by n`, id)
	if err != nil {
		t.Fatal(err)
	}
	type step struct{ Old, New executions.Status }
	steps, err := pgx.CollectRows(rows, pgx.RowToStructByPos[step])
	if err != nil {
		t.Fatal(err)
	}
	at := executions.Pending
	if len(steps) > 0 && steps[0].Old == executions.Running {
		at = executions.Running // it began claimed
	}
	for _, s := range steps {
		if s.Old != at || !slices.Contains(next[s.Old], s.New) {
			t.Errorf("%s: went %v", what, steps)
		}
		at = s.New
	}
	if got := get(t, pool, id); got.Status != at {
		t.Errorf("%s: is %s after %v", what, got.Status, steps)
	}
	terminal(t, pool, id)
}

// From Go: each legal transition, by the public API.
func TestGoReachesEveryState(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	exec(t, pool, watchStates)
	entered := make(chan struct{}, 1)
	wait := func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		return ends(executions.Wait(ctx, "wait", executions.Event(x.ID, time.Hour)))
	}
	idle := prepare(t, pool, flow(wait))
	id := idle.begin(t, "flow") // before anybody runs it
	if status, err := idle.Cancel(t.Context(), id, "somebody", "a reason"); err != nil || status != executions.Cancelled {
		t.Errorf("cancel of a pending execution: %s, %v", status, err)
	}
	p := start(t, pool, map[string]executions.Func{
		"complete": flow(func(context.Context) (executions.Result, error) { return executions.Result{Summary: "said"}, nil })["flow"],
		"fail":     flow(func(context.Context) (executions.Result, error) { return executions.Result{}, errors.New("no") })["flow"],
		"time out": flow(func(context.Context) (executions.Result, error) { return executions.Result{}, executions.ErrTimedOut })["flow"],
		"wait":     flow(wait)["flow"],
		"hang": flow(func(ctx context.Context) (executions.Result, error) {
			entered <- struct{}{}
			<-ctx.Done()
			return executions.Result{}, context.Cause(ctx)
		})["flow"],
	})
	until(t, pool, p.begin(t, "complete"), executions.Completed)
	queued, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "complete", Surface: trace.Flow, DedupeKey: "queued"})
	if err != nil || queued.Status != executions.Pending {
		t.Fatalf("a start that is not shared is %s, %v", queued.Status, err)
	}
	until(t, pool, queued.ID, executions.Completed)
	failed := until(t, pool, p.begin(t, "fail"), executions.Failed)
	if str(failed.ErrorMessage) != "no" {
		t.Errorf("error message %q", str(failed.ErrorMessage))
	}
	until(t, pool, p.begin(t, "time out"), executions.Timeout)
	resumed := p.begin(t, "wait")
	until(t, pool, resumed, executions.Waiting)
	if _, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", resumed, nil, ""); err != nil {
		t.Fatal(err)
	}
	until(t, pool, resumed, executions.Completed)
	for _, name := range []string{"wait", "hang"} {
		id := p.begin(t, name)
		if name == "wait" {
			until(t, pool, id, executions.Waiting)
		} else {
			receive(t, entered)
		}
		if status, err := p.Cancel(t.Context(), id, "somebody", "a reason"); err != nil || status != executions.Cancelled {
			t.Errorf("cancel of %s: %s, %v", name, status, err)
		}
		if x := get(t, pool, id); str(x.CancelledBy) != "somebody" || str(x.CancelReason) != "a reason" {
			t.Errorf("cancelled by %q because of %q", str(x.CancelledBy), str(x.CancelReason))
		}
	}
	all, err := executions.List(t.Context(), pool, executions.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range all {
		ways(t, pool, x.ID, x.Flow)
	}
}

// From Go: what is done to an ended execution answers its state and changes nothing.
func TestGoChangesNoEndedExecution(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, nil)
	for _, s := range states {
		if !s.Ended() {
			continue
		}
		x := inState(t, pool, s)
		before := whole(t, pool, x.id)
		if got, err := p.Cancel(t.Context(), x.id, "somebody else", "too late"); err != nil || got != s {
			t.Errorf("cancel of a %s execution: %s, %v", s, got, err)
		}
		if got, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", x.id, nil, ""); err != nil || len(got.Resumed) > 0 {
			t.Errorf("an event resumes a %s execution: %v, %v", s, got.Resumed, err)
		}
		if err := p.Sweep(t.Context()); err != nil {
			t.Error(err)
		}
		if after := whole(t, pool, x.id); after != before {
			t.Errorf("%s: from %s to %s", s, before, after)
		}
		terminal(t, pool, x.id)
	}
}

// An end is a fact: who waits for it after another has been told is told too.
func TestAnEndAnswersEveryoneWhoWaitsForIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	child := inState(t, pool, executions.Completed)
	for range 2 {
		x := inState(t, pool, executions.Running)
		if told := value[bool](t, pool, `
			select lanekeeper.wait_agent_execution($1::uuid, $2, 'wait', 'agent', $3::text, '1 hour', null) ->> 'event' = 'AGENT_COMPLETED'`,
			x.id, x.claim, child.id); !told {
			t.Error("one waits for an execution that has ended")
		}
	}
}
