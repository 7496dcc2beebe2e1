package executions

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// While the database is away for long, executions are asked for no more often than in its first seconds, and the log says so no more often.
func TestClaimsThatFailBecomeNoMore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var tries atomic.Int32
		config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none?sslmode=disable")
		if err != nil {
			t.Fatal(err)
		}
		config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
			return nil, errors.New("away")
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		told := slog.New(slog.NewTextHandler(counter{&tries, "ready executions not claimed"}, nil))
		c := newCrew(&Engine{pool: pool, opts: Options{SweepEvery: time.Second, LeaseTTL: 30 * time.Second, Workers: 1}, log: told}, Background)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		c.work(ctx, ctx)
		if n := tries.Load(); n < 60 || n > 125 { // a tick and a try of its own each second
			t.Errorf("%d tries in a minute", n)
		}
	})
}

// counter counts the lines that have some words.
type counter struct {
	lines *atomic.Int32
	words string
}

func (c counter) Write(line []byte) (int, error) {
	if strings.Contains(string(line), c.words) {
		c.lines.Add(1)
	}
	return len(line), nil
}
