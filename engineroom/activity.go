package engineroom

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/trace"
)

// mostAsked bounds a filter's value, in bytes.
const mostAsked = 300

// activityStates are the states of a row of the log.
var activityStates = []string{
	string(activity.Running), string(activity.Success), string(activity.Error), string(activity.PendingApproval),
	string(activity.Skipped), string(activity.Unknown),
}

// activitySurfaces are where work begins.
var activitySurfaces = []string{
	string(trace.Heartbeat), string(trace.Operate), string(trace.Chat), string(trace.Webhook), string(trace.Flow),
}

// activityAsked is which rows of the log somebody wants to see.
type activityAsked struct {
	activity.Filter
	Surfaces, States []string // that may be chosen from
	Row              string   // the row that is unfolded
}

// Narrowed reports whether any filter is set.
func (a activityAsked) Narrowed() bool {
	f := a.Filter
	return f.Surface != "" || f.Status != "" || f.Skill != "" || f.Lane != "" || f.TraceID != "" || f.Agent != "" ||
		!f.Since.IsZero() || !f.Until.IsZero()
}

// askActivity reads the filters of the address.
func askActivity(_ context.Context, v *visit) (string, error) {
	asked := activityAsked{Surfaces: activitySurfaces, States: activityStates}
	var err error
	if asked.Surface, err = v.oneOf("surface", append([]string{""}, activitySurfaces...)...); err != nil {
		return "", err
	}
	status, err := v.oneOf("status", append([]string{""}, activityStates...)...)
	if err != nil {
		return "", err
	}
	asked.Status = activity.Status(status)
	for name, into := range map[string]*string{
		"skill": &asked.Skill, "lane": &asked.Lane, "trace": &asked.TraceID, "agent": &asked.Agent, "cursor": &asked.Cursor,
	} {
		if *into, err = v.words(name); err != nil {
			return "", err
		}
	}
	if activity.CheckCursor(asked.Cursor) != nil {
		return "", badCursor()
	}
	if asked.TraceID != "" {
		if _, err := trace.ParseAny(asked.TraceID); err != nil {
			return "", badFilter("trace %s", err)
		}
	}
	if asked.Since, err = v.moment("since"); err != nil {
		return "", err
	}
	if asked.Until, err = v.moment("until"); err != nil {
		return "", err
	}
	if asked.Row, err = v.uuidFilter("row"); err != nil {
		return "", err
	}
	v.About = asked
	return "", nil
}

// words is a filter that may be any text.
func (v *visit) words(name string) (string, error) {
	value := strings.TrimSpace(v.Query.Get(name))
	if len(value) > mostAsked || !utf8.ValidString(value) || strings.ContainsRune(value, 0) {
		return "", badFilter("%s is not text of at most %d bytes", name, mostAsked)
	}
	return value, nil
}

// moment is a filter that is a time: with a zone, or as browsers send it, which is taken for UTC.
func (v *visit) moment(name string) (time.Time, error) {
	value := v.Query.Get(name)
	if value == "" {
		return time.Time{}, nil
	}
	for _, form := range []string{time.RFC3339, "2006-01-02T15:04:05", "2006-01-02T15:04", time.DateOnly} {
		if t, err := time.Parse(form, value); err == nil {
			return t, nil
		}
	}
	return time.Time{}, badFilter("%s is %.60q; it looks like 2026-01-31T15:04, in UTC", name, value)
}

// shownFeed is the newest rows, or a page of them.
type shownFeed struct {
	Asked   activityAsked
	Lines   []activity.Line
	Partial bool
	Older   string // where the next page is
	Newest  string // where the first one is; empty when this is it
	Open    *unfolded
	visit   *visit
}

// unfolded is what the row that is unfolded leaves out when it is folded.
type unfolded struct {
	activity.Details
	In, Out shownValue
}

// Fold is the address with a row unfolded, or with none when it is that row already.
func (s shownFeed) Fold(id string) string {
	if s.Asked.Row == id {
		id = ""
	}
	return s.visit.at("row", id)
}

// feed reads the newest rows of the log that pass the filters.
func (room *Room) feed(ctx context.Context, v *visit) (any, error) {
	asked := v.About.(activityAsked)
	asked.Limit, asked.Cursor, asked.Row = 50, "", ""
	got, err := activity.Lines(ctx, room.Read, asked.Filter)
	if err != nil {
		return nil, err
	}
	all := visit{URL: "/activity", Query: v.Query}
	return shownFeed{Asked: asked, Lines: got.Lines, Partial: got.Partial, Older: all.at("cursor", got.Next), visit: v}, nil
}

// activityPage is the log itself: every filter, every page, and any row unfolded.
func (room *Room) activityPage() page {
	return page{
		path: "/activity", name: "activity", nav: "Activity", title: "Activity", open: askActivity,
		parts: []part{{name: "rows", every: 2 * time.Second, load: room.activityRows}},
	}
}

