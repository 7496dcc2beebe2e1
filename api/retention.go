package api

import (
	"errors"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/retention"
)

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
	Reason string            `json:"reason"`
	Keep   map[string]string `json:"keep"`
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
	return reasonRequest{b.Reason}.check()
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
