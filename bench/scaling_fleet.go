package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	memberPool    = 8 // connections of the pool of each process
	memberConns   = memberPool + 2
	memberWorkers = 10 // as AGENT_WORKERS
	memberName    = "bench member"
	ownName       = "bench" // of the measuring connections
)

// fleetCost is the server's cost of n processes.
type fleetCost struct {
	n            int
	connections  int
	idle         float64 // processor time of the server for each second, as a share of a core
	transactions float64 // a second, while idle
	paced        time.Duration
	backlog      time.Duration // processor time of the server for each execution
	backlogRate  float64       // executions a second
}

// newMember creates a node with its own pool. All members share this operating system process.
func (b *scalingBench) newMember(ctx context.Context) (*node, error) {
	opts := postgres.Options{MaxConns: memberPool, ApplicationName: memberName}
	pool, err := postgres.Open(ctx, b.pool.Config().ConnString(), opts)
	if err != nil {
		return nil, err
	}
	m, err := newNode(pool, memberWorkers)
	if err == nil {
		err = errors.Join(m.engine.Register(oneStep, stepsOf(1)), m.engine.Register(waitFlow, waitOnce))
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return m, nil
}

// waitOnce is a flow that waits for the event in its input.
func waitOnce(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	var key string
	if err := json.Unmarshal(input, &key); err != nil {
		return executions.Result{}, err
	}
	_, err := executions.Wait(ctx, "go", executions.Event(key, 0))
	return executions.Result{}, err
}

// withFleet runs n members while fn runs.
func (b *scalingBench) withFleet(ctx context.Context, n int, fn func(ctx context.Context, fleet []*node) error) error {
	var fleet []*node
	defer func() {
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
	}
	return runNodes(ctx, fleet, nil, func(ctx context.Context) error { return fn(ctx, fleet) })
}

// measureFleet measures n processes: idle, with a paced load, and with a backlog. With a size, it also delivers
// events to waiting executions.
func (b *scalingBench) measureFleet(ctx context.Context, n, size int) (cost fleetCost, err error) {
	cost.n = n
	err = b.withFleet(ctx, n, func(ctx context.Context, fleet []*node) error {
		if err := b.run(ctx, fleet, 5*n+200, 0); err != nil { // warm up
			return err
		}
		if err := b.measureIdle(ctx, &cost); err != nil {
			return err
		}
		paced := max(int(float64(b.rate)*b.loaded.Seconds()), 1)
		used, took, err := b.measureConnections(ctx, memberName, func() error {
			return b.run(ctx, fleet, paced, time.Second/time.Duration(b.rate))
		})
		if err != nil {
			return err
		}
		cost.paced = (used - time.Duration(cost.idle*float64(took))) / time.Duration(paced)
		if err := b.measureBacklog(ctx, fleet, size, &cost); err != nil || size < 0 {
			return err
		}
		b.eventTimes[size], err = b.measureEvents(ctx, fleet[0], size)
		return err
	})
	return cost, err
}

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
	used, took, err := b.measureConnections(ctx, memberName, func() error { return pause(ctx, b.idle) })
	if err != nil {
		return err
	}
	if err := b.pool.QueryRow(ctx, count).Scan(&cost.connections, &after); err != nil {
		return err
	}
	cost.idle, cost.transactions = used.Seconds()/took.Seconds(), float64(after-before)/took.Seconds()
	return nil
}

// measureBacklog starts all executions at once. With a size, it also measures the bytes of ended executions: of half as
// many first, then of all.
func (b *scalingBench) measureBacklog(ctx context.Context, fleet []*node, size int, cost *fleetCost) error {
	ended := nounSize{name: "an execution of one step that has ended"}
	var before relationSize
	for i, n := range []int{b.backlog / 2, b.backlog} {
		start, err := b.size(ctx, everything)
		if err != nil {
			return err
		}
		used, took, err := b.measureConnections(ctx, memberName, func() error { return b.run(ctx, fleet, n, 0) })
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
		b.sizes = append(b.sizes, ended)
	}
	return nil
}

// measureEvents delivers events to a sample of all waiting executions, and waits until the sample has ended.
func (b *scalingBench) measureEvents(ctx context.Context, m *node, size int) (time.Duration, error) {
	n := min(int(b.scales[size].waiting/20), 1000)
	step := b.scales[size].waiting / int64(n)
	deliver := func() error {
		err := callAll(ctx, 4, n, func(ctx context.Context, i int) error {
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
		return pollQuery(ctx, b.pool, nothingRuns)
	}
	used, _, err := b.measureConnections(ctx, memberName, deliver)
	return used / time.Duration(n), err
}

// run starts n executions in turn on all members, at the pace if it is not 0, and waits for their ends.
func (b *scalingBench) run(ctx context.Context, fleet []*node, n int, pace time.Duration) error {
	start := func(ctx context.Context, i int) error {
		m := fleet[i%len(fleet)]
		for {
			_, _, err := m.engine.Start(ctx, m.pool, executions.Spec{Flow: oneStep, Surface: trace.Flow})
			if !postgres.Locked(err) {
				return err
			}
			b.lockedStarts.Add(1)
		}
	}
	if pace == 0 {
		if err := callAll(ctx, 32, n, start); err != nil {
			return err
		}
		return pollQuery(ctx, b.pool, nothingRuns)
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
	return pollQuery(ctx, b.pool, nothingRuns)
}

// measureConnections returns the elapsed time of fn and the processor time of the server's connections with that
// name. The server's background processes, such as autovacuum, do not count.
func (b *scalingBench) measureConnections(
	ctx context.Context, name string, fn func() error,
) (server, took time.Duration, err error) {
	before, err := b.connectionTimes(ctx, name)
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := fn(); err != nil {
		return 0, 0, err
	}
	took = time.Since(began)
	after, err := b.connectionTimes(ctx, name)
	for pid, used := range after {
		server += used - before[pid]
	}
	return server, took, err
}

// connectionTimes returns the processor time of each connection, by process ID.
func (b *scalingBench) connectionTimes(ctx context.Context, name string) (map[int]time.Duration, error) {
	rows, err := b.pool.Query(ctx, `select pid from pg_stat_activity where application_name = @name`,
		postgres.Strict{"name": name})
	pids, err := postgres.Collect(rows, err, "list connections", pgx.RowTo[int])
	if err != nil {
		return nil, err
	}
	used := make(map[int]time.Duration, len(pids))
	for _, pid := range pids {
		used[pid] = processTime(pid)
	}
	return used, nil
}

// processTime returns a process's processor time. On Linux, /proc/PID/schedstat has the time in nanoseconds, which
// matters for many connections with little work. Elsewhere the unit is a tick.
func processTime(pid int) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	if err != nil {
		p, _ := procStat(strconv.Itoa(pid))
		return p.used
	}
	first, _, _ := strings.Cut(string(text), " ")
	n, err := strconv.ParseInt(first, 10, 64)
	if err != nil {
		p, _ := procStat(strconv.Itoa(pid))
		return p.used
	}
	return time.Duration(n)
}
