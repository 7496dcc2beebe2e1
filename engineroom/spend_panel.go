package engineroom

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/monitor"
	"github.com/lanekeeper/lanekeeper/trace"
)

// spendPart is the panel of the overview.
func (room *Room) spendPart() part {
	return part{name: "spend", interval: sumsInterval, refreshOnActivity: true, load: room.spendPanel}
}

// window is the spend of the last days, including today.
type window struct {
	Days int
	Name string
	activity.SpendLine
}

// spendPanel sums up 1, 7 and 30 days, including today (UTC). The most expensive skills are those of 7 days.
func (room *Room) spendPanel(ctx context.Context, _ *pageRequest) (any, error) {
	since := today().AddDate(0, 0, -29)
	days, err := activity.CountedSpend(ctx, room.Read,
		activity.SpendFilter{Since: since, By: activity.BySurface, Period: activity.ByDay})
	if err != nil {
		return nil, err
	}
	week := today().AddDate(0, 0, -6)
	bySkill, err := activity.CountedSpend(ctx, room.Read,
		activity.SpendFilter{Since: week, By: activity.BySkill, Period: activity.ByDay})
	if err != nil {
		return nil, err
	}
	budget, err := room.budgetLines(ctx, nil)
	if err != nil {
		return nil, err
	}
	heartbeats, err := room.costOfHeartbeats(ctx, week, days.Lines)
	if err != nil {
		return nil, err
	}
	yesterday, err := room.spendOfYesterday(ctx, bySkill.Lines)
	if err != nil {
		return nil, err
	}
	windows := []window{{Days: 1, Name: "today"}, {Days: 7, Name: "7 days"}, {Days: 30, Name: "30 days"}}
	for i, w := range windows {
		from := today().AddDate(0, 0, 1-w.Days)
		windows[i].SpendLine = sumSpend(slices.DeleteFunc(slices.Clone(days.Lines), func(l activity.SpendLine) bool {
			return l.Period == nil || l.Period.Before(from)
		}))
	}
	return map[string]any{
		"Windows": windows, "Top": topSkills(bySkill.Lines), "Until": days.Until,
		"Budget": budget, "Heartbeats": heartbeats,
		"Week": week, "Yesterday": yesterday,
		"Evals": sumSpend(slices.DeleteFunc(slices.Clone(days.Lines), func(l activity.SpendLine) bool {
			return l.Key != string(trace.Eval)
		})),
		"Chart": spendChart("Spend by day, 30 days", days.Lines, since, activity.ByDay, sumSpend(days.Lines).CostUSD > 0),
	}, nil
}

// topSkills adds the days of each skill, and returns the skills that cost most.
func topSkills(lines []activity.SpendLine) []activity.SpendLine {
	bySkill := map[string]activity.SpendLine{}
	for _, l := range lines {
		sum := sumSpend([]activity.SpendLine{bySkill[l.Key], l})
		sum.Key = l.Key
		bySkill[l.Key] = sum
	}
	all := slices.SortedFunc(maps.Values(bySkill), func(a, b activity.SpendLine) int {
		return cmp.Or(cmp.Compare(b.CostUSD, a.CostUSD), cmp.Compare(b.Tokens, a.Tokens), cmp.Compare(a.Key, b.Key))
	})
	return all[:min(len(all), topSpenders)]
}

// spendOfYesterday sums up yesterday (UTC), and names the skills and the purposes that cost most. bySkill has lines of
// days, including yesterday.
func (room *Room) spendOfYesterday(ctx context.Context, bySkill []activity.SpendLine) (any, error) {
	day := today().AddDate(0, 0, -1)
	byPurpose, err := activity.CountedSpend(ctx, room.Read,
		activity.SpendFilter{Since: day, By: activity.ByPurpose, Period: activity.ByDay})
	if err != nil {
		return nil, err
	}
	data := map[string]any{"Day": day}
	for dimension, lines := range map[activity.Dimension][]activity.SpendLine{
		activity.BySkill: bySkill, activity.ByPurpose: byPurpose.Lines,
	} {
		lines = slices.DeleteFunc(slices.Clone(lines), func(l activity.SpendLine) bool {
			return l.Period == nil || !l.Period.Equal(day)
		})
		all := sumSpend(lines)
		rows := make([]spendRow, 0, topSpenders)
		for _, l := range lines[:min(len(lines), topSpenders)] {
			rows = append(rows, spendRow{SpendLine: l, Share: share(l, all)})
		}
		if data[string(dimension)] = rows; dimension == activity.ByPurpose {
			data["All"] = all
		}
	}
	return data, nil
}

