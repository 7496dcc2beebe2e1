package objectives

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Evidence is a row of agent_objective_evidence: a successful call, or an admin's confirmation.
type Evidence struct {
	ID         string    `json:"id"`
	StepID     string    `json:"step_id"`
	ActivityID *string   `json:"activity_id"` // nil for an admin's confirmation
	SkillName  string    `json:"skill_name"`
	TraceID    string    `json:"trace_id"`
	GivenBy    string    `json:"given_by"` // the admin
	Reason     string    `json:"reason"`
	CreatedAt  time.Time `json:"created_at"`
}

// EvidenceOf returns the evidence of an objective's steps, in order.
func EvidenceOf(ctx context.Context, db postgres.DB, objectiveID string) ([]Evidence, error) {
	return postgres.Rows[Evidence](ctx, db, "list evidence", `
		select e.id, e.step_id, e.activity_id, e.skill_name, e.trace_id, e.given_by, e.reason, e.created_at
		  from agent_objective_evidence e join agent_objective_steps s on s.id = e.step_id
		 where s.objective_id = @id and e.created_at >= s.started_at order by e.id`, pgx.StrictNamedArgs{"id": objectiveID})
}

// FindEvidence returns the activities that prove a pending step: successful calls since its round began that prove no
// step yet. If the step's title names skills of such calls, it returns the calls of these skills, up to maxEvidence.
// Otherwise it returns the oldest call whose skill no other pending step names, or none if there is no such call.
func FindEvidence(ctx context.Context, db postgres.DB, stepID string, f EvidenceFilter) ([]string, error) {
	rows, err := db.Query(ctx, `
		select a.id, a.skill_name
		  from lanekeeper.agent_evidence a, agent_objective_steps s
		 where s.id = @step and a.trace_id = @trace_id and a.created_at >= s.started_at
		   and (@execution = '' or a.execution_id = nullif(@execution, '')::uuid)
		   and (@under = '' or starts_with(a.step, @under || '/'))
		   and not exists (select from agent_objective_evidence e where e.activity_id = a.id)
		 order by a.id`,
		pgx.StrictNamedArgs{"step": stepID, "trace_id": f.TraceID, "execution": f.ExecutionID, "under": f.StepKey})
	calls, err := postgres.Collect(rows, err, "find evidence", pgx.RowToStructByPos[call])
	if err != nil {
		return nil, err
	}
	if len(calls) == 0 {
		return nil, nil
	}
	title, others, err := pendingTitles(ctx, db, stepID)
	if err != nil {
		return nil, fmt.Errorf("find evidence: %w", err)
	}
	return selectEvidence(calls, title, others), nil
}

// EvidenceFilter selects the calls that may be evidence.
type EvidenceFilter struct {
	TraceID     string // trace of the calls; required
	ExecutionID string // execution of the calls; empty for any of the trace
	StepKey     string // key of the enclosing durable step; empty for any
}

// maxEvidence bounds the calls that are stored as evidence of one step.
const maxEvidence = 50

// call is a successful call that proves no step yet.
type call struct{ ID, SkillName string }

// pendingTitles returns the titles of the step and of the objective's other pending steps.
func pendingTitles(ctx context.Context, db postgres.DB, stepID string) (title string, others []string, err error) {
	rows, err := db.Query(ctx, `
		select o.title, o.id = s.id
		  from agent_objective_steps s join agent_objective_steps o on o.objective_id = s.objective_id
		 where s.id = @step and (o.id = s.id or o.status = 'pending')`, pgx.StrictNamedArgs{"step": stepID})
	if err != nil {
		return "", nil, err
	}
	var text string
	var own bool
	_, err = pgx.ForEachRow(rows, []any{&text, &own}, func() error {
		if own {
			title = text
		} else {
			others = append(others, text)
		}
		return nil
	})
	return title, others, err
}

// selectEvidence selects the calls that prove a step.
func selectEvidence(calls []call, title string, others []string) (ids []string) {
	for _, c := range calls {
		if names(title, c.SkillName) && len(ids) < maxEvidence {
			ids = append(ids, c.ID)
		}
	}
	if len(ids) > 0 {
		return ids
	}
	for _, c := range calls {
		if !slices.ContainsFunc(others, func(other string) bool { return names(other, c.SkillName) }) {
			return []string{c.ID}
		}
	}
	return nil
}

// names reports whether a title names a skill, as a whole word.
func names(title, skill string) bool {
	word := `(?:^|[^\w-])` + regexp.QuoteMeta(skill) + `(?:[^\w-]|$)`
	return skill != "" && regexp.MustCompile(word).MatchString(title)
}
