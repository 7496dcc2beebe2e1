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

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

const waitTimeout = time.Minute

// newBatcher creates a batcher. send returns the answer of each write, and which writes it left out.
func newBatcher(
	send func(ctx context.Context, in []int) (out []int, left []bool, err error), unchanged func(error) bool,
) *Batcher[int, int] {
	return &Batcher[int, int]{
		Scheduler: &Scheduler{slow: time.Hour}, Unchanged: unchanged,
		Send: func(ctx context.Context, in []int) ([]Answer[int], error) {
			out, left, err := send(ctx, in)
			answers := make([]Answer[int], len(out))
			for i := range out {
				answers[i] = Answer[int]{out[i], left[i]}
			}
			return answers, err
		},
	}
}

// queuedWrites returns the number of queued writes.
func queuedWrites(g *Batcher[int, int]) int {
	g.Scheduler.mu.Lock()
	defer g.Scheduler.mu.Unlock()
	return len(g.queued)
}

// runBatch starts n writes. The first one stays in flight until the others are queued.
func runBatch(
	t *testing.T, b *Batcher[int, int], n int, direct func(i int) (int, error),
) (answers []int, errs []error) {
	t.Helper()
	answers, errs = make([]int, n), make([]error, n)
	first := make(chan struct{})
	var wg sync.WaitGroup
	write := func(i int) {
		wg.Go(func() {
			answers[i], errs[i] = b.Do(t.Context(), i, func() (int, error) {
				if i == 0 {
					close(first)
					pgtest.Eventually(t, func() bool { return queuedWrites(b) == n-1 }, "the other writes are queued")
				}
				return direct(i)
			})
		})
	}
	write(0)
	<-first
	for i := 1; i < n; i++ {
		write(i)
	}
	wg.Wait()
	return answers, errs
}

func TestConcurrentWritesShareCommit(t *testing.T) {
	t.Parallel()
	var batches, direct atomic.Int32
	b := newBatcher(func(_ context.Context, in []int) ([]int, []bool, error) {
		batches.Add(1)
		out, left := make([]int, len(in)), make([]bool, len(in))
		for i, v := range in {
			out[i], left[i] = 10*v, v == 3
		}
		return out, left, nil
	}, nil)
	b.MaxWait = time.Hour
	answers, errs := runBatch(t, b, 6, func(i int) (int, error) {
		direct.Add(1)
		return 100 * i, nil
	})
	for i, want := range []int{0, 10, 20, 300, 40, 50} {
		assert.Truef(t, answers[i] == want && errs[i] == nil, "write %d: %d, %v", i, answers[i], errs[i])
	}
	assert.Truef(t, batches.Load() == 1 && direct.Load() == 2, "%d batches, %d direct writes",
		batches.Load(), direct.Load())
}

// Neither a blocked write nor a cancelled caller delays other writes.
func TestBlockedWriteDelaysNoOther(t *testing.T) {
	t.Parallel()
	for _, b := range []*Batcher[int, int]{
		{Scheduler: &Scheduler{slow: time.Hour}, MaxWait: 5 * time.Millisecond}, // the queued write expires
		{Scheduler: &Scheduler{slow: 5 * time.Millisecond}, MaxWait: time.Hour}, // the batch becomes slow
	} {
		b.Send = func(_ context.Context, in []int) ([]Answer[int], error) { return make([]Answer[int], len(in)), nil }
		testBlockedWrite(t, b)
	}
}

func testBlockedWrite(t *testing.T, b *Batcher[int, int]) {
	t.Helper()
	held, free := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = b.Do(t.Context(), 0, func() (int, error) {
			close(held)
			<-free
			return 0, nil
		})
	})
	<-held
	v, err := b.Do(t.Context(), 1, func() (int, error) { return 7, nil })
	assert.Truef(t, v == 7 && err == nil, "during a blocked write: %d, %v", v, err)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = b.Do(cancelled, 2, func() (int, error) { return 0, context.Canceled })
	assert.ErrorIs(t, err, context.Canceled, "cancelled caller")
	close(free)
	wg.Wait()
	for i := range 20 {
		v, err := b.Do(t.Context(), i, func() (int, error) { return i, nil })
		assert.Truef(t, v == i && err == nil, "afterwards: %d, %v", v, err)
	}
}

