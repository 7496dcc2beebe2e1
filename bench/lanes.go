package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// laneBench measures the package lanes as it is shipped: pairs of acquire and release by callers who want
// different lanes, tries for a lane that is held, and how soon a waiter has what was released. The floor of a pair is
// one committed update of a row by as many callers, each its own row; that of a hand-over is the least that can be
// done with the same means. Floor and lanes take turns, so that a machine that others use as well disturbs both
// alike.
type laneBench struct {
	rounds   int
	lasts    time.Duration // of a turn
	tries    int
	handOver int // hand-overs
	others   int // lanes that are held meanwhile, in the second half
	pool     *pgxpool.Pool
	url      string
	errw     io.Writer
}

// laneCallers are how many callers there are at once.
var laneCallers = [...]int{1, 8, 32}

// laneAsked is which share of the floor is asked for.
var laneAsked = [...]float64{0.50, 0.40, 0.40}

// rates is one row of the table: how many a second in each turn, and the processor time of all of them.
type rates struct {
	callers     int
	others      int
	floor, ours []float64
	cpu         [2]cpuTime
	n           [2]int
}

func lanesBench(ctx context.Context, args []string, out, errw io.Writer) (err error) {
	b := laneBench{errw: errw}
	flags := flag.NewFlagSet("lanes", flag.ContinueOnError)
	flags.SetOutput(errw)
	flags.IntVar(&b.rounds, "rounds", 7, "turns of the floor and of the lanes, each")
	flags.DurationVar(&b.lasts, "for", 2*time.Second, "how long a turn lasts")
	flags.IntVar(&b.tries, "tries", 16_000, "tries for a lane that is held")
	flags.IntVar(&b.handOver, "handovers", 200, "hand-overs to a waiter")
	flags.IntVar(&b.others, "others", 10_000, "lanes that others hold in the second half")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.rounds < 1 || b.lasts <= 0 || b.tries < 1 || b.handOver < 1 || b.others < 0 {
		return errors.New("lanes: -rounds, -for, -tries and -handovers are above 0, -others is not below")
	}
	server, err := pgserver.Start(ctx, pgserver.Config{
		Ephemeral: true, Durable: true, Progress: func(line string) { fmt.Fprintln(errw, line) },
	})
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	b.url = server.URL()
	b.pool, err = postgres.Open(ctx, b.url, postgres.Options{MaxConns: int32(slices.Max(laneCallers[:])) + 4, ApplicationName: "bench"})
	if err != nil {
		return err
	}
	defer b.pool.Close()
	if _, err := migrations.Up(ctx, b.pool); err != nil {
		return err
	}
	return b.run(ctx, out)
}

// run measures and prints.
func (b *laneBench) run(ctx context.Context, out io.Writer) error {
	if err := b.prepare(ctx); err != nil {
		return err
	}
	var pairs []rates
	var over []handedOver
	var tried []triedBusy
	for _, others := range slices.Compact([]int{0, b.others}) {
		if err := b.holdOthers(ctx, others); err != nil {
			return err
		}
		for _, callers := range laneCallers {
			fmt.Fprintf(b.errw, "pairs, %d callers, %d other lanes held\n", callers, others)
			r, err := b.pairs(ctx, callers, others)
			if err != nil {
				return err
			}
			pairs = append(pairs, r)
		}
		fmt.Fprintf(b.errw, "tries and hand-overs, %d other lanes held\n", others)
		t, err := b.busyTries(ctx, others)
		if err != nil {
			return err
		}
		tried = append(tried, t)
		h, err := b.handOvers(ctx, others)
		if err != nil {
			return err
		}
		over = append(over, h)
	}
	b.print(out, pairs, tried, over)
	return nil
}

// prepare makes the rows of the floor.
func (b *laneBench) prepare(ctx context.Context) error {
	for _, sql := range []string{
		`create table bench_floor (name text primary key, n bigint not null default 0) with (fillfactor = 50)`,
		`insert into bench_floor (name) select 'x' || n from generate_series(0, 63) n`,
	} {
		if _, err := b.pool.Exec(ctx, sql); err != nil {
			return fmt.Errorf("make the floor: %w", err)
		}
	}
	return nil
}

// holdOthers has other lanes held by others for the rest of the run.
func (b *laneBench) holdOthers(ctx context.Context, n int) error {
	var held int
	err := b.pool.QueryRow(ctx, `
		select count(*) from generate_series(1, @n::int) n, lanekeeper.acquire_agent_lock('other:' || n, 'holder ' || n, 86400) a where a.acquired`,
		postgres.Strict{"n": n}).Scan(&held)
	if err != nil || held != n {
		return errors.Join(fmt.Errorf("hold other lanes: got %d of %d", held, n), err)
	}
	if _, err := b.pool.Exec(ctx, `vacuum analyze agent_locks`); err != nil {
		return fmt.Errorf("analyze the lanes: %w", err)
	}
	return nil
}

