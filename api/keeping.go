package api

import (
	"maps"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
)

func (s *server) pauseObjective(r request) (answer, error) {
	return s.setObjective(r, "pause_objective", objectives.Active, objectives.Paused)
}

func (s *server) resumeObjective(r request) (answer, error) {
	return s.setObjective(r, "resume_objective", objectives.Paused, objectives.Active)
}

// setObjective moves an objective from one status to another; it is refused when it has a third.
func (s *server) setObjective(r request, action, from, to string) (answer, error) {
	return s.pull(r, action, "objective", objectives.ErrNotFound, func(tx pgx.Tx, name, _ string) (bool, error) {
		o, err := objectives.Get(r.Context(), tx, name)
		if err != nil {
			return false, err
		}
		changed, err := objectives.SetStatus(r.Context(), tx, o.ID, from, to)
		if err == nil && !changed {
			err = problem.New(http.StatusConflict, "objective %s is %s, not %s", o.Name, o.Status, from)
		}
		return changed, err
	})
}

// forget deletes an entry. The record has its category and key, and not its value: what is forgotten is gone.
func (s *server) forget(r request, fn func(tx pgx.Tx) (memory.Entry, error)) (answer, error) {
	input := map[string]any{}
	var gone memory.Entry
	done, err := s.audited(r.Context(), "forget_memory", r.body.(because).Reason, input, func(tx pgx.Tx, _ string) (_ any, err error) {
		gone, err = fn(tx)
		input["id"] = gone.ID
		maps.Copy(input, memoryInput(gone.Owner, gone.Category, gone.Key))
		return map[string]bool{"changed": true}, err
	})
	if err != nil {
		return answer{}, err
	}
	done.Name, done.Changed = gone.Key, true
	return answer{body: done, trace: done.TraceID}, nil
}
