package reason

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// With more than mostOffered skills in scope, shortList of them are offered, and the others found by search.
const (
	mostOffered = 40
	shortList   = 30
	mostFound   = 8
)

// offer is what the turn's model may call.
type offer struct {
	Skills []skills.Skill `json:"skills"`
	More   int            `json:"more"` // in scope besides them
}

// offered chooses among the callable skills what to offer: everything in scope, or of very much that which is nearest
// to the prompt.
func (l *Loop) offered(ctx context.Context, db postgres.DB, t Turn, a agents.Agent, callable []skills.Skill) (offer, error) {
	all, trials := l.Skills.Split(ctx, callable)
	all, err := l.also(ctx, db, t, all)
	if err != nil {
		return offer{}, err
	}
	all, trials = t.allowed(a, all), t.allowed(a, trials)
	if len(all)+len(trials) <= mostOffered {
		return offer{Skills: append(all, trials...)}, nil
	}
	near := nearestSkills(all, t.Prompt)
	chosen := near[:min(len(near), shortList-min(shortList, len(trials)))]
	slices.SortFunc(chosen, func(a, b skills.Skill) int { return strings.Compare(a.Name, b.Name) })
	return offer{Skills: append(chosen, trials...), More: len(all) - len(chosen)}, nil
}

// also adds the skills that a turn with scopes names.
func (l *Loop) also(ctx context.Context, db postgres.DB, t Turn, all []skills.Skill) ([]skills.Skill, error) {
	if len(t.Scopes) == 0 {
		return nil, nil
	}
	for _, name := range t.Also {
		s, err := skills.Get(ctx, db, name)
		switch {
		case errors.Is(err, skills.ErrNotFound):
			continue
		case err != nil:
			return nil, err
		}
		at, has := slices.BinarySearchFunc(all, name, func(s skills.Skill, name string) int { return strings.Compare(s.Name, name) })
		if !has && s.Enabled && l.Skills.Runnable(s) == nil {
			all = slices.Insert(all, at, s)
		}
	}
	return all, nil
}

// skillSearch finds skills that were not offered at once. Its hits can be called for the rest of the turn.
func (w *turn) skillSearch() Tool {
	return Tool{
		Name: "skill_search",
		Description: fmt.Sprintf("There are %d more tools than those listed here. "+
			"Find them by words that say what you need; "+
			"what is found can be called from then on.", w.more),
		Parameters: json.RawMessage(`{"type":"object","additionalProperties":false,"required":["query"],
			"properties":{"query":{"type":"string","minLength":1,"maxLength":500}}}`),
		Do: w.findSkills,
	}
}

// findSkills looks among what the turn's scopes allow, and nowhere else. What it found is recorded.
func (w *turn) findSkills(ctx context.Context, args json.RawMessage) (any, error) {
	var asked struct {
		Query string `json:"query"`
	}
	if err := json.Unmarshal(args, &asked); err != nil {
		return nil, &executions.StepError{Class: classInvalid, Message: err.Error()}
	}
	found, err := executions.Do(ctx, "skill_search", executions.Call{
		Entry: activity.Entry{Skill: "skill_search", Purpose: w.Purpose, Input: asked}, Idempotent: true,
	}, func(ctx context.Context, effect *executions.Effect) ([]skills.Skill, error) {
		all, err := executions.RetryTransient(ctx, func(ctx context.Context) ([]skills.Skill, error) {
			all, err := w.Skills.Available(ctx, w.Pool, w.Scopes...)
			if err == nil {
				all, err = w.also(ctx, w.Pool, w.Turn, all)
			}
			return w.allowed(w.agent, all), err
		})
		if err != nil {
			return nil, err
		}
		found := matching(all, asked.Query)
		found = found[:min(len(found), mostFound)]
		effect.Output = map[string]any{"found": skillNames(found)}
		return found, nil
	})
	if err != nil {
		return nil, err
	}
	return w.admitFound(found), nil
}

// admitFound makes found skills callable, and tells what they are.
func (w *turn) admitFound(found []skills.Skill) any {
	type hit struct {
		Name        string `json:"name"`
		Description string `json:"description"`
	}
	hits := make([]hit, 0, len(found))
	for _, s := range found {
		hits = append(hits, hit{s.Name, s.Description})
		if !slices.ContainsFunc(w.skills, func(have skills.Skill) bool { return have.Name == s.Name }) {
			w.skills = append(slices.Clip(w.skills), s)
		}
	}
	note := "These can be called now."
	if len(hits) == 0 {
		note = "Nothing was found; try other words."
	}
	return map[string]any{"tools": hits, "note": note}
}

func skillNames(list []skills.Skill) []string {
	names := make([]string, len(list))
	for i, s := range list {
		names[i] = s.Name
	}
	return names
}
