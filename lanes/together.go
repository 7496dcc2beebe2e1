package lanes

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	togetherMost = 64 // how many share one statement and its commit at most
	// togetherPatience is how long one waits for others to be done before it goes by itself: one that is held up, as a
	// release by a fenced write, must not hold up the rest.
	togetherPatience = 25 * time.Millisecond
	togetherLimit    = 5 * time.Second // for the statement of several
	// gatherFor is how long the first of several waits for those that come with it, where the last statement was not for one
	// alone: until there are as many again, but not longer.
	gatherFor = 100 * time.Microsecond
)

// together lets callers at the same time share one statement and its commit. A caller who is alone asks at once, by
// itself and in its own goroutine, so one caller pays nothing; while that is under way others gather, and go together when
// it is done; they come back together, so the next time the first waits for the rest. Each gets the answer to its own question after the commit. One without an answer, or whose statement failed
// and changed nothing, asks by itself: so one that fails does so alone.
type together[In, Out any] struct {
	// send asks for several at once. Its answers are in their order; nil where there is none.
	send func(ctx context.Context, ins []In) ([]*Out, error)
	// late gets an answer for which nobody waits any more; nil when that does not matter.
	late func(in In, out Out)

	mu      sync.Mutex
	busy    bool // somebody asks; who comes now gathers
	last    int  // how many the last statement was for
	gather  *time.Timer
	waiting []*question[In, Out]
}

// question is one that waits. Done gets one reply.
type question[In, Out any] struct {
	in   In
	done chan reply[Out]
}

// reply is an answer, an error, or, when there is neither, that it is to be asked by itself. Who leads makes room for the next
// then.
type reply[Out any] struct {
	out   *Out
	err   error
	leads bool
}

// ask asks with others or by alone. When ctx ends first it returns its cause, and the answer goes to late.
func (t *together[In, Out]) ask(ctx context.Context, in In, alone func() (Out, error)) (Out, error) {
	t.mu.Lock()
	if !t.busy && t.last < 2 {
		t.busy = true
		t.mu.Unlock()
		defer t.next()
		return alone()
	}
	q, all := t.joinLocked(in)
	t.mu.Unlock()
	if all {
		t.next()
	}
	got := t.await(ctx, q)
	switch {
	case got.err != nil:
		var none Out
		return none, got.err
	case got.out != nil:
		return *got.out, nil
	case got.leads:
		defer t.next()
	}
	return alone()
}

// joinLocked puts a question to the others. All says that nobody is waited for any more: the caller is to call next.
func (t *together[In, Out]) joinLocked(in In) (q *question[In, Out], all bool) {
	q = &question[In, Out]{in: in, done: make(chan reply[Out], 1)}
	t.waiting = append(t.waiting, q)
	switch {
	case !t.busy:
		t.busy = true
		t.gather = time.AfterFunc(gatherFor, t.next)
	case t.gather != nil && len(t.waiting) >= t.last:
		all = t.gather.Stop()
	}
	return q, all
}

// await waits for the reply, but not for ever to be asked.
func (t *together[In, Out]) await(ctx context.Context, q *question[In, Out]) reply[Out] {
	patience := time.NewTimer(togetherPatience)
	defer patience.Stop()
	for {
		select {
		case got := <-q.done:
			return got
		case <-patience.C:
			if t.withdraw(q) {
				return reply[Out]{}
			}
		case <-ctx.Done():
			if !t.withdraw(q) {
				go t.discard(q)
			}
			return reply[Out]{err: context.Cause(ctx)}
		}
	}
}

// withdraw takes a question back; false when it is under way.
func (t *together[In, Out]) withdraw(q *question[In, Out]) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, other := range t.waiting {
		if other == q {
			t.waiting = append(t.waiting[:i:i], t.waiting[i+1:]...)
			return true
		}
	}
	return false
}

// discard takes the reply for a caller who has left.
func (t *together[In, Out]) discard(q *question[In, Out]) {
	got := <-q.done
	if got.leads {
		t.next()
	}
	if got.out != nil && t.late != nil {
		t.late(q.in, *got.out)
	}
}

// next asks what has gathered, or lets the next one who comes go by itself.
func (t *together[In, Out]) next() {
	t.mu.Lock()
	n := min(len(t.waiting), togetherMost)
	now := t.waiting[:n:n]
	t.waiting = append([]*question[In, Out](nil), t.waiting[n:]...)
	t.busy = n > 0
	t.gather = nil
	if n > 0 {
		t.last = n
	}
	t.mu.Unlock()
	switch n {
	case 0:
	case 1:
		now[0].done <- reply[Out]{leads: true}
	default:
		go t.all(now)
	}
}

// all is one statement.
func (t *together[In, Out]) all(now []*question[In, Out]) {
	defer t.next()
	ctx, cancel := context.WithTimeout(context.Background(), togetherLimit)
	defer cancel()
	ins := make([]In, len(now))
	for i, q := range now {
		ins[i] = q.in
	}
	outs, err := t.send(ctx, ins)
	for i, q := range now {
		switch {
		case err == nil:
			q.done <- reply[Out]{out: outs[i]}
		case unchanged(err):
			q.done <- reply[Out]{}
		default:
			q.done <- reply[Out]{err: err}
		}
	}
}

// unchanged reports that a statement that failed with err has certainly changed nothing. A server that goes down says so
// also to who has just committed.
func unchanged(err error) bool {
	code := postgres.Code(err)
	return pgconn.SafeToRetry(err) || code != "" && code[:2] != "57" && code[:2] != "08"
}
