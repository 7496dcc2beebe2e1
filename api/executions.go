package api

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

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

// admin is who acts through this API, in the rows that name somebody.
const admin = activity.Admin

var uuidForm = regexp.MustCompile(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)

// executionDetail is the row with what it has recorded last and what it waits for, as it may be shown.
type executionDetail struct {
	executions.Execution
	Checkpoint *executions.Checkpoint `json:"checkpoint"` // the latest; null before the first
	Waits      []wait                 `json:"waits"`      // those open now
}

// wait is what an execution waits for.
type wait struct {
	Number int             `json:"number"` // counts the waits of the execution
	For    string          `json:"waiting_for"`
	Key    string          `json:"waiting_key"`
	Until  *time.Time      `json:"waiting_until"`
	Data   json.RawMessage `json:"waiting_data"`
}

// cancelled is the status an execution has after a cancel.
type cancelled struct {
	ID      string            `json:"id"`
	TraceID string            `json:"trace_id"`
	Status  executions.Status `json:"status"`
	// Another transaction has it locked: it is cancelled when that ends. Detail says what may be in the way.
	CancelRequested bool   `json:"cancel_requested,omitempty"`
	Detail          string `json:"detail,omitempty"`
}

func (s *server) listExecutions(r request) (answer, error) {
	got, err := paged("executions", r.query, func(x executions.Execution) string { return x.ID },
		func(before string, limit int) ([]executions.Execution, error) {
			return executions.List(r.Context(), s.pool, executions.Filter{
				Status: r.query["status"], Surface: r.query["surface"], Flow: r.query["flow"], Agent: r.query["agent"],
				TraceIDs: r.query.traceIDs(), Before: before, Limit: limit,
			})
		})
	for i := range got.Items {
		got.Items[i] = got.Items[i].Redacted()
	}
	return answer{body: got}, err
}

func (s *server) getExecution(r request) (answer, error) {
	x, err := s.execution(r)
	if err != nil {
		return answer{}, err
	}
	recorded, err := executions.Checkpoints(r.Context(), s.pool, x.ID)
	if err != nil {
		return answer{trace: x.TraceID}, err
	}
	x = x.Redacted()
	detail := executionDetail{Execution: x, Waits: []wait{}}
	if len(recorded) > 0 {
		detail.Checkpoint = new(recorded[len(recorded)-1].Redacted())
	}
	if x.Status == executions.Waiting {
		w := wait{Number: x.WaitNumber, Until: x.WaitingUntil, Data: x.WaitingData}
		w.For, w.Key = value(x.WaitingFor), value(x.WaitingKey)
		detail.Waits = append(detail.Waits, w)
	}
	return answer{body: detail, trace: x.TraceID}, nil
}

func (s *server) cancelExecution(r request) (answer, error) {
	x, err := s.execution(r)
	if err != nil {
		return answer{}, err
	}
	status, err := s.engine.Cancel(r.Context(), x.ID, admin, r.body.(because).Reason)
	if err != nil {
		return answer{trace: x.TraceID}, err
	}
	got := cancelled{ID: x.ID, TraceID: x.TraceID, Status: status}
	if status.Ended() {
		return answer{body: got, trace: x.TraceID}, nil
	}
	if got.Detail, err = executions.CancelDetail(r.Context(), s.pool); err != nil {
		return answer{trace: x.TraceID}, err
	}
	got.CancelRequested = true
	return answer{body: got, trace: x.TraceID, status: http.StatusAccepted}, nil
}

// execution is the one that the path names.
func (s *server) execution(r request) (executions.Execution, error) {
	id, err := uuidIn(r, "an execution")
	if err != nil {
		return executions.Execution{}, err
	}
	return executions.Get(r.Context(), s.pool, id)
}

// uuidIn is the id in the path, which is that of a thing.
func uuidIn(r request, thing string) (string, error) {
	id := r.PathValue("id")
	if !uuidForm.MatchString(id) {
		return "", problem.New(http.StatusBadRequest, "%.60q is not the id of %s, which is a uuid", id, thing).
			Kind("malformed-id", "Malformed id")
	}
	return id, nil
}

// value is what a pointer leads to; zero for nil.
func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

// maxProgress bounds progress_seconds: 30 days.
const maxProgress = 30 * 24 * 60 * 60

