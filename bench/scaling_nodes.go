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
	nodePoolSize = 8 // connections of the pool of each process
	connsPerNode = nodePoolSize + 2
	nodeWorkers  = 10 // as AGENT_WORKERS
	nodeName     = "bench node"
	benchName    = "bench" // of the measuring connections
)

// nodesCost is the database load caused by n processes.
type nodesCost struct {
	n            int
	connections  int
	idle         float64       // server CPU while idle, in cores
	transactions float64       // per second, while idle
	paced        time.Duration // server CPU per execution under the paced load, above idle
	backlog      time.Duration // server CPU per execution of the backlog
	backlogRate  float64       // executions of the backlog per second
}

// openNode opens a node with its own pool. All nodes share this operating system process.
func (b *scalingBench) openNode(ctx context.Context) (*node, error) {
	opts := postgres.Options{MaxConns: nodePoolSize, ApplicationName: nodeName}
	pool, err := postgres.Open(ctx, b.pool.Config().ConnString(), opts)
	if err != nil {
		return nil, err
	}
	n, err := newNode(pool, nodeWorkers)
	if err == nil {
		err = errors.Join(n.engine.Register(oneStep, stepFlow(1)), n.engine.Register(waitFlow, waitForEvent))
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return n, nil
}

// waitForEvent is a flow that waits for the event in its input.
func waitForEvent(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	var key string
	if err := json.Unmarshal(input, &key); err != nil {
		return executions.Result{}, err
	}
	_, err := executions.Wait(ctx, "go", executions.Event(key, 0))
	return executions.Result{}, err
}

// withNodes runs n nodes while fn runs.
func (b *scalingBench) withNodes(ctx context.Context, n int, fn func(ctx context.Context, nodes []*node) error) error {
	var nodes []*node
	defer func() {
		for _, opened := range nodes {
			opened.pool.Close()
		}
	}()
	for range n {
		opened, err := b.openNode(ctx)
		if err != nil {
			return err
		}
		nodes = append(nodes, opened)
	}
	return runNodes(ctx, nodes, nil, func(ctx context.Context) error { return fn(ctx, nodes) })
}

// measureNodes measures n processes: idle, with a paced load, and with a backlog. A nil scale skips what needs only one
// process: the delivery of events, and at the larger scale the bytes of an execution.
func (b *scalingBench) measureNodes(ctx context.Context, n int, scale *int) (cost nodesCost, err error) {
	cost.n = n
	err = b.withNodes(ctx, n, func(ctx context.Context, nodes []*node) error {
		if err := b.run(ctx, nodes, 5*n+200, 0); err != nil { // warm up
			return err
		}
		if err := b.measureIdle(ctx, &cost); err != nil {
			return err
		}
		paced := max(int(float64(b.rate)*b.pacedDuration.Seconds()), 1)
		cpu, elapsed, err := b.measureConnections(ctx, nodeName, func() error {
			return b.run(ctx, nodes, paced, time.Second/time.Duration(b.rate))
		})
		if err != nil {
			return err
		}
		cost.paced = (cpu - time.Duration(cost.idle*float64(elapsed))) / time.Duration(paced)
		size, err := b.measureBacklog(ctx, nodes, &cost)
		if err != nil || scale == nil {
			return err
		}
		if *scale == len(b.scales)-1 {
			b.rowSizes = append(b.rowSizes, size)
		}
		b.eventTimes[*scale], err = b.measureEvents(ctx, nodes[0], *scale)
		return err
	})
	return cost, err
}

func (b *scalingBench) measureIdle(ctx context.Context, cost *nodesCost) error {
	if err := pause(ctx, b.idleDuration/10); err != nil {
		return err
	}
	const transactions = `select xact_commit + xact_rollback from pg_stat_database where datname = current_database()`
	var before, after int64
	if err := b.pool.QueryRow(ctx, transactions).Scan(&before); err != nil {
		return err
	}
	cpu, elapsed, err := b.measureConnections(ctx, nodeName, func() error { return pause(ctx, b.idleDuration) })
	if err != nil {
		return err
	}
	if err := b.pool.QueryRow(ctx, `select (`+transactions+`),
		(select count(*) from pg_stat_activity where application_name = '`+nodeName+`')`).Scan(
		&after, &cost.connections); err != nil {
		return err
	}
	cost.idle, cost.transactions = cpu.Seconds()/elapsed.Seconds(), float64(after-before)/elapsed.Seconds()
	return nil
}

// measureBacklog starts half of the backlog at once, then all of it. It returns the bytes of the completed executions.
func (b *scalingBench) measureBacklog(ctx context.Context, nodes []*node, cost *nodesCost) (rowSize, error) {
	completed := rowSize{name: "an execution of one step that has ended"}
	for i, n := range []int{b.backlog / 2, b.backlog} {
		before, err := b.size(ctx, everything)
		if err != nil {
			return completed, err
		}
		cpu, elapsed, err := b.measureConnections(ctx, nodeName, func() error { return b.run(ctx, nodes, n, 0) })
		if err != nil {
			return completed, err
		}
		cost.backlog, cost.backlogRate = cpu/time.Duration(n), float64(n)/elapsed.Seconds()
		after, err := b.size(ctx, everything)
		if err != nil {
			return completed, err
		}
		completed.rows[i], completed.size[i] = int64(n), after.minus(before)
	}
	return completed, nil
}

// measureEvents delivers events to a sample of all waiting executions, and waits until the sample has completed.
func (b *scalingBench) measureEvents(ctx context.Context, sender *node, scale int) (time.Duration, error) {
	n := min(max(int(b.scales[scale].waiting/20), 1), 1000)
	step := b.scales[scale].waiting / int64(n)
	deliver := func() error {
		err := callAll(ctx, 4, n, func(ctx context.Context, i int) error {
			key := "scaling-" + strconv.FormatInt(int64(i)*step+int64(scale), 10)
			delivery, err := sender.engine.Deliver(ctx, sender.pool, "EVENT_COMPLETED", key, nil, "")
			if err == nil && len(delivery.Resumed) != 1 {
				err = fmt.Errorf("event %d resumed %d executions", i, len(delivery.Resumed))
			}
			return err
		})
		if err != nil {
			return err
		}
		return pollQuery(ctx, b.pool, nothingRuns)
	}
	cpu, _, err := b.measureConnections(ctx, nodeName, deliver)
	return cpu / time.Duration(n), err
}

// run starts n executions on all nodes in turn, one per pace, or all at once if pace is 0, and waits until all
// complete.
func (b *scalingBench) run(ctx context.Context, nodes []*node, n int, pace time.Duration) error {
	start := func(ctx context.Context, i int) error {
		starter := nodes[i%len(nodes)]
		for {
			_, _, err := starter.engine.Start(ctx, starter.pool, executions.Spec{Flow: oneStep, Surface: trace.Flow})
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

// measureConnections returns the elapsed time of fn and the CPU time of the server's connections with that name.
// The server's background processes, such as autovacuum, do not count.
func (b *scalingBench) measureConnections(
	ctx context.Context, name string, fn func() error,
) (cpu, elapsed time.Duration, err error) {
	before, err := b.connectionTimes(ctx, name)
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := fn(); err != nil {
		return 0, 0, err
	}
	elapsed = time.Since(began)
	after, err := b.connectionTimes(ctx, name)
	for pid, used := range after {
		cpu += used - before[pid]
	}
	return cpu, elapsed, err
}

// connectionTimes returns the processor time of each connection, by process ID.
func (b *scalingBench) connectionTimes(ctx context.Context, name string) (map[int]time.Duration, error) {
	rows, err := b.pool.Query(ctx, `select pid from pg_stat_activity where application_name = @name`,
		postgres.Strict{"name": name})
	pids, err := postgres.Collect(rows, err, "list connections", pgx.RowTo[int])
	if err != nil {
		return nil, err
	}
	times := make(map[int]time.Duration, len(pids))
	for _, pid := range pids {
		times[pid] = processTime(pid)
	}
	return times, nil
}

// processTime returns a process's processor time. On Linux, /proc/PID/schedstat has the time in nanoseconds, which
// matters for many connections with little work. Elsewhere the unit is a tick.
func processTime(pid int) time.Duration {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	first, _, _ := strings.Cut(string(text), " ")
	n, err := strconv.ParseInt(first, 10, 64)
	if err != nil {
		stat, _ := procStat(strconv.Itoa(pid))
		return stat.cpu
	}
	return time.Duration(n)
}
