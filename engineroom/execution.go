package engineroom

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// executionPage shows one execution and its actions.
func (room *Room) executionPage() page {
	return page{
		path: "/executions/{id}", name: "execution", title: "Execution", open: room.openExecution,
		parts: []part{
			{name: "view", interval: time.Second, refreshOnActivity: true, load: room.executionView},
			{name: "wait", interval: time.Second, load: room.executionWait},
			{name: "timeline", interval: 2 * time.Second, load: room.executionTimeline},
			{name: "values", interval: 5 * time.Second, load: room.executionValues},
			{name: "relatives", interval: 3 * time.Second, load: room.executionRelatives},
			{name: "lanes", interval: 2 * time.Second, load: room.executionLanes},
			{name: "messages", interval: 3 * time.Second, load: room.executionMessages},
			{name: "fork", load: room.executionFork},
		},
	}
}

// executionSubject is the execution of a page.
type executionSubject struct {
	ID   string
	From string // the step from which the fork form starts
	Tab  string // of the values
	// before is the cursor of the timeline; nil for the newest steps.
	before *timeCursor
}

// openExecution finds the execution.
func (room *Room) openExecution(ctx context.Context, req *pageRequest) (string, error) {
	id := req.path("id")
	if !uuidPattern.MatchString(id) {
		return "", problem.New(http.StatusNotFound, "no execution has the id %.60q", id)
	}
	q, err := filtersOf(req.Query, "before", "from", "tab")
	if err != nil {
		return "", err
	}
	subject := executionSubject{ID: id, From: q["from"], Tab: q["tab"]}
	if err := checkOneOf("tab", subject.Tab, []string{"checkpoint"}); err != nil {
		return "", err
	}
	if subject.before, err = parseTimeCursor(q["before"]); err != nil {
		return "", err
	}
	var flow string
	err = room.Read.QueryRow(ctx, `select left(flow, 100) from agent_executions where id = @id`,
		postgres.Strict{"id": id}).Scan(&flow)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return "", problem.New(http.StatusNotFound, "there is no execution %s", id)
	case err != nil:
		return "", fmt.Errorf("read execution: %w", err)
	}
	req.Subject = subject
	return flow + " " + short(id), nil
}

// executionRecord is an execution's row with its worker.
type executionRecord struct {
	ID, TraceID, Surface, Agent, Flow, Status, Queue string
	FlowVersion                                      *int
	ParentID, ThreadID, ForkedFrom, ForkedStep       *string
	Priority, Attempt, MaxAttempts, WaitNumber       int
	ProgressSeconds                                  int
	OnLost                                           string
	IsExternal                                       bool
	Claim                                            int64
	ClaimedBy, Worker                                *string
	LeaseUntil                                       *time.Time
	FailedStep, CancelledBy, CancelReason            *string
	CreatedAt, UpdatedAt                             time.Time
	StartedAt, CompletedAt                           *time.Time
}

// Ended reports whether the execution has ended.
func (x executionRecord) Ended() bool { return executions.Status(x.Status).Ended() }

// Retriable reports whether an admin can retry the execution.
func (x executionRecord) Retriable() bool {
	return x.Ended() && x.Status != string(executions.Completed)
}

// State is the status, or stateLost after the end of the worker's lease.
func (x executionRecord) State() string {
	if x.ClaimedBy != nil && x.lostAt() != nil {
		return stateLost
	}
	return x.Status
}

// lostAt is the end of the worker's lease; nil while the lease holds, or without a claim. Without the worker's row, it
// is the latest change of the execution.
func (x executionRecord) lostAt() *time.Time {
	switch {
	case x.ClaimedBy == nil || x.Ended():
		return nil
	case x.LeaseUntil == nil:
		return &x.UpdatedAt
	case x.LeaseUntil.Before(time.Now()):
		return x.LeaseUntil
	}
	return nil
}

// Took is the duration from the first claim, or without one from the creation, to the end; empty before the end.
func (x executionRecord) Took() string {
	from := x.CreatedAt
	if x.StartedAt != nil {
		from = *x.StartedAt
	}
	if ms := millisBetween(from, x.CompletedAt); ms != nil {
		return human.Millis(*ms)
	}
	return ""
}

// Queued is the time in the queue; empty before the claim, or for a short time.
func (x executionRecord) Queued() string {
	return traceRun{CreatedAt: x.CreatedAt, StartedAt: x.StartedAt}.Queued()
}

// executionView is an execution with its part of the waterfall.
type executionView struct {
	executionRecord

	View       *spansView // nil if the page of the trace omits the execution
	Line       *spanNode  // the execution's line, with the sums of the lines below
	Lost       []lostClaim
	First      string // the first recorded step
	Cause      *activity.RootCause
	Labels     executions.Labels
	Missing    *missingWorker // while the execution waits for a claim
	Unforkable bool           // the flow allows neither fork nor retry
}