// runStaggered starts writes in order, concurrently: each when the previous one is queued or in flight. It returns the
// duration of each.
func runStaggered(
	t *testing.T, g *Batcher[int, int], direct ...func() (int, error),
) (elapsed []time.Duration, errs []error) {
	t.Helper()
	elapsed, errs = make([]time.Duration, len(direct)), make([]error, len(direct))
	var wg sync.WaitGroup
	for i, write := range direct {
		wg.Go(func() {
			began := time.Now()
			defer func() {
				if failure, ok := recover().(error); ok {
					errs[i] = failure
				}
				elapsed[i] = time.Since(began)
			}()
			_, errs[i] = g.Do(t.Context(), i, write)
		})
		synctest.Wait()
	}
	wg.Wait()
	return elapsed, errs
}

func sleepThen(d time.Duration, err error) func() (int, error) {
	return func() (int, error) { time.Sleep(d); return 0, err }
}

// A write waits in the queue for at most MaxWait. A write in flight is never repeated.
func TestMaxWaitBoundsQueueTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newBatcher(func(_ context.Context, in []int) ([]int, []bool, error) {
			time.Sleep(time.Second)
			return in, make([]bool, len(in)), nil
		}, nil)
		g.MaxWait = 20 * time.Millisecond
		twice := sleepThen(0, errors.New("retried alone"))
		elapsed, errs := runStaggered(t, g, sleepThen(10*time.Millisecond, nil), twice, twice)
		if want := 10*time.Millisecond + time.Second; errors.Join(errs...) != nil || elapsed[1] != want {
			t.Errorf("slow batch: %v, after %v", errors.Join(errs...), elapsed)
		}
		time.Sleep(regroupFor) // the scheduler expects no caller now
		elapsed, errs = runStaggered(t, g, sleepThen(time.Second, nil), sleepThen(0, nil))
		if errors.Join(errs...) != nil || elapsed[1] != g.MaxWait {
			t.Errorf("during a slow write: %v, after %v", errors.Join(errs...), elapsed)
		}
	})
}

// Compare orders a batch, and each caller gets its own answer.
func TestBatchIsSorted(t *testing.T) {
	t.Parallel()
	b := newBatcher(func(_ context.Context, in []int) ([]int, []bool, error) {
		if !slices.IsSorted(in) {
			return nil, nil, errBroken
		}
		return in, make([]bool, len(in)), nil
	}, nil)
	b.MaxWait, b.Compare = time.Hour, func(a, b int) int { return a - b }
	b.Unchanged = func(error) bool { return false }
	answers, errs := runBatch(t, b, overlap, func(i int) (int, error) { return i, nil })
	for i := range answers {
		assert.Truef(t, answers[i] == i && errs[i] == nil, "write %d: %d, %v", i, answers[i], errs[i])
	}
}

// Without Unchanged, each write of a failed batch is retried alone.
func TestWritesOfFailedBatchAreRetriedAlone(t *testing.T) {
	t.Parallel()
	b := newBatcher(func(context.Context, []int) ([]int, []bool, error) { return nil, nil, errBroken }, nil)
	b.MaxWait = time.Hour
	answers, errs := runBatch(t, b, 3, func(i int) (int, error) { return i, nil })
	if errors.Join(errs...) != nil || !slices.Equal(answers, []int{0, 1, 2}) {
		t.Errorf("%v, %v", answers, errors.Join(errs...))
	}
}

func TestBatchTimesOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newBatcher(func(ctx context.Context, _ []int) ([]int, []bool, error) {
			<-ctx.Done()
			return nil, nil, ctx.Err()
		}, func(error) bool { return false })
		g.Timeout = time.Second
		first := sleepThen(time.Millisecond, nil)
		elapsed, errs := runStaggered(t, g, first, first, first)
		for _, i := range []int{1, 2} {
			assert.Truef(t, errors.Is(errs[i], context.DeadlineExceeded) && elapsed[i] == time.Millisecond+g.Timeout,
				"write %d: %v after %s", i, errs[i], elapsed[i])
		}
	})
}
