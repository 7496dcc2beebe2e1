package flows

import (
	"context"
	"fmt"
	"maps"
	"reflect"

	"github.com/lanekeeper/lanekeeper/executions"
)

// Bounds of loops.
const (
	maxItems      = 10_000
	maxTimes      = 10_000
	standardTimes = 1000
)

// decide chooses what a control action runs; follow runs it. So the choice is recorded and seen in the trace, and the
// actions that it leads to have rows of their own beside it.
func (m *machine) decide(r ready, effect *executions.Effect) (result, error) {
	switch r.Type {
	case "if", "while":
		vars := m.vars
		if r.Type == "while" { // the condition may be about index, which counts from 0
			vars = maps.Clone(vars)
			vars["index"] = 0
		}
		holds, err := r.exprs["condition"].truth(vars)
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
			return result{}, failure("limit", "items: are %d; at most %d are gone through", len(items), maxItems)
		}
		effect.Output = map[string]any{"items": len(items)}
		return result{}, nil
	}
	return result{}, fmt.Errorf("actionType %s is not known to this binary", r.Type)
}

// choose is the case of a switch that fits: "case 1", or "default".
func (m *machine) choose(r ready) (string, error) {
	for i, c := range r.cases {
		fits := false
		var err error
		if c.condition != nil {
			fits, err = c.condition.truth(m.vars)
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

// follow runs the actions that an action decided for.
func (m *machine) follow(ctx context.Context, r ready, got result) (*ending, error) {
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

// turns is the state of a loop: all that its iterations have set.
type turns struct {
	Next int            `json:"next"`
	Set  map[string]any `json:"set"`
	End  *ending        `json:"end,omitempty"`
}

// forEach runs actions for each item of a list.
func (m *machine) forEach(ctx context.Context, r ready) (*ending, error) {
	items, _ := r.args["items"].([]any)
	as := orElse(inText(r.args["as"]), "item")
	return m.loop(ctx, []string{as, "index"}, func(ctx context.Context, n int) (bool, *ending, error) {
		if n >= len(items) {
			return true, nil, nil
		}
		m.vars[as], m.vars["index"] = items[n], n
		ended, err := m.block(ctx, r.nested["actions"])
		return false, ended, err
	})
}

// while runs actions as long as a condition holds.
func (m *machine) while(ctx context.Context, r ready) (*ending, error) {
	most := standardTimes
	if n, ok := r.args["max"].(int); ok {
		most = n
	}
	return m.loop(ctx, []string{"index"}, func(ctx context.Context, n int) (bool, *ending, error) {
		m.vars["index"] = n
		holds, err := r.exprs["condition"].truth(m.vars)
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

// fail ends an action that had decided already: with a row, and as the failed step.
func (m *machine) fail(ctx context.Context, a *action, err error) error {
	_, failed := executions.Phase(ctx, a.key, func(context.Context, *executions.Effect) (result, error) {
		return result{}, a.blame(err)
	}, executions.As(a.Type))
	return failed
}

// loop repeats body until it says that it is done. own are the variables that exist inside of the loop only.
func (m *machine) loop(ctx context.Context, own []string, body func(ctx context.Context, n int) (bool, *ending, error)) (*ending, error) {
	before := maps.Clone(m.vars)
	set, done := m.note()
	defer done()
	first := true
	last, err := executions.Loop(ctx, "each", turns{}, func(ctx context.Context, s turns) (turns, bool, error) {
		if first { // of iterations that a snapshot stands for
			if err := m.set(ctx, s.Set); err != nil {
				return s, false, err
			}
		}
		first = false
		over, ended, err := body(ctx, s.Next)
		if err != nil {
			return s, false, err
		}
		return turns{Next: s.Next + 1, Set: maps.Clone(set), End: ended}, over || ended != nil, nil
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
