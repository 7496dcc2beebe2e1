package engineroom

import (
	"context"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	// maxSpenders bounds the lines; one more line sums the rest.
	maxSpenders = 100
	// topSpenders bounds the lines on the overview.
	topSpenders = 3
	// maxModelCalls bounds the listed model calls, and maxSearchedCalls the rows searched for them.
	maxModelCalls, maxSearchedCalls = 25, 2000
)

// spendFilter holds the parameters of the page.
type spendFilter struct {
	Days, By, Per                  string
	Skill, Purpose, Surface, Model string
	Surfaces                       []string // options
}

// since is the beginning of the first day (UTC).
func (f spendFilter) since() time.Time {
	days, err := strconv.Atoi(f.Days)
	if err != nil {
		days = 1
	}
	return today().AddDate(0, 0, 1-days)
}

// Narrowed reports whether a filter is set.
func (f spendFilter) Narrowed() bool {
	return f.Skill != "" || f.Purpose != "" || f.Surface != "" || f.Model != ""
}

// spendDay is a link to a day.
type spendDay struct{ Date, Label string }

// LatestDays are the last seven days, today first.
func (f spendFilter) LatestDays() []spendDay {
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

// today returns the beginning of this day (UTC).
func today() time.Time { return time.Now().UTC().Truncate(24 * time.Hour) }

// spendPage shows the cost of model calls.
func (room *Room) spendPage() page {
	return page{
		path: "/spend", name: "spend", navLabel: "Spend", title: "Spend", open: openSpend, parallel: true,
		parts: []part{
			{name: "budget", interval: 5 * time.Second, refreshOnActivity: true, load: room.budgetLines},
			{name: "sums", interval: 10 * time.Second, refreshOnActivity: true, load: room.spendSums},
			{name: "calls", interval: 5 * time.Second, refreshOnActivity: true, load: room.modelCalls},
		},
	}
}

// openSpend reads the filters. It rejects combinations without counts: hours of more than 7 days, skills with purposes,
// and agents or keys with either.
func openSpend(_ context.Context, req *pageRequest) (title string, err error) {
	filter := spendFilter{Surfaces: trace.Surfaces()}
	if filter.Days, err = req.oneOf("days", "7", "1", "30", "90"); err != nil {
		return "", err
	}
	if filter.By, err = req.oneOf("by", string(activity.BySkill), string(activity.ByPurpose), string(activity.BySurface),
		string(activity.ByModel), string(activity.ByAgent), string(activity.ByKey)); err != nil {
		return "", err
	}
	if filter.Per, err = req.oneOf("per", string(activity.ByDay), string(activity.ByHour)); err != nil {
		return "", err
	}
	if days := filter.Days; filter.Per == string(activity.ByHour) && days != "1" && days != "7" {
		return "", problem.BadParameter("per is hour; that is shown for 1 or 7 days, not for %s", days)
	}
	if filter.Surface, err = req.oneOf("surface", append([]string{""}, trace.Surfaces()...)...); err != nil {
		return "", err
	}
	for name, target := range map[string]*string{
		"skill": &filter.Skill, "purpose": &filter.Purpose,
		"model": &filter.Model,
	} {
		if *target, err = req.textFilter(name); err != nil {
			return "", err
		}
	}
	bySkill := filter.Skill != "" || filter.By == string(activity.BySkill)
	byPurpose := filter.Purpose != "" || filter.By == string(activity.ByPurpose)
	if bySkill && byPurpose {
		if filter.Skill != "" || req.Query.Get("by") != "" {
			return "", problem.BadParameter("%s", activity.ErrSkillOrPurpose)
		}
		filter.By = string(activity.ByPurpose)
	}
	byCaller := filter.By == string(activity.ByAgent) || filter.By == string(activity.ByKey)
	if byCaller && (filter.Skill != "" || filter.Purpose != "") {
		return "", problem.BadParameter("by is %s; skills and purposes are not counted by %s", filter.By, filter.By)
	}
	req.Subject = filter
	return "", nil
}

// spendRow is a line of the sums, with its formatted shares.
type spendRow struct {
	activity.SpendLine
	Share           string // share of the cost, or of the tokens if no call has a price
	More            string // URL of the line's breakdown
	P50, P95, Price string // durations of the calls of a model, and the source of its price
	Errored, Cached string // shares of the calls and of the prompt tokens; empty without counts
}

// spendSums reads the sums.
func (room *Room) spendSums(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(spendFilter)
	query := activity.SpendFilter{
		Since: filter.since(), By: activity.Dimension(filter.By), Skill: filter.Skill, Purpose: filter.Purpose,
		Surface: filter.Surface, Model: filter.Model,
	}
	groups, err := activity.CountedSpend(ctx, room.Read, query)
	if err != nil {
		return nil, err
	}
	if query.By != activity.ByAgent && query.By != activity.ByKey {
		query.By = activity.Together
	}
	query.Period = activity.Period(filter.Per)
	periods, err := activity.CountedSpend(ctx, room.Read, query)
	if err != nil {
		return nil, err
	}
	all := sumSpend(groups.Lines)
	lines := groups.Lines[:min(len(groups.Lines), maxSpenders)]
	spenders := make([]spendRow, 0, len(lines))
	for _, l := range lines {
		row := spendRow{SpendLine: l, Share: share(l, all), More: breakdownURL(filter, l.Key)}
		spenders = append(spenders, row.withShares(filter))
	}
	if filter.By == string(activity.ByModel) {
		if err := room.describeModels(ctx, spenders, filter.since()); err != nil {
			return nil, err
		}
	}
	return map[string]any{
		"Want": filter, "All": all, "Spenders": spenders, "Others": sumSpend(groups.Lines[len(lines):]),
		"Until": groups.Until,
		"Since": filter.since(),
		"Chart": spendChart("Spend by "+filter.Per, periods.Lines, filter.since(), activity.Period(filter.Per),
			all.CostUSD > 0),
	}, nil
}

// withShares adds the shares of failed calls and of cached tokens. The counts by skill have neither.
func (r spendRow) withShares(filter spendFilter) spendRow {
	if filter.By == string(activity.BySkill) || filter.Skill != "" {
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

// describeModels adds the durations of calls since a day, and the source of the price, to each model.
func (room *Room) describeModels(ctx context.Context, list []spendRow, since time.Time) error {
	names := make([]string, 0, len(list))
	for _, l := range list {
		names = append(names, l.Key)
	}
	took, err := activity.ModelDurations(ctx, room.Read, names, since, time.Now().Add(24*time.Hour))
	if err != nil {
		return err
	}
	for i := range list {
		h := took[list[i].Key]
		for p, target := range map[float64]*string{0.5: &list[i].P50, 0.95: &list[i].P95} {
			*target = "–"
			if ms := activity.Percentile(p, h.Buckets, h.Counts); ms != nil {
				*target = millisTick(*ms)
			}
		}
		if room.PriceOf != nil {
			list[i].Price = room.PriceOf(list[i].Key)
		}
	}
	return nil
}

// breakdownURL returns the URL of a line's breakdown; empty for none.
func breakdownURL(filter spendFilter, key string) string {
	if key == "" || filter.By == "agent" || filter.By == "key" || len(key) > maxFilterBytes ||
		(filter.By == "surface" && !slices.Contains(trace.Surfaces(), key)) {
		return ""
	}
	dimension := map[string]string{"skill": "model", "purpose": "model", "surface": "skill", "model": "skill"}[filter.By]
	if filter.Purpose != "" && dimension == "skill" {
		dimension = "purpose"
	}
	query := url.Values{"days": {filter.Days}, "by": {dimension}}
	for name, value := range map[string]string{
		"skill": filter.Skill, "purpose": filter.Purpose, "surface": filter.Surface,
		"model": filter.Model,
	} {
		if value != "" {
			query.Set(name, value)
		}
	}
	query.Set(filter.By, key)
	return "/spend?" + query.Encode()
}

// sumSpend returns the sum of lines.
func sumSpend(lines []activity.SpendLine) (sum activity.SpendLine) {
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

// share returns a line's share of the total cost, or of the tokens if no call has a price.
func share(l, all activity.SpendLine) string {
	switch {
	case all.CostUSD > 0:
		return human.Percent(l.CostUSD / all.CostUSD)
	case all.Tokens > 0:
		return human.Percent(float64(l.Tokens) / float64(all.Tokens))
	}
	return ""
}

// spendChart draws all periods since a time. It draws cost, or tokens if no call has a price.
func spendChart(title string, lines []activity.SpendLine, since time.Time, per activity.Period, priced bool) chart {
	c := chart{
		Title: title, About: "Each bar is the cost of model calls in that period.", Series: []series{{"spent", "bar-accent"}},
		Write: moneyTick,
	}
	if !priced {
		c.About, c.Series[0].Name = "Each bar is the tokens of model calls in that period.", "tokens"
		c.Write = countTick
	}
	sums := map[int64]float64{}
	for _, l := range lines {
		if l.Period == nil {
			continue
		}
		if priced {
			sums[l.Period.Unix()] += l.CostUSD
		} else {
			sums[l.Period.Unix()] += float64(l.Tokens)
		}
	}
	step := 24 * time.Hour
	if per == activity.ByHour {
		step = time.Hour
	}
	c.Points = pointsSince(since, step, func(at time.Time) []float64 { return []float64{sums[at.Unix()]} })
	return c
}

// moneyTick formats dollars at an axis. Parts of a cent have four decimals or more, so that small ticks differ.
func moneyTick(f float64) string {
	if cents := f * 100; math.Abs(cents-math.Round(cents)) > 1e-9 {
		return fmt.Sprintf("$%.*f", max(4, 1+int(math.Ceil(-math.Log10(f)))), f)
	}
	return human.Money(f)
}

// countTick formats a count at an axis: 950, 1.5k, 20M.
func countTick(f float64) string {
	switch {
	case f >= 1e9:
		return formatSVG(f/1e9) + "G"
	case f >= 1e6:
		return formatSVG(f/1e6) + "M"
	case f >= 1e4:
		return formatSVG(f/1e3) + "k"
	}
	return strconv.FormatFloat(f, 'f', -1, 64)
}

// modelCall is a model call in the activity log.
type modelCall struct {
	ID, TraceID, Purpose, Surface, Model, Status string
	Tokens                                       int64
	CostUSD                                      float64
	DurationMS                                   *int64
	CreatedAt                                    time.Time
}

// modelCalls lists the newest model calls that match the filters of the sums.
func (room *Room) modelCalls(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(spendFilter)
	list, err := postgres.Rows[modelCall](ctx, room.Read, "list model calls", `
		select x.id::text, x.trace_id, left(x.purpose, 100) as purpose, left(x.surface, 40) as surface,
		       left(x.model, 100) as model, x.status, lanekeeper.agent_tokens(x.token_usage, 'total_tokens') as tokens,
		       x.cost_usd::float8 as cost_usd, x.duration_ms, x.created_at
		  from (select a.id, a.trace_id, coalesce(nullif(a.purpose, ''), a.skill_name) as purpose, a.surface, a.model,
		               a.status, a.kind, a.token_usage, a.cost_usd, a.duration_ms, a.created_at, a.led_to
		          from agent_activity a
		         where a.skill_name = 'model_call' and a.id >= lanekeeper.agent_uuid7_floor(@since::timestamptz)
		         order by a.id desc limit @searched::int) x
		 where x.kind = 'model' and (@purpose::text = ''
		   or lanekeeper.agent_count_key(x.purpose) = lanekeeper.agent_count_key(@purpose))
		   and (@skill::text = '' or x.led_to ? @skill)
		   and (@surface::text = '' or x.surface = @surface)
		     and (@model::text = '' or lanekeeper.agent_count_key(x.model) = lanekeeper.agent_count_key(@model))
		 order by x.id desc limit @limit::int`, customPlan, postgres.Strict{
		"since": filter.since(), "searched": maxSearchedCalls, "skill": filter.Skill, "purpose": filter.Purpose,
		"surface": filter.Surface, "model": filter.Model,
		"limit": maxModelCalls,
	})
	if err != nil {
		return nil, err
	}
	return map[string]any{"Calls": list, "Want": filter, "Since": filter.since(), "Walked": int64(maxSearchedCalls)}, nil
}
