package outbox_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/outbox"
)

// store holds due messages by target.
type store struct {
	due      []string
	failures int // results of the next claims
	each     time.Duration
	wake     chan string

	mu            sync.Mutex
	running, most map[string]int
	started       time.Time
	ended         []time.Duration // since the start, in order
	claims        int
	omitted       []string // full targets missing in the claim's argument
}

// check runs fn when all goroutines wait.
func (s *store) check(fn func()) {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	fn()
}

// run runs a dispatcher on the store until stop, in virtual time.
func (s *store) run(t *testing.T, test func(stop context.CancelFunc)) {
	synctest.Test(t, func(t *testing.T) {
		s.running, s.most, s.started = map[string]int{}, map[string]int{}, time.Now()
		s.wake = make(chan string, 1)
		d := outbox.Dispatcher[string]{
			Logger: slog.New(slog.DiscardHandler), Target: func(m string) string { return m }, Wake: s.wake,
			Claim: s.claim, Attempt: s.attempt,
			NextDue: func(context.Context, []string) (time.Duration, error) { return outbox.MaxPause, nil },
		}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { d.Run(ctx); close(done) }()
		test(stop)
		stop()
		<-done
	})
}

func (s *store) claim(_ context.Context, limit int, full []string) (got []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claims++
	if s.failures > 0 {
		s.failures--
		return nil, errors.New("the database is away")
	}
	for target, n := range s.running {
		if n == outbox.PerTarget && !slices.Contains(full, target) {
			s.omitted = append(s.omitted, target)
		}
	}
	per := map[string]int{}
	s.due = slices.DeleteFunc(s.due, func(m string) bool {
		if len(got) == limit || slices.Contains(full, m) || per[m]+s.running[m] == outbox.PerTarget {
			return false
		}
		per[m]++
		got = append(got, m)
		return true
	})
	for target, n := range per {
		s.running[target] += n
		s.most[target] = max(s.most[target], s.running[target])
		s.most["all"] = max(s.most["all"], s.all())
	}
	return got, nil
}

func (s *store) all() (n int) {
	for _, of := range s.running {
		n += of
	}
	return n
}

func (s *store) attempt(_ context.Context, m string) {
	if m == "slow" {
		time.Sleep(time.Hour)
	}
	time.Sleep(s.each)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[m]--
	s.ended = append(s.ended, time.Since(s.started))
}

func TestSlowTargetDoesNotDelayOthers(t *testing.T) {
	s := store{
		due:  slices.Concat(slices.Repeat([]string{"slow"}, 20), slices.Repeat([]string{"fast"}, 40)),
		each: time.Second,
	}
	s.run(t, func(context.CancelFunc) {
		time.Sleep(time.Minute)
		s.check(func() {
			assert.Truef(t, len(s.ended) == 40 && s.ended[39] == 10*time.Second,
				"%d attempts ended, the last after %v", len(s.ended), s.ended)
			assert.Truef(t, s.most["slow"] == outbox.PerTarget && s.most["fast"] == outbox.PerTarget && len(s.omitted) == 0,
				"most attempts of a target at once: %v; full, and not said so: %v", s.most, s.omitted)
		})
	})
	assert.Equal(t, 16, len(s.due))
}

func TestAttemptsAreBounded(t *testing.T) {
	s := store{each: time.Second}
	for i := range 10 {
		s.due = append(s.due, slices.Repeat([]string{string(rune('a' + i))}, outbox.PerTarget)...)
	}
	s.run(t, func(context.CancelFunc) {
		time.Sleep(time.Minute)
		s.check(func() {
			assert.Truef(t, len(s.ended) == 40 && s.most["all"] == 16, "%d attempts, %d at once", len(s.ended), s.most["all"])
		})
	})
}

func TestStoppedDispatcherFinishesAttempts(t *testing.T) {
	s := store{due: []string{"slow"}}
	s.run(t, func(stop context.CancelFunc) {
		synctest.Wait()
		stop()
	})
	assert.Equal(t, 1, len(s.ended))
}

func TestFailedClaimIsRetried(t *testing.T) {
	s := store{due: []string{"fast"}, failures: 3}
	s.run(t, func(context.CancelFunc) {
		time.Sleep(3 * time.Second)
		s.check(func() {
			assert.Truef(t, len(s.ended) == 1 && s.claims >= 4, "%d claims, %d attempts", s.claims, len(s.ended))
		})
	})
}

func TestNotificationEndsPause(t *testing.T) {
	var s store
	s.run(t, func(context.CancelFunc) {
		s.check(func() { s.due = []string{"fast"} })
		s.wake <- ""
		s.check(func() {
			assert.Truef(t, len(s.ended) == 1 && s.ended[0] == 0, "attempts ended after %v", s.ended)
		})
	})
}
