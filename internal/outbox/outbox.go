// Package outbox delivers messages that are stored in PostgreSQL until their delivery.
//
// A [Dispatcher] claims due messages and attempts them concurrently. Then it sleeps until the next message is due, a
// notification arrives or an attempt ends. It bounds the concurrent attempts in total and per target, so a slow target
// does not delay others. The outbox defines claims, attempts and records: threads and webhooks store their messages in
// their own tables.
//
// It does not use River. River bounds jobs per queue, so a bound per target would need a queue for each target. A
// thread's message also has to wait for the message before it.
package outbox

import (
	"context"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

const (
	// maxAttempts bounds the concurrent attempts of a process.
	maxAttempts = 16
	// PerTarget bounds the attempts to one target in one claim. A claim skips targets with that many attempts in flight.
	// So a target has fewer than twice as many concurrent attempts.
	PerTarget = 4

	// MaxPause bounds the pause between two claims without a notification.
	MaxPause = 5 * time.Second
	minPause = 100 * time.Millisecond
)

// Dispatcher runs the attempts of one outbox. All fields but Wake are required. Any number of processes may run a
// Dispatcher on the same database.
type Dispatcher[M any] struct {
	Logger *slog.Logger
	// Claim claims at most limit due messages, none of the targets in full. A claimed message is not due again for the
	// maximum duration of an attempt.
	Claim func(ctx context.Context, limit int, full []string) ([]M, error)
	// Target names the target of a message.
	Target func(m M) string
	// Attempt delivers a message and records the result. Its ctx does not end with the ctx of Run.
	Attempt func(ctx context.Context, m M)
	// NextDue returns the time until the next message is due whose target is not in full; MaxPause without such a message.
	NextDue func(ctx context.Context, full []string) (time.Duration, error)
	// Wake is a notification of new messages; nil for none.
	Wake <-chan string

	mu       sync.Mutex
	inFlight map[string]int // attempts by target
	total    int
	ended    chan struct{} // an attempt has ended
	attempts sync.WaitGroup
}

// Run delivers until ctx ends, and then waits for the attempts in flight. It retries while the database is unavailable.
func (d *Dispatcher[M]) Run(ctx context.Context) {
	d.inFlight, d.ended = map[string]int{}, make(chan struct{}, 1)
	defer d.attempts.Wait()
	for ctx.Err() == nil {
		pause, err := d.dispatch(ctx)
		if err != nil && ctx.Err() == nil {
			d.Logger.WarnContext(ctx, "outbox not read, trying again", "error", err)
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
		case <-d.ended:
		}
		timer.Stop()
	}
}

// dispatch starts due attempts within the bounds, and returns the pause until the next call.
func (d *Dispatcher[M]) dispatch(ctx context.Context) (time.Duration, error) {
	room, full := d.room()
	if room == 0 {
		return MaxPause, nil
	}
	claimed, err := d.Claim(ctx, room, full)
	if err != nil {
		return 0, err
	}
	for _, m := range claimed {
		target := d.Target(m)
		d.count(target, 1)
		d.attempts.Go(func() {
			defer d.end(target)
			d.Attempt(context.WithoutCancel(ctx), m)
		})
	}
	if len(claimed) > 0 {
		return 0, nil
	}
	// Another process has claimed a message that is still due, or its target is full.
	pause, err := d.NextDue(ctx, full)
	return min(max(pause, minPause), MaxPause), err
}

// room returns the number of attempts that may start, and the full targets.
func (d *Dispatcher[M]) room() (int, []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	full := []string{}
	for _, target := range slices.Sorted(maps.Keys(d.inFlight)) {
		if d.inFlight[target] >= PerTarget {
			full = append(full, target)
		}
	}
	return maxAttempts - d.total, full
}

func (d *Dispatcher[M]) count(target string, by int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.total += by
	if d.inFlight[target] += by; d.inFlight[target] == 0 {
		delete(d.inFlight, target)
	}
}

func (d *Dispatcher[M]) end(target string) {
	d.count(target, -1)
	select {
	case d.ended <- struct{}{}:
	default:
	}
}

// Jitter returns d plus up to a fifth. So attempts that failed at the same time are retried at different times.
func Jitter(d time.Duration) time.Duration { return max(d, time.Millisecond) + rand.N(max(d, 0)/5+1) }
