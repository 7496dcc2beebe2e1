package engineroom

import (
	"slices"
)

// actions lists all actions. The Engine Room calls no other routes.
func actions() []action {
	return slices.Concat(accessActions(), triggerActions(), []action{
		{
			"POST", "/v1/monitor/acknowledge", append([]field{{"mark", asText}}, reasonField...),
			"The reasons are acknowledged. They count again when they change.",
		},
		{"POST", "/v1/pause", reasonField, "Autonomous work is paused."},
		{"POST", "/v1/resume", reasonField, "Autonomous work is resumed."},
		{
			"POST", "/v1/executions", append(
				[]field{{"flow", asText}, {"input", asJSON}, {"thread_id", asText}}, reasonField...),
			"The execution is started.",
		},
		{"POST", "/v1/executions/{id}/cancel", reasonField, "The execution is cancelled."},
		{"POST", "/v1/executions/bulk", append([]field{{"action", asText}, {"ids", asList}}, reasonField...), ""},
		{"POST", "/v1/executions/{id}/retry", nil, "A new execution repeats the failed step."},
		{"POST", "/v1/executions/{id}/fork", append([]field{{"from", asText}, {"input", asJSON}, {"latest", asFlag}},
			reasonField...), "A new execution continues from there."},
		{"POST", "/v1/executions/{id}/replay", nil, "The execution was replayed against its record."},
		{"POST", "/v1/skills/{name}/enable", versionedFields, "Skill {name} is enabled."},
		{"POST", "/v1/skills/{name}/disable", versionedFields, "Skill {name} is disabled."},
		{"POST", "/v1/lanes/{lane}/break", reasonField, "Lane {lane} is released."},
		{"POST", "/v1/approvals/{id}", []field{{"decision", asText}, {"reason", asText}}, "The decision is recorded. The " +
			"waiting run resumes."},
		{"POST", "/v1/objectives/{id}/accept", versionedFields, "The objective is accepted."},
		{"POST", "/v1/objectives/{id}/reject", versionedFields, "The objective is rejected."},
		{"POST", "/v1/objectives/{id}/pause", versionedFields, "The objective is paused."},
		{"POST", "/v1/objectives/{id}/resume", versionedFields, "The objective is resumed."},
		{"POST", "/v1/memory/{id}/forget", versionedFields, "The entry is forgotten."},
		{
			"POST", "/v1/memory/conflicts/{id}/decide", append([]field{{"decision", asText}}, versionedFields...),
			"The conflict is decided.",
		},
		{
			"POST", "/v1/evals/runs",
			[]field{{"suite", asText}, {"model", asText}, {"trials", asNumber}},
			"The run has started. Its results appear here.",
		},
		{
			"POST", "/v1/evals/labels", []field{
				{"run", asText}, {"case", asText}, {"trial", asNumber}, {"label", asText}, {"note", asText},
			}, "The label is stored.",
		},
		{"PATCH", "/v1/threads/{id}", []field{{"title", asText}}, "The name is changed."},
		{"POST", "/v1/threads/{id}/messages", []field{{"content", asText}}, "The message was sent, or waits for its turn."},
	})
}

// triggerActions lists the actions on automations, events and webhooks, which start executions.
func triggerActions() []action {
	return []action{
		{
			"POST", "/v1/events",
			[]field{{"event", asText}, {"key", asText}, {"data", asJSON}, {"id", asText}},
			"The event was emitted.",
		},
		{"POST", "/v1/automations/{id}/enable", versionedFields, "Automation {id} is enabled."},
		{"POST", "/v1/automations/{id}/disable", versionedFields, "Automation {id} is disabled."},
		{"POST", "/v1/automations/{id}/accept", versionedFields, "Automation {id} is accepted."},
		{"POST", "/v1/automations/{id}/run", reasonField, "Automation {id} runs now."},
		{
			"POST", "/v1/webhooks/deliveries/{id}/replay", append([]field{{"replays", asNumber}}, reasonField...),
			"The delivery is replayed.",
		},
		{"POST", "/v1/webhooks/outbox/{id}/resend", reasonField, "The message gets one more attempt."},
		{"POST", "/v1/webhooks/targets/{id}/enable", reasonField, "Target {id} is enabled."},
		{"POST", "/v1/webhooks/targets/{id}/disable", reasonField, "Target {id} is disabled."},
		{"POST", "/v1/webhooks/endpoints/{id}/enable", reasonField, "Endpoint {id} is enabled."},
		{"POST", "/v1/webhooks/endpoints/{id}/disable", reasonField, "Endpoint {id} is disabled."},
		{"POST", "/v1/automations/runs/{id}/redrive", reasonField, "The run gets one more attempt."},
	}
}

// accessActions lists the actions on principals and their rights.
func accessActions() []action {
	return []action{
		{
			"POST", "/v1/principals", append([]field{{"name", asText}, {"kind", asText}, {"role", asText}}, reasonField...),
			"The principal is created.",
		},
		{
			"PATCH", "/v1/principals/{id}", append([]field{{"role", asText}, {"enabled", asFlag}}, reasonField...),
			"The principal is changed.",
		},
		{
			"POST", "/v1/principals/{id}/identities", append([]field{{"issuer", asText}, {"subject", asText}}, reasonField...),
			"The identity is linked.",
		},
		{"POST", "/v1/principals/{id}/login_links", reasonField, "The link is created."},
		{
			"POST", "/v1/tokens", append([]field{
				{"principal", asText}, {"name", asText}, {"scopes", asList}, {"expires_in", asText},
			}, reasonField...), "The token is created.",
		},
		{"POST", "/v1/tokens/{id}/revoke", reasonField, "The token is revoked."},
		{"POST", "/v1/sessions/{id}/revoke", reasonField, "The session has ended."},
		{"POST", "/v1/channels/pair", append([]field{{"code", asText}}, reasonField...), "The sender may write."},
		{"POST", "/v1/channels/{id}/unpair", append([]field{{"sender", asText}}, reasonField...), "The sender is forgotten."},
		{"POST", "/v1/channels/{id}/enable", reasonField, "Channel {id} is enabled."},
		{"POST", "/v1/channels/{id}/disable", reasonField, "Channel {id} is disabled."},
	}
}

// reasonField is the body of most actions.
var reasonField = []field{{"reason", asText}}

// versionedFields are the fields of an action on a versioned object.
var versionedFields = append([]field{{"if_revision", asRevision}}, reasonField...)
