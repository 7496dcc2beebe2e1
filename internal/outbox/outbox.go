// Package outbox delivers messages that are stored in PostgreSQL until somebody has taken them.
//
// A [Dispatcher] claims the messages that are due, makes their attempts at the same time, and sleeps until the next
// one is due, a notification comes or an attempt ends. It bounds the attempts of a process, and those to one target:
// a slow target does not hold up the others. What a claim, an attempt and its record are is up to the outbox: threads
// and webhooks keep their messages in tables of their own.
//
// It is not built on River, whose jobs lock for their whole attempt, are counted per queue and know no targets: a
// target's bound would be a queue for each target, and a message of a thread has to wait for the one before it.
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
	// maxAttempts bounds the attempts of a process at the same time.
	maxAttempts = 16
	// PerTarget is how many attempts to one target a claim begins at most, and none while so many are in flight. So
	// fewer than twice as many are made at the same time.
	PerTarget = 4

	// MaxPause is the longest pause between two claims, where no notification comes.
	MaxPause = 5 * time.Second
	minPause = 100 * time.Millisecond
)

// Dispatcher runs the attempts of one outbox. All fields but Wake are required. Any number of processes may run one
// on the same database.
type Dispatcher[M any] struct {
	Logger *slog.Logger
	// Claim begins at most limit attempts, none to the targets in full. A claimed message is not due again for as long
	// as an attempt may take.
	Claim func(ctx context.Context, limit int, full []string) ([]M, error)
	// Target names the target of a message.
	Target func(m M) string
	// Attempt delivers a message and records how that ended. Its ctx does not end with that of Run.
	Attempt func(ctx context.Context, m M)
	// NextDue returns how long it is until a message is due whose target is not in full; MaxPause when there is none.
	NextDue func(ctx context.Context, full []string) (time.Duration, error)
	// Wake is a notification of new messages; nil for none.
	Wake <-chan string

	mu       sync.Mutex
	inFlight map[string]int // attempts by target
	total    int
	ended    chan struct{} // an attempt has ended
	attempts sync.WaitGroup
}

// Run delivers until ctx ends, then lets the attempts under way finish. It waits for a database that is away.
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

// dispatch begins the attempts that are due, as far as there is room, and returns how long nothing is to be done.
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
	// A message that is due already is another process's, or its target is full.
	pause, err := d.NextDue(ctx, full)
	return min(max(pause, minPause), MaxPause), err
}

// room returns how many attempts may begin, and the targets that are full.
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

// Jitter returns d or up to a fifth more, so that attempts that failed together do not come back together.
func Jitter(d time.Duration) time.Duration { return max(d, time.Millisecond) + rand.N(max(d, 0)/5+1) }
