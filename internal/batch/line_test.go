package batch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// crowd is a group whose batches say how large they are, and go on when they are let.
type crowd struct {
	*Group[int, int]
	sizes chan int
	let   chan struct{}
	under sync.WaitGroup
}

func newCrowd(l *Line) *crowd {
	c := &crowd{sizes: make(chan int, 100), let: make(chan struct{})}
	c.Group = &Group[int, int]{Line: l, Patience: 1000 * time.Hour, Send: func(_ context.Context, ins []int) ([]Answer[int], error) {
		c.sizes <- len(ins)
		<-c.let
		return make([]Answer[int], len(ins)), nil
	}}
	return c
}

// come has so many callers write once.
func (c *crowd) come(t *testing.T, n int) {
	t.Helper()
	for range n {
		c.under.Go(func() {
			_, err := c.Do(t.Context(), 0, func() (int, error) {
				c.sizes <- 1
				<-c.let
				return 0, nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// gathers waits until so many wait.
func (c *crowd) gathers(t *testing.T, n int) {
	t.Helper()
	pgtest.Eventually(t, patience, func() bool { return gathered(c.Group) == n }, "writes gather")
}

// went expects that the next batches are of these sizes.
func (c *crowd) went(t *testing.T, want ...int) {
	t.Helper()
	for _, n := range want {
		select {
		case got := <-c.sizes:
			if got != n {
				t.Errorf("a batch of %d, want %d", got, n)
			}
		case <-time.After(patience):
			t.Fatalf("no batch of %d", n)
		}
	}
}

// rests expects that nothing more has gone.
func (c *crowd) rests(t *testing.T) {
	t.Helper()
	select {
	case n := <-c.sizes:
		t.Errorf("a batch of %d, want none", n)
	default:
	}
}

// land lets one batch end.
func (c *crowd) land(t *testing.T) {
	t.Helper()
	select {
	case c.let <- struct{}{}:
	case <-time.After(patience):
		t.Fatal("no batch is under way")
	}
}

// share has so many share a batch, which is under way then.
func (c *crowd) share(t *testing.T, n int) {
	t.Helper()
	c.come(t, 1)
	c.went(t, 1)
	c.come(t, n)
	c.gathers(t, n)
	c.land(t)
	c.went(t, n)
}

// end lets all end.
func (c *crowd) end() {
	close(c.let)
	c.under.Wait()
}

// patient is a line in which nothing happens because of the time, and nobody is expected back.
func patient() *Line { return &Line{slow: time.Hour, overdue: time.Hour, regroup: time.Nanosecond} }

// landed waits until nothing is under way.
func landed(t *testing.T, l *Line) {
	t.Helper()
	pgtest.Eventually(t, patience, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.flying) == 0
	}, "what was under way has ended")
}

func TestABatchTakesNoMoreThanItMay(t *testing.T) {
	t.Parallel()
	c := newCrowd(patient())
	c.Most = 4
	c.come(t, 1)
	c.went(t, 1)
	c.come(t, 6)
	c.gathers(t, 6)
	c.rests(t)
	c.land(t)
	c.went(t, 4)
	c.gathers(t, 2)
	c.end()
	c.went(t, 2)
}

// Those who had an answer together wait for each other, also where some do something else next.
func TestThoseWhoHadAnAnswerAreWaitedFor(t *testing.T) {
	t.Parallel()
	l := patient()
	l.regroup, l.returns = time.Hour, 1
	starts, ends := newCrowd(l), newCrowd(l)
	starts.share(t, 5)
	starts.land(t)
	landed(t, l)
	ends.come(t, 3)
	ends.gathers(t, 3)
	starts.come(t, 1)
	starts.gathers(t, 1)
	ends.rests(t)
	ends.come(t, 1)
	ends.went(t, 4) // the last of the five is here
	starts.rests(t)
	ends.land(t)
	landed(t, l)
	starts.come(t, 3)
	starts.gathers(t, 4)
	starts.rests(t)
	starts.come(t, 1)
	starts.went(t, 5)
	ends.end()
	starts.end()
}

// Who does not come back is not waited for, at last not at all.
func TestWhoDoesNotComeBackIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	l := patient()
	l.regroup, l.returns = time.Millisecond, 1
	c := newCrowd(l)
	for range 20 { // of four who had an answer together, nobody
		c.come(t, 1)
		c.went(t, 1)
		c.come(t, 4)
		c.gathers(t, 4)
		c.land(t)
		c.went(t, 4)
		c.land(t)
		landed(t, l)
		c.come(t, 1) // goes, though others are expected
		c.went(t, 1)
		c.land(t)
		landed(t, l)
	}
	l.mu.Lock()
	returns := l.returns
	l.mu.Unlock()
	if returns > 0.5 {
		t.Errorf("%.2f of those who had an answer are expected back, and never come", returns)
	}
	c.end()
}

func TestTheLargestGroupGoesNextAndNoneWaitsForEver(t *testing.T) {
	t.Parallel()
	l := patient()
	few, many := newCrowd(l), newCrowd(l)
	few.share(t, 2)
	few.come(t, 2)
	few.gathers(t, 2)
	many.come(t, 3)
	many.gathers(t, 3)
	few.land(t)
	many.went(t, 3)
	few.rests(t)
	many.come(t, 5)
	many.gathers(t, 5)
	l.mu.Lock()
	l.overdue = beside * time.Hour // an hour for each of the seven who wait
	few.waiting[0].came = time.Now().Add(-8 * time.Hour)
	l.mu.Unlock()
	many.land(t)
	few.went(t, 2) // have waited longest
	few.land(t)
	many.went(t, 5)
	few.end()
	many.end()
}

// Where few write, one does not wait for another of another kind, but for a batch of several.
func TestFewDoNotWaitForEachOther(t *testing.T) {
	t.Parallel()
	l := patient()
	a, b := newCrowd(l), newCrowd(l)
	a.come(t, 1)
	a.went(t, 1)
	b.come(t, 1)
	b.went(t, 1)
	a.come(t, 2)
	a.gathers(t, 2)
	a.rests(t)
	b.land(t)
	b.come(t, 1)
	b.went(t, 1) // the two wait for the one of theirs, which may be held up
	a.land(t)
	b.land(t)
	a.went(t, 2)
	b.come(t, 1)
	b.gathers(t, 1)
	b.rests(t)
	a.end()
	b.went(t, 1)
	b.end()
}

// One who wrote by itself and hears late, as many do when a lock is gone, has nobody wait for longer.
func TestWhoWroteByItselfIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const held = 20
		l := &Line{returns: 1}
		starts, ends := newCrowd(l), newCrowd(l)
		for range held { // all of them slow
			starts.come(t, 1)
			starts.went(t, 1)
		}
		time.Sleep(defaultSlow)
		ends.come(t, 1)
		ends.went(t, 1)
		ends.come(t, 2)
		synctest.Wait()
		ends.land(t)
		ends.went(t, 2)
		ends.land(t)
		ends.come(t, 1) // waits for the other
		landed := 0
		for ; landed < held && len(ends.sizes) == 0; landed++ {
			starts.land(t)
			time.Sleep(defaultRegroup / 2)
			synctest.Wait()
		}
		if landed == held {
			t.Errorf("%d who wrote by themselves have landed, and one still waits", landed)
		}
		starts.end()
		ends.end()
	})
}

