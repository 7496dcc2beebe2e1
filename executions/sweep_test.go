package executions_test

import (
	"context"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// While somebody holds the row of a timer that is due, sweeps come less often; when it is free, the next one is no longer waited for.
func TestATimerThatASweepLeavesIsNotSweptForAllTheTime(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, flow(nothing))
	for range 2 {
		p.begin(t, "flow")
	}
	exec(t, pool, `update agent_executions set status = 'running'`)
	exec(t, pool, `
		update agent_executions set status = 'waiting', waiting_for = 'delay', waiting_step = 'w',
		       waiting_until = clock_timestamp() - row_number * interval '1 hour'
		  from (select id as which, row_number() over (order by id) from agent_executions) n where id = which`)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	exec(t, tx, `select from agent_executions for update`)
	sweep := func() {
		t.Helper()
		if err := p.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	sweep()
	if got := p.SweepPause(); got != time.Millisecond {
		t.Errorf("sleeps for %s after the first sweep that left it", got)
	}
	for range 10 {
		sweep()
	}
	if got := p.SweepPause(); got != 64*time.Millisecond {
		t.Errorf("sleeps for %s after many sweeps that left it", got)
	}
	exec(t, tx, `update agent_executions set waiting_until = clock_timestamp() + interval '1 day' where waiting_until = (select min(waiting_until) from agent_executions)`)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	sweep()
	if got := p.SweepPause(); got < time.Minute {
		t.Errorf("sleeps for %s though nothing is due", got)
	}
}
