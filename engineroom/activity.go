package engineroom

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/trace"
)

// activityFilter holds the filters of the log.
type activityFilter struct {
	activity.Filter
	Surfaces, States []string // options
	Entered          activityEntered
	Row              string // the expanded row
}

// Narrowed reports whether any filter is set.
func (a activityFilter) Narrowed() bool {
	f := a.Filter
	return f.Surface != "" || f.Status != "" || f.Skill != "" || f.Lane != "" || f.TraceID != "" || f.Agent != "" ||
		f.TraceIDs != nil || f.SkillLike+f.LaneLike+f.AgentLike != "" || !f.Since.IsZero() || !f.Until.IsZero()
}

// openActivity reads the filters from the URL.
func openActivity(_ context.Context, req *pageRequest) (string, error) {
	filter := activityFilter{Surfaces: trace.Surfaces(), States: activity.Statuses()}
	var err error
	if filter.Surface, err = req.oneOf("surface", append([]string{""}, trace.Surfaces()...)...); err != nil {
		return "", err
	}
	status, err := req.oneOf("status", append([]string{""}, activity.Statuses()...)...)
	if err != nil {
		return "", err
	}
	filter.Status = activity.Status(status)
	for name, target := range map[string]*string{
		"skill": &filter.Skill, "lane": &filter.Lane, "trace": &filter.TraceID, "agent": &filter.Agent,
		"cursor": &filter.Cursor,
	} {
		if *target, err = req.textFilter(name); err != nil {
			return "", err
		}
	}
	if activity.CheckCursor(filter.Cursor) != nil {
		return "", invalidCursor()
	}
	if filter.TraceID != "" {
		if _, err := trace.ParseAny(filter.TraceID); err != nil {
			return "", problem.BadParameter("trace %s", err)
		}
	}
	if filter.Since, err = req.timeFilter("since"); err != nil {
		return "", err
	}
	if filter.Until, err = req.timeFilter("until"); err != nil {
		return "", err
	}
	if filter.Row, err = req.uuidFilter("row"); err != nil {
		return "", err
	}
	req.Subject = filter
	return "", nil
}

// openLog is openActivity for the pages of the log, whose filters match parts of names and of ids.
func (room *Room) openLog(ctx context.Context, req *pageRequest) (string, error) {
	id := strings.TrimSpace(req.Query.Get("trace"))
	rest := *req
	rest.Query = maps.Clone(req.Query)
	if _, err := trace.ParseAny(id); id != "" && err != nil {
		rest.Query.Del("trace")
	}
	if _, err := openActivity(ctx, &rest); err != nil {
		return "", err
	}
	filter, _ := rest.Subject.(activityFilter)
	filter.Entered = activityEntered{Skill: filter.Skill, Lane: filter.Lane, Agent: filter.Agent, ID: id}
	var err error
	if !rest.Query.Has("trace") && id != "" {
		if filter.TraceIDs, err = room.tracesFor(ctx, id); err != nil {
			return "", err
		}
	}
	req.Subject = filter
	if filter.Skill == "" && filter.Lane == "" && filter.Agent == "" {
		return "", nil
	}
	// A complete name matches only itself. Any other text matches the names that contain the text.
	var skill, lane, agent bool
	err = room.Read.QueryRow(ctx, `
		select coalesce((select a.skill_name = @skill from agent_activity a where a.skill_name >= @skill
		  order by a.skill_name limit 1), false),
		       exists (select from agent_locks l where l.lane = @lane),
		       exists (select from agent_agents n where n.name = @agent)`, customPlan,
		postgres.Strict{"skill": filter.Skill, "lane": filter.Lane, "agent": filter.Agent}).Scan(&skill, &lane, &agent)
	if err != nil {
		return "", fmt.Errorf("read names: %w", err)
	}
	for _, f := range []struct {
		whole      bool
		name, like *string
	}{
		{skill, &filter.Skill, &filter.SkillLike},
		{lane, &filter.Lane, &filter.LaneLike},
		{agent, &filter.Agent, &filter.AgentLike},
	} {
		if !f.whole {
			*f.name, *f.like = "", containsPattern(*f.name)
		}
	}
	req.Subject = filter
	return "", nil
}

