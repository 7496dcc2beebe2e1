package engineroom

// lever is a route of the API that a form may call, and the fields that it may send.
type lever struct {
	method string // of the route; the form always posts
	path   string // of the route, as http.ServeMux has it
	fields []field
	done   string // what the page says when it worked; {name} is what the path has there
}

// field is one of the body.
type field struct {
	name string
	kind kind
}

// kind is what a field of a form becomes in the body.
type kind int

const (
	asText     kind = iota // a text
	asList                 // every value that was given, and every line of each
	asFlag                 // true for "true", "on" and "1", false for "false", "0" and nothing
	asNumber               // a number
	asJSON                 // what was written, which has to be JSON
	asRevision             // of what the page showed; it is no part of the body but If-Match, or for 0, when nothing was there, If-None-Match
)

// why is the body of most levers.
var why = []field{{"reason", asText}}

// based are the fields of a lever that changes something which others may have changed since the page showed it.
var based = append([]field{{"if_revision", asRevision}}, why...)

// levers are all that the room can pull. A route that is not here cannot be called through it.
func levers() []lever {
	return []lever{
		{"POST", "/v1/pause", why, "Autonomous work is paused."},
		{"POST", "/v1/resume", why, "Autonomous work goes on."},
		{"POST", "/v1/executions/{id}/cancel", why, "The execution is cancelled."},
		{"POST", "/v1/executions/{id}/retry", nil, "A new execution does again what failed."},
		{"POST", "/v1/executions/{id}/fork", append([]field{{"from", asText}, {"input", asJSON}, {"latest", asFlag}}, why...), "A new execution goes on from there."},
		{"POST", "/v1/executions/{id}/replay", nil, "The execution was replayed against its record."},
		{"POST", "/v1/skills/{name}/enable", based, "Skill {name} is in service."},
		{"POST", "/v1/skills/{name}/disable", based, "Skill {name} is out of service."},
		{"POST", "/v1/lanes/{lane}/break", why, "Lane {lane} was taken from its holder."},
		{"POST", "/v1/approvals/{id}", []field{{"decision", asText}, {"reason", asText}}, "The decision is recorded; who waited for it goes on."},
		{"POST", "/v1/events", []field{{"event", asText}, {"key", asText}, {"data", asJSON}, {"id", asText}}, "The event was raised."},
		{"POST", "/v1/objectives/{id}/accept", based, "The objective is accepted."},
		{"POST", "/v1/objectives/{id}/reject", based, "The objective is rejected."},
		{"POST", "/v1/objectives/{id}/pause", based, "The objective is left alone until it is resumed."},
		{"POST", "/v1/objectives/{id}/resume", based, "The objective is worked on again."},
		{"POST", "/v1/memory/{id}/forget", based, "The entry is forgotten."},
		{"POST", "/v1/memory/conflicts/{id}/decide", append([]field{{"decision", asText}}, based...), "The conflict is decided."},
		{"POST", "/v1/automations/{id}/enable", based, "Automation {id} is in service."},
		{"POST", "/v1/automations/{id}/disable", based, "Automation {id} is out of service."},
		{"POST", "/v1/automations/{id}/accept", based, "Automation {id} is accepted."},
		{"POST", "/v1/automations/{id}/run", why, "Automation {id} runs now."},
		{"POST", "/v1/webhooks/deliveries/{id}/replay", append([]field{{"replays", asNumber}}, why...), "The delivery is handled again."},
		{"POST", "/v1/webhooks/outbox/{id}/resend", why, "The message is sent once more."},
		{"POST", "/v1/webhooks/targets/{id}/enable", why, "Target {id} is in service."},
		{"POST", "/v1/webhooks/targets/{id}/disable", why, "Target {id} is out of service."},
		{"POST", "/v1/webhooks/endpoints/{id}/enable", why, "Endpoint {id} is in service."},
		{"POST", "/v1/webhooks/endpoints/{id}/disable", why, "Endpoint {id} is out of service."},
		{"POST", "/v1/automations/runs/{id}/redrive", why, "The run gets one more attempt."},
		{"POST", "/v1/threads/{id}/messages", []field{{"content", asText}}, "The message was sent, or waits for its turn."},
	}
}
