// Package batch lets calls that are made at the same time share one statement and its commit.
//
// A caller who is alone writes at once, by itself and in its own goroutine, so one caller pays nothing. While that is under way others
// gather, and go together when it is done. They come back together, too: where writes have not been alone of late, the first of several
// waits for those that come with it, but never for longer than Gather.
//
// Each caller waits for the answer to its own write, which comes after the commit. A write that the batch has left out, or whose batch
// failed and has certainly changed nothing, is made by itself: so one that fails does so alone. A write that waits for longer than
// Patience goes by itself: one that is held up by somebody's lock does not hold up the rest.
package batch

import (
	"cmp"
	"context"
	"sync"
	"time"
)

// Settings of a Group that has none.
const (
	defaultMost     = 100
	defaultPatience = 250 * time.Millisecond
)

// shortest is for how long writes gather at least where they do.
const shortest = 100 * time.Microsecond

// Group is a kind of write that is made for several at once. Its fields are set before the first Do; it may be used by many goroutines.
type Group[In, Out any] struct {
	// Send writes several at once and returns their answers, in their order. Its ctx is no caller's.
	Send func(ctx context.Context, ins []In) ([]Answer[Out], error)
	// Unchanged reports that a batch that failed with err has certainly changed nothing, so that its writes may be made again; nil
	// when they may be in any case.
	Unchanged func(err error) bool
	// Late gets an answer for which nobody waits any more; nil when that does not matter.
	Late func(in In, out Out)
	// Turns are shared with groups of other kinds; nil for none.
	Turns Turns
	// Most is how many writes share a commit at most: 100 when it is not set.
	Most int
	// Patience is how long a write waits to be sent before it goes by itself: 250 ms when it is not set.
	Patience time.Duration
	// Limit is how long a Send may take; 0 for as long as it likes.
	Limit time.Duration
	// Gather is how long the first of several waits for the rest at most, of which it uses a quarter of the time that the last batch took. Until
	// there are as many again as there were; 100 µs when it is not set.
	Gather time.Duration
	// Regroup has those who gathered while a batch was under way wait for the rest, too, when they are fewer than were in it.
	Regroup bool

	mu      sync.Mutex
	busy    bool          // somebody writes; who comes now gathers
	last    int           // how many writes were of of late: after several the next will hardly be of one
	took    time.Duration // by the last batch
	timer   *time.Timer   // those who wait gather until then; nil when they do not
	waiting []*write[In, Out]
}

// Answer is what became of one write of a batch.
type Answer[Out any] struct {
	Value Out
	Alone bool // nothing was done: it has to be made by itself
}

// Unanswered are the answers to n writes before any has been answered: all are to be made by themselves.
func Unanswered[Out any](n int) []Answer[Out] {
	answers := make([]Answer[Out], n)
	for i := range answers {
		answers[i].Alone = true
	}
	return answers
}

// write is one that waits. Done gets one reply.
type write[In, Out any] struct {
	in   In
	done chan reply[Out]
}

type reply[Out any] struct {
	Answer[Out]
	err   error
	leads bool // whoever gets it makes room for the next when it is done
}

// Do makes a write, with others or by alone. It returns when the write is durable or has failed; when ctx ends first it returns its cause,
// and the write may yet be made.
func (g *Group[In, Out]) Do(ctx context.Context, in In, alone func() (Out, error)) (Out, error) {
	g.mu.Lock()
	if !g.busy && g.last < 2 {
		g.busy = true
		g.mu.Unlock()
		defer g.next()
		return alone()
	}
	w, all := g.joinLocked(in)
	g.mu.Unlock()
	if all {
		g.launch()
	}
	got := g.await(ctx, w)
	switch {
	case got.err != nil:
		return got.Value, got.err
	case got.leads:
		defer g.next()
		return alone()
	case got.Alone:
		return alone()
	}
	return got.Value, nil
}

// joinLocked puts a write to the others. All says that nobody is waited for any more: the caller is to launch them.
func (g *Group[In, Out]) joinLocked(in In) (w *write[In, Out], all bool) {
	w = &write[In, Out]{in: in, done: make(chan reply[Out], 1)}
	g.waiting = append(g.waiting, w)
	switch {
	case !g.busy:
		g.busy = true
		g.timer = time.AfterFunc(g.delayLocked(), g.launch)
	case g.timer != nil && len(g.waiting) >= g.last:
		all = g.timer.Stop()
	}
	return w, all
}

