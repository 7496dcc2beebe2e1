package api

import (
	"errors"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/retention"
	"github.com/lanekeeper/lanekeeper/why"
)

func (s *server) listTraces(r request) (answer, error) {
	rows, next, err := activity.Traces(r.Context(), s.read, activity.TraceFilter{
		Surface: r.query["surface"], Status: r.query["status"], Since: r.query.time("since"), Limit: r.query.limit(),
		Agent: r.query["agent"], Cursor: r.query["cursor"],
	})
	if err != nil {
		return answer{}, err
	}
	return answer{body: pageOf(rows, next)}, nil
}

func (s *server) getTrace(r request) (answer, error) {
	t, err := activity.TraceOf(r.Context(), s.read, r.PathValue("id"))
	if err != nil {
		return answer{}, err
	}
	if t.Activities == nil {
		t.Activities = []activity.Row{}
	}
	return answer{body: t, trace: t.TraceID}, nil
}

func (s *server) getPrompts(r request) (answer, error) {
	page, err := prompts.Of(r.Context(), s.read, r.PathValue("id"), prompts.Filter{
		ActivityID: r.query["activity_id"], Limit: r.query.number("limit"), Cursor: r.query["cursor"],
	})
	if err != nil {
		return answer{}, err
	}
	return answer{body: page, trace: page.TraceID}, nil
}

func (s *server) listActivity(r request) (answer, error) {
	rows, next, err := activity.Recent(r.Context(), s.read, activity.Filter{
		Surface: r.query["surface"], Status: activity.Status(r.query["status"]), Skill: r.query["skill"],
		Lane: r.query["lane"], TraceID: r.query["trace_id"], Agent: r.query["agent"], Since: r.query.time("since"),
		Until: r.query.time("until"), Limit: r.query.limit(), Cursor: r.query["cursor"],
	})
	if err != nil {
		return answer{}, err
	}
	return answer{body: pageOf(rows, next)}, nil
}

// reports are the questions about the log that people ask most. Their figures are those of the views agent_spend,
// agent_slowest_skills, agent_failing_skills and agent_audit.
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
			method: "GET", path: "/v1/activity/audit", answer: page[activity.AuditEntry]{}, handle: s.listAudit, replica: true,
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

// explaining is the route that says why.
func (s *server) explaining() []route {
	return []route{{
		method: "GET", path: "/v1/traces/{id}/why", answer: why.Answer{}, handle: s.getWhy, replica: true,
		about: "Why a trace is what it is, in rows that are read from top to bottom: what caused it across traces, what it did, waited for and held, " +
			"what went wrong, what came of it, what it cost. from_ref caused to_ref. The id may have any form; the same in SQL is why(trace).",
	}}
}

func (s *server) getWhy(r request) (answer, error) {
	a, err := why.Of(r.Context(), s.read, r.PathValue("id"))
	if err != nil {
		return answer{}, err
	}
	return answer{body: a, trace: a.TraceID}, nil
}

// retaining is how long what is over is kept.
func (s *server) retaining() []route {
	return []route{
		{
			method: "GET", path: "/v1/retention", answer: policies{}, handle: s.getRetention,
			about: "How long each kind of rows is kept after it is over, and how many have gone. What is not finished is never touched.",
		}, {
			method: "PUT", path: "/v1/retention", body: keep{}, answer: retention.Change{}, handle: s.setRetention,
			about: "Change how long kinds of rows are kept: a span of time such as 90d, or forever. Kinds that are not named stay as they are. " +
				"All are changed or, with 400, none; changed is false when it was so already.",
		},
	}
}

// policies is what GET answers.
type policies struct {
	Items []retention.Policy `json:"items"`
}

// keep is the body of PUT.
type keep struct {
	because
	Keep map[string]string `json:"keep"`
}

func (b keep) check() error {
	if len(b.Keep) == 0 {
		return badBody(`keep is missing: give kinds and times, such as {"activity": "90d"}`)
	}
	for name, time := range b.Keep {
		if !storable(name) || !storable(time) {
			return badBody("keep has control characters at %.60q", name)
		}
	}
	return b.because.check()
}

func (s *server) getRetention(r request) (answer, error) {
	list, err := retention.Show(r.Context(), s.pool)
	return answer{body: policies{list}}, err
}

func (s *server) setRetention(r request) (answer, error) {
	b := r.body.(keep)
	got, err := retention.Set(r.Context(), s.pool, b.Keep, admin, b.Reason)
	if errors.Is(err, retention.ErrInvalid) {
		return answer{}, badBody("%s", err)
	}
	return answer{body: got, trace: got.TraceID}, err
}
