package engineroom

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

// traceRun is an execution of a trace.
type traceRun struct {
	ID, Surface, Flow, Status, Agent    string
	CancelledBy, CancelReason           string
	ParentID, ForkedFrom, ThreadID      *string
	WaitingFor, WaitingKey, WaitingStep *string
	WaitingUntil                        *time.Time
	Claim                               int64
	WaitNumber, Attempt                 int
	Summary, Error, FailedStep          string
	CreatedAt, UpdatedAt                time.Time
	StartedAt, CompletedAt              *time.Time
	Lost                                *time.Time // the end of its worker's lease, if that is over
}

// stateLost is the state of a lost worker's executions and activities until the next sweep. stateStopped is the state
// of an orphaned activity, such as an activity of an ended execution. stateWaiting is the state of a waiting execution
// and of its open activities.
const stateLost, stateStopped, stateWaiting = "worker lost", "stopped", "waiting"

// State is the status, or stateLost.
func (r traceRun) State() string {
	if r.Lost != nil {
		return stateLost
	}
	return r.Status
}

// began returns the time of the first claim, or of the creation if no worker has claimed the run.
func (r traceRun) began() time.Time {
	if r.StartedAt != nil {
		return *r.StartedAt
	}
	return r.CreatedAt
}

// runsOf reads the first executions of a trace, and whether there are more.
func (room *Room) runsOf(ctx context.Context, id string) (runs []traceRun, more bool, err error) {
	runs, err = postgres.Rows[traceRun](ctx, room.Read, "list executions of trace", `
		select e.id::text, e.surface, left(e.flow, 200) as flow, e.status, left(e.agent, 200) as agent, e.parent_id::text,
		       e.forked_from::text, e.thread_id, left(coalesce(e.cancelled_by, ''), 200) as cancelled_by,
		       left(coalesce(e.cancel_reason, ''), 1200) as cancel_reason,
		       case when e.claimed_by is not null and coalesce(w.expires_at <= clock_timestamp(), true)
		            then coalesce(w.expires_at, e.updated_at) end as lost,
		       e.waiting_for, left(e.waiting_key, 300) as waiting_key, left(e.waiting_step, 300) as waiting_step,
		         e.waiting_until,
		       e.claim, e.wait_number, e.attempt, left(e.result_summary, 1000) as summary,
		       left(coalesce(e.error_message, ''), 8192) as error, left(coalesce(e.failed_step, ''), 300) as failed_step,
		       e.created_at, e.updated_at, e.started_at, e.completed_at
		  from (select x.* from agent_executions x where x.trace_id = @id order by x.id limit @limit::int + 1) e
		  left join agent_workers w on w.id = e.claimed_by
		 order by e.id`,
		postgres.Strict{"id": id, "limit": traceRuns})
	if err != nil {
		return nil, false, err
	}
	runs, more = firstN(runs, traceRuns)
	for i := range runs {
		hideResult(ctx, &runs[i].Summary, runs[i].Flow, runs[i].Surface, runs[i].ThreadID)
	}
	return runs, more, nil
}

// traceSums are the totals of a trace's or an execution's rows.
type traceSums struct {
	ExecutionID            *string
	Rows, Failed           int64
	Running                bool
	Prompt, Output, Tokens int64
	CostUSD                float64
	First, Last            *time.Time
	Surface                string
	Skipped                bool // all rows are skipped
}

// sumsOf reads the totals of a trace's first rows by execution. more reports a trace with more than traceSummed rows.
func (room *Room) sumsOf(
	ctx context.Context, id string,
) (byRun map[string]traceSums, all traceSums, more bool, err error) {
	list, err := postgres.Rows[traceSums](ctx, room.Read, "add up trace", `
		select a.execution_id::text, count(*) as rows, count(*) filter (where a.status = 'error') as failed,
		       bool_or(a.status = 'running') as running, bool_and(a.status = 'skipped') as skipped,
		       coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens'))
		                filter (where a.kind = 'model'), 0)::bigint as prompt,
		       coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'completion_tokens'))
		                filter (where a.kind = 'model'), 0)::bigint as output,
		       coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'total_tokens'))
		                filter (where a.kind = 'model'), 0)::bigint as tokens,
		       coalesce(sum(a.cost_usd), 0)::float8 as cost_usd, min(a.created_at) as first,
		       max(coalesce(a.finished_at, a.created_at)) as last, min(a.surface) as surface
		  from (select x.execution_id, x.kind, x.status, x.token_usage, x.cost_usd, x.created_at, x.finished_at, x.surface
		          from agent_activity x where x.trace_id = @id order by x.created_at limit @limit::int + 1) a
		 group by a.execution_id`,
		postgres.Strict{"id": id, "limit": traceSummed})
	if err != nil {
		return nil, all, false, err
	}
	byRun = make(map[string]traceSums, len(list))
	for i, s := range list {
		if s.ExecutionID != nil {
			byRun[*s.ExecutionID] = s
		}
		if i == 0 {
			all = s
			continue
		}
		all.add(s)
	}
	return byRun, all, all.Rows > traceSummed, nil
}

