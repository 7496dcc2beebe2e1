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

// newBatcher creates a batcher. send returns the result of each write and whether the batch skipped it.
func newBatcher(
	send func(ctx context.Context, ins []int) (values []int, skipped []bool, err error), unchanged func(error) bool,
) *Batcher[int, int] {
	return &Batcher[int, int]{
		Scheduler: &Scheduler{slowAfter: time.Hour}, Unchanged: unchanged,
		Send: func(ctx context.Context, ins []int) ([]Result[int], error) {
			values, skipped, err := send(ctx, ins)
			results := make([]Result[int], len(values))
			for i := range values {
				results[i] = Result[int]{values[i], skipped[i]}
			}
			return results, err
		},
	}
}

// queuedWrites returns the number of queued writes.
func queuedWrites(b *Batcher[int, int]) int {
	b.Scheduler.mu.Lock()
	defer b.Scheduler.mu.Unlock()
	return len(b.queued)
}

// runBatch starts n writes. The first one stays in flight until the others are queued.
func runBatch(
	t *testing.T, b *Batcher[int, int], n int, single func(i int) (int, error),
) (results []int, errs []error) {
	t.Helper()
	results, errs = make([]int, n), make([]error, n)
	first := make(chan struct{})
	var wg sync.WaitGroup
	write := func(i int) {
		wg.Go(func() {
			results[i], errs[i] = b.Do(t.Context(), i, func() (int, error) {
				if i == 0 {
					close(first)
					pgtest.Eventually(t, func() bool { return queuedWrites(b) == n-1 }, "the other writes are queued")
				}
				return single(i)
			})
		})
	}
	write(0)
	<-first
	for i := 1; i < n; i++ {
		write(i)
	}
	wg.Wait()
	return results, errs
}

func TestConcurrentWritesShareBatch(t *testing.T) {
	t.Parallel()
	var batches, singles atomic.Int32
	b := newBatcher(func(_ context.Context, in []int) ([]int, []bool, error) {
		batches.Add(1)
		out, skipped := make([]int, len(in)), make([]bool, len(in))
		for i, v := range in {
			out[i], skipped[i] = 10*v, v == 3
		}
		return out, skipped, nil
	}, nil)
	b.MaxWait = time.Hour
	results, errs := runBatch(t, b, 6, func(i int) (int, error) {
		singles.Add(1)
		return 100 * i, nil
	})
	for i, want := range []int{0, 10, 20, 300, 40, 50} {
		assert.Truef(t, results[i] == want && errs[i] == nil, "write %d: %d, %v", i, results[i], errs[i])
	}
	assert.Truef(t, batches.Load() == 1 && singles.Load() == 2, "%d batches, %d direct writes",
		batches.Load(), singles.Load())
}

// runStaggered starts concurrent writes in order: each write starts after the previous write is queued or in flight. It
// returns the duration of each write.
func runStaggered(
	t *testing.T, b *Batcher[int, int], writes ...func() (int, error),
) (elapsed []time.Duration, errs []error) {
	t.Helper()
	elapsed, errs = make([]time.Duration, len(writes)), make([]error, len(writes))
	var wg sync.WaitGroup
	for i, write := range writes {
		wg.Go(func() {
			start := time.Now()
			defer func() {
				if failure, ok := recover().(error); ok {
					errs[i] = failure
				}
				elapsed[i] = time.Since(start)
			}()
			_, errs[i] = b.Do(t.Context(), i, write)
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
		b := newBatcher(func(_ context.Context, in []int) ([]int, []bool, error) {
			time.Sleep(time.Second)
			return in, make([]bool, len(in)), nil
		}, nil)
		b.MaxWait = 20 * time.Millisecond
		retried := sleepThen(0, errors.New("retried alone"))
		elapsed, errs := runStaggered(t, b, sleepThen(10*time.Millisecond, nil), retried, retried)
		if want := 10*time.Millisecond + time.Second; errors.Join(errs...) != nil || elapsed[1] != want {
			t.Errorf("slow batch: %v, after %v", errors.Join(errs...), elapsed)
		}
		time.Sleep(expectFor) // the scheduler expects no caller now
		elapsed, errs = runStaggered(t, b, sleepThen(time.Second, nil), sleepThen(0, nil))
		if errors.Join(errs...) != nil || elapsed[1] != b.MaxWait {
			t.Errorf("during a slow write: %v, after %v", errors.Join(errs...), elapsed)
		}
	})
}

// Compare orders a batch, and each caller still gets its own result.
func TestBatchIsSorted(t *testing.T) {
	t.Parallel()
	b := newBatcher(func(_ context.Context, in []int) ([]int, []bool, error) {
		if !slices.IsSorted(in) {
			return nil, nil, errUnknownOutcome
		}
		return in, make([]bool, len(in)), nil
	}, nil)
	b.MaxWait, b.Compare = time.Hour, func(a, b int) int { return a - b }
	b.Unchanged = func(error) bool { return false }
	results, errs := runBatch(t, b, overlapThreshold, func(i int) (int, error) { return i, nil })
	for i := range results {
		assert.Truef(t, results[i] == i && errs[i] == nil, "write %d: %d, %v", i, results[i], errs[i])
	}
}

// Without Unchanged, each write of a failed batch is retried as a single write.
func TestFailedBatchIsRetriedAsSingleWrites(t *testing.T) {
	t.Parallel()
	b := newBatcher(func(context.Context, []int) ([]int, []bool, error) { return nil, nil, errUnknownOutcome }, nil)
	b.MaxWait = time.Hour
	results, errs := runBatch(t, b, 3, func(i int) (int, error) { return i, nil })
	if errors.Join(errs...) != nil || !slices.Equal(results, []int{0, 1, 2}) {
		t.Errorf("%v, %v", results, errors.Join(errs...))
	}
}

func TestBatchTimesOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBatcher(func(ctx context.Context, _ []int) ([]int, []bool, error) {
			<-ctx.Done()
			return nil, nil, ctx.Err()
		}, func(error) bool { return false })
		b.Timeout = time.Second
		first := sleepThen(time.Millisecond, nil)
		elapsed, errs := runStaggered(t, b, first, first, first)
		for _, i := range []int{1, 2} {
			assert.Truef(t, errors.Is(errs[i], context.DeadlineExceeded) && elapsed[i] == time.Millisecond+b.Timeout,
				"write %d: %v after %s", i, errs[i], elapsed[i])
		}
	})
}
