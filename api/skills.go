package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/automations"
	daybudgets "github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
)

// skillRow is a skill and how it fares.
type skillRow struct {
	skills.Skill
	Health skillHealth `json:"health"`
}

// skillHealth is how a skill fared in the last 7 days. Percentiles are right to 2.5 per cent.
type skillHealth struct {
	Calls       int64    `json:"calls"`
	SuccessRate *float64 `json:"success_rate"` // 0 to 1; null without calls
	Streak      int64    `json:"streak"`       // failures in a row up to now
	P50MS       *float64 `json:"p50_ms"`
	P95MS       *float64 `json:"p95_ms"`
	State       string   `json:"state"` // enabled, on trial, disabled
}

// skillChange is what enabling or disabling did. Changed is false when it was so already.
type skillChange struct {
	Name        string   `json:"name"`
	Enabled     bool     `json:"enabled"`
	Changed     bool     `json:"changed"`
	Automations []string `json:"automations"` // put back into service with it, or paused
	TraceID     string   `json:"trace_id"`
	ActivityID  string   `json:"activity_id"`
}

func (s *server) listSkills(r request) (answer, error) {
	before, err := unsealID("skills", r.query["cursor"])
	if err != nil {
		return answer{}, err
	}
	limit := r.query.limit()
	list, err := skills.List(r.Context(), s.pool, skills.Filter{
		Enabled: r.query.flag("enabled"), Scope: r.query["scope"], Source: r.query["source"],
		DisabledBy: r.query["disabled_by"], Before: before, Limit: limit + 1,
	})
	if err != nil {
		return answer{}, err
	}
	next := ""
	if len(list) > limit {
		list = list[:limit]
		next = seal("skills", list[limit-1].ID)
	}
	rows, err := withHealth(r.Context(), s.pool, list)
	if err != nil {
		return answer{}, err
	}
	return answer{body: pageOf(rows, next)}, nil
}

// getSkill is one skill by its name. Its ETag is the revision of its state.
func (s *server) getSkill(r request) (answer, error) {
	name := r.PathValue("name")
	if !storable(name) {
		return answer{}, skills.ErrNotFound
	}
	one, err := skills.Get(r.Context(), s.pool, name)
	if err != nil {
		return answer{}, err
	}
	rows, err := withHealth(r.Context(), s.pool, []skills.Skill{one})
	if err != nil {
		return answer{}, err
	}
	return answer{body: rows[0], revision: one.StateRevision}, nil
}

// withHealth joins skills with their health.
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
		if !found { // beyond the first thousand
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

func (s *server) enableSkill(r request) (answer, error) {
	return s.changeSkill(r, "enable_skill", func(tx pgx.Tx, name, reason string, c *skillChange) error {
		restored, err := selfheal.Reenable(r.Context(), tx, name, admin, reason)
		c.Enabled, c.Changed, c.Automations = true, restored.Settled, restored.Automations
		return err
	})
}

func (s *server) disableSkill(r request) (answer, error) {
	return s.changeSkill(r, "disable_skill", func(tx pgx.Tx, name, reason string, c *skillChange) (err error) {
		c.Changed, err = skills.Disable(r.Context(), tx, name, admin, reason, map[string]string{"disabled_by": admin, "reason": reason})
		if err == nil {
			c.Automations, err = automations.PausedFor(r.Context(), tx, name)
		}
		return err
	})
}

// changeSkill changes a skill, audited.
func (s *server) changeSkill(r request, action string, change func(pgx.Tx, string, string, *skillChange) error) (answer, error) {
	name, reason := r.PathValue("name"), r.body.(because).Reason
	if !storable(name) {
		return answer{}, fmt.Errorf("%s: %w", action, skills.ErrNotFound)
	}
	based, err := r.known()
	if err != nil {
		return answer{}, err
	}
	result := skillChange{Name: name}
	done, err := s.audited(r.Context(), action, reason, map[string]any{"skill": name},
		func(tx pgx.Tx, _ string) (any, error) {
			if err := skills.AtRevision(r.Context(), tx, name, based); err != nil {
				return nil, err
			}
			err := change(tx, name, reason, &result)
			return map[string]any{"changed": result.Changed, "automations": result.Automations}, err
		})
	if err != nil {
		return answer{}, s.withCurrent(r.Context(), err)
	}
	result.TraceID, result.ActivityID = done.TraceID, done.ActivityID
	return answer{body: result, trace: result.TraceID}, nil
}

// listedAgent is an agent in a listing.
type listedAgent struct {
	agents.Agent
	Today daybudgets.Standing `json:"today"` // what it has used since midnight UTC
}

// naming is who acts.
func (s *server) naming() []route {
	return []route{
		{
			method: "GET", path: "/v1/agents", answer: page[listedAgent]{}, handle: s.listAgents, params: listing(),
			about: "Agents in service, the default first, then by name: effective values, and what each has used today.",
		}, {
			method: "GET", path: "/v1/agents/{name}", answer: agents.Shown{}, handle: s.getAgent,
			about: "One agent: effective values, where each comes from (document, a setting or default), and its versions.",
			params: []param{{
				name: "version", about: "This version, of a removed agent too; the one in service when left out",
				format: "integer", check: checkVersion,
			}},
		},
	}
}

func checkVersion(value string) error {
	if n, err := strconv.ParseInt(value, 10, 32); err != nil || n < 1 {
		return fmt.Errorf("is %q; it is a number from 1", value)
	}
	return nil
}

func (s *server) listAgents(r request) (answer, error) {
	after, err := unseal("agents", r.query["cursor"])
	if err != nil {
		return answer{}, err
	}
	all, err := s.agents.List(r.Context(), s.pool)
	if err != nil {
		return answer{}, err
	}
	used, err := daybudgets.Today(r.Context(), s.pool)
	if err != nil {
		return answer{}, err
	}
	all = slices.DeleteFunc(all, func(a agents.Agent) bool { return agentKey(a) <= after })
	next := ""
	if limit := r.query.limit(); len(all) > limit {
		all = all[:limit]
		next = seal("agents", agentKey(all[limit-1]))
	}
	listed := make([]listedAgent, len(all))
	for i, a := range all {
		listed[i] = listedAgent{Agent: a, Today: daybudgets.AgentOf(used, a.Name)}
	}
	return answer{body: pageOf(listed, next)}, nil
}

// agentKey sorts as agents are listed: the default first, then by name.
func agentKey(a agents.Agent) string {
	if a.Default {
		return "0 " + a.Name
	}
	return "1 " + a.Name
}

func (s *server) getAgent(r request) (answer, error) {
	name := r.PathValue("name")
	if !storable(name) {
		return answer{}, problem.New(http.StatusNotFound, "there is no agent of this name; GET /v1/agents lists them")
	}
	version := 0
	if r.query["version"] != "" {
		var err error
		if version, err = strconv.Atoi(r.query["version"]); err != nil {
			return answer{}, badParameter("parameter version %s", err)
		}
	}
	shown, err := s.agents.Show(r.Context(), s.pool, name, version)
	missing, ok := errors.AsType[*agents.MissingError](err)
	switch {
	case ok && missing.Latest == 0:
		return answer{}, problem.New(http.StatusNotFound, "%s; GET /v1/agents lists them", missing)
	case ok && missing.Version > 0:
		return answer{}, problem.New(http.StatusNotFound, "%s; leave version out for it", missing)
	case ok:
		return answer{}, problem.New(http.StatusNotFound, "%s; ?version=%d shows what it was", missing, missing.Latest)
	}
	return answer{body: shown}, err
}
