package engineroom

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/monitor"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	// maxSpenders bounds the lines; the rest is one more.
	maxSpenders = 100
	// topSpenders bounds the lines on the overview.
	topSpenders = 3
	// maxModelCalls bounds the listed model calls, and walkModelCalls the rows searched for them.
	maxModelCalls, walkModelCalls = 25, 2000
)

// spendFilter holds the parameters of the page.
type spendFilter struct {
	Days, By, Per                  string
	Skill, Purpose, Surface, Model string
	Surfaces                       []string // options
}

// since is the beginning of the first day (UTC).
func (w spendFilter) since() time.Time {
	days, err := strconv.Atoi(w.Days)
	if err != nil {
		days = 1
	}
	return today().AddDate(0, 0, 1-days)
}

// Narrowed reports whether a filter is set.
func (w spendFilter) Narrowed() bool {
	return w.Skill != "" || w.Purpose != "" || w.Surface != "" || w.Model != ""
}

// spendDay is a link to a day.
type spendDay struct{ Date, Word string }

// LatestDays are the last seven days, today first.
func (w spendFilter) LatestDays() []spendDay {
	list := []spendDay{}
	for i := range 7 {
		day := today().AddDate(0, 0, -i)
		word := day.Format("Mon 2 Jan")
		switch i {
		case 0:
			word = "today"
		case 1:
			word = "yesterday"
		}
		list = append(list, spendDay{day.Format(time.DateOnly), word})
	}
	return list
}

// today is the beginning of the day (UTC).
func today() time.Time { return time.Now().UTC().Truncate(24 * time.Hour) }

// spendPage shows the cost of model calls.
func (room *Room) spendPage() page {
	return page{
		path: "/spend", name: "spend", nav: "Spend", title: "Spend", open: openSpend, parallel: true,
		parts: []part{
			{name: "budget", every: 5 * time.Second, calm: true, load: room.budgetLines},
			{name: "sums", every: 10 * time.Second, calm: true, load: room.spendSums},
			{name: "calls", every: 5 * time.Second, calm: true, load: room.modelCalls},
		},
	}
}

func openSpend(_ context.Context, v *visit) (title string, err error) {
	want := spendFilter{Surfaces: activitySurfaces}
	if want.Days, err = v.oneOf("days", "7", "1", "30", "90"); err != nil {
		return "", err
	}
	if want.By, err = v.oneOf("by", string(activity.BySkill), string(activity.ByPurpose), string(activity.BySurface),
		string(activity.ByModel), string(activity.ByAgent), string(activity.ByKey)); err != nil {
		return "", err
	}
	if want.Per, err = v.oneOf("per", string(activity.ByDay), string(activity.ByHour)); err != nil {
		return "", err
	}
	if days := want.Days; want.Per == string(activity.ByHour) && days != "1" && days != "7" {
		return "", badFilter("per is hour; that is shown for 1 or 7 days, not for %s", days)
	}
	if want.Surface, err = v.oneOf("surface", append([]string{""}, activitySurfaces...)...); err != nil {
		return "", err
	}
	for name, into := range map[string]*string{"skill": &want.Skill, "purpose": &want.Purpose, "model": &want.Model} {
		if *into, err = v.textFilter(name); err != nil {
			return "", err
		}
	}
	if bySkill, byPurpose := want.Skill != "" || want.By == "skill", want.Purpose != "" ||
		want.By == "purpose"; bySkill && byPurpose {
		if want.Skill != "" || v.Query.Get("by") != "" {
			return "", badFilter("%s", activity.ErrSkillOrPurpose)
		}
		want.By = string(activity.ByPurpose)
	}
	byCaller := want.By == string(activity.ByAgent) || want.By == string(activity.ByKey)
	if byCaller && (want.Skill != "" || want.Purpose != "") {
		return "", badFilter("by is %s; skills and purposes are not counted by %s", want.By, want.By)
	}
	v.About = want
	return "", nil
}

// spendRow is a line of the sums.
type spendRow struct {
	activity.SpendLine
	Share           string // of the cost, or of the tokens without prices
	More            string // URL of the line's breakdown
	P50, P95, Price string // of a model
	Errored, Cached string // shares of the calls and of the prompt tokens; empty where they are not counted
}

