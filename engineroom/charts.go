package engineroom

import (
	"cmp"
	"context"
	"maps"
	"math"
	"net/url"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// topSeries bounds the named series of a chart; one more series sums the rest.
const topSeries = 4

// topSeriesClasses are the colours of the named series.
var topSeriesClasses = [topSeries]string{"bar-accent", "bar-info", "bar-warn", "bar-phase"}

// chartRanges are the ranges of the page, each with the length and the number of its points.
var chartRanges = map[string]timeAxis{
	"24h": {time.Hour, 24, "hour"}, "7d": {6 * time.Hour, 28, "6 hours"}, "30d": {24 * time.Hour, 30, "day"},
	"90d": {24 * time.Hour, 90, "day"},
}

// timeAxis is the time axis of a chart. Its points have one length and begin in UTC; the last point is now.
type timeAxis struct {
	step  time.Duration
	count int
	unit  string
}

// since is the beginning of the first point.
func (s timeAxis) since() time.Time {
	return time.Now().UTC().Truncate(s.step).Add(-time.Duration(s.count-1) * s.step)
}

// period is the period of the counts.
func (s timeAxis) period() activity.Period {
	if s.step < 24*time.Hour {
		return activity.ByHour
	}
	return activity.ByDay
}

// key is the start of the point that contains a time, in seconds.
func (s timeAxis) key(at time.Time) int64 { return at.UTC().Truncate(s.step).Unix() }

// points returns the points with their values, by the start of the point. A point without values gets those of empty.
func (s timeAxis) points(byStart map[int64][]float64, empty ...float64) []point {
	return pointsSince(s.since(), s.step, func(at time.Time) []float64 {
		if values, ok := byStart[at.Unix()]; ok {
			return values
		}
		return empty
	})
}

// pointsSince returns the points from a time until now.
func pointsSince(since time.Time, step time.Duration, values func(time.Time) []float64) []point {
	list := []point{}
	name, short := time.DateOnly, "Jan 2"
	if step < 24*time.Hour {
		name, short = "2006-01-02 15:04", "Jan 2 15h"
	}
	for at := since; !at.After(time.Now()); at = at.Add(step) {
		list = append(list, point{Name: at.Format(name), Short: at.Format(short), Values: values(at)})
	}
	return list
}

// chartFilter holds the parameters of the page.
type chartFilter struct {
	Range, Agent, Flow string
	Ranges             []chartRange
}

// chartRange is a link to a range.
type chartRange struct{ Name, Label, URL string }

// chartsPage draws runs, errors, latency, waits and spend over time. It reads every figure from counts, so the page's
// cost does not depend on the size of the tables.
func (room *Room) chartsPage() page {
	return page{
		path: "/charts", name: "charts", navLabel: "Charts", title: "Charts", open: openCharts, parallel: true,
		parts: []part{
			{name: "runs", interval: 2 * time.Minute, load: room.runCharts},
			{name: "latency", interval: 2 * time.Minute, load: room.latencyCharts},
			{name: "spend", interval: 2 * time.Minute, load: room.spendCharts},
			{name: "skills", interval: 2 * time.Minute, load: room.skillCharts},
		},
	}
}

func openCharts(_ context.Context, req *pageRequest) (title string, err error) {
	var filter chartFilter
	if filter.Range, err = req.oneOf("range", "7d", "24h", "30d", "90d"); err != nil {
		return "", err
	}
	if filter.Agent, err = req.textFilter("agent"); err != nil {
		return "", err
	}
	if filter.Flow, err = req.textFilter("flow"); err != nil {
		return "", err
	}
	for _, r := range [][2]string{{"24h", "24 hours"}, {"7d", "7 days"}, {"30d", "30 days"}, {"90d", "90 days"}} {
		filter.Ranges = append(filter.Ranges, chartRange{r[0], r[1], req.withParam("range", r[0])})
	}
	req.Subject = filter
	return "", nil
}

// figure is a chart with a summary.
type figure struct {
	Chart   chart
	Summary string // empty for a chart without values
	Empty   string // text for a chart without values
	Links   []link
}

// link leads to the rows behind a chart.
type link struct{ URL, Label string }

// runCharts draws ended executions, by the time of their end.
func (room *Room) runCharts(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(chartFilter)
	axis := chartRanges[filter.Range]
	type line struct {
		Start                                 time.Time
		Completed, Failed, Timeout, Cancelled int64
	}
	lines, err := postgres.Rows[line](ctx, room.Read, "count executions", `
		select c.start, sum(c.completed)::bigint as completed, sum(c.failed)::bigint as failed,
		       sum(c.timeout)::bigint as timeout, sum(c.cancelled)::bigint as cancelled
		  from agent_execution_counts c
		 where c.span = @span and c.start >= @since::timestamptz
		   and (@agent::text = '' or c.agent = lanekeeper.agent_count_key(@agent))
		   and (@flow::text = '' or c.flow = lanekeeper.agent_count_key(@flow))
		 group by c.start`, customPlan, postgres.Strict{
		"span": string(axis.period()), "since": axis.since(), "agent": filter.Agent, "flow": filter.Flow,
	})
	if err != nil {
		return nil, err
	}
	byStart := map[int64][]float64{}
	var all line
	for _, l := range lines {
		failed := l.Failed + l.Timeout
		addTo(byStart, axis.key(l.Start), float64(l.Completed), float64(l.Cancelled), float64(failed))
		all.Completed += l.Completed
		all.Cancelled += l.Cancelled
		all.Failed += failed
	}
	d := figure{Empty: "No end of an execution in this time is counted yet.", Chart: chart{
		Title: "Runs and errors per " + axis.unit, About: "Executions by the time of their end.",
		Series: []series{{"completed", "bar-accent"}, {"cancelled", "bar-wait"}, {"failed", "bar-bad"}}, Write: countTick,
		Points: axis.points(byStart, 0, 0, 0),
	}}
	if ended := all.Completed + all.Cancelled + all.Failed; ended > 0 {
		d.Summary = human.Counted(ended, "run") + ", " + human.Count(all.Failed) + " failed (" +
			human.Percent(float64(all.Failed)/float64(ended)) + ")"
	}
	behind := url.Values{"failed": {"1"}, "since": {axis.since().Format(time.RFC3339)}}
	if filter.Agent != "" {
		behind.Set("agent", filter.Agent)
	}
	if filter.Flow != "" {
		behind.Set("flow", filter.Flow)
	}
	d.Links = []link{{"/executions?" + behind.Encode(), "Failed executions"}}
	return map[string]any{"Charts": []figure{d}}, nil
}

// addTo adds values to those of a point. A missing point begins with zeros.
func addTo(points map[int64][]float64, key int64, values ...float64) {
	if points[key] == nil {
		points[key] = make([]float64, len(values))
	}
	for i, v := range values {
		points[key][i] += v
	}
}

// histogram counts durations by bucket.
type histogram struct {
	Start   time.Time
	Measure string
	Buckets []int32
	Counts  []int64
}

// percentiles are the 50th, 95th and 99th in milliseconds; NaN for none.
func (h histogram) percentiles() []float64 {
	list := []float64{math.NaN(), math.NaN(), math.NaN()}
	for i, p := range []float64{.5, .95, .99} {
		if ms := activity.Percentile(p, h.Buckets, h.Counts); ms != nil {
			list[i] = *ms
		}
	}
	return list
}

// latencyCharts draws how long runs took, waited for a worker, and waited for a lane.
func (room *Room) latencyCharts(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(chartFilter)
	axis := chartRanges[filter.Range]
	// For all agents and flows together, the index has the rows of each point. One of the two selects has no rows.
	list, err := postgres.Rows[histogram](ctx, room.Read, "read durations", `
		select x.start, x.measure, array_agg(x.bucket order by x.bucket) as buckets,
		       array_agg(x.n order by x.bucket) as counts
		  from (
		select g.start, m.measure, d.bucket, d.n
		  from generate_series(@since::timestamptz, clock_timestamp(), @step::interval) g (start)
		 cross join unnest(array['run', 'queue', 'lane']) m (measure)
		 cross join lateral (select u.bucket, u.executions as n from agent_execution_durations u
		                      where u.span = @span and u.start = g.start and u.measure = m.measure and u.agent = ''
		                        and u.flow = '' offset 0) d
		 where @agent::text = '' and @flow::text = ''
		union all
		select d.start, d.measure, d.bucket, sum(d.executions)::bigint from agent_execution_durations d
		 where (@agent <> '' or @flow <> '') and d.span = @span and d.start >= @since::timestamptz and d.flow <> ''
		   and (@agent::text = '' or d.agent = lanekeeper.agent_count_key(@agent))
		   and (@flow::text = '' or d.flow = lanekeeper.agent_count_key(@flow))
		 group by 1, 2, 3) x
		 group by 1, 2`, customPlan, postgres.Strict{
		"span": string(axis.period()), "since": axis.since(), "step": "1 " + string(axis.period()),
		"agent": filter.Agent, "flow": filter.Flow,
	})
	if err != nil {
		return nil, err
	}
	var charts []figure
	for _, m := range []struct{ measure, title, about, empty string }{
		{
			"run", "Duration of runs", "From the first claim to the end, waits included.",
			"No run in this time is counted yet.",
		},
		{
			"queue", "Queue delay", "From the start of an execution to its first claim by a worker.",
			"No run in this time is counted yet.",
		},
		{
			"lane", "Waiting time for lanes", "Each wait of an execution for a lane.",
			"No run that ended in this time waited for a lane.",
		},
	} {
		charts = append(charts, percentileChart(m.title, m.about, m.empty, slices.DeleteFunc(slices.Clone(list),
			func(h histogram) bool { return h.Measure != m.measure }), axis))
	}
	return map[string]any{"Charts": charts}, nil
}

// percentileChart draws percentiles as lines.
func percentileChart(title, about, empty string, list []histogram, axis timeAxis) figure {
	all, parts := map[int32]int64{}, map[int64]map[int32]int64{}
	for _, h := range list {
		part := parts[axis.key(h.Start)]
		if part == nil {
			part = map[int32]int64{}
			parts[axis.key(h.Start)] = part
		}
		for i, b := range h.Buckets {
			all[b], part[b] = all[b]+h.Counts[i], part[b]+h.Counts[i]
		}
	}
	values := map[int64][]float64{}
	for key, part := range parts {
		values[key] = histogramOf(part).percentiles()
	}
	d := figure{Empty: empty, Chart: chart{
		Title: title, About: about, Lines: true, Write: millisTick,
		Series: []series{{"p50", "bar-good"}, {"p95", "bar-warn"}, {"p99", "bar-bad"}},
		Points: axis.points(values, math.NaN(), math.NaN(), math.NaN()),
	}}
	if len(all) > 0 {
		sum := histogramOf(all)
		var n int64
		for _, count := range sum.Counts {
			n += count
		}
		p := sum.percentiles()
		d.Summary = "p50 " + millisTick(p[0]) + ", p95 " + millisTick(p[1]) + ", p99 " + millisTick(p[2]) +
			" of " + human.Count(n)
	}
	return d
}

// histogramOf returns the counts as a histogram, with its buckets in order.
func histogramOf(counts map[int32]int64) (h histogram) {
	h.Buckets = slices.Sorted(maps.Keys(counts))
	for _, b := range h.Buckets {
		h.Counts = append(h.Counts, counts[b])
	}
	return h
}

// millisTick formats milliseconds. NaN means that there is no value.
func millisTick(ms float64) string {
	if math.IsNaN(ms) {
		return "–"
	}
	return human.Duration(time.Duration(ms * float64(time.Millisecond)))
}

// spendCharts draws spend by agent, skill and model, and the share of cached tokens.
func (room *Room) spendCharts(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(chartFilter)
	if filter.Flow != "" {
		return map[string]any{}, nil // the counts have no spend by flow
	}
	axis := chartRanges[filter.Range]
	var charts []figure
	var until *time.Time
	days := map[string]string{"24h": "1", "7d": "7", "30d": "30", "90d": "90"}[filter.Range]
	for _, dimension := range []activity.Dimension{activity.ByAgent, activity.BySkill, activity.ByModel} {
		if filter.Agent != "" && dimension == activity.BySkill {
			continue // the counts have no skills by agent
		}
		sums, err := activity.CountedSpend(ctx, room.Read, activity.SpendFilter{
			Since: axis.since(), By: dimension, Period: axis.period(), Agent: filter.Agent,
		})
		if err != nil {
			return nil, err
		}
		until = sums.Until
		charts = append(charts, stackedSpend(dimension, sums.Lines, axis))
		charts[len(charts)-1].Links = []link{{"/spend?days=" + days + "&by=" + string(dimension), "Spend by " +
			string(dimension)}}
		if dimension == activity.ByAgent {
			charts = append(charts, cacheChart(sums.Lines, axis))
		}
	}
	return map[string]any{"Charts": charts, "Until": until}, nil
}

// stackedSpend draws the keys that cost most, and the sum of the rest. It draws tokens if no call has a price.
func stackedSpend(dimension activity.Dimension, lines []activity.SpendLine, axis timeAxis) figure {
	all := sumSpend(lines)
	value := func(l activity.SpendLine) float64 { return l.CostUSD }
	d := figure{Empty: "No model was called in this time.", Chart: chart{
		Title: "Spend by " + string(dimension), About: "Cost of model calls.", Write: moneyTick,
	}}
	if all.CostUSD == 0 {
		value = func(l activity.SpendLine) float64 { return float64(l.Tokens) }
		d.Chart.Title, d.Chart.About, d.Chart.Write = "Tokens by "+string(dimension), "Tokens of model calls.", countTick
	}
	totals := map[string]float64{}
	for _, l := range lines {
		totals[l.Key] += value(l)
	}
	names := slices.Collect(maps.Keys(totals))
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(cmp.Compare(totals[b], totals[a]), cmp.Compare(a, b)) })
	seriesOf := map[string]int{} // by name; the last series sums the rest
	for i, name := range names {
		seriesOf[name] = min(i, topSeries)
		if i < topSeries {
			label := cmp.Or(name, "no "+string(dimension))
			d.Chart.Series = append(d.Chart.Series, series{brief(40, label), topSeriesClasses[i]})
		}
	}
	if len(names) > topSeries {
		d.Chart.Series = append(d.Chart.Series, series{"others", "bar-wait"})
	}
	values := map[int64][]float64{}
	for _, l := range lines {
		if l.Period == nil {
			continue
		}
		pointValues := make([]float64, len(d.Chart.Series))
		pointValues[seriesOf[l.Key]] = value(l)
		addTo(values, axis.key(*l.Period), pointValues...)
	}
	d.Chart.Points = axis.points(values, make([]float64, len(d.Chart.Series))...)
	if len(names) > 0 {
		largest := human.Money(totals[names[0]])
		if all.CostUSD == 0 {
			largest = human.Count(int64(totals[names[0]]))
		}
		d.Summary = largest + " of " + tokensOrMoney(all) + ": " + cmp.Or(brief(40, names[0]), "no "+string(dimension))
	}
	return d
}

