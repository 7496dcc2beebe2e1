// Package batch lets concurrent writes share one statement and its commit.
//
// A [Batcher] collects the writes of one kind. The batchers of one [Scheduler] take turns. The scheduler sends one
// batch at a time, or two while many writes are queued. If nothing is in flight, queued or expected, the caller sends
// its write itself at once, so a single caller pays no latency. Other writes are queued. The scheduler sends the
// longest queue next, up to MaxSize writes of it, but first a queue that has waited for 4 ms. A small batch waits at
// most 1 ms for as many new writes as the previous batch had, so callers that write again share a batch.
//
// Each caller gets the result of its own write after the commit. A caller repeats its write as a single write if the
// batch skipped it, or if the batch failed and certainly changed nothing. So one rejected write does not fail the
// others. A batch that waits for a lock delays other batches for 10 to 20 ms. Up to three batches of one batcher may be
// in flight when the scheduler sends its queue. After MaxWait in the queue, a caller makes a single write under its own
// context. So writes of departed callers do not accumulate during an outage.
package batch

import (
	"cmp"
	"context"
	"slices"
	"time"
)

// Defaults of a Batcher.
const (
	defaultMaxSize = 100
	defaultMaxWait = 250 * time.Millisecond
)

// Batcher collects writes of one kind. Set its fields before the first Do. It is safe for concurrent use.
type Batcher[In, Out any] struct {
	// Scheduler sends the batches; required.
	Scheduler *Scheduler
	// Send makes several writes and returns their results in the order of ins. Its ctx belongs to no caller.
	Send func(ctx context.Context, ins []In) ([]Result[Out], error)
	// Compare sorts a batch; equal writes keep their order. Nil keeps the order of arrival.
	Compare func(a, b In) int
	// Unchanged reports whether a batch that failed with err has certainly changed nothing. Then its callers repeat
	// their writes. If Unchanged is nil, they repeat the writes after any error.
	Unchanged func(err error) bool
	// OnLate receives the result of a write whose caller has left. If OnLate is nil, the batcher drops such results.
	OnLate func(in In, out Out)
	// MaxSize bounds the writes of one batch; 0 means 100.
	MaxSize int
	// MaxWait bounds the time of a write in the queue; 0 means 250 ms. After MaxWait the caller makes a single write. The
	// scheduler checks every 10 ms.
	MaxWait time.Duration
	// Timeout bounds one Send; 0 means no bound.
	Timeout time.Duration

	// The scheduler's mu guards the fields below.
	registered bool
	inFlight   int
	queued     []*write[In, Out]
}

// Result is the outcome of one write of a batch.
type Result[Out any] struct {
	Value   Out
	Skipped bool // the batch did not make the write, so the caller makes a single write
}

// AllSkipped returns n results with Skipped set.
func AllSkipped[Out any](n int) []Result[Out] {
	results := make([]Result[Out], n)
	for i := range results {
		results[i].Skipped = true
	}
	return results
}

// write is a queued write. Its channel receives one reply.
type write[In, Out any] struct {
	in       In
	queuedAt time.Time
	done     chan reply[Out]
}

type reply[Out any] struct {
	Result[Out]
	err      error
	inFlight *inFlight // a batch of one, which the caller sends and finishes; nil otherwise
}

// Do makes a write, in a batch or by single. It returns when the write is committed or has failed. When ctx ends first,
// Do returns the cause of ctx, and the batch may still make the write.
func (b *Batcher[In, Out]) Do(ctx context.Context, in In, single func() (Out, error)) (Out, error) {
	w, own := b.enqueue(in)
	if own != nil {
		defer own.finish(1)
		return single()
	}
	r := b.await(ctx, w)
	if r.inFlight != nil {
		defer r.inFlight.finish(1)
	}
	if r.err == nil && r.Skipped {
		return single()
	}
	return r.Value, r.err
}

// enqueue queues a write. If no other write is in flight or queued, it instead returns a batch of one for the caller to
// send.
func (b *Batcher[In, Out]) enqueue(in In) (*write[In, Out], *inFlight) {
	s := b.Scheduler
	s.mu.Lock()
	defer s.mu.Unlock()
	if !b.registered {
		s.batchers, b.registered = append(s.batchers, b), true
	}
	s.expectedWrites--
	if s.idleLocked() {
		return nil, s.startLocked(&b.inFlight)
	}
	w := &write[In, Out]{in: in, queuedAt: time.Now(), done: make(chan reply[Out], 1)}
	b.queued = append(b.queued, w)
	s.queued++
	s.dispatchLocked()
	return w, nil
}

