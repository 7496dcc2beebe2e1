package flows

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/memory"
)

// classTimedOut is the error class of an action whose wait timed out.
const classTimedOut = "timed_out"

// timedOut ends the execution with status timeout.
type timedOut struct{ *executions.StepError }

func (e *timedOut) Unwrap() []error { return []error{executions.ErrTimedOut, e.StepError} }

// flowRun runs one execution of a flow. Its variables depend only on the records of the actions, in their order.
type flowRun struct {
	in         *Interpreter
	flow       *compiledFlow
	exec       executions.Execution
	thread     string
	vars       map[string]any
	seen       memory.Seen // memory that the actions have read
	collectors []collector // one for each open scope
}

// collector has the variables that were set in a scope, and the memory that was read in it.
type collector struct {
	set  map[string]any
	seen memory.Seen
}

// newFlowRun validates the input of an execution, and sets its first variables and labels.
func newFlowRun(ctx context.Context, in *Interpreter, flow *compiledFlow, input json.RawMessage) (*flowRun, error) {
	exec, _ := executions.Current(ctx)
	m := &flowRun{in: in, flow: flow, exec: exec, vars: maps.Clone(flow.variables), seen: memory.Seen{}}
	if m.vars == nil {
		m.vars = map[string]any{}
	}
	accepted, err := flow.input.validate(flow.name, input)
	if err != nil {
		return nil, err
	}
	m.vars["input"], m.vars["executionId"], m.vars["traceId"], m.vars["threadId"] = accepted, exec.ID, exec.TraceID, nil
	if exec.ForkedFrom != nil {
		kept, err := decodeNormal(exec.Variables)
		if err != nil {
			return nil, fmt.Errorf("read the variables of a fork: %w", err)
		}
		for _, name := range []string{"executionId", "traceId"} {
			if value, has := asObject(kept)[name]; has {
				m.vars[name] = value
			}
		}
	}
	if exec.ThreadID != nil {
		m.thread = *exec.ThreadID
		m.vars["threadId"] = m.thread
	}
	if err := m.setLabels(ctx); err != nil {
		return nil, err
	}
	return m, executions.SetVariables(ctx, m.vars)
}

// setLabels sets the labels of the execution. An empty value sets no label. A label that was given at the start stays.
func (m *flowRun) setLabels(ctx context.Context) error {
	labels := executions.Labels{}
	for name, tree := range m.flow.labels {
		value, err := fill(tree, m.vars)
		if err != nil {
			return fmt.Errorf("label %s: %w", name, err)
		}
		if value == nil {
			continue
		}
		if text := executions.LabelValue(formatText(value)); text != "" {
			labels[name] = text
		}
	}
	if len(labels) == 0 {
		return nil
	}
	return executions.SetDefaultLabels(ctx, "labels", labels)
}

// setVariables sets variables of the run and of its execution.
func (m *flowRun) setVariables(ctx context.Context, values map[string]any) error {
	for name, value := range values {
		normalized, err := normalize(value)
		if err != nil {
			return fmt.Errorf("set variable %s: %w", name, err)
		}
		m.vars[name] = normalized
		for _, c := range m.collectors {
			c.set[name] = normalized
		}
	}
	if len(values) == 0 {
		return nil
	}
	return executions.SetVariables(ctx, m.vars)
}

// addSights adds memory that was read.
func (m *flowRun) addSights(sights []memory.Sight) {
	m.seen.Add(sights...)
	for _, c := range m.collectors {
		c.seen.Add(sights...)
	}
}

// collect collects the variables that are set and the memory that is read until done is called.
func (m *flowRun) collect() (c collector, done func()) {
	c = collector{map[string]any{}, memory.Seen{}}
	depth := len(m.collectors)
	m.collectors = append(m.collectors, c)
	return c, func() { m.collectors = m.collectors[:depth] }
}

// runActions runs actions in order until one ends the flow.
func (m *flowRun) runActions(ctx context.Context, actions []*action) (*endResult, error) {
	for _, a := range actions {
		ended, err := m.runAction(ctx, a)
		if err != nil || ended != nil {
			return ended, err
		}
	}
	return nil, nil
}