// beginning is an execution to start.
type beginning struct {
	Flow     string          `json:"flow"`
	Input    json.RawMessage `json:"input,omitempty"`
	ThreadID string          `json:"thread_id,omitempty"`
	ChatKey  string          `json:"chat_key,omitempty"` // may speak in the thread, and calls it by its id
	ParentID string          `json:"parent_id,omitempty"`
	// The parent waits for it: it is cancelled with the parent, and speaks in the parent's thread. The parent then gives
	// its lock back with waiting_for agent.
	WaitForCompletion bool  `json:"wait_for_completion,omitempty"`
	CanInheritLock    *bool `json:"can_inherit_lock,omitempty"` // of one that is waited for: whether it may act in the parent's lanes; true when left out

	OnLost          string `json:"on_lost,omitempty"`          // fail (standard for workers outside), hand_on, or resume (this program's own)
	ProgressSeconds int    `json:"progress_seconds,omitempty"` // 0 is no bound
	Queue           string `json:"queue,omitempty"`            // background (standard) or interactive
	Priority        int    `json:"priority,omitempty"`         // 1 first … 4 last; standard 2
	Reason          string `json:"reason,omitempty"`           // kept in the audit
}

// executionStatus is an execution and the status it has.
type executionStatus struct {
	ID      string            `json:"id"`
	TraceID string            `json:"trace_id"`
	Status  executions.Status `json:"status"`
}

var externalForm = regexp.MustCompile(`^external(:[a-zA-Z0-9][a-zA-Z0-9._-]{0,99})?$`)

// ofASurface are the flows that nothing but their surface may start, with how that is done.
var ofASurface = map[string]string{
	"heartbeat":    "agent heartbeat runs one now",
	"operate":      "POST /v1/operate talks with the agent",
	"chat":         "POST /v1/chat/completions talks with the agent",
	"chat_relay":   "the chat starts it by itself",
	"chat_summary": "the chat starts it by itself",
	"webhook":      "POST /webhooks/{endpoint} delivers",
	"automation":   "POST /v1/automations/{id}/run runs an automation",
	"delegate":     "the agent starts it by itself",
	"mcp.call":     "an MCP client calls skills",
	"skill_call":   "agent skills call calls a skill",
}

// ReservedFlows are the names of the flows that only the program itself starts.
func ReservedFlows() []string { return slices.Sorted(maps.Keys(ofASurface)) }

func (b beginning) check() error {
	switch {
	case b.Flow == "" || !storable(b.Flow):
		return badBody("flow is missing: name the flow to run, %s for a worker outside", executions.External)
	case b.ParentID != "" && !uuidForm.MatchString(b.ParentID):
		return badBody("parent_id is %.60q, which is not the id of an execution", b.ParentID)
	case b.WaitForCompletion && b.ParentID == "":
		return badBody("wait_for_completion needs parent_id: the execution that waits")
	case b.CanInheritLock != nil && !b.WaitForCompletion:
		return badBody("can_inherit_lock belongs to wait_for_completion: a parent that does not wait lends nothing")
	case !slices.Contains([]string{"", "fail", "hand_on", "resume"}, b.OnLost):
		return badBody("on_lost is %.60q; it can be fail or hand_on", b.OnLost)
	case b.OnLost == "resume" && executions.IsExternal(b.Flow):
		return badBody("on_lost is resume, which is for runs of this program's own; a worker outside's can fail or hand_on")
	case b.ProgressSeconds < 0 || b.ProgressSeconds > maxProgress:
		return badBody("progress_seconds is %d; it can be 0 (no bound) to %d", b.ProgressSeconds, maxProgress)
	case !slices.Contains([]string{"", executions.Background, executions.Interactive}, b.Queue):
		return badBody("queue is %.60q; it can be %s or %s", b.Queue, executions.Background, executions.Interactive)
	case b.Priority < 0 || b.Priority > 4:
		return badBody("priority is %d; it can be 1 (first) to 4 (last)", b.Priority)
	}
	switch {
	case b.ChatKey != "" && b.ThreadID == "":
		return badBody("chat_key is of no use without thread_id: name the thread that the key may speak in")
	case !storable(b.Reason) || len(b.Reason) > maxReason:
		return badBody("reason has at most %d bytes of text", maxReason)
	case !storable(b.ChatKey) || len(b.ChatKey) > 200:
		return badBody("chat_key has at most 200 bytes of text")
	}
	if b.ThreadID != "" {
		if err := threads.CheckID(b.ThreadID); err != nil {
			return badBody("thread_id: %s", err)
		}
	}
	return nil
}

