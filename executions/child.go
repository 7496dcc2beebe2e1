package executions

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Child describes a child execution to start.
type Child struct {
	Flow     string
	Input    any
	ThreadID string // empty means the parent's thread
	// Wait makes the parent wait durably for the end of the child. A cancel of the parent then cancels the child.
	Wait bool
	// Timeout bounds that wait; the limit is a day. 0 means an hour, or longer while the child itself waits. See also
	// [Patient].
	Timeout time.Duration
	// KeepLanes prevents an awaited child from borrowing its parent's lanes.
	KeepLanes bool
	// Queue is the queue of the child; empty means the parent's. MaxAttempts and ProgressSeconds are those of [Spec].
	Queue                        string
	MaxAttempts, ProgressSeconds int
	// DedupeKey makes the start idempotent over all executions with the key.
	DedupeKey string
	// WaitData is an object for waiting_data, which the Engine Room shows.
	WaitData map[string]any `json:"-"`
}

// ChildResult is the result of Trigger. Without Child.Wait it has only the id.
type ChildResult struct {
	ExecutionID string          `json:"execution_id"`
	Status      Status          `json:"status"`
	Success     bool            `json:"success"`
	Summary     string          `json:"summary"`
	Error       string          `json:"error,omitempty"`
	Result      json.RawMessage `json:"result"`
	Variables   json.RawMessage `json:"variables"`
	TimedOut    bool            `json:"timed_out"` // the wait timed out: the child continues with lanes of its own
}

// identity is the Input of the step that starts the child. It omits the timeout, so new code may change the timeout of
// a running execution. The child's input is canonical, because a recorded value may have its members in another order.
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

// MaxDepth bounds the nesting of children, so flows that start one another recursively end.
const MaxDepth = 32

// ClassNesting is the error class of a child that would exceed MaxDepth.
const ClassNesting = "nesting"

// checkDepth fails if a child of the execution would exceed MaxDepth.
func checkDepth(ctx context.Context, tx pgx.Tx, id string) error {
	var ancestors int
	err := tx.QueryRow(ctx, `
		with recursive ancestry (id, parent_id, depth) as (
		  select x.id, x.parent_id, 0 from agent_executions x where x.id = @id
		  union all
		  select x.id, x.parent_id, a.depth + 1
		    from ancestry a
		    join agent_executions x on x.id = a.parent_id
		   where a.depth < @max_depth::int)
		select max(depth) from ancestry`, postgres.Strict{"id": id, "max_depth": MaxDepth}).Scan(&ancestors)
	if err != nil {
		return fmt.Errorf("count the ancestors of execution %s: %w", id, err)
	}
	if ancestors >= MaxDepth-1 {
		return &StepError{Class: ClassNesting, Message: fmt.Sprintf(
			"executions are nested %d deep, the limit: check whether they start one another without end", MaxDepth)}
	}
	return nil
}

// Trigger starts a child execution in the same trace. With Child.Wait, it waits for the end of the child, and the child
// may borrow the parent's lanes meanwhile. A failed child is a result, not an error.
func Trigger(ctx context.Context, name string, c Child) (ChildResult, error) {
	if c.Wait {
		if err := checkWaitAllowed(ctx, name); err != nil {
			return ChildResult{}, err
		}
	}
	id, _, err := startChild(ctx, name, c, c.Wait && !c.KeepLanes)
	if err != nil || !c.Wait {
		return ChildResult{ExecutionID: id}, err
	}
	return awaitChild(ctx, name, id, c)
}

// StartChild starts a child execution in the same trace without waiting. It returns the child's id and the key of the
// step. With Child.Wait, a cancel of the parent cancels the child, and the parent waits later, with [AwaitChild]. The
// child keeps to its own lanes. Several children that are started so run at the same time.
func StartChild(ctx context.Context, name string, c Child) (id, step string, err error) {
	return startChild(ctx, name, c, false)
}

// AwaitChild waits for the end of a child that [StartChild] started in a step. So the records of a wait belong to one
// child, in any order of the waits. For the timeout see [Child.Timeout]; after it the parent may wait again. A failed
// child is a result, not an error.
func AwaitChild(ctx context.Context, step, id string, timeout time.Duration) (ChildResult, error) {
	return awaitChild(ctx, strings.TrimPrefix(step, scopeOf(ctx)), id, Child{Timeout: timeout})
}

// startChild starts a child. inherits says whether it may borrow its parent's lanes.
func startChild(ctx context.Context, name string, c Child, inherits bool) (id, step string, err error) {
	r, err := runFrom(ctx)
	if err != nil {
		return "", "", err
	}
	identity, err := c.identity()
	if err != nil {
		return "", "", fmt.Errorf("trigger %s: %w", name, err)
	}
	var spec *stepSpec
	id, err = StepTx(ctx, name, func(ctx context.Context, tx pgx.Tx) (string, error) {
		thread := c.ThreadID
		if thread == "" && r.exec.ThreadID != nil {
			thread = *r.exec.ThreadID
		}
		if err := checkDepth(ctx, tx, r.exec.ID); err != nil {
			return "", err
		}
		child, _, err := r.e.StartTx(ctx, tx, Spec{
			Flow: c.Flow, Surface: trace.Surface(r.exec.Surface), TraceID: trace.ID(r.exec.TraceID), Agent: r.exec.Agent,
			Input: c.Input, ThreadID: thread, ParentID: r.exec.ID, Queue: cmp.Or(c.Queue, r.exec.Queue),
			Priority: r.exec.Priority, Awaited: c.Wait, Inherits: inherits, DedupeKey: c.DedupeKey,
			MaxAttempts: c.MaxAttempts, ProgressSeconds: c.ProgressSeconds,
		})
		return child.ID, err
	}, Input(identity), func(s *stepSpec) { spec = s })
	return id, spec.key, err
}

// awaitChild waits for the end of a child. Of c it reads Timeout and WaitData.
func awaitChild(ctx context.Context, name, id string, c Child) (ChildResult, error) {
	r, err := runFrom(ctx)
	if err != nil {
		return ChildResult{}, err
	}
	wait := Agent(id, c.Timeout)
	if c.WaitData != nil {
		wait = wait.WithData(c.WaitData)
	}
	outcome, err := Wait(ctx, name+" wait", wait)
	if err != nil {
		return ChildResult{}, err
	}
	return Step(ctx, name+" result", func(ctx context.Context) (ChildResult, error) {
		return ReadChild(ctx, r.e.pool, id, outcome.TimedOut)
	})
}

// ReadChild reads the present state of a child. timedOut says whether the wait for it timed out.
func ReadChild(ctx context.Context, db postgres.DB, id string, timedOut bool) (ChildResult, error) {
	x, err := Get(ctx, db, id)
	if err != nil {
		return ChildResult{}, fmt.Errorf("read child: %w", err)
	}
	result := ChildResult{
		ExecutionID: id, Status: x.Status, Success: x.Status == Completed, Summary: x.ResultSummary, Result: x.Result,
		Variables: x.Variables, TimedOut: timedOut && !x.Status.Ended(),
	}
	for _, message := range []*string{x.ErrorMessage, x.CancelReason} {
		if message != nil && result.Error == "" {
			result.Error = *message
		}
	}
	return result, nil
}
