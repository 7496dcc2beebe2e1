package engineroom

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	// executionsShown is how many executions are on a page of the listing.
	executionsShown = 50
	// lookedAt is how many rows that one filter finds are looked at for the others, per page: a rare combination of
	// filters takes several pages, never a walk through the whole table.
	lookedAt = 20_000
	// countedMost is up to where executions are counted.
	countedMost = 1000
)

// executionsPage lists durable runs, and what stands in the queue.
func (room *Room) executionsPage() page {
	return page{
		path: "/executions", name: "executions", nav: "Executions", title: "Executions", open: openExecutions,
		parts: []part{
			{name: "states", every: 2 * time.Second, load: room.executionStates},
			{name: "list", every: 2 * time.Second, load: room.listExecutions},
			{name: "queue", every: 2 * time.Second, load: room.executionQueue},
		},
	}
}

// executionRow is an execution in a listing.
type executionRow struct {
	ID, TraceID, Surface, Flow, Status string
	Agent                              string
	ParentID, ThreadID, ForkedFrom     *string
	Children                           bool // it has started others
	Priority, Attempt, MaxAttempts     int
	WaitingFor, WaitingKey             string
	WaitingUntil                       *time.Time
	About                              string
	AboutBytes                         int64
	CreatedAt, UpdatedAt               time.Time
	CompletedAt                        *time.Time
}

// executionRowColumns are those of executionRow, of agent_executions e. What can be long is cut here. Whether there
// are children is asked for in the order of the index, so that no guess of the planner makes it a walk through the
// table.
const executionRowColumns = ` e.id::text, e.trace_id, e.surface, e.flow, e.status, left(e.agent, 200) as agent, e.parent_id::text, e.thread_id, e.forked_from::text,
	coalesce((select c.parent_id = e.id from agent_executions c where c.parent_id >= e.id order by c.parent_id limit 1), false) as children, e.priority, e.attempt, e.max_attempts,
	coalesce(e.waiting_for, '') as waiting_for, left(coalesce(e.waiting_key, ''), 600) as waiting_key, e.waiting_until,
	left(coalesce(e.error_message, e.result_summary), 600) as about, octet_length(coalesce(e.error_message, e.result_summary)) as about_bytes,
	e.created_at, e.updated_at, e.completed_at `

// Took is how long it took from its beginning to its end, in milliseconds.
func (x executionRow) Took() int64 {
	if x.CompletedAt == nil {
		return 0
	}
	return x.CompletedAt.Sub(x.CreatedAt).Milliseconds()
}

// TraceEnd is the end of the trace's id, enough to tell it from its neighbours.
func (x executionRow) TraceEnd() string { return "…" + x.TraceID[max(len(x.TraceID)-6, 0):] }