func (s *server) startExecution(r request) (answer, error) {
	b := r.body.(beginning)
	if err := s.startable(r.Context(), b.Flow, b.Input); err != nil {
		return answer{}, err
	}
	spec := executions.Spec{
		Flow: b.Flow, Surface: trace.Flow, ThreadID: b.ThreadID, Queue: b.Queue, Priority: b.Priority, OnLost: b.OnLost,
		ProgressSeconds: b.ProgressSeconds, DedupeKey: keyedStart(r.Request, b),
	}
	if len(b.Input) > 0 && string(b.Input) != "null" {
		spec.Input = b.Input
	}
	if b.ParentID != "" {
		parent, err := s.parent(r.Context(), b.ParentID)
		if err != nil {
			return answer{trace: parent.TraceID}, err
		}
		spec.ParentID, spec.TraceID, spec.Agent = parent.ID, trace.ID(parent.TraceID), parent.Agent
		spec.Surface = trace.Surface(parent.Surface)
		spec.Awaited, spec.Inherits = b.WaitForCompletion, b.WaitForCompletion && (b.CanInheritLock == nil || *b.CanInheritLock)
		if b.WaitForCompletion && spec.ThreadID == "" {
			spec.ThreadID = value(parent.ThreadID)
		}
	}
	if b.ThreadID != "" { // a run may begin a conversation
		if err := s.openForFlow(r.Context(), b, spec.Agent); err != nil {
			return answer{}, err
		}
	}
	var x executions.Execution
	err := onceMore(r.Context(), s.pool, spec.DedupeKey, func(key string) (_ string, err error) {
		spec.DedupeKey = key
		x, err = s.start(r.Context(), spec, b.Reason)
		return x.ID, err
	})
	if err != nil {
		return answer{}, refusedValue(err)
	}
	if err := activity.Link(r.Context(), s.pool, trace.ID(x.TraceID)); err != nil {
		s.log.WarnContext(r.Context(), "caller's trace not linked", "trace_id", x.TraceID, "error", err)
	}
	return answer{body: executionStatus{x.ID, x.TraceID, x.Status}, trace: x.TraceID}, nil
}

// start starts an execution, by the admin, or for the parent that asks for a child. It waits for a moment for an
// idempotency key that an open transaction holds.
func (s *server) start(ctx context.Context, spec executions.Spec, reason string) (x executions.Execution, err error) {
	ctx = executions.WithLockTimeout(ctx, postgres.LockPatience)
	if spec.ParentID != "" {
		x, _, err = s.engine.Start(ctx, s.pool, spec)
	} else {
		x, _, err = s.engine.StartByAdmin(ctx, spec, reason)
	}
	return x, err
}

// openForFlow makes sure that the flow may speak in its thread, and lets the chat key in that is named.
func (s *server) openForFlow(ctx context.Context, b beginning, agent string) error {
	err := postgres.InTx(ctx, s.pool, func(tx pgx.Tx) error {
		err := threads.OpenForFlow(ctx, tx, b.ThreadID, b.Flow, b.ParentID, agent)
		if err == nil && b.ChatKey != "" {
			_, err = threads.Let(ctx, tx, b.ThreadID, threads.Key(b.ChatKey), b.ThreadID, admin)
		}
		return err
	})
	switch {
	case errors.Is(err, threads.ErrNotFound):
		return problem.New(http.StatusNotFound, "thread_id: %s", threads.ErrNotFound)
	case errors.Is(err, threads.ErrTaken):
		return problem.New(http.StatusConflict, "the key %s has a thread %q of its own; choose another thread_id", b.ChatKey, b.ThreadID)
	}
	return err
}

// parent is the execution that another is to belong to.
func (s *server) parent(ctx context.Context, id string) (executions.Execution, error) {
	parent, err := executions.Get(ctx, s.pool, id)
	switch {
	case errors.Is(err, executions.ErrNotFound):
		return parent, problem.New(http.StatusNotFound, "parent_id: there is no execution %s", id).
			Kind("unknown-parent", "Unknown parent")
	case err == nil && parent.Status.Ended():
		err = problem.New(http.StatusConflict, "parent_id: execution %s has ended: %s", id, parent.Status).Kind("run-ended", "Run ended")
	}
	return parent, err
}