// Beside three batches that are held up the next ones wait no longer than they have patience for, though nothing lands.
func TestBesideBatchesThatAreHeldUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		free := make(chan struct{})
		g := &Group[int, int]{Line: &Line{}, Send: func(_ context.Context, ins []int) ([]Answer[int], error) {
			<-free
			return make([]Answer[int], len(ins)), nil
		}}
		var under sync.WaitGroup
		round := func(alone func() (int, error)) {
			under.Go(func() { _, _ = g.Do(t.Context(), 0, func() (int, error) { <-free; return 0, nil }) }) // holds up the two
			synctest.Wait()
			for range 2 {
				under.Go(func() { _, _ = g.Do(t.Context(), 0, alone) })
			}
			time.Sleep(2 * defaultSlow)
		}
		for range heldUp {
			round(nil)
		}
		began := time.Now()
		round(func() (int, error) {
			if took := time.Since(began); took != defaultPatience {
				t.Errorf("after %v", took)
			}
			return 0, nil
		})
		time.Sleep(time.Hour)
		close(free)
		under.Wait()
	})
}

// A database that is away collects three batches of a kind, and no more, whose callers have left by then; other writes end with theirs.
func TestFewBatchesAreHeldUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := &Line{}
		var sent atomic.Int32
		free := make(chan struct{})
		away := &Group[int, int]{Line: l, Send: func(_ context.Context, ins []int) ([]Answer[int], error) {
			sent.Add(1)
			<-free
			return make([]Answer[int], len(ins)), nil
		}}
		var under sync.WaitGroup
		for range 100 {
			for range 4 {
				under.Go(func() {
					ctx, leave := context.WithTimeout(t.Context(), time.Second)
					defer leave()
					_, err := away.Do(ctx, 0, func() (int, error) { <-ctx.Done(); return 0, ctx.Err() })
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Error(err)
					}
				})
			}
			time.Sleep(100 * time.Millisecond)
		}
		near := newCrowd(l) // of another kind, while some of the first wait
		near.come(t, 1)
		near.went(t, 1)
		near.come(t, 3)
		synctest.Wait()
		near.land(t)
		near.went(t, 3)
		near.end()
		under.Wait()
		if n := sent.Load(); n > 3 {
			t.Errorf("%d batches are under way, want 3 at most", n)
		}
		close(free)
	})
}

