package lanes_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// A job that must not run twice at once. (Lanes are off here, so that the example needs no database;
// the program's keeper gets its pool and no such option, and one goroutine calls Run.)
func ExampleKeeper_Acquire() {
	var db postgres.DB
	keeper := lanes.NewKeeper(db, lanes.Options{Disabled: true})

	job := func(ctx context.Context) error {
		lease, err := keeper.Acquire(ctx, "pipeline:prices")
		if errors.Is(err, lanes.ErrBusy) { // a *lanes.BusyError names the holder
			fmt.Println("already running, skipped") // not an error: the other one does it
			return nil
		}
		if err != nil {
			return err
		}
		defer lease.Release(ctx)
		return consolidate(lease.Context()) // cancelled, cause lanes.ErrLost, when the lane is lost
	}
	if err := job(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output: prices consolidated
}

func consolidate(ctx context.Context) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	fmt.Println("prices consolidated")
	return nil
}

func ExampleBusyError() {
	err := error(&lanes.BusyError{Lane: "heartbeat", Holder: "018f0000-0000-7000-8000-00000000000a#1"})
	fmt.Println(err)
	fmt.Println(errors.Is(err, lanes.ErrBusy))
	// Output:
	// acquire heartbeat: lane busy: held by 018f0000-0000-7000-8000-00000000000a#1
	// true
}