// startable says why a flow cannot be started here.
func (s *server) startable(ctx context.Context, flow string, input json.RawMessage) error {
	if externalForm.MatchString(flow) {
		return nil
	}
	if instead, reserved := ofASurface[flow]; reserved {
		return problem.New(http.StatusUnprocessableEntity, "flow %s is not started here: %s", flow, instead).
			Kind("reserved-flow", "Reserved flow")
	}
	known, err := s.engine.HasFlow(ctx, flow)
	if err != nil {
		return err
	}
	if known {
		return unfit(flows.CheckStart(ctx, s.pool, flow, input))
	}
	names, err := s.flowNames(ctx)
	if err != nil {
		return err
	}
	meant := ""
	if near := nearest.To(flow, names); near != "" {
		meant = fmt.Sprintf("; did you mean %s?", near)
	}
	return problem.New(http.StatusUnprocessableEntity, "there is no flow %.100q%s (known: %.1000s)", flow, meant, strings.Join(names, ", ")).
		Kind("unknown-flow", "Unknown flow")
}

// unfit tells a flow that may not begin, or not with this input.
func unfit(err error) error {
	_, wrong := errors.AsType[*flows.InvalidInput](err)
	switch {
	case wrong:
		return problem.New(http.StatusUnprocessableEntity, "input: %s", err).Kind("invalid-input", "Invalid input")
	case errors.Is(err, flows.ErrRemoved):
		return problem.New(http.StatusUnprocessableEntity, "%s", err).Kind("removed-flow", "Removed flow")
	}
	return err
}

