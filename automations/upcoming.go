package automations

import (
	"time"

	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

// Upcoming returns the next n times of an automation with a schedule, from its next_run_at on, in its time zone.
// None when it is disabled, has another trigger, or somebody broke its schedule. A time that has come
// already is the first; those that were missed besides it are not run.
func (a Automation) Upcoming(n int) []time.Time {
	times := []time.Time{}
	if a.Trigger != Cron || !a.Enabled || a.NextRunAt == nil {
		return times
	}
	zone, err := schedule.Location(a.Timezone)
	if err != nil {
		return times
	}
	s, err := schedule.Parse(a.Cron, zone)
	if err != nil {
		return times
	}
	for next := a.NextRunAt.In(zone); len(times) < n && !next.IsZero(); next = s.Next(next) {
		times = append(times, next)
	}
	return times
}
