package flows_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// example stands in for the testing.TB that an Example does not have.
type example struct {
	testing.TB

	ends []func()
}

func (e *example) Helper()                           {}
func (e *example) Context() context.Context          { return context.Background() }
func (e *example) Name() string                      { return "Example" }
func (e *example) Cleanup(end func())                { e.ends = append(e.ends, end) }
func (e *example) Logf(format string, args ...any)   { fmt.Printf(format+"\n", args...) }
func (e *example) Errorf(format string, args ...any) { fmt.Printf(format+"\n", args...) }
func (e *example) Error(args ...any)                 { fmt.Println(args...) }
func (e *example) Fatal(args ...any)                 { panic(fmt.Sprint(args...)) }
func (e *example) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// on runs an example on a new database, with the thread maria.
func on(show func(ctx context.Context, pool *pgxpool.Pool, engine *executions.Engine) error) {
	e := &example{}
	defer func() {
		for _, end := range slices.Backward(e.ends) {
			end()
		}
	}()
	pool := pgtest.DB(e)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := pool.Exec(ctx, `insert into agent_threads (id, channel, agent, owner, participant) values ('maria', 'chat', 'agent', 'test', 'Maria')`)
	if err != nil {
		fmt.Println(err)
		return
	}
	engine, err := executions.New(pool, executions.Options{
		Keeper: lanes.NewKeeper(pool, lanes.Options{}), SweepEvery: 100 * time.Millisecond, LeaseTTL: 20 * time.Second,
	})
	if err == nil {
		err = show(ctx, pool, engine)
	}
	if err != nil {
		fmt.Println(err)
	}
}

// running does something while an engine runs.
func running(ctx context.Context, engine *executions.Engine, do func(ctx context.Context) error) error {
	ctx, stop := context.WithCancel(ctx)
	group, inner := errgroup.WithContext(ctx)
	group.Go(func() error { return engine.Run(inner) })
	group.Go(func() error {
		defer stop()
		return do(inner)
	})
	return group.Wait()
}

// reach waits for an execution to reach a status.
func reach(ctx context.Context, pool *pgxpool.Pool, id string, want executions.Status) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		x, err := executions.Get(ctx, pool, id)
		switch {
		case err != nil:
			return err
		case x.Status == want:
			return nil
		case x.Status.Ended():
			return fmt.Errorf("execution %s is %s: %s", id, x.Status, deref(x.ErrorMessage))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("execution %s is %s, not %s", id, x.Status, want)
		}
	}
}
