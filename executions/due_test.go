package executions

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/lanes"
)

// engineAway is an engine whose database is, and counts how often it is asked for.
func engineAway(t *testing.T, log *slog.Logger, tries *int) *Engine {
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none?sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		*tries++
		return nil, errors.New("away")
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	return &Engine{
		pool: pool, keeper: lanes.NewKeeper(pool, lanes.Options{}), opts: Options{SweepEvery: 5 * time.Second}, log: log,
		nudge: make(chan struct{}, 1), alarm: make(chan struct{}, 1),
	}
}

// While the database is away, a timer that is due is not swept for all the time.
func TestASweepThatFailsIsNotRepeatedAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tries := 0
		e := engineAway(t, slog.New(slog.DiscardHandler), &tries)
		defer e.pool.Close()
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

func TestHousekeepingThatFailsIsNotRepeatedAtEachSweep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var said bytes.Buffer
		tries := 0
		e := engineAway(t, slog.New(slog.NewTextHandler(&said, nil)), &tries)
		defer e.pool.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		e.sweepLoop(ctx)
		synctest.Wait()
		if n := strings.Count(said.String(), "housekeeping failed"); n < 5 || n > 10 {
			t.Errorf("it failed %d times in ten minutes, want about once a minute", n)
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
