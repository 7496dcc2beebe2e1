package api

import (
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/objectives"
)

// objectiveRoutes returns the routes that read objectives, decide proposals, and pause and resume objectives.
func (s *server) objectiveRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/objectives", response: page[objectives.Objective]{}, handle: s.listObjectives,
			about: "Objectives with their progress, newest first.",
			params: listParams(enumParam("status", "State of the objective", objectives.Statuses()...),
				textParam("source", "Source of the objective")),
		}, {
			method: "GET", path: "/v1/objectives/{id}", response: objectiveDetail{}, hasETag: true, handle: s.getObjective,
			about: "One objective by name or id, with its steps and their evidence.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/accept", body: reasonRequest{}, ifMatch: true, response: change{},
			handle:    s.acceptObjective,
			conflicts: true, about: "Accept a proposed or rejected objective. 409 if it is neither.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/reject", body: reasonRequest{}, ifMatch: true, response: change{},
			handle:    s.rejectObjective,
			conflicts: true, about: "Reject a proposed objective. 409 if it is not an open proposal.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/pause", body: reasonRequest{}, ifMatch: true, response: change{},
			handle:    s.pauseObjective,
			conflicts: true, about: "Pause an active objective. 409 if it is not active.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/resume", body: reasonRequest{}, ifMatch: true, response: change{},
			handle:    s.resumeObjective,
			conflicts: true, about: "Resume a paused objective. 409 if it is not paused.",
		},
	}
}

type objectiveDetail struct {
	objectives.Objective
	Steps    []objectives.Step     `json:"steps"`
	Evidence []objectives.Evidence `json:"evidence"`
}

func (s *server) listObjectives(r request) (response, error) {
	listing, err := readPage("objectives", r.query, func(o objectives.Objective) string { return o.ID },
		func(before string, limit int) ([]objectives.Objective, error) {
			return objectives.List(r.Context(), s.pool, objectives.Filter{
				Status: r.query["status"], Source: r.query["source"], Before: before, Limit: limit,
			})
		})
	return response{body: listing}, err
}

func (s *server) getObjective(r request) (response, error) {
	name, err := pathName(r, objectives.ErrNotFound)
	if err != nil {
		return response{}, err
	}
	o, err := objectives.Get(r.Context(), s.pool, name)
	if err != nil {
		return response{}, err
	}
	detail := objectiveDetail{Objective: o}
	if detail.Steps, err = objectives.Steps(r.Context(), s.pool, o.ID); err == nil {
		detail.Evidence, err = objectives.EvidenceOf(r.Context(), s.pool, o.ID)
	}
	detail.Steps, detail.Evidence = orEmpty(detail.Steps), orEmpty(detail.Evidence)
	return response{body: detail, trace: o.LastTraceID, revision: o.Revision}, err
}

func (s *server) acceptObjective(r request) (response, error) {
	return s.decideObjective(r, "accept_objective", func(tx pgx.Tx, name, reason string) (bool, error) {
		return objectives.Accept(r.Context(), tx, name, actorName(r.Context()), reason)
	})
}

func (s *server) rejectObjective(r request) (response, error) {
	return s.decideObjective(r, "reject_objective", func(tx pgx.Tx, name, reason string) (bool, error) {
		return objectives.Reject(r.Context(), tx, name, actorName(r.Context()), reason)
	})
}

// decideObjective accepts or rejects a proposal. Accept also works for a rejected one. 409 if the status is another.
func (s *server) decideObjective(
	r request, action string, decide func(pgx.Tx, string, string) (bool, error),
) (response, error) {
	return s.changeNamed(r, action, "objective", objectives.ErrNotFound,
		func(tx pgx.Tx, name, reason string) (bool, error) {
			decided, err := decide(tx, name, reason)
			return requireChanged(decided, err, "objective %s is not an open proposal", name)
		})
}

func (s *server) pauseObjective(r request) (response, error) {
	return s.setObjective(r, "pause_objective", objectives.Active, objectives.Paused)
}

func (s *server) resumeObjective(r request) (response, error) {
	return s.setObjective(r, "resume_objective", objectives.Paused, objectives.Active)
}

// setObjective moves an objective between two statuses and rejects any other status.
func (s *server) setObjective(r request, action, from, to string) (response, error) {
	return s.changeNamed(r, action, "objective", objectives.ErrNotFound, func(tx pgx.Tx, name, _ string) (bool, error) {
		o, err := objectives.Get(r.Context(), tx, name)
		if err != nil {
			return false, err
		}
		changed, err := objectives.SetStatus(r.Context(), tx, o.ID, from, to)
		return requireChanged(changed, err, "objective %s is %s, not %s", o.Name, o.Status, from)
	})
}
