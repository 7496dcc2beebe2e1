// Package heap says how often garbage is collected in a process that serves.
//
// Go collects whenever the heap has doubled. What an agent keeps in memory is small, often some megabytes, so under
// load it would collect some twenty times a second, which is a tenth of its processor time and more. Roomy leaves a
// small heap Room to grow before it is collected, and changes nothing for one that is larger than that: the process
// takes Room more memory at most. GOGC in the environment goes before, and GOMEMLIMIT limits the heap as ever.
package heap

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

// Room is how much is allocated, in bytes, between two collections of a small heap.
const Room = 48 << 20

// By itself Go collects a heap when it has grown by the usual per cent, and none that is smaller than the least; with
// n times the per cent, none that is smaller than n times the least.
const (
	usual = 100
	least = 4 << 20
)

// Roomy gives the heap of this process room. It is for the life of the process and for its main function to call, once.
func Roomy() {
	if os.Getenv("GOGC") == "" {
		watch()
	}
}

// watch looks after each collection how much is left, and sets how much may be added.
func watch() {
	debug.SetGCPercent(percent(counted()))
	// when the next collection finds that nobody has it
	runtime.AddCleanup(new([64]byte), func(struct{}) { watch() }, struct{}{})
}

// percent is by how much a heap of which so many bytes count may grow.
func percent(counted uint64) int {
	return int(max(usual, Room*100/max(counted, least)))
}

// counted is what Go takes the per cent of, in bytes: what the last collection left, and what it looked through
// beside that.
func counted() (sum uint64) {
	samples := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/stack:bytes"},
		{Name: "/gc/scan/globals:bytes"}}
	metrics.Read(samples)
	for _, s := range samples {
		sum += s.Value.Uint64()
	}
	return sum
}
