package activity

import (
	"context"
	_ "embed"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// HealthFilter selects skills; empty fields select all.
type HealthFilter struct {
	Skill string
	State string // enabled, on trial or disabled
	After string // a name
	Limit int    // 1,000 when 0, at most 1,000
	// NoDurations omits the percentiles, which are most of the cost.
	NoDurations bool
}

// Health is the health of a skill over the last 7 days.
type Health struct {
	Skill       string   `json:"skill"`
	Calls       int64    `json:"calls"` // that count for its health, as in agent_skill_calls
	Failed      int64    `json:"failed"`
	SuccessRate *float64 `db:"-" json:"success_rate"` // 0 to 1; nil without calls
	// Streak is the number of consecutive failures until now, since the skill was last enabled. StreakMore reports that
	// the newest 500 rows have no success, so the streak may be longer.
	Streak         int64      `json:"streak"`
	StreakMore     bool       `json:"streak_more"`
	P50MS          *float64   `db:"-" json:"p50_ms"` // over whole days (UTC); see [Percentile]
	P95MS          *float64   `db:"-" json:"p95_ms"`
	State          string     `json:"state"` // enabled, on trial, disabled
	DisabledBy     string     `json:"disabled_by"`
	DisabledReason string     `json:"disabled_reason"` // its first 2,000 characters
	DisabledAt     *time.Time `json:"disabled_at"`
}

//go:embed counts_health.sql
var countedHealthSQL string

// CountedHealth lists skills by name with the figures of the view agent_skill_health, at a cost that does not grow
// with the log. It starts at a full hour, so it may cover up to an hour more than the view. A streak follows the
// order in which calls were opened.
func CountedHealth(ctx context.Context, db postgres.DB, f HealthFilter) (Counted[Health], error) {
	type line struct {
		Health
		Buckets []int32
		Counts  []int64
		LeftOut *time.Time
	}
	since := startOfHour(time.Now().AddDate(0, 0, -healthDays))
	limit := skillsLimit
	if f.Limit > 0 {
		limit = min(f.Limit, skillsLimit)
	}
	list, err := postgres.RowsGeneric[line](ctx, db, "sum health of skills", countedHealthSQL, postgres.Strict{
		"since": since, "hours_until": firstMidnight(since, Total), "skill": f.Skill, "state": f.State,
		"after": f.After, "limit": limit, "durations": !f.NoDurations,
		"walk": streakLimit, "most": uncountedLimit,
	})
	sums := Counted[Health]{Lines: []Health{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		h := l.Health
		h.DisabledAt = utc(h.DisabledAt)
		h.P50MS, h.P95MS = Percentile(0.5, l.Buckets, l.Counts), Percentile(0.95, l.Buckets, l.Counts)
		if h.Calls > 0 {
			rate := float64(h.Calls-h.Failed) / float64(h.Calls)
			h.SuccessRate = &rate
		}
		sums.Lines = append(sums.Lines, h)
	}
	return sums, err
}

const (
	// healthDays is the range of the health figures, from the start of the present hour.
	healthDays = 7
	// streakLimit bounds the rows of a skill that a streak reads.
	streakLimit = 500
	// skillsLimit bounds the skills of a listing.
	skillsLimit = 1000
)

// CallLine counts a skill's calls in one period.
type CallLine struct {
	Period *time.Time `json:"period"` // its start, UTC; nil for Total
	Calls  int64      `json:"calls"`  // all calls
	Worked int64      `json:"worked"` // calls that count for the skill's health, as in agent_skill_calls
	Failed int64      `json:"failed"` // failed ones among them
}

//go:embed counts_calls.sql
var countedCallsSQL string

// CountedCalls counts a skill's calls since a moment, which is cut to the hour (UTC), the latest period first.
// Periods without calls are left out.
func CountedCalls(
	ctx context.Context, db postgres.DB, skill string, since time.Time, by Period,
) (Counted[CallLine], error) {
	if by != ByHour && by != ByDay && by != Total {
		return Counted[CallLine]{}, fmt.Errorf("count calls: period %q is not one of %s, %s, %s", string(by),
			ByHour, ByDay, Total)
	}
	type line struct {
		CallLine
		LeftOut *time.Time
	}
	since = startOfHour(since)
	list, err := postgres.Rows[line](ctx, db, "count calls", countedCallsSQL, customPlan, postgres.Strict{
		"skill": skill, "since": since, "hours_until": firstMidnight(since, by), "period": string(by), "most": uncountedLimit,
	})
	sums := Counted[CallLine]{Lines: []CallLine{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		if l.Calls == 0 {
			continue // only reports the missing rows
		}
		l.Period = utc(l.Period)
		sums.Lines = append(sums.Lines, l.CallLine)
	}
	return sums, err
}
