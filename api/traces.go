package api

import (
	"context"
	"errors"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/retention"
	"github.com/lanekeeper/lanekeeper/why"
)

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

// reportRoutes returns the routes of frequent questions about the log. Their figures match the views agent_spend,
// agent_slowest_skills, agent_failing_skills and agent_audit.
func (s *server) reportRoutes() []route {
	skill := textParam("skill", "Name of the skill")
	since := timeParam("since", "Start of the period; default the last 7 days")
	return []route{
		{
			method: "GET", path: "/v1/activity/spend", response: page[activity.Spending]{}, handle: s.listSpend, replica: true,
			csv: true,
			about: "Cost of model calls by day (UTC), skill, surface and model, the latest day first. A call's " +
				"cost is split over the skills that its answer calls; without skills it counts for its surface, " +
				"with an empty skill. since and until are cut to whole days.",
			params: listParams(enumParam("by", "Group by skill (default) or by purpose",
				stringsOf(activity.BySkill, activity.ByPurpose)...),
				skill, surfaceParam, textParam("model", "Name of the model"), sinceParam, timeParam("until", "End of the period")),
		}, {
			method: "GET", path: "/v1/activity/slowest", response: page[activity.Slow]{}, handle: s.listSlowest, replica: true,
			about: "Skills by call duration, the slowest first.", params: listParams(skill, since),
		}, {
			method: "GET", path: "/v1/activity/failing", response: page[activity.Failure]{},
			handle: s.listFailing, replica: true,
			about: "Skills with failed calls, the most failures first.", params: listParams(skill, since),
		}, {
			method: "GET", path: "/v1/activity/audit", response: page[activity.AuditEntry]{}, handle: s.listAudit, replica: true,
			csv: true,
			about: "The audit log, newest first: actor, action, object, reason, result. A page before the last may " +
				"be short or empty, because a request scans at most 10,000 rows.",
			params: listParams(skill, surfaceParam, traceParam, sinceParam, timeParam("until", "End of the period")),
		},
	}
}

// report reads a page of a report of package activity.
func report[T any](
	s *server, r request, listing string,
	read func(context.Context, postgres.DB, activity.ReportFilter) ([]T, string, error),
) (response, error) {
	cursor, err := decodeCursor(listing, r.query["cursor"])
	if err != nil {
		return response{}, err
	}
	rows, next, err := read(r.Context(), s.read, activity.ReportFilter{
		Since: r.query.time("since"), Until: r.query.time("until"), Skill: r.query["skill"], Surface: r.query["surface"],
		Model: r.query["model"], Limit: r.query.limit(), Cursor: cursor,
	})
	return logPage(listing, rows, next, err)
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

func (s *server) listSpend(r request) (response, error) {
	if r.query["by"] == string(activity.ByPurpose) {
		if r.query["skill"] != "" {
			return response{}, problem.BadParameter("%s", activity.ErrSkillOrPurpose)
		}
		return report(s, r, "spend by purpose", activity.SpendByPurpose)
	}
	return report(s, r, "spend", activity.Spend)
}

func (s *server) listSlowest(r request) (response, error) {
	return report(s, r, "slowest", activity.Slowest)
}

func (s *server) listFailing(r request) (response, error) {
	return report(s, r, "failing", activity.Failing)
}

func (s *server) listAudit(r request) (response, error) {
	cursor, err := decodeCursor("audit", r.query["cursor"])
	if err != nil {
		return response{}, err
	}
	audit, err := activity.Audit(r.Context(), s.read, activity.Filter{
		Surface: r.query["surface"], Skill: r.query["skill"], TraceID: r.query["trace_id"], Since: r.query.time("since"),
		Until: r.query.time("until"), Limit: r.query.limit(), Cursor: cursor,
	})
	return logPage("audit", audit.Rows, audit.Next, err)
}

func (s *server) whyRoutes() []route {
	return []route{{
		method: "GET", path: "/v1/traces/{id}/why", response: why.Answer{}, handle: s.getWhy, replica: true,
		about: "Explain a trace, in rows from top to bottom: causes across traces, actions, waits, lanes, " +
			"failures, effects and cost. from_ref caused to_ref. The id may have any form; in SQL: why(trace).",
	}}
}

func (s *server) getWhy(r request) (response, error) {
	a, err := why.Of(r.Context(), s.read, r.PathValue("id"))
	if err != nil {
		return response{}, err
	}
	return response{body: a, trace: a.TraceID}, nil
}

func (s *server) retentionRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/retention", response: retentionResponse{}, handle: s.getRetention,
			about: "How long finished rows of each kind are kept, and how many were pruned. Unfinished rows are never pruned.",
		}, {
			method: "PUT", path: "/v1/retention", body: retentionRequest{}, response: retention.Change{}, handle: s.setRetention,
			about: "Set the retention of kinds of rows: a duration such as 90d, or forever. Other kinds stay unchanged. " +
				"All are changed or, with 400, none; changed is false if nothing had to change.",
		},
	}
}

type retentionResponse struct {
	Items []retention.Policy `json:"items"`
}

type retentionRequest struct {
	reasonRequest
	Keep map[string]string `json:"keep"`
}

func (b retentionRequest) check() error {
	if len(b.Keep) == 0 {
		return problem.BadBody(`keep is missing: send kinds and durations, such as {"activity": "90d"}`)
	}
	for name, time := range b.Keep {
		if !isPrintableText(name) || !isPrintableText(time) {
			return problem.BadBody("keep has control characters at %.60q", name)
		}
	}
	return b.reasonRequest.check()
}

func (s *server) getRetention(r request) (response, error) {
	list, err := retention.Show(r.Context(), s.pool)
	return response{body: retentionResponse{list}}, err
}

func (s *server) setRetention(r request) (response, error) {
	b := r.body.(retentionRequest)
	policy, err := retention.Set(r.Context(), s.pool, b.Keep, actorName(r.Context()), b.Reason)
	if errors.Is(err, retention.ErrInvalid) {
		return response{}, problem.BadBody("%s", err)
	}
	return response{body: policy, trace: policy.TraceID}, err
}