// When many wait, a second batch goes beside the first, whoever is expected back, and no third.
func TestManyGoBesideABatch(t *testing.T) {
	t.Parallel()
	l := patient()
	l.regroup, l.returns = time.Hour, 1
	c := newCrowd(l)
	c.Most = beside
	c.share(t, 2)
	c.come(t, beside-1)
	c.gathers(t, beside-1)
	c.rests(t)
	c.come(t, 1)
	c.went(t, beside)
	c.come(t, beside)
	c.gathers(t, beside)
	c.rests(t)
	c.land(t)
	c.went(t, beside)
	c.end()
}

// Nor do many wait for one of their own kind.
func TestManyGoBesideOne(t *testing.T) {
	t.Parallel()
	c := newCrowd(patient())
	c.come(t, 1)
	c.went(t, 1)
	c.come(t, beside-1)
	c.gathers(t, beside-1)
	c.rests(t)
	c.come(t, 1)
	c.went(t, beside)
	c.end()
}

// Of several groups that have waited for too long, the one that has waited longest goes first.
func TestWhoHasWaitedLongestGoesFirst(t *testing.T) {
	t.Parallel()
	l := patient()
	a, b, c := newCrowd(l), newCrowd(l), newCrowd(l)
	a.share(t, 2)
	for hours, g := range map[int]*crowd{2: a, 3: b, 1: c} {
		g.come(t, 2)
		g.gathers(t, 2)
		l.mu.Lock()
		g.waiting[0].came = time.Now().Add(-time.Duration(hours) * time.Hour)
		l.mu.Unlock()
	}
	l.mu.Lock()
	l.overdue = time.Minute
	l.mu.Unlock()
	a.land(t)
	b.went(t, 2)
	b.land(t)
	a.went(t, 2)
	a.land(t)
	c.went(t, 2)
	for _, g := range []*crowd{a, b, c} {
		g.end()
	}
}

// Those who are expected back are waited for as long as that, also where a batch would have been waited for longer.
func TestThoseWhoAreExpectedAreNotWaitedForForLong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(&Line{returns: 1})
		for _, n := range []int{1, 2} {
			c.come(t, n)
			synctest.Wait()
		}
		c.land(t)
		c.went(t, 1, 2)
		c.come(t, 1)
		synctest.Wait()
		c.land(t)
		time.Sleep(defaultRegroup)
		synctest.Wait()
		if len(c.sizes) != 1 {
			t.Error("they are waited for until a batch would have been slow")
		}
		c.end()
	})
}

// A batch that takes long is not waited for, and its end is nobody else's.
func TestASlowBatchIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	l := patient()
	l.slow = 5 * time.Millisecond
	c := newCrowd(l)
	for range 3 {
		c.come(t, 1)
		c.went(t, 1)
	}
	for range 3 {
		c.land(t)
	}
	c.under.Wait()
	landed(t, l)
	if l.alarmAt.After(time.Now().Add(l.slow)) || slices.Contains([]bool{c.underway.alone, l.sharedLocked()}, true) {
		t.Error("something is left of batches that were slow")
	}
	c.end()
}
