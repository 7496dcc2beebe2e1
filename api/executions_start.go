package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

type startRequest struct {
	Flow              string          `json:"flow"`
	Input             json.RawMessage `json:"input,omitempty"`
	ThreadID          string          `json:"thread_id,omitempty"`
	ChatKey           string          `json:"chat_key,omitempty" doc:"gets access to the thread under its id"`
	ParentID          string          `json:"parent_id,omitempty"`
	WaitForCompletion bool            `json:"wait_for_completion,omitempty" doc:"the parent waits: a cancel reaches the child, and the child uses the parent's thread; the parent then releases its lock with waiting_for agent"`
	CanInheritLock    *bool           `json:"can_inherit_lock,omitempty" doc:"with wait_for_completion: inherit the parent's lanes; default true"`

	OnLost          string            `json:"on_lost,omitempty" doc:"external: fail (default) or hand_on; other flows: resume (default) or fail"`
	ProgressSeconds int               `json:"progress_seconds,omitempty" doc:"0 is no bound"`
	Queue           string            `json:"queue,omitempty" doc:"default background"`
	Priority        int               `json:"priority,omitempty" doc:"1 first … 4 last; default 2"`
	Reason          string            `json:"reason,omitempty" doc:"for the audit log"`
	Labels          executions.Labels `json:"labels,omitempty" doc:"the subject, such as order: A-1001; at most 8 labels"`
}

// lossPolicies are the values of on_lost.
var lossPolicies = []string{"fail", "hand_on", "resume"}

type executionStatus struct {
	ID      string            `json:"id"`
	TraceID string            `json:"trace_id"`
	Status  executions.Status `json:"status"`
}

// maxProgress bounds progress_seconds: 30 days.
const maxProgress = 30 * 24 * 60 * 60

// check validates the fields that need no database.
func (b startRequest) check() error {
	switch {
	case b.Flow == "" || !isPrintableText(b.Flow):
		return problem.BadBody("flow is missing: name a flow, or %s for an external worker", executions.External)
	case b.ParentID != "" && !uuidForm.MatchString(b.ParentID):
		return problem.BadBody("parent_id is %.60q, not the id of an execution", b.ParentID)
	case b.WaitForCompletion && b.ParentID == "":
		return problem.BadBody("wait_for_completion needs parent_id: the execution that waits")
	case b.CanInheritLock != nil && !b.WaitForCompletion:
		return problem.BadBody("can_inherit_lock needs wait_for_completion: only a waiting parent lends its lanes")
	case b.OnLost != "" && !slices.Contains(lossPolicies, b.OnLost):
		return problem.BadBody("on_lost is %.60q; use fail, hand_on (external workers) or resume (flows)", b.OnLost)
	case b.OnLost == "resume" && executions.IsExternal(b.Flow):
		return problem.BadBody("on_lost is resume; external executions accept fail or hand_on")
	case b.OnLost == "hand_on" && !executions.IsExternal(b.Flow):
		return problem.BadBody("on_lost is hand_on; flows that the server runs accept resume or fail")
	case b.ProgressSeconds < 0 || b.ProgressSeconds > maxProgress:
		return problem.BadBody("progress_seconds is %d; use 0 (no bound) to %d", b.ProgressSeconds, maxProgress)
	case !slices.Contains([]string{"", executions.Background, executions.Interactive}, b.Queue):
		return problem.BadBody("queue is %.60q; use %s or %s", b.Queue, executions.Background, executions.Interactive)
	case b.Priority < 0 || b.Priority > 4:
		return problem.BadBody("priority is %d; use 1 (first) to 4 (last)", b.Priority)
	}
	switch {
	case b.ChatKey != "" && b.ThreadID == "":
		return problem.BadBody("chat_key needs thread_id: name the thread to open to the key")
	case !isPrintableText(b.Reason) || len(b.Reason) > maxReason:
		return problem.BadBody("reason has at most %d bytes of text", maxReason)
	case !isPrintableText(b.ChatKey) || len(b.ChatKey) > 200:
		return problem.BadBody("chat_key has at most 200 bytes of text")
	}
	if err := b.Labels.Validate(); err != nil {
		return problem.BadBody("%s", err)
	}
	if b.ThreadID != "" {
		if err := threads.CheckID(b.ThreadID); err != nil {
			return problem.BadBody("thread_id: %s", err)
		}
	}
	return nil
}