// tokensOrMoney formats a sum in dollars, or in tokens if no call has a price.
func tokensOrMoney(l activity.SpendLine) string {
	if l.CostUSD > 0 {
		return human.Money(l.CostUSD)
	}
	return human.Counted(l.Tokens, "token")
}

// cacheChart draws the share of prompt tokens that providers had cached.
func cacheChart(lines []activity.SpendLine, axis timeAxis) figure {
	sums := map[int64][]float64{}
	all := sumSpend(lines)
	for _, l := range lines {
		if l.Period != nil {
			addTo(sums, axis.key(*l.Period), float64(l.CachedTokens), float64(l.PromptTokens))
		}
	}
	shares := map[int64][]float64{}
	for key, values := range sums {
		shares[key] = []float64{values[0] / values[1]} // NaN without prompts
	}
	d := figure{Empty: "No model was called in this time.", Chart: chart{
		Title: "Cached prompt tokens", About: "Share of prompt tokens that the provider had cached.", Lines: true,
		Series: []series{{"cached", "bar-accent"}}, Write: shareTick, Tick: .25,
		Points: axis.points(shares, math.NaN()),
	}}
	if all.PromptTokens > 0 {
		d.Summary = human.Percent(float64(all.CachedTokens)/float64(all.PromptTokens)) + " of " +
			human.Count(all.PromptTokens) + " prompt tokens"
	}
	return d
}

