package reason

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Sandbox isolates the turns of a Loop, for evals. A turn reads the declared agents and skills, unless World replaces
// them, and calls the model. The sandbox answers the calls of skills and of the turn's Tools, and provides memory,
// approvals, the time and the budget. All functions except Stop are required. A resumed turn repeats OnResult and
// OnCall for its recorded calls.
type Sandbox struct {
	Agent   string // the agent and its version; 0 for the version of the installation
	Version int
	World   *World // replaces the declared agents and skills if set
	Model   string // replaces the agent's model and fallbacks if set
	Now     time.Time
	Budget  budgets.Scope // bounds the turn besides its own budget; replaces the limits of the day

	// Pinned returns the pinned memory of the given names.
	Pinned func(names []memory.Name) []memory.Entry
	// Invoke answers a call of a skill or of one of the turn's Tools. An *executions.StepError is the call's result.
	Invoke func(ctx context.Context, skill string, args json.RawMessage) (any, error)
	// Approve decides on a call that needs an approval.
	Approve func(skill string, args json.RawMessage) (approved bool, reason string)
	// OnResult receives the result of each made call, in order. A resumed turn repeats the earlier results.
	OnResult func(skill string, args, result json.RawMessage)
	// OnCall receives each requested call, in the order of the model.
	OnCall func(Requested)
	// Stop, if set, ends the turn before its next model call.
	Stop func() bool
}

// World has the agent of a turn, its delegates and its skills.
type World struct {
	Agent     agents.Agent
	Delegates []agents.Agent
	Skills    []skills.Skill
}

// Requested is a call that the model requested in a sandbox.
type Requested struct {
	Name     string          `json:"name"`
	Args     json.RawMessage `json:"args"`
	Refused  bool            `json:"refused,omitempty"`  // unknown tool, invalid arguments or repeated
	Approval string          `json:"approval,omitempty"` // approved or denied; empty for none
}

// chooseSandboxTools is chooseTools in a sandbox. It offers disabled skills too, because the state of a skill is not
// part of the agent.
func (l *Loop) chooseSandboxTools(ctx context.Context, db postgres.DB, t *Turn) (p *prepared, err error) {
	s := l.Sandbox
	p = &prepared{}
	if p.agent, err = l.sandboxAgent(ctx, db); err != nil {
		return p, err
	}
	all, offered, err := l.sandboxWorld(ctx, db, t)
	if err != nil {
		return p, err
	}
	p.Agent, p.Now, p.Delegates = &agentRef{p.agent.Name, p.agent.Version}, s.Now.UTC(), delegateAgents(all, p.agent)
	for _, e := range s.Pinned(pinnedNames(p.agent)) {
		p.Pinned = append(p.Pinned, pinnedEntry{memory.Name{Category: e.Category, Key: e.Key}, e.Value, e.Revision})
	}
	offered = t.filterSkills(p.agent, offered)
	p.Skills = offered
	if len(offered) > maxOffered {
		p.Skills, p.More = rankedSkills(offered, t.Prompt)[:offeredOfMany], len(offered)-offeredOfMany
	}
	return p, nil
}

func (l *Loop) sandboxWorld(ctx context.Context, db postgres.DB, t *Turn) ([]agents.Agent, []skills.Skill, error) {
	if w := l.Sandbox.World; w != nil {
		return w.Delegates, slices.DeleteFunc(slices.Clone(w.Skills), func(s skills.Skill) bool {
			return len(t.Scopes) == 0 || s.Scope != skills.ScopeBoth && !slices.Contains(t.Scopes, s.Scope)
		}), nil
	}
	all, err := l.Agents.List(ctx, db)
	if err != nil {
		return nil, nil, err
	}
	offered, err := skills.InScope(ctx, db, t.Scopes)
	return all, offered, err
}

// sandboxAgent reads the agent of the sandbox, with its model.
func (l *Loop) sandboxAgent(ctx context.Context, db postgres.DB) (agents.Agent, error) {
	var agent agents.Agent
	var err error
	if w := l.Sandbox.World; w != nil {
		agent = w.Agent
	} else {
		agent, err = l.Agents.Version(ctx, db, l.Sandbox.Agent, l.Sandbox.Version)
	}
	if l.Sandbox.Model != "" {
		agent.Model, agent.Fallback = l.Sandbox.Model, nil
	}
	return agent, err
}

// decideSandboxed makes or denies a call that needs an approval.
func (w *turn) decideSandboxed(ctx context.Context, c *call, s skills.Skill) error {
	if reason, denied := w.deniedReasons[c.approval.key]; denied {
		return w.repeatDenial(ctx, c, reason)
	}
	if approved, reason := w.Sandbox.Approve(s.Name, c.args); !approved {
		return w.deny(ctx, c, reason)
	}
	return w.invokeSkill(ctx, c, s, "skill "+s.Name, nil)
}

// describeRequest describes a call for the sandbox.
func (w *turn) describeRequest(c *call) Requested {
	r := Requested{Name: displayName(c.name), Args: c.args, Refused: c.correction != "" || c.result == repeatedResult}
	if !json.Valid(c.args) {
		r.Args, _ = json.Marshal(string(c.args)) // a string always encodes
	}
	if _, denied := w.deniedReasons[c.approvalKey()]; c.approval != nil {
		r.Approval = "approved"
		if denied {
			r.Approval = "denied"
		}
	}
	return r
}

// approvalKey is the key of the awaited approval; empty for none.
func (c *call) approvalKey() string {
	if c.approval == nil {
		return ""
	}
	return c.approval.key
}

// sandboxed returns the Do of a tool that the sandbox answers, as a durable step.
func (w *turn) sandboxed(tool string) func(context.Context, json.RawMessage) (any, error) {
	return func(ctx context.Context, args json.RawMessage) (any, error) {
		result, err := executions.Do(ctx, tool, executions.Call{
			Entry: activity.Entry{Skill: tool, Purpose: w.Purpose, Input: args}, Idempotent: true,
		}, func(ctx context.Context, _ *executions.Effect) (json.RawMessage, error) {
			return w.Sandbox.invoke(ctx, tool, args)
		})
		if executions.IsControl(err) {
			return nil, err
		}
		w.Sandbox.OnResult(tool, args, result)
		return result, err
	}
}

// invoke calls Invoke.
func (s *Sandbox) invoke(ctx context.Context, skill string, args json.RawMessage) (json.RawMessage, error) {
	value, err := s.Invoke(ctx, skill, args)
	if err != nil {
		return nil, err
	}
	return json.Marshal(value)
}
