package engineroom

import (
	"context"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// maxDayLines bounds the lines of each breakdown of a day.
	maxDayLines = 12
	// maxDayTraces bounds the listed traces, and maxSearchedDayCalls the model calls to read for these traces.
	maxDayTraces, maxSearchedDayCalls = 20, 10_000
)

// spendDayPage breaks down a day's cost by agent, skill, model and purpose, and lists the most expensive traces.
func (room *Room) spendDayPage() page {
	return page{
		path: "/spend/{day}", name: "spendday", title: "Spend of a day", open: openSpendDay,
		parallel: true,
		parts: []part{
			{name: "sums", interval: 30 * time.Second, refreshOnActivity: true, load: room.spendOfDay},
			{name: "traces", interval: 30 * time.Second, refreshOnActivity: true, load: room.expensiveTraces},
		},
	}
}

func openSpendDay(_ context.Context, req *pageRequest) (string, error) {
	day, err := time.Parse(time.DateOnly, req.path("day"))
	if err != nil || day.After(today()) || day.Year() < 2000 {
		return "", notFound("there is no day %.60q; a day looks like 2026-01-31 (UTC)", req.path("day"))
	}
	req.Subject = day
	return "Spend of " + day.Format(time.DateOnly), nil
}

// dayShare is a breakdown of a day.
type dayShare struct {
	By     string
	Lines  []spendRow
	Others activity.SpendLine
}

// spendOfDay breaks down a day (UTC) by each dimension. A line's share is of the sum of its dimension.
func (room *Room) spendOfDay(ctx context.Context, req *pageRequest) (any, error) {
	day, _ := req.Subject.(time.Time)
	next := day.AddDate(0, 0, 1)
	var shares []dayShare
	var all activity.SpendLine
	var until *time.Time
	for _, dimension := range []activity.Dimension{
		activity.BySkill, activity.ByPurpose, activity.ByModel,
		activity.ByAgent,
	} {
		sums, err := activity.CountedSpend(ctx, room.Read, activity.SpendFilter{Since: day, Until: next, By: dimension})
		if err != nil {
			return nil, err
		}
		sum := sumSpend(sums.Lines)
		if dimension == activity.BySkill {
			all, until = sum, sums.Until
		}
		n := min(len(sums.Lines), maxDayLines)
		s := dayShare{By: string(dimension), Others: sumSpend(sums.Lines[n:])}
		for _, l := range sums.Lines[:n] {
			s.Lines = append(s.Lines, spendRow{SpendLine: l, Share: share(l, sum)})
		}
		shares = append(shares, s)
	}
	before, err := activity.CountedSpend(ctx, room.Read, activity.SpendFilter{
		Since: day.AddDate(0, 0, -1), Until: day, By: activity.Together,
	})
	if err != nil {
		return nil, err
	}
	data := map[string]any{
		"Day": day, "All": all, "Shares": shares, "Until": until, "Before": day.AddDate(0, 0, -1),
		"Compared": compareSpend(all, sumSpend(before.Lines)),
	}
	if !next.After(today()) {
		data["Next"] = next
	}
	return data, nil
}

// compareSpend compares a day's spend with that of the day before, in tokens if neither day has a cost; empty if the
// day before had none.
func compareSpend(all, before activity.SpendLine) string {
	spent, previous := all.CostUSD, before.CostUSD
	if spent == 0 && previous == 0 {
		spent, previous = float64(all.Tokens), float64(before.Tokens)
	}
	switch {
	case previous == 0:
		return ""
	case spent >= previous:
		return human.Percent(spent/previous-1) + " more than the day before"
	}
	return human.Percent(1-spent/previous) + " less than the day before"
}

// traceCost is a trace with its model calls of a day.
type traceCost struct {
	TraceID, Agent, Surface, Flow, Purpose string
	Calls, Tokens, Walked                  int64
	CostUSD                                float64
}

// expensiveTraces lists the traces of a day whose model calls cost most. On a day with very many calls it reads a part
// of the calls, and the page says so. It caches the result for half a minute, and the result of a past day for ten
// minutes.
func (room *Room) expensiveTraces(ctx context.Context, req *pageRequest) (any, error) {
	day, _ := req.Subject.(time.Time)
	lifetime := 30 * time.Second
	if day.Before(today()) {
		lifetime = 10 * time.Minute
	}
	return room.traceCosts.read(day, lifetime, func() (any, error) { return room.readExpensiveTraces(ctx, day) })
}

func (room *Room) readExpensiveTraces(ctx context.Context, day time.Time) (any, error) {
	list, err := postgres.Rows[traceCost](ctx, room.Read, "list expensive traces", `
		with calls as materialized (
		  select a.trace_id, a.agent, a.surface, a.purpose, a.cost_usd, a.token_usage from agent_activity a
		   where a.kind = 'model' and (a.created_at at time zone 'UTC')::date = @day::date
		     and a.id >= lanekeeper.agent_uuid7_floor(@from::timestamptz)
		     and a.id < lanekeeper.agent_uuid7_floor(@upto::timestamptz)
		   limit @searched::int),
		traces as materialized (
		  select c.trace_id, max(left(c.agent, 100)) as agent, max(left(c.surface, 40)) as surface,
		         (array_agg(left(c.purpose, 100) order by c.cost_usd desc))[1] as purpose, count(*) as calls,
		         sum(lanekeeper.agent_tokens(c.token_usage, 'total_tokens'))::bigint as tokens,
		         sum(case when c.cost_usd <> 'NaN' then c.cost_usd else 0 end)::float8 as cost_usd
		    from calls c group by c.trace_id order by cost_usd desc, tokens desc, c.trace_id limit @limit::int)
		select left(t.trace_id, 200) as trace_id, t.agent, t.surface, t.purpose, t.calls, t.tokens, t.cost_usd,
		       coalesce((select left(e.flow, 100) from agent_executions e
		                  where e.trace_id = t.trace_id order by e.id limit 1), '') as flow,
		       (select count(*) from calls) as walked
		  from traces t order by t.cost_usd desc, t.tokens desc, t.trace_id`, customPlan, postgres.Strict{
		"day": day.Format(time.DateOnly), "from": day.Add(-time.Hour), "upto": day.Add(25 * time.Hour),
		"searched": maxSearchedDayCalls,
		"limit":    maxDayTraces,
	})
	if err != nil {
		return nil, err
	}
	partial := len(list) > 0 && list[0].Walked >= maxSearchedDayCalls
	return map[string]any{"Traces": list, "Partly": partial, "Walked": int64(maxSearchedDayCalls)}, nil
}
