package lanekeeper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Flow is a durable function with its types. It is safe for concurrent use.
type Flow[In, Out any] struct {
	r    *Runtime
	name string
	spec executions.Spec
}

// FlowOption configures the executions that a [Flow] starts.
type FlowOption func(*executions.Spec)

// Interactive starts executions in the queue for work that a person waits for. That queue has workers of its own.
func Interactive() FlowOption { return func(s *executions.Spec) { s.Queue = executions.Interactive } }

// MaxLostWorkers sets after how many lost processes, without a recorded step between them, an execution fails; the
// default is 5.
func MaxLostWorkers(n int) FlowOption { return func(s *executions.Spec) { s.MaxAttempts = n } }

// ProgressTimeout fails an execution that records no step for d while it runs. Parts of a second are rounded up; 0 is
// no limit.
func ProgressTimeout(d time.Duration) FlowOption {
	return func(s *executions.Spec) { s.ProgressSeconds = int(math.Ceil(d.Seconds())) }
}

// Register names a durable function, before [Runtime.Run]. In and Out must survive encoding/json. [Flow.Start] refuses
// an input with U+0000 or of more than 16 MiB. In results, and in the input of a child, U+FFFD replaces U+0000. A
// result of a flow or step and the data of an event have at most 16 MiB. All programs on the database share the names:
// every process that registers a name runs the executions that were started under it.
func Register[In, Out any](
	r *Runtime, name string, fn func(context.Context, In) (Out, error), opts ...FlowOption,
) (Flow[In, Out], error) {
	if fn == nil {
		return Flow[In, Out]{}, fmt.Errorf("register flow %s: a function is required", name)
	}
	if executions.IsReserved(name) || executions.IsExternal(name) {
		return Flow[In, Out]{}, fmt.Errorf("register flow %s: the name is Lanekeeper's own; choose another", name)
	}
	if r.engine.Running() {
		return Flow[In, Out]{}, fmt.Errorf("register flow %s: the runtime runs already; register before Run", name)
	}
	err := r.engine.Register(name, func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		var in In
		if err := json.Unmarshal(input, &in); err != nil {
			return executions.Result{}, fmt.Errorf("decode the input of flow %s as %T: %w", name, in, err)
		}
		out, err := fn(ctx, in)
		if err != nil {
			return executions.Result{}, err
		}
		return executions.Result{Summary: summary(out), Value: out}, nil
	})
	if err != nil {
		return Flow[In, Out]{}, err
	}
	return Remote[In, Out](r, name, opts...), nil
}

// Remote returns a flow that other programs run, so this program can start it. A flow in YAML is such a flow: it calls
// skills, asks for approvals and speaks in threads.
func Remote[In, Out any](r *Runtime, name string, opts ...FlowOption) Flow[In, Out] {
	s := executions.Spec{Flow: name, Surface: trace.Flow}
	for _, option := range opts {
		option(&s)
	}
	return Flow[In, Out]{r: r, name: name, spec: s}
}

// maxSummary bounds the characters of a summary.
const maxSummary = 200

// summary is the result in one line, for people.
func summary(out any) string {
	text := ""
	switch v := out.(type) {
	case string:
		text = v
	case fmt.Stringer:
		text = fmt.Sprint(v) // a nil pointer may panic in String
	default:
		if encoded, err := encode(out); err == nil {
			text = string(encoded)
		}
	}
	if runes := []rune(text); len(runes) > maxSummary {
		return string(runes[:maxSummary-1]) + "…"
	}
	return text
}

// encode is JSON, with {} for nil.
func encode(value any) (json.RawMessage, error) {
	if value == nil {
		return json.RawMessage("{}"), nil
	}
	return json.Marshal(value)
}

// maxValue bounds an input or the data of an event, as in SQL.
const maxValue = 16 << 20

// checkStorable refuses a key or a JSON value that PostgreSQL cannot store, or that is too large. The server's error
// would also end the caller's transaction.
func checkStorable(key string, value json.RawMessage) error {
	if len(value) > maxValue {
		return fmt.Errorf("the value has %d bytes, more than 16 MiB", len(value))
	}
	if strings.ContainsRune(key, 0) || !utf8.ValidString(key) {
		return errors.New("PostgreSQL cannot store the character U+0000 or invalid UTF-8: remove it from the key or id")
	}
	for i := 0; i < len(value); i++ {
		if value[i] != '\\' {
			continue
		}
		if bytes.HasPrefix(value[i:], []byte(`\u0000`)) {
			return errors.New("PostgreSQL cannot store the character U+0000: remove it from the value")
		}
		i++
	}
	return nil
}

