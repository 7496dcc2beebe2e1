package flows

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/memory"
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
		branch := "else"
		if holds {
			branch = "then"
		}
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
func (m *flowRun) runChosen(ctx context.Context, r preparedAction, choice actionResult) (*endResult, error) {
	inner := executions.Scope(ctx, r.key)
	switch r.Type {
	case "if":
		return m.runActions(executions.Scope(inner, choice.Branch), r.nested[choice.Branch])
	case "switch":
		actions := r.nested["default"]
		for i, c := range r.cases {
			if choice.Branch == fmt.Sprintf("case %d", i+1) {
				actions = c.actions
			}
		}
		return m.runActions(executions.Scope(inner, choice.Branch), actions)
	case "for_each":
		return m.forEach(inner, r)
	case "while":
		return m.while(inner, r)
	}
	return nil, nil
}

// Bounds of loops: the items of for_each, the largest max of while, and its default.
const (
	maxItems          = 10_000
	maxIterations     = 10_000
	defaultIterations = 1000
)

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

// loopState is the state of a loop: the variables set and the memory read by all iterations.
type loopState struct {
	Next int            `json:"next"`
	Set  exactMap       `json:"set"`
	Seen []memory.Sight `json:"seen,omitempty"`
	End  *endResult     `json:"end,omitempty"`
}

// loop repeats body until body reports that the loop has finished. It then restores the scoped variables.
func (m *flowRun) loop(
	ctx context.Context, scoped []string, body func(ctx context.Context, n int) (bool, *endResult, error),
) (*endResult, error) {
	before := maps.Clone(m.vars)
	collected, done := m.collect()
	defer done()
	first := true
	last, err := executions.Loop(ctx, "each", loopState{},
		func(ctx context.Context, s loopState) (loopState, bool, error) {
			if first { // restore what the iterations that a snapshot covers have set and read
				m.addSights(s.Seen)
				if err := m.setVariables(ctx, s.Set); err != nil {
					return s, false, err
				}
			}
			first = false
			finished, ended, err := body(ctx, s.Next)
			if err != nil {
				return s, false, err
			}
			return loopState{
				Next: s.Next + 1, Set: maps.Clone(collected.set), Seen: collected.seen.Sights(), End: ended,
			}, finished || ended != nil, nil
		})
	if err != nil {
		return nil, err
	}
	m.addSights(last.Seen)
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

// failAction fails an action whose choice is recorded already. The failure is a phase with its own row.
func (m *flowRun) failAction(ctx context.Context, a *action, err error) error {
	_, failed := executions.Phase(ctx, a.key, func(context.Context, *executions.Effect) (actionResult, error) {
		return actionResult{}, a.wrapError(err)
	}, executions.As(a.Type))
	return failed
}