func shareTick(f float64) string {
	if math.IsNaN(f) {
		return "–"
	}
	return human.Percent(f)
}

// skillCharts draws the outcomes and durations of skill calls. The counts have no calls by agent and flow.
func (room *Room) skillCharts(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(chartFilter)
	if filter.Agent != "" || filter.Flow != "" {
		return map[string]any{}, nil
	}
	axis := chartRanges[filter.Range]
	outcomes, err := room.skillOutcomes(ctx, axis)
	if err != nil {
		return nil, err
	}
	durations, err := room.skillDurations(ctx, axis)
	if err != nil {
		return nil, err
	}
	return map[string]any{"Charts": []figure{outcomes, durations}}, nil
}

// skillOutcomes draws the succeeded and failed calls.
func (room *Room) skillOutcomes(ctx context.Context, axis timeAxis) (figure, error) {
	lines, err := postgres.Rows[struct {
		Start          time.Time
		Worked, Failed int64
	}](ctx, room.Read, "count calls", `
		select g.start, sum(c.worked)::bigint as worked, sum(c.failed)::bigint as failed
		  from generate_series(@since::timestamptz, clock_timestamp(), @step::interval) g (start)
		 cross join lateral (
		   select u.worked, u.failed
		     from agent_activity_counts u
		    where u.span = @span and u.start = g.start and u.kind = 'call' offset 0) c
		 group by g.start`, customPlan, postgres.Strict{
		"span": string(axis.period()), "since": axis.since(), "step": "1 " + string(axis.period()),
	})
	if err != nil {
		return figure{}, err
	}
	byStart := map[int64][]float64{}
	var worked, failed int64
	for _, l := range lines {
		addTo(byStart, axis.key(l.Start), float64(l.Worked-l.Failed), float64(l.Failed))
		worked, failed = worked+l.Worked, failed+l.Failed
	}
	d := figure{Empty: "No skill was called in this time.", Links: []link{{"/skills", "Skills by health"}}, Chart: chart{
		Title: "Skill calls and errors per " + axis.unit, About: "Calls that count for the health of their skill.",
		Series: []series{{"succeeded", "bar-accent"}, {"failed", "bar-bad"}}, Write: countTick,
		Points: axis.points(byStart, 0, 0),
	}}
	if worked > 0 {
		d.Summary = human.Counted(worked, "call") + ", " + human.Count(failed) + " failed (" +
			human.Percent(float64(failed)/float64(worked)) + ")"
	}
	return d, nil
}