// actionResult is the record of an action.
type actionResult struct {
	Set     exactMap       `json:"set,omitempty"`
	Skipped bool           `json:"skipped,omitempty"`
	Branch  string         `json:"branch,omitempty"` // the choice of a control action
	End     *endResult     `json:"end,omitempty"`
	Seen    []memory.Sight `json:"seen,omitempty"` // memory that the action read
}

// preparedAction is an action with its templates filled in.
type preparedAction struct {
	*action
	args    map[string]any
	skipped bool
	err     error
}

// runAction runs one action as a phase with its own row, and then the actions that it chose.
func (m *flowRun) runAction(ctx context.Context, a *action) (*endResult, error) {
	r := m.prepare(a)
	recorded := true
	perform := func(ctx context.Context, effect *executions.Effect) (actionResult, error) {
		recorded = false
		result, err := m.perform(ctx, r, effect)
		if err != nil {
			return actionResult{}, a.wrapError(err)
		}
		return result, nil
	}
	result, err := executions.Phase(ctx, a.key, perform, executions.As(a.Type), executions.Input(r.activityInput()))
	if failed, ok := errors.AsType[*executions.StepError](err); ok && failed.Class == classTimedOut {
		return nil, &timedOut{failed}
	}
	if err != nil {
		return nil, err
	}
	if recorded && !m.sameResult(r, result) {
		return nil, executions.Changed(ctx, a.key)
	}
	m.addSights(result.Seen)
	if err := m.setVariables(ctx, result.Set); err != nil {
		return nil, err
	}
	if result.Skipped || result.End != nil {
		return result.End, nil
	}
	return m.runChosen(ctx, r, result)
}

// sameResult recomputes a recorded action and reports whether the result is equal. The action's fingerprint does not
// cover the variables that its expressions read, so a fork with other input may hold a stale record.
func (m *flowRun) sameResult(r preparedAction, recorded actionResult) bool {
	if recorded.Skipped != r.skipped && r.when.ordered() {
		return false
	}
	if recorded.Skipped || !r.deterministic() {
		return true
	}
	var recomputed actionResult
	var err error
	if r.Type == "set" {
		recomputed, err = m.evaluateSet(r)
	} else {
		recomputed, err = m.chooseBranch(r, &executions.Effect{})
	}
	if err != nil || recomputed.Branch != recorded.Branch {
		return false
	}
	if len(recomputed.Set) == 0 { // the record omits it
		return len(recorded.Set) == 0
	}
	set, err := normalize(recomputed.Set) // as the record was: JSON has no -0 and no half a character
	return err == nil && encodeJSON(set) == encodeJSON(recorded.Set)
}

// unorderedCall matches calls whose result has no fixed order.
var unorderedCall = regexp.MustCompile(`\b(keys|values)\s*\(`)

// ordered reports whether an expression has no call of keys or values, whose order is random.
func (e *expression) ordered() bool { return e == nil || !unorderedCall.MatchString(e.text) }

// deterministic reports whether an action's result depends only on the variables.
func (a *action) deterministic() bool {
	for _, e := range a.exprs {
		if !e.ordered() {
			return false
		}
	}
	for _, c := range a.cases {
		if !c.condition.ordered() {
			return false
		}
	}
	return a.Type == "set" || a.Type == "if" || a.Type == "switch" || a.Type == "while"
}

// prepare decides whether an action runs, and fills in its templates. The action's phase reports errors.
func (m *flowRun) prepare(a *action) preparedAction {
	r := preparedAction{action: a}
	if a.when != nil {
		holds, err := a.when.boolValue(m.vars)
		if r.err, r.skipped = prefixError("when", err), !holds; err != nil || !holds {
			return r
		}
	}
	r.args = make(map[string]any, len(a.params))
	for _, p := range a.Parameters {
		tree, present := a.params[p.Name]
		if !present || p.Name == "message" && a.isRequest() {
			continue
		}
		value, err := fill(tree, m.vars)
		if err != nil {
			r.err = prefixError(p.Name, err)
			return r
		}
		r.args[p.Name] = value
	}
	return r
}

