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

// gatedBatcher is a batcher whose batches report their size and block until the test releases them.
type gatedBatcher struct {
	*Batcher[int, int]
	batchSizes chan int
	release    chan struct{}
	callers    sync.WaitGroup
}

func newGatedBatcher(s *Scheduler) *gatedBatcher {
	g := &gatedBatcher{batchSizes: make(chan int, 100), release: make(chan struct{})}
	g.Batcher = &Batcher[int, int]{
		Scheduler: s, MaxWait: 1000 * time.Hour,
		Send: func(_ context.Context, ins []int) ([]Result[int], error) {
			g.batchSizes <- len(ins)
			<-g.release
			return make([]Result[int], len(ins)), nil
		},
	}
	return g
}

// startWriters starts n callers and waits until queued writes are in the queue.
func (g *gatedBatcher) startWriters(t *testing.T, n, queued int) {
	t.Helper()
	for range n {
		g.callers.Go(func() {
			_, err := g.Do(t.Context(), 0, func() (int, error) {
				g.batchSizes <- 1
				<-g.release
				return 0, nil
			})
			assert.NoError(t, err)
		})
	}
	pgtest.Eventually(t, func() bool { return queuedWrites(g.Batcher) == queued }, "writes are queued")
}

// wantSizes checks the sizes of the next batches.
func (g *gatedBatcher) wantSizes(t *testing.T, want ...int) {
	t.Helper()
	for _, n := range want {
		select {
		case got := <-g.batchSizes:
			assert.Equal(t, n, got)
		case <-time.After(waitTimeout):
			t.Fatalf("no batch of %d", n)
		}
	}
}

// wantNone checks that no further batch was sent.
func (g *gatedBatcher) wantNone(t *testing.T) {
	t.Helper()
	select {
	case n := <-g.batchSizes:
		t.Errorf("a batch of %d, want none", n)
	default:
	}
}

// finishOne lets one batch finish.
func (g *gatedBatcher) finishOne(t *testing.T) {
	t.Helper()
	select {
	case g.release <- struct{}{}:
	case <-time.After(waitTimeout):
		t.Fatal("no batch is in flight")
	}
}

// finishAll lets all batches finish.
func (g *gatedBatcher) finishAll() {
	close(g.release)
	g.callers.Wait()
}

// newScheduler returns a scheduler without slow batches.
func newScheduler() *Scheduler { return &Scheduler{slowAfter: time.Hour} }

func TestMaxSizeBoundsBatch(t *testing.T) {
	t.Parallel()
	g := newGatedBatcher(newScheduler())
	g.MaxSize = 4
	g.startWriters(t, 1, 0)
	g.wantSizes(t, 1)
	g.startWriters(t, 6, 6)
	g.wantNone(t)
	g.finishOne(t)
	g.wantSizes(t, 4)
	g.finishAll()
	g.wantSizes(t, 2)
}

func TestLongestOrOverdueQueueIsSentFirst(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		short, long time.Duration // ages of the oldest writes
		size        int           // of the next batch
	}{
		"longest": {-time.Hour, -time.Hour, 3},
		"overdue": {time.Hour, time.Minute, 2},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler()
			short, long := newGatedBatcher(s), newGatedBatcher(s)
			long.batchSizes, long.release = short.batchSizes, short.release
			short.startWriters(t, 1, 0)
			short.wantSizes(t, 1)
			short.startWriters(t, 2, 2)
			long.startWriters(t, 3, 3)
			s.mu.Lock()
			short.queued[0].queuedAt = time.Now().Add(-test.short)
			long.queued[0].queuedAt = time.Now().Add(-test.long)
			s.mu.Unlock()
			short.finishOne(t)
			short.wantSizes(t, test.size)
			short.wantNone(t)
			short.finishAll()
			long.callers.Wait()
		})
	}
}

