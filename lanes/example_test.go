package lanes_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// ExampleKeeper_Acquire runs a job at most once at a time, in all processes of the database.
func ExampleKeeper_Acquire() {
	db, closeDB := exampleDB() // a *pgxpool.Pool
	defer closeDB()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	keeper := lanes.NewKeeper(db, lanes.Options{})
	go func() { _ = keeper.Run(ctx) }() // renews the leases until ctx ends

	job := func() error {
		lease, err := keeper.Acquire(ctx, "pipeline:prices")
		if errors.Is(err, lanes.ErrBusy) { // a *lanes.BusyError names the holder
			fmt.Println("already running, skipped") // not an error: the holder does the job
			return nil
		}
		if err != nil {
			return err
		}
		consolidate(lease.Context()) // cancelled with cause lanes.ErrLost if the lane is lost
		return lease.Release(ctx)    // lanes.ErrLost: the job may have overlapped with another
	}

	lease, err := keeper.Acquire(ctx, "pipeline:prices")
	fmt.Println(err, job(), lease.Release(ctx))
	fmt.Println(job())
	// Output:
	// already running, skipped
	// <nil> <nil> <nil>
	// prices consolidated
	// <nil>
}

func consolidate(context.Context) { fmt.Println("prices consolidated") }

func ExampleBusyError() {
	err := error(&lanes.BusyError{Lane: "heartbeat", Holder: "018f0000-0000-7000-8000-00000000000a#1"})
	fmt.Println(err)
	fmt.Println(errors.Is(err, lanes.ErrBusy))
	// Output:
	// acquire heartbeat: lane busy: held by 018f0000-0000-7000-8000-00000000000a#1
	// true
}

// exampleTB is a testing.TB for an example, with the methods that pgtest calls.
type exampleTB struct {
	testing.TB

	cleanups []func()
}

func (*exampleTB) Helper()                           {}
func (*exampleTB) Context() context.Context          { return context.Background() }
func (e *exampleTB) Cleanup(f func())                { e.cleanups = append(e.cleanups, f) }
func (*exampleTB) Error(args ...any)                 { panic(fmt.Sprint(args...)) }
func (*exampleTB) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// exampleDB returns a pool on a database of its own, and a function that closes both.
func exampleDB() (db *pgxpool.Pool, closeDB func()) {
	tb := &exampleTB{}
	return pgtest.DB(tb), func() {
		for _, f := range slices.Backward(tb.cleanups) {
			f()
		}
	}
}
