package chat

import (
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

// again is said when the text before it was of a model call that came to nothing.
const again = "\n\n(The answer was cut off; it begins again.)\n\n"

// bytesPerToken turns a bound in tokens into one in bytes.
const bytesPerToken = 4

// feed is what a turn says, in the process that looks on. The turn writes, any number of followers read.
type feed struct {
	mu       sync.Mutex
	text     string
	settled  int     // bytes that stay whatever happens: the texts of finished model calls
	attempt  int     // where the text of the present attempt of the model begins
	due      string  // goes before the next text
	limit    int     // bytes; 0 is no limit
	full     bool    // the limit cut something off
	streamed bool    // somebody was shown text
	live     bool    // the turn was begun here, and whoever waits for it does so here
	local    bool    // this process takes the turn now
	claim    int64   // under which it does, or did last
	posted   *posted // of a turn that was begun here; nil for others
	leave    bool    // an admin's approval is waited for, by this turn or by the one that it stands behind
	end      *executions.Execution
	changed  chan struct{}
}

func newFeed() *feed { return &feed{changed: make(chan struct{})} }

// view is a moment of a feed.
type view struct {
	text    string
	full    bool
	local   bool
	leave   bool
	end     *executions.Execution
	changed <-chan struct{}
}

// look returns the present moment; a follower that shows text says so.
func (f *feed) look(shows bool) view {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.streamed = f.streamed || shows && f.text != ""
	return view{text: f.text, full: f.full, local: f.local, leave: f.leave, end: f.end, changed: f.changed}
}

// change alters the feed and tells the followers.
func (f *feed) change(alter func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	alter()
	close(f.changed)
	f.changed = make(chan struct{})
}

// begin sets what earlier claims of the turn have said for good.
func (f *feed) begin(claim int64, said string, limit int) {
	f.change(func() {
		f.claim = claim
		f.text, f.settled, f.attempt, f.due, f.limit = said, len(said), len(said), "", limit
		f.full, f.local, f.leave, f.end = false, true, false, nil
		if said != "" {
			f.due = "\n\n"
		}
	})
}

// say adds text.
func (f *feed) say(text string) {
	text = postgres.Text(text)
	f.change(func() {
		if text == "" || f.full {
			return
		}
		if f.due != "" {
			f.text += f.due
			f.due, f.attempt = "", len(f.text)
		}
		f.text += text
		if f.limit > 0 && len(f.text) > f.limit {
			cut := f.limit
			for cut > 0 && !utf8.RuneStart(f.text[cut]) {
				cut--
			}
			f.text, f.full = f.text[:cut], true
		}
	})
}

// called notes that a model call is over: its text stays, and what comes next stands apart from it.
func (f *feed) called() {
	f.change(func() {
		f.settled = len(f.text)
		f.attempt = len(f.text)
		if f.text != "" {
			f.due = "\n\n"
		}
	})
}

// restart notes that a model call is repeated. What nobody has seen is taken back.
func (f *feed) restart() {
	f.change(func() {
		switch {
		case len(f.text) == f.attempt:
		case f.streamed:
			f.due, f.attempt = again, len(f.text)
		default:
			f.text, f.full = f.text[:f.attempt], false
		}
	})
}

// conclude makes sure that the text ends with the final answer, and returns all of it.
func (f *feed) conclude(answer string) (text string, full bool) {
	v := f.look(false)
	if !v.full && !strings.HasSuffix(strings.TrimSpace(v.text), answer) {
		f.change(func() {
			if f.text != "" && f.due == "" {
				f.due = "\n\n"
			}
		})
		f.say(answer)
		v = f.look(false)
	}
	return v.text, v.full
}

// draft is the text as other processes may see it.
func (f *feed) draft() threads.Draft {
	f.mu.Lock()
	defer f.mu.Unlock()
	return threads.Draft{Content: f.text, Settled: utf8.RuneCountInString(f.text[:f.settled])}
}

// away notes that a claim has ended, and the turn goes on elsewhere or waits; unless it goes on here under another by
// now.
func (f *feed) away(claim int64) {
	f.change(func() { f.local = f.local && f.claim > claim })
}

// waits notes whether the turn stands behind one that waits for an admin.
func (f *feed) waits(leave bool) {
	f.mu.Lock()
	same := f.leave == leave
	f.mu.Unlock()
	if !same {
		f.change(func() { f.leave = leave })
	}
}

// rest waits until this process does not take the turn any more, for so long at most.
func (f *feed) rest(most time.Duration) {
	limit := time.NewTimer(most)
	defer limit.Stop()
	for {
		v := f.look(false)
		if !v.local {
			return
		}
		select {
		case <-v.changed:
		case <-limit.C:
			return
		}
	}
}

// finish notes how the turn has ended.
func (f *feed) finish(x executions.Execution) {
	f.change(func() { f.local, f.end = false, &x })
}

// overheard sets what another process has said, as the database has it.
func (f *feed) overheard(text string, leave bool) {
	f.mu.Lock()
	same := f.local || f.text == text && f.leave == leave
	f.mu.Unlock()
	if !same {
		f.change(func() { f.text, f.leave = text, leave })
	}
}

// feeds are those that somebody uses, by execution.
type feeds struct {
	mu   sync.Mutex
	used map[string]*usedFeed
}

type usedFeed struct {
	*feed
	users int
}

// join returns the feed of an execution until leave is called.
func (s *feeds) join(id string) (f *feed, leave func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used == nil {
		s.used = map[string]*usedFeed{}
	}
	u := s.used[id]
	if u == nil {
		u = &usedFeed{feed: newFeed()}
		s.used[id] = u
	}
	u.users++
	return u.feed, sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if u.users--; u.users == 0 {
			delete(s.used, id)
		}
	})
}

// heard is what an execution has said here so far; false when it is not taken here.
func (s *feeds) heard(id string) (string, bool) {
	s.mu.Lock()
	u := s.used[id]
	s.mu.Unlock()
	if u == nil {
		return "", false
	}
	v := u.look(false)
	return v.text, v.local
}

// bell wakes whoever waits for it to ring.
type bell struct {
	mu   sync.Mutex
	next chan struct{}
}

func (b *bell) ring() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next != nil {
		close(b.next)
		b.next = nil
	}
}

// rings returns a channel that is closed at the next ring.
func (b *bell) rings() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next == nil {
		b.next = make(chan struct{})
	}
	return b.next
}
