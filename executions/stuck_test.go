package executions_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/trace"
)

// A process that is stopped in the middle of a step's transaction keeps its executions until the server ends that.
func TestWorkThatNobodyCanTakeOverIsTold(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	l := &lines{}
	p := prepare(t, pool, nil, l.into)
	lost := worker(t, pool)
	mustClaim(t, pool, pending(t, pool), lost)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }() // it was ended
	if _, err := tx.Exec(t.Context(), `select from agent_executions for key share`); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 minute'`)
	pid := value[int](t, tx, `select pg_backend_pid() from pg_sleep(1.1)`)
	for range 2 {
		if err := p.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	said := l.said(t, "lost executions not taken over yet, their rows are locked")
	if len(said) != 1 || said[0]["worker"] != "test" || said[0]["executions"] != 1.0 ||
		!strings.Contains(fmt.Sprint(said[0]["open_transactions"]), fmt.Sprintf("pid %d of ", pid)) {
		t.Errorf("after two sweeps it is told %v, want once, with the worker and session %d", said, pid)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null`); n != 0 {
		t.Errorf("%d executions are still the lost worker's", n)
	}
}

// A process that starts after an outage finds the workers of before, and says nothing of them until it has swept.
func TestNobodyIsWarnedOfWhatIsTakenOverNext(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	l := &lines{}
	p := prepare(t, pool, nil, l.into)
	mustClaim(t, pool, pending(t, pool), worker(t, pool))
	exec(t, pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 hour'`)
	err := p.Put(t.Context(), executions.Schedule{Name: "first", Flow: "heartbeat", Surface: trace.Heartbeat, Cron: "@every 1h", Timezone: "UTC"})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null`); n != 0 {
		t.Errorf("%d executions are still the lost worker's", n)
	}
	if said := l.said(t, "lost executions not taken over yet, their rows are locked"); len(said) != 0 {
		t.Errorf("it is told %v", said)
	}
}