// spendSums reads the sums.
func (room *Room) spendSums(ctx context.Context, v *visit) (any, error) {
	want, _ := v.About.(spendFilter)
	filter := activity.SpendFilter{
		Since: want.since(), By: activity.Dimension(want.By), Skill: want.Skill, Purpose: want.Purpose,
		Surface: want.Surface, Model: want.Model,
	}
	by, err := activity.CountedSpend(ctx, room.Read, filter)
	if err != nil {
		return nil, err
	}
	if filter.By != activity.ByAgent && filter.By != activity.ByKey {
		filter.By = activity.Together
	}
	filter.Period = activity.Period(want.Per)
	periods, err := activity.CountedSpend(ctx, room.Read, filter)
	if err != nil {
		return nil, err
	}
	all := added(by.Lines)
	lines := by.Lines[:min(len(by.Lines), maxSpenders)]
	spenders := make([]spendRow, 0, len(lines))
	for _, l := range lines {
		row := spendRow{SpendLine: l, Share: share(l, all), More: breakdownURL(want, l.Key)}
		spenders = append(spenders, row.withShares(want))
	}
	if want.By == string(activity.ByModel) {
		if err := room.describeModels(ctx, spenders, want.since()); err != nil {
			return nil, err
		}
	}
	return map[string]any{
		"Want": want, "All": all, "Spenders": spenders, "Others": added(by.Lines[len(lines):]), "Until": by.Until,
		"Since": want.since(),
		"Chart": spendChart("Spend by "+want.Per, periods.Lines, want.since(), activity.Period(want.Per), all.CostUSD > 0),
	}, nil
}

// withShares adds the shares of failed calls and of cached tokens, which are not counted by skill.
func (r spendRow) withShares(want spendFilter) spendRow {
	if want.By == string(activity.BySkill) || want.Skill != "" {
		return r
	}
	r.Errored, r.Cached = "0", "–"
	if r.Errors > 0 && r.Calls > 0 {
		r.Errored = human.Count(r.Errors) + " (" + human.Percent(float64(r.Errors)/float64(r.Calls)) + ")"
	}
	if r.PromptTokens > 0 {
		r.Cached = human.Percent(float64(r.CachedTokens) / float64(r.PromptTokens))
	}
	return r
}

// describeModels adds to models how long their calls took since a day, and where their price is from.
func (room *Room) describeModels(ctx context.Context, list []spendRow, since time.Time) error {
	took, err := activity.ModelDurations(ctx, room.Read, since, time.Now().Add(24*time.Hour))
	if err != nil {
		return err
	}
	for i := range list {
		h := took[list[i].Key]
		for p, into := range map[float64]*string{0.5: &list[i].P50, 0.95: &list[i].P95} {
			*into = "–"
			if ms := activity.Percentile(p, h.Buckets, h.Counts); ms != nil {
				*into = millisTick(*ms)
			}
		}
		if room.PriceOf != nil {
			list[i].Price = room.PriceOf(list[i].Key)
		}
	}
	return nil
}

// breakdownURL returns the URL of a line's breakdown; empty for none.
func breakdownURL(want spendFilter, key string) string {
	if key == "" || want.By == "agent" || want.By == "key" || len(key) > maxFilterBytes ||
		(want.By == "surface" && !slices.Contains(activitySurfaces, key)) {
		return ""
	}
	by := map[string]string{"skill": "model", "purpose": "model", "surface": "skill", "model": "skill"}[want.By]
	if want.Purpose != "" && by == "skill" {
		by = "purpose"
	}
	query := url.Values{"days": {want.Days}, "by": {by}}
	for name, value := range map[string]string{
		"skill": want.Skill, "purpose": want.Purpose, "surface": want.Surface,
		"model": want.Model,
	} {
		if value != "" {
			query.Set(name, value)
		}
	}
	query.Set(want.By, key)
	return "/spend?" + query.Encode()
}

// added returns the sum of lines.
func added(lines []activity.SpendLine) (sum activity.SpendLine) {
	for _, l := range lines {
		sum.Calls += l.Calls
		sum.PromptTokens += l.PromptTokens
		sum.CompletionTokens += l.CompletionTokens
		sum.Tokens += l.Tokens
		sum.CostUSD += l.CostUSD
		sum.UnknownTokens += l.UnknownTokens
		sum.UnknownUSD += l.UnknownUSD
		sum.CachedTokens += l.CachedTokens
		sum.Errors += l.Errors
	}
	return sum
}