func TestManyQueuedWritesStartSecondBatch(t *testing.T) {
	t.Parallel()
	g := newGatedBatcher(newScheduler())
	g.MaxSize = overlapThreshold
	g.startWriters(t, 1, 0)
	g.wantSizes(t, 1)
	g.startWriters(t, overlapThreshold-1, overlapThreshold-1)
	g.wantNone(t)
	g.startWriters(t, 1, 0)
	g.wantSizes(t, overlapThreshold) // the second
	g.startWriters(t, overlapThreshold, overlapThreshold)
	g.wantNone(t) // no third batch
	g.finishOne(t)
	g.wantSizes(t, overlapThreshold)
	g.finishAll()
}

func TestSlowBatchDelaysNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &Scheduler{}
		slow, other := newGatedBatcher(s), newGatedBatcher(s)
		slow.callers.Go(func() { _, _ = slow.Do(t.Context(), 0, func() (int, error) { <-slow.release; return 0, nil }) })
		synctest.Wait()
		start := time.Now()
		other.callers.Go(func() { _, _ = other.Do(t.Context(), 0, func() (int, error) { return 0, nil }) })
		other.callers.Wait()
		elapsed := time.Since(start)
		assert.Truef(t, elapsed <= 2*slowAfter, "a write waited %s for a slow one", elapsed)
		slow.finishAll()
	})
}

// While three batches of a batcher do not finish, a further write waits for MaxWait.
func TestBatchesInFlightAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var sent atomic.Int32
		unblock := make(chan struct{})
		s := &Scheduler{}
		blocked := &Batcher[int, int]{Scheduler: s, Send: func(_ context.Context, ins []int) ([]Result[int], error) {
			sent.Add(1)
			<-unblock
			return make([]Result[int], len(ins)), nil
		}}
		var callers sync.WaitGroup
		for range 100 {
			for range 4 {
				callers.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					_, err := blocked.Do(ctx, 0, func() (int, error) { <-ctx.Done(); return 0, ctx.Err() })
					assert.ErrorIs(t, err, context.DeadlineExceeded)
				})
			}
			time.Sleep(100 * time.Millisecond)
		}
		start := time.Now()
		other := &Batcher[int, int]{Scheduler: s}
		_, err := other.Do(t.Context(), 0, func() (int, error) { return 0, nil })
		assert.Truef(t, err == nil && time.Since(start) <= 2*slowAfter,
			"a write of another batcher: %v after %s", err, time.Since(start))
		callers.Wait()
		n := sent.Load()
		assert.Truef(t, n <= maxInFlight, "%d batches in flight, want at most %d", n, maxInFlight)
		start = time.Now()
		value, err := blocked.Do(t.Context(), 0, func() (int, error) { return 1, nil })
		if value != 1 || err != nil || time.Since(start) > defaultMaxWait+2*slowAfter {
			t.Errorf("beside %d batches in flight: %d, %v after %s", sent.Load(), value, err, time.Since(start))
		}
		close(unblock)
		time.Sleep(time.Second)
	})
}

// Callers that write again at once share their next batch too.
func TestReturningCallersShareNextBatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var batches atomic.Int32
		send := func() {
			batches.Add(1)
			time.Sleep(2 * time.Millisecond)
		}
		b := &Batcher[int, int]{Scheduler: &Scheduler{}, Send: func(_ context.Context, ins []int) ([]Result[int], error) {
			send()
			return make([]Result[int], len(ins)), nil
		}}
		var callers sync.WaitGroup
		for i := range 8 {
			callers.Go(func() {
				for range 50 {
					time.Sleep(time.Duration(i) * expectFor / 10)
					_, _ = b.Do(t.Context(), 0, func() (int, error) { send(); return 0, nil })
				}
			})
		}
		callers.Wait()
		mean := 8 * 50 / float64(batches.Load())
		assert.Truef(t, mean >= 6, "%d batches of %.1f writes, want nearly all of the 8 callers", batches.Load(), mean)
	})
}
