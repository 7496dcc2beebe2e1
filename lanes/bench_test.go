package lanes_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// BenchmarkAcquireRelease is pairs of acquire and release on lanes that nobody else wants. "floor" is two
// bare updates of one row, the least that a lease can cost; "floor-ratio" is the share of its speed
// that is reached.
func BenchmarkAcquireRelease(b *testing.B) {
	var floor time.Duration
	b.Run("floor", func(b *testing.B) {
		db := pgtest.DB(b)
		exec(b, db, `create table floor (name text primary key, n bigint not null default 0) with (fillfactor = 50)`)
		var worker atomic.Int64
		b.RunParallel(func(pb *testing.PB) {
			name := fmt.Sprint("x", worker.Add(1))
			exec(b, db, `insert into floor (name) values ($1)`, name)
			for pb.Next() {
				exec(b, db, `update floor set n = n + 1 where name = $1`, name)
				exec(b, db, `update floor set n = n + 1 where name = $1`, name)
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
				if err := l.Release(b.Context()); err != nil {
					b.Error(err)
				}
			}
		})
		b.ReportMetric(float64(floor)/float64(b.Elapsed()/time.Duration(b.N)), "floor-ratio")
	})
}

// BenchmarkBusyTry is the gate while somebody holds the lane: a read.
func BenchmarkBusyTry(b *testing.B) {
	db := pgtest.DB(b)
	mustTry(b, db, "x", "holder", 3600)
	k := lanes.NewKeeper(db, lanes.Options{})
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if l, err := k.Acquire(b.Context(), "x"); err == nil {
				b.Errorf("granted twice: %v", l)
			}
		}
	})
}
