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

// machine runs one execution of a flow. Its variables follow from the records of the actions alone, in their order.
type machine struct {
	in         *Interpreter
	flow       *compiled
	exec       executions.Execution
	thread     string
	vars       map[string]any
	seen       memory.Seen      // memory that the actions have read
	collectors []map[string]any // for each open scope, the variables set in it
}

func newMachine(ctx context.Context, in *Interpreter, flow *compiled, input json.RawMessage) (*machine, error) {
	exec, _ := executions.Current(ctx)
	m := &machine{in: in, flow: flow, exec: exec, vars: maps.Clone(flow.variables), seen: memory.Seen{}}
	if m.vars == nil {
		m.vars = map[string]any{}
	}
	given, err := flow.input.accept(flow.name, input)
	if err != nil {
		return nil, err
	}
	m.vars["input"], m.vars["executionId"], m.vars["traceId"], m.vars["threadId"] = given, exec.ID, exec.TraceID, nil
	if exec.ThreadID != nil {
		m.thread = *exec.ThreadID
		m.vars["threadId"] = m.thread
	}
	if err := m.label(ctx); err != nil {
		return nil, err
	}
	return m, executions.SetVariables(ctx, m.vars)
}

// label sets the labels of the execution. An empty value is none, and a label given at the start stays.
func (m *machine) label(ctx context.Context) error {
	labels := executions.Labels{}
	for name, tree := range m.flow.labels {
		value, err := fill(tree, m.vars)
		if err != nil {
			return fmt.Errorf("label %s: %w", name, err)
		}
		if value == nil {
			continue
		}
		if text := executions.LabelValue(inText(value)); text != "" {
			labels[name] = text
		}
	}
	if len(labels) == 0 {
		return nil
	}
	return executions.SetDefaultLabels(ctx, "labels", labels)
}

// set sets variables, here and for readers of the execution.
func (m *machine) set(ctx context.Context, values map[string]any) error {
	for name, value := range values {
		settled, err := normalize(value)
		if err != nil {
			return fmt.Errorf("set variable %s: %w", name, err)
		}
		m.vars[name] = settled
		for _, note := range m.collectors {
			note[name] = settled
		}
	}
	if len(values) == 0 {
		return nil
	}
	return executions.SetVariables(ctx, m.vars)
}

// collectSets collects the variables set until done is called.
func (m *machine) collectSets() (set map[string]any, done func()) {
	set = map[string]any{}
	depth := len(m.collectors)
	m.collectors = append(m.collectors, set)
	return set, func() { m.collectors = m.collectors[:depth] }
}

// block runs actions in order until one ends the flow.
func (m *machine) block(ctx context.Context, actions []*action) (*ending, error) {
	for _, a := range actions {
		ended, err := m.runAction(ctx, a)
		if err != nil || ended != nil {
			return ended, err
		}
	}
	return nil, nil
}

// result is the record of an action.
type result struct {
	Set     map[string]any `json:"set,omitempty"`
	Skipped bool           `json:"skipped,omitempty"`
	Branch  string         `json:"branch,omitempty"` // the choice of a control action
	End     *ending        `json:"end,omitempty"`
	Seen    []memory.Sight `json:"seen,omitempty"` // memory that it read
}

