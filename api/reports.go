package api

import (
	"context"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

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
				string(activity.BySkill), string(activity.ByPurpose)),
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
