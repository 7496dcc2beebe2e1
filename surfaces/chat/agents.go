package chat

import (
	"context"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// ModelsHandler serves GET /v1/models.
func (c *Chat) ModelsHandler() http.Handler {
	return c.handler(func(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
		reachable, err := c.reachableAgents(r)
		if err != nil {
			return err
		}
		return chatwire.WriteModels(w, c.created, modelOwner, listModels(reachable)...)
	})
}

// ModelHandler serves GET /v1/models/{id}.
func (c *Chat) ModelHandler() http.Handler {
	return c.handler(func(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
		reachable, err := c.reachableAgents(r)
		if err != nil {
			return err
		}
		a, err := selectAgent(reachable, r.PathValue("id"))
		if err != nil {
			return err
		}
		model := newModel(a)
		model.ID = r.PathValue("id")
		return chatwire.WriteModel(w, c.created, modelOwner, model)
	})
}

// reachableAgents lists the agents of a request's key.
func (c *Chat) reachableAgents(r *http.Request) ([]agents.Agent, error) {
	return c.listAgents(r.Context(), c.Visitor(r))
}

// listAgents lists the agents of a chat key. It retries when the connection breaks.
func (c *Chat) listAgents(ctx context.Context, key string) (list []agents.Agent, err error) {
	err = postgres.RetryOnDisconnect(ctx, func() error {
		list, err = c.Agents.Reachable(ctx, c.Front, key)
		return err
	})
	return list, err
}

// legacyAgentName was the default of AGENT_NAME. Configurations of clients may still have it.
const legacyAgentName = "flowpilot"

// selectAgent returns the agent of a model id. The alias means the default agent, or the only agent of the key.
func selectAgent(reachable []agents.Agent, model string) (agents.Agent, error) {
	for _, a := range reachable {
		if a.Name == model || model == agents.Alias && (a.Default || len(reachable) == 1) {
			return a, nil
		}
		if model == legacyAgentName && !a.Declared() {
			return a, nil
		}
	}
	r := notFound("model_not_found", "The model %q does not exist, or this key does not reach it. There is: %s.",
		truncate(model, 100), strings.Join(agentNames(reachable), ", "))
	r.Param = "model"
	return agents.Agent{}, r
}

func agentNames(list []agents.Agent) []string {
	all := make([]string, len(list))
	for i, a := range list {
		all[i] = a.Name
	}
	return all
}

// modelOwner is the owner in the model listing.
const modelOwner = "lanekeeper"

// listModels returns the model listing: the agents, and the alias if it is unambiguous.
func listModels(reachable []agents.Agent) []chatwire.Model {
	var list []chatwire.Model
	for _, a := range reachable {
		list = append(list, newModel(a))
	}
	if a, err := selectAgent(reachable, agents.Alias); err == nil && a.Name != agents.Alias {
		alias := newModel(a)
		alias.ID = agents.Alias
		list = append(list, alias)
	}
	return list
}

// newModel converts an agent to a model of the listing.
func newModel(a agents.Agent) chatwire.Model {
	return chatwire.Model{ID: a.Name, Description: a.Description, Greeting: a.Greeting}
}

// agentName is the agent's name in executions, threads and activity rows.
func agentName(a agents.Agent) string {
	if !a.Declared() {
		return Agent
	}
	return a.Name
}

// checkAgent refuses a message to another agent than the thread's. An undeclared agent counts as the default agent. A
// person on a channel can name no agent, so the conversation follows the agent of the channel.
func (c *Chat) checkAgent(ctx context.Context, tx pgx.Tx, threadAgent string, a *UserMessage) error {
	if threadAgent == agentName(a.agent) || a.headless() {
		return nil
	}
	all, err := c.Agents.List(ctx, tx)
	if err != nil {
		return err
	}
	acting := agents.Acting(all, threadAgent)
	if acting.Name == a.agent.Name {
		return nil
	}
	r := conflict("thread_agent", "This thread belongs to %s. Name that model, or start another thread.", acting.Name)
	if _, err := selectAgent(agents.ReachedBy(all, a.Owner), acting.Name); err != nil && a.available != nil {
		r = conflict("thread_agent", "This thread belongs to an agent that this key does not reach. Start another thread.")
	}
	r.Param = "model"
	return r
}
