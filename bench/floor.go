package main

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// floor is the least that can be done to have a durable event handled: a row is inserted and announced with NOTIFY in
// one committed statement, and whoever hears of it marks it as consumed in another.
type floor struct {
	pool *pgxpool.Pool

	mu   sync.Mutex
	told map[string]chan time.Time
	next int
	stop func()
}

// begin makes the table and listens, on a connection of its own.
func (f *floor) begin(ctx context.Context) error {
	if _, err := f.pool.Exec(ctx, `create table bench_events (key text primary key, consumed_at timestamptz)`); err != nil {
		return err
	}
	conn, err := postgres.Dialer(f.pool)(ctx)
	if err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, `listen bench_events`); err != nil {
		return errors.Join(err, conn.Close(ctx))
	}
	f.told = map[string]chan time.Time{}
	listening, stop := context.WithCancel(ctx)
	heard := make(chan string, atOnce)
	var at sync.WaitGroup
	for range atOnce {
		at.Go(func() {
			for key := range heard {
				f.consume(listening, key)
			}
		})
	}
	at.Go(func() { hear(listening, conn, heard) })
	f.stop = func() {
		stop()
		at.Wait()
	}
	return nil
}

func (f *floor) end() { f.stop() }

// hear passes notifications on until ctx ends.
func hear(ctx context.Context, conn *pgx.Conn, heard chan<- string) {
	defer close(heard)
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return // whoever waits for an answer ends with ctx as well
		}
		heard <- n.Payload
	}
}

// consume marks a row, and tells who inserted it.
func (f *floor) consume(ctx context.Context, key string) {
	_, err := f.pool.Exec(ctx, `update bench_events set consumed_at = clock_timestamp() where key = @key`, postgres.Strict{"key": key})
	if err != nil {
		return
	}
	at := time.Now()
	f.mu.Lock()
	told := f.told[key]
	delete(f.told, key)
	f.mu.Unlock()
	if told != nil {
		told <- at
	}
}

// run sends n events by so many callers, each of which waits until its event is consumed.
func (f *floor) run(ctx context.Context, callers, n int) (samples, error) {
	first := f.next
	f.next += n
	took := make(samples, n)
	err := spread(ctx, callers, n, func(ctx context.Context, i int) error {
		key, told := strconv.Itoa(first+i), make(chan time.Time, 1)
		f.mu.Lock()
		f.told[key] = told
		f.mu.Unlock()
		began := time.Now()
		_, err := f.pool.Exec(ctx, `
			with v as (insert into bench_events (key) values (@key) returning key) select pg_notify('bench_events', key) from v`,
			postgres.Strict{"key": key})
		if err != nil {
			return err
		}
		select {
		case at := <-told:
			took[i] = at.Sub(began)
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return took, err
}

// measure takes the floor of single events, and of as many as are woken together.
func (f *floor) measure(ctx context.Context, events, all int, r *waitResult) (err error) {
	if r.floors[0], err = f.run(ctx, 1, events); err != nil {
		return err
	}
	if r.floors[1], err = f.run(ctx, atOnce, events); err != nil {
		return err
	}
	began := time.Now()
	_, err = f.run(ctx, atOnce, all)
	r.floorAll = time.Since(began)
	return err
}
