package api

import (
	"errors"
	"net/http"
	"strings"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/monitor"
)

func (s *server) monitorRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/monitor/status", response: page[executions.StatusCount]{}, handle: s.countExecutions,
			about: "Number of pending, running and waiting executions, with their mean age in seconds.",
		}, {
			method: "GET", path: "/v1/monitor/waiting", response: page[executions.WaitingRow]{}, handle: s.listWaiting,
			params: []param{enumParam("for", "Kind of the wait", executions.WaitKinds()...)},
			about:  "Waiting executions, the nearest deadline first; at most 500.",
		}, {
			method: "GET", path: "/v1/monitor/stuck", response: page[executions.WaitingRow]{}, handle: s.listStuck,
			about: "Executions waiting past their deadline without an update for an hour; at most 500.",
		}, {
			method: "GET", path: "/v1/monitor/verdict", response: monitor.Status{}, handle: s.verdict,
			about: "Whether the agent works: working, degraded or stopped, and why with links to pages. It has each agent's " +
				"verdict, the heartbeats, today's spend against its limits, and failures, grouped by root error.",
		}, {
			method: "POST", path: "/v1/monitor/acknowledge", body: acknowledgeRequest{}, response: monitor.Status{},
			handle: s.acknowledge, conflicts: true,
			about: "Acknowledge the reasons of a degraded verdict. They do not count until they change or are over. mark is " +
				"that of the verdict. 409 when the reasons are others now.",
		},
	}
}

func (s *server) verdict(r request) (response, error) {
	status, err := s.monitor.Status(r.Context(), s.pool)
	return response{body: status}, err
}

type acknowledgeRequest struct {
	Mark   string `json:"mark"`
	Reason string `json:"reason"`
}

func (b acknowledgeRequest) check() error {
	if strings.TrimSpace(b.Mark) == "" {
		return problem.BadBody("mark is empty; it is the mark of GET /v1/monitor/verdict")
	}
	return reasonRequest{b.Reason}.check()
}

func (s *server) acknowledge(r request) (response, error) {
	body, _ := r.body.(acknowledgeRequest)
	status, traceID, err := s.monitor.Acknowledge(r.Context(), s.pool, body.Mark, body.Reason, actorName(r.Context()))
	if errors.Is(err, monitor.ErrChanged) {
		return response{}, problem.New(http.StatusConflict, "%s", monitor.ErrChanged).
			Kind("verdict-changed", "Verdict changed")
	}
	return response{body: status, trace: traceID}, err
}

func (s *server) countExecutions(r request) (response, error) {
	counts, err := executions.CountByStatus(r.Context(), s.pool)
	return response{body: page[executions.StatusCount]{Items: counts}}, err
}

func (s *server) listWaiting(r request) (response, error) {
	return s.waitingRows(r, r.query["for"], false)
}

func (s *server) listStuck(r request) (response, error) { return s.waitingRows(r, "", true) }

func (s *server) waitingRows(r request, kind string, stuck bool) (response, error) {
	waiting, err := executions.ListWaiting(r.Context(), s.pool, kind, stuck, 500)
	for i := range waiting {
		waiting[i] = waiting[i].Redacted(r.Context())
	}
	return response{body: page[executions.WaitingRow]{Items: waiting}}, err
}
