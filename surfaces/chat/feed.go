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

// restartNotice separates the text of a failed model call from its retry, if a client has seen that text.
const restartNotice = "\n\n(The answer was interrupted and starts again.)\n\n"

// bytesPerToken converts a limit in tokens to one in bytes.
const bytesPerToken = 4

// feed is the text of a turn in this process. The turn writes it; any number of followers read it. Safe for
// concurrent use.
type feed struct {
	mu             sync.Mutex
	text           string
	finalBytes     int             // bytes of finished model calls; they never change
	callStart      int             // where the text of the current model call starts
	separator      string          // inserted before the next text
	limit          int             // bytes; 0 is no limit
	truncated      bool            // the limit cut text off
	shown          bool            // a client has received text
	startedHere    bool            // this process started the turn, and its client waits here
	runsHere       bool            // this process runs the turn now
	claim          int64           // the claim of the current or last run here
	stored         *storedMessages // of a turn that was started here; nil for others
	tool           string          // the running tool, or ""
	awaitsApproval bool            // this turn, or the turn before it, waits for an approval
	end            *executions.Execution
	changed        chan struct{}

	polling    sync.Mutex // held by the follower that reads the turn
	polledAt   time.Time  // guarded by polling, as readFailed
	readFailed bool       // the last read failed
}

func newFeed() *feed { return &feed{changed: make(chan struct{})} }

// view is a snapshot of a feed. changed is closed at the next change.
type view struct {
	text           string
	truncated      bool
	runsHere       bool
	tool           string
	awaitsApproval bool
	end            *executions.Execution
	changed        <-chan struct{}
}

// snapshot returns the current state. show records that a client receives the text.
func (f *feed) snapshot(show bool) view {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.shown = f.shown || show && f.text != ""
	return view{
		text: f.text, truncated: f.truncated, runsHere: f.runsHere, tool: f.tool,
		awaitsApproval: f.awaitsApproval, end: f.end, changed: f.changed,
	}
}

// update changes the feed and wakes its followers.
func (f *feed) update(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
	f.wake()
}

// wake notifies the followers. The caller holds mu.
func (f *feed) wake() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// start starts a run under a claim. earlier is the final text of earlier claims.
func (f *feed) start(claim int64, earlier string, limit int) {
	f.update(func() {
		f.claim = claim
		f.text, f.finalBytes, f.callStart, f.separator, f.limit = earlier, len(earlier), len(earlier), "", limit
		f.truncated, f.runsHere, f.tool, f.awaitsApproval, f.end = false, true, "", false, nil
		if earlier != "" {
			f.separator = "\n\n"
		}
	})
}

// append appends text of the model.
func (f *feed) append(text string) {
	text = postgres.Text(text)
	f.update(func() {
		if text == "" || f.truncated {
			return
		}
		if f.separator != "" {
			f.text += f.separator
			f.separator, f.callStart = "", len(f.text)
		}
		f.text += text
		if f.limit > 0 && len(f.text) > f.limit {
			cut := f.limit
			for cut > 0 && !utf8.RuneStart(f.text[cut]) {
				cut--
			}
			f.text, f.truncated = f.text[:cut], true
		}
	})
}

// finishCall ends a model call. Its text is final; the next text starts a paragraph.
func (f *feed) finishCall() {
	f.update(func() {
		f.finalBytes = len(f.text)
		f.callStart = len(f.text)
		if f.text != "" {
			f.separator = "\n\n"
		}
	})
}

// retryCall starts a model call again. Text that no client has seen is removed.
func (f *feed) retryCall() {
	f.update(func() {
		switch {
		case len(f.text) == f.callStart:
		case f.shown:
			f.separator, f.callStart = restartNotice, len(f.text)
		default:
			f.text, f.truncated = f.text[:f.callStart], false
		}
	})
}

// finalText appends the final answer unless the text ends with it, and returns the whole text.
func (f *feed) finalText(answer string) (text string, truncated bool) {
	v := f.snapshot(false)
	if !v.truncated && !strings.HasSuffix(strings.TrimSpace(v.text), answer) {
		f.update(func() {
			if f.text != "" && f.separator == "" {
				f.separator = "\n\n"
			}
		})
		f.append(answer)
		v = f.snapshot(false)
	}
	return v.text, v.truncated
}

// draft returns the text that other processes may read.
func (f *feed) draft() threads.Draft {
	f.mu.Lock()
	defer f.mu.Unlock()
	return threads.Draft{Content: f.text, Settled: utf8.RuneCountInString(f.text[:f.finalBytes])}
}

// detach ends the run of a claim in this process, unless a later claim runs here. The turn continues elsewhere or
// waits.
func (f *feed) detach(claim int64) {
	f.update(func() { f.runsHere = f.runsHere && f.claim > claim })
}

// setAwaitsApproval records whether an earlier turn of the thread waits for an approval.
func (f *feed) setAwaitsApproval(waits bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.awaitsApproval != waits {
		f.awaitsApproval = waits
		f.wake()
	}
}

// awaitDetach waits until this process no longer runs the turn, or for timeout.
func (f *feed) awaitDetach(timeout time.Duration) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		v := f.snapshot(false)
		if !v.runsHere {
			return
		}
		select {
		case <-v.changed:
		case <-timer.C:
			return
		}
	}
}

// finish records the end of the turn.
func (f *feed) finish(x executions.Execution) {
	f.update(func() { f.runsHere, f.end = false, &x })
}

// setRemote sets the text of a turn that another process runs.
func (f *feed) setRemote(text string, awaitsApproval bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.runsHere || f.text == text && f.awaitsApproval == awaitsApproval {
		return
	}
	f.text, f.awaitsApproval = text, awaitsApproval
	f.wake()
}

// feeds holds the feeds in use, by execution id.
type feeds struct {
	mu   sync.Mutex
	byID map[string]*sharedFeed
}

type sharedFeed struct {
	*feed
	refs int
}

// join returns the feed of an execution. The caller calls release when it no longer needs it.
func (s *feeds) join(id string) (f *feed, release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID == nil {
		s.byID = map[string]*sharedFeed{}
	}
	u := s.byID[id]
	if u == nil {
		u = &sharedFeed{feed: newFeed()}
		s.byID[id] = u
	}
	u.refs++
	return u.feed, sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if u.refs--; u.refs == 0 {
			delete(s.byID, id)
		}
	})
}

// liveText returns the text of an execution. ok is false if it does not run in this process.
func (s *feeds) liveText(id string) (text string, ok bool) {
	s.mu.Lock()
	u := s.byID[id]
	s.mu.Unlock()
	if u == nil {
		return "", false
	}
	v := u.snapshot(false)
	return v.text, v.runsHere
}

// broadcast wakes all waiters at once.
type broadcast struct {
	mu   sync.Mutex
	wake chan struct{}
}

func (b *broadcast) notify() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.wake != nil {
		close(b.wake)
		b.wake = nil
	}
}

// next returns a channel that the next notify closes.
func (b *broadcast) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.wake == nil {
		b.wake = make(chan struct{})
	}
	return b.wake
}
