// Package batch lets calls that are made at the same time share one statement and its commit.
//
// Each kind of write is a Group, and groups stand in a Line. A caller who is alone writes at once, by itself and in its own goroutine, so
// one caller pays nothing. While a write is under way others gather, and the group in which most have gathered goes next: all of them
// together. So callers who do the same fall into step, and statements, of which one costs more to begin than ten rows, become few.
//
// Each caller waits for the answer to its own write, which comes after the commit. A write that the batch has left out, or whose batch
// failed and has certainly changed nothing, is made by itself: so one that fails does so alone. A write that waits for longer than
// Patience goes by itself: one that is held up by somebody's lock does not hold up the rest. So do those who come while three batches of
// their group are held up, each under the ctx of its caller: else a database that is away would collect writes of callers who have left.
package batch

import (
	"cmp"
	"context"
	"slices"
	"time"
)

// Settings of a Group that has none.
const (
	defaultMost     = 100
	defaultPatience = 250 * time.Millisecond
)

// Group is a kind of write that is made for several at once. Its fields are set before the first Do; it may be used by many goroutines.
type Group[In, Out any] struct {
	// Line is where its writes wait, with those of other groups. It has to be set.
	Line *Line
	// Send writes several at once and returns their answers, in the order of ins. Its ctx is no caller's.
	Send func(ctx context.Context, ins []In) ([]Answer[Out], error)
	// Compare is the order in which writes are sent, which those of equal rank keep; nil for the order in which they came.
	Compare func(a, b In) int
	// Unchanged reports that a batch that failed with err has certainly changed nothing, so that its writes may be made again; nil
	// when they may be in any case.
	Unchanged func(err error) bool
	// Late gets an answer for which nobody waits any more; nil when that does not matter.
	Late func(in In, out Out)
	// Most is how many writes share a commit at most: 100 when it is not set.
	Most int
	// Patience is how long a write waits to be sent before it goes by itself: 250 ms when it is not set.
	Patience time.Duration
	// Limit is how long a Send may take; 0 for as long as it likes.
	Limit time.Duration

	// Guarded by the line.
	member   bool // of it
	underway underway
	waiting  []*write[In, Out]
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
	came time.Time
	done chan reply[Out]
}

type reply[Out any] struct {
	Answer[Out]
	err   error
	leads *flight // of one who is to write by itself, and makes room for the next when it is done
}

// Do makes a write, with others or by alone. It returns when the write is durable or has failed; when ctx ends first it returns its cause,
// and the write may yet be made.
func (g *Group[In, Out]) Do(ctx context.Context, in In, alone func() (Out, error)) (Out, error) {
	w, leads := g.come(in)
	if leads != nil {
		defer leads.land(1)
		return alone()
	}
	got := g.await(ctx, w)
	switch {
	case got.err != nil:
		return got.Value, got.err
	case got.leads != nil:
		defer got.leads.land(1)
		return alone()
	case got.Alone:
		return alone()
	}
	return got.Value, nil
}

// come puts a write into the line, or has it go at once when nobody else is there.
func (g *Group[In, Out]) come(in In) (*write[In, Out], *flight) {
	l := g.Line
	l.mu.Lock()
	defer l.mu.Unlock()
	if !g.member {
		l.groups, g.member = append(l.groups, g), true
	}
	if l.comeLocked(g.underway.alone) {
		return nil, l.takeOffLocked(&g.underway, true)
	}
	w := &write[In, Out]{in: in, came: time.Now(), done: make(chan reply[Out], 1)}
	g.waiting = append(g.waiting, w)
	l.waiting++
	if !l.restsLocked() {
		l.goOnLocked()
	}
	return w, nil
}

// await waits for the reply. The line sees to it that nobody waits for ever to be sent.
func (g *Group[In, Out]) await(ctx context.Context, w *write[In, Out]) reply[Out] {
	gone := ctx.Done()
	if gone == nil {
		return <-w.done
	}
	select {
	case got := <-w.done:
		return got
	case <-gone:
		if !g.withdraw(w) {
			go g.discard(w)
		}
		return reply[Out]{err: context.Cause(ctx)}
	}
}

// withdraw takes a write back; false when it is under way.
func (g *Group[In, Out]) withdraw(w *write[In, Out]) bool {
	g.Line.mu.Lock()
	defer g.Line.mu.Unlock()
	for i, other := range g.waiting {
		if other == w {
			g.waiting = append(g.waiting[:i:i], g.waiting[i+1:]...)
			g.Line.waiting--
			return true
		}
	}
	return false
}

// discard takes the reply for a caller who has left.
func (g *Group[In, Out]) discard(w *write[In, Out]) {
	got := <-w.done
	switch {
	case got.leads != nil:
		got.leads.land(0)
	case got.err == nil && !got.Alone && g.Late != nil:
		g.Late(w.in, got.Value)
	}
}

// gatheredLocked is how many wait, and since when the first of them does.
func (g *Group[In, Out]) gatheredLocked() (n int, since time.Time) {
	if len(g.waiting) == 0 {
		return 0, time.Time{}
	}
	return len(g.waiting), g.waiting[0].came
}

// giveUpLocked has those who have waited for too long write by themselves, and returns when the next one will have; zero when nobody waits.
func (g *Group[In, Out]) giveUpLocked(now time.Time) time.Time {
	patience := cmp.Or(g.Patience, defaultPatience)
	for len(g.waiting) > 0 {
		w := g.waiting[0]
		if until := w.came.Add(patience); now.Before(until) {
			return until
		}
		g.waiting = g.waiting[1:]
		g.Line.waiting--
		w.done <- reply[Out]{Answer: Answer[Out]{Alone: true}}
	}
	return time.Time{}
}

// underwayLocked is what of it is under way.
func (g *Group[In, Out]) underwayLocked() underway { return g.underway }

// sendLocked has those who have gathered go.
func (g *Group[In, Out]) sendLocked() {
	n := min(len(g.waiting), cmp.Or(g.Most, defaultMost))
	writes := g.waiting[:n:n]
	g.waiting = append([]*write[In, Out](nil), g.waiting[n:]...)
	g.Line.waiting -= n
	if n == 1 {
		writes[0].done <- reply[Out]{leads: g.Line.takeOffLocked(&g.underway, true)}
		return
	}
	go g.together(g.Line.takeOffLocked(&g.underway, false), writes)
}

// together is one batch. Its callers are expected back before they hear, as some of them are quick.
func (g *Group[In, Out]) together(f *flight, writes []*write[In, Out]) {
	answers, err := g.send(writes)
	again := err != nil && (g.Unchanged == nil || g.Unchanged(err))
	f.land(len(writes))
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

// send is the statement.
func (g *Group[In, Out]) send(writes []*write[In, Out]) ([]Answer[Out], error) {
	ctx := context.Background()
	if g.Limit > 0 {
		limited, cancel := context.WithTimeout(ctx, g.Limit)
		defer cancel()
		ctx = limited
	}
	if g.Compare != nil {
		slices.SortStableFunc(writes, func(a, b *write[In, Out]) int { return g.Compare(a.in, b.in) })
	}
	ins := make([]In, len(writes))
	for i, w := range writes {
		ins[i] = w.in
	}
	return g.Send(ctx, ins)
}
