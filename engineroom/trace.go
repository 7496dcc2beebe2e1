package engineroom

import (
	"context"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/trace"
)

// tracePage shows one trace.
func (room *Room) tracePage() page {
	return page{
		path: "/traces/{id}", name: "trace", open: room.openTrace,
		parts: []part{
			{name: "view", interval: time.Second, refreshOnActivity: true, load: room.traceView},
			{name: "panel", load: room.tracePanel}, // the page's script reloads the panel when its span changes
		},
	}
}

// traceRuns bounds the executions of a trace that the page draws. It draws the oldest.
const traceRuns = 200

var traceViews = []string{"waterfall", "table"}

// traceSubject holds the parsed URL of a trace's page, and caches its loaded parts. All viewers of one URL share it.
type traceSubject struct {
	ID     string // canonical
	Flow   string // of its first execution
	View   string
	Span   string // the span that the panel shows; empty for the trace as a whole
	Tab    string // of the panel
	After  string // start of the table's page
	Filter lineFilter

	mu    sync.Mutex
	cache map[string]cachedPart // the last loaded data, by part
}

// openTrace finds a trace by any form of its id.
func (room *Room) openTrace(ctx context.Context, req *pageRequest) (string, error) {
	if found, ok := req.Subject.(*traceSubject); ok {
		return found.title(), nil // already parsed for this URL; keeps the cache
	}
	q, err := filtersOf(req.Query, "view", "span", "tab", "after", "q", "kind", "errors")
	if err != nil {
		return "", err
	}
	t := &traceSubject{
		View: q["view"], Span: q["span"], Tab: q["tab"], cache: map[string]cachedPart{},
		Filter: lineFilter{Text: strings.TrimSpace(q["q"]), Kind: q["kind"], Errors: q["errors"] != ""},
	}
	if err := checkOneOf("view", t.View, traceViews); err != nil {
		return "", err
	}
	if t.View == "" {
		t.View = traceViews[0]
	}
	if t.Span != "" && !spanIDPattern.MatchString(t.Span) {
		return "", problem.BadParameter("span is %.60q, which is no span of a trace; take it from the waterfall", t.Span)
	}
	if err := checkOneOf("tab", t.Tab, panelTabs); err != nil {
		return "", err
	}
	if err := checkOneOf("kind", t.Filter.Kind, traceKinds); err != nil {
		return "", err
	}
	if t.After, err = req.uuidFilter("after"); err != nil {
		return "", err
	}
	if t.ID, t.Flow, err = room.findTrace(ctx, req.path("id")); err != nil {
		return "", err
	}
	req.Subject = t
	return t.title(), nil
}

// spanIDPattern matches the ids of spans: activities, executions and waits.
var spanIDPattern = regexp.MustCompile(`^(wait-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(-[0-9a-f]{1,16})?$`)

// head returns the head of the cached view; nil if no view is cached.
func (t *traceSubject) head() *traceHead {
	t.mu.Lock()
	defer t.mu.Unlock()
	if view, ok := t.cache["view"].data.(*spansView); ok {
		return view.traceHead
	}
	return nil
}

// title names the trace by its flow and the end of its id.
func (t *traceSubject) title() string {
	if t.Flow == "" {
		return "Trace " + t.ID
	}
	return t.Flow + " " + tail(t.ID)
}

// findTrace returns the canonical form of a trace's id, and the flow of its first execution; empty for none.
func (room *Room) findTrace(ctx context.Context, form string) (id, flow string, err error) {
	ids, err := trace.ParseAny(form)
	if err != nil {
		return "", "", problem.New(http.StatusNotFound, "no trace has the id %.60q", form)
	}
	forms := make([]string, len(ids))
	for i, id := range ids {
		forms[i] = string(id)
	}
	found, err := postgres.Rows[struct{ ID, Flow string }](ctx, room.Read, "find trace", `
		select i.id, coalesce((select left(e.flow, 80) from agent_executions e where e.trace_id = i.id order by e.id limit 1),
		         '') as flow
		  from unnest(@ids::text[]) i (id)
		 where exists (select from agent_executions e where e.trace_id = i.id)
		    or exists (select from agent_activity a where a.trace_id = i.id) limit 1`, postgres.Strict{"ids": forms})
	if err != nil {
		return "", "", err
	}
	if len(found) == 0 {
		return "", "", problem.New(http.StatusNotFound, "no trace has the id %.60q; retention may have removed it", form)
	}
	return found[0].ID, found[0].Flow, nil
}

// traceState is compared to find out whether an ended trace has changed. It covers the oldest executions, which the
// page draws, and the newest.
type traceState struct {
	Ended        bool
	Executions   int64
	UpdatedAt    *time.Time // the latest change of an execution
	LastActivity *time.Time // the beginning of the latest activity
	Pending      int64      // requested approvals, counted up to 100
}

// cachedPart is the last loaded data of a part, and the state of the trace before the load.
type cachedPart struct {
	state traceState // Ended is false if the data shows running work
	data  any
}

// loadUnlessEnded returns a part's cached data if the trace has ended and not changed since. Otherwise it loads the
// part. A refresh of an ended trace's page thus costs only the query of the state. load also reports whether the part
// still shows running work.
func (room *Room) loadUnlessEnded(
	ctx context.Context, t *traceSubject, part string, load func(now traceState) (any, bool, error),
) (any, error) {
	now, err := postgres.Row[traceState](ctx, room.Read, "read trace", `
		select r.executions, r.updated_at, r.ended and not exists (
		         select from agent_activity_open o where o.execution_id = any (r.ids)) as ended,
		       (select a.created_at from agent_activity a where a.trace_id = @id order by a.created_at desc
		         limit 1) as last_activity,
		       (select count(*) from (select from agent_approvals p
		          where p.trace_id = @id and p.status = 'pending' limit 100) t) as pending
		  from (select count(*) as executions, max(e.updated_at) as updated_at, array_agg(e.id) as ids,
		               count(*) > 0 and bool_and(e.completed_at is not null) as ended
		          from ((select x.id, x.updated_at, x.completed_at from agent_executions x
		                  where x.trace_id = @id order by x.id limit @limit)
		                union
		                (select x.id, x.updated_at, x.completed_at from agent_executions x
		                  where x.trace_id = @id order by x.id desc limit @limit)) e) r`,
		postgres.Strict{"id": t.ID, "limit": traceRuns})
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	previous, ok := t.cache[part]
	t.mu.Unlock()
	if ok && now.Ended && previous.state.equal(now) {
		return previous.data, nil
	}
	data, running, err := load(now)
	if err != nil {
		return nil, err
	}
	now.Ended = now.Ended && !running
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cache[part] = cachedPart{now, data}
	return data, nil
}

// equal reports whether two states are equal.
func (s traceState) equal(other traceState) bool {
	return s.Ended == other.Ended && s.Executions == other.Executions && s.Pending == other.Pending &&
		equalTimes(s.UpdatedAt, other.UpdatedAt) && equalTimes(s.LastActivity, other.LastActivity)
}

func equalTimes(a, b *time.Time) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Equal(*b)
}
