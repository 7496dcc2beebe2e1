package lanes_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// ExampleKeeper_Acquire runs a job at most once at a time. Lanes are off here, so the example needs no database. A
// program gives the keeper its pool without that option, and one goroutine calls Run.
func ExampleKeeper_Acquire() {
	var db postgres.DB
	keeper := lanes.NewKeeper(db, lanes.Options{Disabled: true})

	job := func(ctx context.Context) error {
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

// BenchmarkAcquireRelease acquires and releases uncontended lanes. "floor" is two bare updates of one row, the
// minimum cost of a lease; "floor-ratio" is the achieved share of its speed.
func BenchmarkAcquireRelease(b *testing.B) {
	var floor time.Duration
	b.Run("floor", func(b *testing.B) {
		db := pgtest.DB(b)
		pgtest.Exec(b, db, `create table floor (name text primary key, n bigint not null default 0) with (fillfactor = 50)`)
		var worker atomic.Int64
		b.RunParallel(func(pb *testing.PB) {
			name := fmt.Sprint("x", worker.Add(1))
			pgtest.Exec(b, db, `insert into floor (name) values ($1)`, name)
			for pb.Next() {
				pgtest.Exec(b, db, `update floor set n = n + 1 where name = $1`, name)
				pgtest.Exec(b, db, `update floor set n = n + 1 where name = $1`, name)
			}
		})
		floor = b.Elapsed() / time.Duration(b.N)
	})
	b.Run("lane", func(b *testing.B) {
		db := pgtest.DB(b)
		k := lanes.NewKeeper(db, lanes.Options{})
		var worker atomic.Int64
		b.RunParallel(func(pb *testing.PB) {
			lane := fmt.Sprint("x", worker.Add(1))
			for pb.Next() {
				l, err := k.Acquire(b.Context(), lane)
				if err != nil {
					b.Error(err)
					return
				}
				assert.NoError(b, l.Release(b.Context()))
			}
		})
		b.ReportMetric(float64(floor)/float64(b.Elapsed()/time.Duration(b.N)), "floor-ratio")
	})
}

// BenchmarkBusyTry is a try on a held lane: a read.
func BenchmarkBusyTry(b *testing.B) {
	db := pgtest.DB(b)
	mustAcquire(b, db, "x", "holder", 3600)
	k := lanes.NewKeeper(db, lanes.Options{})
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			l, err := k.Acquire(b.Context(), "x")
			assert.Error(b, err, "granted twice", l)
		}
	})
}
