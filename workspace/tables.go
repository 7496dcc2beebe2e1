package workspace

import (
	"context"
	"encoding/json"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
)

// matcher is a kind whose table is about to be made to match.
type matcher interface {
	match(ctx context.Context, tx pgx.Tx, o Options) ([]Item, error)
}

// tables lists the kinds in the order in which they are applied.
func tables(w Workspace, o Options) []matcher {
	return []matcher{
		databaseTable(w),
		table[skills.Definition, skill]{
			kind: "skill", documents: w.Skills, name: func(d skills.Definition) string { return d.Name },
			get: getSkill,
			put: func(ctx context.Context, tx pgx.Tx, d skills.Definition) (bool, error) {
				return skills.Put(ctx, tx, d, Source)
			},
			notFound: skills.ErrNotFound, remove: skills.Remove,
			declared: []string{"description", "parameters", "handler", "config", "scope", "trust", "idempotent", "timeout_ms", "source"},
		},
		mcpServers(w), agentTable(w, o),
		table[objectives.Definition, objective]{
			kind: "objective", documents: w.Objectives, name: func(d objectives.Definition) string { return d.Name },
			get: getObjective,
			put: func(ctx context.Context, tx pgx.Tx, d objectives.Definition) (bool, error) {
				return objectives.Put(ctx, tx, d, Source)
			},
			notFound: objectives.ErrNotFound, remove: objectives.Remove,
			declared: []string{"goal", "success_criteria", "agent", "priority", "review_every_seconds", "steps", "source"},
		},
		table[automations.Definition, automations.Automation]{
			kind: "automation", documents: w.Automations, name: func(d automations.Definition) string { return d.Name },
			get: func(ctx context.Context, tx pgx.Tx, name string) (automations.Automation, error) {
				return automations.Get(ctx, tx, name)
			},
			put: func(ctx context.Context, tx pgx.Tx, d automations.Definition) (bool, error) {
				return automations.Put(ctx, tx, d, Source)
			},
			notFound: automations.ErrNotFound, remove: automations.Remove,
			declared: []string{
				"description", "agent", "trigger", "cron", "timezone", "event", "condition", "signal", "skill_name",
				"arguments", "prompt", "flow",
				"max_attempts", "source",
			},
		},
		flowTable(w), webhookEndpoints(w), webhookTargets(w),
	}
}

// skill is a skill with its parameters beside it.
type skill struct {
	skills.Skill
	Parameters json.RawMessage `json:"parameters"`
}

func getSkill(ctx context.Context, tx pgx.Tx, name string) (skill, error) {
	s, err := skills.Get(ctx, tx, name)
	return skill{Skill: s, Parameters: s.Parameters()}, err
}

// objective is an objective with the titles of its steps.
type objective struct {
	objectives.Objective
	Steps []string `json:"steps"`
}

func getObjective(ctx context.Context, tx pgx.Tx, name string) (objective, error) {
	o, err := objectives.Get(ctx, tx, name)
	if err != nil {
		return objective{}, err
	}
	steps, err := objectives.Steps(ctx, tx, o.ID)
	found := objective{Objective: o, Steps: []string{}}
	for _, step := range steps {
		found.Steps = append(found.Steps, step.Title)
	}
	return found, err
}