// reservedFlows maps each flow that only a surface may start to the way to start it.
var reservedFlows = map[string]string{
	"heartbeat":    "agent heartbeat runs one now",
	"operate":      "POST /v1/operate talks to the agent",
	"chat":         "POST /v1/chat/completions talks to the agent",
	"chat_relay":   "the chat starts it",
	"chat_summary": "the chat starts it",
	"webhook":      "POST /webhooks/{endpoint} delivers",
	"automation":   "POST /v1/automations/{id}/run runs an automation",
	"delegate":     "the agent starts it",
	"eval":         "agent eval run runs suites",
	"mcp.call":     "an MCP client calls skills",
	"skill_call":   "agent skills call calls a skill",
}

// startExecution starts an execution for the admin, or for a parent in the parent's trace. A thread that it opens stays
// if the start then fails.
func (s *server) startExecution(r request) (response, error) {
	b := r.body.(startRequest)
	if err := s.auth.checkChatKey(b.ChatKey); err != nil {
		return response{}, err
	}
	if err := s.startable(r.Context(), b.Flow, b.Input); err != nil {
		return response{}, err
	}
	spec := executions.Spec{
		Flow: b.Flow, Surface: trace.Flow, ThreadID: b.ThreadID, Queue: b.Queue, Priority: b.Priority, OnLost: b.OnLost,
		ProgressSeconds: b.ProgressSeconds, DedupeKey: startKey(r.Request, b), Labels: b.Labels,
	}
	if len(b.Input) > 0 && string(b.Input) != "null" {
		spec.Input = b.Input
	}
	if b.ParentID != "" {
		parent, err := s.parent(r.Context(), b.ParentID)
		if err != nil {
			return response{trace: parent.TraceID}, err
		}
		spec.ParentID, spec.TraceID, spec.Agent = parent.ID, trace.ID(parent.TraceID), parent.Agent
		spec.Surface = trace.Surface(parent.Surface)
		spec.Awaited, spec.Inherits = b.WaitForCompletion, b.WaitForCompletion &&
			(b.CanInheritLock == nil || *b.CanInheritLock)
		if b.WaitForCompletion && spec.ThreadID == "" {
			spec.ThreadID = postgres.Deref(parent.ThreadID)
		}
	} else {
		acting, err := s.agents.Default(r.Context(), s.pool)
		if err != nil {
			return response{}, err
		}
		spec.Agent = acting.Name
	}
	if err := startError(flows.CheckThread(r.Context(), s.pool, b.Flow, spec.ThreadID)); err != nil {
		return response{}, err
	}
	if b.ThreadID != "" { // an execution may create its thread
		if err := s.openForFlow(r.Context(), b, spec.Agent); err != nil {
			return response{}, err
		}
	}
	var x executions.Execution
	err := withFreshKey(r.Context(), s.pool, spec.DedupeKey, func(key string) (_ string, err error) {
		spec.DedupeKey = key
		x, _, err = s.engine.StartByAdmin(executions.WithLockTimeout(r.Context(), postgres.LockRetryTimeout), spec, b.Reason)
		return x.ID, err
	})
	if err != nil {
		return response{}, valueError(err)
	}
	if err := activity.Link(r.Context(), s.pool, trace.ID(x.TraceID)); err != nil {
		s.log.WarnContext(r.Context(), "caller's trace not linked", "trace_id", x.TraceID, "error", err)
	}
	return response{body: executionStatus{x.ID, x.TraceID, x.Status}, trace: x.TraceID}, nil
}

// startKey derives the dedupe key of a start.
func startKey(r *http.Request, b startRequest) string {
	parts := []string{b.Flow, string(b.Input), b.ThreadID, b.ParentID}
	if b.WaitForCompletion {
		parts = append(parts, "waited for")
	}
	return derivedKey(r, parts...)
}

