package cuts_test

import (
	"fmt"
	"slices"
	"sync"
)

// way is how a connection breaks at a message.
type way int

const (
	pass   way = iota // it does not
	before            // the server never sees the message
	after             // the server has done it, and the client never hears of it
)

// String is the word for it.
func (w way) String() string { return [...]string{"pass", "before", "after"}[w] }

// cut is one message, and how the connection breaks at it.
type cut struct {
	text string // of the message
	time int    // how many-th message of that text, from 1
	way  way
}

// String names a cut in what a test says.
func (c cut) String() string { return fmt.Sprintf("%s time %d of %q", c.way, c.time, c.text) }

// sent is a text and how often it was sent.
type sent struct {
	text   string
	times  int
	beside bool // it was sent before the story began: a process sends it beside its runs
}

// ledger counts the messages of a process, and says which is cut.
type ledger struct {
	mu     sync.Mutex
	cuts   []cut // those still to be made
	made   []cut
	order  []string
	times  map[string]int
	beside map[string]bool
	closed bool // what comes is not counted any more
}

func newLedger(cuts []cut) *ledger {
	return &ledger{cuts: slices.Clone(cuts), times: map[string]int{}, beside: map[string]bool{}}
}

// note counts a message and says what happens to it.
func (l *ledger) note(text string) way {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return pass
	}
	if l.times[text] == 0 {
		l.order = append(l.order, text)
	}
	l.times[text]++
	i := slices.IndexFunc(l.cuts, func(c cut) bool { return c.text == text && c.time == l.times[text] })
	if i < 0 {
		return pass
	}
	c := l.cuts[i]
	l.cuts, l.made = slices.Delete(l.cuts, i, i+1), append(l.made, c)
	return c.way
}

// begins says that the story begins: what was sent until now, a process sends beside its runs.
func (l *ledger) begins() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for text := range l.times {
		l.beside[text] = true
	}
}

// close ends the counting: what is told is over.
func (l *ledger) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// left are the cuts that were not made.
func (l *ledger) left() []cut {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.cuts)
}

// all is what was sent, in the order in which each text came first.
func (l *ledger) all() []sent {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := make([]sent, len(l.order))
	for i, text := range l.order {
		list[i] = sent{text, l.times[text], l.beside[text]}
	}
	return list
}
