package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// load is what open overviews cost.
type load struct {
	viewers  int
	own      float64 // share of a core that this process takes, the viewers' side of the connections included
	server   float64 // share of a core that PostgreSQL takes
	perSec   float64 // transactions a second
	received int64   // bytes that all viewers were sent
}

// watch opens the overview so often and looks what that costs, while activities come in one by one.
func (b *room) watch(ctx context.Context, handler http.Handler, viewers int) (load, error) {
	served := httptest.NewServer(handler)
	defer served.Close()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	var group errgroup.Group
	counts := make([]int64, viewers)
	for i := range viewers {
		group.Go(func() error { return receive(watching, served.URL+"/live/", &counts[i]) })
	}
	group.Go(func() error { return b.trickle(watching) })
	if err := pause(ctx, 3*time.Second); err != nil { // until all are connected
		return load{}, err
	}
	before, err := b.usage(ctx)
	if err != nil {
		return load{}, err
	}
	if err := pause(ctx, b.watched); err != nil {
		return load{}, err
	}
	after, err := b.usage(ctx)
	if err != nil {
		return load{}, err
	}
	stop()
	if err := group.Wait(); err != nil {
		return load{}, err
	}
	l := load{
		viewers: viewers, own: share(after.own-before.own, b.watched), server: share(after.server-before.server, b.watched),
		perSec: float64(after.transactions-before.transactions) / b.watched.Seconds(),
	}
	for _, n := range counts {
		l.received += n
	}
	return l, nil
}

func share(used, of time.Duration) float64 { return used.Seconds() / of.Seconds() }

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// receive reads a stream until ctx ends.
func receive(ctx context.Context, address string, n *int64) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil // it was told to stop
		}
		return fmt.Errorf("watch the overview: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("watch the overview: %s", resp.Status)
	}
	*n, err = io.Copy(io.Discard, resp.Body)
	if ctx.Err() != nil {
		return nil // it was told to stop
	}
	return err
}

// trickle writes an activity twice a second.
func (b *room) trickle(ctx context.Context) error {
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

// usage is what was used so far.
type usage struct {
	own, server  time.Duration // of processor time
	transactions int64
}

func (b *room) usage(ctx context.Context) (u usage, err error) {
	var self syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &self); err != nil {
		return u, err
	}
	u.own = time.Duration(self.Utime.Nano() + self.Stime.Nano())
	rows, err := b.pool.Query(ctx, `select pid from pg_stat_activity where pid <> pg_backend_pid()`, postgres.Strict{})
	if err != nil {
		return u, err
	}
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		return u, err
	}
	for _, pid := range pids {
		u.server += processTime(pid)
	}
	err = b.pool.QueryRow(ctx, `select xact_commit + xact_rollback from pg_stat_database where datname = current_database()`).Scan(&u.transactions)
	return u, err
}

// processTime is the processor time of a process, which /proc has in hundredths of a second; 0 when it is gone.
func processTime(pid int) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	_, after, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(after)
	if len(fields) < 13 {
		return 0
	}
	var ticks int64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// printLoads writes the table of viewers.
func (b *room) printLoads(out io.Writer, loads []load) {
	fmt.Fprintf(out, "\nOpen overviews over the large log, two activities a second, %s each. This process is also the viewers' side.\n\n", b.watched)
	fmt.Fprintln(out, "| viewers | this process, % of a core | PostgreSQL, % of a core | transactions/s | kB sent |")
	fmt.Fprintln(out, "|---|---|---|---|---|")
	for _, l := range loads {
		fmt.Fprintf(out, "| %d | %.2f | %.2f | %.1f | %d |\n", l.viewers, 100*l.own, 100*l.server, l.perSec, l.received/1000)
	}
}