// activityEntered holds filters in the form that a person entered.
type activityEntered struct{ Skill, Lane, Agent, ID string }

// feedPage is a page of rows.
type feedPage struct {
	Asked   activityFilter
	Lines   []activity.Line
	Partial bool
	Older   string // URL of the next page
	Newest  string // URL of the first page; empty on the first page
	Open    *rowDetails
	visit   *pageRequest
}

// rowDetails holds the details of the expanded row.
type rowDetails struct {
	activity.Details
	In, Out shownValue
}

// Fold returns the URL that expands a row, or collapses the expanded row.
func (s feedPage) Fold(id string) string {
	if s.Asked.Row == id {
		id = ""
	}
	return s.visit.withParam("row", id)
}

// recentActivity reads the newest rows of the log that match the filters.
func (room *Room) recentActivity(ctx context.Context, req *pageRequest) (any, error) {
	filter := req.Subject.(activityFilter)
	filter.Limit, filter.Cursor, filter.Row = maxFeedRows, "", ""
	result, err := room.lines(ctx, filter.Filter)
	if err != nil {
		return nil, err
	}
	all := pageRequest{URL: "/activity", Query: req.Query}
	return feedPage{
		Asked: filter, Lines: result.Lines, Partial: result.Partial,
		Older: all.withParam("cursor", result.Next),
		visit: req,
	}, nil
}

// activityPage shows the log with filters and pages.
func (room *Room) activityPage() page {
	return page{
		path: "/activity", name: "activity", navLabel: "Activity", title: "Activity", open: room.openLog,
		parts: []part{
			room.filtersPart("/activity", "skill", "agent", "lane"),
			{name: "rows", interval: 2 * time.Second, load: room.activityRows},
		},
	}
}

// activityRows reads a page of the log, and the details of the expanded row.
func (room *Room) activityRows(ctx context.Context, req *pageRequest) (any, error) {
	filter := req.Subject.(activityFilter)
	filter.Limit = 50
	result, err := room.lines(ctx, filter.Filter)
	if err != nil {
		return nil, err
	}
	data := feedPage{Asked: filter, Lines: result.Lines, Partial: result.Partial, visit: req}
	if result.Next != "" {
		data.Older = req.withoutRow().withParam("cursor", result.Next)
	}
	if filter.Cursor != "" {
		data.Newest = req.withoutRow().withParam("cursor", "")
	}
	if filter.Row == "" {
		return data, nil
	}
	row, err := activity.ReadDetails(ctx, room.Read, filter.Row)
	switch {
	case errors.Is(err, activity.ErrNoRow):
		return data, nil
	case err != nil:
		return nil, err
	}
	data.Open = &rowDetails{
		Details: row, In: shownJSON(row.Input, row.InputSize),
		Out: shownJSON(row.Output, row.OutputSize),
	}
	return data, nil
}

// auditPage shows the audit log.
func (room *Room) auditPage() page {
	return page{
		path: "/audit", name: "audit", navLabel: "Audit", title: "Audit", open: room.openLog,
		parts: []part{
			room.filtersPart("/audit", "skill", "agent", "lane"),
			{name: "rows", interval: 5 * time.Second, refreshOnActivity: true, load: room.auditRows},
		},
	}
}

// auditList is a page of the audit log.
type auditList struct {
	activity.AuditPage
	Asked         activityFilter
	Older, Newest string // URLs of the next and the first page; empty for none
}

func (room *Room) auditRows(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(activityFilter)
	filter.Limit = 50
	result, err := activity.Audit(ctx, room.Read, filter.Filter)
	if err != nil {
		return nil, err
	}
	data := auditList{AuditPage: result, Asked: filter}
	if result.Next != "" {
		data.Older = req.withParam("cursor", result.Next)
	}
	if filter.Cursor != "" {
		data.Newest = req.withParam("cursor", "")
	}
	return data, nil
}