// openForFlow gives the flow, and the named chat key, access to the thread.
func (s *server) openForFlow(ctx context.Context, b startRequest, agent string) error {
	err := postgres.InTx(ctx, s.pool, func(tx pgx.Tx) error {
		err := threads.OpenForFlow(ctx, tx, b.ThreadID, b.Flow, b.ParentID, agent)
		if err == nil && b.ChatKey != "" {
			_, err = threads.Grant(ctx, tx, b.ThreadID, threads.Key(b.ChatKey), b.ThreadID, actorName(ctx))
		}
		return err
	})
	switch {
	case errors.Is(err, threads.ErrNotFound):
		return problem.New(http.StatusNotFound, "thread_id: %s", threads.ErrNotFound)
	case errors.Is(err, threads.ErrTaken):
		return problem.New(http.StatusConflict, "the key %s already has a thread %q; choose another thread_id",
			b.ChatKey, b.ThreadID)
	}
	return err
}

func (s *server) parent(ctx context.Context, id string) (executions.Execution, error) {
	parent, err := executions.Get(ctx, s.pool, id)
	switch {
	case errors.Is(err, executions.ErrNotFound):
		return parent, problem.New(http.StatusNotFound, "parent_id: no execution %s", id).
			Kind("unknown-parent", "Unknown parent")
	case err == nil && parent.Status.Ended():
		err = problem.New(http.StatusConflict, "parent_id: execution %s has ended: %s", id,
			parent.Status).Kind("run-ended", "Run ended")
	}
	return parent, err
}

// startable validates that this route may start the flow.
func (s *server) startable(ctx context.Context, flow string, input json.RawMessage) error {
	if executions.CanClaim(flow) {
		return nil
	}
	if instead, reserved := reservedFlows[executions.ReservedName(flow)]; reserved {
		return problem.New(http.StatusUnprocessableEntity, "flow %s cannot be started here: %s", flow, instead).
			Kind("reserved-flow", "Reserved flow")
	}
	known, err := s.engine.HasFlow(ctx, flow)
	if err != nil {
		return err
	}
	if known {
		return startError(flows.CheckStart(ctx, s.pool, flow, input))
	}
	if executions.IsExternal(flow) {
		return problem.New(http.StatusUnprocessableEntity, "flow %.100q is not for workers outside: name it external, or "+
			"external:NAME, with a NAME of 1 to 100 letters, digits and ._- that begins with a letter or digit", flow).
			Kind("unknown-flow", "Unknown flow")
	}
	names, err := s.flowNames(ctx)
	if err != nil {
		return err
	}
	meant := ""
	if near := nearest.To(flow, names); near != "" {
		meant = fmt.Sprintf("; did you mean %s?", near)
	}
	return problem.New(http.StatusUnprocessableEntity, "no flow %.100q%s (known: %.1000s)", flow, meant,
		strings.Join(names, ", ")).
		Kind("unknown-flow", "Unknown flow")
}

// startError maps the errors of flows.CheckStart and flows.CheckThread to problems.
func startError(err error) error {
	_, wrong := errors.AsType[*flows.InvalidInput](err)
	switch {
	case wrong:
		return problem.New(http.StatusUnprocessableEntity, "input: %s", err).Kind("invalid-input", "Invalid input")
	case errors.Is(err, flows.ErrRemoved):
		return problem.New(http.StatusUnprocessableEntity, "%s", err).Kind("removed-flow", "Removed flow")
	case errors.Is(err, flows.ErrNoThread):
		return problem.New(http.StatusUnprocessableEntity, "thread_id is missing: %s; a new thread_id begins a thread", err).
			Kind("no-thread", "No thread")
	}
	return err
}

// flowNames lists the startable flows.
func (s *server) flowNames(ctx context.Context) ([]string, error) {
	names, err := postgres.Values[string](ctx, s.pool, "list flows",
		`select name from agent_flows where current order by name limit 200`)
	if err != nil {
		return nil, err
	}
	inGo, err := s.engine.Flows(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range inGo {
		if _, reserved := reservedFlows[executions.ReservedName(name)]; !reserved {
			names = append(names, name)
		}
	}
	names = append(names, executions.External)
	slices.Sort(names)
	return slices.Compact(names), nil
}
