package api

import (
	"net/http"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
)

// objectiveDetail is an objective with its steps and what shows that they are done.
type objectiveDetail struct {
	objectives.Objective
	Steps    []objectives.Step     `json:"steps"`
	Evidence []objectives.Evidence `json:"evidence"`
}

func (s *server) listObjectives(r request) (answer, error) {
	got, err := paged("objectives", r.query, func(o objectives.Objective) string { return o.ID },
		func(before string, limit int) ([]objectives.Objective, error) {
			return objectives.List(r.Context(), s.pool, objectives.Filter{
				Status: r.query["status"], Source: r.query["source"], Before: before, Limit: limit,
			})
		})
	return answer{body: got}, err
}

func (s *server) getObjective(r request) (answer, error) {
	name, err := nameIn(r, objectives.ErrNotFound)
	if err != nil {
		return answer{}, err
	}
	o, err := objectives.Get(r.Context(), s.pool, name)
	if err != nil {
		return answer{}, err
	}
	detail := objectiveDetail{Objective: o}
	if detail.Steps, err = objectives.Steps(r.Context(), s.pool, o.ID); err == nil {
		detail.Evidence, err = objectives.EvidenceOf(r.Context(), s.pool, o.ID)
	}
	detail.Steps, detail.Evidence = orEmpty(detail.Steps), orEmpty(detail.Evidence)
	return answer{body: detail, trace: o.LastTraceID, revision: o.Revision}, err
}

func (s *server) acceptObjective(r request) (answer, error) {
	return s.decideObjective(r, "accept_objective", func(tx pgx.Tx, name, reason string) (bool, error) {
		return objectives.Accept(r.Context(), tx, name, admin, reason)
	})
}

func (s *server) rejectObjective(r request) (answer, error) {
	return s.decideObjective(r, "reject_objective", func(tx pgx.Tx, name, reason string) (bool, error) {
		return objectives.Reject(r.Context(), tx, name, admin, reason)
	})
}

// decideObjective decides a proposal; one that is decided already stays as it is.
func (s *server) decideObjective(r request, action string, decide func(pgx.Tx, string, string) (bool, error)) (answer, error) {
	return s.pull(r, action, "objective", objectives.ErrNotFound, func(tx pgx.Tx, name, reason string) (bool, error) {
		decided, err := decide(tx, name, reason)
		if err == nil && !decided {
			err = problem.New(http.StatusConflict, "objective %s is no proposal, or was decided already", name)
		}
		return decided, err
	})
}

// pull is a lever on something with a name: audited, with a reason.
func (s *server) pull(r request, action, thing string, missing error, fn func(tx pgx.Tx, name, reason string) (bool, error)) (answer, error) {
	name, err := nameIn(r, missing)
	if err != nil {
		return answer{}, err
	}
	based, err := r.known()
	if err != nil {
		return answer{}, err
	}
	reason := r.body.(because).Reason
	var changed bool
	done, err := s.audited(r.Context(), action, reason, map[string]any{thing: name},
		func(tx pgx.Tx, _ string) (any, error) {
			if hold, guarded := atRevision[thing]; guarded {
				if err := hold(r.Context(), tx, name, based); err != nil {
					return nil, err
				}
			}
			var err error
			changed, err = fn(tx, name, reason)
			return map[string]bool{"changed": changed}, err
		})
	if err != nil {
		return answer{}, s.withCurrent(r.Context(), err)
	}
	done.Name, done.Changed = name, changed
	return answer{body: done, trace: done.TraceID}, nil
}

// nameIn is the name or id in the path. What a model has named is looked for as it named it, controls and all: it must
// be possible to refuse it.
func nameIn(r request, missing error) (string, error) {
	name := r.PathValue("id")
	if !utf8.ValidString(name) || !keepable(name) || len(name) > maxText {
		return "", missing
	}
	return name, nil
}

// listMemory lists, or with q searches, which gives one page: the order of matches is no place to go on from.
func (s *server) listMemory(r request) (answer, error) {
	if q := r.query["q"]; q != "" {
		for _, other := range []string{"cursor", "category", "prefix", "trace_id"} {
			if r.query[other] != "" {
				return answer{}, badParameter("parameters q and %s do not go together", other)
			}
		}
		owner, err := s.owner(r)
		if err != nil {
			return answer{}, err
		}
		found, err := s.memory.Search(r.Context(), s.pool, owner, q, r.query.limit())
		return answer{body: pageOf(found, "")}, err
	}
	var only *memory.Owner
	if r.query["agent"] != "" {
		owner, err := s.owner(r)
		if err != nil {
			return answer{}, err
		}
		only = &owner
	}
	got, err := paged("memory", r.query, func(e memory.Entry) string { return e.ID },
		func(before string, limit int) ([]memory.Entry, error) {
			return memory.List(r.Context(), s.pool, memory.Filter{
				Owner: only, Category: r.query["category"], Prefix: r.query["prefix"], TraceIDs: r.query.traceIDs(), Before: before, Limit: limit,
			})
		})
	return answer{body: got}, err
}

func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}
