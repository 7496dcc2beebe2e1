package heartbeat

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// input says whose heartbeat it is; empty: the default agent's.
type input struct {
	Agent string `json:"agent,omitempty"`
}

// lane is the lane that makes the heartbeats of an agent single.
func (in input) lane() string { return nameFor(in.Agent) }

// nameFor is the name of an agent's lane, and of its schedule.
func nameFor(agent string) string {
	if agent == "" {
		return Lane
	}
	return Lane + ":" + agent
}

// SpecOf describes one heartbeat of an agent, now.
func SpecOf(a agents.Agent) executions.Spec {
	s := Spec(a.Name)
	if !a.Default {
		s.Input = input{Agent: a.Name}
	}
	return s
}

// Sync makes the schedules of heartbeats those of the agents in service. A process that serves calls it when it begins.
// Who changes agents calls it in that transaction, and is no server: its settings may be another shell's. Then the
// times of a schedule that is there stay, unless the agent's document says them.
func Sync(ctx context.Context, tx pgx.Tx, directory *agents.Directory, server bool) error {
	if err := workspace.Lock(ctx, tx); err != nil { // or it would remove the schedule of an agent that is applied meanwhile
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
			Name: nameFor(""), Flow: Flow, Surface: trace.Heartbeat, Agent: a.Name, Cron: a.Heartbeat.Cron, Timezone: a.Timezone,
			Input: spec.Input,
		}
		if !a.Default {
			s.Name = nameFor(a.Name)
		}
		declared := a.AsDeclared().Heartbeat != nil && a.AsDeclared().Heartbeat.Cron != ""
		if err := put(ctx, tx, s, server || declared); err != nil {
			return err
		}
		keep = append(keep, s.Name)
	}
	return executions.RemoveSchedules(ctx, tx, Flow, keep)
}

// put writes a schedule. Without times it changes those of none that is there.
func put(ctx context.Context, db postgres.DB, s executions.Schedule, times bool) error {
	if !times {
		found, err := executions.AssignSchedule(ctx, db, s.Name, s.Agent)
		if err != nil || found {
			return err
		}
	}
	return executions.PutSchedule(ctx, db, s)
}

// who is what a heartbeat records of its agent when it begins.
type who struct {
	Prompt string   `json:"prompt,omitempty"`
	Others []string `json:"others,omitempty"` // agents that have heartbeats of their own
}

// beat reads, once, whose heartbeat this is.
func (h *Heartbeat) beat(ctx context.Context, in input) (*beat, error) {
	b := &beat{Heartbeat: h, shared: in.Agent == ""}
	if h.Loop.Agents == nil {
		return b, nil
	}
	var err error
	b.who, err = executions.Step(ctx, "agent", func(ctx context.Context) (w who, err error) {
		all, err := h.Loop.Agents.List(ctx, h.Pool)
		for _, a := range all {
			if a.Heartbeat == nil {
				continue
			}
			if a.Name == in.Agent || in.Agent == "" && a.Default {
				w.Prompt = a.Heartbeat.Prompt
			}
			if !a.Default {
				w.Others = append(w.Others, a.Name)
			}
		}
		return w, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the agent: %w", err)
	}
	b.agent = in.Agent
	return b, nil
}

// objectives says which objectives this heartbeat works on: its agent's, or, of the default agent, all that no other
// heartbeat works on.
func (b *beat) objectives() objectives.AgentFilter {
	return objectives.AgentFilter{Agent: b.agent, Except: b.who.Others}
}

// followPrompt does what the agent's document wants done at every heartbeat.
func (b *beat) followPrompt(ctx context.Context) (done, error) {
	var noted []memory
	outcome, err := b.Loop.Run(ctx, reason.Turn{
		Purpose: "heartbeat_prompt", BudgetScope: scope(ctx, "heartbeat_prompt"), Context: b.context(),
		System: system("You carry out the task of your heartbeat."), Prompt: b.who.Prompt,
		Scopes: []string{skills.ScopeInternal}, Tools: []reason.Tool{remember(&noted)},
	})
	if err != nil {
		return done{Memories: noted}, err
	}
	return done{Summary: "prompt: " + firstLine(outcome.Text), Memories: noted}, nil
}