// executionView reads the execution, and its lines of the trace's waterfall.
func (room *Room) executionView(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(executionSubject)
	x, err := room.readExecution(ctx, subject.ID)
	if err != nil {
		return nil, err
	}
	view := &executionView{executionRecord: x, Unforkable: room.Unforkable()[x.Flow] != ""}
	if view.Missing, err = room.missingFor(ctx, x); err != nil {
		return nil, err
	}
	labels, err := executions.LabelsOf(ctx, room.Read, []string{x.ID})
	if err != nil {
		return nil, err
	}
	view.Labels = labels[x.ID].Redacted()
	if view.First, err = room.firstStep(ctx, x.ID); err != nil {
		return nil, err
	}
	if x.Status == string(executions.Failed) || x.Status == string(executions.Timeout) {
		if view.Cause, err = activity.RootCauseOfExecution(ctx, room.Read, x.TraceID, x.ID); err != nil {
			return nil, err
		}
	}
	head := &traceHead{ID: x.TraceID}
	if head.Runs, head.MoreRuns, err = room.runsOf(ctx, x.TraceID); err != nil {
		return nil, err
	}
	if err := room.readSums(ctx, head, true); err != nil {
		return nil, err
	}
	order, _, err := room.linesOf(ctx, head)
	if err != nil {
		return nil, err
	}
	if order = subtree(order, "run-"+x.ID); len(order) > 0 {
		view.Line, view.Lost = order[0], order[0].Lost
		view.View = &spansView{traceHead: head, Base: "/traces/" + x.TraceID + "?span="}
		view.View.fill(order)
	}
	return view, nil
}

// subtree returns the line of a node and the lines below it, with their levels from 0; nil for an unknown node.
func subtree(order []*spanNode, id string) []*spanNode {
	first := slices.IndexFunc(order, func(n *spanNode) bool { return n.ID == id })
	if first < 0 {
		return nil
	}
	level, end := order[first].Level, first+1
	for end < len(order) && order[end].Level > level { // lines follow their parent without a gap
		end++
	}
	list := order[first:end]
	for _, n := range list {
		n.Level -= level
	}
	return list
}

// missingFor reports a ready execution that no process or worker can run; nil for any other execution.
func (room *Room) missingFor(ctx context.Context, x executionRecord) (*missingWorker, error) {
	ready := x.ClaimedBy == nil && (x.Status == string(executions.Pending) || x.Status == string(executions.Running))
	if !ready || x.IsExternal && time.Since(x.UpdatedAt) < unseenAfter {
		return nil, nil
	}
	return room.missingWorkerOf(ctx, x.Flow)
}

func (room *Room) readExecution(ctx context.Context, id string) (executionRecord, error) {
	x, err := postgres.Row[executionRecord](ctx, room.Read, "read execution", `
		select e.id::text, e.trace_id, e.surface, left(e.agent, 100) as agent, e.flow, e.status, left(e.queue, 100) as queue,
		       e.flow_version, e.parent_id::text, e.thread_id, e.forked_from::text, left(e.forked_step, 600) as forked_step,
		       e.priority, e.attempt, e.max_attempts, e.wait_number, e.progress_seconds, left(e.on_lost, 100) as on_lost,
		       e.is_external, e.claim, e.claimed_by::text, left(coalesce(nullif(w.owner, ''), w.name), 200) as worker,
		       w.expires_at as lease_until, left(e.failed_step, 600) as failed_step,
		       left(e.cancelled_by, 200) as cancelled_by, left(e.cancel_reason, 1200) as cancel_reason, e.created_at,
		       e.updated_at, e.started_at, e.completed_at
		  from agent_executions e left join agent_workers w on w.id = e.claimed_by
		 where e.id = @id`, postgres.Strict{"id": id})
	if err != nil {
		return executionRecord{}, err
	}
	for _, text := range []**string{&x.ForkedStep, &x.FailedStep, &x.CancelReason} {
		if *text != nil {
			*text = new(redact.Text(**text, maxValue))
		}
	}
	return x, nil
}

// openWait is the current wait of an execution.
type openWait struct {
	ID, For, Key, Step string
	Until              *time.Time // deadline; nil for none
	Since              time.Time
	Number             int
	Data               shownValue
	Event              string // the event that ends the wait
	Emit               bool   // the page offers to emit the event
	Requests           []openRequest
}

// openRequest is a request to people.
type openRequest struct {
	ID, Kind, Title, Status string
	Items                   int
	CreatedAt               time.Time
}

