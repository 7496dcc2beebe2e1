package api

import (
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// maxShown is how many bytes of one value are shown.
const maxShown = 64 << 10

// automationDetail is an automation with its latest runs, newest first.
type automationDetail struct {
	automations.Automation
	Runs []automations.Run `json:"runs"`
}

func (s *server) listAutomations(r request) (answer, error) {
	got, err := paged("automations", r.query, func(a automations.Automation) string { return a.ID },
		func(before string, limit int) ([]automations.Automation, error) {
			return automations.List(r.Context(), s.pool, automations.Filter{
				Enabled: r.query.flag("enabled"), Skill: r.query["skill"], Source: r.query["source"], Before: before, Limit: limit,
			})
		})
	for i := range got.Items {
		got.Items[i].Arguments = redact.JSON(got.Items[i].Arguments, maxShown)
	}
	return answer{body: got}, err
}

func (s *server) getAutomation(r request) (answer, error) {
	name, err := nameIn(r, automations.ErrNotFound)
	if err != nil {
		return answer{}, err
	}
	a, err := automations.Get(r.Context(), s.pool, name)
	if err != nil {
		return answer{}, err
	}
	runs, err := automations.Runs(r.Context(), s.pool, automations.RunFilter{AutomationID: a.ID, Limit: defaultPage})
	if err != nil {
		return answer{}, err
	}
	a.Arguments = redact.JSON(a.Arguments, maxShown)
	for i := range runs {
		runs[i].Output = redact.JSON(runs[i].Output, maxShown)
	}
	return answer{body: automationDetail{a, orEmpty(runs)}, trace: a.LastTraceID, revision: a.Revision}, nil
}

func (s *server) enableAutomation(r request) (answer, error) {
	return s.pull(r, "enable_automation", "automation", automations.ErrNotFound, func(tx pgx.Tx, name, _ string) (bool, error) {
		return automations.Enable(r.Context(), tx, name)
	})
}

func (s *server) disableAutomation(r request) (answer, error) {
	return s.pull(r, "disable_automation", "automation", automations.ErrNotFound, func(tx pgx.Tx, name, reason string) (bool, error) {
		return automations.Disable(r.Context(), tx, name, admin, reason)
	})
}

// acceptAutomation accepts a proposal; one that is none stays as it is.
func (s *server) acceptAutomation(r request) (answer, error) {
	return s.pull(r, "accept_automation", "automation", automations.ErrNotFound, func(tx pgx.Tx, name, _ string) (bool, error) {
		accepted, err := automations.Accept(r.Context(), tx, name, admin)
		if err == nil && !accepted {
			err = problem.New(http.StatusConflict, "automation %s is no proposal, or was decided already", name)
		}
		return accepted, err
	})
}

// runAutomation makes a run due, under the trace of the admin's order; whichever process sees it first takes it.
func (s *server) runAutomation(r request) (answer, error) {
	name, err := nameIn(r, automations.ErrNotFound)
	if err != nil {
		return answer{}, err
	}
	reason := r.body.(because).Reason
	var run automations.Run
	_, err = s.audited(r.Context(), "run_automation", reason, map[string]any{"automation": name},
		func(tx pgx.Tx, traceID string) (any, error) {
			var err error
			if run, err = automations.Order(r.Context(), tx, name, traceID); err == nil {
				err = automations.Announce(r.Context(), tx)
			}
			return map[string]string{"run_id": run.ID}, err
		})
	if err != nil {
		return answer{}, err
	}
	return answer{body: run, status: http.StatusAccepted, trace: run.TraceID}, nil
}

// redriveRun gives a dead letter one more attempt; whichever process sees it first takes it.
func (s *server) redriveRun(r request) (answer, error) {
	id, err := uuidIn(r, "a run of an automation")
	if err != nil {
		return answer{}, err
	}
	reason := r.body.(because).Reason
	var run automations.Run
	input := map[string]any{"run": id}
	done, err := s.audited(r.Context(), "redrive_automation", reason, input,
		func(tx pgx.Tx, _ string) (any, error) {
			again, err := automations.Redrive(r.Context(), tx, id)
			if err != nil {
				return nil, err
			}
			if run, err = automations.GetRun(r.Context(), tx, id); err != nil {
				return nil, err
			}
			if !again {
				return nil, problem.New(http.StatusConflict, "run %s is not dead but %s", id, run.Status)
			}
			a, err := automations.Get(r.Context(), tx, run.AutomationID)
			if err != nil {
				return nil, err
			}
			input["automation"] = a.Name
			return map[string]string{"automation_id": run.AutomationID}, automations.Announce(r.Context(), tx)
		})
	if err != nil {
		return answer{}, err
	}
	run.Output = redact.JSON(run.Output, maxShown)
	return answer{body: run, status: http.StatusAccepted, trace: done.TraceID}, nil
}
