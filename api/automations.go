package api

import (
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// automationRoutes returns the routes that read, enable, disable and run automations, and decide proposals.
func (s *server) automationRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/automations", response: page[automations.Listed]{}, handle: s.listAutomations,
			about: "Automations, newest first, with their due runs.",
			params: listParams(enumParam("enabled", "Whether it is enabled", "true", "false"),
				textParam("skill", "Name of the skill"),
				textParam("source", "Source of the declaration")),
		}, {
			method: "GET", path: "/v1/automations/{id}", response: automationDetail{}, hasETag: true, handle: s.getAutomation,
			about: "One automation by name or id, with its latest runs.",
		}, {
			method: "POST", path: "/v1/automations/{id}/enable", body: reasonRequest{}, ifMatch: true, response: change{},
			handle: s.enableAutomation,
			about:  "Enable an automation, by name or id.",
		}, {
			method: "POST", path: "/v1/automations/{id}/disable", body: reasonRequest{}, ifMatch: true, response: change{},
			handle: s.disableAutomation,
			about:  "Disable an automation, by name or id. This rejects a proposal.",
		}, {
			method: "POST", path: "/v1/automations/{id}/accept", body: reasonRequest{}, ifMatch: true, response: change{},
			handle:    s.acceptAutomation,
			conflicts: true, about: "Accept a proposed automation. 409 if it is not an open proposal.",
		}, {
			method: "POST", path: "/v1/automations/{id}/run", body: reasonRequest{}, response: automations.Run{},
			status: http.StatusAccepted,
			handle: s.runAutomation, about: "Run an automation now, even a disabled one. The response has its trace.",
		}, {
			method: "POST", path: "/v1/automations/runs/{id}/redrive", body: reasonRequest{}, response: automations.Run{},
			status: http.StatusAccepted,
			handle: s.redriveRun, conflicts: true,
			about: "Give a dead run one more attempt. 409 if it is not dead.",
		},
	}
}

// automationDetail is an automation with its latest runs, newest first.
type automationDetail struct {
	automations.Automation
	Runs []automations.Run `json:"runs"`
}

// maxShown bounds a displayed value in bytes.
const maxShown = 64 << 10

func (s *server) listAutomations(r request) (response, error) {
	listing, err := readPage("automations", r.query, func(a automations.Listed) string { return a.ID },
		func(before string, limit int) ([]automations.Listed, error) {
			return automations.List(r.Context(), s.pool, automations.Filter{
				Enabled: r.query.flag("enabled"), Skill: r.query["skill"], Source: r.query["source"], Before: before, Limit: limit,
			})
		})
	for i := range listing.Items {
		listing.Items[i].Arguments = redact.JSON(listing.Items[i].Arguments, maxShown)
	}
	return response{body: listing}, err
}

func (s *server) getAutomation(r request) (response, error) {
	name, err := pathName(r, automations.ErrNotFound)
	if err != nil {
		return response{}, err
	}
	a, err := automations.Get(r.Context(), s.pool, name)
	if err != nil {
		return response{}, err
	}
	runs, err := automations.Runs(r.Context(), s.pool, automations.RunFilter{AutomationID: a.ID, Limit: defaultPage})
	if err != nil {
		return response{}, err
	}
	a.Arguments = redact.JSON(a.Arguments, maxShown)
	for i := range runs {
		redactRun(&runs[i])
	}
	return response{body: automationDetail{a, orEmpty(runs)}, trace: a.LastTraceID, revision: a.Revision}, nil
}

func (s *server) enableAutomation(r request) (response, error) {
	return s.changeNamed(r, "enable_automation", "automation", automations.ErrNotFound,
		func(tx pgx.Tx, name, _ string) (bool, error) {
			return automations.Enable(r.Context(), tx, name)
		})
}

func (s *server) disableAutomation(r request) (response, error) {
	return s.changeNamed(r, "disable_automation", "automation", automations.ErrNotFound,
		func(tx pgx.Tx, name, reason string) (bool, error) {
			return automations.Disable(r.Context(), tx, name, actorName(r.Context()), reason)
		})
}

func (s *server) acceptAutomation(r request) (response, error) {
	return s.changeNamed(r, "accept_automation", "automation", automations.ErrNotFound,
		func(tx pgx.Tx, name, _ string) (bool, error) {
			accepted, err := automations.Accept(r.Context(), tx, name, actorName(r.Context()))
			return requireChanged(accepted, err, "automation %s is not an open proposal", name)
		})
}

// runAutomation enqueues a run with this request's trace. Any process may claim it.
func (s *server) runAutomation(r request) (response, error) {
	name, err := pathName(r, automations.ErrNotFound)
	if err != nil {
		return response{}, err
	}
	reason := r.body.(reasonRequest).Reason
	var run automations.Run
	_, err = s.record(r.Context(), "run_automation", reason, map[string]any{"automation": name},
		func(tx pgx.Tx, traceID string) (any, error) {
			var err error
			if run, err = automations.Enqueue(r.Context(), tx, name, traceID); err == nil {
				err = automations.Notify(r.Context(), tx)
			}
			return map[string]string{"run_id": run.ID}, err
		})
	if err != nil {
		return response{}, err
	}
	return response{body: run, status: http.StatusAccepted, trace: run.TraceID}, nil
}

// redriveRun gives a dead run one more attempt. Any process may claim it.
func (s *server) redriveRun(r request) (response, error) {
	id, err := pathUUID(r, "a run of an automation")
	if err != nil {
		return response{}, err
	}
	reason := r.body.(reasonRequest).Reason
	var run automations.Run
	input := map[string]any{"run": id}
	done, err := s.record(r.Context(), "redrive_automation", reason, input,
		func(tx pgx.Tx, _ string) (any, error) {
			changed, err := automations.Redrive(r.Context(), tx, id)
			if err != nil {
				return nil, err
			}
			if run, err = automations.GetRun(r.Context(), tx, id); err != nil {
				return nil, err
			}
			if !changed {
				return nil, problem.New(http.StatusConflict, "run %s is not dead: status %s", id, run.Status)
			}
			a, err := automations.Get(r.Context(), tx, run.AutomationID)
			if err != nil {
				return nil, err
			}
			input["automation"] = a.Name
			return map[string]string{"automation_id": run.AutomationID}, automations.Notify(r.Context(), tx)
		})
	if err != nil {
		return response{}, err
	}
	redactRun(&run)
	return response{body: run, status: http.StatusAccepted, trace: done.TraceID}, nil
}

// redactRun redacts the texts of a run. An error may have the reason of an admin who rejected its call.
func redactRun(run *automations.Run) {
	run.Output = redact.JSON(run.Output, maxShown)
	if run.ErrorMessage != nil {
		run.ErrorMessage = new(redact.Text(*run.ErrorMessage, maxShown))
	}
}
