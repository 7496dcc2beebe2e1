// Package outbox delivers messages that are stored in PostgreSQL.
//
// A [Dispatcher] claims due messages and delivers them concurrently. Then it sleeps until the next message is due, a
// notification arrives or an attempt ends. It limits its concurrent attempts, and those to one target, so one slow
// target does not take all slots. The caller implements claim, attempt and record, because threads, webhooks and
// channels each store their messages in their own tables.
//
// Dispatcher does not use River. River limits concurrency by queue, so a limit by target would need one queue per
// target. A River job also stays locked for its whole attempt, and the messages of a thread need a fixed order.
package outbox

import (
	"context"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/logging"
)

const (
	// maxInFlight bounds the concurrent attempts of a Dispatcher.
	maxInFlight = 16
	// MaxPerTarget bounds the attempts to one target that a claim starts. A claim starts none while MaxPerTarget are in
	// flight, so a Dispatcher has fewer than 2 * MaxPerTarget attempts to one target.
	MaxPerTarget = 4

	// MaxPause is the longest pause between two claims while fewer than maxInFlight attempts run.
	MaxPause = 5 * time.Second
	minPause = 100 * time.Millisecond
)

// Dispatcher delivers the messages of one outbox. All fields but Wake are required. Several processes may run a
// Dispatcher on the same database.
type Dispatcher[M any] struct {
	Logger *slog.Logger
	// Claim claims at most limit due messages, none for the targets in full. A claimed message is not due again for the
	// longest duration of an attempt.
	Claim func(ctx context.Context, limit int, full []string) ([]M, error)
	// Target names the target of a message.
	Target func(m M) string
	// Attempt delivers a message and records the result. Its ctx does not end with the ctx of Run.
	Attempt func(ctx context.Context, m M)
	// NextDue returns the time until a message is due whose target is not in full. Without such a message it returns
	// MaxPause.
	NextDue func(ctx context.Context, full []string) (time.Duration, error)
	// Wake receives notifications of new messages; it may be nil.
	Wake <-chan string

	mu           sync.Mutex
	inFlight     map[string]int // attempts by target
	total        int
	attemptEnded chan struct{} // an attempt has ended
	attempts     sync.WaitGroup
}

// Run delivers messages until ctx ends, then waits for the attempts in flight. It retries while the database is
// unavailable.
func (d *Dispatcher[M]) Run(ctx context.Context) {
	d.inFlight, d.attemptEnded = map[string]int{}, make(chan struct{}, 1)
	defer d.attempts.Wait()
	var failures logging.Failures
	for ctx.Err() == nil {
		pause, err := d.dispatch(ctx)
		failures.Log(ctx, d.Logger, "outbox not read, trying again", err)
		if err != nil {
			pause = time.Second
		}
		if pause == 0 {
			continue
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-d.Wake:
		case <-d.attemptEnded:
		}
		timer.Stop()
	}
}

// dispatch starts due attempts up to the limits. It returns the pause before the next dispatch.
func (d *Dispatcher[M]) dispatch(ctx context.Context) (time.Duration, error) {
	free, full := d.capacity()
	if free == 0 {
		return MaxPause, nil
	}
	claimed, err := d.Claim(ctx, free, full)
	if err != nil {
		return 0, err
	}
	for _, m := range claimed {
		target := d.Target(m)
		d.addInFlight(target, 1)
		d.attempts.Go(func() {
			defer d.finish(target)
			d.Attempt(context.WithoutCancel(ctx), m)
		})
	}
	if len(claimed) > 0 {
		return 0, nil
	}
	// If a message is due already, another process has claimed it or its target is full. So minPause prevents a busy loop.
	pause, err := d.NextDue(ctx, full)
	return min(max(pause, minPause), MaxPause), err
}

// capacity returns the number of attempts that may start, and the targets with MaxPerTarget attempts in flight.
func (d *Dispatcher[M]) capacity() (int, []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	full := []string{}
	for _, target := range slices.Sorted(maps.Keys(d.inFlight)) {
		if d.inFlight[target] >= MaxPerTarget {
			full = append(full, target)
		}
	}
	return maxInFlight - d.total, full
}

func (d *Dispatcher[M]) addInFlight(target string, delta int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.total += delta
	if d.inFlight[target] += delta; d.inFlight[target] == 0 {
		delete(d.inFlight, target)
	}
}

func (d *Dispatcher[M]) finish(target string) {
	d.addInFlight(target, -1)
	select {
	case d.attemptEnded <- struct{}{}:
	default:
	}
}

// Jitter adds up to 20 % to d, so messages that failed together are not retried together.
func Jitter(d time.Duration) time.Duration { return max(d, time.Millisecond) + rand.N(max(d, 0)/5+1) }
