package builtins

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
	"github.com/lanekeeper/lanekeeper/skills"
)

type automationProposeArgs struct {
	Name        string         `json:"name"`
	Description string         `json:"description"`
	Cron        string         `json:"cron"`
	Timezone    string         `json:"timezone"`
	Event       string         `json:"event"`
	When        string         `json:"when"`
	Signal      string         `json:"signal"`
	Skill       string         `json:"skill"`
	Arguments   map[string]any `json:"arguments"`
	Prompt      string         `json:"prompt"`
}

func automationPropose(ctx context.Context, db postgres.Beginner, who acting, args automationProposeArgs) (any, error) {
	d := automations.Definition{
		Name: args.Name, Description: args.Description, Cron: args.Cron, Timezone: args.Timezone,
		Event: args.Event, When: args.When,
		Signal: args.Signal, Skill: args.Skill, Arguments: args.Arguments, Prompt: args.Prompt,
	}
	if err := automations.Validate(d); err != nil {
		return nil, invalid(err.Error())
	}
	if args.Skill != "" {
		if _, err := skills.Get(ctx, db, args.Skill); err != nil {
			return nil, invalidIf(err, skills.ErrNotFound)
		}
	}
	a, err := automations.Propose(ctx, db, d, who.Agent, who.TraceID)
	if err != nil {
		return nil, invalidIf(err, automations.ErrNameTaken, automations.ErrTooMany)
	}
	status := automations.Proposal
	if a.DisabledBy != automations.Proposal {
		status = "decided"
	}
	return map[string]any{"automation": a.Name, "status": status, "note": waitsForAdmin}, nil
}

type skillsArgs struct {
	Words string `json:"words"`
}

// skillView is the agent's view of a skill.
type skillView struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	Scope       string `json:"scope"`
	Trust       string `json:"trust"`
	Enabled     bool   `json:"enabled"`
}

const (
	maxSkills = 100
	maxError  = 300
)

// skillList lists the skills with all given words in their name or description, at most maxSkills by name.
func skillList(ctx context.Context, db postgres.DB, args skillsArgs) (any, error) {
	all, err := skills.InScope(ctx, db, nil)
	if err != nil {
		return nil, err
	}
	list, omitted := []skillView{}, 0
	for _, s := range all {
		text := strings.ToLower(s.Name + " " + s.Description)
		missing := func(word string) bool { return !strings.Contains(text, word) }
		switch {
		case slices.ContainsFunc(strings.Fields(strings.ToLower(args.Words)), missing):
		case len(list) == maxSkills:
			omitted++
		default:
			list = append(list, skillView{s.Name, textcut.Text(s.Description, maxError), s.Scope, s.Trust, s.Enabled})
		}
	}
	return map[string]any{"skills": list, "left_out": omitted}, nil
}

type activityArgs struct {
	Skill  string  `json:"skill"`
	Status string  `json:"status"`
	Limit  float64 `json:"limit"` // 2.0 is an integer in JSON Schema
}

// activityView is the agent's view of an activity: its outcome without its content.
type activityView struct {
	Time       time.Time `json:"time"`
	TraceID    string    `json:"trace_id"`
	Skill      string    `json:"skill"`
	Status     string    `json:"status"`
	DurationMS *int64    `json:"duration_ms"` // null while it runs
	Error      string    `json:"error,omitempty"`
}

func recentActivity(ctx context.Context, db postgres.DB, args activityArgs) (any, error) {
	rows, _, err := activity.Recent(ctx, db, activity.Filter{
		Skill: args.Skill, Status: activity.Status(args.Status),
		Limit:   postgres.PageSize(int(args.Limit), defaultLimit, maxLimit),
		Kinds:   []activity.Kind{activity.KindCall, activity.KindPhase, activity.KindNote}, // without model calls
		NoEvals: true,
	})
	if err != nil {
		return nil, err
	}
	list := make([]activityView, len(rows))
	for i, r := range rows {
		list[i] = activityView{
			Time: r.CreatedAt, TraceID: r.TraceID, Skill: r.SkillName, Status: string(r.Status),
			DurationMS: r.DurationMS,
		}
		if r.ErrorMessage != nil {
			list[i].Error = textcut.Text(*r.ErrorMessage, maxError)
		}
	}
	return map[string]any{"activities": list}, nil
}
