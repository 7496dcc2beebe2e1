package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// scalingBench measures what one PostgreSQL carries. It measures bytes and processor time at a smaller size, predicts
// those of a larger size by a straight line, and prints the prediction beside the measurement. docs/scaling.md has the
// figures of one run.
type scalingBench struct {
	room

	sizes     [2]scale // the smaller one predicts the larger one
	processes []int    // the last count is predicted from the two before it
	idle      time.Duration
	loaded    time.Duration
	rate      int // executions a second, in the paced part
	backlog   int
	handler   http.Handler
	again     atomic.Int64 // starts that met a lock for too long

	grown   []grown
	fleets  []fleetCost
	early   fleetCost // one process, on the smaller database
	events  [2]time.Duration
	pages   []pageCost
	watches []load
}

// scale is how many rows of each noun a database has.
type scale struct{ log, waiting, threads int64 }

// fullScale is the size that -full loads.
var fullScale = scale{log: 30_000_000, waiting: 1_000_000, threads: 1_000_000}

func scaling(ctx context.Context, args []string, out, errw io.Writer) (err error) {
	b := scalingBench{room: room{errw: errw}}
	if err := b.parse(args); err != nil {
		return err
	}
	server, err := pgserver.Start(ctx, pgserver.Config{
		Ephemeral: true, Durable: true, MaxConnections: 100 + memberConns*b.processes[len(b.processes)-1],
		Progress: func(line string) { fmt.Fprintln(errw, line) },
	})
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	b.pool, err = postgres.Open(ctx, server.URL(), postgres.Options{MaxConns: 16, ApplicationName: ownName})
	if err != nil {
		return err
	}
	defer b.pool.Close()
	if _, err := migrations.Up(ctx, b.pool); err != nil {
		return err
	}
	if b.handler, err = b.room.handler(); err != nil {
		return err
	}
	if err := b.measure(ctx); err != nil {
		return err
	}
	b.print(out)
	return nil
}

// parse reads the flags.
func (b *scalingBench) parse(args []string) error {
	flags := flag.NewFlagSet("scaling", flag.ContinueOnError)
	flags.SetOutput(b.errw)
	large := &b.sizes[1]
	flags.Int64Var(&large.log, "rows", 500_000, "rows of the activity log; a tenth of them predict the others")
	flags.Int64Var(&large.waiting, "waiting", 50_000, "executions that wait")
	flags.Int64Var(&large.threads, "threads", 20_000, "threads with ten messages each")
	full := flags.Bool("full", false, "30,000,000 rows of the log, 1,000,000 waiting executions, 1,000,000 threads: 35 GB")
	flags.IntVar(&b.visits, "visits", 10, "visits to each page")
	most := flags.Int("processes", 64, "processes at most; a quarter and half of these predict it")
	flags.DurationVar(&b.idle, "idle", 20*time.Second, "how long idle processes are measured")
	flags.DurationVar(&b.loaded, "for", 10*time.Second, "how long processes are measured under a paced load")
	flags.DurationVar(&b.watched, "watched", 10*time.Second, "how long the overview is watched, by 1, 10 and 100 viewers")
	flags.IntVar(&b.rate, "rate", 100, "executions started a second under the paced load")
	flags.IntVar(&b.backlog, "backlog", 10_000, "executions that are started at once")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *full {
		*large = fullScale
	}
	if large.log < 1000 || large.waiting < 100 || large.threads < 100 {
		return errors.New("scaling: -rows is at least 1000, -waiting and -threads are at least 100")
	}
	if *most < 4 || b.backlog < 10 || b.rate < 1 || b.visits < 1 {
		return errors.New("scaling: -processes is at least 4, -backlog 10, -rate and -visits 1")
	}
	b.sizes[0] = scale{log: large.log / 10, waiting: large.waiting / 10, threads: large.threads / 10}
	b.processes = []int{1, *most / 4, *most / 2, *most}
	b.large = large.log
	return nil
}

// measure fills the database to both sizes and measures each.
func (b *scalingBench) measure(ctx context.Context) error {
	for at := range b.sizes {
		if err := b.grow(ctx, at); err != nil {
			return err
		}
		if err := b.measurePages(ctx, at); err != nil {
			return err
		}
		fmt.Fprintf(b.errw, "one process, size %d\n", at+1)
		cost, err := b.measureFleet(ctx, 1, at)
		if err != nil {
			return err
		}
		if at == 0 {
			b.early = cost
			continue
		}
		b.fleets = append(b.fleets, cost)
	}
	for _, n := range b.processes[1:] {
		fmt.Fprintf(b.errw, "%d processes\n", n)
		cost, err := b.measureFleet(ctx, n, -1)
		if err != nil {
			return err
		}
		b.fleets = append(b.fleets, cost)
	}
	return b.measureViewers(ctx)
}

// measureViewers watches the overview by more and more viewers.
func (b *scalingBench) measureViewers(ctx context.Context) error {
	if b.watched <= 0 {
		return nil
	}
	for _, viewers := range []int{1, 10, 100} {
		fmt.Fprintf(b.errw, "%d viewers\n", viewers)
		var l load
		used, took, err := b.used(ctx, ownName, func() (err error) {
			l, err = b.watch(ctx, b.handler, viewers)
			return err
		})
		if err != nil {
			return err
		}
		l.server = used.Seconds() / took.Seconds() // connections that ended meanwhile count here
		b.watches = append(b.watches, l)
	}
	return nil
}

// pageCost is the server's processor time for one visit to a page, at both sizes.
type pageCost struct {
	path string
	each [2]time.Duration
}

// measurePages visits the pages that people look at most.
func (b *scalingBench) measurePages(ctx context.Context, at int) error {
	paths := []string{"/", "/activity", "/traces", "/executions?status=waiting", "/threads", "/spend?days=30"}
	for i, path := range paths {
		used, _, err := b.used(ctx, ownName, func() error {
			_, err := b.visit(ctx, b.handler, path)
			return err
		})
		if err != nil {
			return err
		}
		if at == 0 {
			b.pages = append(b.pages, pageCost{path: path})
		}
		b.pages[i].each[at] = used / time.Duration(b.visits+1)
	}
	return nil
}