// await waits for the reply to w.
func (b *Batcher[In, Out]) await(ctx context.Context, w *write[In, Out]) reply[Out] {
	select {
	case r := <-w.done:
		return r
	case <-ctx.Done():
		if !b.withdraw(w) {
			go b.discard(w)
		}
		return reply[Out]{err: context.Cause(ctx)}
	}
}

// withdraw removes a write from the queue; false when it is in flight.
func (b *Batcher[In, Out]) withdraw(w *write[In, Out]) bool {
	b.Scheduler.mu.Lock()
	defer b.Scheduler.mu.Unlock()
	i := slices.Index(b.queued, w)
	if i < 0 {
		return false
	}
	b.queued = slices.Delete(b.queued, i, i+1)
	b.Scheduler.queued--
	return true
}

// discard receives the reply to a write whose caller has left.
func (b *Batcher[In, Out]) discard(w *write[In, Out]) {
	r := <-w.done
	switch {
	case r.inFlight != nil:
		r.inFlight.finish(0)
	case r.err == nil && !r.Skipped && b.OnLate != nil:
		b.OnLate(w.in, r.Value)
	}
}

// backlogLocked returns the number of queued writes and the time of the oldest. It returns 0 if the batcher may send
// none now.
func (b *Batcher[In, Out]) backlogLocked() (n int, oldest time.Time) {
	if len(b.queued) == 0 || b.inFlight >= maxInFlight {
		return 0, time.Time{}
	}
	return len(b.queued), b.queued[0].queuedAt
}

// expireLocked removes writes from the queue after MaxWait. Their callers make single writes.
func (b *Batcher[In, Out]) expireLocked(now time.Time) {
	maxWait := cmp.Or(b.MaxWait, defaultMaxWait)
	for len(b.queued) > 0 && now.Sub(b.queued[0].queuedAt) >= maxWait {
		b.dequeueLocked(1)[0].done <- reply[Out]{Result: Result[Out]{Skipped: true}}
	}
}

// sendLocked sends the queued writes, up to MaxSize. The caller of a batch of one sends it itself.
func (b *Batcher[In, Out]) sendLocked() {
	writes := b.dequeueLocked(min(len(b.queued), cmp.Or(b.MaxSize, defaultMaxSize)))
	f := b.Scheduler.startLocked(&b.inFlight)
	if len(writes) == 1 {
		writes[0].done <- reply[Out]{Result: Result[Out]{Skipped: true}, inFlight: f}
		return
	}
	go b.sendBatch(f, writes)
}

// dequeueLocked removes the first n writes from the queue.
func (b *Batcher[In, Out]) dequeueLocked(n int) []*write[In, Out] {
	writes := slices.Clone(b.queued[:n])
	b.queued = slices.Delete(b.queued, 0, n)
	b.Scheduler.queued -= n
	return writes
}

// sendBatch sends a batch and replies to its callers. The scheduler expects their next writes.
func (b *Batcher[In, Out]) sendBatch(f *inFlight, writes []*write[In, Out]) {
	results, err := b.send(writes)
	retry := err != nil && (b.Unchanged == nil || b.Unchanged(err))
	f.finish(len(writes))
	for i, w := range writes {
		switch {
		case retry:
			w.done <- reply[Out]{Result: Result[Out]{Skipped: true}}
		case err != nil:
			w.done <- reply[Out]{err: err}
		default:
			w.done <- reply[Out]{Result: results[i]}
		}
	}
}

func (b *Batcher[In, Out]) send(writes []*write[In, Out]) ([]Result[Out], error) {
	ctx := context.Background()
	if b.Timeout > 0 {
		limited, cancel := context.WithTimeout(ctx, b.Timeout)
		defer cancel()
		ctx = limited
	}
	if b.Compare != nil {
		slices.SortStableFunc(writes, func(x, y *write[In, Out]) int { return b.Compare(x.in, y.in) })
	}
	ins := make([]In, len(writes))
	for i, w := range writes {
		ins[i] = w.in
	}
	return b.Send(ctx, ins)
}
