package batch

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// gated is a batcher. Its batches report their size and wait for a release.
type gated struct {
	*Batcher[int, int]
	sizes   chan int
	release chan struct{}
	callers sync.WaitGroup
}

func newGated(s *Scheduler) *gated {
	g := &gated{sizes: make(chan int, 100), release: make(chan struct{})}
	g.Batcher = &Batcher[int, int]{
		Scheduler: s, MaxWait: 1000 * time.Hour,
		Send: func(_ context.Context, ins []int) ([]Answer[int], error) {
			g.sizes <- len(ins)
			<-g.release
			return make([]Answer[int], len(ins)), nil
		},
	}
	return g
}

// write starts n callers, and waits until the number of queued writes is queued.
func (g *gated) write(t *testing.T, n, queued int) {
	t.Helper()
	for range n {
		g.callers.Go(func() {
			_, err := g.Do(t.Context(), 0, func() (int, error) {
				g.sizes <- 1
				<-g.release
				return 0, nil
			})
			assert.NoError(t, err)
		})
	}
	pgtest.Eventually(t, func() bool { return queuedWrites(g.Batcher) == queued }, "writes are queued")
}

// sent checks the sizes of the next batches.
func (g *gated) sent(t *testing.T, want ...int) {
	t.Helper()
	for _, n := range want {
		select {
		case got := <-g.sizes:
			assert.Equal(t, n, got)
		case <-time.After(waitTimeout):
			t.Fatalf("no batch of %d", n)
		}
	}
}

// idle checks that no further batch was sent.
func (g *gated) idle(t *testing.T) {
	t.Helper()
	select {
	case n := <-g.sizes:
		t.Errorf("a batch of %d, want none", n)
	default:
	}
}

// finish lets one batch finish.
func (g *gated) finish(t *testing.T) {
	t.Helper()
	select {
	case g.release <- struct{}{}:
	case <-time.After(waitTimeout):
		t.Fatal("no batch is in flight")
	}
}

// end lets all batches finish.
func (g *gated) end() {
	close(g.release)
	g.callers.Wait()
}

// noTimer returns a scheduler without slow batches.
func noTimer() *Scheduler { return &Scheduler{slow: time.Hour} }

func TestMaxSize(t *testing.T) {
	t.Parallel()
	g := newGated(noTimer())
	g.MaxSize = 4
	g.write(t, 1, 0)
	g.sent(t, 1)
	g.write(t, 6, 6)
	g.idle(t)
	g.finish(t)
	g.sent(t, 4)
	g.end()
	g.sent(t, 2)
}

func TestLongestQueueIsSentFirst(t *testing.T) {
	t.Parallel()
	s := noTimer()
	few, many := newGated(s), newGated(s)
	few.write(t, 1, 0)
	few.sent(t, 1)
	few.write(t, 2, 2)
	many.write(t, 3, 3)
	s.mu.Lock()
	few.queued[0].since = time.Now().Add(time.Hour) // not overdue
	many.queued[0].since = time.Now().Add(time.Hour)
	s.mu.Unlock()
	few.finish(t)
	many.sent(t, 3)
	few.idle(t)
	many.end()
	few.end()
}

func TestOverdueQueueIsSentBeforeLongerOnes(t *testing.T) {
	t.Parallel()
	s := noTimer()
	few, many := newGated(s), newGated(s)
	few.write(t, 1, 0)
	few.sent(t, 1)
	few.write(t, 2, 2)
	many.write(t, 3, 3)
	s.mu.Lock()
	few.queued[0].since = time.Now().Add(-time.Hour)
	many.queued[0].since = time.Now().Add(-time.Minute)
	s.mu.Unlock()
	few.finish(t)
	few.sent(t, 2)
	many.idle(t)
	few.end()
	many.end()
}

func TestManyQueuedWritesStartSecondBatch(t *testing.T) {
	t.Parallel()
	g := newGated(noTimer())
	g.MaxSize = overlap
	g.write(t, 1, 0)
	g.sent(t, 1)
	g.write(t, overlap-1, overlap-1)
	g.idle(t)
	g.write(t, 1, 0)
	g.sent(t, overlap) // the second
	g.write(t, overlap, overlap)
	g.idle(t) // no third batch
	g.finish(t)
	g.sent(t, overlap)
	g.end()
}

func TestSlowBatchDelaysNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &Scheduler{}
		slow, other := newGated(s), newGated(s)
		slow.callers.Go(func() { _, _ = slow.Do(t.Context(), 0, func() (int, error) { <-slow.release; return 0, nil }) })
		synctest.Wait()
		began := time.Now()
		other.callers.Go(func() { _, _ = other.Do(t.Context(), 0, func() (int, error) { return 0, nil }) })
		other.callers.Wait()
		elapsed := time.Since(began)
		assert.Truef(t, elapsed <= 2*slowAfter, "a write waited %s for a slow one", elapsed)
		slow.end()
	})
}

// While three batches of a batcher do not finish, a further write waits for MaxWait.
func TestBatcherHasAtMostThreeBatchesInFlight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var sent atomic.Int32
		free := make(chan struct{})
		s := &Scheduler{}
		away := &Batcher[int, int]{Scheduler: s, Send: func(_ context.Context, ins []int) ([]Answer[int], error) {
			sent.Add(1)
			<-free
			return make([]Answer[int], len(ins)), nil
		}}
		var callers sync.WaitGroup
		for range 100 {
			for range 4 {
				callers.Go(func() {
					ctx, leave := context.WithTimeout(t.Context(), time.Second)
					defer leave()
					_, err := away.Do(ctx, 0, func() (int, error) { <-ctx.Done(); return 0, ctx.Err() })
					assert.ErrorIs(t, err, context.DeadlineExceeded)
				})
			}
			time.Sleep(100 * time.Millisecond)
		}
		began := time.Now()
		near := &Batcher[int, int]{Scheduler: s}
		_, err := near.Do(t.Context(), 0, func() (int, error) { return 0, nil })
		assert.Truef(t, err == nil && time.Since(began) <= 2*slowAfter,
			"a write of another batcher: %v after %s", err, time.Since(began))
		callers.Wait()
		n := sent.Load()
		assert.Truef(t, n <= maxInFlight, "%d batches in flight, want at most %d", n, maxInFlight)
		began = time.Now()
		direct := func() (int, error) { return 1, nil }
		if n, err := away.Do(t.Context(), 0, direct); n != 1 || err != nil || time.Since(began) > defaultMaxWait+2*slowAfter {
			t.Errorf("beside %d batches in flight: %d, %v after %s", sent.Load(), n, err, time.Since(began))
		}
		close(free)
		time.Sleep(time.Second)
	})
}

// Callers that write again at once also share their next batch.
func TestReturningCallersShareNextBatch(t *testing.T) {
	t.Parallel()
	var batches, writes atomic.Int32
	a := &Batcher[int, int]{Scheduler: &Scheduler{}, Send: func(_ context.Context, ins []int) ([]Answer[int], error) {
		batches.Add(1)
		writes.Add(int32(len(ins)))
		time.Sleep(2 * time.Millisecond)
		return make([]Answer[int], len(ins)), nil
	}}
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for range 50 {
				_, _ = a.Do(t.Context(), 0, func() (int, error) { time.Sleep(2 * time.Millisecond); return 0, nil })
			}
		})
	}
	callers.Wait()
	mean := float64(writes.Load()) / float64(batches.Load())
	assert.Truef(t, mean >= 4, "%d batches of %.1f writes, want half of the 8 callers at least", batches.Load(), mean)
}
