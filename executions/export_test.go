package executions

import (
	"context"
	"time"
)

// Batcher is a batcher of numbers, for tests.
type Batcher struct{ b *batcher[int, int] }

// NewBatcher makes one from a function that answers each write, and says which it has left.
func NewBatcher(send func(ctx context.Context, in []int) (out []int, left []bool, err error), sure func(error) bool) *Batcher {
	return &Batcher{&batcher[int, int]{sure: sure, send: func(ctx context.Context, in []int) ([]answer[int], error) {
		out, left, err := send(ctx, in)
		answers := make([]answer[int], len(out))
		for i := range out {
			answers[i] = answer[int]{out[i], left[i]}
		}
		return answers, err
	}}}
}

// Patient makes writes wait for others for as long as it takes.
func (b *Batcher) Patient() *Batcher {
	b.b.patience = time.Hour
	return b
}

// Do makes a write.
func (b *Batcher) Do(ctx context.Context, in int, alone func() (int, error)) (int, error) {
	return b.b.do(ctx, in, alone)
}

// Waiting is how many writes have gathered.
func (b *Batcher) Waiting() int {
	b.b.mu.Lock()
	defer b.b.mu.Unlock()
	return len(b.b.waiting)
}

// Busy reports whether a write is under way.
func (b *Batcher) Busy() bool {
	b.b.mu.Lock()
	defer b.b.mu.Unlock()
	return b.b.busy
}
