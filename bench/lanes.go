package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// laneBench measures pairs of acquire and release on distinct lanes, attempts on a held lane, and the time from a
// release until a waiter holds the lane. The floor of a pair is one committed update per caller, each of its own row.
// Floor and lanes alternate, so other load on the machine affects both.
type laneBench struct {
	rounds        int
	roundDuration time.Duration
	tries         int
	handOvers     int // number of hand-overs
	otherLanes    int // other lanes held in the second half
	pool          *pgxpool.Pool
	stderr        io.Writer
}

var laneCallers = [...]int{1, 8, 32}

// laneTargets are the target shares of the floor, by laneCallers.
var laneTargets = [...]float64{0.50, 0.40, 0.40}

// series has the rate of each round, and the processor time and calls of all rounds.
type series struct {
	rates []float64
	cpu   cpuTime
	calls int
}

func (s *series) median() float64 { return median(s.rates) }

// cpuPerCall formats the processor time of a call.
func (s *series) cpuPerCall() string { return s.cpu.per(max(s.calls, 1)) }

// pairRates is a row of the table.
type pairRates struct {
	callers         int
	others          int // other held lanes
	floor, measured series
}

func lanesBench(ctx context.Context, args []string, out, stderr io.Writer) error {
	b := laneBench{stderr: stderr}
	flags := newFlags("lanes", stderr)
	flags.IntVar(&b.rounds, "rounds", 7, "rounds of the floor and of the lanes")
	flags.DurationVar(&b.roundDuration, "for", 2*time.Second, "duration of a round")
	flags.IntVar(&b.tries, "tries", 16_000, "attempts on a held lane")
	flags.IntVar(&b.handOvers, "handovers", 200, "hand-overs to a waiter")
	flags.IntVar(&b.otherLanes, "others", 10_000, "other lanes held in the second half")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.rounds < 1 || b.roundDuration <= 0 || b.tries < 1 || b.handOvers < 1 || b.otherLanes < 0 {
		return errors.New("lanes: -rounds, -for, -tries and -handovers must be above 0, -others at least 0")
	}
	return withDatabase(ctx, pgserver.Config{}, slices.Max(laneCallers[:])+4, stderr, func(pool *pgxpool.Pool) error {
		b.pool = pool
		return b.run(ctx, out)
	})
}

func (b *laneBench) run(ctx context.Context, out io.Writer) error {
	if err := createFloor(ctx, b.pool); err != nil {
		return err
	}
	var pairs []pairRates
	var handOverResults []handOverResult
	var busyResults []busyResult
	for _, others := range slices.Compact([]int{0, b.otherLanes}) {
		if err := b.holdOthers(ctx, others); err != nil {
			return err
		}
		for _, callers := range laneCallers {
			fmt.Fprintf(b.stderr, "pairs, %d callers, %d other lanes\n", callers, others)
			r, err := b.measurePairs(ctx, callers, others)
			if err != nil {
				return err
			}
			pairs = append(pairs, r)
		}
		fmt.Fprintf(b.stderr, "attempts and hand-overs, %d other lanes\n", others)
		t, err := b.measureBusy(ctx, others)
		if err != nil {
			return err
		}
		busyResults = append(busyResults, t)
		h, err := b.measureHandOvers(ctx, others)
		if err != nil {
			return err
		}
		handOverResults = append(handOverResults, h)
	}
	b.print(out, pairs, busyResults, handOverResults)
	return nil
}

// holdOthers holds n other lanes for the rest of the benchmark.
func (b *laneBench) holdOthers(ctx context.Context, n int) error {
	var held int
	err := b.pool.QueryRow(ctx, `
		select count(*) from generate_series(1, @n::int) n, lanekeeper.acquire_agent_lock('other:' || n, 'holder ' || n,
		  86400) a where a.acquired`,
		postgres.Strict{"n": n}).Scan(&held)
	if err != nil || held != n {
		return errors.Join(fmt.Errorf("hold other lanes: %d of %d", held, n), err)
	}
	if _, err := b.pool.Exec(ctx, `vacuum analyze agent_locks`); err != nil {
		return fmt.Errorf("analyze the lanes: %w", err)
	}
	return nil
}

// newKeeper returns a keeper that discards its log.
func (b *laneBench) newKeeper(pool *pgxpool.Pool, listener *postgres.Listener) *lanes.Keeper {
	return lanes.NewKeeper(pool, lanes.Options{Listener: listener, Logger: slog.New(slog.DiscardHandler)})
}