// collectExecutions reads rows of a listing, without secrets.
func collectExecutions(rows pgx.Rows, err error) ([]executionRow, error) {
	if err != nil {
		return nil, fmt.Errorf("list executions: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[executionRow])
	if err != nil {
		return nil, fmt.Errorf("list executions: %w", err)
	}
	for i := range list {
		list[i].About = clip(redact.Text(list[i].About, maxValue), list[i].AboutBytes, 160)
		list[i].WaitingKey = cut(120, redact.Text(list[i].WaitingKey, maxValue))
	}
	return list, nil
}

// executionList is a page of the listing.
type executionList struct {
	executionFilter
	Rows []executionRow
	// Older leads to the next page; Farther says that it is not known whether anything is there, because this page has
	// looked at as many rows as a page may.
	Older   string
	Farther bool
	Window  int64
}

// listExecutions reads a page of the listing.
func (room *Room) listExecutions(ctx context.Context, v *visit) (any, error) {
	f := v.About.(executionFilter)
	if f.View != "" {
		return room.listWaiting(ctx, f)
	}
	rows, err := room.Read.Query(ctx, `
		select `+executionRowColumns+` from (select w.id from (
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'trace' and x.trace_id = any (@traces) and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'status' and x.status = @status and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'failed' and x.status = 'failed' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'failed' and x.status = 'timeout' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'flow' and x.flow = @flow and x.claimed_by is null and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'flow' and x.flow = @flow and x.claimed_by is not null and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)
		  union all
		  (select x.id, x.status, x.surface, x.flow, x.agent from agent_executions x
		    where @by = 'newest' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc limit @looked)) w
		  where (@status = '' or w.status = @status) and (not @failed or w.status in ('failed', 'timeout'))
		    and (@surface = '' or w.surface = @surface) and (@flow = '' or w.flow = @flow) and (@agent = '' or w.agent = @agent)
		  order by w.id desc limit @most + 1) p
		  join agent_executions e on e.id = p.id
		 order by e.id desc`, freshPlan,
		postgres.Strict{
			"by": f.by(), "traces": f.traces, "before": f.Before, "looked": lookedAt, "status": f.Status, "failed": f.Failed,
			"surface": f.Surface, "flow": f.Flow, "agent": f.Agent, "most": executionsShown,
		})
	got := executionList{executionFilter: f, Window: lookedAt}
	if got.Rows, err = collectExecutions(rows, err); err != nil {
		return nil, err
	}
	if len(got.Rows) > executionsShown {
		got.Rows = got.Rows[:executionsShown]
		got.Older = f.with("before", got.Rows[executionsShown-1].ID)
		return got, nil
	}
	return room.farther(ctx, f, got)
}

// farther finds where the rows end that a page has looked at, when there are more. What lies beyond is left to the next
// page, also what one of two states has there, so that no row is on both.
func (room *Room) farther(ctx context.Context, f executionFilter, got executionList) (executionList, error) {
	if f.narrow() {
		return got, nil
	}
	var end string
	err := room.Read.QueryRow(ctx, `
		select coalesce((select w.id::text from (
		  (select x.id from agent_executions x
		    where @by = 'status' and x.status = @status and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'failed' and x.status = 'failed' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'failed' and x.status = 'timeout' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'flow' and x.flow = @flow and x.claimed_by is null and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'flow' and x.flow = @flow and x.claimed_by is not null and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)
		  union all
		  (select x.id from agent_executions x
		    where @by = 'newest' and (@before = '' or x.id < nullif(@before, '')::uuid)
		    order by x.id desc offset @looked - 1 limit 1)) w
		 order by w.id desc limit 1), '')`, freshPlan,
		postgres.Strict{"by": f.by(), "status": f.Status, "flow": f.Flow, "before": f.Before, "looked": lookedAt}).Scan(&end)
	if err != nil {
		return got, fmt.Errorf("look how far executions were looked at: %w", err)
	}
	if end == "" {
		return got, nil
	}
	for len(got.Rows) > 0 && got.Rows[len(got.Rows)-1].ID < end {
		got.Rows = got.Rows[:len(got.Rows)-1]
	}
	got.Older, got.Farther = f.with("before", end), true
	return got, nil
}

// listWaiting reads what waits, the nearest deadline first, or what is stuck. Other filters narrow down the lookedAt
// nearest.
func (room *Room) listWaiting(ctx context.Context, f executionFilter) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select `+executionRowColumns+` from (select l.id, l.waiting_until from (
		  (select w.id, w.waiting_until, w.waiting_for, w.surface, w.flow, w.agent, w.trace_id from agent_executions w
		    where w.status = 'waiting' and @view = 'waiting' and (@after::timestamptz is null or (w.waiting_until, w.id) > (@after, nullif(@before, '')::uuid))
		    order by w.waiting_until, w.id limit @looked)
		  union all
		  (select s.id, s.waiting_until, s.waiting_for, s.surface, s.flow, s.agent, s.trace_id from agent_executions_stuck s
		    where @view = 'stuck' and s.waiting_until <= now() and (@after::timestamptz is null or (s.waiting_until, s.id) > (@after, nullif(@before, '')::uuid))
		    order by s.waiting_until, s.id limit @looked)) l
		   where (@kind = '' or l.waiting_for = @kind) and (@surface = '' or l.surface = @surface)
		     and (@flow = '' or l.flow = @flow) and (@agent = '' or l.agent = @agent) and (@traces::text[] is null or l.trace_id = any (@traces))
		   order by l.waiting_until, l.id limit @most + 1) p
		  join agent_executions e on e.id = p.id
		 order by p.waiting_until, p.id`, freshPlan,
		postgres.Strict{
			"view": f.View, "kind": f.Kind, "surface": f.Surface, "flow": f.Flow, "agent": f.Agent, "traces": f.traces, "after": f.after,
			"before": f.Before, "most": executionsShown, "looked": lookedAt,
		})
	got := executionList{executionFilter: f, Window: lookedAt}
	if got.Rows, err = collectExecutions(rows, err); err != nil {
		return nil, err
	}
	if len(got.Rows) > executionsShown {
		got.Rows = got.Rows[:executionsShown]
		last := got.Rows[executionsShown-1]
		if last.WaitingUntil != nil { // it may have gone on meanwhile
			got.Older = f.with("before", last.WaitingUntil.UTC().Format(time.RFC3339Nano)+" "+last.ID)
		}
	}
	return got, nil
}

// maxFilter bounds the text of a filter, in bytes.
const maxFilter = 300

// executionFilter is what the listing of executions is narrowed to. All of it combines.
type executionFilter struct {
	View                  string // waiting or stuck: by deadline; empty: newest first
	Status, Surface, Flow string
	Agent                 string
	Trace                 string // as it was given
	Failed                bool   // failed or timed out
	Kind                  string // of the wait, in the views
	Before                string // the id after which the page begins
	after                 *time.Time
	traces                []string
}

func executionStatuses() []string {
	return []string{
		string(executions.Pending), string(executions.Running), string(executions.Waiting), string(executions.Completed),
		string(executions.Failed), string(executions.Timeout), string(executions.Cancelled),
	}
}

func surfaceNames() []string {
	return []string{string(trace.Heartbeat), string(trace.Operate), string(trace.Chat), string(trace.Webhook), string(trace.Flow)}
}

func waitKinds() []string {
	return []string{"response", "agent", "document", "signature", "test", "event", "delay", "approval", "lane"}
}

// Statuses are what Status can be.
func (executionFilter) Statuses() []string { return executionStatuses() }

// Surfaces are what Surface can be.
func (executionFilter) Surfaces() []string { return surfaceNames() }

// Kinds are what Kind can be.
func (executionFilter) Kinds() []string { return waitKinds() }

// openExecutions reads the filters.
func openExecutions(_ context.Context, v *visit) (string, error) {
	q, err := filtersOf(v.Query, "view", "status", "surface", "flow", "agent", "trace_id", "failed", "for", "before")
	if err != nil {
		return "", err
	}
	f := executionFilter{View: q["view"], Status: q["status"], Surface: q["surface"], Flow: q["flow"], Agent: q["agent"], Trace: q["trace_id"], Kind: q["for"]}
	for _, one := range []struct {
		name  string
		known []string
	}{
		{"view", []string{"waiting", "stuck"}},
		{"status", executionStatuses()},
		{"surface", surfaceNames()},
		{"for", waitKinds()},
		{"failed", []string{"1"}},
	} {
		if err := oneOf(one.name, q[one.name], one.known); err != nil {
			return "", err
		}
	}
	f.Failed = q["failed"] != ""
	switch {
	case f.View != "" && (f.Status != "" || f.Failed):
		return "", badFilter("view=%s lists what waits: leave status and failed out", f.View)
	case f.View == "" && f.Kind != "":
		return "", badFilter("for narrows what waits: use it with view=waiting or view=stuck")
	}
	if f.traces, err = tracesOf(f.Trace); err != nil {
		return "", err
	}
	if err := f.begin(q["before"]); err != nil {
		return "", err
	}
	v.About = f
	return titleOf(f), nil
}

// titleOf says which executions a listing has.
func titleOf(f executionFilter) string {
	switch {
	case f.View == "waiting":
		return "Executions that wait, by deadline"
	case f.View == "stuck":
		return "Executions that are stuck"
	case f.Failed:
		return "Executions that failed"
	case f.Status != "":
		return "Executions: " + f.Status
	}
	return "Executions"
}

// begin reads where a page begins.
func (f *executionFilter) begin(before string) error {
	if before == "" {
		return nil
	}
	id := before
	if f.View != "" {
		at, rest, _ := strings.Cut(before, " ")
		deadline, err := time.Parse(time.RFC3339Nano, at)
		if err != nil {
			return badCursor()
		}
		f.after, id = &deadline, rest
	}
	if !uuidShape.MatchString(id) {
		return badCursor()
	}
	f.Before = id
	return nil
}

// by is the filter whose index finds the rows that are then looked at for the others.
func (f executionFilter) by() string {
	switch {
	case f.traces != nil:
		return "trace"
	case f.Status != "" && (f.Flow == "" || f.Status != string(executions.Completed)):
		return "status" // but for completed ones they are few
	case f.Failed:
		return "failed"
	case f.Flow != "":
		return "flow"
	}
	return "newest"
}

// narrow reports whether what is looked at is all that there is.
func (f executionFilter) narrow() bool {
	by := f.by()
	others := f.Surface != "" || f.Agent != "" || (f.Flow != "" && by != "flow") || (f.Status != "" && by != "status") || (f.Failed && by != "failed")
	return by == "trace" || !others
}

// Narrowed reports whether anything but the view or a tab narrows the listing down.
func (f executionFilter) Narrowed() bool {
	return f.Surface != "" || f.Flow != "" || f.Agent != "" || f.Trace != ""
}

// query is the filter as it stands in an address, from its beginning on.
func (f executionFilter) query() url.Values {
	q := url.Values{}
	for name, value := range map[string]string{
		"view": f.View, "status": f.Status, "surface": f.Surface, "flow": f.Flow, "agent": f.Agent, "trace_id": f.Trace,
		"for": f.Kind,
	} {
		if value != "" {
			q.Set(name, value)
		}
	}
	if f.Failed {
		q.Set("failed", "1")
	}
	return q
}

// with is the address of the listing with one more filter.
func (f executionFilter) with(name, value string) string {
	q := f.query()
	q.Set(name, value)
	return "/executions?" + q.Encode()
}

// tab is the address of the listing with this in the place of what the tabs choose.
func (f executionFilter) tab(name, value string) string {
	f.View, f.Status, f.Failed, f.Kind = "", "", false, ""
	q := f.query()
	if name != "" {
		q.Set(name, value)
	}
	if len(q) == 0 {
		return "/executions"
	}
	return "/executions?" + q.Encode()
}

// filtersOf are the parameters of an address: each once, none that is not known, empty ones left out. A form sends its
// empty fields too.
func filtersOf(values url.Values, known ...string) (map[string]string, error) {
	q := map[string]string{}
	for name, given := range values {
		switch {
		case !slices.Contains(known, name):
			return nil, badFilter("there is no filter %.60q here; there are %s", name, strings.Join(known, ", "))
		case len(given) > 1:
			return nil, badFilter("filter %s is given %d times", name, len(given))
		case len(given[0]) > maxFilter || !utf8.ValidString(given[0]) || strings.ContainsFunc(given[0], unicode.IsControl):
			return nil, badFilter("filter %s has to be text of at most %d bytes", name, maxFilter)
		case strings.TrimSpace(given[0]) != "":
			q[name] = given[0]
		}
	}
	return q, nil
}

// tracesOf are the ids that one in any form can mean; nil for none.
func tracesOf(anyForm string) ([]string, error) {
	if anyForm == "" {
		return nil, nil
	}
	ids, err := trace.ParseAny(strings.TrimSpace(anyForm))
	if err != nil {
		return nil, badFilter("filter trace_id: %s", err)
	}
	list := make([]string, len(ids))
	for i, id := range ids {
		list[i] = string(id)
	}
	return list, nil
}

func badFilter(format string, args ...any) error {
	return problem.New(http.StatusBadRequest, format, args...).Kind("bad-parameter", "Bad parameter")
}

func badCursor() error {
	return badFilter("this is not where a page of this listing begins: take it from the page before")
}

// queueKinds is how many kinds of work, and how many limits, the page shows.
const queueKinds = 100

// stateTab leads to the executions of one state.
type stateTab struct {
	Word, Link string
	Count      string // with "+" beyond countedMost; empty where it is not counted
	Now        bool   // it is what the page shows
}

// executionStates are the tabs. Filters stay when another is chosen; counts are of all, so they are shown without
// filters only.
func (room *Room) executionStates(ctx context.Context, v *visit) (any, error) {
	f := v.About.(executionFilter)
	counts := map[string]string{}
	if !f.Narrowed() {
		var err error
		if counts, err = room.countStates(ctx); err != nil {
			return nil, err
		}
	}
	tabs := []stateTab{{Word: "All", Link: f.tab("", ""), Now: f.View == "" && f.Status == "" && !f.Failed}}
	for _, s := range executionStatuses() {
		tabs = append(tabs, stateTab{Word: s, Link: f.tab("status", s), Count: counts[s], Now: f.Status == s && !f.Failed})
	}
	return append(tabs,
		stateTab{Word: "failed or timed out", Link: f.tab("failed", "1"), Now: f.Failed},
		stateTab{Word: "waiting by deadline", Link: f.tab("view", "waiting"), Count: counts["waiting by deadline"], Now: f.View == "waiting"},
		stateTab{Word: "stuck", Link: f.tab("view", "stuck"), Count: counts["stuck"], Now: f.View == "stuck"}), nil
}

// countStates counts the executions of each state, up to countedMost: as many entries of the state's index from it
// on, whatever follows it there. A condition on the state alone would leave it to the planner's guess whether a rare
// one is worth a walk through the table. Completed ones have no such index: they are counted among the newest.
func (room *Room) countStates(ctx context.Context) (map[string]string, error) {
	rows, err := room.Read.Query(ctx, `
		select s.status, false as more, (select count(*) filter (where x.status = s.status) from (
		         select e.status from agent_executions e
		          where e.status in ('pending', 'running', 'waiting') and (e.status, e.id) >= (s.status, '00000000-0000-0000-0000-000000000000')
		          order by e.status, e.id limit @most + 1) x)
		  from unnest(array['pending', 'running', 'waiting']) s (status)
		union all
		select s.status, false, (select count(*) filter (where x.status = s.status) from (
		         select e.status from agent_executions e
		          where e.status in ('failed', 'timeout', 'cancelled') and (e.status, e.id) >= (s.status, '00000000-0000-0000-0000-000000000000')
		          order by e.status, e.id limit @most + 1) x)
		  from unnest(array['failed', 'timeout', 'cancelled']) s (status)
		union all
		select 'completed', exists (select e.id from agent_executions e order by e.id desc offset @looked limit 1), (select count(*) from (
		         select from (select e.status from agent_executions e order by e.id desc limit @looked) x where x.status = 'completed' limit @most + 1) y)
		union all
		select 'stuck', false, (select count(*) from (select from agent_executions_stuck k where k.waiting_until <= now() limit @most + 1) x)`, freshPlan,
		postgres.Strict{"most": countedMost, "looked": 4 * countedMost})
	if err != nil {
		return nil, fmt.Errorf("count executions: %w", err)
	}
	counts := map[string]string{}
	var status string
	var more bool
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&status, &more, &n}, func() error {
		counts[status] = capped(n, countedMost)
		if more && n <= countedMost {
			counts[status] += "+"
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("count executions: %w", err)
	}
	return counts, nil
}

// capped is a count that goes no further than most.
func capped(n, most int64) string {
	if n > most {
		return thousands(most) + "+"
	}
	return thousands(n)
}

// readyKind is work of one kind that is ready and has no worker yet.
type readyKind struct {
	Queue, Flow, Surface string
	Ready                int64
}

// Count is Ready as it is shown.
func (k readyKind) Count() string { return capped(k.Ready, countedMost) }

// admission is a limit with what it is used.
type admission struct {
	Kind, Name string
	Most       int
	Running    int64
}

// Full reports whether nothing more of it is started now.
func (a admission) Full() bool { return a.Running >= int64(a.Most) }

// executionQueue is what is ready, by kind, and the limits.
func (room *Room) executionQueue(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select k.queue, left(k.flow, 200) as flow, k.surface,
		       (select count(*) from (select from agent_executions x
		          where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside and x.queue = k.queue
		            and x.flow = k.flow and x.surface = k.surface limit @counted + 1) c) as ready
		  from lanekeeper.agent_ready_kinds k
		 order by k.queue desc, k.flow, k.surface
		 limit @most + 1`, freshPlan, postgres.Strict{"counted": countedMost, "most": queueKinds})
	if err != nil {
		return nil, fmt.Errorf("read the queue: %w", err)
	}
	ready, err := pgx.CollectRows(rows, pgx.RowToStructByName[readyKind])
	if err != nil {
		return nil, fmt.Errorf("read the queue: %w", err)
	}
	rows, err = room.Read.Query(ctx, `
		select l.kind, left(l.name, 200) as name, l.running as most, case l.kind
		         when 'flow' then (select count(*) from (select from agent_executions x
		           where x.claimed_by is not null and x.flow = l.name limit @counted + 1) c)
		         else (select count(*) from (select from agent_executions x
		           where x.claimed_by is not null and x.surface = l.name limit @counted + 1) c) end as running
		  from agent_limits l order by l.kind, l.name limit @most`, freshPlan,
		postgres.Strict{"counted": countedMost, "most": queueKinds})
	if err != nil {
		return nil, fmt.Errorf("read the limits: %w", err)
	}
	limits, err := pgx.CollectRows(rows, pgx.RowToStructByName[admission])
	if err != nil {
		return nil, fmt.Errorf("read the limits: %w", err)
	}
	ready, more := onPage(ready, queueKinds)
	return map[string]any{"Ready": ready, "More": more, "Limits": limits}, nil
}