// StartOption configures one start.
type StartOption func(*executions.Spec)

// Key makes a start idempotent: a second start with the same key, of any flow, returns the first execution.
func Key(key string) StartOption { return func(s *executions.Spec) { s.DedupeKey = key } }

// Label names the subject of the execution, such as order and A-1001. Pages, the CLI and HTTP find the execution by the
// value. An execution has at most 8 labels. A name begins with a letter and has 1 to 32 of the characters a-z 0-9 _. A
// value has 1 to 200 printable characters.
func Label(name, value string) StartOption {
	return func(s *executions.Spec) {
		if s.Labels == nil {
			s.Labels = executions.Labels{}
		}
		s.Labels[name] = value
	}
}

// Priority orders executions that are ready: 1 is first, 4 last, and the default 2.
func Priority(n int) StartOption { return func(s *executions.Spec) { s.Priority = n } }

// Start starts an execution. When it returns, the execution is durable. Inside a flow use [Flow.Call] or
// [Flow.StartChild], or Start within a Step and with a [Key].
func (f Flow[In, Out]) Start(ctx context.Context, in In, opts ...StartOption) (Handle[Out], error) {
	s, err := f.startSpec(ctx, in, opts)
	if err != nil {
		return Handle[Out]{}, err
	}
	x, _, err := f.r.engine.Start(ctx, f.r.pool, s)
	return f.handle(x), err
}

// StartTx starts an execution in the caller's transaction: the execution exists if tx commits.
func (f Flow[In, Out]) StartTx(ctx context.Context, tx pgx.Tx, in In, opts ...StartOption) (Handle[Out], error) {
	s, err := f.startSpec(ctx, in, opts)
	if err != nil {
		return Handle[Out]{}, err
	}
	x, _, err := f.r.engine.StartTx(ctx, tx, s)
	return f.handle(x), err
}

func (f Flow[In, Out]) startSpec(ctx context.Context, in In, opts []StartOption) (executions.Spec, error) {
	s := f.spec
	input, err := encode(in)
	s.Input = input
	for _, option := range opts {
		option(&s)
	}
	if err == nil {
		err = checkStorable(s.DedupeKey, input)
	}
	if err != nil {
		return s, fmt.Errorf("start flow %s: %w", f.name, err)
	}
	if err := f.checkReserved(); err != nil {
		return s, err
	}
	if _, inside := executions.Current(ctx); inside && (executions.StepKey(ctx) == "" || s.DedupeKey == "") {
		return s, fmt.Errorf("start %s inside a flow: use Call or StartChild, or Start within a Step and with a Key", f.name)
	}
	return s, nil
}

func (f Flow[In, Out]) checkReserved() error {
	if executions.IsReserved(f.name) {
		return fmt.Errorf("start flow %s: it is Lanekeeper's own, which starts it itself", f.name)
	}
	return nil
}

// Handle returns the handle of an earlier execution by its id.
func (f Flow[In, Out]) Handle(id string) Handle[Out] {
	return Handle[Out]{r: f.r, flow: f.name, id: id}
}

func (f Flow[In, Out]) handle(x executions.Execution) Handle[Out] {
	return Handle[Out]{r: f.r, flow: f.name, id: x.ID, traceID: x.TraceID}
}

// Call runs the flow as a child of the calling flow, in the same trace, and waits for its result. name is the step's
// name. A cancel of the parent cancels the child. For a child that did not complete, Call returns a *[FlowError]. After
// a day, or longer while the child itself waits, it returns [ErrTimedOut], and the child continues.
func (f Flow[In, Out]) Call(ctx context.Context, name string, in In) (out Out, err error) {
	if err := f.checkReserved(); err != nil {
		return out, err
	}
	c := f.child(in)
	c.Timeout = executions.Patient
	child, err := executions.Trigger(ctx, name, c)
	if err != nil {
		return out, err
	}
	return childResult[Out](f.name, child)
}

// StartChild starts the flow as a child of the calling flow, in the same trace, and does not wait. name is the step's
// name. Children that are started before the first [Child.Wait] run at the same time. A cancel of the parent cancels a
// child; the parent's end does not. Unlike the child of [Flow.Call], the child uses no lane of its parent.
func (f Flow[In, Out]) StartChild(ctx context.Context, name string, in In) (Child[Out], error) {
	if err := f.checkReserved(); err != nil {
		return Child[Out]{}, err
	}
	id, step, err := executions.StartChild(ctx, name, f.child(in))
	return Child[Out]{flow: f.name, step: step, id: id}, err
}

