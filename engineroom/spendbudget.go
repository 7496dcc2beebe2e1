package engineroom

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// mostHeartbeats is how many heartbeats are counted for their cost: two weeks of one every five minutes.
const mostHeartbeats = 4000

// budgetLine is what a limit of the day has left, in one unit.
type budgetLine struct {
	Surface            string // empty for all together
	Spent, Aside, Left string
	Unknown            string  // the part of Spent that no provider reported; empty when there is none
	Limit              string  // empty when there is none
	Used, Held         float64 // of the limit, 0 to 1
	Over               bool    // nothing is left
	Percent            string
}

// Bar and BarHeld are the widths of the meter's pieces, of 100.
func (b budgetLine) Bar() string { return place(100 * b.Used) }

// BarHeld is the width of what is set aside.
func (b budgetLine) BarHeld() string { return place(100 * b.Held) }

// budgetLines are the limits of today, and what was spent where there is none.
func (room *Room) budgetLines(ctx context.Context, _ *visit) (any, error) {
	scopes, err := budgets.Today(ctx, room.Read)
	if err != nil {
		return nil, err
	}
	limits := map[string]budgets.Limit{"": room.Limits.Day}
	order := []string{""}
	for _, surface := range activitySurfaces {
		limits[surface] = room.Limits.Surface[trace.Surface(surface)]
		order = append(order, surface)
	}
	standing := map[string]budgets.Standing{}
	for _, s := range scopes {
		// day:2026-11-21 or day:2026-11-21:chat
		_, day, _ := strings.Cut(s.Scope, ":")
		_, surface, _ := strings.Cut(day, ":")
		standing[surface] = s
	}
	lines := []budgetLine{}
	for _, surface := range order {
		s, limit := standing[surface], limits[surface]
		if limit.USD > 0 || (surface == "" && s.CostUSD+s.ReservedUSD > 0) {
			lines = append(lines, lineOf(surface, s.CostUSD, s.UnknownUSD, s.ReservedUSD, limit.USD, money))
		}
		if limit.Tokens > 0 || (surface == "" && s.Tokens+s.ReservedTokens > 0) {
			lines = append(lines, lineOf(surface, float64(s.Tokens), float64(s.UnknownTokens), float64(s.ReservedTokens), float64(limit.Tokens), tokensText))
		}
	}
	return lines, nil
}

func tokensText(f float64) string { return thousands(int64(f)) + " tokens" }

// lineOf is what one limit has left; a limit of 0 is none.
func lineOf(surface string, spent, unknown, aside, limit float64, write func(float64) string) budgetLine {
	l := budgetLine{Surface: surface, Spent: write(spent)}
	if unknown > 0 {
		l.Unknown = write(unknown)
	}
	if aside > 0 {
		l.Aside = write(aside)
	}
	if limit <= 0 {
		return l
	}
	l.Limit, l.Left = write(limit), write(max(0, limit-spent-aside))
	l.Used = min(1, spent/limit)
	l.Held = min(1-l.Used, aside/limit)
	l.Over, l.Percent = spent >= limit, percentage(spent/limit)
	return l
}

// beatsCost is what heartbeats cost.
type beatsCost struct {
	Successful int64
	More       bool // than were counted
	Each       float64
	EachTokens int64
}

// costOfHeartbeats divides what the surface spent since a moment by the heartbeats that were completed and not skipped.
func (room *Room) costOfHeartbeats(ctx context.Context, since time.Time) (beatsCost, error) {
	var cost beatsCost
	sums, err := activity.CountedSpend(ctx, room.Read, activity.SpendFilter{Since: since, Surface: string(trace.Heartbeat)})
	if err != nil {
		return cost, err
	}
	err = room.Read.QueryRow(ctx, `
		select count(*) from (
		  select from agent_executions e
		   where e.flow = 'heartbeat' and e.claimed_by is null and e.id >= lanekeeper.agent_uuid7_floor(@since::timestamptz) and e.status = 'completed'
		     and e.result_summary not like 'skipped:%'
		   limit @most::int + 1) x`, freshPlan, postgres.Strict{"since": since, "most": mostHeartbeats}).Scan(&cost.Successful)
	if err != nil {
		return cost, fmt.Errorf("count heartbeats: %w", err)
	}
	if cost.More = cost.Successful > mostHeartbeats; cost.More || cost.Successful == 0 {
		return cost, nil
	}
	all := added(sums.Lines)
	cost.Each, cost.EachTokens = all.CostUSD/float64(cost.Successful), all.Tokens/cost.Successful
	return cost, nil
}
