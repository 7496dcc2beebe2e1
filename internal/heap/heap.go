// Package heap says how often garbage is collected in a process that serves.
//
// Go collects whenever the heap has doubled. What an agent keeps in memory is small, often some ten megabytes, so under load it would
// collect thirty times a second, which is a fifth of its processor time. Roomy leaves a small heap Room to grow before it is collected, and changes
// nothing for one that is larger than that: the process takes Room more memory at most. GOGC in the environment goes before, and GOMEMLIMIT
// limits the heap as ever.
package heap

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// Room is how much is allocated, in bytes, between two collections of a small heap.
const Room = 48 << 20

// usual is what Go does by itself: a heap is collected when it has grown by so many per cent.
const usual = 100

// Roomy gives the heap of this process room. It is for the life of the process and for its main function to call, once.
func Roomy() {
	if os.Getenv("GOGC") == "" {
		watch()
	}
}

// watch looks after each collection how much is left, and sets how much may be added.
func watch() {
	debug.SetGCPercent(percent(live()))
	runtime.AddCleanup(new([64]byte), func(struct{}) { watch() }, struct{}{}) // when the next collection finds that nobody has it
}

// percent is by how much a heap of so many bytes may grow.
func percent(live uint64) int {
	return int(max(usual, Room*100/max(live, 1<<20)))
}

// live is what the last collection left, in bytes.
func live() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
