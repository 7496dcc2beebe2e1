package executions_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// gatherer starts writes of which the first is under way until the others have gathered.
func gatherer(t *testing.T, b *executions.Batcher, n int, alone func(i int) (int, error)) (answers []int, errs []error) {
	t.Helper()
	answers, errs = make([]int, n), make([]error, n)
	first := make(chan struct{})
	var under sync.WaitGroup
	write := func(i int) {
		under.Go(func() {
			answers[i], errs[i] = b.Do(t.Context(), i, func() (int, error) {
				if i == 0 {
					close(first)
					pgtest.Eventually(t, patience, func() bool { return b.Waiting() == n-1 }, "the others gather")
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
	b := executions.NewBatcher(func(_ context.Context, in []int) ([]int, []bool, error) {
		batches.Add(1)
		out, left := make([]int, len(in)), make([]bool, len(in))
		for i, v := range in {
			out[i], left[i] = 10*v, v == 3
		}
		return out, left, nil
	}, nil).Patient()
	answers, errs := gatherer(t, b, 6, func(i int) (int, error) {
		alone.Add(1)
		return 100 * i, nil
	})
	for i, want := range []int{0, 10, 20, 300, 40, 50} {
		if answers[i] != want || errs[i] != nil {
			t.Errorf("write %d: %d, %v", i, answers[i], errs[i])
		}
	}
	if batches.Load() != 1 || alone.Load() != 2 {
		t.Errorf("%d batches, %d alone", batches.Load(), alone.Load())
	}
}

func TestABatchThatFailsIsMadeOneByOneWhereThatIsSafe(t *testing.T) {
	t.Parallel()
	refused, broken := errors.New("refused"), errors.New("the connection broke")
	for _, failure := range []error{refused, broken} {
		b := executions.NewBatcher(func(context.Context, []int) ([]int, []bool, error) { return nil, nil, failure },
			func(err error) bool { return errors.Is(err, refused) }).Patient()
		_, errs := gatherer(t, b, 5, func(i int) (int, error) {
			if i == 2 {
				return 0, refused
			}
			return i, nil
		})
		for i, err := range errs {
			want := error(nil)
			switch {
			case i > 0 && errors.Is(failure, broken):
				want = broken
			case i == 2:
				want = refused
			}
			if !errors.Is(err, want) || want == nil && err != nil {
				t.Errorf("%v: write %d: %v, want %v", failure, i, err, want)
			}
		}
	}
}

// One that is held up by somebody's lock does not hold up the rest, and a caller who has left holds up nobody.
func TestAWriteThatIsHeldUpHoldsUpNobody(t *testing.T) {
	t.Parallel()
	b := executions.NewBatcher(func(_ context.Context, in []int) ([]int, []bool, error) { return in, make([]bool, len(in)), nil }, nil)
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
	if v, err := b.Do(t.Context(), 1, func() (int, error) { return 7, nil }); v != 7 || err != nil {
		t.Errorf("beside one that is held up: %d, %v", v, err)
	}
	left, leave := context.WithCancel(t.Context())
	leave()
	if _, err := b.Do(left, 2, func() (int, error) { return 0, nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("one who has left: %v", err)
	}
	close(free)
	under.Wait()
	for i := range 20 {
		if v, err := b.Do(t.Context(), i, func() (int, error) { return i, nil }); v != i || err != nil {
			t.Errorf("afterwards: %d, %v", v, err)
		}
	}
}

// A caller who leaves in the moment in which it is to be the next makes room all the same.
func TestACallerWhoLeavesMakesRoom(t *testing.T) {
	t.Parallel()
	for spin := range 200 {
		b := executions.NewBatcher(func(_ context.Context, in []int) ([]int, []bool, error) { return in, make([]bool, len(in)), nil }, nil).Patient()
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
		ctx, leave := context.WithCancel(t.Context())
		under.Go(func() { _, _ = b.Do(ctx, 1, func() (int, error) { return 1, nil }) })
		pgtest.Eventually(t, patience, func() bool { return b.Waiting() == 1 || !b.Busy() || ctx.Err() != nil }, "another gathers")
		under.Go(func() {
			for range spin {
				runtime.Gosched()
			}
			leave()
		})
		close(free)
		under.Wait()
		pgtest.Eventually(t, patience, func() bool { return !b.Busy() }, "there is room")
	}
}