// UnmarshalJSON keeps integers exact, however large.
func (r *result) UnmarshalJSON(raw []byte) error {
	type plain result
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

// ready is an action with its templates filled in.
type ready struct {
	*action
	args    map[string]any
	skipped bool
	err     error
}

// runAction runs one action as a phase with its own row, and then the actions that it chose.
func (m *machine) runAction(ctx context.Context, a *action) (*ending, error) {
	r := m.prepare(a)
	recorded := true
	got, err := executions.Phase(ctx, a.key, func(ctx context.Context, effect *executions.Effect) (result, error) {
		recorded = false
		got, err := m.perform(ctx, r, effect)
		if err != nil {
			return result{}, a.blame(err)
		}
		return got, nil
	}, executions.As(a.Type), executions.Input(r.shown()))
	if failed, ok := errors.AsType[*executions.StepError](err); ok && failed.Class == classTimedOut {
		return nil, &timedOut{failed}
	}
	if err != nil {
		return nil, err
	}
	if recorded && !m.sameResult(r, got) {
		return nil, executions.Changed(ctx, a.key)
	}
	m.seen.Add(got.Seen...)
	if err := m.set(ctx, got.Set); err != nil {
		return nil, err
	}
	if got.Skipped || got.End != nil {
		return got.End, nil
	}
	return m.runChosen(ctx, r, got)
}

// sameResult recomputes a recorded action and reports whether the result is equal. The action's fingerprint does not
// cover the variables that its expressions read, so a fork with other input may hold a stale record.
func (m *machine) sameResult(r ready, recorded result) bool {
	if recorded.Skipped || !r.computes() {
		return true
	}
	var now result
	var err error
	if r.Type == "set" {
		now, err = m.assign(r)
	} else {
		now, err = m.chooseBranch(r, &executions.Effect{})
	}
	return err == nil && now.Branch == recorded.Branch && asJSON(now.Set) == asJSON(recorded.Set)
}

// unordered matches calls with an unordered result.
var unordered = regexp.MustCompile(`\b(keys|values)\s*\(`)

// computes reports whether an action's result depends on the variables alone and is deterministic. The order of keys
// and values is not.
func (a *action) computes() bool {
	for _, e := range a.exprs {
		if e != nil && unordered.MatchString(e.text) {
			return false
		}
	}
	return a.Type == "set" || a.Type == "if" || a.Type == "while"
}

// prepare decides whether an action runs, and fills its templates in. Its phase reports the errors.
func (m *machine) prepare(a *action) ready {
	r := ready{action: a}
	if a.when != nil {
		meant, err := a.when.boolValue(m.vars)
		if r.err, r.skipped = wrapped("when", err), !meant; err != nil || !meant {
			return r
		}
	}
	r.args = make(map[string]any, len(a.given))
	for _, p := range a.Parameters {
		tree, given := a.given[p.Name]
		if !given || p.Name == "message" && a.requests() {
			continue
		}
		value, err := fill(tree, m.vars)
		if err != nil {
			r.err = wrapped(p.Name, err)
			return r
		}
		r.args[p.Name] = value
	}
	return r
}

// requests reports whether an action requests something from a person. Its message may name the request, so it is
// written later.
func (a *action) requests() bool {
	return a.Waits == "document" || a.Waits == "signature" || a.Waits == "test"
}

// wrapped adds the place to an error and keeps its class.
func wrapped(place string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", place, err)
}

func (a *action) blame(err error) error {
	name := a.key
	if a.Type != "" && a.key[0:min(len(a.key), len(a.Type))] != a.Type {
		name = a.key + " (" + a.Type + ")"
	}
	return fmt.Errorf("action %s: %w", name, err)
}

// shown is the input in the action's activity.
func (r ready) shown() map[string]any {
	shown := map[string]any{}
	maps.Copy(shown, r.args)
	for name, e := range r.exprs {
		if e != nil {
			shown[name] = e.text
		}
	}
	if r.flow != "" {
		shown["flow"] = r.flow
	}
	if r.when != nil {
		shown["when"] = r.when.text
	}
	return shown
}

// perform executes an action.
func (m *machine) perform(ctx context.Context, r ready, effect *executions.Effect) (result, error) {
	switch {
	case r.err != nil:
		return result{}, r.err
	case r.skipped:
		effect.Status, effect.Output = activity.Skipped, map[string]any{"when": r.when.text, "is": false}
		return result{Skipped: true}, nil
	}
	noted, done := m.collectSets()
	defer done()
	got, err := m.dispatch(ctx, r, effect)
	if err != nil {
		return result{}, err
	}
	if len(noted) > 0 { // by its timeoutActions
		maps.Copy(noted, got.Set)
		got.Set = noted
	}
	if effect.Output == nil {
		effect.Output = got.Set
	}
	return got, m.bound(got.Set)
}

// bound limits the variables to the size of a record.
func (m *machine) bound(set map[string]any) error {
	if len(set) == 0 {
		return nil
	}
	all := maps.Clone(m.vars)
	maps.Copy(all, set)
	text, err := json.Marshal(all)
	if err != nil {
		return failure(classExpression, "a result is not JSON: %s", err)
	}
	if len(text) > maxVariables {
		return failure("limit", "the variables would be %d bytes; all together may be %d", len(text), maxVariables)
	}
	return nil
}

// dispatch dispatches to the implementation of an action. A control action returns its choice.
func (m *machine) dispatch(ctx context.Context, r ready, effect *executions.Effect) (result, error) {
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
		return m.assign(r)
	case "end":
		status, _ := r.args["status"].(string)
		return result{End: &ending{Status: status, Summary: inText(r.args["summary"]), Result: r.args["result"]}}, nil
	case "fail":
		return result{}, failure("failed", "%s", inText(r.args["message"]))
	}
	return m.chooseBranch(r, effect)
}

// assign computes variables. Each sees the values before the action.
func (m *machine) assign(r ready) (result, error) {
	set := maps.Clone(object(r.args["variables"]))
	if set == nil {
		set = map[string]any{}
	}
	for name, e := range r.exprs {
		value, err := e.value(m.vars)
		if err != nil {
			return result{}, wrapped(name, err)
		}
		set[name] = value
	}
	return result{Set: set}, nil
}

// Bounds of loops.
const (
	maxItems      = 10_000
	maxTimes      = 10_000
	standardTimes = 1000
)

// chooseBranch chooses the actions of a control action; follow runs them. So the choice is recorded, and the chosen
// actions have their own rows.
func (m *machine) chooseBranch(r ready, effect *executions.Effect) (result, error) {
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
		return result{Branch: branch}, wrapped("condition", err)
	case "switch":
		branch, err := m.choose(r)
		effect.Output = map[string]any{"runs": branch}
		return result{Branch: branch}, err
	case "for_each":
		items, ok := r.args["items"].([]any)
		switch {
		case !ok:
			return result{}, failure(classTemplate, "items: is %s, not a list", shorten(asJSON(r.args["items"])))
		case len(items) > maxItems:
			return result{}, failure("limit", "items: are %d; at most %d are allowed", len(items), maxItems)
		}
		effect.Output = map[string]any{"items": len(items)}
		return result{}, nil
	}
	return result{}, fmt.Errorf("actionType %s is not known to this binary", r.Type)
}

