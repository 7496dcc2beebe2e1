package executions

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// dueTimes are the next due times of timers and schedules, as far as this process knows.
type dueTimes struct {
	mu       sync.Mutex
	schedule time.Time
	timer    time.Time
	dbTimer  float64 // the timer by the database's clock, in seconds since the epoch
	skips    int     // number of sweeps that skipped the due timer
}

const (
	// maxSkips bounds the doubling of the pause while sweeps skip a due timer. The longest pause is 64 ms.
	maxSkips = 6
	// failureDelay is the pause after a failed sweep or claim.
	failureDelay = time.Second
)

// scheduleDue reports whether a schedule has been due for at least age.
func (d *dueTimes) scheduleDue(age time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.schedule.IsZero() && time.Since(d.schedule) >= age
}

// advanceTimer sets the next timer to t if t is earlier, and reports whether t is earlier.
func (d *dueTimes) advanceTimer(t time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.timer.IsZero() && !t.Before(d.timer) {
		return false
	}
	d.timer, d.skips = t, 0
	return true
}

// set stores the due times after a sweep. The same dbTimer as before means that the sweep skipped the timer.
func (d *dueTimes) set(schedule, timer time.Time, dbTimer float64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if dbTimer == d.dbTimer && !timer.IsZero() && !timer.After(time.Now()) {
		d.skips = min(d.skips+1, maxSkips)
	} else {
		d.skips = 0
	}
	d.schedule, d.timer, d.dbTimer = schedule, timer, dbTimer
}

// postpone delays a due timer after a failed sweep.
func (d *dueTimes) postpone() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if soonest := time.Now().Add(failureDelay); !d.timer.IsZero() && d.timer.Before(soonest) {
		d.timer = soonest
	}
}

// sleepTime returns how long the sweeper may sleep. The time doubles while sweeps skip a due timer, because its row is
// locked or another process sweeps.
func (d *dueTimes) sleepTime(maxSleep time.Duration) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer.IsZero() {
		return maxSleep
	}
	return min(maxSleep, max(time.Until(d.timer), time.Millisecond<<d.skips))
}

// refreshDue reads the due times again.
func (e *Engine) refreshDue(ctx context.Context) error {
	_, err := e.readDue(ctx)
	return err
}

// readDue reads when the next timer and schedule are due. It returns how long ago the first lease of a lost worker
// expired. The query returns durations, because the clock of this process may be wrong.
func (e *Engine) readDue(ctx context.Context) (expiredFor time.Duration, err error) {
	var schedule, timer, lost *float64
	var dbTimer float64
	err = e.pool.QueryRow(ctx, `
		select extract(epoch from (select min(next_run_at) from agent_schedules) - clock_timestamp())::float8,
		       extract(epoch from t.due_at - clock_timestamp())::float8,
		       extract(epoch from clock_timestamp() - (select min(expires_at) from agent_workers))::float8,
		       coalesce(extract(epoch from t.due_at), 0)::float8
		  from (select min(waiting_until) as due_at from agent_executions where status = 'waiting') t`).
		Scan(&schedule, &timer, &lost, &dbTimer)
	if err != nil {
		return 0, fmt.Errorf("read due times: %w", err)
	}
	e.nextDue.set(localTime(schedule), localTime(timer), dbTimer)
	signal(e.timerChanged) // the sweeper may sleep until a later time
	if lost != nil {
		expiredFor = clampSeconds(*lost)
	}
	return expiredFor, nil
}

// localTime returns the local time after some seconds; the zero time for nil.
func localTime(seconds *float64) time.Time {
	if seconds == nil {
		return time.Time{}
	}
	return time.Now().Add(clampSeconds(*seconds))
}

// clampSeconds converts seconds to a duration of at most 12 days, because a row may have the time infinity. The sweeper
// reads a later time again long before that.
func clampSeconds(seconds float64) time.Duration {
	return time.Duration(min(seconds, 1e6) * float64(time.Second))
}
