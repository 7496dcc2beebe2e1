package activity

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// SpendFilter selects the sums of CountedSpend.
type SpendFilter struct {
	Since                 time.Time // cut to the hour (UTC); zero has no bound
	Until                 time.Time // likewise
	By                    Dimension
	Period                Period // Total when empty
	Skill, Surface, Model string // empty for all
	Purpose               string // likewise; not with Skill or BySkill, because no row has both
	Agent                 string // likewise; not with Skill, Purpose, BySkill or ByPurpose
}

// Dimension is the attribution of spend.
type Dimension string

// The dimensions.
const (
	BySkill   Dimension = "skill"   // called by the model call's answer; empty for none
	ByPurpose Dimension = "purpose" // of the model call: a phase, a turn, an automation
	BySurface Dimension = "surface"
	ByModel   Dimension = "model"
	ByAgent   Dimension = "agent" // that acted
	ByKey     Dimension = "key"   // chat key of the thread
	Together  Dimension = ""      // one line per period
)

// ByHour is a period of Counted sums: one line per hour (UTC).
const ByHour Period = "hour"

// SpendLine is the spend of one key in one period.
type SpendLine struct {
	Key              string     `json:"key"`    // of the dimension; empty for Together
	Period           *time.Time `json:"period"` // its start, UTC; nil for Total
	Calls            int64      `json:"calls"`
	PromptTokens     int64      `json:"prompt_tokens"`
	CompletionTokens int64      `json:"completion_tokens"`
	Tokens           int64      `json:"tokens"`
	CostUSD          float64    `json:"cost_usd"`
	UnknownTokens    int64      `json:"unknown_tokens"` // part of Tokens that no provider reported
	UnknownUSD       float64    `json:"unknown_usd"`    // part of CostUSD that no provider reported
	// CachedTokens is the part of PromptTokens that the provider had cached, and Errors the failed calls; 0 by skill.
	CachedTokens int64 `json:"cached_tokens"`
	Errors       int64 `json:"errors"`
}

// Counted are sums over the log, which a reader does not scan: [Count] adds each ended row once to
// agent_activity_counts and agent_activity_durations, and the reader adds the uncounted rows, those of the last half
// minute and running ones. So the sums equal the views agent_spend and agent_skill_calls. Percentiles are approximate,
// to 2.5 per cent, and omit the uncounted rows.
//
// Until is nil when the sums are complete. Otherwise more than 20,000 rows are uncounted, and rows from that moment on
// are missing until Count has caught up.
type Counted[T any] struct {
	Lines []T        `json:"lines"`
	Until *time.Time `json:"until"`
}

// uncountedLimit bounds the uncounted rows that a reader adds.
const uncountedLimit = 20_000

// CountedSpend returns the sums of the views agent_spend and, by purpose, agent_spend_by_purpose, at a cost that does
// not grow with the log. The latest period comes first, and within it the highest cost. A key of more than 300 bytes
// is cut.
func CountedSpend(ctx context.Context, db postgres.DB, f SpendFilter) (Counted[SpendLine], error) {
	switch f.Period {
	case "":
		f.Period = Total
	case ByHour, ByDay, Total:
	default:
		return Counted[SpendLine]{}, fmt.Errorf("sum spend: period %q is not one of %s, %s, %s", string(f.Period),
			ByHour, ByDay, Total)
	}
	switch f.By {
	case BySkill, ByPurpose, BySurface, ByModel, ByAgent, ByKey, Together:
	default:
		return Counted[SpendLine]{}, fmt.Errorf("sum spend: %q is not one of %s, %s, %s, %s, %s, %s", string(f.By), BySkill,
			ByPurpose, BySurface, ByModel, ByAgent, ByKey)
	}
	kind, err := f.kind()
	if err != nil {
		return Counted[SpendLine]{}, err
	}
	until := time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)
	if !f.Until.IsZero() {
		until = startOfHour(f.Until)
	}
	since := startOfHour(f.Since)
	type line struct {
		SpendLine
		Nothing bool       // the line has no spend: it only has LeftOut
		LeftOut *time.Time // see Counted.Until
	}
	list, err := postgres.RowsGeneric[line](ctx, db, "sum spend", countedSpendSQL, postgres.Strict{
		"since": since, "hours_until": firstMidnight(since, f.Period), "until": until, "period": string(f.Period),
		"by": string(f.By), "kind": kind, "agent": f.Agent, "skill": f.Skill, "surface": f.Surface, "model": f.Model,
		"purpose": f.Purpose, "most": uncountedLimit,
	})
	if err != nil {
		return Counted[SpendLine]{}, err
	}
	sums := Counted[SpendLine]{Lines: []SpendLine{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		if l.Nothing {
			continue
		}
		l.Period = utc(l.Period)
		sums.Lines = append(sums.Lines, l.SpendLine)
	}
	return sums, nil
}

//go:embed counts_spend.sql
var countedSpendSQL string

// kind returns the kind of rows of agent_activity_counts that have the sums. It rejects attributions that no row has.
func (f SpendFilter) kind() (string, error) {
	byWork := f.By == BySkill || f.By == ByPurpose || f.Skill != "" || f.Purpose != ""
	switch {
	case f.By == ByKey && (byWork || f.Agent != ""):
		return "", errors.New("sum spend: by key there are no agents, skills and purposes")
	case f.By == ByKey:
		return "key", nil
	case (f.By == ByAgent || f.Agent != "") && byWork:
		return "", errors.New("sum spend: by agent there are no skills and purposes")
	case f.By == ByAgent || f.Agent != "":
		return "agent", nil
	case (f.By == ByPurpose || f.Purpose != "") && (f.By == BySkill || f.Skill != ""):
		return "", fmt.Errorf("sum spend: %w", ErrSkillOrPurpose)
	case f.By == BySkill || f.Skill != "":
		return "charge", nil
	}
	return "model", nil
}

// startOfHour returns the start of the hour of t (UTC), not before the epoch.
func startOfHour(t time.Time) time.Time {
	if t.Before(time.Unix(0, 0)) {
		return time.Unix(0, 0).UTC()
	}
	return t.UTC().Truncate(time.Hour)
}

// firstMidnight returns the first midnight (UTC) not before since. From there on a query sums whole days instead of
// hours.
func firstMidnight(since time.Time, p Period) time.Time {
	if p == ByHour {
		return time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	day := since.Truncate(24 * time.Hour)
	if day.Before(since) {
		day = day.Add(24 * time.Hour)
	}
	return day
}
