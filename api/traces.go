package api

import (
	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/why"
)

// traceRoutes returns the routes that read traces, their prompts, and the activity log.
func (s *server) traceRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/traces", response: page[activity.TraceSummary]{}, handle: s.listTraces, replica: true,
			about: "Traces, newest first, each summed up in one row.",
			params: listParams(surfaceParam, enumParam("status", "State of the root execution", executions.Statuses()...),
				textParam("agent", "Agent of the root execution"), sinceParam),
		}, {
			method: "GET", path: "/v1/traces/{id}", response: activity.Trace{}, handle: s.getTrace, replica: true,
			about: "A trace with its activities. The id may be prefixed, its ULID alone, or the 32 hex digits of OpenTelemetry.",
		}, {
			method: "GET", path: "/v1/traces/{id}/prompts", response: prompts.Page{}, handle: s.getPrompts, replica: true,
			about: "The exact prompt of each model call of a trace, redacted; shared parts occur once.",
			params: []param{
				{name: "activity_id", about: "Only the model call of this activity", check: checkUUID},
				limitParam("Calls", prompts.MaxCalls, prompts.MaxCalls), textParam("cursor", "next_cursor of the previous page"),
			},
		}, {
			method: "GET", path: "/v1/traces/{id}/why", response: why.Answer{}, handle: s.getWhy, replica: true,
			about: "Explain a trace, in rows from top to bottom: causes across traces, actions, waits, lanes, " +
				"failures, effects and cost. from_ref caused to_ref. The id may have any form; in SQL: why(trace).",
		}, {
			method: "GET", path: "/v1/activity", response: page[activity.Row]{}, handle: s.listActivity, replica: true,
			about: "The activity log, newest first. Without since, trace_id or skill it covers the last 30 days.",
			params: listParams(surfaceParam, enumParam("status", "State of the activity", activity.Statuses()...),
				textParam("skill", "Name of the skill"), textParam("lane", "Lane of the work"), traceParam,
				textParam("agent", "Name of the agent"), sinceParam, timeParam("until", "End of the period")),
		},
	}
}

func (s *server) listTraces(r request) (response, error) {
	cursor, err := decodeCursor("traces", r.query["cursor"])
	if err != nil {
		return response{}, err
	}
	rows, next, err := activity.Traces(r.Context(), s.read, activity.TraceFilter{
		Surface: r.query["surface"], Status: r.query["status"], Since: r.query.time("since"), Limit: r.query.limit(),
		Agent: r.query["agent"], Cursor: cursor,
	})
	return logPage("traces", rows, next, err)
}

func (s *server) getTrace(r request) (response, error) {
	t, err := activity.TraceOf(r.Context(), s.read, r.PathValue("id"))
	if err != nil {
		return response{}, err
	}
	if t.Activities == nil {
		t.Activities = []activity.Row{}
	}
	return response{body: t, trace: t.TraceID}, nil
}

func (s *server) getPrompts(r request) (response, error) {
	cursor, err := decodeCursor("prompts", r.query["cursor"])
	if err != nil {
		return response{}, err
	}
	page, err := prompts.Of(r.Context(), s.read, r.PathValue("id"), prompts.Filter{
		ActivityID: r.query["activity_id"], Limit: r.query.number("limit"), Cursor: cursor,
	})
	if err != nil {
		return response{}, err
	}
	if page.Next != nil {
		*page.Next = encodeCursor("prompts", *page.Next)
	}
	return response{body: page, trace: page.TraceID}, nil
}

func (s *server) listActivity(r request) (response, error) {
	cursor, err := decodeCursor("activity", r.query["cursor"])
	if err != nil {
		return response{}, err
	}
	rows, next, err := activity.Recent(r.Context(), s.read, activity.Filter{
		Surface: r.query["surface"], Status: activity.Status(r.query["status"]), Skill: r.query["skill"],
		Lane: r.query["lane"], TraceID: r.query["trace_id"], Agent: r.query["agent"], Since: r.query.time("since"),
		Until: r.query.time("until"), Limit: r.query.limit(), Cursor: cursor,
	})
	return logPage("activity", rows, next, err)
}

// logPage converts the cursor of package activity, which names no listing, to a cursor of the listing.
func logPage[T any](listing string, rows []T, next string, err error) (response, error) {
	if err != nil {
		return response{}, err
	}
	if next != "" {
		next = encodeCursor(listing, next)
	}
	return response{body: pageOf(rows, next)}, nil
}

func (s *server) getWhy(r request) (response, error) {
	a, err := why.Of(r.Context(), s.read, r.PathValue("id"))
	if err != nil {
		return response{}, err
	}
	return response{body: a, trace: a.TraceID}, nil
}
