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
	db, closeDB := exampleDB()
	defer closeDB()
	keeper := lanes.NewKeeper(db, lanes.Options{}) // a program also calls its Run, which renews the leases

	job := func(ctx context.Context, consolidate func(context.Context) error) error {
		lease, err := keeper.Acquire(ctx, "pipeline:prices")
		if errors.Is(err, lanes.ErrBusy) { // a *lanes.BusyError names the holder
			fmt.Println("already running, skipped") // not an error: the holder does the job
			return nil
		}
		if err != nil {
			return err
		}
		defer lease.Release(ctx)
		return consolidate(lease.Context()) // cancelled with cause lanes.ErrLost if the lane is lost
	}

	ctx := context.Background()
	consolidate := func(context.Context) error {
		fmt.Println("prices consolidated")
		return nil
	}
	err := job(ctx, func(leased context.Context) error {
		return errors.Join(job(ctx, consolidate), consolidate(leased)) // the lane is held here
	})
	fmt.Println("error:", err)
	fmt.Println("error:", job(ctx, consolidate)) // the lane is free again
	// Output:
	// already running, skipped
	// prices consolidated
	// error: <nil>
	// prices consolidated
	// error: <nil>
}

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
