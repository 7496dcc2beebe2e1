package flows

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
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
	seen       memory.Seen      // memory that the actions have read
	collectors []map[string]any // for each open scope, the variables set in it
}

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
		for _, collected := range m.collectors {
			collected[name] = normalized
		}
	}
	if len(values) == 0 {
		return nil
	}
	return executions.SetVariables(ctx, m.vars)
}

// collectVariables collects the variables that are set until done is called.
func (m *flowRun) collectVariables() (set map[string]any, done func()) {
	set = map[string]any{}
	depth := len(m.collectors)
	m.collectors = append(m.collectors, set)
	return set, func() { m.collectors = m.collectors[:depth] }
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
	Set     map[string]any `json:"set,omitempty"`
	Skipped bool           `json:"skipped,omitempty"`
	Branch  string         `json:"branch,omitempty"` // the choice of a control action
	End     *endResult     `json:"end,omitempty"`
	Seen    []memory.Sight `json:"seen,omitempty"` // memory that the action read
}

// UnmarshalJSON keeps integers exact, however large.
func (r *actionResult) UnmarshalJSON(raw []byte) error {
	type plain actionResult
	record := struct {
		*plain
		Set json.RawMessage `json:"set"`
	}{plain: (*plain)(r)}
	if err := json.Unmarshal(raw, &record); err != nil {
		return err
	}
	set, err := decodeNormal(record.Set)
	r.Set, _ = set.(map[string]any)
	return err
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
	m.seen.Add(result.Seen...)
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
	return err == nil && recomputed.Branch == recorded.Branch && encodeJSON(recomputed.Set) == encodeJSON(recorded.Set)
}

// unorderedCall matches calls whose result has no fixed order.
var unorderedCall = regexp.MustCompile(`\b(keys|values)\s*\(`)

