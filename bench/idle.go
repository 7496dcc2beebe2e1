package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// idleBench measures the cost of an idle `agent serve` in its own process. The bench connects to another database, so
// all transactions of the agent's database are the agent's.
type idleBench struct {
	settle, duration time.Duration
	pool             *pgxpool.Pool // to another database of the server
	stderr           io.Writer
}

const idleDatabase = "idle"

type idleCost struct {
	agent, server time.Duration
	elapsed       time.Duration
	transactions  int64
}

func idle(ctx context.Context, args []string, out, stderr io.Writer) (err error) {
	b := idleBench{stderr: stderr}
	flags := newFlags("idle", stderr)
	flags.DurationVar(&b.settle, "settle", 10*time.Second, "idle time before it is measured")
	flags.DurationVar(&b.duration, "for", 30*time.Second, "how long it is measured")
	binary := flags.String("agent", "", "the agent's binary; default: built from the current folder")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.settle < 0 || b.duration <= 0 {
		return errors.New("idle: -for must be above 0, -settle at least 0")
	}
	agent, err := buildAgent(ctx, *binary, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, agent.remove()) }()
	return withServer(ctx, pgserver.Config{Database: idleDatabase}, stderr, func(server *pgserver.Server) error {
		if err := b.connect(ctx, server.URL()); err != nil {
			return err
		}
		defer b.pool.Close()
		return agent.serve(ctx, server.URL(), nil, func(ctx context.Context, url string, pid int) error {
			cost, err := b.watch(ctx, pid)
			if err == nil {
				cost.print(out)
			}
			return err
		})
	})
}

// connect opens a pool whose transactions do not count.
func (b *idleBench) connect(ctx context.Context, serverURL string) error {
	address, err := url.Parse(serverURL)
	if err != nil {
		return fmt.Errorf("read the server's address: %w", err)
	}
	address.Path = "/postgres"
	b.pool, err = postgres.Open(ctx, address.String(), postgres.Options{MaxConns: 2, ApplicationName: "bench"})
	return err
}

func (b *idleBench) watch(ctx context.Context, pid int) (cost idleCost, err error) {
	fmt.Fprintf(b.stderr, "the agent is ready; measuring for %s in %s\n", b.duration, b.settle)
	if err := pause(ctx, b.settle); err != nil {
		return cost, err
	}
	before, err := b.read(ctx, pid)
	if err != nil {
		return cost, err
	}
	began := time.Now()
	if err := pause(ctx, b.duration); err != nil {
		return cost, err
	}
	after, err := b.read(ctx, pid)
	return idleCost{
		agent: after.agent - before.agent, server: after.server - before.server,
		elapsed: time.Since(began), transactions: after.transactions - before.transactions,
	}, err
}

func (b *idleBench) read(ctx context.Context, pid int) (cost idleCost, err error) {
	stat, ok := procStat(strconv.Itoa(pid))
	if !ok {
		return cost, errors.New("read the agent's processor time: no such process in /proc")
	}
	all, err := usedCPU(ctx, b.pool)
	if err != nil {
		return cost, err
	}
	cost.agent, cost.server = stat.cpu, all.server
	err = b.pool.QueryRow(ctx, `select xact_commit + xact_rollback from pg_stat_database where datname = @name`,
		postgres.Strict{"name": idleDatabase}).Scan(&cost.transactions)
	if err != nil {
		return cost, fmt.Errorf("count the transactions: %w", err)
	}
	return cost, nil
}

func (c idleCost) print(out io.Writer) {
	share := func(d time.Duration) string { return fmt.Sprintf("%.2f %%", 100*d.Seconds()/c.elapsed.Seconds()) }
	var t strings.Builder
	fmt.Fprintf(&t, "`agent serve` idle for %s; %d processors.\n\n", c.elapsed.Round(time.Second), runtime.NumCPU())
	t.WriteString("| | measured | target |\n|---|---|---|\n")
	fmt.Fprintf(&t, "| processor time of the process, of one core | %s | < 1 %% |\n", share(c.agent))
	fmt.Fprintf(&t, "| processor time of the server's processes, of one core | %s | |\n", share(c.server))
	fmt.Fprintf(&t, "| transactions per second | %.1f | a handful |\n", float64(c.transactions)/c.elapsed.Seconds())
	fmt.Fprint(out, t.String())
}
