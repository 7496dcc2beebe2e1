package operate

import (
	"context"
	"encoding/json"
	"log/slog"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// A run that resumes takes no step before it waits for leave. The lane that it took before it was resumed is freed
// all the same: it would else be kept for as long as the person takes.
func TestARunThatOnlyWaitsAgainFreesTheLaneThatItTookBefore(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	log := slog.New(slog.DiscardHandler)
	listener := postgres.NewListener(postgres.Dialer(pool), log)
	keeper := lanes.NewKeeper(pool, lanes.Options{Listener: listener, Logger: log})
	engine, err := executions.New(pool, executions.Options{Keeper: keeper, Listener: listener, Logger: log, Workers: 2})
	if err != nil {
		t.Fatal(err)
	}
	o := &Operate{log: log}
	freed := make(chan string, 1)
	err = engine.Register("waits", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		if current, _ := executions.Current(ctx); current.WaitNumber == 0 {
			if _, err := executions.Lane(ctx, Lane); err != nil {
				return executions.Result{}, err
			}
		}
		if _, err := executions.Wait(ctx, "first", executions.Event("first", time.Hour)); err != nil {
			return executions.Result{}, err
		}
		_, p := o.protect(ctx, nil)
		p.lend(ctx)
		var holder string
		err := pool.QueryRow(ctx, `select coalesce((select locked_by from agent_locks_live where lane = @lane), '')`,
			postgres.Strict{"lane": Lane}).Scan(&holder)
		freed <- holder
		return executions.Result{}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	over := make(chan error, 3)
	for _, run := range []func(context.Context) error{listener.Run, keeper.Run, engine.Run} {
		go func() { over <- run(ctx) }()
	}
	defer func() {
		stop()
		for range 3 {
			if err := <-over; err != nil {
				t.Error(err)
			}
		}
	}()
	if _, _, err := engine.Start(ctx, pool, executions.Spec{Flow: "waits", Surface: trace.Operate}); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, time.Minute, func() bool {
		var kept bool
		err := pool.QueryRow(ctx, `
			select exists (select from agent_executions e join agent_locks l on l.execution_id = e.id where e.status = 'waiting' and l.lane = @lane)`,
			postgres.Strict{"lane": Lane}).Scan(&kept)
		return err == nil && kept
	}, "the run waits and keeps the lane")
	if _, err := pool.Exec(ctx, `select deliver_agent_event('EVENT_COMPLETED', 'first', '{}')`); err != nil {
		t.Fatal(err)
	}
	select {
	case holder := <-freed:
		if holder != "" {
			t.Errorf("the lane is held by %s", holder)
		}
	case <-time.After(time.Minute):
		t.Fatal("the run did not go on")
	}
}
