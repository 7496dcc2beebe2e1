package reason

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// delegateFlow is the flow of a delegated task.
const delegateFlow = "delegate"

const (
	// maxDelegationDepth bounds nested delegations.
	maxDelegationDepth = 2
	// classDelegate is the class of a failed delegation.
	classDelegate = "delegate"
	// defaultShare is the divisor of the remaining budget for a task without tokens.
	defaultShare = 3
)

// delegateInput is the input of a delegated task. The model supplies only the task and restrictions.
type delegateInput struct {
	Task         string          `json:"task"`
	System       string          `json:"system"`
	Purpose      string          `json:"purpose"`
	Scopes       []string        `json:"scopes"`
	Only         []string        `json:"only,omitempty"` // skills; all in scope when empty
	Approvals    ApprovalMode    `json:"approvals"`
	Budget       Budget          `json:"budget"`
	ParentScopes []budgets.Scope `json:"above"`
	Depth        int             `json:"depth"`
}

// delegateArgs are the model's arguments.
type delegateArgs struct {
	Task   string   `json:"task"`
	Skills []string `json:"skills"`
	Tokens int      `json:"tokens"`
	Agent  string   `json:"agent"`
}

// childResult is the end of a delegated task.
type childResult struct {
	Status  string  `json:"status"`
	Summary string  `json:"summary"`
	Outcome Outcome `json:"outcome"`
}

// RegisterDelegate registers the flow of delegated tasks.
func (l *Loop) RegisterDelegate(e *executions.Engine) error {
	return e.Register(delegateFlow, func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		var d delegateInput
		if err := json.Unmarshal(input, &d); err != nil {
			return executions.Result{}, fmt.Errorf("read the delegated task: %w", err)
		}
		got, err := l.Run(ctx, l.childTurn(ctx, e, d))
		if err != nil {
			return executions.Result{}, err
		}
		return executions.Result{Summary: got.Text, Value: got}, nil
	})
}

// childTurn returns the turn of a delegated task.
func (l *Loop) childTurn(ctx context.Context, e *executions.Engine, d delegateInput) Turn {
	current, _ := executions.Current(ctx)
	t := Turn{
		Purpose: d.Purpose, System: d.System, Prompt: d.Task, Scopes: d.Scopes, Approvals: d.Approvals,
		Budget:       &d.Budget,
		BudgetScope:  childScope(trace.ID(current.TraceID), current.ID),
		parentScopes: d.ParentScopes, onlySkills: d.Only, depth: d.Depth,
	}
	if d.Depth < maxDelegationDepth {
		t.Tools = []Tool{l.DelegateTool(e, d.Scopes)}
	}
	return t
}

// DelegateTool lets a turn delegate a task to a child execution in the same trace. The child may use the turn's skills
// within scopes, or only the named skills. A child that acts as another agent uses that agent's skills within scopes.
// The child gets a part of the remaining budget, and its usage counts for the turn. It handles approvals like the turn.
// The turn waits durably; a cancelled turn cancels the child. A failed child is a result for the model. Delegations
// nest at most two deep.
func (l *Loop) DelegateTool(e *executions.Engine, scopes []string) Tool {
	return Tool{
		Name: "delegate",
		Description: "Hands a self-contained sub-task to a helper that knows nothing of this conversation, and " +
			"returns its answer. Say in the task all that the helper needs to know, and what it is to answer.",
		Parameters: json.RawMessage(`{"type":"object","additionalProperties":false,"required":["task"],"properties":{
			"task":{"type":"string","minLength":1,"maxLength":20000},
			"skills":{"type":"array","maxItems":40,"items":{"type":"string"},"description":"the only skills it may use; all of yours when left out"},
			"tokens":{"type":"integer","minimum":1000,"description":"how many tokens it may use; a third of what you have left when left out"}}}`),
		Do: func(context.Context, json.RawMessage) (any, error) {
			return nil, stepError(classDelegate, "there is no turn to delegate from")
		},
		bindTurn: func(w *turn) func(context.Context, json.RawMessage) (any, error) {
			return func(ctx context.Context, args json.RawMessage) (any, error) {
				return w.delegate(ctx, e, scopes, args)
			}
		},
	}
}

// bindTools binds the caller's tools to a turn. In a sandbox, the sandbox answers their calls.
func (w *turn) bindTools() {
	w.Tools = slices.Clone(w.Tools)
	for i, t := range w.Tools {
		switch {
		case t.bindTurn != nil:
			w.Tools[i].Do = t.bindTurn(w)
			w.Tools[i] = w.addAgentParameter(w.Tools[i])
		case t.DoSeen != nil:
			w.Tools[i].Do = func(ctx context.Context, args json.RawMessage) (any, error) {
				return t.DoSeen(ctx, args, w.seen)
			}
		}
		if w.Sandbox != nil {
			w.Tools[i].Do = w.sandboxed(t.Name)
		}
	}
}