// skillDurations draws percentiles by day, because the durations of calls are counted by day only. It draws at least
// two days: a line needs two points.
func (room *Room) skillDurations(ctx context.Context, axis timeAxis) (figure, error) {
	days := int(time.Duration(axis.count) * axis.step / (24 * time.Hour))
	daily := timeAxis{24 * time.Hour, max(2, days), "day"}
	durations, err := postgres.Rows[histogram](ctx, room.Read, "read durations of calls", `
		select x.day::timestamp at time zone 'UTC' as start, '' as measure,
		       array_agg(x.bucket order by x.bucket) as buckets, array_agg(x.n order by x.bucket) as counts
		  from (select g.day::date as day, d.bucket, d.calls as n
		          from generate_series(@since::timestamptz at time zone 'UTC', clock_timestamp() at time zone 'UTC',
		                               interval '1 day') g (day)
		         cross join lateral (
		           select u.bucket, u.calls
		             from agent_activity_durations u
		            where u.day = g.day::date and u.skill = '' offset 0) d) x
		 group by 1`, customPlan, postgres.Strict{"since": daily.since()})
	if err != nil {
		return figure{}, err
	}
	const empty = "No skill was called in this time."
	return percentileChart("Duration of skill calls", "By day (UTC).", empty, durations, daily), nil
}
