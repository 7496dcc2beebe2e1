package skills

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
	"github.com/lanekeeper/lanekeeper/trace"
)

// A skill with the handler flow:NAME starts an execution of a flow, with the arguments of the call as its input. The
// result names the execution. With the option wait, the call also waits for its end, for as long as the skill's timeout
// allows. A repeated call with the same idempotency key gets the execution of the first one.

// FlowRequest requests an execution of a flow. Input holds the validated arguments.
type FlowRequest struct {
	Flow  string
	Input json.RawMessage
	Wait  bool   // wait for the end of the execution, until the context ends
	Key   string // requests with the same key share one execution; may be empty
}

// FlowAnswer describes the execution that a flow: skill started. With Wait, it has the final status, or the status
// shortly before the skill's timeout. The execution continues after the timeout.
type FlowAnswer struct {
	ExecutionID string            `json:"execution_id"`
	Status      executions.Status `json:"status"`
	Summary     string            `json:"summary,omitempty"` // cut at 64 KiB
	Error       string            `json:"error,omitempty"`
	Variables   json.RawMessage   `json:"variables,omitempty"` // omitted above 64 KiB
	Result      json.RawMessage   `json:"result,omitempty"`    // omitted above 64 KiB
}

// RunFlow starts an execution for a flow: skill. It is safe for concurrent use.
type RunFlow func(ctx context.Context, r FlowRequest) (FlowAnswer, error)

type flowHandler struct {
	flow string
	wait bool
}

// parseFlow reads flow:NAME and the option to wait.
func parseFlow(name string, config json.RawMessage) (handler, fielderr.List) {
	var c struct {
		Wait bool `json:"wait"`
	}
	if err := decodeConfig(config, &c); err != nil {
		return nil, []error{err}
	}
	if err := executions.CheckName(name); err != nil {
		return nil, []error{fmt.Errorf("handler: the flow %w", err)}
	}
	return flowHandler{flow: name, wait: c.Wait}, nil
}

func (h flowHandler) ready(r *Registry) error {
	if r.flow == nil {
		return errors.New("this program runs no flows")
	}
	return nil
}

func (h flowHandler) call(ctx context.Context, r *Registry, c Call, args map[string]any) (any, error) {
	input, err := json.Marshal(args)
	if err != nil {
		return nil, newCallError(ClassHandler, "the arguments cannot be passed on: %s", err)
	}
	got, err := r.flow(ctx, FlowRequest{Flow: h.flow, Input: input, Wait: h.wait, Key: c.IdempotencyKey})
	if err == nil && h.wait && got.Status.Ended() && got.Status != executions.Completed {
		class := ClassFlowFailed
		if got.Status == executions.Cancelled {
			class = ClassFlowCancelled
		}
		return nil, newCallError(class, "execution %s of flow %s is %s: %s", got.ExecutionID, h.flow, got.Status,
			got.Error)
	}
	return got, err
}

const maxFlowResult = 64 << 10

// Flows runs flows with an engine, for Options.Flow. Inside an execution, the new execution is a child with the same
// trace, surface, agent and thread. Elsewhere the new execution has its own trace and acts as agent.
func Flows(db postgres.Beginner, e *executions.Engine, agent string) RunFlow {
	return func(ctx context.Context, r FlowRequest) (FlowAnswer, error) {
		switch exists, err := canStart(ctx, e, r.Flow); {
		case err != nil:
			return FlowAnswer{}, err
		case !exists:
			return FlowAnswer{}, newCallError(ClassHandler, "there is no flow %q; see agent flows ls", r.Flow)
		}
		s := executions.Spec{Flow: r.Flow, Surface: trace.Flow, Agent: agent, Input: r.Input}
		if r.Key != "" {
			s.DedupeKey = "skill " + r.Key
		}
		if caller, inside := executions.Current(ctx); inside {
			s.Surface, s.TraceID, s.Agent = trace.Surface(caller.Surface), trace.ID(caller.TraceID), caller.Agent
			s.ParentID, s.Priority, s.Awaited = caller.ID, caller.Priority, r.Wait
			if caller.ThreadID != nil {
				s.ThreadID = *caller.ThreadID
			}
		}
		x, _, err := e.Start(ctx, db, s)
		if err != nil {
			return FlowAnswer{}, err
		}
		if r.Wait {
			x, err = awaitEnd(ctx, db, e, x)
		}
		return flowAnswer(x), err
	}
}

// canStart reports whether a flow can start: it is registered or stored, or external workers run it.
func canStart(ctx context.Context, e *executions.Engine, flow string) (bool, error) {
	if executions.CanClaim(flow) {
		return true, nil
	}
	return e.HasFlow(ctx, flow)
}

// maxAnswerTime bounds the time before the deadline that is reserved for the answer about an unfinished execution.
const maxAnswerTime = time.Second

// awaitEnd waits until an execution ends or the deadline is near, and returns its present state.
func awaitEnd(
	ctx context.Context, db postgres.DB, e *executions.Engine, x executions.Execution,
) (executions.Execution, error) {
	waitCtx := ctx
	if deadline, limited := ctx.Deadline(); limited {
		remaining := time.Until(deadline)
		within, cancel := context.WithTimeout(ctx, remaining-min(remaining/10, maxAnswerTime))
		defer cancel()
		waitCtx = within
	}
	ended, err := e.Await(waitCtx, x.ID)
	switch {
	case err == nil:
		return ended, nil
	case ctx.Err() != nil:
		return x, context.Cause(ctx)
	case waitCtx.Err() != nil:
		if now, err := executions.Get(ctx, db, x.ID); err == nil {
			x = now
		}
		return x, nil // without the id of the execution, a model would start another one
	}
	return x, fmt.Errorf("wait for execution %s: %w", x.ID, err)
}

func flowAnswer(x executions.Execution) FlowAnswer {
	got := FlowAnswer{ExecutionID: x.ID, Status: x.Status}
	if x.Status.Ended() {
		got.Summary = textcut.Text(x.ResultSummary, maxFlowResult)
		if len(x.Variables) <= maxFlowResult {
			got.Variables = x.Variables
		}
		if len(x.Result) <= maxFlowResult {
			got.Result = x.Result
		}
		if x.ErrorMessage != nil {
			got.Error = textcut.Text(*x.ErrorMessage, maxFlowResult)
		}
	}
	return got
}
