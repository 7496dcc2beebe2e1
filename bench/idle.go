package main

import (
	"context"
	"errors"
	"flag"
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

// idleBench measures what `agent serve` costs while it has nothing to do: the binary itself, in a process of its own,
// with a database of its own. Statements are counted as the transactions of that database; who counts is connected to
// another.
type idleBench struct {
	settle, lasts time.Duration
	server        *pgserver.Server
	pool          *pgxpool.Pool // to another database of the server
	errw          io.Writer
}

// idleDatabase is the one that is served.
const idleDatabase = "idle"

// idleCost is what a stretch of idleness cost.
type idleCost struct {
	agent, server time.Duration
	lasted        time.Duration
	transactions  int64
}

func idle(ctx context.Context, args []string, out, errw io.Writer) (err error) {
	b := idleBench{errw: errw}
	flags := flag.NewFlagSet("idle", flag.ContinueOnError)
	flags.SetOutput(errw)
	flags.DurationVar(&b.settle, "settle", 10*time.Second, "how long it is left alone before it is watched")
	flags.DurationVar(&b.lasts, "for", 30*time.Second, "how long it is watched")
	binary := flags.String("agent", "", "the binary; empty to build it from the present folder")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.settle < 0 || b.lasts <= 0 {
		return errors.New("idle: -for is above 0, -settle is not below")
	}
	agent, err := buildAgent(ctx, *binary, errw)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, agent.remove()) }()
	b.server, err = pgserver.Start(ctx, pgserver.Config{
		Ephemeral: true, Durable: true, Database: idleDatabase, Progress: func(line string) { fmt.Fprintln(errw, line) },
	})
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, b.server.Stop(context.WithoutCancel(ctx))) }()
	if err := b.connect(ctx); err != nil {
		return err
	}
	defer b.pool.Close()
	var cost idleCost
	err = agent.serve(ctx, b.server.URL(), nil, func(ctx context.Context, url string, pid int) error {
		cost, err = b.watch(ctx, pid)
		return err
	})
	if err != nil {
		return err
	}
	cost.print(out)
	return nil
}

// connect opens the way to count, which is not counted.
func (b *idleBench) connect(ctx context.Context) error {
	at, err := url.Parse(b.server.URL())
	if err != nil {
		return fmt.Errorf("read the server's address: %w", err)
	}
	at.Path = "/postgres"
	b.pool, err = postgres.Open(ctx, at.String(), postgres.Options{MaxConns: 2, ApplicationName: "bench"})
	return err
}

// watch reads the counters before and after.
func (b *idleBench) watch(ctx context.Context, pid int) (cost idleCost, err error) {
	fmt.Fprintf(b.errw, "it serves; watched for %s, %s from now\n", b.lasts, b.settle)
	if err := pause(ctx, b.settle); err != nil {
		return cost, err
	}
	before, err := b.read(ctx, pid)
	if err != nil {
		return cost, err
	}
	began := time.Now()
	if err := pause(ctx, b.lasts); err != nil {
		return cost, err
	}
	after, err := b.read(ctx, pid)
	return idleCost{
		agent: after.agent - before.agent, server: after.server - before.server,
		lasted: time.Since(began), transactions: after.transactions - before.transactions,
	}, err
}

// read is what was used so far.
func (b *idleBench) read(ctx context.Context, pid int) (cost idleCost, err error) {
	used, ok := procStat(strconv.Itoa(pid))
	if !ok {
		return cost, errors.New("read the agent's processor time: it has ended, or there is no /proc")
	}
	all, err := cpu(ctx, b.pool)
	if err != nil {
		return cost, err
	}
	cost.agent, cost.server = used.used, all.server
	err = b.pool.QueryRow(ctx, `select xact_commit + xact_rollback from pg_stat_database where datname = @name`,
		postgres.Strict{"name": idleDatabase}).Scan(&cost.transactions)
	if err != nil {
		return cost, fmt.Errorf("count the transactions: %w", err)
	}
	return cost, nil
}

// print writes the table.
func (c idleCost) print(out io.Writer) {
	share := func(d time.Duration) string { return fmt.Sprintf("%.2f %%", 100*d.Seconds()/c.lasted.Seconds()) }
	var t strings.Builder
	fmt.Fprintf(&t, "`agent serve` with nothing to do, for %s; %d processors.\n\n", c.lasted.Round(time.Second), runtime.NumCPU())
	t.WriteString("| | measured | asked |\n|---|---|---|\n")
	fmt.Fprintf(&t, "| processor time of the process, of one core | %s | < 1 %% |\n", share(c.agent))
	fmt.Fprintf(&t, "| processor time of the server's processes, of one core | %s | |\n", share(c.server))
	fmt.Fprintf(&t, "| transactions per second | %.1f | a handful |\n", float64(c.transactions)/c.lasted.Seconds())
	fmt.Fprint(out, t.String())
}