// maxHeartbeats bounds the counted heartbeats: two weeks at one every five minutes.
const maxHeartbeats = 4000

// budgetLine is the rest of a daily limit, in one unit.
type budgetLine struct {
	Scope                    string // a surface, or "agent NAME"; empty for the total
	Spent, Reserved, Left    string
	Unknown                  string  // the part of Spent without a provider's report; empty for none
	Limit                    string  // empty for none
	UsedShare, ReservedShare float64 // of the limit, 0 to 1
	Over                     bool    // exhausted
	Percent                  string
}

// Bar is the width of the spent part of the meter, of 100.
func (b budgetLine) Bar() string { return formatSVG(100 * b.UsedShare) }

// BarReserved is the width of the reserved part.
func (b budgetLine) BarReserved() string { return formatSVG(100 * b.ReservedShare) }

// budgetLines reads today's limits, and the spend without a limit.
func (room *Room) budgetLines(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := room.monitor().Budgets(ctx, room.Read)
	lines := []budgetLine{}
	for _, b := range list {
		lines = append(lines, newBudgetLine(b))
	}
	return lines, err
}

// newBudgetLine writes the rest of a limit.
func newBudgetLine(b monitor.Budget) budgetLine {
	format := b.Text
	l := budgetLine{Scope: strings.TrimPrefix(b.Scope, "surface "), Spent: format(b.Spent)}
	if b.Scope == "day" {
		l.Scope = ""
	}
	if b.Unknown > 0 {
		l.Unknown = format(b.Unknown)
	}
	if b.Reserved > 0 {
		l.Reserved = format(b.Reserved)
	}
	if b.Limit <= 0 {
		if b.Spent == 0 && b.Reserved == 0 {
			l.Spent = "nothing"
		}
		return l
	}
	l.Limit, l.Left = format(b.Limit), format(max(0, b.Limit-b.Spent-b.Reserved))
	l.UsedShare = min(1, b.Share())
	l.ReservedShare = min(1-l.UsedShare, b.Reserved/b.Limit)
	l.Over, l.Percent = b.Over(), human.Percent(b.Share())
	return l
}

// heartbeatCost is the cost of heartbeats.
type heartbeatCost struct {
	Successful int64
	More       bool // more than counted
	Each       float64
	EachTokens int64
}

// costOfHeartbeats divides the heartbeat surface's spend by the number of completed heartbeats. Skipped heartbeats do
// not count. The lines have the spend by day and surface.
func (room *Room) costOfHeartbeats(
	ctx context.Context, since time.Time, lines []activity.SpendLine,
) (cost heartbeatCost, err error) {
	err = room.Read.QueryRow(ctx, `
		select count(*) from (
		  select from agent_executions e
		   where e.flow = 'heartbeat' and e.claimed_by is null
		     and e.id >= lanekeeper.agent_uuid7_floor(@since::timestamptz)
		     and e.status = 'completed' and e.result_summary not like 'skipped:%'
		   limit @limit::int + 1) x`, customPlan, postgres.Strict{"since": since, "limit": maxHeartbeats}).
		Scan(&cost.Successful)
	if err != nil {
		return cost, fmt.Errorf("count heartbeats: %w", err)
	}
	if cost.More = cost.Successful > maxHeartbeats; cost.More || cost.Successful == 0 {
		return cost, nil
	}
	all := sumSpend(slices.DeleteFunc(slices.Clone(lines), func(l activity.SpendLine) bool {
		return l.Key != string(trace.Heartbeat) || l.Period == nil || l.Period.Before(since)
	}))
	cost.Each, cost.EachTokens = all.CostUSD/float64(cost.Successful), all.Tokens/cost.Successful
	return cost, nil
}