// activityRows reads a page of the log, and of one row what a list leaves out.
func (room *Room) activityRows(ctx context.Context, v *visit) (any, error) {
	asked := v.About.(activityAsked)
	asked.Limit = 50
	got, err := activity.Lines(ctx, room.Read, asked.Filter)
	if err != nil {
		return nil, err
	}
	shown := shownFeed{Asked: asked, Lines: got.Lines, Partial: got.Partial, visit: v}
	if got.Next != "" {
		shown.Older = v.folded().at("cursor", got.Next)
	}
	if asked.Cursor != "" {
		shown.Newest = v.folded().at("cursor", "")
	}
	if asked.Row == "" {
		return shown, nil
	}
	row, err := activity.ReadDetails(ctx, room.Read, asked.Row)
	switch {
	case errors.Is(err, activity.ErrNoRow):
		return shown, nil
	case err != nil:
		return nil, err
	}
	shown.Open = &unfolded{Details: row, In: shownJSON(row.Input, row.InputSize), Out: shownJSON(row.Output, row.OutputSize)}
	return shown, nil
}

// folded is the address without the row that is unfolded.
func (v *visit) folded() *visit {
	query := maps.Clone(v.Query)
	query.Del("row")
	return &visit{URL: v.URL, Query: query}
}

// auditPage shows who did what, to which object, when, why, on whose behalf, with what result.
func (room *Room) auditPage() page {
	return page{
		path: "/audit", name: "audit", nav: "Audit", title: "Audit", open: askActivity,
		parts: []part{{name: "rows", every: 5 * time.Second, calm: true, load: room.auditRows}},
	}
}

// shownAudit is a page of the audit.
type shownAudit struct {
	activity.AuditPage
	Asked         activityAsked
	Older, Newest string // where the next page and the first one are; empty when there is none
}

func (room *Room) auditRows(ctx context.Context, v *visit) (any, error) {
	asked, _ := v.About.(activityAsked)
	asked.Limit = 50
	got, err := activity.Audit(ctx, room.Read, asked.Filter)
	if err != nil {
		return nil, err
	}
	shown := shownAudit{AuditPage: got, Asked: asked}
	if got.Next != "" {
		shown.Older = v.at("cursor", got.Next)
	}
	if asked.Cursor != "" {
		shown.Newest = v.at("cursor", "")
	}
	return shown, nil
}

// mostTroubled is how many skills the overview shows.
const mostTroubled = 10

// fared is how a skill fares, in words.
type fared struct{ activity.Health }

// Rate is the success rate.
func (f fared) Rate() string {
	if f.SuccessRate == nil {
		return "–"
	}
	return percentage(*f.SuccessRate)
}

// P50 is what half of the calls took at most.
func (f fared) P50() string { return milliseconds(f.P50MS) }

// P95 is what all but a twentieth of the calls took at most.
func (f fared) P95() string { return milliseconds(f.P95MS) }

// milliseconds writes a percentile. It is right to a few per cent, so it has two digits.
func milliseconds(ms *float64) string {
	if ms == nil {
		return "–"
	}
	if *ms < 10 {
		return millis(int64(*ms + .5))
	}
	unit := math.Pow(10, math.Floor(math.Log10(*ms))-1)
	return millis(int64(math.Round(*ms/unit) * unit))
}

// Since is from when health is counted.
func (f fared) Since() string {
	return time.Now().UTC().Truncate(time.Hour).AddDate(0, 0, -7).Format("2006-01-02T15:04")
}

// healthPart is the panel of the overview.
func (room *Room) healthPart() part {
	return part{name: "health", every: 10 * time.Second, calm: true, load: room.healthPanel}
}

// healthPanel has the skills that need a look first: out of service, then failing, then the busiest.
func (room *Room) healthPanel(ctx context.Context, _ *visit) (any, error) {
	sums, err := activity.CountedHealth(ctx, room.Read, activity.HealthFilter{})
	if err != nil {
		return nil, err
	}
	counts := map[string]int{}
	list := make([]fared, 0, len(sums.Lines))
	for _, h := range sums.Lines {
		counts[h.State]++
		list = append(list, fared{h})
	}
	trouble := func(f fared) int {
		return map[bool]int{true: 0, false: 1}[f.State == "enabled"]
	}
	slices.SortStableFunc(list, func(a, b fared) int {
		return -cmp.Or(cmp.Compare(trouble(b), trouble(a)), cmp.Compare(a.Streak, b.Streak), cmp.Compare(a.Failed, b.Failed),
			cmp.Compare(a.Calls, b.Calls), -cmp.Compare(a.Skill, b.Skill))
	})
	return map[string]any{
		"Skills": list[:min(len(list), mostTroubled)], "All": len(list), "Until": sums.Until, "Counts": counts,
	}, nil
}
