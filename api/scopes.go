package api

import (
	"context"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/principals"
)

var authenticated = []principals.Scope{principals.Authenticated}

// routesByScope lists the routes of each scope. A route without a scope needs principals.Administer, and fails a test.
var routesByScope = map[principals.Scope][]string{
	principals.RunsRead: {
		"GET /v1/traces", "GET /v1/traces/{id}", "GET /v1/traces/{id}/why", "GET /v1/activity", "GET /v1/activity/spend",
		"GET /v1/activity/slowest", "GET /v1/activity/failing", "GET /v1/activity/audit", "GET /v1/executions",
		"GET /v1/executions/{id}", "GET /v1/executions/{id}/events", "GET /v1/monitor/status", "GET /v1/monitor/waiting",
		"GET /v1/monitor/stuck", "GET /v1/flows", "GET /v1/flows/{name}", "GET /v1/schemas/flow", "GET /v1/requests",
		"GET /v1/requests/{id}", "GET /v1/lanes", "GET /v1/skills", "GET /v1/skills/{name}", "GET /v1/objectives",
		"GET /v1/objectives/{id}", "GET /v1/automations", "GET /v1/automations/{id}", "GET /v1/agents",
		"GET /v1/agents/{name}", "GET /v1/pause", "GET /v1/webhooks/targets", "GET /v1/channels",
		"GET /v1/webhooks/deliveries", "GET /v1/webhooks/deliveries/{id}", "GET /v1/monitor/verdict", "GET /v1/evals",
		"GET /v1/evals/runs", "GET /v1/evals/runs/{id}",
	},
	principals.RunsWrite: {
		"POST /v1/executions", "POST /v1/executions/bulk", "POST /v1/executions/{id}/cancel", "POST /v1/executions/{id}/fork",
		"POST /v1/executions/{id}/retry", "POST /v1/executions/{id}/replay", "POST /v1/events",
		"POST /v1/objectives/{id}/accept", "POST /v1/objectives/{id}/reject", "POST /v1/objectives/{id}/pause",
		"POST /v1/objectives/{id}/resume", "POST /v1/evals/labels",
	},
	principals.ThreadsRead: {
		"GET /v1/traces/{id}/prompts", "GET /v1/threads", "GET /v1/threads/{id}", "GET /v1/threads/{id}/access",
		"GET /v1/memory", "GET /v1/memory/entries/{category}/{key}", "GET /v1/memory/conflicts", "GET /v1/documents",
		"GET /v1/documents/{id}", "GET /v1/documents/{id}/content", "GET /v1/channels/senders", "GET /v1/evals/labels",
	},
	principals.ThreadsWrite: {
		"POST /v1/threads", "PATCH /v1/threads/{id}", "POST /v1/threads/{id}/messages", "POST /v1/threads/{id}/join_tokens",
		"POST /v1/threads/{id}/participants", "DELETE /v1/threads/{id}/access/{access_id}",
		"PUT /v1/memory/entries/{category}/{key}", "DELETE /v1/memory/entries/{category}/{key}",
		"POST /v1/memory/{id}/forget", "POST /v1/memory/conflicts/{id}/decide", "POST /v1/documents",
		"DELETE /v1/documents/{id}",
	},
	principals.Operate: {
		"POST /v1/monitor/acknowledge", "POST /v1/pause", "POST /v1/resume", "POST /v1/skills/{name}/enable",
		"POST /v1/skills/{name}/disable", "POST /v1/lanes/{lane}/break", "POST /v1/automations/{id}/enable",
		"POST /v1/automations/{id}/disable", "POST /v1/automations/{id}/accept", "POST /v1/automations/{id}/run",
		"POST /v1/automations/runs/{id}/redrive",
		"POST /v1/webhooks/targets/{id}/enable", "POST /v1/webhooks/targets/{id}/disable",
		"POST /v1/webhooks/endpoints/{id}/enable", "POST /v1/webhooks/endpoints/{id}/disable",
		"POST /v1/webhooks/outbox/{id}/resend", "POST /v1/channels/{id}/enable", "POST /v1/channels/{id}/disable",
		"POST /v1/evals/runs",
		"POST /v1/executions/{id}/cancel", // a turn that the caller started
	},
	principals.ApprovalsRead:   {"GET /v1/approvals", "GET /v1/approvals/{id}"},
	principals.ApprovalsDecide: {"POST /v1/approvals/{id}"},
	principals.Authenticated:   {"GET /v1/me"},
	principals.Administer: {
		"GET /v1/retention", "PUT /v1/retention", "GET /v1/principals", "POST /v1/principals", "GET /v1/principals/{id}",
		"PATCH /v1/principals/{id}", "POST /v1/principals/{id}/identities", "DELETE /v1/principals/{id}/identities",
		"POST /v1/principals/{id}/login_links", "GET /v1/tokens", "POST /v1/tokens", "POST /v1/tokens/{id}/revoke",
		"GET /v1/sessions", "POST /v1/sessions/{id}/revoke", "POST /v1/channels/pair", "POST /v1/channels/{id}/unpair",
	},
	principals.Work: {
		"POST /v1/executions/{id}/lock", "PUT /v1/executions/{id}/lock/{lock_id}",
		"DELETE /v1/executions/{id}/lock/{lock_id}", "POST /v1/executions/{id}/lock/{lock_id}", "POST /v1/locks",
		"PUT /v1/locks", "POST /v1/executions/{id}/checkpoints",
		"POST /v1/threads/{id}/messages", // for an execution that the worker has locked
	},
}

// scopesByRoute lists the scopes of each route. An error names the first scope, so a scope for people comes before
// Work.
var scopesByRoute = func() map[string][]principals.Scope {
	byRoute := map[string][]principals.Scope{}
	for _, scope := range append(principals.Admin.Scopes(), principals.Authenticated) {
		for _, name := range routesByScope[scope] {
			byRoute[name] = append(byRoute[name], scope)
		}
	}
	return byRoute
}()

func scopesOf(method, path string) []principals.Scope {
	if list := scopesByRoute[method+" "+path]; len(list) > 0 {
		return list
	}
	return []principals.Scope{principals.Administer}
}

// mayWork rejects executions, by id or lock, whose flows the caller's scope work:GLOB does not match.
func (s *server) mayWork(ctx context.Context, executionID string, lockIDs ...string) error {
	caller := principals.From(ctx)
	if caller == nil || caller.AllFlows() {
		return nil
	}
	flows, err := postgres.Names(ctx, s.pool, "read the flows of executions", `
		select distinct x.flow
		  from agent_executions x
		 where x.id = any (array(
		         select lanekeeper.agent_uuid(@id)
		         union all
		         select k.execution_id from agent_workers k where k.lock_id = any (@locks)))`,
		postgres.Strict{"id": executionID, "locks": lockIDs})
	if err != nil {
		return err
	}
	return mayWorkOn(caller, flows)
}

// mayWorkOn rejects flows that the caller's scope work:GLOB does not match.
func mayWorkOn(caller *principals.Caller, flows []string) error {
	for _, flow := range flows {
		if caller != nil && !caller.MayWork(flow) {
			return missingScope(caller, string(principals.Work)+":"+flow)
		}
	}
	return nil
}
