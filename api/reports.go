package api

import (
	"github.com/lanekeeper/lanekeeper/activity"
)

// reports are the questions about the log that people ask most. Their figures are those of the views agent_spend, agent_slowest_skills,
// agent_failing_skills and agent_audit.
func (s *server) reports() []route {
	skill := text("skill", "Name of the skill")
	since := moment("since", "Only what began at this moment or later; without it, the last 7 days")
	return []route{
		{
			method: "GET", path: "/v1/activity/spend", answer: page[activity.Spending]{}, handle: s.listSpend, replica: true,
			about: "What model calls cost by day (UTC), skill, surface and model, the latest day first. A call is charged to the skills that its answer " +
				"calls; one that calls none is charged to its surface, and skill is empty. since and until are cut to whole days.",
			params: listing(oneOf("by", "By skill, which is usual, or by what the model was called for", names(activity.BySkill, activity.ByPurpose)...),
				skill, surfaceParam, text("model", "Name of the model"), sinceParam, moment("until", "Only days before this one")),
		}, {
			method: "GET", path: "/v1/activity/slowest", answer: page[activity.Slow]{}, handle: s.listSlowest, replica: true,
			about: "Skills by how long their calls take, the slowest first.", params: listing(skill, since),
		}, {
			method: "GET", path: "/v1/activity/failing", answer: page[activity.Failure]{}, handle: s.listFailing, replica: true,
			about: "Skills whose calls fail, those that failed most first.", params: listing(skill, since),
		}, {
			method: "GET", path: "/v1/activity/audit", answer: page[activity.Audited]{}, handle: s.listAudit, replica: true,
			about: "Who did what, to which object, when, why, on whose behalf, with what result: every kind of row, newest first. A page may be short, or empty, before " +
				"the last: 10,000 rows are looked at for one.",
			params: listing(skill, surfaceParam, traceParam, sinceParam, moment("until", "Only what began before this moment")),
		},
	}
}

// reportFilter is what a report is asked for.
func reportFilter(r request) activity.ReportFilter {
	return activity.ReportFilter{
		Since: r.query.time("since"), Until: r.query.time("until"), Skill: r.query["skill"], Surface: r.query["surface"], Model: r.query["model"],
		Limit: r.query.limit(), Cursor: r.query["cursor"],
	}
}

// reported is a page of a report.
func reported[T any](rows []T, next string, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	return answer{body: pageOf(rows, next)}, nil
}

func (s *server) listSpend(r request) (answer, error) {
	if r.query["by"] == string(activity.ByPurpose) {
		if r.query["skill"] != "" {
			return answer{}, badParameter("%s", activity.ErrSkillOrPurpose)
		}
		return reported(activity.SpendByPurpose(r.Context(), s.read, reportFilter(r)))
	}
	return reported(activity.Spend(r.Context(), s.read, reportFilter(r)))
}

func (s *server) listSlowest(r request) (answer, error) {
	return reported(activity.Slowest(r.Context(), s.read, reportFilter(r)))
}

func (s *server) listFailing(r request) (answer, error) {
	return reported(activity.Failing(r.Context(), s.read, reportFilter(r)))
}

func (s *server) listAudit(r request) (answer, error) {
	got, err := activity.Audit(r.Context(), s.read, activity.Filter{
		Surface: r.query["surface"], Skill: r.query["skill"], TraceID: r.query["trace_id"], Since: r.query.time("since"),
		Until: r.query.time("until"), Limit: r.query.limit(), Cursor: r.query["cursor"],
	})
	return reported(got.Rows, got.Next, err)
}