// executionWait reads the current wait, if any.
func (room *Room) executionWait(ctx context.Context, req *pageRequest) (any, error) {
	w := openWait{ID: req.Subject.(executionSubject).ID}
	var data string
	err := room.Read.QueryRow(ctx, `
		select left(coalesce(e.waiting_for, ''), 200), left(coalesce(e.waiting_key, ''), 2500),
		       left(coalesce(e.waiting_step, ''), 1000), e.waiting_until, e.updated_at, e.wait_number,
		       left(coalesce(e.waiting_data::text, ''), 8192), octet_length(coalesce(e.waiting_data::text, '')),
		       coalesce((select k.event from lanekeeper.agent_wait_events k where k.kind = e.waiting_for), '')
		  from agent_executions e where e.id = @id and e.status = 'waiting'`, postgres.Strict{"id": w.ID}).
		Scan(&w.For, &w.Key, &w.Step, &w.Until, &w.Since, &w.Number, &data, &w.Data.Bytes, &w.Event)
	if errors.Is(err, pgx.ErrNoRows) {
		return openWait{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read what the execution waits for: %w", err)
	}
	hide, err := room.hidesTextsOf(ctx, w.ID)
	if err != nil {
		return nil, err
	}
	hideJSON(hide, &data, &w.Data.Bytes)
	w.Data = shownJSON(data, w.Data.Bytes)
	switch w.For {
	case "response", "document", "signature", "test", "event":
		// A form must send the key unchanged, so a key that the page does not show unchanged has no form.
		w.Emit = redact.Text(w.Key, maxValue) == w.Key && !strings.ContainsFunc(w.Key, isInvisible)
	}
	w.Key, w.Step = redact.Text(w.Key, maxValue), redact.Text(w.Step, maxValue)
	w.Requests, err = postgres.Rows[openRequest](ctx, room.Read, "read open requests", `
		select r.id::text, r.kind, case when @hide and r.thread_id is not null then @note::text else left(r.title, 400) end
		       as title, r.status, cardinality(r.items) as items, r.created_at
		  from agent_requests r where r.execution_id = @id order by r.id desc limit 20`,
		postgres.Strict{"id": w.ID, "hide": activity.HidesTexts(ctx), "note": activity.HiddenText})
	if err != nil {
		return nil, err
	}
	return w, nil
}

// executionLane is a lane that an execution holds or has lent.
type executionLane struct {
	Lane         string
	FencingToken int64
	LockedAt     time.Time
	ExpiresAt    *time.Time // nil if parked
	Lender       *string    // of a borrowed lane
	Borrower     *string    // of a lent lane
}

// lanesShown bounds the lanes that the execution holds, and those that it has lent.
const lanesShown = 50

// executionLanes reads the lanes that the execution holds, borrows or has lent.
func (room *Room) executionLanes(ctx context.Context, req *pageRequest) (any, error) {
	list, err := postgres.Rows[executionLane](ctx, room.Read, "read the lanes of the execution", `
		select k.* from (
		(select l.lane, l.fencing_token, l.locked_at,
		        case when not l.parked then l.expires_at end as expires_at,
		        (select o.lender::text from agent_lock_loans o where o.lane = l.lane order by o.depth desc limit 1) as lender,
		        null::text as borrower
		   from agent_locks l
		  where l.execution_id = @id and l.locked_by <> '' and l.expires_at > clock_timestamp()
		  limit @limit)
		union all
		(select l.lane, l.fencing_token, o.lent_at, case when not l.parked then l.expires_at end, null, o.borrower::text
		   from agent_lock_loans o
		   join agent_locks l on l.lane = o.lane
		  where o.lender = @id
		  limit @limit)) k
		 order by k.lane`, customPlan,
		postgres.Strict{"id": req.Subject.(executionSubject).ID, "limit": lanesShown})
	if err != nil {
		return nil, err
	}
	return map[string]any{"Lanes": list}, nil
}

// sentMessage is a message of an execution.
type sentMessage struct {
	ID, ThreadID, Status, Text string
	Bytes                      int64
	CreatedAt                  time.Time
}

// messagesShown bounds the messages of an execution on its page.
const messagesShown = 20

// executionMessages reads the execution's newest messages. It reads them in the order of the index on the execution;
// see descendants.
func (room *Room) executionMessages(ctx context.Context, req *pageRequest) (any, error) {
	list, err := postgres.Rows[sentMessage](ctx, room.Read, "read the messages of the execution", `
		select m.id::text, m.thread_id, m.status, left(m.content, 600) as text, octet_length(m.content) as bytes, m.created_at
		  from (select y.id from (select x.id, x.execution_id from agent_messages x
		          where x.execution_id <= @id order by x.execution_id desc limit @near) y
		         where y.execution_id = @id order by y.id desc limit @limit + 1) p
		  join agent_messages m on m.id = p.id
		 order by m.id desc`, customPlan, postgres.Strict{
		"id": req.Subject.(executionSubject).ID, "limit": messagesShown, "near": 20 * messagesShown,
	})
	if err != nil {
		return nil, err
	}
	for i := range list {
		if activity.HidesTexts(ctx) {
			list[i].Text = activity.HiddenText
		}
		list[i].Text = clip(list[i].Text, list[i].Bytes, 300)
	}
	list, more := firstN(list, messagesShown)
	return map[string]any{"Messages": list, "More": more}, nil
}
