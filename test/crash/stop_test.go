//go:build unix

package crash_test

import (
	"sync"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"
)

// stop holds up calls that arrive at it, as an answer that does not come would.
type stop struct {
	t       testing.TB
	arrived chan struct{}
	freed   chan struct{}
	once    sync.Once
	left    int
	mu      sync.Mutex
}

// newStop makes one that holds up the first n calls, and lets those that come after pass.
func newStop(t testing.TB, n int) *stop {
	t.Helper()
	x := &stop{t: t, arrived: make(chan struct{}, n), freed: make(chan struct{}), left: n}
	t.Cleanup(x.free)
	return x
}

// pass is where a call is held up.
func (x *stop) pass() {
	x.mu.Lock()
	mine := x.left > 0
	x.left--
	x.mu.Unlock()
	if mine {
		x.arrived <- struct{}{}
		<-x.freed
	}
}

// wait waits until a call has arrived.
func (x *stop) wait() {
	x.t.Helper()
	select {
	case <-x.arrived:
	case <-time.After(patience):
		x.t.Fatal("no call arrived")
	}
}

// free lets everything go.
func (x *stop) free() { x.once.Do(func() { close(x.freed) }) }

// holdSkill holds up the first n calls of a skill.
func (s *scene) holdSkill(skill string, n int) *stop {
	s.t.Helper()
	x := newStop(s.t, n)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.atSkill = func(c call) {
		if c.skill == skill {
			x.pass()
		}
	}
	return x
}

// holdModel holds up the first n requests to the model.
func (s *scene) holdModel(n int) *stop {
	s.t.Helper()
	x := newStop(s.t, n)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.atModel = func(openai.ChatCompletionRequest) { x.pass() }
	return x
}
