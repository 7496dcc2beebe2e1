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

// newBatcher creates a batcher from a function that returns each answer, and whether it left out the write.
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

// gathered returns the number of queued writes.
func gathered(g *Batcher[int, int]) int {
	g.Scheduler.mu.Lock()
	defer g.Scheduler.mu.Unlock()
	return len(g.queued)
}

// gatherer starts writes. The first stays in flight until the others are queued.
func gatherer(t *testing.T, b *Batcher[int, int], n int, alone func(i int) (int, error)) (answers []int, errs []error) {
	t.Helper()
	answers, errs = make([]int, n), make([]error, n)
	first := make(chan struct{})
	var under sync.WaitGroup
	write := func(i int) {
		under.Go(func() {
			answers[i], errs[i] = b.Do(t.Context(), i, func() (int, error) {
				if i == 0 {
					close(first)
					pgtest.Eventually(t, func() bool { return gathered(b) == n-1 }, "the others gather")
				}
				return alone(i)
			})
		})
	}
	write(0)
	<-first
	for i := 1; i < n; i++ {
		write(i)
	}
	under.Wait()
	return answers, errs
}

func TestWritesAtTheSameTimeShareACommit(t *testing.T) {
	t.Parallel()
	var batches, alone atomic.Int32
	b := newBatcher(func(_ context.Context, in []int) ([]int, []bool, error) {
		batches.Add(1)
		out, left := make([]int, len(in)), make([]bool, len(in))
		for i, v := range in {
			out[i], left[i] = 10*v, v == 3
		}
		return out, left, nil
	}, nil)
	b.MaxWait = time.Hour
	answers, errs := gatherer(t, b, 6, func(i int) (int, error) {
		alone.Add(1)
		return 100 * i, nil
	})
	for i, want := range []int{0, 10, 20, 300, 40, 50} {
		assert.Truef(t, answers[i] == want && errs[i] == nil, "write %d: %d, %v", i, answers[i], errs[i])
	}
	assert.Truef(t, batches.Load() == 1 && alone.Load() == 2, "%d batches, %d alone", batches.Load(), alone.Load())
}

// A blocked write does not delay the others, and neither does a caller who left.
func TestABlockedWriteDelaysNoOther(t *testing.T) {
	t.Parallel()
	for _, b := range []*Batcher[int, int]{
		{Scheduler: &Scheduler{slow: time.Hour}, MaxWait: 5 * time.Millisecond}, // so that the write expires
		{Scheduler: &Scheduler{slow: 5 * time.Millisecond}, MaxWait: time.Hour}, // so that the batch is slow
	} {
		b.Send = func(_ context.Context, in []int) ([]Answer[int], error) { return make([]Answer[int], len(in)), nil }
		holdUp(t, b)
	}
}

func holdUp(t *testing.T, b *Batcher[int, int]) {
	t.Helper()
	held, free := make(chan struct{}), make(chan struct{})
	var under sync.WaitGroup
	under.Go(func() {
		_, _ = b.Do(t.Context(), 0, func() (int, error) {
			close(held)
			<-free
			return 0, nil
		})
	})
	<-held
	v, err := b.Do(t.Context(), 1, func() (int, error) { return 7, nil })
	assert.Truef(t, v == 7 && err == nil, "beside a blocked write: %d, %v", v, err)
	left, leave := context.WithCancel(t.Context())
	leave()
	_, err = b.Do(left, 2, func() (int, error) { return 0, context.Canceled })
	assert.ErrorIs(t, err, context.Canceled, "one who has left")
	close(free)
	under.Wait()
	for i := range 20 {
		v, err := b.Do(t.Context(), i, func() (int, error) { return i, nil })
		assert.Truef(t, v == i && err == nil, "afterwards: %d, %v", v, err)
	}
}

// at runs writes at once. Each starts when the previous one is queued or in flight. It returns the duration of each.
func at(t *testing.T, g *Batcher[int, int], alone ...func() (int, error)) (took []time.Duration, errs []error) {
	t.Helper()
	took, errs = make([]time.Duration, len(alone)), make([]error, len(alone))
	var under sync.WaitGroup
	for i, write := range alone {
		under.Go(func() {
			began := time.Now()
			defer func() {
				if failure, ok := recover().(error); ok {
					errs[i] = failure
				}
				took[i] = time.Since(began)
			}()
			_, errs[i] = g.Do(t.Context(), i, write)
		})
		synctest.Wait()
	}
	under.Wait()
	return took, errs
}

func takes(d time.Duration, err error) func() (int, error) {
	return func() (int, error) { time.Sleep(d); return 0, err }
}

// A write waits in the queue for at most MaxWait. A write in flight is never repeated.
func TestMaxWaitIsForTheQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newBatcher(func(_ context.Context, in []int) ([]int, []bool, error) {
			time.Sleep(time.Second)
			return in, make([]bool, len(in)), nil
		}, nil)
		g.MaxWait = 20 * time.Millisecond
		twice := takes(0, errors.New("made by itself, too"))
		took, errs := at(t, g, takes(10*time.Millisecond, nil), twice, twice)
		if want := 10*time.Millisecond + time.Second; errors.Join(errs...) != nil || took[1] != want {
			t.Errorf("a batch that takes long: %v, after %v", errors.Join(errs...), took)
		}
		time.Sleep(regroupFor) // no caller is expected back
		took, errs = at(t, g, takes(time.Second, nil), takes(0, nil))
		if errors.Join(errs...) != nil || took[1] != g.MaxWait {
			t.Errorf("beside a slow write: %v, after %v", errors.Join(errs...), took)
		}
	})
}

// A batch has the order of its sort function, and each caller gets its own answer.
func TestABatchIsSorted(t *testing.T) {
	t.Parallel()
	b := newBatcher(func(_ context.Context, in []int) ([]int, []bool, error) {
		if !slices.IsSorted(in) {
			return nil, nil, errBroken
		}
		return in, make([]bool, len(in)), nil
	}, nil)
	b.MaxWait, b.Compare = time.Hour, func(a, b int) int { return a - b }
	b.Unchanged = func(error) bool { return false }
	answers, errs := gatherer(t, b, overlap, func(i int) (int, error) { return i, nil })
	for i := range answers {
		assert.Truef(t, answers[i] == i && errs[i] == nil, "write %d: %d, %v", i, answers[i], errs[i])
	}
}

// Without Unchanged, the writes of a failed batch are repeated.
func TestAnUnchangedBatchIsRetriedAlone(t *testing.T) {
	t.Parallel()
	b := newBatcher(func(context.Context, []int) ([]int, []bool, error) { return nil, nil, errBroken }, nil)
	b.MaxWait = time.Hour
	answers, errs := gatherer(t, b, 3, func(i int) (int, error) { return i, nil })
	if errors.Join(errs...) != nil || !slices.Equal(answers, []int{0, 1, 2}) {
		t.Errorf("%v, %v", answers, errors.Join(errs...))
	}
}

func TestABatchHasALimit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newBatcher(func(ctx context.Context, _ []int) ([]int, []bool, error) {
			<-ctx.Done()
			return nil, nil, ctx.Err()
		},
			func(error) bool { return false })
		g.Timeout = time.Second
		first := takes(time.Millisecond, nil)
		took, errs := at(t, g, first, first, first)
		for _, i := range []int{1, 2} {
			assert.Truef(t, errors.Is(errs[i], context.DeadlineExceeded) && took[i] == time.Millisecond+g.Timeout,
				"write %d: %v after %s", i, errs[i], took[i])
		}
	})
}