// share is a line's part of the total.
func share(l, all activity.SpendLine) string {
	switch {
	case all.CostUSD > 0:
		return human.Percent(l.CostUSD / all.CostUSD)
	case all.Tokens > 0:
		return human.Percent(float64(l.Tokens) / float64(all.Tokens))
	}
	return ""
}

// spendChart draws all periods since a time: cost, or tokens without prices.
func spendChart(title string, lines []activity.SpendLine, since time.Time, per activity.Period, priced bool) chart {
	c := chart{
		Title: title, About: "Each bar is the cost of model calls in that period.", Series: []series{{"spent", "bar-accent"}},
		Write: moneyTick,
	}
	if !priced {
		c.About, c.Series[0].Name = "Each bar is the tokens of model calls in that period.", "tokens"
		c.Write = countTick
	}
	of := map[int64]float64{}
	for _, l := range lines {
		if l.Period == nil {
			continue
		}
		if priced {
			of[l.Period.Unix()] += l.CostUSD
		} else {
			of[l.Period.Unix()] += float64(l.Tokens)
		}
	}
	c.Points = periodsSince(since, per, func(at time.Time) []float64 { return []float64{of[at.Unix()]} })
	return c
}

// periodsSince returns the days or hours from a time until now.
func periodsSince(since time.Time, per activity.Period, values func(time.Time) []float64) []point {
	list := []point{}
	step, name, short := 24*time.Hour, time.DateOnly, "Jan 2"
	if per == activity.ByHour {
		step, name, short = time.Hour, "2006-01-02 15:04", "Jan 2 15h"
	}
	for at := since; !at.After(time.Now()); at = at.Add(step) {
		list = append(list, point{Name: at.Format(name), Short: at.Format(short), Values: values(at)})
	}
	return list
}

// moneyTick formats dollars at an axis: a part of a cent has four decimals, so that no two ticks read alike.
func moneyTick(f float64) string {
	if cents := f * 100; math.Abs(cents-math.Round(cents)) > 1e-6 {
		return fmt.Sprintf("$%.4f", f)
	}
	return human.Money(f)
}

// countTick formats a count at an axis: 950, 1.5k, 20M.
func countTick(f float64) string {
	switch {
	case f >= 1e9:
		return place(f/1e9) + "G"
	case f >= 1e6:
		return place(f/1e6) + "M"
	case f >= 1e4:
		return place(f/1e3) + "k"
	}
	return strconv.FormatFloat(f, 'f', -1, 64)
}

// modelCall is a row of the log with a cost.
type modelCall struct {
	ID, TraceID, Purpose, Surface, Model, Status string
	Tokens                                       int64
	CostUSD                                      float64
	DurationMS                                   *int64
	CreatedAt                                    time.Time
}

// modelCalls lists the newest model calls of the sums.
func (room *Room) modelCalls(ctx context.Context, v *visit) (any, error) {
	want, _ := v.About.(spendFilter)
	list, err := postgres.Rows[modelCall](ctx, room.Read, "list model calls", `
		select x.id::text, x.trace_id, left(x.purpose, 100) as purpose, left(x.surface, 40) as surface, left(x.model, 100)
		  as model, x.status,
		       lanekeeper.agent_tokens(x.token_usage, 'total_tokens') as tokens, x.cost_usd::float8 as cost_usd,
		         x.duration_ms, x.created_at
		  from (select a.id, a.trace_id, coalesce(nullif(a.purpose, ''), a.skill_name) as purpose, a.surface, a.model,
		    a.status, a.kind,
		               a.token_usage, a.cost_usd, a.duration_ms, a.created_at, a.led_to
		          from agent_activity a
		         where a.skill_name = 'model_call' and a.id >= lanekeeper.agent_uuid7_floor(@since::timestamptz)
		         order by a.id desc limit @walk::int) x
		 where x.kind = 'model' and (@purpose::text = ''
		   or lanekeeper.agent_count_key(x.purpose) = lanekeeper.agent_count_key(@purpose))
		   and (@skill::text = '' or x.led_to ? @skill)
		   and (@surface::text = '' or x.surface = @surface)
		     and (@model::text = '' or lanekeeper.agent_count_key(x.model) = lanekeeper.agent_count_key(@model))
		 order by x.id desc limit @most::int`, freshPlan, postgres.Strict{
		"since": want.since(), "walk": walkModelCalls, "skill": want.Skill, "purpose": want.Purpose,
		"surface": want.Surface, "model": want.Model,
		"most": maxModelCalls,
	})
	if err != nil {
		return nil, err
	}
	return map[string]any{"Calls": list, "Want": want, "Since": want.since(), "Walked": int64(walkModelCalls)}, nil
}

