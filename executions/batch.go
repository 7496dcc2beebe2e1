package executions

import (
	"cmp"
	"context"
	"sync"
	"time"
)

const (
	// batchMost is how many writes share one commit at most.
	batchMost = 100
	// batchPatience is how long a write waits for others to be done before it goes by itself: one that is held up by
	// somebody's lock must not hold up the rest.
	batchPatience = 250 * time.Millisecond
	// gatherFor is how long the first of several waits for those that come with it, where writes have not been alone of late:
	// until there are as many again, but not longer; for a quarter of the time that the last batch took, up to gatherMost.
	gatherFor  = 100 * time.Microsecond
	gatherMost = time.Millisecond
)

// batcher lets writes of callers at the same time share one statement and its commit. A caller who is alone writes at
// once, by itself and in its own goroutine, so one caller pays nothing; while that is under way others gather, and go
// together when it is done. Each waits for the durable answer to its own write. A write that the batch does not take,
// or whose batch failed and changed nothing, is made by itself: so one that fails does so alone.
type batcher[In, Out any] struct {
	// send writes several at once. Answers are in their order.
	send func(ctx context.Context, writes []In) ([]answer[Out], error)
	// sure reports that a batch that failed with err has changed nothing, so that its writes may be made again; nil
	// when they may be in any case.
	sure func(err error) bool
	// turns are shared with batches of other kinds; may be nil.
	turns turns
	// patience is how long a write waits for others to be done; batchPatience when it is not set.
	patience time.Duration

	mu      sync.Mutex
	busy    bool          // somebody writes; who comes now gathers
	last    int           // how many writes were of of late: after several the next will hardly be of one
	took    time.Duration // by the last batch
	gather  *time.Timer
	waiting []*write[In, Out]
}

// answer is what became of one write of a batch.
type answer[Out any] struct {
	value Out
	alone bool // nothing was done: it has to be made by itself
}

// write is one that waits. Done gets one answer.
type write[In, Out any] struct {
	in   In
	done chan reply[Out]
}

type reply[Out any] struct {
	answer[Out]
	err   error
	leads bool // whoever gets it makes room for the next when it is done
}

// do makes a write, with others or by alone. It returns when the write is durable or has failed; when ctx ends first,
// the write may yet be made.
func (b *batcher[In, Out]) do(ctx context.Context, in In, alone func() (Out, error)) (Out, error) {
	b.mu.Lock()
	if !b.busy && b.last < 2 {
		b.busy = true
		b.mu.Unlock()
		defer b.next(ctx)
		return alone()
	}
	w := &write[In, Out]{in: in, done: make(chan reply[Out], 1)}
	b.waiting = append(b.waiting, w)
	all := false
	if !b.busy {
		b.busy = true
		b.gather = time.AfterFunc(b.delay(), func() { b.launch(ctx) })
	} else if b.gather != nil && len(b.waiting) >= b.last {
		all = b.gather.Stop()
	}
	b.mu.Unlock()
	if all {
		b.launch(ctx)
	}
	got, err := b.await(ctx, w)
	switch {
	case err != nil:
		return got.value, err
	case got.leads:
		defer b.next(ctx)
		return alone()
	case got.alone:
		return alone()
	}
	return got.value, got.err
}

// await waits for the answer, but not for ever to be sent.
func (b *batcher[In, Out]) await(ctx context.Context, w *write[In, Out]) (reply[Out], error) {
	patience := time.NewTimer(cmp.Or(b.patience, batchPatience))
	defer patience.Stop()
	for {
		select {
		case got := <-w.done:
			return got, nil
		case <-patience.C:
			if b.withdraw(w) {
				return reply[Out]{answer: answer[Out]{alone: true}}, nil
			}
		case <-ctx.Done():
			if !b.withdraw(w) {
				go b.discard(ctx, w)
			}
			return reply[Out]{}, context.Cause(ctx)
		}
	}
}

// withdraw takes a write back; false when it is under way.
func (b *batcher[In, Out]) withdraw(w *write[In, Out]) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, other := range b.waiting {
		if other == w {
			b.waiting = append(b.waiting[:i], b.waiting[i+1:]...)
			return true
		}
	}
	return false
}

// discard makes room in the place of a caller who has left.
func (b *batcher[In, Out]) discard(ctx context.Context, w *write[In, Out]) {
	if got := <-w.done; got.leads {
		b.next(ctx)
	}
}

// next goes on with what has gathered, or lets the next one who comes go by itself.
func (b *batcher[In, Out]) next(ctx context.Context) {
	b.mu.Lock()
	n := len(b.waiting)
	b.busy = n > 0
	short := n > 0 && n < b.last // the others will hardly be long
	if short {
		b.gather = time.AfterFunc(b.delay(), func() { b.launch(ctx) })
	}
	b.mu.Unlock()
	if n > 0 && !short {
		b.launch(ctx)
	}
}

// delay is how long to gather: not long, compared with what is gained.
func (b *batcher[In, Out]) delay() time.Duration { return min(max(b.took/4, gatherFor), gatherMost) }

// launch sends what has gathered.
func (b *batcher[In, Out]) launch(ctx context.Context) {
	b.mu.Lock()
	n := len(b.waiting)
	b.busy = n > 0
	b.gather = nil
	var leader *write[In, Out]
	if n == 1 {
		leader, b.waiting, b.last = b.waiting[0], nil, max(1, b.last/2)
	}
	b.mu.Unlock()
	switch {
	case leader != nil:
		leader.done <- reply[Out]{leads: true}
	case n > 0:
		go b.together(context.WithoutCancel(ctx))
	}
}

// together is one batch, of all that have gathered when its turn comes.
func (b *batcher[In, Out]) together(ctx context.Context) {
	defer b.next(ctx)
	defer b.turns.enter()()
	b.mu.Lock()
	n := min(len(b.waiting), batchMost)
	writes := b.waiting[:n:n]
	b.waiting = append([]*write[In, Out](nil), b.waiting[n:]...)
	b.last = max(n, b.last/2)
	b.mu.Unlock()
	if n == 0 { // they did not want to wait
		return
	}
	began := time.Now()
	defer func() {
		b.mu.Lock()
		b.took = time.Since(began)
		b.mu.Unlock()
	}()
	ins := make([]In, n)
	for i, w := range writes {
		ins[i] = w.in
	}
	answers, err := b.send(ctx, ins)
	again := err != nil && (b.sure == nil || b.sure(err))
	for i, w := range writes {
		switch {
		case again:
			w.done <- reply[Out]{answer: answer[Out]{alone: true}}
		case err != nil:
			w.done <- reply[Out]{err: err}
		default:
			w.done <- reply[Out]{answer: answers[i]}
		}
	}
}

// turns lets batches of different kinds go one after the other: what comes meanwhile makes the next one larger, and a
// statement costs more to begin than a row. One that takes long is not waited for.
type turns chan struct{}

// turnPatience is how long a batch waits for its turn.
const turnPatience = 10 * time.Millisecond

// enter waits for the turn; the function that it returns ends it.
func (t turns) enter() (leave func()) {
	if t == nil {
		return func() {}
	}
	patience := time.NewTimer(turnPatience)
	defer patience.Stop()
	select {
	case t <- struct{}{}:
		return func() { <-t }
	case <-patience.C:
		return func() {}
	}
}
