package activity

import (
	"context"
	_ "embed" // for the query
	"math"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// healthDays is how far health looks back: from the hour that began so many days ago.
	healthDays = 7
	// streakMost is how many rows of a skill a streak is walked back.
	streakMost = 500
	// skillsMost is how many skills a listing has.
	skillsMost = 1000
)

// HealthFilter narrows skills down; what is empty does not.
type HealthFilter struct {
	Skill string // this one
	State string // enabled, on trial or disabled
	After string // by name
	Limit int    // 1,000 when 0, and at most
}

// Health is how a skill fares: the last 7 days.
type Health struct {
	Skill          string     `json:"skill"`
	Calls          int64      `json:"calls"` // that say something about the skill, as in agent_skill_calls
	Failed         int64      `json:"failed"`
	SuccessRate    *float64   `db:"-" json:"success_rate"` // 0 to 1; nil without calls
	Streak         int64      `json:"streak"`              // failures in a row up to now, since the skill was last enabled
	StreakMore     bool       `json:"streak_more"`         // and more: no success among the newest 500 rows
	P50MS          *float64   `db:"-" json:"p50_ms"`       // to 2.5 per cent, over whole days (UTC)
	P95MS          *float64   `db:"-" json:"p95_ms"`
	State          string     `json:"state"` // enabled, on trial, disabled
	DisabledBy     string     `json:"disabled_by"`
	DisabledReason string     `json:"disabled_reason"` // its first 2,000 characters
	DisabledAt     *time.Time `json:"disabled_at"`
}

//go:embed counts_health.sql
var countedHealthSQL string

// CountedHealth lists skills by name with what the view agent_skill_health says of them, at a cost that does
// not grow with the log. It looks back from the beginning of the hour, so it may have up to an hour more than
// the view. A streak goes by the order in which calls began to be recorded.
func CountedHealth(ctx context.Context, db postgres.DB, f HealthFilter) (Counted[Health], error) {
	type line struct {
		Health
		Buckets []int32
		Counts  []int64
		LeftOut *time.Time
	}
	since := hourOf(time.Now().AddDate(0, 0, -healthDays))
	limit := skillsMost
	if f.Limit > 0 {
		limit = min(f.Limit, skillsMost)
	}
	rows, err := db.Query(ctx, countedHealthSQL, perQuery, postgres.Strict{
		"since": since, "hours_until": daysFrom(since, Total), "skill": f.Skill, "state": f.State, "after": f.After, "limit": limit,
		"walk": streakMost, "most": tailMost,
	})
	list, err := report[line](rows, err, "sum health of skills")
	sums := Counted[Health]{Lines: []Health{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		h := l.Health
		h.DisabledAt = utc(h.DisabledAt)
		h.P50MS, h.P95MS = percentile(0.5, l.Buckets, l.Counts), percentile(0.95, l.Buckets, l.Counts)
		if h.Calls > 0 {
			rate := float64(h.Calls-h.Failed) / float64(h.Calls)
			h.SuccessRate = &rate
		}
		sums.Lines = append(sums.Lines, h)
	}
	return sums, err
}

// percentile is percentile_cont over durations of which the buckets are known; nil when there are none.
func percentile(p float64, buckets []int32, counts []int64) *float64 {
	var all int64
	for _, n := range counts {
		all += n
	}
	if all == 0 {
		return nil
	}
	rank := p * float64(all-1)
	low, high := nth(int64(math.Floor(rank)), buckets, counts), nth(int64(math.Ceil(rank)), buckets, counts)
	at := low + (high-low)*(rank-math.Floor(rank))
	return &at
}

// nth is the duration of the nth call, from 0, in milliseconds: the middle of its bucket.
func nth(n int64, buckets []int32, counts []int64) float64 {
	for i, b := range buckets {
		if n -= counts[i]; n < 0 && b < 0 {
			return 0
		} else if n < 0 {
			return math.Pow(1.05, float64(b)+0.5)
		}
	}
	return 0
}
