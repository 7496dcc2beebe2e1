package engineroom

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// executionPage shows one durable run, and what can be done with it.
func (room *Room) executionPage() page {
	return page{
		path: "/executions/{id}", name: "execution", title: "Execution", open: room.openExecution,
		parts: []part{
			{name: "facts", every: time.Second, load: room.executionFacts},
			{name: "wait", every: time.Second, load: room.executionWait},
			{name: "timeline", every: 2 * time.Second, load: room.executionTimeline},
			{name: "values", every: 5 * time.Second, load: room.executionValues},
			{name: "relatives", every: 3 * time.Second, load: room.executionRelatives},
			{name: "lanes", every: 2 * time.Second, load: room.executionLanes},
			{name: "messages", every: 3 * time.Second, load: room.executionMessages},
			{name: "fork", load: room.executionFork},
		},
	}
}

// executionVisit is what a page of one execution is about.
type executionVisit struct {
	ID   string
	From string // the step that the form for a fork begins with
	// before is where a page of the timeline begins; nil for the newest.
	before *stepPlace
}

// openExecution finds the execution.
func (room *Room) openExecution(ctx context.Context, v *visit) (string, error) {
	id := v.path("id")
	if !uuidShape.MatchString(id) {
		return "", problem.New(http.StatusBadRequest, "%.60q is not the id of an execution, which is a uuid in lower case", id).
			Kind("malformed-id", "Malformed id")
	}
	q, err := filtersOf(v.Query, "before", "from")
	if err != nil {
		return "", err
	}
	about := executionVisit{ID: id, From: q["from"]}
	if about.before, err = stepPlaceOf(q["before"]); err != nil {
		return "", err
	}
	var flow string
	err = room.Read.QueryRow(ctx, `select left(flow, 100) from agent_executions where id = @id`, postgres.Strict{"id": id}).Scan(&flow)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return "", problem.New(http.StatusNotFound, "there is no execution %s", id)
	case err != nil:
		return "", fmt.Errorf("read execution: %w", err)
	}
	v.About = about
	return flow + " " + short(id), nil
}

// executionFact is what an execution's row says of it, with who runs it.
type executionFact struct {
	ID, TraceID, Surface, Agent, Flow, Status, Queue string
	FlowVersion                                      *int
	ParentID, ThreadID, ForkedFrom, ForkedStep       *string
	Priority, Attempt, MaxAttempts, WaitNumber       int
	ProgressSeconds                                  int
	OnLost                                           string
	Outside                                          bool
	Claim                                            int64
	ClaimedBy, Worker                                *string
	LeaseUntil                                       *time.Time
	FailedStep, CancelledBy, CancelReason            *string
	CreatedAt, UpdatedAt                             time.Time
	StartedAt, CompletedAt                           *time.Time
}

// Ended reports whether the execution has come to its end.
func (x executionFact) Ended() bool { return executions.Status(x.Status).Ended() }

// Retriable reports whether it can be retried.
func (x executionFact) Retriable() bool {
	return x.Ended() && x.Status != string(executions.Completed)
}

// Took is how long it took from its beginning to its end, in milliseconds.
func (x executionFact) Took() int64 {
	if x.CompletedAt == nil {
		return 0
	}
	return x.CompletedAt.Sub(x.CreatedAt).Milliseconds()
}

// executionFacts reads the row. The secret of a lock, which makes its holder the run, stays where it is.
func (room *Room) executionFacts(ctx context.Context, v *visit) (any, error) {
	return room.factOf(ctx, v.About.(executionVisit).ID)
}

