package api

import (
	"github.com/lanekeeper/lanekeeper/executions"
)

func (s *server) pauseRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/pause", response: executions.Pause{}, handle: s.getPause,
			about: "Whether autonomous work is paused, since when, by whom and why.",
		}, {
			method: "POST", path: "/v1/pause", body: reasonRequest{}, response: executions.PauseChange{},
			handle: s.pauseAll, safeToRetry: true, acceptsKey: true,
			about: "Pause autonomous work in all processes: nothing starts, running work stops before its next step, " +
				"scheduled times are recorded " +
				"as skipped, and input is stored. operate and chat continue. changed is false if it was already paused.",
		}, {
			method: "POST", path: "/v1/resume", body: reasonRequest{}, response: executions.PauseChange{},
			handle: s.resumeAll, safeToRetry: true, acceptsKey: true,
			about: "End the pause; ready work continues at once. Returns the former pause; changed is false without one.",
		},
	}
}

func (s *server) getPause(r request) (response, error) {
	p, err := executions.CurrentPause(r.Context(), s.pool)
	return response{body: p, trace: p.TraceID}, err
}

func (s *server) pauseAll(r request) (response, error) {
	pause, err := executions.PauseAll(r.Context(), s.pool, actorName(r.Context()), r.body.(reasonRequest).Reason)
	return response{body: pause, trace: pause.TraceID}, err
}

func (s *server) resumeAll(r request) (response, error) {
	pause, err := executions.ResumeAll(r.Context(), s.pool, actorName(r.Context()), r.body.(reasonRequest).Reason)
	return response{body: pause, trace: pause.TraceID}, err
}