func (b *laneBench) measurePairs(ctx context.Context, callers, others int) (pairRates, error) {
	r := pairRates{callers: callers, others: others}
	ctx, stop := context.WithCancel(ctx)
	keeper := b.newKeeper(b.pool, nil)
	var running errgroup.Group
	running.Go(func() error { return keeper.Run(ctx) })
	floor := func(ctx context.Context, caller int) error { return updateFloor(ctx, b.pool, caller) }
	pair := func(ctx context.Context, caller int) error {
		lease, err := keeper.Acquire(ctx, "bench:"+strconv.Itoa(caller))
		if err != nil {
			return err
		}
		return lease.Release(ctx)
	}
	err := b.alternate(ctx, &r, floor, pair)
	stop()
	return r, errors.Join(err, running.Wait())
}

// alternate measures floor and fn in alternate rounds, after a short uncounted round of each.
func (b *laneBench) alternate(
	ctx context.Context, r *pairRates, floor, fn func(ctx context.Context, caller int) error,
) error {
	for round := range b.rounds + 1 {
		duration := b.roundDuration
		if round == 0 {
			duration = min(duration, time.Second)
		}
		for _, side := range []struct {
			series *series
			fn     func(context.Context, int) error
		}{{&r.floor, floor}, {&r.measured, fn}} {
			var n int
			var rate float64
			cpu, err := measureCPU(ctx, b.pool, func() (err error) {
				n, rate, err = callFor(ctx, r.callers, duration, side.fn)
				return err
			})
			if err != nil {
				return err
			}
			if round == 0 {
				continue
			}
			side.series.cpu.server += cpu.server
			side.series.cpu.own += cpu.own
			side.series.calls += n
			side.series.rates = append(side.series.rates, rate)
		}
	}
	return nil
}

type busyResult struct {
	others, n int
	rate      float64
	wal       int64 // bytes
}

