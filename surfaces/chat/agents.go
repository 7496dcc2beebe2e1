package chat

import (
	"context"
	"net/http"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/threads"
)

// modelOwner is who owns the models that clients see.
const modelOwner = "lanekeeper"

// formerName was the default of AGENT_NAME, and stands in clients' configurations.
const formerName = "flowpilot"

// reachable lists the agents that a request's key reaches.
func (c *Chat) reachable(r *http.Request) ([]agents.Agent, error) {
	return c.reachedBy(r.Context(), c.Visitor(r))
}

// reachedBy lists the agents that a chat key reaches. A connection that breaks is no answer: another is asked.
func (c *Chat) reachedBy(ctx context.Context, key string) (list []agents.Agent, err error) {
	err = postgres.Again(ctx, func() error {
		list, err = c.Agents.Reachable(ctx, c.Front, key)
		return err
	})
	return list, err
}

// choose finds the agent of a model id. The alias is the default agent, or the only one that the key reaches.
func choose(reachable []agents.Agent, model string) (agents.Agent, error) {
	for _, a := range reachable {
		if a.Name == model || model == agents.Alias && (a.Default || len(reachable) == 1) {
			return a, nil
		}
		if model == formerName && !a.Declared() {
			return a, nil
		}
	}
	r := unknown("model_not_found", "The model %q does not exist, or this key does not reach it. There is: %s.",
		clip(model, 100), strings.Join(names(reachable), ", "))
	r.Param = "model"
	return agents.Agent{}, r
}

func names(list []agents.Agent) []string {
	all := make([]string, len(list))
	for i, a := range list {
		all[i] = a.Name
	}
	return all
}

// modelsOf lists the models that clients may name: the agents, and the alias where it means one of them.
func modelsOf(reachable []agents.Agent) []chatwire.Model {
	var list []chatwire.Model
	for _, a := range reachable {
		list = append(list, modelOf(a))
	}
	if a, err := choose(reachable, agents.Alias); err == nil && a.Name != agents.Alias {
		alias := modelOf(a)
		alias.ID = agents.Alias
		list = append(list, alias)
	}
	return list
}

// modelOf is an agent as clients see it.
func modelOf(a agents.Agent) chatwire.Model {
	return chatwire.Model{ID: a.Name, Description: a.Description, Greeting: a.Greeting}
}

// rowName is an agent's name on executions, threads and activity rows.
func rowName(a agents.Agent) string {
	if !a.Declared() {
		return Agent
	}
	return a.Name
}

// sameAgent refuses a message to another agent than the thread's. A thread whose agent is not declared is the default
// agent's.
func (c *Chat) sameAgent(ctx context.Context, tx pgx.Tx, thread string, a Ask) error {
	if thread == rowName(a.agent) {
		return nil
	}
	owner, err := c.Agents.Acting(ctx, tx, thread)
	if err != nil || owner.Name == a.agent.Name {
		return err
	}
	r := conflict("thread_agent", "This thread is one with %s. Name that model, or begin another thread.", owner.Name)
	r.Param = "model"
	return r
}

// opened lets a history begin with the visitor, as servers want it: the agent may have spoken first, with its greeting.
func opened(history []models.Message) []models.Message {
	if len(history) == 0 || history[0].Role != threads.Assistant {
		return history
	}
	return slices.Insert(history, 0, models.Message{
		Role:    threads.User,
		Content: "[The visitor opened the conversation.]",
	})
}
