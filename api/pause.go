package api

import "github.com/lanekeeper/lanekeeper/executions"

// pausing is the lever that stops everything the agent does by itself.
func (s *server) pausing() []route {
	return []route{
		{
			method: "GET", path: "/v1/pause", answer: executions.Pause{}, handle: s.getPause,
			about: "Whether autonomous work is paused, since when, by whom and why.",
		}, {
			method: "POST", path: "/v1/pause", body: because{}, answer: executions.PauseChange{}, handle: s.pauseAll, repeatable: true,
			about: "Pause autonomous work, everywhere: nothing of it begins, what runs stops before its next step, due times are recorded as " +
				"skipped, and what arrives is kept. operate and chat go on. changed is false when it was paused; then the pause is answered that is on.",
		}, {
			method: "POST", path: "/v1/resume", body: because{}, answer: executions.PauseChange{}, handle: s.resumeAll, repeatable: true,
			about: "End the pause: what is ready goes on at once. The answer tells of the pause that was; changed is false when there was none.",
		},
	}
}

func (s *server) getPause(r request) (answer, error) {
	p, err := executions.CurrentPause(r.Context(), s.pool)
	return answer{body: p, trace: p.TraceID}, err
}

func (s *server) pauseAll(r request) (answer, error) {
	got, err := executions.PauseAll(r.Context(), s.pool, admin, r.body.(because).Reason)
	return answer{body: got, trace: got.TraceID}, err
}

func (s *server) resumeAll(r request) (answer, error) {
	got, err := executions.ResumeAll(r.Context(), s.pool, admin, r.body.(because).Reason)
	return answer{body: got, trace: got.TraceID}, err
}