// filterSkills removes the skills that the agent or the delegation excludes.
func (t *Turn) filterSkills(a agents.Agent, all []skills.Skill) []skills.Skill {
	remembers := a.Memory != agents.MemoryNone
	return slices.DeleteFunc(all, func(s skills.Skill) bool {
		return !a.May(s.Name) || !remembers && builtins.OnMemory(s) ||
			len(t.onlySkills) > 0 && !slices.Contains(t.onlySkills, s.Name)
	})
}

// delegate starts a child, waits for its end, and returns its answer.
func (w *turn) delegate(ctx context.Context, e *executions.Engine, scopes []string, args json.RawMessage) (any, error) {
	var params delegateArgs
	if err := json.Unmarshal(args, &params); err != nil {
		return nil, &executions.StepError{Class: classInvalid, Message: err.Error()}
	}
	result, err := executions.Phase(ctx, "delegate",
		func(ctx context.Context, effect *executions.Effect) (childResult, error) {
			child, err := executions.StepTx(ctx, "start", func(ctx context.Context, tx pgx.Tx) (string, error) {
				spec, err := w.childSpec(ctx, params, scopes)
				if err != nil {
					return "", err
				}
				x, _, err := e.StartTx(ctx, tx, spec)
				return x.ID, err
			}, executions.Input(params))
			if err != nil {
				return childResult{}, err
			}
			effect.Output = map[string]any{"task": params.Task, "execution_id": child}
			result, err := w.awaitChild(ctx, e, child)
			if err == nil {
				effect.Output = map[string]any{
					"task": params.Task, "execution_id": child, "status": result.Status,
					"answer": result.Outcome.Text,
				}
			}
			return result, err
		}, executions.Input(params))
	if err != nil {
		return nil, err
	}
	w.addUsage(result.Outcome)
	if result.Status != string(executions.Completed) {
		return nil, stepError(classDelegate, "the delegated task ended as %s: %s", result.Status, result.Summary)
	}
	return map[string]any{"answer": result.Outcome.Text, "ended": result.Outcome.Ended, "calls": result.Outcome.Calls}, nil
}

// addUsage adds the usage of a call or a child.
func (w *turn) addUsage(o Outcome) {
	w.outcome.Usage.PromptTokens += o.Usage.PromptTokens
	w.outcome.Usage.CompletionTokens += o.Usage.CompletionTokens
	w.outcome.Usage.TotalTokens += o.Usage.TotalTokens
	w.outcome.Usage.Estimated = w.outcome.Usage.Estimated || o.Usage.Estimated
	w.outcome.Usage.UnknownTokens += o.Usage.UnknownTokens
	w.outcome.Usage.UnknownUSD += o.Usage.UnknownUSD
	w.outcome.CostUSD += o.CostUSD
}

// childSpec returns the spec of a child. Its scopes and its budget are within those of the turn.
func (w *turn) childSpec(ctx context.Context, params delegateArgs, scopes []string) (executions.Spec, error) {
	current, _ := executions.Current(ctx)
	if w.depth >= maxDelegationDepth {
		return executions.Spec{}, stepError(classDelegate, "a delegated task cannot be delegated further")
	}
	agent, err := w.chooseAgent(params, current.Agent)
	if err != nil {
		return executions.Spec{}, err
	}
	only, err := w.restrictSkills(params.Skills)
	if err != nil {
		return executions.Spec{}, err
	}
	budget, err := w.childBudget(params.Tokens)
	if err != nil {
		return executions.Spec{}, err
	}
	return executions.Spec{
		Flow: delegateFlow, Surface: trace.Surface(current.Surface), TraceID: trace.ID(current.TraceID), Agent: agent,
		ParentID: current.ID, Awaited: true, Queue: current.Queue, Priority: current.Priority,
		Input: delegateInput{
			Task: params.Task, System: w.System, Purpose: w.Purpose, Approvals: w.Approvals, Only: only, Budget: budget,
			Scopes: slices.DeleteFunc(slices.Clone(w.Scopes),
				func(s string) bool { return !slices.Contains(scopes, s) }),
			ParentScopes: append(slices.Clone(w.parentScopes), w.scope(trace.ID(current.TraceID), w.budget)),
			Depth:        w.depth + 1,
		},
	}, nil
}

// restrictSkills validates the model's skill names for a child.
func (w *turn) restrictSkills(names []string) ([]string, error) {
	if len(names) == 0 {
		return w.onlySkills, nil
	}
	for _, name := range names {
		if !slices.ContainsFunc(w.skills, func(s skills.Skill) bool { return s.Name == name }) {
			return nil, stepError(classInvalid, "skills: you have no skill %q; yours are %s", displayName(name),
				strings.Join(skillNames(w.skills), ", "))
		}
	}
	return names, nil
}

