package executions

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// While the database is away, a timer that is due is not swept for all the time.
func TestASweepThatFailsIsNotRepeatedAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none?sslmode=disable")
		if err != nil {
			t.Fatal(err)
		}
		tries := 0
		config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
			tries++
			return nil, errors.New("away")
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		e := &Engine{
			pool: pool, opts: Options{SweepEvery: 5 * time.Second}, log: slog.New(slog.DiscardHandler),
			nudge: make(chan struct{}, 1), alarm: make(chan struct{}, 1),
		}
		e.due.set(time.Time{}, time.Now(), 1)
		ctx, cancel := context.WithTimeout(t.Context(), 9*time.Second+time.Second/2)
		defer cancel()
		e.sweepLoop(ctx)
		synctest.Wait()
		if tries == 0 || tries > 40 {
			t.Errorf("%d tries to connect in ten seconds", tries)
		}
	})
}

// A lane that is handed over was never free, and may be so a thousand times a second: nobody sweeps for it.
func TestAHandOverWakesNoSweep(t *testing.T) {
	t.Parallel()
	for said, wakes := range map[string]int{"pipeline:prices": 1, "": 1, "pipeline:prices\trun/1\t1795234346428444\t1795234356428444": 0} {
		e := &Engine{nudge: make(chan struct{}, 1)}
		e.hearLane(said)
		if len(e.nudge) != wakes {
			t.Errorf("the sweep is woken %d times by %q, want %d", len(e.nudge), said, wakes)
		}
	}
}