// sumRows adds up rows in the order of their beginning, as sumsOf does.
func sumRows(rows []spanRow) (byRun map[string]traceSums, all traceSums) {
	byRun = map[string]traceSums{}
	for i := range rows {
		one := rows[i].sums()
		if all.Rows == 0 {
			all = one
		} else {
			all.add(one)
		}
		if one.ExecutionID == nil {
			continue
		}
		if sum, ok := byRun[*one.ExecutionID]; ok {
			sum.add(one)
			one = sum
		}
		byRun[*one.ExecutionID] = one
	}
	return byRun, all
}

// sums are the totals of one row.
func (r *spanRow) sums() traceSums {
	s := traceSums{
		ExecutionID: r.ExecutionID, Rows: 1, Running: r.Status == "running", Skipped: r.Status == "skipped",
		Prompt: r.Prompt, Output: r.Completion, Tokens: r.Tokens, CostUSD: r.CostUSD, First: &r.CreatedAt,
		Last: cmp.Or(r.FinishedAt, &r.CreatedAt), Surface: r.Surface,
	}
	if r.Status == "error" {
		s.Failed = 1
	}
	return s
}

// add adds other totals.
func (s *traceSums) add(o traceSums) {
	s.Rows, s.Failed, s.Running, s.Skipped = s.Rows+o.Rows, s.Failed+o.Failed, s.Running || o.Running,
		s.Skipped && o.Skipped
	s.Prompt, s.Output, s.Tokens, s.CostUSD = s.Prompt+o.Prompt, s.Output+o.Output, s.Tokens+o.Tokens, s.CostUSD+o.CostUSD
	if o.First.Before(*s.First) {
		s.First, s.Surface = o.First, o.Surface
	}
	if o.Last.After(*s.Last) {
		s.Last = o.Last
	}
}

// traceRelated is the data about a trace in other tables.
type traceRelated struct {
	Lanes        []string // lanes of its rows
	Held         []string // lanes that it holds
	Newer, Older *string  // the next and the previous trace
}

// readRelated reads data about a trace from other tables. It finds the traces before and after the trace among the
// nearest unclaimed roots of each surface, in index order, and all claimed roots, which are few.
func (room *Room) readRelated(ctx context.Context, h *traceHead) (traceRelated, error) {
	root, ids := "", make([]string, len(h.Runs))
	for i, r := range h.Runs {
		if ids[i] = r.ID; r.ParentID == nil && root == "" {
			root = r.ID
		}
	}
	scan := traceSummed
	if h.whole {
		scan = 0
	}
	related, err := postgres.Row[traceRelated](ctx, room.Read, "read related data of trace", `
		with roots as materialized (
		  select i.id, i.trace_id from unnest(@surfaces::text[]) s (surface) cross join lateral (
		    (select e.id, e.trace_id from agent_executions e
		      where e.surface between s.surface and s.surface and e.parent_id is null and e.claimed_by is null
		        and e.id > nullif(@root::text, '')::uuid order by e.surface, e.id limit 1)
		    union all
		    (select e.id, e.trace_id from agent_executions e
		      where e.surface between s.surface and s.surface and e.parent_id is null and e.claimed_by is null
		        and e.id < nullif(@root::text, '')::uuid order by e.surface desc, e.id desc limit 1)) i
		  union all
		  select e.id, e.trace_id from (select k.* from agent_executions k where k.claimed_by is not null offset 0) e
		   where e.parent_id is null and e.surface = any (@surfaces::text[]))
		select array(select distinct x.lane from (select a.lane from agent_activity a
		               where a.trace_id = @id order by a.created_at limit @scan) x
		              where x.lane <> '' order by x.lane limit 20) as lanes,
		       array(select l.lane from agent_locks l
		              where l.execution_id = any (@runs::text[]::uuid[]) order by l.lane limit 20) as held,
		       (select n.trace_id from roots n where n.id > nullif(@root::text, '')::uuid order by n.id limit 1) as newer,
		       (select n.trace_id from roots n where n.id < nullif(@root::text, '')::uuid order by n.id desc
		         limit 1) as older`,
		customPlan, postgres.Strict{"id": h.ID, "runs": ids, "root": root, "surfaces": trace.Surfaces(), "scan": scan})
	if h.whole {
		related.Lanes = lanesOf(h.rows)
	}
	return related, err
}

// lanesOf returns at most 20 lanes of rows, by name.
func lanesOf(rows []spanRow) []string {
	seen := map[string]bool{}
	for i := range rows {
		seen[rows[i].Lane] = true
	}
	delete(seen, "")
	lanes := slices.Sorted(maps.Keys(seen))
	return lanes[:min(len(lanes), 20)]
}

