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
	due             []string
	failingClaims   int // number of claims that fail next
	attemptDuration time.Duration
	wake            chan string

	mu                  sync.Mutex
	running, maxRunning map[string]int
	started             time.Time
	endTimes            []time.Duration // since the start, in order
	claims              int
	missingFull         []string // full targets that the argument of a claim omitted
}

// check runs fn while all other goroutines are blocked.
func (s *store) check(fn func()) {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	fn()
}

// run runs a dispatcher on the store in virtual time until test returns or calls stop.
func (s *store) run(t *testing.T, test func(stop context.CancelFunc)) {
	synctest.Test(t, func(t *testing.T) {
		s.running, s.maxRunning, s.started = map[string]int{}, map[string]int{}, time.Now()
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

func (s *store) claim(_ context.Context, limit int, full []string) (claimed []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claims++
	if s.failingClaims > 0 {
		s.failingClaims--
		return nil, errors.New("the database is unavailable")
	}
	for target, n := range s.running {
		if n == outbox.MaxPerTarget && !slices.Contains(full, target) {
			s.missingFull = append(s.missingFull, target)
		}
	}
	claimedPerTarget := map[string]int{}
	s.due = slices.DeleteFunc(s.due, func(m string) bool {
		if len(claimed) == limit || slices.Contains(full, m) || claimedPerTarget[m]+s.running[m] == outbox.MaxPerTarget {
			return false
		}
		claimedPerTarget[m]++
		claimed = append(claimed, m)
		return true
	})
	for target, n := range claimedPerTarget {
		s.running[target] += n
		s.maxRunning[target] = max(s.maxRunning[target], s.running[target])
		s.maxRunning["all"] = max(s.maxRunning["all"], s.totalRunning())
	}
	return claimed, nil
}

func (s *store) totalRunning() (n int) {
	for _, count := range s.running {
		n += count
	}
	return n
}

func (s *store) attempt(_ context.Context, m string) {
	if m == "slow" {
		time.Sleep(time.Hour)
	}
	time.Sleep(s.attemptDuration)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[m]--
	s.endTimes = append(s.endTimes, time.Since(s.started))
}

func TestSlowTargetDelaysNoOther(t *testing.T) {
	s := store{
		due:             slices.Concat(slices.Repeat([]string{"slow"}, 20), slices.Repeat([]string{"fast"}, 40)),
		attemptDuration: time.Second,
	}
	s.run(t, func(context.CancelFunc) {
		time.Sleep(time.Minute)
		s.check(func() {
			assert.Truef(t, len(s.endTimes) == 40 && s.endTimes[39] == 10*time.Second,
				"%d attempts ended, the last after %v", len(s.endTimes), s.endTimes)
			assert.Truef(t, s.maxRunning["slow"] == outbox.MaxPerTarget && s.maxRunning["fast"] == outbox.MaxPerTarget &&
				len(s.missingFull) == 0, "maximum concurrent attempts by target: %v; full targets that claims omitted: %v",
				s.maxRunning, s.missingFull)
		})
	})
	assert.Equal(t, 16, len(s.due))
}

func TestConcurrentAttemptsAreBounded(t *testing.T) {
	s := store{attemptDuration: time.Second}
	for i := range 10 {
		s.due = append(s.due, slices.Repeat([]string{string(rune('a' + i))}, outbox.MaxPerTarget)...)
	}
	s.run(t, func(context.CancelFunc) {
		time.Sleep(time.Minute)
		s.check(func() {
			assert.Truef(t, len(s.endTimes) == 40 && s.maxRunning["all"] == 16,
				"%d attempts, %d at once", len(s.endTimes), s.maxRunning["all"])
		})
	})
}

func TestStopFinishesAttempts(t *testing.T) {
	s := store{due: []string{"slow"}}
	s.run(t, func(stop context.CancelFunc) {
		synctest.Wait()
		stop()
	})
	assert.Equal(t, 1, len(s.endTimes))
}

func TestFailedClaimIsRetried(t *testing.T) {
	s := store{due: []string{"fast"}, failingClaims: 3}
	s.run(t, func(context.CancelFunc) {
		time.Sleep(3 * time.Second)
		s.check(func() {
			assert.Truef(t, len(s.endTimes) == 1 && s.claims >= 4, "%d claims, %d attempts", s.claims, len(s.endTimes))
		})
	})
}

func TestNotificationEndsPause(t *testing.T) {
	var s store
	s.run(t, func(context.CancelFunc) {
		s.check(func() { s.due = []string{"fast"} })
		s.wake <- ""
		s.check(func() {
			assert.Truef(t, len(s.endTimes) == 1 && s.endTimes[0] == 0, "attempts ended after %v", s.endTimes)
		})
	})
}