// flowNames are the flows that can be started here.
func (s *server) flowNames(ctx context.Context) ([]string, error) {
	rows, err := s.pool.Query(ctx, `select name from agent_flows where current order by name limit 200`)
	if err != nil {
		return nil, fmt.Errorf("list flows: %w", err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("list flows: %w", err)
	}
	for _, name := range s.engine.Flows() {
		if _, reserved := ofASurface[name]; !reserved {
			names = append(names, name)
		}
	}
	names = append(names, executions.External)
	slices.Sort(names)
	return slices.Compact(names), nil
}

// keyedStart makes the execution an effect of its Idempotency-Key, so that it is started once also when the process
// died between starting it and keeping the answer.
func keyedStart(r *http.Request, b beginning) string {
	key := r.Header.Get(keyHeader)
	if key == "" {
		return ""
	}
	parts := []string{key, b.Flow, string(b.Input), b.ThreadID, b.ParentID}
	if b.WaitForCompletion {
		parts = append(parts, "waited for")
	}
	sum := sha256.Sum256([]byte(strings.Join(parts, "\n")))
	return "request " + hex.EncodeToString(sum[:])
}

// forking says where another execution is to go on from what one has recorded.
type forking struct {
	From   string          `json:"from,omitempty"`  // a recorded step, a scope, or the step it waits in; empty: after all that is recorded
	Input  json.RawMessage `json:"input,omitempty"` // the other's when left out
	Latest bool            `json:"latest,omitempty"`
	Reason string          `json:"reason,omitempty"`
}

// forked is the new execution.
type forked struct {
	ID         string            `json:"id"`
	TraceID    string            `json:"trace_id"`
	Status     executions.Status `json:"status"`
	ForkedFrom string            `json:"forked_from"`
	From       string            `json:"from"`
}

func (f forking) check() error {
	if !storable(f.Reason) || len(f.Reason) > maxReason {
		return badBody("reason has at most %d bytes of text", maxReason)
	}
	if !storable(f.From) || len(f.From) > 4*maxStep {
		return badBody("from has to be the key of a recorded step")
	}
	return nil
}

// travelling is what is done with what executions have recorded, and how the live ones are doing.
func (s *server) travelling() []route {
	return []route{
		{
			method: "POST", path: "/v1/executions/{id}/fork", body: forking{}, answer: forked{}, status: http.StatusCreated,
			handle: s.forkExecution, conflicts: true,
			about: "Start an execution that begins with what another had recorded before a step, and does the rest anew. The other is " +
				"not touched. 409 when the input contradicts a record, or the flow cannot be forked.",
		}, {
			method: "POST", path: "/v1/executions/{id}/retry", answer: forked{}, status: http.StatusCreated,
			handle: s.retryExecution, conflicts: true,
			about: "Fork what failed, timed out or was cancelled, so that what ended it is done anew. 409 for any other.",
		}, {
			method: "POST", path: "/v1/executions/{id}/replay", answer: executions.Replayed{}, handle: s.replayExecution,
			conflicts: true,
			about: "Call the flow with what was recorded, and with no way to do anything new: the digests of the record and of the replay, and " +
				"the step in which they differ. 409 while it is being run.",
		}, {
			method: "GET", path: "/v1/monitor/status", answer: page[executions.StatusCount]{}, handle: s.countExecutions,
			about: "How many executions are pending, running and waiting, and their mean age in seconds.",
		}, {
			method: "GET", path: "/v1/monitor/waiting", answer: page[executions.WaitingRow]{}, handle: s.listWaiting,
			params: []param{oneOf("for", "Kind of the wait", "response", "agent", "document", "signature", "test", "event", "delay", "approval", "lane")},
			about:  "What waits, the nearest deadline first; at most 500.",
		}, {
			method: "GET", path: "/v1/monitor/stuck", answer: page[executions.WaitingRow]{}, handle: s.listStuck,
			about: "What waits although its deadline has passed, untouched for an hour; at most 500.",
		},
	}
}

func (s *server) forkExecution(r request) (answer, error) {
	x, err := s.execution(r)
	if err != nil {
		return answer{}, err
	}
	body := r.body.(forking)
	var got executions.Execution
	_, err = s.audited(r.Context(), "fork_execution", body.Reason, map[string]any{"execution": x.ID, "from": body.From}, func(tx pgx.Tx, _ string) (any, error) {
		got, err = s.engine.Fork(r.Context(), tx, executions.ForkSpec{
			ID: x.ID, From: body.From, Input: notNull(body.Input), Latest: body.Latest,
		})
		return begunExecution(got), err
	})
	return newFork(x, got, body.From, err)
}

// notNull is a value that was given; null is none.
func notNull(v json.RawMessage) json.RawMessage {
	if !given(v) {
		return nil
	}
	return v
}

func (s *server) retryExecution(r request) (answer, error) {
	x, err := s.execution(r)
	if err != nil {
		return answer{}, err
	}
	var got executions.Execution
	from := ""
	_, err = s.audited(r.Context(), "retry_execution", "", map[string]any{"execution": x.ID}, func(tx pgx.Tx, _ string) (any, error) {
		got, from, err = s.engine.Retry(r.Context(), tx, x.ID)
		return begunExecution(got), err
	})
	return newFork(x, got, from, err)
}

// begunExecution says in the row of an admin's act which execution began.
func begunExecution(x executions.Execution) map[string]string {
	return map[string]string{"execution_id": x.ID, "trace_id": x.TraceID}
}

func newFork(x, got executions.Execution, from string, err error) (answer, error) {
	switch {
	case errors.Is(err, executions.ErrNoStep):
		return answer{trace: x.TraceID}, badBody("from: %s", err)
	case errors.Is(err, executions.ErrNoFork), errors.Is(err, executions.ErrNotFailed):
		return answer{trace: x.TraceID}, problem.New(http.StatusConflict, "%s", err).Kind("no-fork", "Cannot be forked")
	case errors.Is(err, executions.ErrChanged):
		return answer{trace: x.TraceID}, problem.New(http.StatusConflict, "%s", err).Kind("input-changed", "Input contradicts the record")
	case err != nil:
		return answer{trace: x.TraceID}, refusedValue(err)
	}
	return answer{body: forked{got.ID, got.TraceID, got.Status, x.ID, from}, trace: got.TraceID, status: http.StatusCreated}, nil
}

func (s *server) replayExecution(r request) (answer, error) {
	x, err := s.execution(r)
	if err != nil {
		return answer{}, err
	}
	got, err := s.engine.Replay(r.Context(), x.ID)
	if errors.Is(err, executions.ErrRunning) || errors.Is(err, executions.ErrUnknownFlow) {
		err = problem.New(http.StatusConflict, "%s", err).Kind("no-replay", "Cannot be replayed")
	}
	if err != nil {
		return answer{trace: x.TraceID}, err
	}
	return answer{body: got, trace: x.TraceID}, nil
}

func (s *server) countExecutions(r request) (answer, error) {
	got, err := executions.CountByStatus(r.Context(), s.pool)
	return answer{body: page[executions.StatusCount]{Items: got}}, err
}

func (s *server) listWaiting(r request) (answer, error) {
	return s.waitingRows(r, r.query["for"], false)
}

func (s *server) listStuck(r request) (answer, error) { return s.waitingRows(r, "", true) }

func (s *server) waitingRows(r request, kind string, stuck bool) (answer, error) {
	got, err := executions.ListWaiting(r.Context(), s.pool, kind, stuck, 500)
	for i := range got {
		got[i] = got[i].Redacted()
	}
	return answer{body: page[executions.WaitingRow]{Items: got}}, err
}