// deterministic reports whether an action's result depends only on the variables. The order of keys and values is
// random.
func (a *action) deterministic() bool {
	for _, e := range a.exprs {
		if e != nil && unorderedCall.MatchString(e.text) {
			return false
		}
	}
	return a.Type == "set" || a.Type == "if" || a.Type == "while"
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
	set, done := m.collectVariables()
	defer done()
	result, err := m.dispatch(ctx, r, effect)
	if err != nil {
		return actionResult{}, err
	}
	if len(set) > 0 { // timeoutActions have set variables
		maps.Copy(set, result.Set)
		result.Set = set
	}
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

// Bounds of loops.
const (
	maxItems          = 10_000
	maxIterations     = 10_000
	defaultIterations = 1000
)

// chooseBranch chooses the actions of a control action. The choice is recorded before runChosen runs these actions,
// each with its own row.
func (m *flowRun) chooseBranch(r preparedAction, effect *executions.Effect) (actionResult, error) {
	switch r.Type {
	case "if", "while":
		vars := m.vars
		if r.Type == "while" { // the condition may use index, which counts from 0
			vars = maps.Clone(vars)
			vars["index"] = 0
		}
		holds, err := r.exprs["condition"].boolValue(vars)
		effect.Output = map[string]any{"condition": holds}
		branch := map[bool]string{true: "then", false: "else"}[holds]
		return actionResult{Branch: branch}, prefixError("condition", err)
	case "switch":
		branch, err := m.chooseCase(r)
		effect.Output = map[string]any{"runs": branch}
		return actionResult{Branch: branch}, err
	case "for_each":
		items, ok := r.args["items"].([]any)
		switch {
		case !ok:
			return actionResult{}, classErrorf(classTemplate, "items: is %s, not a list", truncate(encodeJSON(r.args["items"])))
		case len(items) > maxItems:
			return actionResult{}, classErrorf("limit", "items: are %d; at most %d are allowed", len(items), maxItems)
		}
		effect.Output = map[string]any{"items": len(items)}
		return actionResult{}, nil
	}
	return actionResult{}, fmt.Errorf("actionType %s is not known to this binary", r.Type)
}

// chooseCase returns the matching case of a switch: "case 1", or "default".
func (m *flowRun) chooseCase(r preparedAction) (string, error) {
	for i, c := range r.cases {
		matches := false
		var err error
		if c.condition != nil {
			matches, err = c.condition.boolValue(m.vars)
		} else {
			var expected any
			expected, err = fill(c.equals, m.vars)
			matches = reflect.DeepEqual(expected, r.args["value"])
		}
		if err != nil {
			return "", prefixError(fmt.Sprintf("cases[%d]", i), err)
		}
		if matches {
			return fmt.Sprintf("case %d", i+1), nil
		}
	}
	return "default", nil
}

// runChosen runs the actions that an action chose.
func (m *flowRun) runChosen(ctx context.Context, r preparedAction, got actionResult) (*endResult, error) {
	inner := executions.Scope(ctx, r.key)
	switch r.Type {
	case "if":
		return m.runActions(executions.Scope(inner, got.Branch), r.nested[got.Branch])
	case "switch":
		actions := r.nested["default"]
		for i, c := range r.cases {
			if got.Branch == fmt.Sprintf("case %d", i+1) {
				actions = c.actions
			}
		}
		return m.runActions(executions.Scope(inner, got.Branch), actions)
	case "for_each":
		return m.forEach(inner, r)
	case "while":
		return m.while(inner, r)
	}
	return nil, nil
}

// loopState is the state of a loop: the variables set by all iterations.
type loopState struct {
	Next int            `json:"next"`
	Set  map[string]any `json:"set"`
	End  *endResult     `json:"end,omitempty"`
}

// forEach runs actions for each item of a list.
func (m *flowRun) forEach(ctx context.Context, r preparedAction) (*endResult, error) {
	items, _ := r.args["items"].([]any)
	as := cmp.Or(formatText(r.args["as"]), "item")
	return m.loop(ctx, []string{as, "index"}, func(ctx context.Context, n int) (bool, *endResult, error) {
		if n >= len(items) {
			return true, nil, nil
		}
		m.vars[as], m.vars["index"] = items[n], n
		ended, err := m.runActions(ctx, r.nested["actions"])
		return false, ended, err
	})
}

// while runs actions while a condition holds.
func (m *flowRun) while(ctx context.Context, r preparedAction) (*endResult, error) {
	limit := defaultIterations
	if n, ok := r.args["max"].(int); ok {
		limit = n
	}
	return m.loop(ctx, []string{"index"}, func(ctx context.Context, n int) (bool, *endResult, error) {
		m.vars["index"] = n
		holds, err := r.exprs["condition"].boolValue(m.vars)
		if err == nil && holds && n >= limit {
			err = classErrorf("limit", "the condition still holds after %d times", limit)
		}
		if err != nil {
			return false, nil, m.failAction(ctx, r.action, err)
		}
		if !holds {
			return true, nil, nil
		}
		ended, err := m.runActions(ctx, r.nested["actions"])
		return false, ended, err
	})
}

// failAction fails an action whose choice is recorded already. The failure is a phase with its own row.
func (m *flowRun) failAction(ctx context.Context, a *action, err error) error {
	_, failed := executions.Phase(ctx, a.key, func(context.Context, *executions.Effect) (actionResult, error) {
		return actionResult{}, a.wrapError(err)
	}, executions.As(a.Type))
	return failed
}

// loop repeats body until body reports that the loop has finished. It then restores the scoped variables.
func (m *flowRun) loop(
	ctx context.Context, scoped []string, body func(ctx context.Context, n int) (bool, *endResult, error),
) (*endResult, error) {
	before := maps.Clone(m.vars)
	set, done := m.collectVariables()
	defer done()
	first := true
	last, err := executions.Loop(ctx, "each", loopState{},
		func(ctx context.Context, s loopState) (loopState, bool, error) {
			if first { // set the variables of the iterations that a snapshot covers
				if err := m.setVariables(ctx, s.Set); err != nil {
					return s, false, err
				}
			}
			first = false
			finished, ended, err := body(ctx, s.Next)
			if err != nil {
				return s, false, err
			}
			return loopState{Next: s.Next + 1, Set: maps.Clone(set), End: ended}, finished || ended != nil, nil
		})
	if err != nil {
		return nil, err
	}
	if err := m.setVariables(ctx, last.Set); err != nil {
		return nil, err
	}
	for _, name := range scoped {
		if value, existed := before[name]; existed {
			m.vars[name] = value
		} else {
			delete(m.vars, name)
		}
	}
	return last.End, executions.SetVariables(ctx, m.vars)
}

// maxVariables bounds the JSON of all variables of an execution, in bytes.
const maxVariables = 512 << 10

// normalize returns a value in the form that the database returns: integers are int, other numbers float64. Every
// variable is normalized when it is set, so the first run and a replay compute the same values.
func normalize(value any) (any, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		if unsupported, ok := errors.AsType[*json.UnsupportedValueError](err); ok {
			return nil, fmt.Errorf("%s is not a value that JSON has", unsupported.Str)
		}
		return nil, err
	}
	return decodeNormal(raw)
}

// decodeNormal decodes JSON and normalizes the value. Empty JSON is null.
func decodeNormal(raw json.RawMessage) (any, error) {
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil, nil
	}
	value, err := exactjson.Decode(raw)
	return normalizeTree(value), err
}

func normalizeTree(value any) any {
	switch v := value.(type) {
	case json.Number:
		return normalizeNumber(v)
	case string:
		return strings.ReplaceAll(v, "\x00", "\uFFFD") // the records store it this way
	case []any:
		for i, item := range v {
			v[i] = normalizeTree(item)
		}
	case map[string]any:
		for key, item := range v {
			v[key] = normalizeTree(item)
		}
	}
	return value
}

func normalizeNumber(n json.Number) any {
	if whole, err := strconv.Atoi(string(n)); err == nil {
		return whole
	}
	f, err := n.Float64()
	switch {
	case err != nil:
		return string(n) // beyond the range of number types
	case f == math.Trunc(f) && math.Abs(f) < 1<<62:
		return int(f)
	}
	return f
}

// asObject returns a value that is a map, or nil.
func asObject(value any) map[string]any {
	fields, _ := value.(map[string]any)
	return fields
}
