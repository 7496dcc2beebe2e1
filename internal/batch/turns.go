package batch

import "time"

// Turns let so many batches of several groups go at a time. What comes meanwhile makes the next one larger, and a statement costs
// more to begin than a row. One that takes long is not waited for.
type Turns chan struct{}

// NewTurns are turns of n at a time.
func NewTurns(n int) Turns { return make(Turns, n) }

// turnPatience is how long a batch waits for its turn.
const turnPatience = 10 * time.Millisecond

// enter waits for the turn; the function that it returns ends it.
func (t Turns) enter() (leave func()) {
	if t == nil {
		return func() {}
	}
	patience := time.NewTimer(turnPatience)
	defer patience.Stop()
	select {
	case t <- struct{}{}:
		return func() { <-t }
	case <-patience.C:
		return func() {}
	}
}
