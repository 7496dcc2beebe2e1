package api

import (
	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/prompts"
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