// choose returns the matching case of a switch: "case 1", or "default".
func (m *machine) choose(r ready) (string, error) {
	for i, c := range r.cases {
		fits := false
		var err error
		if c.condition != nil {
			fits, err = c.condition.boolValue(m.vars)
		} else {
			var wanted any
			wanted, err = fill(c.equals, m.vars)
			fits = reflect.DeepEqual(wanted, r.args["value"])
		}
		if err != nil {
			return "", wrapped(fmt.Sprintf("cases[%d]", i), err)
		}
		if fits {
			return fmt.Sprintf("case %d", i+1), nil
		}
	}
	return "default", nil
}

// runChosen runs the actions that an action chose.
func (m *machine) runChosen(ctx context.Context, r ready, got result) (*ending, error) {
	inner := executions.Scope(ctx, r.key)
	switch r.Type {
	case "if":
		return m.block(executions.Scope(inner, got.Branch), r.nested[got.Branch])
	case "switch":
		actions := r.nested["default"]
		for i, c := range r.cases {
			if got.Branch == fmt.Sprintf("case %d", i+1) {
				actions = c.actions
			}
		}
		return m.block(executions.Scope(inner, got.Branch), actions)
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
	End  *ending        `json:"end,omitempty"`
}

// forEach runs actions for each item of a list.
func (m *machine) forEach(ctx context.Context, r ready) (*ending, error) {
	items, _ := r.args["items"].([]any)
	as := cmp.Or(inText(r.args["as"]), "item")
	return m.loop(ctx, []string{as, "index"}, func(ctx context.Context, n int) (bool, *ending, error) {
		if n >= len(items) {
			return true, nil, nil
		}
		m.vars[as], m.vars["index"] = items[n], n
		ended, err := m.block(ctx, r.nested["actions"])
		return false, ended, err
	})
}

// while runs actions while a condition holds.
func (m *machine) while(ctx context.Context, r ready) (*ending, error) {
	most := standardTimes
	if n, ok := r.args["max"].(int); ok {
		most = n
	}
	return m.loop(ctx, []string{"index"}, func(ctx context.Context, n int) (bool, *ending, error) {
		m.vars["index"] = n
		holds, err := r.exprs["condition"].boolValue(m.vars)
		if err == nil && holds && n >= most {
			err = failure("limit", "the condition still holds after %d times", most)
		}
		if err != nil {
			return false, nil, m.fail(ctx, r.action, err)
		}
		if !holds {
			return true, nil, nil
		}
		ended, err := m.block(ctx, r.nested["actions"])
		return false, ended, err
	})
}

// fail ends an action after its choice was recorded, as the failed step with its own row.
func (m *machine) fail(ctx context.Context, a *action, err error) error {
	_, failed := executions.Phase(ctx, a.key, func(context.Context, *executions.Effect) (result, error) {
		return result{}, a.blame(err)
	}, executions.As(a.Type))
	return failed
}

// loop repeats body until it reports the end. own are the variables of the loop's scope.
func (m *machine) loop(
	ctx context.Context, own []string, body func(ctx context.Context, n int) (bool, *ending, error),
) (*ending, error) {
	before := maps.Clone(m.vars)
	set, done := m.collectSets()
	defer done()
	first := true
	last, err := executions.Loop(ctx, "each", loopState{},
		func(ctx context.Context, s loopState) (loopState, bool, error) {
			if first { // iterations that a snapshot covers
				if err := m.set(ctx, s.Set); err != nil {
					return s, false, err
				}
			}
			first = false
			over, ended, err := body(ctx, s.Next)
			if err != nil {
				return s, false, err
			}
			return loopState{Next: s.Next + 1, Set: maps.Clone(set), End: ended}, over || ended != nil, nil
		})
	if err != nil {
		return nil, err
	}
	if err := m.set(ctx, last.Set); err != nil {
		return nil, err
	}
	for _, name := range own {
		if value, was := before[name]; was {
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
// variable has this form at once, so the first run and a replay compute the same values.
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

// decodeNormal decodes JSON in the normal form. Empty JSON is null.
func decodeNormal(raw json.RawMessage) (any, error) {
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil, nil
	}
	value, err := exactjson.Decode(raw)
	return settled(value), err
}

func settled(value any) any {
	switch v := value.(type) {
	case json.Number:
		return number(v)
	case string:
		return strings.ReplaceAll(v, "\x00", "\uFFFD") // the records store it this way
	case []any:
		for i, item := range v {
			v[i] = settled(item)
		}
	case map[string]any:
		for key, item := range v {
			v[key] = settled(item)
		}
	}
	return value
}

func number(n json.Number) any {
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

// object returns a value that is a map; nil otherwise.
func object(value any) map[string]any {
	found, _ := value.(map[string]any)
	return found
}
