package admission_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/assert"
)

// take expects a hold.
func take(t *testing.T, b *admission.Budget, n int64, shares ...admission.Share) *admission.Hold {
	t.Helper()
	h, err := b.Take(n, shares...)
	if err != nil {
		t.Fatalf("%d of %d taken: %v", n, b.Used(), err)
	}
	return h
}

// refused expects none.
func refused(t *testing.T, b *admission.Budget, n int64, shares ...admission.Share) {
	t.Helper()
	if _, err := b.Take(n, shares...); !errors.Is(err, admission.ErrFull) {
		t.Errorf("%d more than %d: %v", n, b.Used(), err)
	}
}

func TestANameCannotTakeWhatOthersNeed(t *testing.T) {
	t.Parallel()
	b := admission.New(10)
	a := admission.Share{Name: "a", Most: 4}
	first := take(t, b, 4, a)
	refused(t, b, 1, a)
	other := take(t, b, 6, admission.Share{Name: "b", Most: 6})
	refused(t, b, 1, admission.Share{Name: "c", Most: 6})
	first.Release()
	first.Release() // twice is once
	assert.Equal(t, 6, b.Used())
	take(t, b, 4, a).Release()
	other.Release()
	assert.Equal(t, 0, b.Used())
}

func TestANameThatHasNothingMayTakeMoreThanItsShare(t *testing.T) {
	t.Parallel()
	b := admission.New(10)
	a := admission.Share{Name: "a", Most: 4}
	large := take(t, b, 8, a)
	refused(t, b, 1, a)
	assert.NoError(t, large.Add(2), "its own growth")
	refused(t, b, 1, admission.Share{Name: "b", Most: 4})
	large.Release()
	take(t, b, 11, a).Release() // alone, also more than all
}

// One body may be larger than a share: it stops neither those that others hold, nor what is left to others.
func TestOneHoldLargerThanItsShareLeavesTheRest(t *testing.T) {
	t.Parallel()
	b := admission.New(100)
	a := admission.Share{Name: "a", Most: 10}
	large := take(t, b, 30, a)
	refused(t, b, 1, a)
	rest := take(t, b, 70, admission.Share{Name: "b", Most: 80})
	large.Return(25)
	take(t, b, 5, a).Release()
	rest.Release()
	large.Release()
	assert.Equal(t, 0, b.Used())
}

func TestAHoldLastsUntilTheLastKeeperReleasesIt(t *testing.T) {
	t.Parallel()
	b := admission.New(1)
	h := take(t, b, 1)
	h.Keep()
	h.Release()
	refused(t, b, 1)
	h.Release()
	take(t, b, 1).Release()
}

func TestManyTakersNeverHaveMoreThanThereIs(t *testing.T) {
	t.Parallel()
	b := admission.New(8)
	var group sync.WaitGroup
	for i := range 32 {
		group.Go(func() {
			for range 200 {
				h, err := b.Take(1, admission.Share{Name: string(rune('a' + i%4)), Most: 3})
				if err != nil {
					continue
				}
				used := b.Used()
				assert.Truef(t, used <= 8, "%d are taken of 8", used)
				h.Release()
			}
		})
	}
	group.Wait()
	assert.Equal(t, 0, b.Used())
}
