package activity

import (
	"context"
	_ "embed" // for the query
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// CallLine is how a skill's calls ended in one period.
type CallLine struct {
	Period *time.Time `json:"period"` // its beginning, UTC; nil for Total
	Calls  int64      `json:"calls"`  // all that were made
	Worked int64      `json:"worked"` // those that say something about the skill, as in agent_skill_calls
	Failed int64      `json:"failed"` // and of these
}

//go:embed counts_calls.sql
var countedCallsSQL string

// CountedCalls counts a skill's calls since a moment, which is cut to the hour (UTC), the latest period
// first. Periods without calls are left out.
func CountedCalls(ctx context.Context, db postgres.DB, skill string, since time.Time, by Period) (Counted[CallLine], error) {
	if by != ByHour && by != ByDay && by != Total {
		return Counted[CallLine]{}, fmt.Errorf("count calls: period %q is not one of %s, %s, %s", string(by), ByHour, ByDay, Total)
	}
	type line struct {
		CallLine
		LeftOut *time.Time
	}
	since = hourOf(since)
	rows, err := db.Query(ctx, countedCallsSQL, perQuery, postgres.Strict{
		"skill": skill, "since": since, "hours_until": daysFrom(since, by), "period": string(by), "most": tailMost,
	})
	list, err := report[line](rows, err, "count calls")
	sums := Counted[CallLine]{Lines: []CallLine{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		if l.Calls == 0 {
			continue // there to tell what was left out
		}
		l.Period = utc(l.Period)
		sums.Lines = append(sums.Lines, l.CallLine)
	}
	return sums, err
}