// spendPart is the panel of the overview.
func (room *Room) spendPart() part {
	return part{name: "spend", every: 10 * time.Second, calm: true, load: room.spendPanel}
}

// window is the spend of the last days, including today.
type window struct {
	Days int
	Name string
	activity.SpendLine
}

func (room *Room) spendPanel(ctx context.Context, _ *visit) (any, error) {
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
	beats, err := room.costOfHeartbeats(ctx, week, days.Lines)
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
		windows[i].SpendLine = added(slices.DeleteFunc(slices.Clone(days.Lines), func(l activity.SpendLine) bool {
			return l.Period == nil || l.Period.Before(from)
		}))
	}
	return map[string]any{
		"Windows": windows, "Top": bySkillTogether(bySkill.Lines), "Until": days.Until,
		"Budget": budget, "Heartbeats": beats,
		"Week": week, "Yesterday": yesterday,
		"Chart": spendChart("Spend by day, 30 days", days.Lines, since, activity.ByDay, added(days.Lines).CostUSD > 0),
	}, nil
}

// bySkillTogether adds the days of each skill, and returns the skills that cost most.
func bySkillTogether(lines []activity.SpendLine) []activity.SpendLine {
	of := map[string]activity.SpendLine{}
	for _, l := range lines {
		sum := added([]activity.SpendLine{of[l.Key], l})
		sum.Key = l.Key
		of[l.Key] = sum
	}
	all := slices.SortedFunc(maps.Values(of), func(a, b activity.SpendLine) int {
		return cmp.Or(cmp.Compare(b.CostUSD, a.CostUSD), cmp.Compare(b.Tokens, a.Tokens), cmp.Compare(a.Key, b.Key))
	})
	return all[:min(len(all), topSpenders)]
}

// spendOfYesterday sums up yesterday (UTC), and names the skills and the purposes that cost most. bySkill are lines of
// days that include it.
func (room *Room) spendOfYesterday(ctx context.Context, bySkill []activity.SpendLine) (any, error) {
	day := today().AddDate(0, 0, -1)
	byPurpose, err := activity.CountedSpend(ctx, room.Read,
		activity.SpendFilter{Since: day, By: activity.ByPurpose, Period: activity.ByDay})
	if err != nil {
		return nil, err
	}
	shown := map[string]any{"Day": day}
	for by, lines := range map[activity.Dimension][]activity.SpendLine{
		activity.BySkill: bySkill, activity.ByPurpose: byPurpose.Lines,
	} {
		lines = slices.DeleteFunc(slices.Clone(lines), func(l activity.SpendLine) bool {
			return l.Period == nil || !l.Period.Equal(day)
		})
		all := added(lines)
		rows := make([]spendRow, 0, topSpenders)
		for _, l := range lines[:min(len(lines), topSpenders)] {
			rows = append(rows, spendRow{SpendLine: l, Share: share(l, all)})
		}
		if shown[string(by)] = rows; by == activity.ByPurpose {
			shown["All"] = all
		}
	}
	return shown, nil
}

// maxHeartbeats bounds the counted heartbeats: two weeks at one every five minutes.
const maxHeartbeats = 4000

// budgetLine is the rest of a daily limit, in one unit.
type budgetLine struct {
	Surface            string // empty for the total
	Spent, Aside, Left string
	Unknown            string  // the part of Spent without a provider's report; empty for none
	Limit              string  // empty for none
	Used, Held         float64 // of the limit, 0 to 1
	Over               bool    // exhausted
	Percent            string
}

// Bar is the width of the spent part of the meter, of 100.
func (b budgetLine) Bar() string { return place(100 * b.Used) }

// BarHeld is the width of the reserved part.
func (b budgetLine) BarHeld() string { return place(100 * b.Held) }

// budgetLines reads today's limits, and the spend without a limit.
func (room *Room) budgetLines(ctx context.Context, _ *visit) (any, error) {
	list, err := room.monitor().Budgets(ctx, room.Read)
	lines := []budgetLine{}
	for _, b := range list {
		lines = append(lines, budgetLineOf(b))
	}
	return lines, err
}