// measureBusy tries to acquire a held lane in five passes. The server also writes WAL of its own, so the pass with the
// least WAL counts.
func (b *laneBench) measureBusy(ctx context.Context, others int) (busyResult, error) {
	t := busyResult{others: others, n: b.tries, wal: -1}
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
		if err := callAll(ctx, 8, b.tries, try); err != nil {
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

// wal returns the server's WAL position.
func (b *laneBench) wal(ctx context.Context) (position int64, err error) {
	err = b.pool.QueryRow(ctx, `select (pg_current_wal_insert_lsn() - '0/0')::bigint`).Scan(&position)
	if err != nil {
		return 0, fmt.Errorf("read the WAL position: %w", err)
	}
	return position, nil
}

// handOverResult has the times from a release until the waiter holds the lane.
type handOverResult struct {
	others          int
	floor, measured samples
}

// settledFor is a waiter's wait before the release. It exceeds the time of the first poll, so only the notification
// wakes the waiter.
const settledFor = 60 * time.Millisecond

// measureHandOvers hands a lane to a keeper with its own pool and listener, like a keeper of another process.
func (b *laneBench) measureHandOvers(ctx context.Context, others int) (handOverResult, error) {
	h := handOverResult{others: others}
	pool, err := postgres.Open(ctx, b.pool.Config().ConnString(),
		postgres.Options{MaxConns: 4, ApplicationName: "bench waiter"})
	if err != nil {
		return h, err
	}
	defer pool.Close()
	listener := postgres.NewListener(postgres.Dialer(pool), slog.New(slog.DiscardHandler))
	listening, stop := context.WithCancel(ctx)
	var running errgroup.Group
	running.Go(func() error { return listener.Run(listening) })
	floor, err := b.newHandOverFloor(ctx)
	if err == nil {
		holder, waiter := b.newKeeper(b.pool, nil), b.newKeeper(pool, listener)
		running.Go(func() error { return waiter.Run(listening) })
		for range b.handOvers {
			var elapsed time.Duration
			if elapsed, err = floor.run(ctx); err != nil {
				break
			}
			h.floor = append(h.floor, elapsed)
			if elapsed, err = b.handOverOnce(ctx, holder, waiter); err != nil {
				break
			}
			h.measured = append(h.measured, elapsed)
		}
		err = errors.Join(err, floor.listen.Close(context.WithoutCancel(ctx)))
	}
	stop()
	return h, errors.Join(err, running.Wait())
}

func (b *laneBench) handOverOnce(ctx context.Context, holder, waiter *lanes.Keeper) (time.Duration, error) {
	lease, err := holder.Acquire(ctx, "bench:handover")
	if err != nil {
		return 0, err
	}
	var acquiredAt time.Time
	var waiting errgroup.Group
	waiting.Go(func() error {
		next, err := waiter.AcquireWait(ctx, "bench:handover")
		if err != nil {
			return err
		}
		acquiredAt = time.Now()
		return next.Release(ctx)
	})
	err = b.untilWaiting(ctx)
	began := time.Now()
	err = errors.Join(err, lease.Release(ctx), waiting.Wait())
	return acquiredAt.Sub(began), err
}

// untilWaiting waits until the waiter is queued and has polled.
func (b *laneBench) untilWaiting(ctx context.Context) error {
	err := pollQuery(ctx, b.pool, `select exists (select from agent_lock_waiters w where w.lane = 'bench:handover')`)
	if err != nil {
		return fmt.Errorf("poll for the waiter: %w", err)
	}
	return pause(ctx, settledFor)
}

// handOverFloor is the minimum work of a handover: an update that notifies, and an update by the listener, both
// committed.
type handOverFloor struct {
	bench  *laneBench
	listen *pgx.Conn
}

func (b *laneBench) newHandOverFloor(ctx context.Context) (*handOverFloor, error) {
	conn, err := postgres.Dialer(b.pool)(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, `listen bench_floor`); err != nil {
		return nil, errors.Join(err, conn.Close(ctx))
	}
	return &handOverFloor{bench: b, listen: conn}, nil
}

func (f *handOverFloor) run(ctx context.Context) (time.Duration, error) {
	var got time.Time
	var waiting errgroup.Group
	waiting.Go(func() error {
		if _, err := f.listen.WaitForNotification(ctx); err != nil {
			return err
		}
		err := updateFloor(ctx, f.bench.pool, 0)
		got = time.Now()
		return err
	})
	began := time.Now()
	_, err := f.bench.pool.Exec(ctx, `
		with freed as (update bench_floor set n = n + 1 where id = 0 returning id) select pg_notify('bench_floor', id::text)
		  from freed`)
	err = errors.Join(err, waiting.Wait())
	return got.Sub(began), err
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	if len(sorted) == 0 {
		return 0
	}
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

func (b *laneBench) print(out io.Writer, pairs []pairRates, busy []busyResult, handOvers []handOverResult) {
	var t strings.Builder
	fmt.Fprintf(&t, "Acquire and release of distinct lanes by package lanes; medians of %d rounds of %s, floor and lanes "+
		"in alternate rounds; %d processors.\n\n",
		b.rounds, b.roundDuration, runtime.NumCPU())
	t.WriteString("| callers | other lanes held | floor: UPDATE committed/s | pairs/s | ratio of medians | target | " +
		"median of ratios | processor: UPDATE | pair |\n")
	t.WriteString("|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range pairs {
		ratios := make([]float64, len(r.measured.rates))
		for i := range ratios {
			ratios[i] = r.measured.rates[i] / r.floor.rates[i]
		}
		fmt.Fprintf(&t, "| %d | %d | %.0f | %.0f | %.2f | %.2f | %.2f | %s | %s |\n", r.callers, r.others,
			r.floor.median(), r.measured.median(),
			r.measured.median()/r.floor.median(), laneTargets[slices.Index(laneCallers[:], r.callers)], median(ratios),
			r.floor.cpuPerCall(), r.measured.cpuPerCall())
	}
	t.WriteString("\n| attempts on a held lane, 8 callers | other lanes held | attempts/s | bytes of WAL " +
		"|\n|---|---|---|---|\n")
	for _, r := range busy {
		fmt.Fprintf(&t, "| %d | %d | %.0f | %d |\n", r.n, r.others, r.rate, r.wal)
	}
	t.WriteString("\n| ms from the release until the waiter holds it | other lanes held | n | p50 | p99 | × floor p50 | " +
		"p99 |\n|---|---|---|---|---|---|---|\n")
	for _, h := range handOvers {
		fmt.Fprintf(&t, "| floor: UPDATE and NOTIFY → UPDATE | %d | %d | %s | %s | | |\n", h.others, len(h.floor),
			millis(h.floor.quantile(0.5)), millis(h.floor.quantile(0.99)))
		fmt.Fprintf(&t, "| Release → AcquireWait returns | %d | %d | %s | %s | %.2f | %.2f |\n", h.others, len(h.measured),
			millis(h.measured.quantile(0.5)), millis(h.measured.quantile(0.99)),
			ratio(h.measured, h.floor, 0.5), ratio(h.measured, h.floor, 0.99))
	}
	fmt.Fprint(out, t.String())
}
