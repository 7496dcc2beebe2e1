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

// Child is an execution that another one starts.
type Child struct {
	Flow     string
	Input    any
	ThreadID string // the parent's when empty
	// Wait makes the parent wait for the child's end, durably; the child is cancelled with it.
	Wait bool
	// Timeout of that wait: 0 is an hour, or as long as the child itself has to wait; the most is a day.
	Timeout time.Duration
	// KeepLanes keeps a child that is waited for from borrowing its parent's lanes.
	KeepLanes bool
	// DedupeKey makes the start one with every other of the same key, also in other executions.
	DedupeKey string
	// WaitData is what the wait shows to people, in waiting_data.
	WaitData map[string]any `json:"-"`
}

// Triggered is what a parent learns of a child. Without Wait there is only its id.
type Triggered struct {
	ExecutionID string          `json:"execution_id"`
	Status      Status          `json:"status"`
	Success     bool            `json:"success"`
	Summary     string          `json:"summary"`
	Error       string          `json:"error,omitempty"`
	Result      json.RawMessage `json:"result"`
	Variables   json.RawMessage `json:"variables"`
	TimedOut    bool            `json:"timed_out"` // the wait: the child goes on, under lanes of its own
}

// identity is what makes a child the one that was started: not how long it is waited for, which code may change under a
// running execution. The input is written in one way, because what came out of a record has its members in another
// order than before.
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

// MaxDepth is how many executions may be nested as children of children. Flows that start one another without end are
// stopped there.
const MaxDepth = 32

// ClassNesting is the class of a child that would be nested too deep.
const ClassNesting = "nesting"

// checkDepth fails where an execution has Deepest ancestors already.
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
			"executions are nested %d deep, which is the most: do they start one another without end?", MaxDepth)}
	}
	return nil
}

// Trigger starts a child execution of the same trace and, if asked to, waits for its end. A child that failed is a
// result, not an error. While the parent waits the child may act in the lanes that the parent holds.
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
