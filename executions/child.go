package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Child describes a child execution to start.
type Child struct {
	Flow     string
	Input    any
	ThreadID string // the parent's when empty
	// Wait makes the parent wait durably for the child's end; a cancel of the parent cancels the child.
	Wait bool
	// Timeout bounds that wait: 0 is an hour, or longer while the child itself waits; the limit is a day.
	Timeout time.Duration
	// KeepLanes stops an awaited child from borrowing its parent's lanes.
	KeepLanes bool
	// DedupeKey makes the start idempotent over all executions with the key.
	DedupeKey string
	// WaitData is an object for waiting_data, which the Engine Room shows.
	WaitData map[string]any `json:"-"`
}

// Triggered is the result of a child. Without Wait it has only the id.
type Triggered struct {
	ExecutionID string          `json:"execution_id"`
	Status      Status          `json:"status"`
	Success     bool            `json:"success"`
	Summary     string          `json:"summary"`
	Error       string          `json:"error,omitempty"`
	Result      json.RawMessage `json:"result"`
	Variables   json.RawMessage `json:"variables"`
	TimedOut    bool            `json:"timed_out"` // the wait timed out: the child continues with lanes of its own
}

// identity is the input of the step that starts the child. It leaves out the timeout, which code may change under a
// running execution. The input is canonical, because a recorded value has its members in another order.
func (c Child) identity() (any, error) {
	input, _, err := encode(c.Input)
	if err == nil {
		input, err = canonicalJSON(input)
	}
	if err != nil {
		return nil, fmt.Errorf("encode input: %w", err)
	}
	return map[string]any{"flow": c.Flow, "input": input, "thread_id": c.ThreadID, "wait": c.Wait}, nil
}

// MaxDepth bounds the nesting of children, so flows that start one another end.
const MaxDepth = 32

// ClassNesting is the error class of a child that is nested too deep.
const ClassNesting = "nesting"

// checkDepth fails if an execution has MaxDepth ancestors already.
func checkDepth(ctx context.Context, tx pgx.Tx, id string) error {
	var ancestors int
	err := tx.QueryRow(ctx, `
		with recursive line (id, parent_id, above) as (
		  select x.id, x.parent_id, 0 from agent_executions x where x.id = @id
		  union all
		  select x.id, x.parent_id, line.above + 1 from line join agent_executions x on x.id = line.parent_id
		   where line.above < @deepest::int)
		select max(above) from line`, postgres.Strict{"id": id, "deepest": MaxDepth}).Scan(&ancestors)
	if err != nil {
		return fmt.Errorf("count the ancestors of execution %s: %w", id, err)
	}
	if ancestors >= MaxDepth-1 {
		return &StepError{Class: ClassNesting, Message: fmt.Sprintf(
			"executions are nested %d deep, the limit: check whether they start one another without end", MaxDepth)}
	}
	return nil
}

// Trigger starts a child execution of the same trace. With Wait, it waits for the child's end. A failed child is a
// result, not an error. While the parent waits, the child may use the parent's lanes.
func Trigger(ctx context.Context, name string, c Child) (Triggered, error) {
	r, err := runFrom(ctx)
	if err == nil && c.Wait {
		err = checkWaitAllowed(ctx, name)
	}
	if err != nil {
		return Triggered{}, err
	}
	identity, err := c.identity()
	if err != nil {
		return Triggered{}, fmt.Errorf("trigger %s: %w", name, err)
	}
	id, err := StepTx(ctx, name, func(ctx context.Context, tx pgx.Tx) (string, error) {
		thread := c.ThreadID
		if thread == "" && r.exec.ThreadID != nil {
			thread = *r.exec.ThreadID
		}
		if err := checkDepth(ctx, tx, r.exec.ID); err != nil {
			return "", err
		}
		child, _, err := r.e.StartTx(ctx, tx, Spec{
			Flow: c.Flow, Surface: trace.Surface(r.exec.Surface), TraceID: trace.ID(r.exec.TraceID), Agent: r.exec.Agent,
			Input: c.Input, ThreadID: thread, ParentID: r.exec.ID, Queue: r.exec.Queue, Priority: r.exec.Priority,
			Awaited: c.Wait, Inherits: c.Wait && !c.KeepLanes, DedupeKey: c.DedupeKey,
		})
		return child.ID, err
	}, Input(identity))
	if err != nil || !c.Wait {
		return Triggered{ExecutionID: id}, err
	}
	wait := Agent(id, c.Timeout)
	if c.WaitData != nil {
		wait = wait.WithData(c.WaitData)
	}
	out, err := Wait(ctx, name+" wait", wait)
	if err != nil {
		return Triggered{}, err
	}
	return Step(ctx, name+" result", func(ctx context.Context) (Triggered, error) {
		x, err := Get(ctx, r.e.pool, id)
		if err != nil {
			return Triggered{}, fmt.Errorf("read child: %w", err)
		}
		got := Triggered{
			ExecutionID: id, Status: x.Status, Success: x.Status == Completed, Summary: x.ResultSummary, Result: x.Result,
			Variables: x.Variables, TimedOut: out.TimedOut,
		}
		if x.ErrorMessage != nil {
			got.Error = *x.ErrorMessage
		}
		return got, nil
	})
}