func (f Flow[In, Out]) child(in In) executions.Child {
	return executions.Child{
		Flow: f.name, Input: in, Wait: true,
		Queue: f.spec.Queue, MaxAttempts: f.spec.MaxAttempts, ProgressSeconds: f.spec.ProgressSeconds,
	}
}

// Child is a child that [Flow.StartChild] started.
type Child[Out any] struct{ flow, step, id string }

// ID is the execution's id, as in `agent executions show ID`.
func (c Child[Out]) ID() string { return c.id }

// Wait suspends the calling flow until the child ends, and returns the child's result. Errors and the time limit are
// those of [Flow.Call]. After ErrTimedOut the flow may wait again.
func (c Child[Out]) Wait(ctx context.Context) (out Out, err error) {
	child, err := executions.AwaitChild(ctx, c.step, c.id, executions.Patient)
	if err != nil {
		return out, err
	}
	return childResult[Out](c.flow, child)
}

// childResult is what a parent gets from its child of the flow.
func childResult[Out any](flow string, child executions.ChildResult) (out Out, err error) {
	switch {
	case child.TimedOut:
		return out, fmt.Errorf("call %s: %w", flow, ErrTimedOut)
	case !child.Success:
		return out, &FlowError{Flow: flow, ID: child.ExecutionID, Status: string(child.Status), Message: child.Error}
	}
	return out, decode(child.Result, &out, "result of flow "+flow)
}

// Handle is a started execution. It is safe for concurrent use.
type Handle[Out any] struct {
	r                 *Runtime
	flow, id, traceID string
}

// ID is the execution's id, as in `agent executions show ID`.
func (h Handle[Out]) ID() string { return h.id }

// TraceID is the trace's id, as in `agent trace ID`; empty for a handle by id.
func (h Handle[Out]) TraceID() string { return h.traceID }

// Wait waits for the end of the execution. For an execution that did not complete, Wait returns a *[FlowError]. When
// ctx ends first, Wait returns the cause of ctx, and the execution continues. Inside a flow use [Flow.Call]: a step in
// Wait keeps a worker, and the awaited execution may need that worker.
func (h Handle[Out]) Wait(ctx context.Context) (out Out, err error) {
	x, err := h.r.engine.Await(ctx, h.id)
	switch {
	case err != nil:
		return out, fmt.Errorf("wait for execution %s of flow %s: %w", h.id, h.flow, err)
	case x.Status != executions.Completed:
		failed := &FlowError{Flow: h.flow, ID: h.id, Status: string(x.Status)}
		for _, message := range []*string{x.ErrorMessage, x.CancelReason} {
			if message != nil && failed.Message == "" {
				failed.Message = *message
			}
		}
		return out, failed
	}
	return out, decode(x.Result, &out, "result of flow "+h.flow)
}

// Cancel cancels the execution. A running step's context ends. An ended execution stays as it is.
func (h Handle[Out]) Cancel(ctx context.Context, reason string) error {
	_, err := h.r.engine.Cancel(ctx, h.id, "program", reason)
	return err
}

// FlowError reports an execution that ended without a result.
type FlowError struct {
	Flow, ID string
	Status   string // failed, timeout or cancelled
	Message  string // the error or the reason
}

// Error names the execution, its status and the cause.
func (e *FlowError) Error() string {
	return strings.TrimSuffix(fmt.Sprintf("execution %s of flow %s: %s: %s", e.ID, e.Flow, e.Status, e.Message), ": ")
}

// decode reads a recorded value. An absent value decodes to the zero value.
func decode(text json.RawMessage, into any, what string) error {
	if len(text) == 0 {
		return nil
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("decode the %s: %w", what, err)
	}
	return nil
}

// ErrTimedOut reports a wait that timed out. A flow that returns it, wrapped or not, ends with status timeout.
var ErrTimedOut = executions.ErrTimedOut

// ErrNotFound reports an unknown execution.
var ErrNotFound = executions.ErrNotFound

// IsControl reports an error that suspends or stops a run and is no result of its work. A flow returns it unchanged.
func IsControl(err error) bool { return executions.IsControl(err) }

// StepError is the recorded error of a step. Every later run gets the same error, so a flow may branch on it. The
// original error is not kept.
type StepError struct {
	Step    string // its key
	Class   string // a stable word for the kind of error
	Message string
}

// Error is the message of the error that ended the step.
func (e *StepError) Error() string { return e.Message }

// ErrorClass returns Class.
func (e *StepError) ErrorClass() string { return e.Class }

// stepError hides the type of package executions.
func stepError(err error) error {
	if recorded, is := errors.AsType[*executions.StepError](err); is {
		return &StepError{recorded.Step, recorded.Class, recorded.Message}
	}
	return err
}