// traceHead is the head of the page: the trace's subject and outcome.
type traceHead struct {
	ID, Surface, Status string
	Flow, Agent, Result string
	CancelledBy, Reason string
	StartedAt           time.Time
	FinishedAt          *time.Time
	Root                *traceRun // the subject of the actions; nil for none
	First               string    // its first recorded step
	Unforkable          bool      // the flow allows neither fork nor retry
	Runs                []traceRun
	MoreRuns, MoreRows  bool
	Threads             []string
	Sums                traceSums
	Cause               *activity.RootCause // of the failure, or of errors inside; nil for none
	Pending             int64               // requested approvals, counted up to 100
	byRun               map[string]traceSums
	rows                []spanRow // all of them, if whole
	whole               bool      // rows has all rows of the trace
}

// readHead reads a trace's subject and its sums. See readSums for lines.
func (room *Room) readHead(ctx context.Context, id string, lines bool) (h *traceHead, err error) {
	h = &traceHead{ID: id}
	if h.Runs, h.MoreRuns, err = room.runsOf(ctx, id); err != nil {
		return nil, err
	}
	if err := room.readSums(ctx, h, lines); err != nil {
		return nil, err
	}
	h.fill()
	if h.Failed() || h.Sums.Failed > 0 {
		if h.Cause, err = activity.RootCauseOf(ctx, room.Read, id); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// readSums reads the sums of a trace. If lines is set, the page draws the rows: readSums then reads them, and adds them
// up itself if the page can draw them all. Otherwise the database adds them up.
func (room *Room) readSums(ctx context.Context, h *traceHead, lines bool) (err error) {
	if lines {
		rows, err := room.firstRowsOf(ctx, h.ID)
		if err != nil {
			return err
		}
		if h.whole = len(rows) <= traceFirst+traceLast; h.whole {
			h.rows = rows
			h.byRun, h.Sums = sumRows(rows)
			return nil
		}
	}
	h.byRun, h.Sums, h.MoreRows, err = room.sumsOf(ctx, h.ID)
	return err
}

// fill computes the trace's status from its root executions. Without roots (an admin's single action, a skipped tick)
// it uses the rows.
func (h *traceHead) fill() {
	seen := map[string]bool{}
	for i := range h.Runs {
		r := &h.Runs[i]
		if r.ThreadID != nil && !seen[*r.ThreadID] && len(h.Threads) < 20 {
			seen[*r.ThreadID] = true
			h.Threads = append(h.Threads, *r.ThreadID)
		}
		if r.ParentID != nil && (h.Root != nil || i > 0) { // the first run starts the trace, even with a parent elsewhere
			continue
		}
		if h.Root == nil {
			h.Surface, h.Flow, h.Agent, h.StartedAt = r.Surface, r.Flow, r.Agent, r.began()
		}
		h.Root = r
		h.Status, h.FinishedAt, h.Result = r.State(), r.CompletedAt, redact.Text(r.Summary, 1000)
		h.CancelledBy, h.Reason = r.CancelledBy, redact.Text(r.CancelReason, 1000)
	}
	if h.Root != nil || h.Sums.Rows == 0 {
		return
	}
	h.Surface, h.StartedAt = h.Sums.Surface, *h.Sums.First
	switch {
	case h.Sums.Running:
		h.Status = "running"
		return
	case h.Sums.Failed > 0:
		h.Status = "failed"
	case h.Sums.Skipped:
		h.Status = "skipped"
	default:
		h.Status = "completed"
	}
	h.FinishedAt = h.Sums.Last
}

// Failed reports whether the trace failed or timed out, so it has a root cause.
func (h *traceHead) Failed() bool { return h.Status == "failed" || h.Status == "timeout" }

// Took is the duration in short form; empty while it runs.
func (h *traceHead) Took() string {
	if ms := millisBetween(h.StartedAt, h.FinishedAt); ms != nil {
		return human.Millis(*ms)
	}
	return ""
}

// Running reports whether the trace is running.
func (h *traceHead) Running() bool { return h.FinishedAt == nil && h.Status != stateLost }

// OpenChildren counts the executions still open after the root's end.
func (h *traceHead) OpenChildren() (n int64) {
	for _, r := range h.Runs {
		if h.FinishedAt != nil && r.ParentID != nil && r.CompletedAt == nil {
			n++
		}
	}
	return n
}

// Counted is the bounded number of rows.
func (h *traceHead) Counted() int64 { return min(h.Sums.Rows, traceSummed) }

// Live reports whether an admin can cancel the root.
func (h *traceHead) Live() bool { return h.Root != nil && h.Root.CompletedAt == nil }

// Hex is the id in tracing tools.
func (h *traceHead) Hex() string { return trace.ID(h.ID).OTel() }

// FirstRuns are the runs in the panel.
func (h *traceHead) FirstRuns() []traceRun { return h.Runs[:min(len(h.Runs), 5)] }

// HasMoreRuns reports whether the trace has more runs than FirstRuns.
func (h *traceHead) HasMoreRuns() bool { return len(h.Runs) > 5 }
