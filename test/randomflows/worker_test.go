//go:build unix

package randomflows_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// What tells a process of the test binary that it is a worker: where the database is, and where its calls go.
const (
	workerURL  = "LANEKEEPER_FLOWCHECK_URL"
	workerSink = "LANEKEEPER_FLOWCHECK_SINK"
)

// lease is how long a worker lives without a word; one that is stopped for longer loses what it runs.
const lease = 2 * time.Second

func TestMain(m *testing.M) {
	if url := os.Getenv(workerURL); url != "" {
		if err := work(url, os.Getenv(workerSink)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	pgserver.GuardMain()
	pgtest.Main(m)
}

// work runs flows until SIGTERM.
func work(url, sink string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	pool, err := postgres.Open(ctx, url, postgres.Options{MaxConns: 12})
	if err != nil {
		return err
	}
	defer pool.Close()
	listener := postgres.NewListener(postgres.Dialer(pool), log)
	keeper := lanes.NewKeeper(pool, lanes.Options{Listener: listener, Logger: log})
	engine, err := executions.New(pool, executions.Options{
		Keeper: keeper, Listener: listener, Logger: log, Workers: 24, LeaseTTL: lease, SweepEvery: 300 * time.Millisecond,
		StopTimeout: 5 * time.Second,
	})
	if err != nil {
		return err
	}
	if err := engine.Register(flowName, player{sink}.flow); err != nil {
		return err
	}
	hearing, silent := context.WithCancel(context.WithoutCancel(ctx))
	defer silent()
	var below, above errgroup.Group
	below.Go(func() error { return listener.Run(hearing) })
	below.Go(func() error { return keeper.Run(hearing) })
	above.Go(func() error { return engine.Run(ctx) })
	fmt.Println("works")
	err = above.Wait()
	silent()
	if waited := below.Wait(); err == nil {
		err = waited
	}
	return err
}
