package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	memberPool    = 8 // connections of the pool of each process
	memberConns   = memberPool + 2
	memberWorkers = 10 // as AGENT_WORKERS
	memberName    = "bench member"
	ownName       = "bench" // of what measures, and of pages
)

// fleetCost is what so many processes cost the server.
type fleetCost struct {
	n            int
	connections  int
	idle         float64 // processor time of the server for each second, as a share of a core
	transactions float64 // a second, while idle
	paced        time.Duration
	backlog      time.Duration // processor time of the server for each execution
	backlogRate  float64       // executions a second
}

// member is what one process of `agent serve` keeps at the database for its executions: a pool, a connection that
// listens, a lease that it renews, River, and the sweeps. All members share this operating system process.
type member struct {
	pool     *pgxpool.Pool
	listener *postgres.Listener
	keeper   *lanes.Keeper
	engine   *executions.Engine
}

// newMember connects one process.
func (b *scalingBench) newMember(ctx context.Context) (*member, error) {
	config := b.pool.Config()
	opts := postgres.Options{MaxConns: memberPool, ApplicationName: memberName}
	pool, err := postgres.Open(ctx, config.ConnString(), opts)
	if err != nil {
		return nil, err
	}
	log := slog.New(slog.DiscardHandler)
	m := &member{pool: pool, listener: postgres.NewListener(postgres.Dialer(pool), log)}
	m.keeper = lanes.NewKeeper(pool, lanes.Options{Listener: m.listener, Logger: log})
	m.engine, err = executions.New(pool, executions.Options{
		Keeper: m.keeper, Listener: m.listener, Logger: log, Workers: memberWorkers,
	})
	if err == nil {
		err = errors.Join(m.engine.Register(oneStep, stepsOf(1)), m.engine.Register(waitFlow, waitOnce))
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return m, nil
}

// waitOnce is a flow that waits for the event that its input names, without a bound.
func waitOnce(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	var key string
	if err := json.Unmarshal(input, &key); err != nil {
		return executions.Result{}, err
	}
	_, err := executions.Wait(ctx, "go", executions.Event(key, 0))
	return executions.Result{}, err
}

// withFleet runs so many members while fn does.
func (b *scalingBench) withFleet(
	ctx context.Context, n int, fn func(ctx context.Context, fleet []*member) error,
) (err error) {
	working, stop := context.WithCancel(ctx)
	living, end := context.WithCancel(context.WithoutCancel(ctx))
	var below, above errgroup.Group
	var fleet []*member
	defer func() {
		stop()
		err = errors.Join(err, above.Wait())
		end()
		err = errors.Join(err, below.Wait())
		for _, m := range fleet {
			m.pool.Close()
		}
	}()
	for range n {
		m, err := b.newMember(ctx)
		if err != nil {
			return err
		}
		fleet = append(fleet, m)
		below.Go(func() error { return m.listener.Run(living) })
		below.Go(func() error { return m.keeper.Run(living) })
		above.Go(func() error { return m.engine.Run(working) })
	}
	for _, m := range fleet {
		if err := (&world{engine: m.engine}).ready(ctx); err != nil {
			return err
		}
	}
	return fn(ctx, fleet)
}

// measureFleet measures so many processes: idle, under a paced load, and with a backlog. With a size, events are
// delivered to executions that wait in it.
func (b *scalingBench) measureFleet(ctx context.Context, n, size int) (cost fleetCost, err error) {
	cost.n = n
	err = b.withFleet(ctx, n, func(ctx context.Context, fleet []*member) error {
		if err := b.run(ctx, fleet, 5*n+200, 0); err != nil { // warm up
			return err
		}
		if err := b.measureIdle(ctx, &cost); err != nil {
			return err
		}
		paced := max(int(float64(b.rate)*b.loaded.Seconds()), 1)
		used, took, err := b.used(ctx, memberName, func() error {
			return b.run(ctx, fleet, paced, time.Second/time.Duration(b.rate))
		})
		if err != nil {
			return err
		}
		cost.paced = (used - time.Duration(cost.idle*float64(took))) / time.Duration(paced)
		if err := b.measureBacklog(ctx, fleet, size, &cost); err != nil || size < 0 {
			return err
		}
		b.events[size], err = b.measureEvents(ctx, fleet[0], size)
		return err
	})
	return cost, err
}

// measureIdle measures processes that have nothing to do.
func (b *scalingBench) measureIdle(ctx context.Context, cost *fleetCost) error {
	if err := pause(ctx, b.idle/10); err != nil {
		return err
	}
	const count = `select (select count(*) from pg_stat_activity where application_name = '` + memberName + `'),
		(select xact_commit + xact_rollback from pg_stat_database where datname = current_database())`
	var before, after int64
	if err := b.pool.QueryRow(ctx, count).Scan(&cost.connections, &before); err != nil {
		return err
	}
	used, took, err := b.used(ctx, memberName, func() error { return pause(ctx, b.idle) })
	if err != nil {
		return err
	}
	if err := b.pool.QueryRow(ctx, count).Scan(&cost.connections, &after); err != nil {
		return err
	}
	cost.idle, cost.transactions = used.Seconds()/took.Seconds(), float64(after-before)/took.Seconds()
	return nil
}

// measureBacklog starts all executions as fast as they can be started. With a size, what the ended executions leave on
// disk is measured too, of half as many first.
func (b *scalingBench) measureBacklog(ctx context.Context, fleet []*member, size int, cost *fleetCost) error {
	ended := grown{noun: "an execution of one step that has ended"}
	var before bytesOf
	for i, n := range []int{b.backlog / 2, b.backlog} {
		start, err := b.size(ctx, everything)
		if err != nil {
			return err
		}
		used, took, err := b.used(ctx, memberName, func() error { return b.run(ctx, fleet, n, 0) })
		if err != nil {
			return err
		}
		cost.backlog, cost.backlogRate = used/time.Duration(n), float64(n)/took.Seconds()
		after, err := b.size(ctx, everything)
		if err != nil {
			return err
		}
		before = after.minus(start)
		ended.rows[i], ended.size[i] = int64(n), before
	}
	if size == 1 {
		b.grown = append(b.grown, ended)
	}
	return nil
}

// measureEvents delivers events to executions that wait, spread over all of them, and waits for their ends.
func (b *scalingBench) measureEvents(ctx context.Context, m *member, size int) (time.Duration, error) {
	n := min(int(b.sizes[size].waiting/20), 1000)
	step := b.sizes[size].waiting / int64(n)
	deliver := func() error {
		err := spread(ctx, 4, n, func(ctx context.Context, i int) error {
			key := "scaling-" + strconv.FormatInt(int64(i)*step+int64(size), 10)
			got, err := m.engine.Deliver(ctx, m.pool, "EVENT_COMPLETED", key, nil, "")
			if err == nil && len(got.Resumed) != 1 {
				err = fmt.Errorf("event %d resumed %d executions", i, len(got.Resumed))
			}
			return err
		})
		if err != nil {
			return err
		}
		return untilTrue(ctx, b.pool, nothingRuns)
	}
	used, _, err := b.used(ctx, memberName, deliver)
	return used / time.Duration(n), err
}

// nothingRuns says that no execution is ready or under way.
const nothingRuns = `select not exists (select from agent_executions where status in ('pending', 'running'))`

// run starts n executions, each at another member in turn, and waits for their ends. With a pace, one starts each.
func (b *scalingBench) run(ctx context.Context, fleet []*member, n int, pace time.Duration) error {
	start := func(ctx context.Context, i int) error {
		m := fleet[i%len(fleet)]
		for {
			_, _, err := m.engine.Start(ctx, m.pool, executions.Spec{Flow: oneStep, Surface: trace.Flow})
			if !postgres.Locked(err) {
				return err
			}
			b.again.Add(1)
		}
	}
	if pace == 0 {
		if err := spread(ctx, 32, n, start); err != nil {
			return err
		}
		return untilTrue(ctx, b.pool, nothingRuns)
	}
	ticker := time.NewTicker(pace)
	defer ticker.Stop()
	group, starting := errgroup.WithContext(ctx)
	for i := range n {
		select {
		case <-ticker.C:
			group.Go(func() error { return start(starting, i) })
		case <-starting.Done():
			return group.Wait()
		}
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return untilTrue(ctx, b.pool, nothingRuns)
}

// used measures the time on the clock that fn takes, and the processor time of the server's connections of that name.
// What the server does beside, such as autovacuum and checkpoints, comes later or earlier, and is left out.
func (b *scalingBench) used(ctx context.Context, name string, fn func() error) (server, took time.Duration, err error) {
	before, err := b.connections(ctx, name)
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := fn(); err != nil {
		return 0, 0, err
	}
	took = time.Since(began)
	after, err := b.connections(ctx, name)
	for pid, used := range after {
		server += used - before[pid]
	}
	return server, took, err
}

// connections is the processor time so far of each connection of that name, by its process.
func (b *scalingBench) connections(ctx context.Context, name string) (map[int]time.Duration, error) {
	rows, err := b.pool.Query(ctx, `select pid from pg_stat_activity where application_name = @name`,
		postgres.Strict{"name": name})
	if err != nil {
		return nil, fmt.Errorf("list connections: %w", err)
	}
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		return nil, fmt.Errorf("list connections: %w", err)
	}
	used := make(map[int]time.Duration, len(pids))
	for _, pid := range pids {
		used[pid] = preciseTime(pid)
	}
	return used, nil
}

// preciseTime is the processor time of a process. Linux has it in nanoseconds in /proc/PID/schedstat, which matters
// where hundreds of connections do little each; elsewhere it is that of /proc/PID/stat.
func preciseTime(pid int) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	if err != nil {
		return processTime(pid)
	}
	first, _, _ := strings.Cut(string(text), " ")
	n, err := strconv.ParseInt(first, 10, 64)
	if err != nil {
		return processTime(pid)
	}
	return time.Duration(n)
}