// newKeeper is the package under test as a process has it, but for the log, which nobody reads here.
func (b *laneBench) newKeeper(pool *pgxpool.Pool, listener *postgres.Listener) *lanes.Keeper {
	return lanes.NewKeeper(pool, lanes.Options{Listener: listener, Logger: slog.New(slog.DiscardHandler)})
}

// pairs measures one number of callers.
func (b *laneBench) pairs(ctx context.Context, callers, others int) (rates, error) {
	r := rates{callers: callers, others: others}
	ctx, stop := context.WithCancel(ctx)
	keeper := b.newKeeper(b.pool, nil)
	var running errgroup.Group
	running.Go(func() error { return keeper.Run(ctx) })
	floor := func(ctx context.Context, caller int) error {
		_, err := b.pool.Exec(ctx, `update bench_floor set n = n + 1 where name = @name`, postgres.Strict{"name": "x" + strconv.Itoa(caller)})
		return err
	}
	pair := func(ctx context.Context, caller int) error {
		lease, err := keeper.Acquire(ctx, "bench:"+strconv.Itoa(caller))
		if err != nil {
			return err
		}
		return lease.Release(ctx)
	}
	err := b.turns(ctx, &r, floor, pair)
	stop()
	return r, errors.Join(err, running.Wait())
}

// turns lets both have their turns, after a short one of each that is not counted.
func (b *laneBench) turns(ctx context.Context, r *rates, floor, ours func(ctx context.Context, caller int) error) error {
	for round := range b.rounds + 1 {
		lasts := b.lasts
		if round == 0 {
			lasts = min(lasts, time.Second)
		}
		for i, fn := range []func(context.Context, int) error{floor, ours} {
			before, err := cpu(ctx, b.pool)
			if err != nil {
				return err
			}
			n, rate, err := during(ctx, r.callers, lasts, fn)
			if err != nil {
				return err
			}
			after, err := cpu(ctx, b.pool)
			if err != nil {
				return err
			}
			if round == 0 {
				continue
			}
			used := after.minus(before)
			r.cpu[i].server += used.server
			r.cpu[i].own += used.own
			r.n[i] += n
			if i == 0 {
				r.floor = append(r.floor, rate)
			} else {
				r.ours = append(r.ours, rate)
			}
		}
	}
	return nil
}

// during has so many callers call fn again and again for so long: how often it was called, and how often a second.
func during(ctx context.Context, callers int, lasts time.Duration, fn func(ctx context.Context, caller int) error) (int, float64, error) {
	var done atomic.Int64
	began := time.Now()
	end := began.Add(lasts)
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

// triedBusy is how tries for a lane that is held fared.
type triedBusy struct {
	others, n int
	rate      float64
	wal       int64 // bytes the server wrote meanwhile
}

// busyTries tries again and again for a lane that is held. The server writes on its own account now and then, as when
// it has cleaned up; what the tries write they would write each time, so the least of several goes counts.
func (b *laneBench) busyTries(ctx context.Context, others int) (triedBusy, error) {
	t := triedBusy{others: others, n: b.tries, wal: -1}
	keeper := b.newKeeper(b.pool, nil)
	lease, err := keeper.Acquire(ctx, "bench:busy")
	if err != nil {
		return t, err
	}
	try := func(ctx context.Context, _ int) error {
		l, err := keeper.Acquire(ctx, "bench:busy")
		if err == nil {
			return errors.Join(errors.New("a lane was granted twice"), l.Release(ctx))
		}
		if errors.Is(err, lanes.ErrBusy) {
			return nil
		}
		return err
	}
	for range 5 {
		before, err := b.wal(ctx)
		if err != nil {
			return t, err
		}
		began := time.Now()
		if err := spread(ctx, 8, b.tries, try); err != nil {
			return t, err
		}
		rate := float64(b.tries) / time.Since(began).Seconds()
		after, err := b.wal(ctx)
		if err != nil {
			return t, err
		}
		if t.wal < 0 || after-before < t.wal {
			t.wal, t.rate = after-before, rate
		}
	}
	return t, lease.Release(ctx)
}

// wal is how far the server has written its log.
func (b *laneBench) wal(ctx context.Context) (at int64, err error) {
	err = b.pool.QueryRow(ctx, `select (pg_current_wal_insert_lsn() - '0/0')::bigint`).Scan(&at)
	if err != nil {
		return 0, fmt.Errorf("read the place in the WAL: %w", err)
	}
	return at, nil
}

// handedOver is how long it took from a release until the waiter had the lane.
type handedOver struct {
	others      int
	floor, ours samples
}

// settledFor is how long a waiter is left alone before the release: its second look, which it takes without being
// woken, is over by then, so that what is measured is the waking.
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

// handFloor is the least that hands a row over: an update that notifies, and an update by who has heard of it, both
// committed.
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
