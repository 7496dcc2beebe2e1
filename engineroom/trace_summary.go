package engineroom

import (
	"context"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// tracedRun is an execution of a trace.
type tracedRun struct {
	ID, Surface, Flow, Status           string
	ParentID, ForkedFrom, ThreadID      *string
	WaitingFor, WaitingKey, WaitingStep *string
	WaitingUntil                        *time.Time
	Claim                               int64
	WaitNumber, Attempt                 int
	Summary, Error, FailedStep          string
	CreatedAt, UpdatedAt                time.Time
	StartedAt, CompletedAt              *time.Time
}

// began is the run's start of work, or its creation.
func (r tracedRun) began() time.Time {
	if r.StartedAt != nil {
		return *r.StartedAt
	}
	return r.CreatedAt
}

// Failed reports a failed, timed out or cancelled run.
func (r tracedRun) Failed() bool { return r.Status == "failed" || r.Status == "timeout" }

// runsOf reads the first executions of a trace, and whether there are more.
func (room *Room) runsOf(ctx context.Context, id string) (runs []tracedRun, more bool, err error) {
	runs, err = postgres.Rows[tracedRun](ctx, room.Read, "list executions of trace", `
		select e.id::text, e.surface, left(e.flow, 200) as flow, e.status, e.parent_id::text, e.forked_from::text,
		  e.thread_id,
		       e.waiting_for, left(e.waiting_key, 300) as waiting_key, left(e.waiting_step, 300) as waiting_step,
		         e.waiting_until,
		       e.claim, e.wait_number, e.attempt, left(e.result_summary, 1000) as summary,
		       left(coalesce(e.error_message, ''), 4000) as error, left(coalesce(e.failed_step, ''), 300) as failed_step,
		       e.created_at, e.updated_at, e.started_at, e.completed_at
		  from agent_executions e where e.trace_id = @id order by e.id limit @most::int + 1`,
		freshPlan, postgres.Strict{"id": id, "most": traceRuns})
	if err != nil {
		return nil, false, err
	}
	runs, more = onPage(runs, traceRuns)
	return runs, more, nil
}

// tracedSums are the totals of a trace's or an execution's rows.
type tracedSums struct {
	ExecutionID            *string
	Rows, Failed           int64
	Running                bool
	Prompt, Output, Tokens int64
	CostUSD                float64
	First, Last            *time.Time
	Surface                string
	Skipped                bool // all rows are skipped
}

// sumsOf reads the totals of a trace by execution, over at most traceSummed rows.
func (room *Room) sumsOf(
	ctx context.Context, id string,
) (byRun map[string]tracedSums, all tracedSums, more bool, err error) {
	list, err := postgres.Rows[tracedSums](ctx, room.Read, "add up trace", `
		select a.execution_id::text, count(*) as rows, count(*) filter (where a.status = 'error') as failed,
		       bool_or(a.status = 'running') as running, bool_and(a.status = 'skipped') as skipped,
		       coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens')), 0)::bigint as prompt,
		       coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'completion_tokens')), 0)::bigint as output,
		       coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'total_tokens')), 0)::bigint as tokens,
		       coalesce(sum(a.cost_usd), 0)::float8 as cost_usd, min(a.created_at) as first,
		       max(coalesce(a.finished_at, a.created_at)) as last, min(a.surface) as surface
		  from (select x.execution_id, x.status, x.token_usage, x.cost_usd, x.created_at, x.finished_at, x.surface
		          from agent_activity x where x.trace_id = @id order by x.created_at limit @most::int + 1) a
		 group by a.execution_id`,
		freshPlan, postgres.Strict{"id": id, "most": traceSummed})
	if err != nil {
		return nil, all, false, err
	}
	byRun = make(map[string]tracedSums, len(list))
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

// add adds other totals.
func (s *tracedSums) add(o tracedSums) {
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

// tracedFailure is one failure.
type tracedFailure struct {
	ID, Name, Status, Class, Message string
	At                               time.Time
}

// failuresOf lists the failures of a trace in order of their start.
func (room *Room) failuresOf(ctx context.Context, id string) (list []tracedFailure, more bool, err error) {
	list, err = postgres.Rows[tracedFailure](ctx, room.Read, "list errors of trace", `
		select b.id::text, left(b.skill_name, 200) as name, b.status, left(b.error_class, 100) as class,
		       left(coalesce(b.error_message, ''), 600) as message, b.created_at as at
		  from (select a.id from (select x.id, x.status, x.created_at from agent_activity x
		                           where x.trace_id = @id order by x.created_at limit @scan) a
		         where a.status in ('error', 'unknown') order by a.created_at limit @most::int + 1) f
		  join agent_activity b on b.id = f.id
		 order by b.created_at, b.id`,
		freshPlan, postgres.Strict{"id": id, "scan": traceSummed, "most": traceFailed})
	if err != nil {
		return nil, false, err
	}
	list, more = onPage(list, traceFailed)
	return list, more, nil
}

// tracedAround is the data about a trace in other tables.
type tracedAround struct {
	Lanes        []string // lanes of its rows
	Held         []string // lanes that it holds
	Newer, Older *string  // the next and the previous trace
	Pending      int64    // pending approvals
}

// aroundOf reads data about a trace from other tables. root is its first execution; empty for none.
func (room *Room) aroundOf(ctx context.Context, id, root string, runs []string) (tracedAround, error) {
	return postgres.Row[tracedAround](ctx, room.Read, "look around trace", `
		select array(select distinct x.lane from (select a.lane from agent_activity a
		               where a.trace_id = @id order by a.created_at limit @scan) x
		              where x.lane <> '' order by x.lane limit 20) as lanes,
		       array(select l.lane from agent_locks l
		              where l.execution_id = any (@runs::text[]::uuid[]) order by l.lane limit 20) as held,
		       (select n.trace_id from unnest(@surfaces::text[]) s (surface) cross join lateral (
		          select e.id, e.trace_id from agent_executions e where e.surface = s.surface and e.parent_id is null
		             and e.id > nullif(@root::text, '')::uuid order by e.id limit 1) n order by n.id limit 1) as newer,
		       (select n.trace_id from unnest(@surfaces::text[]) s (surface) cross join lateral (
		          select e.id, e.trace_id from agent_executions e where e.surface = s.surface and e.parent_id is null
		             and e.id < nullif(@root::text, '')::uuid order by e.id desc limit 1) n order by n.id desc limit 1)
		               as older,
		       (select count(*) from (select from agent_approvals p
		          where p.trace_id = @id and p.status = 'pending' limit 100) t) as pending`,
		freshPlan, postgres.Strict{
			"id": id, "runs": runs, "root": root, "surfaces": surfaceNames(), "scan": traceSummed,
		})
}

// tracedSummary is the head of the page.
type tracedSummary struct {
	tracedAround

	ID, Hex, Surface, Status string
	Flow, Agent, Result      string
	StartedAt                time.Time
	FinishedAt               *time.Time
	Runs                     []tracedRun
	MoreRuns, MoreRows       bool
	Threads                  []string
	Sums                     tracedSums
	Failures                 []tracedFailure
	FailedRuns               []tracedRun
	MoreFailures             bool
	OnPage                   bool // the failed rows are on this page
}

// traceSummary loads the head.
func (room *Room) traceSummary(ctx context.Context, v *visit) (any, error) {
	about, _ := v.About.(*tracedVisit)
	return room.settled(ctx, about, "summary", func() (any, bool, error) {
		s := &tracedSummary{ID: about.ID, Hex: trace.ID(about.ID).OTel(), OnPage: about.View != "table" && about.Row == ""}
		var err error
		if s.Runs, s.MoreRuns, err = room.runsOf(ctx, about.ID); err != nil {
			return nil, false, err
		}
		if _, s.Sums, s.MoreRows, err = room.sumsOf(ctx, about.ID); err != nil {
			return nil, false, err
		}
		if s.Failures, s.MoreFailures, err = room.failuresOf(ctx, about.ID); err != nil {
			return nil, false, err
		}
		root, ids := "", make([]string, len(s.Runs))
		for i, r := range s.Runs {
			if ids[i] = r.ID; r.ParentID == nil && root == "" {
				root = r.ID
			}
		}
		if s.tracedAround, err = room.aroundOf(ctx, about.ID, root, ids); err != nil {
			return nil, false, err
		}
		s.fill()
		return s, s.Sums.Running, nil
	})
}

// fill computes the trace's status from its root executions. Without any (an admin's single action, a skipped tick)
// it uses the rows.
func (s *tracedSummary) fill() {
	seen := map[string]bool{}
	rooted := false
	for i, r := range s.Runs {
		if r.Failed() {
			s.FailedRuns = append(s.FailedRuns, r)
		}
		if r.ThreadID != nil && !seen[*r.ThreadID] && len(s.Threads) < 20 {
			seen[*r.ThreadID] = true
			s.Threads = append(s.Threads, *r.ThreadID)
		}
		if r.ParentID != nil && (rooted || i > 0) { // the first starts the trace, even with a parent in another one
			continue
		}
		if !rooted {
			s.Surface, s.Flow, s.StartedAt, rooted = r.Surface, r.Flow, r.began(), true
		}
		s.Status, s.FinishedAt, s.Result = r.Status, r.CompletedAt, r.Summary
	}
	if rooted || s.Sums.Rows == 0 {
		return
	}
	s.Surface, s.StartedAt = s.Sums.Surface, *s.Sums.First
	switch {
	case s.Sums.Running:
		s.Status = "running"
		return
	case s.Sums.Failed > 0:
		s.Status = "failed"
	case s.Sums.Skipped:
		s.Status = "skipped"
	default:
		s.Status = "completed"
	}
	s.FinishedAt = s.Sums.Last
}

// Took is the duration in short form; empty while it runs.
func (s *tracedSummary) Took() string {
	if ms := between(s.StartedAt, s.FinishedAt); ms != nil {
		return human.Millis(*ms)
	}
	return ""
}

// Counted is the bounded number of rows.
func (s *tracedSummary) Counted() int64 { return min(s.Sums.Rows, traceSummed) }

// FirstRuns are the runs in the head.
func (s *tracedSummary) FirstRuns() []tracedRun { return s.Runs[:min(len(s.Runs), 5)] }

// HasMoreRuns reports whether there are others.
func (s *tracedSummary) HasMoreRuns() bool { return len(s.Runs) > 5 }

// RowLink returns a row's URL: on this page if the view has it, else its own.
func (s *tracedSummary) RowLink(row string) string {
	if s.OnPage {
		return "#in-row-" + row
	}
	return "/traces/" + s.ID + "?row=" + row
}

// maxErrors bounds the failures shown without expanding.
const maxErrors = 8

// FirstFailures are the failures shown at once.
func (s *tracedSummary) FirstFailures() []tracedFailure {
	return s.Failures[:min(len(s.Failures), maxErrors)]
}

// OtherFailures are collapsed.
func (s *tracedSummary) OtherFailures() []tracedFailure {
	return s.Failures[min(len(s.Failures), maxErrors):]
}