// await waits for the reply, but not for ever to be sent.
func (g *Group[In, Out]) await(ctx context.Context, w *write[In, Out]) reply[Out] {
	patience := time.NewTimer(cmp.Or(g.Patience, defaultPatience))
	defer patience.Stop()
	for {
		select {
		case got := <-w.done:
			return got
		case <-patience.C:
			if g.withdraw(w) {
				return reply[Out]{Answer: Answer[Out]{Alone: true}}
			}
		case <-ctx.Done():
			if !g.withdraw(w) {
				go g.discard(w)
			}
			return reply[Out]{err: context.Cause(ctx)}
		}
	}
}

// withdraw takes a write back; false when it is under way.
func (g *Group[In, Out]) withdraw(w *write[In, Out]) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, other := range g.waiting {
		if other == w {
			g.waiting = append(g.waiting[:i:i], g.waiting[i+1:]...)
			return true
		}
	}
	return false
}

// discard takes the reply for a caller who has left.
func (g *Group[In, Out]) discard(w *write[In, Out]) {
	got := <-w.done
	switch {
	case got.leads:
		g.next()
	case got.err == nil && !got.Alone && g.Late != nil:
		g.Late(w.in, got.Value)
	}
}

// next goes on with what has gathered, or lets the next one who comes go by itself.
func (g *Group[In, Out]) next() {
	g.mu.Lock()
	n := len(g.waiting)
	g.busy = n > 0
	wait := g.Regroup && n > 0 && n < g.last // the others will hardly be long
	if wait {
		g.timer = time.AfterFunc(g.delayLocked(), g.launch)
	}
	g.mu.Unlock()
	if n > 0 && !wait {
		g.launch()
	}
}

// delayLocked is how long to gather: not long, compared with what is gained.
func (g *Group[In, Out]) delayLocked() time.Duration {
	return min(max(g.took/4, shortest), cmp.Or(g.Gather, shortest))
}

// launch sends what has gathered.
func (g *Group[In, Out]) launch() {
	g.mu.Lock()
	n := len(g.waiting)
	g.busy = n > 0
	g.timer = nil
	var leader *write[In, Out]
	if n == 1 {
		leader, g.waiting, g.last = g.waiting[0], nil, max(1, g.last/2)
	}
	g.mu.Unlock()
	switch {
	case leader != nil:
		leader.done <- reply[Out]{leads: true}
	case n > 0:
		go g.together()
	}
}

// together is one batch, of all that have gathered when its turn comes.
func (g *Group[In, Out]) together() {
	defer g.next()
	defer g.Turns.enter()()
	writes := g.take()
	if len(writes) == 0 { // they did not want to wait
		return
	}
	answers, err := g.send(writes)
	again := err != nil && (g.Unchanged == nil || g.Unchanged(err))
	for i, w := range writes {
		switch {
		case again:
			w.done <- reply[Out]{Answer: Answer[Out]{Alone: true}}
		case err != nil:
			w.done <- reply[Out]{err: err}
		default:
			w.done <- reply[Out]{Answer: answers[i]}
		}
	}
}

// take is who is in the batch.
func (g *Group[In, Out]) take() []*write[In, Out] {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := min(len(g.waiting), cmp.Or(g.Most, defaultMost))
	writes := g.waiting[:n:n]
	g.waiting = append([]*write[In, Out](nil), g.waiting[n:]...)
	g.last = max(n, g.last/2)
	return writes
}

// send is the statement.
func (g *Group[In, Out]) send(writes []*write[In, Out]) ([]Answer[Out], error) {
	began := time.Now()
	defer func() {
		g.mu.Lock()
		g.took = time.Since(began)
		g.mu.Unlock()
	}()
	ctx := context.Background()
	if g.Limit > 0 {
		limited, cancel := context.WithTimeout(ctx, g.Limit)
		defer cancel()
		ctx = limited
	}
	ins := make([]In, len(writes))
	for i, w := range writes {
		ins[i] = w.in
	}
	return g.Send(ctx, ins)
}
