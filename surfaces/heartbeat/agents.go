package heartbeat

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// input names the agent; empty means the default agent.
type input struct {
	Agent string `json:"agent,omitempty"`
}

// laneName names an agent's lane and its schedule.
func laneName(agent string) string {
	if agent == "" {
		return Lane
	}
	return Lane + ":" + agent
}

// SpecOf describes an immediate heartbeat of an agent.
func SpecOf(a agents.Agent) executions.Spec {
	s := Spec(a.Name)
	if !a.Default {
		s.Input = input{Agent: a.Name}
	}
	return s
}

// Sync makes the schedules match the agents with a heartbeat. A serving process calls it at start. A command that
// changes agents calls it in the same transaction with server false, because its settings may differ: then existing
// schedules keep their times, unless the agent's document declares them.
func Sync(ctx context.Context, tx pgx.Tx, directory *agents.Directory, server bool) error {
	// The lock prevents the removal of a schedule that a concurrent apply has not committed yet.
	if err := workspace.Lock(ctx, tx); err != nil {
		return err
	}
	all, err := directory.List(ctx, tx)
	if err != nil {
		return err
	}
	var keep []string
	for _, a := range all {
		if a.Heartbeat == nil {
			continue
		}
		spec := SpecOf(a)
		s := executions.Schedule{
			Name: laneName(""), Flow: Flow, Surface: trace.Heartbeat, Agent: a.Name, Cron: a.Heartbeat.Cron,
			Timezone: a.Timezone,
			Input:    spec.Input,
		}
		if !a.Default {
			s.Name = laneName(a.Name)
		}
		declared := a.AsDeclared().Heartbeat != nil && a.AsDeclared().Heartbeat.Cron != ""
		if err := putSchedule(ctx, tx, s, server || declared); err != nil {
			return err
		}
		keep = append(keep, s.Name)
	}
	return executions.RemoveSchedules(ctx, tx, Flow, keep)
}

// putSchedule writes a schedule. Without updateTimes it keeps the times of an existing schedule.
func putSchedule(ctx context.Context, db postgres.DB, s executions.Schedule, updateTimes bool) error {
	if !updateTimes {
		found, err := executions.AssignSchedule(ctx, db, s.Name, s.Agent)
		if err != nil || found {
			return err
		}
	}
	return executions.PutSchedule(ctx, db, s)
}

// agentInfo is recorded at the start of a heartbeat.
type agentInfo struct {
	Prompt string   `json:"prompt,omitempty"`
	Others []string `json:"others,omitempty"` // agents that have heartbeats of their own
}

// newRun reads the agent of a heartbeat in a step.
func (h *Heartbeat) newRun(ctx context.Context, in input) (*heartbeatRun, error) {
	b := &heartbeatRun{Heartbeat: h, isDefault: in.Agent == ""}
	if h.Loop.Agents == nil {
		return b, nil
	}
	var err error
	b.info, err = executions.Step(ctx, "agent", func(ctx context.Context) (info agentInfo, err error) {
		all, err := h.Loop.Agents.List(ctx, h.Pool)
		for _, a := range all {
			if a.Heartbeat == nil {
				continue
			}
			if a.Name == in.Agent || in.Agent == "" && a.Default {
				info.Prompt = a.Heartbeat.Prompt
			}
			if !a.Default {
				info.Others = append(info.Others, a.Name)
			}
		}
		return info, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the agent: %w", err)
	}
	b.agent = in.Agent
	return b, nil
}

// runPrompt runs the heartbeat prompt of the agent's document.
func (b *heartbeatRun) runPrompt(ctx context.Context) (phaseResult, error) {
	decided, err := b.decidedCalls(ctx)
	if err != nil {
		return phaseResult{}, err
	}
	var notes []memoryNote
	outcome, err := b.Loop.Run(ctx, reason.Turn{
		Purpose: "heartbeat_prompt", BudgetScope: budgetScope(ctx, "heartbeat_prompt"),
		Context: b.promptContext() + "\n" + decidedContext(decided),
		System:  systemPrompt("You carry out the task of your heartbeat."), Prompt: b.info.Prompt,
		Scopes: []string{skills.ScopeInternal}, Tools: []reason.Tool{rememberTool(&notes)},
	})
	if err != nil {
		return phaseResult{Memories: notes}, err
	}
	return phaseResult{Summary: "prompt: " + firstLine(outcome.Text), Memories: notes}, nil
}