func tokensText(f float64) string { return human.Count(int64(f)) + " tokens" }

// budgetLineOf writes the rest of a limit.
func budgetLineOf(b monitor.Budget) budgetLine {
	write := tokensText
	if b.Unit == "usd" {
		write = human.Money
	}
	surface, _ := strings.CutPrefix(b.Scope, "surface ")
	if surface == b.Scope {
		surface = ""
	}
	l := budgetLine{Surface: surface, Spent: write(b.Spent)}
	if b.Unknown > 0 {
		l.Unknown = write(b.Unknown)
	}
	if b.Reserved > 0 {
		l.Aside = write(b.Reserved)
	}
	if b.Limit <= 0 {
		if b.Spent == 0 && b.Reserved == 0 {
			l.Spent = "nothing"
		}
		return l
	}
	l.Limit, l.Left = write(b.Limit), write(max(0, b.Limit-b.Spent-b.Reserved))
	l.Used = min(1, b.Share())
	l.Held = min(1-l.Used, b.Reserved/b.Limit)
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

// costOfHeartbeats divides the surface's spend, of the lines by day and surface, by its completed heartbeats.
func (room *Room) costOfHeartbeats(
	ctx context.Context, since time.Time, lines []activity.SpendLine,
) (cost heartbeatCost, err error) {
	err = room.Read.QueryRow(ctx, `
		select count(*) from (
		  select from agent_executions e
		   where e.flow = 'heartbeat' and e.claimed_by is null and e.id >= lanekeeper.agent_uuid7_floor(@since::timestamptz)
		     and e.status = 'completed'
		     and e.result_summary not like 'skipped:%'
		   limit @most::int + 1) x`, freshPlan, postgres.Strict{"since": since, "most": maxHeartbeats}).Scan(&cost.Successful)
	if err != nil {
		return cost, fmt.Errorf("count heartbeats: %w", err)
	}
	if cost.More = cost.Successful > maxHeartbeats; cost.More || cost.Successful == 0 {
		return cost, nil
	}
	all := added(slices.DeleteFunc(slices.Clone(lines), func(l activity.SpendLine) bool {
		return l.Key != string(trace.Heartbeat) || l.Period == nil || l.Period.Before(since)
	}))
	cost.Each, cost.EachTokens = all.CostUSD/float64(cost.Successful), all.Tokens/cost.Successful
	return cost, nil
}

// Measures of a chart in pixels. Across it is drawn in per cent of its width, so that text keeps its size.
const (
	chartHigh, chartBottom, chartTop = 180.0, 22.0, 8.0
	// chartWide is the width of the coordinates of lines, which are stretched.
	chartWide  = 1000.0
	chartTicks = 4
	// maxLabels bounds the labels below a chart.
	maxLabels = 8
)

// point is the stacked values at one place of a chart.
type point struct {
	Name   string // in the data table
	Short  string // below the chart
	Values []float64
}

// series names the values at one index of all points.
type series struct{ Name, Class string }

// chart is a bar chart, drawn on the server, and its data table.
type chart struct {
	Title, About string
	Series       []series
	Points       []point
	Write        func(float64) string // formats a value
	Lines        bool                 // draws a line for each series instead of bars; NaN is a gap
}

// bar is a piece of a bar.
type bar struct{ X, Y, W, H, Class, Text string }

// mark is a label at an axis.
type mark struct{ X, Y, Text string }

// place formats a number for SVG.
func place(f float64) string {
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.1f", f), "0"), ".")
}

// across formats a place or a width across a chart, in per cent.
func across(f float64) string {
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.2f", 100*f/chartWide), "0"), ".") + "%"
}

// Empty reports whether all values are zero.
func (c chart) Empty() bool {
	for _, p := range c.Points {
		if c.top(p) > 0 {
			return false
		}
	}
	return true
}

// top is the highest drawn value of a point: the sum of its bars, or its highest line.
func (c chart) top(p point) (top float64) {
	for _, v := range p.Values {
		switch {
		case !c.Lines:
			top += v
		case v > top: // not NaN
			top = v
		}
	}
	return top
}

// step is the distance of two ticks: 1, 2 or 5 times a power of ten, with at most chartTicks up to the highest bar.
func (c chart) step() float64 {
	most := 0.0
	for _, p := range c.Points {
		most = max(most, c.top(p))
	}
	if most <= 0 {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(most/chartTicks)))
	for _, factor := range []float64{1, 2, 5} {
		if factor*power*chartTicks >= most {
			return factor * power
		}
	}
	return 10 * power
}

