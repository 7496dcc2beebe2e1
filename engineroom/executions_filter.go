package engineroom

import (
	"context"
	"net/url"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/trace"
)

// executionFilter holds the filters of the listing. They combine.
type executionFilter struct {
	View                  string // waiting or stuck: by deadline; empty: newest first
	Status, Surface, Flow string
	Agent                 string
	Label                 string // name=value, or a value
	Trace                 string // as entered
	Failed                bool   // failed or timed out
	Kind                  string // of the wait, in the views
	Before                string // the last id of the previous page
	timeRange
	after       *time.Time
	traces, ids []string // ids that Trace stands for; nil without it
	flows       []string // flows that Flow stands for
}

func waitKinds() []string {
	return []string{"response", "agent", "document", "signature", "test", "event", "delay", "approval", "lane"}
}

// Statuses are the options of Status.
func (executionFilter) Statuses() []string { return executions.Statuses() }

// Surfaces are the options of Surface.
func (executionFilter) Surfaces() []string { return trace.Surfaces() }

// Kinds are the options of Kind.
func (executionFilter) Kinds() []string { return waitKinds() }

// openExecutions reads the filters.
func (room *Room) openExecutions(ctx context.Context, req *pageRequest) (string, error) {
	q, err := filtersOf(req.Query, append([]string{
		"view", "status", "surface", "flow", "agent", "label", "trace_id", "failed", "for", "before",
	}, rangeFilters...)...)
	if err != nil {
		return "", err
	}
	f := executionFilter{
		View: q["view"], Status: q["status"], Surface: q["surface"], Flow: q["flow"], Agent: q["agent"],
		Label: q["label"], Trace: q["trace_id"], Kind: q["for"],
	}
	for _, one := range []struct {
		name  string
		known []string
	}{
		{"view", []string{"waiting", "stuck"}},
		{"status", executions.Statuses()},
		{"surface", trace.Surfaces()},
		{"for", waitKinds()},
		{"failed", []string{"1"}},
	} {
		value := q[one.name]
		if one.name == "status" || one.name == "surface" {
			value, _ = parseExclusion(value)
		}
		if err := checkOneOf(one.name, value, one.known); err != nil {
			return "", err
		}
	}
	if f.timeRange, err = req.timeRange(); err != nil {
		return "", err
	}
	f.Failed = q["failed"] != ""
	switch {
	case f.View != "" && (f.Status != "" || f.Failed):
		return "", problem.BadParameter("view=%s lists waiting executions: leave out status and failed", f.View)
	case f.View != "" && f.Sort != "":
		return "", problem.BadParameter("view=%s is by deadline: leave out sort", f.View)
	case f.View == "" && f.Kind != "":
		return "", problem.BadParameter("for filters waiting executions: use it with view=waiting or view=stuck")
	}
	if f.traces, f.ids, err = room.runsFor(ctx, f.Trace); err != nil {
		return "", err
	}
	flow, _ := parseExclusion(f.Flow)
	if f.flows, err = room.namesLike(ctx, req, "flow", flow); err != nil {
		return "", err
	}
	if err := f.parseCursor(q["before"]); err != nil {
		return "", err
	}
	req.Subject = f
	return titleOf(f), nil
}

// titleOf returns the title of the listing.
func titleOf(f executionFilter) string {
	switch {
	case f.View == "waiting":
		return "Waiting executions, by deadline"
	case f.View == "stuck":
		return "Stuck executions"
	case f.Failed:
		return "Failed executions"
	case f.Status != "":
		return "Executions: " + f.Status
	}
	return "Executions"
}

// parseCursor reads the position of a page.
func (f *executionFilter) parseCursor(before string) error {
	if before == "" {
		return nil
	}
	id := before
	if f.View != "" {
		cursor, err := parseTimeCursor(before)
		if err != nil {
			return err
		}
		f.after, id = &cursor.At, cursor.Key
	}
	if !uuidPattern.MatchString(id) {
		return invalidCursor()
	}
	f.Before = id
	return nil
}

// searchedPerFlow divides the bound of searched rows among the flows.
func (f executionFilter) searchedPerFlow(searched int) int { return searched / max(len(f.flows), 1) }

// args returns the arguments of executionCandidates and executionConditions. searched bounds the searched rows, and
// limit the returned rows.
func (f executionFilter) args(searched, limit int) postgres.Strict {
	from, until := f.bounds(f.Before)
	status, notStatus := parseExclusion(f.Status)
	surface, notSurface := parseExclusion(f.Surface)
	_, notFlow := parseExclusion(f.Flow)
	agent, notAgent := parseExclusion(f.Agent)
	name, label := executions.ParseLabel(f.Label)
	return postgres.Strict{
		"by": f.leadingFilter(), "traces": f.traces, "ids": f.ids, "from": from, "until": until, "searched": searched,
		"searched_flow": f.searchedPerFlow(searched), "status": status, "not_status": notStatus, "failed": f.Failed,
		"surface": surface, "not_surface": notSurface, "flows": f.flows, "not_flow": notFlow,
		"agent": containsPattern(agent), "not_agent": notAgent, "label": label, "label_name": name, "limit": limit,
	}
}

// leadingFilter returns the filter whose index yields the rows.
func (f executionFilter) leadingFilter() string {
	switch {
	case f.traces != nil:
		return "trace"
	case f.Label != "":
		return "label"
	case f.Status != "" && !strings.HasPrefix(f.Status, "!") && (f.Flow == "" || f.Status != string(executions.Completed)):
		return "status" // rare, except for completed
	case f.Failed:
		return "failed"
	case f.Flow != "" && !strings.HasPrefix(f.Flow, "!"):
		return "flow"
	}
	return "newest"
}

// searchesAll reports whether the listing searches all rows.
func (f executionFilter) searchesAll() bool {
	leading := f.leadingFilter()
	hasOther := (f.Label != "" && leading != "label") || f.Surface != "" || f.Agent != "" ||
		(f.Flow != "" && leading != "flow") || (f.Status != "" && leading != "status") ||
		(f.Failed && leading != "failed")
	return leading == "trace" || !hasOther
}

// Narrowed reports whether a filter beyond the view or tab is set.
func (f executionFilter) Narrowed() bool {
	return f.Surface != "" || f.Flow != "" || f.Agent != "" || f.Label != "" || f.Trace != "" || f.Bounded()
}

// urlValues returns the filters as URL parameters, without the position.
func (f executionFilter) urlValues() url.Values {
	q := url.Values{}
	for name, value := range map[string]string{
		"view": f.View, "status": f.Status, "surface": f.Surface, "flow": f.Flow, "agent": f.Agent, "label": f.Label,
		"trace_id": f.Trace,
		"for":      f.Kind,
	} {
		if value != "" {
			q.Set(name, value)
		}
	}
	if f.Failed {
		q.Set("failed", "1")
	}
	f.addTo(q)
	return q
}

// url returns the listing's URL.
func (f executionFilter) url() string { return "/executions?" + f.urlValues().Encode() }

// tabURL returns the listing's URL for a tab.
func (f executionFilter) tabURL(name, value string) string {
	f.View, f.Status, f.Failed, f.Kind = "", "", false, ""
	if name == "view" {
		f.Sort = ""
	}
	q := f.urlValues()
	if name != "" {
		q.Set(name, value)
	}
	if len(q) == 0 {
		return "/executions"
	}
	return "/executions?" + q.Encode()
}
