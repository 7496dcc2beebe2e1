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
)

const (
	// maxSpenders bounds the lines; one more line sums the rest.
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
			{name: "budget", every: 5 * time.Second, refreshOnActivity: true, load: room.budgetLines},
			{name: "sums", every: 10 * time.Second, refreshOnActivity: true, load: room.spendSums},
			{name: "calls", every: 5 * time.Second, refreshOnActivity: true, load: room.modelCalls},
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
		return "", problem.BadParameter("per is hour; that is shown for 1 or 7 days, not for %s", days)
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
			return "", problem.BadParameter("%s", activity.ErrSkillOrPurpose)
		}
		want.By = string(activity.ByPurpose)
	}
	byCaller := want.By == string(activity.ByAgent) || want.By == string(activity.ByKey)
	if byCaller && (want.Skill != "" || want.Purpose != "") {
		return "", problem.BadParameter("by is %s; skills and purposes are not counted by %s", want.By, want.By)
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
	Errored, Cached string // shares of the calls and of the prompt tokens; empty without counts
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

// withShares adds the shares of failed calls and of cached tokens. The counts have neither by skill.
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

// describeModels adds the durations of calls since a day, and the source of the price, to each model.
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

// moneyTick formats dollars at an axis. Parts of a cent have four decimals or more, so no two ticks read alike.
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
		select x.id::text, x.trace_id, left(x.purpose, 100) as purpose, left(x.surface, 40) as surface,
		       left(x.model, 100) as model, x.status, lanekeeper.agent_tokens(x.token_usage, 'total_tokens') as tokens,
		       x.cost_usd::float8 as cost_usd, x.duration_ms, x.created_at
		  from (select a.id, a.trace_id, coalesce(nullif(a.purpose, ''), a.skill_name) as purpose, a.surface, a.model,
		               a.status, a.kind, a.token_usage, a.cost_usd, a.duration_ms, a.created_at, a.led_to
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
