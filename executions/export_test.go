package executions

import "context"

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
