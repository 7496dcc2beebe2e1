package main

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// poll calls check at each interval until it returns true.
func poll(ctx context.Context, interval time.Duration, check func() (done bool, err error)) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if done, err := check(); err != nil || done {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// pollQuery polls until the query returns true.
func pollQuery(ctx context.Context, pool *pgxpool.Pool, query string) error {
	return poll(ctx, 10*time.Millisecond, func() (done bool, err error) {
		err = pool.QueryRow(ctx, query).Scan(&done)
		return done, err
	})
}

// callAll calls fn for 0 to n-1 from a number of concurrent callers.
func callAll(ctx context.Context, callers, n int, fn func(ctx context.Context, i int) error) error {
	var next atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	for range callers {
		group.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return nil
				}
				if err := fn(ctx, i); err != nil {
					return err
				}
			}
		})
	}
	return group.Wait()
}

func pause(ctx context.Context, d time.Duration) error {
	if !sleep.For(ctx, d) {
		return ctx.Err()
	}
	return nil
}

// callFor makes a number of concurrent callers call fn repeatedly. It returns the number of calls and their rate per
// second.
func callFor(
	ctx context.Context, callers int, duration time.Duration, fn func(ctx context.Context, caller int) error,
) (int, float64, error) {
	var done atomic.Int64
	began := time.Now()
	end := began.Add(duration)
	group, ctx := errgroup.WithContext(ctx)
	for caller := range callers {
		group.Go(func() error {
			n := int64(0)
			defer func() { done.Add(n) }()
			for time.Now().Before(end) {
				if err := fn(ctx, caller); err != nil {
					return err
				}
				n++
			}
			return nil
		})
	}
	err := group.Wait()
	return int(done.Load()), float64(done.Load()) / time.Since(began).Seconds(), err
}

// nothingRuns: no execution is pending or running. allFinished: none is waiting either.
const (
	nothingRuns = `select not exists (select from agent_executions where status in ('pending', 'running'))`
	allFinished = `select not exists (select from agent_executions where status in ('pending', 'running', 'waiting'))`
)

// createFloor creates the rows of the floor. A committed update is the minimum cost of a durable operation.
func createFloor(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, `create table bench_floor (id int primary key, n bigint not null) with (fillfactor = 50)`)
	if err == nil {
		_, err = pool.Exec(ctx, `insert into bench_floor select g, 0 from generate_series(0, 99) g`)
	}
	return err
}

func updateFloor(ctx context.Context, pool *pgxpool.Pool, id int) error {
	_, err := pool.Exec(ctx, `update bench_floor set n = n + 1 where id = @id`, postgres.Strict{"id": id})
	return err
}
