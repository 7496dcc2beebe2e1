package heap

import (
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

// collections counts the garbage collections while it allocates that many bytes.
func collections(bytes int) int {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range bytes >> 12 {
		garbage = make([]byte, 1<<12)
	}
	runtime.ReadMemStats(&after)
	return int(after.NumGC - before.NumGC)
}

var garbage, kept []byte

// gcPercent returns the current GC percentage. Reading it needs a write.
func gcPercent() int {
	p := debug.SetGCPercent(growth)
	debug.SetGCPercent(p)
	return p
}

// The first collection of a small heap comes after MinGrowth, like later collections.
func TestFirstCollectionComesAfterMinGrowth(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(growth))
	for _, collect := range []bool{false, true} {
		if collect {
			runtime.GC()
		}
		debug.SetGCPercent(percent(scanned()))
		var now runtime.MemStats
		runtime.ReadMemStats(&now)
		assert.Truef(t, now.NextGC <= MinGrowth+8<<20, "the next collection comes at %d MB", now.NextGC>>20)
	}
	got := goMinimum * percent(0) / 100
	assert.Truef(t, got <= MinGrowth, "no collection before %d MB are allocated", got>>20)
}

func TestPercent(t *testing.T) {
	const much = 20 * MinGrowth
	adjust()
	if few := collections(much); few > much/MinGrowth+10 { // without the minimum, one for each four megabytes
		t.Errorf("%d collections of %d MB", few, much>>20)
	}
	kept = make([]byte, 4*MinGrowth)
	for range 100 { // the cleanup runs shortly after the collection
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
		if gcPercent() == growth {
			break
		}
	}
	assert.Equal(t, growth, gcPercent(), len(kept)>>20)
	kept = nil
	for range 100 {
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
		if gcPercent() > growth {
			return
		}
	}
	t.Error("a heap that has become small again does not grow by the minimum")
}