func (room *Room) factOf(ctx context.Context, id string) (executionFact, error) {
	rows, err := room.Read.Query(ctx, `
		select e.id::text, e.trace_id, e.surface, left(e.agent, 100) as agent, e.flow, e.status, left(e.queue, 100) as queue, e.flow_version, e.parent_id::text, e.thread_id,
		       e.forked_from::text, left(e.forked_step, 600) as forked_step, e.priority, e.attempt, e.max_attempts, e.wait_number,
		       e.progress_seconds, left(e.on_lost, 100) as on_lost, e.outside, e.claim, e.claimed_by::text,
		       left(coalesce(nullif(w.owner, ''), w.name), 200) as worker, w.expires_at as lease_until, left(e.failed_step, 600) as failed_step,
		       left(e.cancelled_by, 200) as cancelled_by, left(e.cancel_reason, 1200) as cancel_reason, e.created_at, e.updated_at,
		       e.started_at, e.completed_at
		  from agent_executions e left join agent_workers w on w.id = e.claimed_by
		 where e.id = @id`, postgres.Strict{"id": id})
	if err != nil {
		return executionFact{}, fmt.Errorf("read execution: %w", err)
	}
	x, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[executionFact])
	if err != nil {
		return executionFact{}, fmt.Errorf("read execution: %w", err)
	}
	for _, text := range []**string{&x.ForkedStep, &x.FailedStep, &x.CancelReason} {
		if *text != nil {
			*text = new(redact.Text(**text, maxValue))
		}
	}
	return x, nil
}

// openWait is what an execution waits for now.
type openWait struct {
	ID, For, Key, Step string
	Until              *time.Time // nil: without end
	Since              time.Time
	Number             int
	Data               shownValue
	Event              string // which ends it
	Raise              bool   // the event may come from outside
	Requests           []openRequest
}

// openRequest is what was asked of people.
type openRequest struct {
	ID, Kind, Title, Status string
	Items                   int
	CreatedAt               time.Time
}

// executionWait reads what it waits for; the template says so when there is nothing.
func (room *Room) executionWait(ctx context.Context, v *visit) (any, error) {
	w := openWait{ID: v.About.(executionVisit).ID}
	var data string
	err := room.Read.QueryRow(ctx, `
		select left(coalesce(e.waiting_for, ''), 200), left(coalesce(e.waiting_key, ''), 1000), left(coalesce(e.waiting_step, ''), 1000), e.waiting_until, e.updated_at,
		       e.wait_number, left(coalesce(e.waiting_data::text, ''), 8192), octet_length(coalesce(e.waiting_data::text, '')),
		       coalesce(lanekeeper.agent_wait_event(e.waiting_for), '')
		  from agent_executions e where e.id = @id and e.status = 'waiting'`, postgres.Strict{"id": w.ID}).
		Scan(&w.For, &w.Key, &w.Step, &w.Until, &w.Since, &w.Number, &data, &w.Data.Bytes, &w.Event)
	if errors.Is(err, pgx.ErrNoRows) {
		return openWait{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read what the execution waits for: %w", err)
	}
	w.Data = shownJSON(data, w.Data.Bytes)
	switch w.For {
	case "response", "document", "signature", "test", "event":
		// A form that would change the key on its way is not offered.
		w.Raise = len(w.Key) <= maxEventKey && redact.Text(w.Key, maxValue) == w.Key && !strings.ContainsFunc(w.Key, tricky)
	}
	w.Key, w.Step = redact.Text(w.Key, maxValue), redact.Text(w.Step, maxValue)
	rows, err := room.Read.Query(ctx, `
		select r.id::text, r.kind, left(r.title, 400) as title, r.status, cardinality(r.items) as items, r.created_at
		  from agent_requests r where r.execution_id = @id order by r.id desc limit 20`, postgres.Strict{"id": w.ID})
	if err != nil {
		return nil, fmt.Errorf("read what was asked of people: %w", err)
	}
	if w.Requests, err = pgx.CollectRows(rows, pgx.RowToStructByName[openRequest]); err != nil {
		return nil, fmt.Errorf("read what was asked of people: %w", err)
	}
	return w, nil
}

// maxEventKey is how long the key of an event may be that comes over HTTP, in bytes.
const maxEventKey = 500