// isRequest reports whether an action requests something from a person. The message of such an action may contain the
// request's id, so its template is filled in after the request exists.
func (a *action) isRequest() bool {
	return a.Waits == "document" || a.Waits == "signature" || a.Waits == "test"
}

// prefixError adds a prefix to an error and keeps its class.
func prefixError(prefix string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", prefix, err)
}

func (a *action) wrapError(err error) error {
	name := a.key
	if a.Type != "" && a.key[0:min(len(a.key), len(a.Type))] != a.Type {
		name = a.key + " (" + a.Type + ")"
	}
	return fmt.Errorf("action %s: %w", name, err)
}

// activityInput returns the input that the action's activity shows.
func (r preparedAction) activityInput() map[string]any {
	values := map[string]any{}
	maps.Copy(values, r.args)
	for name, e := range r.exprs {
		if e != nil {
			values[name] = e.text
		}
	}
	if r.flow != "" {
		values["flow"] = r.flow
	}
	if r.when != nil {
		values["when"] = r.when.text
	}
	return values
}

// perform executes an action.
func (m *flowRun) perform(ctx context.Context, r preparedAction, effect *executions.Effect) (actionResult, error) {
	switch {
	case r.err != nil:
		return actionResult{}, r.err
	case r.skipped:
		effect.Status, effect.Output = activity.Skipped, map[string]any{"when": r.when.text, "is": false}
		return actionResult{Skipped: true}, nil
	}
	collected, done := m.collect()
	defer done()
	result, err := m.dispatch(ctx, r, effect)
	if err != nil {
		return actionResult{}, err
	}
	if len(collected.set) > 0 { // timeoutActions have set variables
		maps.Copy(collected.set, result.Set)
		result.Set = collected.set
	}
	result.Seen = append(collected.seen.Sights(), result.Seen...)
	if effect.Output == nil {
		effect.Output = result.Set
	}
	return result, m.checkSize(result.Set)
}

// checkSize returns an error if the variables, including set, exceed maxVariables.
func (m *flowRun) checkSize(set map[string]any) error {
	if len(set) == 0 {
		return nil
	}
	all := maps.Clone(m.vars)
	maps.Copy(all, set)
	text, err := json.Marshal(all)
	if err != nil {
		return classErrorf(classExpression, "a result is not JSON: %s", err)
	}
	if len(text) > maxVariables {
		return classErrorf("limit", "the variables would be %d bytes; all together may be %d", len(text), maxVariables)
	}
	return nil
}

// dispatch calls the implementation of an action. A control action returns its choice.
func (m *flowRun) dispatch(ctx context.Context, r preparedAction, effect *executions.Effect) (actionResult, error) {
	switch r.Type {
	case "send_message":
		return m.sendMessage(ctx, r)
	case "open_thread":
		return m.openThread(ctx, r)
	case "wait_for_response":
		return m.waitForResponse(ctx, r)
	case "wait_for_event":
		return m.waitForEvent(ctx, r)
	case "request_document", "request_signature", "assign_test":
		return m.request(ctx, r)
	case "delay":
		return m.delay(ctx, r)
	case "trigger_agent":
		return m.trigger(ctx, r, effect)
	case "skill":
		return m.skill(ctx, r)
	case "reason":
		return m.reason(ctx, r)
	case "set":
		return m.evaluateSet(r)
	case "end":
		status, _ := r.args["status"].(string)
		return actionResult{End: &endResult{
			Status: status, Summary: formatText(r.args["summary"]),
			Result: r.args["result"],
		}}, nil
	case "fail":
		return actionResult{}, classErrorf("failed", "%s", formatText(r.args["message"]))
	}
	return m.chooseBranch(r, effect)
}

// evaluateSet computes the variables of an action set. Each expression sees the values from before the action.
func (m *flowRun) evaluateSet(r preparedAction) (actionResult, error) {
	set := maps.Clone(asObject(r.args["variables"]))
	if set == nil {
		set = map[string]any{}
	}
	for name, e := range r.exprs {
		value, err := e.value(m.vars)
		if err != nil {
			return actionResult{}, prefixError(name, err)
		}
		set[name] = value
	}
	return actionResult{Set: set}, nil
}

// maxVariables bounds the JSON of all variables of an execution, in bytes.
const maxVariables = 512 << 10
