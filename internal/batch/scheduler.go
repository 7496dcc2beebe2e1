package batch

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

const (
	// overlap is the number of queued writes that starts a second concurrent batch. With one batch in flight, client and
	// server take turns idling.
	overlap = 16
	// maxInFlight bounds the batches in flight of one batcher, slow ones included.
	maxInFlight = 3
	// regroupFor is how long the scheduler expects the callers of a batch to write again. Many callers have a next write
	// at once, and a batch costs less than single writes.
	regroupFor = time.Millisecond
	// checkEvery is the interval at which the scheduler checks the age of queued writes and batches in flight.
	checkEvery = 10 * time.Millisecond
	// slowAfter is the age at which a batch in flight no longer delays other batches.
	slowAfter = 10 * time.Millisecond
	// overdueAfter bounds the wait of a queue behind longer queues.
	overdueAfter = 4 * time.Millisecond
)

// Scheduler decides when its batchers send. Their batches should take about equally long, because each waits for
// another batch. The zero value is ready.
type Scheduler struct {
	slow time.Duration // slowAfter when 0; for tests

	mu       sync.Mutex
	batchers []queue
	queued   int         // writes
	inFlight []*inFlight // batches in flight that are not slow
	expected int         // callers of the last batch without a new write; expected until then
	until    time.Time
	timer    *time.Timer
	fireAt   time.Time // when the timer fires; zero when it is not set
}

// queue is a Batcher of any type.
type queue interface {
	backlogLocked() (n int, since time.Time)
	expireLocked(now time.Time)
	sendLocked()
}

// inFlight is a sent batch, or the sent write of a single caller.
type inFlight struct {
	scheduler *Scheduler
	batcher   *int // its number of batches in flight
	since     time.Time
}

// idleLocked reports whether a caller may write at once.
func (s *Scheduler) idleLocked() bool {
	return s.queued == 0 && len(s.inFlight) == 0 && (s.expected <= 0 || !time.Now().Before(s.until))
}

// startLocked counts a batch in flight.
func (s *Scheduler) startLocked(batcher *int) *inFlight {
	f := &inFlight{scheduler: s, batcher: batcher, since: time.Now()}
	*batcher++
	s.inFlight = append(s.inFlight, f)
	return f
}

// finish ends a batch of n writes, expects their callers again, and sends the next batches.
func (f *inFlight) finish(n int) {
	s := f.scheduler
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.expected = 0; n > 1 {
		s.expected, s.until = n, time.Now().Add(regroupFor)
	}
	*f.batcher--
	s.inFlight = slices.DeleteFunc(s.inFlight, func(other *inFlight) bool { return other == f })
	s.dispatchLocked()
}

// dispatchLocked sends the batches that may start now, and schedules the next check.
func (s *Scheduler) dispatchLocked() {
	for s.queued > 0 && (len(s.inFlight) == 0 || len(s.inFlight) == 1 && s.queued >= overlap) {
		if len(s.inFlight) == 0 && s.queued < overlap && s.expected > 0 && time.Now().Before(s.until) {
			s.armLocked(time.Until(s.until))
			return
		}
		next := s.nextLocked()
		if next == nil {
			break
		}
		next.sendLocked()
	}
	if s.queued > 0 {
		s.armLocked(checkEvery)
	}
}

// nextLocked returns the overdue batcher with the longest wait, or else the batcher with the longest queue. It returns
// nil when no batcher may send.
func (s *Scheduler) nextLocked() (next queue) {
	longest, oldest, now := 0, time.Time{}, time.Now()
	for _, b := range s.batchers {
		n, since := b.backlogLocked()
		switch {
		case n == 0:
		case now.Sub(since) > overdueAfter:
			if oldest.IsZero() || since.Before(oldest) {
				next, oldest = b, since
			}
		case oldest.IsZero() && n > longest:
			next, longest = b, n
		}
	}
	return next
}

// armLocked sets the timer, unless it fires sooner.
func (s *Scheduler) armLocked(after time.Duration) {
	at := time.Now().Add(after)
	switch {
	case !s.fireAt.IsZero() && !s.fireAt.After(at):
		return
	case s.timer == nil:
		s.timer = time.AfterFunc(after, s.check)
	default:
		s.timer.Reset(after)
	}
	s.fireAt = at
}

// check stops waiting for slow batches, and returns writes with too long a time in the queue to their callers. It runs
// again while writes are queued.
func (s *Scheduler) check() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fireAt = time.Time{}
	now := time.Now()
	for _, b := range s.batchers {
		b.expireLocked(now)
	}
	s.inFlight = slices.DeleteFunc(s.inFlight, func(f *inFlight) bool {
		return now.Sub(f.since) >= cmp.Or(s.slow, slowAfter)
	})
	s.dispatchLocked()
}
