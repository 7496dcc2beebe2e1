package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
)

// skillRoutes returns the routes that read, enable and disable skills.
func (s *server) skillRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/skills", response: page[skillRow]{}, handle: s.listSkills,
			about: "Skills, newest first, each with its health over the last 7 days. From 20 ms on, p50_ms and p95_ms are " +
				"within 2.5%.",
			params: listParams(enumParam("enabled", "Whether it is enabled", "true", "false"),
				enumParam("scope", "Its scope", "internal", "external", "both"),
				textParam("source", "Source of the declaration"),
				textParam("disabled_by", "Person or program that disabled it")),
		}, {
			method: "GET", path: "/v1/skills/{name}", response: skillRow{}, handle: s.getSkill, hasETag: true,
			about: "One skill by its name, with its health over the last 7 days. Its ETag is the revision of its state.",
		}, {
			method: "POST", path: "/v1/skills/{name}/enable", body: reasonRequest{}, ifMatch: true, response: skillChange{},
			handle: s.enableSkill,
			about: "Enable a skill and its paused automations. Earlier failures no longer count. 409 for a quarantined " +
				"tool of an MCP server, which agent mcp accept enables.",
		}, {
			method: "POST", path: "/v1/skills/{name}/disable", body: reasonRequest{}, ifMatch: true, response: skillChange{},
			handle: s.disableSkill,
			about:  "Disable a skill and pause its automations.",
		},
	}
}

type skillRow struct {
	skills.Skill
	Health skillHealth `json:"health"`
}

// skillHealth is a skill's health in the last 7 days. Percentiles are accurate to 2.5 per cent.
type skillHealth struct {
	Calls       int64    `json:"calls"`
	SuccessRate *float64 `json:"success_rate" doc:"0 to 1; null without calls"`
	Streak      int64    `json:"streak" doc:"failures in a row up to now"`
	P50MS       *float64 `json:"p50_ms"`
	P95MS       *float64 `json:"p95_ms"`
	State       string   `json:"state" doc:"enabled, on trial, disabled"`
}

// skillChange is the result of enabling or disabling a skill. Changed is false if the action had no effect.
type skillChange struct {
	Name        string   `json:"name"`
	Enabled     bool     `json:"enabled"`
	Changed     bool     `json:"changed"`
	Automations []string `json:"automations" doc:"restored or paused with the skill"`
	TraceID     string   `json:"trace_id"`
	ActivityID  string   `json:"activity_id"`
}

func (s *server) listSkills(r request) (response, error) {
	before, err := decodeIDCursor("skills", r.query["cursor"])
	if err != nil {
		return response{}, err
	}
	limit := r.query.limit()
	list, err := skills.List(r.Context(), s.pool, skills.Filter{
		Enabled: r.query.flag("enabled"), Scope: r.query["scope"], Source: r.query["source"],
		DisabledBy: r.query["disabled_by"], Before: before, Limit: limit + 1,
	})
	if err != nil {
		return response{}, err
	}
	next := ""
	if len(list) > limit {
		list = list[:limit]
		next = encodeCursor("skills", list[limit-1].ID)
	}
	rows, err := withHealth(r.Context(), s.pool, list)
	if err != nil {
		return response{}, err
	}
	return response{body: pageOf(rows, next)}, nil
}

func (s *server) getSkill(r request) (response, error) {
	name := r.PathValue("name")
	if !isPrintableText(name) {
		return response{}, skills.ErrNotFound
	}
	one, err := skills.Get(r.Context(), s.pool, name)
	if err != nil {
		return response{}, err
	}
	rows, err := withHealth(r.Context(), s.pool, []skills.Skill{one})
	if err != nil {
		return response{}, err
	}
	return response{body: rows[0], revision: one.StateRevision}, nil
}

// withHealth adds to each skill the health of its counted calls.
func withHealth(ctx context.Context, db postgres.DB, list []skills.Skill) ([]skillRow, error) {
	sums, err := activity.CountedHealth(ctx, db, activity.HealthFilter{})
	if err != nil {
		return nil, fmt.Errorf("read health of skills: %w", err)
	}
	of := make(map[string]activity.Health, len(sums.Lines))
	for _, h := range sums.Lines {
		of[h.Skill] = h
	}
	rows := make([]skillRow, 0, len(list))
	for _, s := range list {
		h, found := of[s.Name]
		if !found { // not among the first thousand
			one, err := activity.CountedHealth(ctx, db, activity.HealthFilter{Skill: s.Name})
			if err != nil {
				return nil, fmt.Errorf("read health of skill %s: %w", s.Name, err)
			}
			if len(one.Lines) == 1 {
				h = one.Lines[0]
			}
		}
		rows = append(rows, skillRow{s, skillHealth{h.Calls, h.SuccessRate, h.Streak, h.P50MS, h.P95MS, h.State}})
	}
	return rows, nil
}

func (s *server) enableSkill(r request) (response, error) {
	return s.changeSkill(r, "enable_skill", func(tx pgx.Tx, name, reason string, c *skillChange) error {
		restored, err := selfheal.Reenable(r.Context(), tx, name, actorName(r.Context()), reason)
		c.Enabled, c.Changed, c.Automations = true, restored.Settled, restored.Automations
		if errors.Is(err, selfheal.ErrToolChanged) {
			err = problem.New(http.StatusConflict, "%s", err)
		}
		return err
	})
}

func (s *server) disableSkill(r request) (response, error) {
	return s.changeSkill(r, "disable_skill", func(tx pgx.Tx, name, reason string, c *skillChange) (err error) {
		c.Changed, err = skills.Disable(r.Context(), tx, name, actorName(r.Context()), reason,
			map[string]string{"disabled_by": actorName(r.Context()), "reason": reason})
		if err == nil {
			c.Automations, err = automations.PausedFor(r.Context(), tx, name)
		}
		return err
	})
}

// changeSkill runs an audited change of a skill.
func (s *server) changeSkill(
	r request, action string, change func(pgx.Tx, string, string, *skillChange) error,
) (response, error) {
	name, reason := r.PathValue("name"), r.body.(reasonRequest).Reason
	if !isPrintableText(name) {
		return response{}, fmt.Errorf("%s: %w", action, skills.ErrNotFound)
	}
	revision, err := r.ifMatch()
	if err != nil {
		return response{}, err
	}
	result := skillChange{Name: name}
	done, err := s.record(r.Context(), action, reason, map[string]any{"skill": name},
		func(tx pgx.Tx, _ string) (any, error) {
			if err := skills.LockRevision(r.Context(), tx, name, revision); err != nil {
				return nil, err
			}
			err := change(tx, name, reason, &result)
			return map[string]any{"changed": result.Changed, "automations": result.Automations}, err
		})
	if err != nil {
		return response{}, s.withCurrent(r.Context(), err)
	}
	result.TraceID, result.ActivityID = done.TraceID, done.ActivityID
	return response{body: result, trace: result.TraceID}, nil
}
