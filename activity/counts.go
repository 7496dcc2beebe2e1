package activity

import (
	"context"
	_ "embed" // for the queries
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Sums over the log do not read the log. Count adds what ended to the tables agent_activity_counts and
// agent_activity_durations, each row once. A reader adds the rows that
// are not counted yet, those of the last half minute and those that run, so its figures are those of the
// log at that moment, as the views agent_spend and agent_skill_calls would have them. Only percentiles are
// approximate, to 2.5 per cent.

// tailMost is how many rows that are not counted yet a reader adds.
const tailMost = 20_000

// ByHour is a period of Counted sums.
const ByHour Period = "hour" // one line per hour (UTC)

// Dimension says what spend is attributed to.
type Dimension string

// The dimensions.
const (
	BySkill   Dimension = "skill"   // what the model call led to; empty where it led to no skill
	ByPurpose Dimension = "purpose" // what the model was called for: a phase, a turn, an automation
	BySurface Dimension = "surface"
	ByModel   Dimension = "model"
	Together  Dimension = "" // one line per period
)

// SpendFilter says which sums CountedSpend makes.
type SpendFilter struct {
	Since                 time.Time // cut to the hour (UTC); the zero time: ever
	By                    Dimension
	Period                Period // Total when empty
	Skill, Surface, Model string // only what was spent there; empty for all
	Purpose               string // likewise; not together with Skill or BySkill, for nothing is counted by both
}

// SpendLine is what was spent on one thing in one period.
type SpendLine struct {
	Key              string     `json:"key"`    // of the dimension; empty for Together
	Period           *time.Time `json:"period"` // its beginning, UTC; nil for Total
	Calls            int64      `json:"calls"`
	PromptTokens     int64      `json:"prompt_tokens"`
	CompletionTokens int64      `json:"completion_tokens"`
	Tokens           int64      `json:"tokens"`
	CostUSD          float64    `json:"cost_usd"`
	UnknownTokens    int64      `json:"unknown_tokens"` // the part of Tokens that no provider reported
	UnknownUSD       float64    `json:"unknown_usd"`    // the part of CostUSD that no provider reported
}

// Counted are sums over the log. Until is nil when they hold all of it; else rows from that moment on are
// missing, because more than 20,000 are not counted yet, and will be there when Count has caught up.
type Counted[T any] struct {
	Lines []T        `json:"lines"`
	Until *time.Time `json:"until"`
}

//go:embed counts_spend.sql
var countedSpendSQL string

// CountedSpend has the sums of the views agent_spend and, by purpose, agent_spend_by_purpose, at a cost that does not
// grow with the log: the latest period first, and in it what cost most. A key of more than 300 bytes is shortened.
func CountedSpend(ctx context.Context, db postgres.DB, f SpendFilter) (Counted[SpendLine], error) {
	switch f.Period {
	case "":
		f.Period = Total
	case ByHour, ByDay, Total:
	default:
		return Counted[SpendLine]{}, fmt.Errorf("sum spend: period %q is not one of %s, %s, %s", string(f.Period), ByHour, ByDay, Total)
	}
	switch f.By {
	case BySkill, ByPurpose, BySurface, ByModel, Together:
	default:
		return Counted[SpendLine]{}, fmt.Errorf("sum spend: %q is not one of %s, %s, %s, %s", string(f.By), BySkill, ByPurpose, BySurface, ByModel)
	}
	kind := "charge"
	if f.By == ByPurpose || f.Purpose != "" {
		if kind = "model"; f.By == BySkill || f.Skill != "" {
			return Counted[SpendLine]{}, fmt.Errorf("sum spend: %w", ErrSkillOrPurpose)
		}
	}
	since := hourOf(f.Since)
	type line struct {
		SpendLine
		Nothing bool
		LeftOut *time.Time
	}
	rows, err := db.Query(ctx, countedSpendSQL, perQuery, postgres.Strict{
		"since": since, "hours_until": daysFrom(since, f.Period), "by": string(f.By), "period": string(f.Period),
		"skill": f.Skill, "surface": f.Surface, "model": f.Model, "purpose": f.Purpose, "kind": kind, "most": tailMost,
	})
	list, err := report[line](rows, err, "sum spend")
	if err != nil {
		return Counted[SpendLine]{}, err
	}
	sums := Counted[SpendLine]{Lines: []SpendLine{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		if l.Nothing {
			continue // there to tell what was left out
		}
		l.Period = utc(l.Period)
		sums.Lines = append(sums.Lines, l.SpendLine)
	}
	return sums, nil
}

// hourOf is the beginning of a moment's hour (UTC), and not before ids begin.
func hourOf(t time.Time) time.Time {
	if t.Before(time.Unix(0, 0)) {
		return time.Unix(0, 0).UTC()
	}
	return t.UTC().Truncate(time.Hour)
}

// daysFrom is the moment from which whole days are added up, where hours need not be told apart: the first
// midnight not before since.
func daysFrom(since time.Time, p Period) time.Time {
	if p == ByHour {
		return time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	day := since.Truncate(24 * time.Hour)
	if day.Before(since) {
		day = day.Add(24 * time.Hour)
	}
	return day
}
