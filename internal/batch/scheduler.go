package batch

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

const (
	// overlapThreshold is the number of queued writes that starts a second concurrent batch. With one batch in flight,
	// client and server take turns idling.
	overlapThreshold = 16
	// maxInFlight is the number of batches in flight, including slow ones, at which a batcher sends none of its queue.
	maxInFlight = 3
	// expectFor is how long the scheduler waits for the callers of a batch to write again. Many callers write again at
	// once, and a batch costs less than single writes.
	expectFor = time.Millisecond
	// checkInterval is the interval between checks of the age of queued writes and batches in flight.
	checkInterval = 10 * time.Millisecond
	// slowAfter is the age at which a batch in flight no longer delays other batches.
	slowAfter = 10 * time.Millisecond
	// overdueAfter bounds the wait of a queue behind longer queues.
	overdueAfter = 4 * time.Millisecond
)

// Scheduler decides when its batchers send. Their batches should take about equally long, because each waits for
// another batch. The zero value is ready.
type Scheduler struct {
	slowAfter time.Duration // replaces the constant slowAfter in tests; 0 for the constant

	mu             sync.Mutex
	batchers       []queue
	queued         int         // number of queued writes of all batchers
	inFlight       []*inFlight // batches in flight that are not slow
	expectedWrites int         // callers of the last batch that have not written again, until expectedUntil
	expectedUntil  time.Time
	timer          *time.Timer
	timerAt        time.Time // time at which the timer fires; zero when it is not set
}

// queue is the part of a Batcher that does not depend on its types.
type queue interface {
	backlogLocked() (n int, since time.Time)
	expireLocked(now time.Time)
	sendLocked()
}

// inFlight is a sent batch, or the sent write of a single caller.
type inFlight struct {
	scheduler *Scheduler
	batcher   *int // the batcher's number of batches in flight
	startedAt time.Time
}

// idleLocked reports whether a caller may write at once.
func (s *Scheduler) idleLocked() bool {
	return s.queued == 0 && len(s.inFlight) == 0 && (s.expectedWrites <= 0 || !time.Now().Before(s.expectedUntil))
}

// startLocked counts a batch in flight.
func (s *Scheduler) startLocked(batcher *int) *inFlight {
	f := &inFlight{scheduler: s, batcher: batcher, startedAt: time.Now()}
	*batcher++
	s.inFlight = append(s.inFlight, f)
	return f
}

// finish ends a batch of n writes, expects their callers again, and sends the next batches.
func (f *inFlight) finish(n int) {
	s := f.scheduler
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.expectedWrites = 0; n > 1 {
		s.expectedWrites, s.expectedUntil = n, time.Now().Add(expectFor)
	}
	*f.batcher--
	s.inFlight = slices.DeleteFunc(s.inFlight, func(other *inFlight) bool { return other == f })
	s.dispatchLocked()
}

// dispatchLocked sends the batches that may start now, and schedules the next check.
func (s *Scheduler) dispatchLocked() {
	for s.queued > 0 && (len(s.inFlight) == 0 || len(s.inFlight) == 1 && s.queued >= overlapThreshold) {
		if len(s.inFlight) == 0 && s.queued < overlapThreshold && s.expectedWrites > 0 && time.Now().Before(s.expectedUntil) {
			s.armLocked(time.Until(s.expectedUntil))
			return
		}
		next := s.nextLocked()
		if next == nil {
			break
		}
		next.sendLocked()
	}
	if s.queued > 0 {
		s.armLocked(checkInterval)
	}
}

// nextLocked returns the overdue batcher with the longest wait, or else the batcher with the longest queue. It returns
// nil when no batcher may send.
func (s *Scheduler) nextLocked() (next queue) {
	longest, oldest, now := 0, time.Time{}, time.Now()
	for _, b := range s.batchers {
		n, queuedSince := b.backlogLocked()
		switch {
		case n == 0:
		case now.Sub(queuedSince) > overdueAfter:
			if oldest.IsZero() || queuedSince.Before(oldest) {
				next, oldest = b, queuedSince
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
	case !s.timerAt.IsZero() && !s.timerAt.After(at):
		return
	case s.timer == nil:
		s.timer = time.AfterFunc(after, s.check)
	default:
		s.timer.Reset(after)
	}
	s.timerAt = at
}

// check stops waiting for slow batches and expires writes that were queued for MaxWait. It runs again while writes are
// queued.
func (s *Scheduler) check() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timerAt = time.Time{}
	now := time.Now()
	for _, b := range s.batchers {
		b.expireLocked(now)
	}
	s.inFlight = slices.DeleteFunc(s.inFlight, func(f *inFlight) bool {
		return now.Sub(f.startedAt) >= cmp.Or(s.slowAfter, slowAfter)
	})
	s.dispatchLocked()
}
