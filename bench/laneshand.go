package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// handedOver is how long it took from a release until the waiter had the lane.
type handedOver struct {
	others      int
	floor, ours samples
}

// settledFor is how long a waiter is left alone before the release: its second look, which it takes without being woken, is
// over by then, so that what is measured is the waking.
const settledFor = 60 * time.Millisecond

// handOvers hands a lane to a waiter of another process: it has a pool, a listener and a keeper of its own.
func (b *laneBench) handOvers(ctx context.Context, others int) (handedOver, error) {
	h := handedOver{others: others}
	pool, err := postgres.Open(ctx, b.url, postgres.Options{MaxConns: 4, ApplicationName: "bench waiter"})
	if err != nil {
		return h, err
	}
	defer pool.Close()
	listener := postgres.NewListener(postgres.Dialer(pool), slog.New(slog.DiscardHandler))
	listening, stop := context.WithCancel(ctx)
	var running errgroup.Group
	running.Go(func() error { return listener.Run(listening) })
	floor, err := b.newHandFloor(ctx)
	if err == nil {
		here, there := b.newKeeper(b.pool, nil), b.newKeeper(pool, listener)
		running.Go(func() error { return there.Run(listening) })
		for range b.handOver {
			var took time.Duration
			if took, err = floor.once(ctx); err != nil {
				break
			}
			h.floor = append(h.floor, took)
			if took, err = b.handOnce(ctx, here, there); err != nil {
				break
			}
			h.ours = append(h.ours, took)
		}
		err = errors.Join(err, floor.end(ctx))
	}
	stop()
	return h, errors.Join(err, running.Wait())
}

// handOnce is one hand-over.
func (b *laneBench) handOnce(ctx context.Context, here, there *lanes.Keeper) (time.Duration, error) {
	lease, err := here.Acquire(ctx, "bench:handover")
	if err != nil {
		return 0, err
	}
	var got time.Time
	var waiting errgroup.Group
	waiting.Go(func() error {
		next, err := there.AcquireWait(ctx, "bench:handover")
		if err != nil {
			return err
		}
		got = time.Now()
		return next.Release(ctx)
	})
	err = b.untilWaiting(ctx)
	began := time.Now()
	err = errors.Join(err, lease.Release(ctx), waiting.Wait())
	return got.Sub(began), err
}

// untilWaiting returns when the waiter is in the queue and has settled.
func (b *laneBench) untilWaiting(ctx context.Context) error {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for there := false; !there; {
		err := b.pool.QueryRow(ctx, `select exists (select from agent_lock_waiters w where w.lane = 'bench:handover')`).Scan(&there)
		if err != nil {
			return fmt.Errorf("look for the waiter: %w", err)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	settled := time.NewTimer(settledFor)
	defer settled.Stop()
	select {
	case <-settled.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// handFloor is the least that hands a row over: an update that notifies, and an update by who has heard of it, both committed.
type handFloor struct {
	bench  *laneBench
	listen *pgx.Conn
}

func (b *laneBench) newHandFloor(ctx context.Context) (*handFloor, error) {
	conn, err := postgres.Dialer(b.pool)(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, `listen bench_floor`); err != nil {
		return nil, errors.Join(err, conn.Close(ctx))
	}
	return &handFloor{bench: b, listen: conn}, nil
}

func (f *handFloor) end(ctx context.Context) error { return f.listen.Close(context.WithoutCancel(ctx)) }

func (f *handFloor) once(ctx context.Context) (time.Duration, error) {
	var got time.Time
	var waiting errgroup.Group
	waiting.Go(func() error {
		if _, err := f.listen.WaitForNotification(ctx); err != nil {
			return err
		}
		_, err := f.bench.pool.Exec(ctx, `update bench_floor set n = n + 1 where name = 'x0'`)
		got = time.Now()
		return err
	})
	began := time.Now()
	_, err := f.bench.pool.Exec(ctx, `
		with freed as (update bench_floor set n = n + 1 where name = 'x0' returning name) select pg_notify('bench_floor', name) from freed`)
	err = errors.Join(err, waiting.Wait())
	return got.Sub(began), err
}

// median is the middle of what was measured.
func median(of []float64) float64 {
	sorted := slices.Sorted(slices.Values(of))
	if len(sorted) == 0 {
		return 0
	}
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// print writes the tables.
func (b *laneBench) print(out io.Writer, pairs []rates, tried []triedBusy, over []handedOver) {
	var t strings.Builder
	fmt.Fprintf(&t, "Acquire and release of distinct lanes by package lanes; medians of %d turns of %s, floor and lanes one after the other; %d processors.\n\n",
		b.rounds, b.lasts, runtime.NumCPU())
	t.WriteString("| callers | other lanes held | floor: UPDATE committed/s | pairs/s | ratio of medians | asked | median of ratios | processor: UPDATE | pair |\n")
	t.WriteString("|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range pairs {
		shares := make([]float64, len(r.ours))
		for i := range r.ours {
			shares[i] = r.ours[i] / r.floor[i]
		}
		fmt.Fprintf(&t, "| %d | %d | %.0f | %.0f | %.2f | %.2f | %.2f | %s | %s |\n", r.callers, r.others, median(r.floor), median(r.ours),
			median(r.ours)/median(r.floor), laneAsked[slices.Index(laneCallers[:], r.callers)], median(shares), r.cpu[0].per(max(r.n[0], 1)), r.cpu[1].per(max(r.n[1], 1)))
	}
	t.WriteString("\n| tries for a lane that is held, 8 callers | other lanes held | tries/s | bytes of WAL |\n|---|---|---|---|\n")
	for _, r := range tried {
		fmt.Fprintf(&t, "| %d | %d | %.0f | %d |\n", r.n, r.others, r.rate, r.wal)
	}
	ms := func(s samples, q float64) string { return fmt.Sprintf("%.2f", s.at(q).Seconds()*1000) }
	t.WriteString("\n| ms from the release until the waiter has it | other lanes held | n | p50 | p99 | × floor p50 | p99 |\n|---|---|---|---|---|---|---|\n")
	for _, h := range over {
		fmt.Fprintf(&t, "| floor: UPDATE and NOTIFY → UPDATE | %d | %d | %s | %s | | |\n", h.others, len(h.floor), ms(h.floor, 0.5), ms(h.floor, 0.99))
		fmt.Fprintf(&t, "| Release → AcquireWait returns | %d | %d | %s | %s | %.2f | %.2f |\n", h.others, len(h.ours), ms(h.ours, 0.5), ms(h.ours, 0.99),
			ratio(h.ours, h.floor, 0.5), ratio(h.ours, h.floor, 0.99))
	}
	fmt.Fprint(out, t.String())
}