// height is the drawn height of a value.
func (c chart) height(v float64) float64 {
	return v / (c.step() * chartTicks) * (chartHigh - chartTop - chartBottom)
}

// chartLine is a drawn series: its pieces between gaps, and a dot where a piece has one point.
type chartLine struct {
	Class  string
	Pieces []string
	Dots   []mark
}

// Paths are the lines of all series.
func (c chart) Paths() []chartLine {
	if !c.Lines {
		return nil
	}
	lines := make([]chartLine, len(c.Series))
	wide := chartWide / float64(max(len(c.Points), 1))
	for s := range c.Series {
		lines[s].Class = c.Series[s].Class
		var piece []string
		var last mark
		end := func() {
			if len(piece) == 1 {
				lines[s].Dots = append(lines[s].Dots, last)
			} else if len(piece) > 1 {
				lines[s].Pieces = append(lines[s].Pieces, strings.Join(piece, " "))
			}
			piece = nil
		}
		for i, p := range c.Points {
			if math.IsNaN(p.Values[s]) {
				end()
				continue
			}
			at := wide * (float64(i) + .5)
			last = mark{X: across(at), Y: place(chartHigh - chartBottom - c.height(p.Values[s]))}
			piece = append(piece, place(at)+","+last.Y)
		}
		end()
	}
	return lines
}

// Areas cover a point each and name its values, where a reader points.
func (c chart) Areas() []bar {
	if !c.Lines {
		return nil
	}
	list := []bar{}
	wide := chartWide / float64(max(len(c.Points), 1))
	for i, p := range c.Points {
		words := []string{p.Name + ":"}
		for s, v := range p.Values {
			words = append(words, c.Series[s].Name, c.Write(v))
		}
		list = append(list, bar{
			X: across(wide * float64(i)), Y: place(chartTop), W: across(wide),
			H:    place(chartHigh - chartTop - chartBottom),
			Text: strings.Join(words, " "),
		})
	}
	return list
}

// Legend names the series if there are several.
func (c chart) Legend() []series {
	if len(c.Series) < 2 {
		return nil
	}
	return c.Series
}

// Bars are the pieces of all bars.
func (c chart) Bars() []bar {
	list := []bar{}
	if c.Lines {
		return list
	}
	wide := chartWide / float64(max(len(c.Points), 1))
	for i, p := range c.Points {
		base := chartHigh - chartBottom
		for s, v := range p.Values {
			high := c.height(v)
			if high <= 0 {
				continue
			}
			base -= high
			list = append(list, bar{
				X: across(wide * (float64(i) + .1)), Y: place(base), W: across(wide * .8), H: place(max(high, .5)),
				Class: c.Series[s].Class, Text: fmt.Sprintf("%s: %s %s", p.Name, c.Write(v), c.Series[s].Name),
			})
		}
	}
	return list
}

// Ticks are the labels at the left, with their lines.
func (c chart) Ticks() []mark {
	list := []mark{}
	for i := range chartTicks + 1 {
		v := c.step() * float64(i)
		list = append(list, mark{Y: place(chartHigh - chartBottom - c.height(v)), Text: c.Write(v)})
	}
	return list
}

// Labels are the labels below, as many as fit.
func (c chart) Labels() []mark {
	list := []mark{}
	wide := chartWide / float64(max(len(c.Points), 1))
	every := (len(c.Points) + maxLabels - 1) / maxLabels
	for i, p := range c.Points {
		if i%every == 0 {
			list = append(list, mark{X: across(wide * (float64(i) + .5)), Y: place(chartHigh - 5), Text: p.Short})
		}
	}
	return list
}

// Box is the viewBox of the lines, and High the height of the chart.
func (c chart) Box() string  { return fmt.Sprintf("0 0 %s %s", place(chartWide), place(chartHigh)) }
func (c chart) High() string { return place(chartHigh) }

// Rows are the points with formatted values, latest first.
func (c chart) Rows() [][]string {
	list := [][]string{}
	for _, p := range slices.Backward(c.Points) {
		row := []string{p.Name}
		for _, v := range p.Values {
			row = append(row, c.Write(v))
		}
		list = append(list, row)
	}
	return list
}