// childBudget returns a part of the remaining budget.
func (w *turn) childBudget(tokens int) (Budget, error) {
	remaining := w.budget
	remaining.Iterations -= w.outcome.Iterations
	remaining.Time -= w.usedTime()
	if remaining.Iterations <= 0 || remaining.Time <= 0 {
		return Budget{}, stepError(classDelegate, "nothing is left of the budget for a delegated task")
	}
	fraction := 1.0 / defaultShare
	if w.budget.Tokens < math.MaxInt {
		remaining.Tokens -= w.outcome.Usage.TotalTokens
		if tokens > 0 {
			fraction = min(1, float64(tokens)/float64(max(remaining.Tokens, 1)))
		}
		remaining.Tokens = int(float64(remaining.Tokens) * fraction)
	} else if tokens > 0 {
		remaining.Tokens = tokens
	}
	if w.budget.CostUSD > 0 {
		remaining.CostUSD = (remaining.CostUSD - w.outcome.CostUSD) * fraction
	}
	if remaining.Tokens <= 0 || w.budget.CostUSD > 0 && remaining.CostUSD <= 0 {
		return Budget{}, stepError(classDelegate, "nothing is left of the budget for a delegated task")
	}
	return remaining, nil
}

// awaitChild waits for a child and reads its result. It cancels a child that exceeds the wait.
func (w *turn) awaitChild(ctx context.Context, e *executions.Engine, child string) (childResult, error) {
	_, timeout := executions.Limits("agent")
	if w.Approvals != Park {
		timeout = min(timeout, max(time.Hour, 2*w.budget.Time))
	}
	if w.OnWait != nil {
		w.OnWait()
	}
	outcome, err := executions.Wait(ctx, "end", executions.Agent(child, timeout))
	if err != nil {
		return childResult{}, err
	}
	return executions.Step(ctx, "read", func(ctx context.Context) (childResult, error) {
		if outcome.TimedOut {
			if _, err := e.Cancel(ctx, child, "delegate", "it did not end in time"); err != nil {
				return childResult{}, err
			}
		}
		x, err := executions.Get(ctx, w.Pool, child)
		if err != nil {
			return childResult{}, err
		}
		result := childResult{Status: string(x.Status), Summary: x.ResultSummary}
		if x.ErrorMessage != nil {
			result.Summary = *x.ErrorMessage
		}
		if x.Status == executions.Completed {
			err = json.Unmarshal(x.Result, &result.Outcome)
		} else {
			result.Outcome, err = w.childUsage(ctx, child)
		}
		return result, err
	})
}

// childUsage returns the usage of a child without a result, by its budget scope.
func (w *turn) childUsage(ctx context.Context, child string) (Outcome, error) {
	span, _ := trace.From(ctx)
	spent, err := budgets.Of(ctx, w.Pool, childScope(span.TraceID, child))
	o := Outcome{CostUSD: spent.CostUSD}
	o.Usage.TotalTokens, o.Usage.Estimated = int(spent.Tokens), true
	o.Usage.UnknownTokens, o.Usage.UnknownUSD = int(spent.UnknownTokens), spent.UnknownUSD
	return o, err
}

// childScope returns the budget scope of a delegated task.
func childScope(id trace.ID, child string) string { return budgets.RunScope(id) + "/" + child }

// delegateAgent is an agent that a turn may delegate to.
type delegateAgent struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
}

// addAgentParameter adds the parameter agent to a delegating tool.
func (w *turn) addAgentParameter(t Tool) Tool {
	if len(w.delegates) == 0 {
		return t
	}
	var schema map[string]any
	if json.Unmarshal(t.Parameters, &schema) != nil {
		return t
	}
	properties, ok := schema["properties"].(map[string]any)
	if !ok {
		return t
	}
	names, lines := make([]string, len(w.delegates)), make([]string, len(w.delegates))
	for i, c := range w.delegates {
		names[i], lines[i] = c.Name, strings.TrimSuffix(c.Name+": "+c.Description, ": ")
	}
	properties["agent"] = map[string]any{
		"type": "string", "enum": names,
		"description": "who does it, with skills of its own; you yourself when left out. " + strings.Join(lines, "; "),
	}
	changed, err := json.Marshal(schema)
	if err != nil {
		return t
	}
	t.Parameters = changed
	return t
}

// chooseAgent returns the agent of a child: the named agent, if permitted, or the turn's own agent.
func (w *turn) chooseAgent(params delegateArgs, ownAgent string) (string, error) {
	switch {
	case params.Agent == "":
		return ownAgent, nil
	case !slices.ContainsFunc(w.delegates, func(c delegateAgent) bool { return c.Name == params.Agent }):
		return "", stepError(classInvalid, "agent: you may not delegate to %q; omit agent, or name another",
			displayName(params.Agent))
	case len(params.Skills) > 0:
		return "", stepError(classInvalid, "skills: another agent uses its own; name either an agent or skills")
	}
	return params.Agent, nil
}
