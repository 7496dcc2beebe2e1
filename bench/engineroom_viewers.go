package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"time"

	"golang.org/x/sync/errgroup"
)

// viewerLoad is the cost of open overviews.
type viewerLoad struct {
	viewers  int
	process  float64 // share of a core used by this process, including the viewers
	server   float64 // share of a core used by PostgreSQL
	perSec   float64 // transactions a second
	received int64   // bytes sent to all viewers
}

// watchAll measures 0, 1 and 100 viewers.
func (b *engineRoomBench) watchAll(ctx context.Context, out io.Writer, handler http.Handler) error {
	if b.watchDuration == 0 {
		return nil
	}
	var loads []viewerLoad
	for _, viewers := range []int{0, 1, 100} {
		fmt.Fprintf(b.stderr, "%d viewers\n", viewers)
		l, err := b.watch(ctx, handler, viewers)
		if err != nil {
			return err
		}
		loads = append(loads, l)
	}
	b.printLoads(out, loads)
	return nil
}

// watch measures open overviews while writeActivities writes activities.
func (b *engineRoomBench) watch(ctx context.Context, handler http.Handler, viewers int) (viewerLoad, error) {
	served := httptest.NewServer(handler)
	defer served.Close()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	var group errgroup.Group
	counts := make([]int64, viewers)
	for i := range viewers {
		group.Go(func() error { return receive(watching, served.URL+"/live/", &counts[i]) })
	}
	group.Go(func() error { return b.writeActivities(watching) })
	if err := pause(ctx, 3*time.Second); err != nil { // until all viewers are connected
		return viewerLoad{}, err
	}
	before, err := b.usage(ctx)
	if err != nil {
		return viewerLoad{}, err
	}
	if err := pause(ctx, b.watchDuration); err != nil {
		return viewerLoad{}, err
	}
	after, err := b.usage(ctx)
	if err != nil {
		return viewerLoad{}, err
	}
	stop()
	if err := group.Wait(); err != nil {
		return viewerLoad{}, err
	}
	l := viewerLoad{
		viewers: viewers, process: share(after.own-before.own, b.watchDuration),
		server: share(after.server-before.server, b.watchDuration),
		perSec: float64(after.transactions-before.transactions) / b.watchDuration.Seconds(),
	}
	for _, n := range counts {
		l.received += n
	}
	return l, nil
}

func share(cpu, elapsed time.Duration) float64 { return cpu.Seconds() / elapsed.Seconds() }

// receive reads a stream until ctx ends.
func receive(ctx context.Context, address string, n *int64) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("watch the overview: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("watch the overview: %s", resp.Status)
	}
	*n, err = io.Copy(io.Discard, resp.Body)
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// writeActivities writes an activity twice a second.
func (b *engineRoomBench) writeActivities(ctx context.Context) error {
	for pause(ctx, 500*time.Millisecond) == nil {
		_, err := b.pool.Exec(ctx, `
			insert into agent_activity (trace_id, surface, skill_name, status, duration_ms, finished_at)
			values ('hb_01', 'heartbeat', 'skill_1', 'success', 12, clock_timestamp())`)
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("write an activity: %w", err)
		}
	}
	return nil
}

type usage struct {
	cpuTime
	transactions int64
}

func (b *engineRoomBench) usage(ctx context.Context) (u usage, err error) {
	if u.cpuTime, err = usedCPU(ctx, b.pool); err != nil {
		return u, err
	}
	err = b.pool.QueryRow(ctx, `select xact_commit + xact_rollback from pg_stat_database
		where datname = current_database()`).Scan(&u.transactions)
	return u, err
}

func (b *engineRoomBench) printLoads(out io.Writer, loads []viewerLoad) {
	fmt.Fprintf(out, "\nOpen overviews over the large log, two activities a second, %s each. This process is also the "+
		"viewers' side.\n\n", b.watchDuration)
	fmt.Fprintln(out, "| viewers | this process, % of a core | PostgreSQL, % of a core | transactions/s | kB sent |")
	fmt.Fprintln(out, "|---|---|---|---|---|")
	for _, l := range loads {
		fmt.Fprintf(out, "| %d | %.2f | %.2f | %.1f | %d |\n", l.viewers, 100*l.process, 100*l.server,
			l.perSec, l.received/1000)
	}
}
