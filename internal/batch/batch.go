// Package batch lets concurrent writes share one statement and its commit.
//
// A [Batcher] collects the writes of one kind. The batchers of one [Scheduler] take turns. It sends one batch at a
// time, or two while many writes are queued. If no batch is in flight, a caller makes its write at once, so a single
// caller pays nothing. The batcher queues later writes. The scheduler sends the longest queue next, as a whole. A small
// batch waits at most 1 ms for as many new writes as the previous batch had. So callers with a next write share a
// batch.
//
// Each caller gets the answer to its own write, after the commit. If the batch left the write out, or failed and
// certainly changed nothing, the caller makes the write alone. So one bad write fails alone. A slow batch, for example
// behind a lock, does not delay other batches. The scheduler sends up to three batches of one batcher at once. After
// MaxWait in the queue, the caller makes its write alone, under its own context. So no writes of departed callers
// accumulate during an outage.
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
	// Send makes several writes and returns their answers in the order of ins. Its ctx belongs to no caller.
	Send func(ctx context.Context, ins []In) ([]Answer[Out], error)
	// Compare sorts a batch; equal writes keep their order. Nil keeps the order of arrival.
	Compare func(a, b In) int
	// Unchanged reports that a batch that failed with err has certainly changed nothing. Then the callers repeat its
	// writes. Nil means that they may repeat them after any error.
	Unchanged func(err error) bool
	// Late receives an answer whose caller has left; nil to drop it.
	Late func(in In, out Out)
	// MaxSize bounds the writes of one batch; 0 means 100.
	MaxSize int
	// MaxWait bounds the time of a write in the queue; 0 means 250 ms. Then the caller makes the write alone. The
	// scheduler checks every 10 ms.
	MaxWait time.Duration
	// Timeout bounds one Send; 0 means no bound.
	Timeout time.Duration

	// Guarded by the scheduler.
	registered bool
	inFlight   int
	queued     []*write[In, Out]
}

// Answer is the outcome of one write of a batch.
type Answer[Out any] struct {
	Value Out
	Alone bool // the batch left the write out: its caller makes it alone
}

// Unanswered returns n answers that leave every write out.
func Unanswered[Out any](n int) []Answer[Out] {
	answers := make([]Answer[Out], n)
	for i := range answers {
		answers[i].Alone = true
	}
	return answers
}

// write is a queued write. Its channel gets one reply.
type write[In, Out any] struct {
	in    In
	since time.Time
	done  chan reply[Out]
}

type reply[Out any] struct {
	Answer[Out]
	err      error
	inFlight *inFlight // batch of one, which the caller makes and finishes
}

// Do makes a write, in a batch or by alone. It returns when the write is durable or has failed. When ctx ends first, Do
// returns its cause, and the batch may still make the write.
func (b *Batcher[In, Out]) Do(ctx context.Context, in In, alone func() (Out, error)) (Out, error) {
	w, single := b.enqueue(in)
	if single != nil {
		defer single.finish(1)
		return alone()
	}
	got := b.await(ctx, w)
	if got.inFlight != nil {
		defer got.inFlight.finish(1)
	}
	if got.err == nil && got.Alone {
		return alone()
	}
	return got.Value, got.err
}

// enqueue queues a write. If no other write is in flight or queued, it returns a batch in flight for the caller
// instead.
func (b *Batcher[In, Out]) enqueue(in In) (*write[In, Out], *inFlight) {
	s := b.Scheduler
	s.mu.Lock()
	defer s.mu.Unlock()
	if !b.registered {
		s.batchers, b.registered = append(s.batchers, b), true
	}
	s.expected--
	if s.idleLocked() {
		return nil, s.startLocked(&b.inFlight)
	}
	w := &write[In, Out]{in: in, since: time.Now(), done: make(chan reply[Out], 1)}
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
	at := slices.Index(b.queued, w)
	if at < 0 {
		return false
	}
	b.queued = slices.Delete(b.queued, at, at+1)
	b.Scheduler.queued--
	return true
}

// discard takes the reply of a caller who has left.
func (b *Batcher[In, Out]) discard(w *write[In, Out]) {
	r := <-w.done
	switch {
	case r.inFlight != nil:
		r.inFlight.finish(0)
	case r.err == nil && !r.Alone && b.Late != nil:
		b.Late(w.in, r.Value)
	}
}

// backlogLocked returns the number of queued writes and the time of the oldest. It returns 0 if the batcher may send
// none now.
func (b *Batcher[In, Out]) backlogLocked() (n int, since time.Time) {
	if len(b.queued) == 0 || b.inFlight >= maxInFlight {
		return 0, time.Time{}
	}
	return len(b.queued), b.queued[0].since
}

// expireLocked returns writes that have been queued for MaxWait to their callers.
func (b *Batcher[In, Out]) expireLocked(now time.Time) {
	maxWait := cmp.Or(b.MaxWait, defaultMaxWait)
	for len(b.queued) > 0 && now.Sub(b.queued[0].since) >= maxWait {
		b.dequeueLocked(1)[0].done <- reply[Out]{Answer: Answer[Out]{Alone: true}}
	}
}

// sendLocked sends the queued writes, up to MaxSize. A caller makes a batch of one itself.
func (b *Batcher[In, Out]) sendLocked() {
	writes := b.dequeueLocked(min(len(b.queued), cmp.Or(b.MaxSize, defaultMaxSize)))
	f := b.Scheduler.startLocked(&b.inFlight)
	if len(writes) == 1 {
		writes[0].done <- reply[Out]{Answer: Answer[Out]{Alone: true}, inFlight: f}
		return
	}
	go b.share(f, writes)
}

// dequeueLocked removes the first n writes from the queue.
func (b *Batcher[In, Out]) dequeueLocked(n int) []*write[In, Out] {
	writes := slices.Clone(b.queued[:n])
	b.queued = slices.Delete(b.queued, 0, n)
	b.Scheduler.queued -= n
	return writes
}

// share makes a batch and replies to its callers. The scheduler expects their next writes.
func (b *Batcher[In, Out]) share(f *inFlight, writes []*write[In, Out]) {
	answers, err := b.send(writes)
	retry := err != nil && (b.Unchanged == nil || b.Unchanged(err))
	f.finish(len(writes))
	for i, w := range writes {
		switch {
		case retry:
			w.done <- reply[Out]{Answer: Answer[Out]{Alone: true}}
		case err != nil:
			w.done <- reply[Out]{err: err}
		default:
			w.done <- reply[Out]{Answer: answers[i]}
		}
	}
}

func (b *Batcher[In, Out]) send(writes []*write[In, Out]) ([]Answer[Out], error) {
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
