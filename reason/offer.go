package reason

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// skillOffer has the callable skills of a turn.
type skillOffer struct {
	Skills []skills.Skill `json:"skills"`
	More   int            `json:"more"` // other skills in scope
}

// Above maxOffered skills in scope, the turn offers all skills on trial, and enabled skills up to offeredOfMany in all.
// skill_search finds the enabled skills in scope, at most maxFound by a call.
const (
	maxOffered    = 40
	offeredOfMany = 30
	maxFound      = 8
)

// offerSkills chooses the offered skills: all skills in scope or, of many, the skills most similar to the prompt.
func (l *Loop) offerSkills(
	ctx context.Context, db postgres.DB, t *Turn, a agents.Agent, callable []skills.Skill,
) (skillOffer, error) {
	all, trials := l.Skills.Split(ctx, callable)
	all, err := l.addNamedSkills(ctx, db, t, all)
	if err != nil {
		return skillOffer{}, err
	}
	all, trials = t.filterSkills(a, all), t.filterSkills(a, trials)
	if len(all)+len(trials) <= maxOffered {
		return skillOffer{Skills: append(all, trials...)}, nil
	}
	near := rankedSkills(all, t.Prompt)
	chosen := near[:min(len(near), offeredOfMany-min(offeredOfMany, len(trials)))]
	slices.SortFunc(chosen, func(a, b skills.Skill) int { return strings.Compare(a.Name, b.Name) })
	return skillOffer{Skills: append(chosen, trials...), More: len(all) - len(chosen)}, nil
}

// addNamedSkills adds the enabled skills that Turn.ExtraSkills names, each once.
func (l *Loop) addNamedSkills(
	ctx context.Context, db postgres.DB, t *Turn, all []skills.Skill,
) ([]skills.Skill, error) {
	if len(t.Scopes) == 0 {
		return nil, nil
	}
	for _, name := range t.ExtraSkills {
		if slices.Contains(skillNames(all), name) {
			continue
		}
		s, err := skills.Get(ctx, db, name)
		switch {
		case errors.Is(err, skills.ErrNotFound):
			continue
		case err != nil:
			return nil, err
		case s.Enabled && l.Skills.Runnable(s) == nil:
			all = append(all, s)
		}
	}
	return all, nil
}

// skillSearch returns the tool that finds other skills. Its results stay callable for the turn.
func (w *turn) skillSearch() Tool {
	return Tool{
		Name: "skill_search",
		Description: fmt.Sprintf("There are %d more tools than those listed here. "+
			"Find them by words that say what you need; "+
			"what is found can be called from then on.", w.searchableCount),
		Parameters: json.RawMessage(`{"type":"object","additionalProperties":false,"required":["query"],
			"properties":{"query":{"type":"string","minLength":1,"maxLength":500}}}`),
		Do: w.findSkills,
	}
}

// findSkills searches the skills that the turn may call, as a durable step.
func (w *turn) findSkills(ctx context.Context, args json.RawMessage) (any, error) {
	var params struct {
		Query string `json:"query"`
	}
	if err := json.Unmarshal(args, &params); err != nil {
		return nil, &executions.StepError{Class: classInvalid, Message: err.Error()}
	}
	found, err := executions.Do(ctx, "skill_search", executions.Call{
		Entry: activity.Entry{Skill: "skill_search", Purpose: w.Purpose, Input: params}, Idempotent: true,
	}, func(ctx context.Context, effect *executions.Effect) ([]skills.Skill, error) {
		callable, err := executions.RetryTransient(ctx, func(ctx context.Context) ([]skills.Skill, error) {
			if w.Sandbox != nil {
				_, callable, err := w.sandboxWorld(ctx, w.Pool, &w.Turn)
				return w.filterSkills(w.agent, callable), err
			}
			callable, err := w.Skills.Available(ctx, w.Pool, w.Scopes...)
			if err == nil {
				callable, err = w.addNamedSkills(ctx, w.Pool, &w.Turn, callable)
			}
			return w.filterSkills(w.agent, callable), err
		})
		if err != nil {
			return nil, err
		}
		found := scoreSkills(callable, params.Query, true)
		found = found[:min(len(found), maxFound)]
		effect.Output = map[string]any{"found": skillNames(found)}
		return found, nil
	})
	if err != nil {
		return nil, err
	}
	return w.offerFound(found), nil
}

// offerFound makes found skills callable, and describes them.
func (w *turn) offerFound(found []skills.Skill) any {
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

// rankedSkills orders all skills by their similarity to a text. Equally similar skills keep their order.
func rankedSkills(list []skills.Skill, text string) []skills.Skill {
	return scoreSkills(list, text, false)
}

// scoreSkills scores skills by words shared with a text. Words of the name, whole words and rare words weigh more.
func scoreSkills(list []skills.Skill, text string, onlyMatches bool) []skills.Skill {
	type scored struct {
		skill skills.Skill
		score float64
	}
	query := splitWords(text)
	all := make([]scored, len(list))
	for i, s := range list {
		all[i].skill = s
	}
	for _, word := range query {
		points := make([]float64, len(list))
		hits := 0
		for i, s := range list {
			points[i] = 3*similarity(word, splitWords(s.Name)) + similarity(word, splitWords(s.Description))
			if points[i] > 0 {
				hits++
			}
		}
		rarity := math.Log(1 + float64(len(list))/float64(max(hits, 1)))
		for i := range all {
			all[i].score += points[i] * rarity
		}
	}
	slices.SortStableFunc(all, func(a, b scored) int { return cmp.Compare(b.score, a.score) })
	var ranked []skills.Skill
	for _, a := range all {
		if a.score > 0 || !onlyMatches {
			ranked = append(ranked, a.skill)
		}
	}
	return ranked
}

// similarity is 1 for a word among others, and less for a word with the same beginning.
func similarity(word string, others []string) float64 {
	best := 0.0
	for _, other := range others {
		switch short, long := min(len(word), len(other)), max(len(word), len(other)); {
		case word == other:
			return 1
		case short >= 3 && word[:short] == other[:short] && long-short <= 4:
			best = 0.6
		}
	}
	return best
}

// splitWords splits a text at characters other than letters and digits, and at camelCase humps. It returns distinct
// words in lower case.
func splitWords(text string) []string {
	var spaced strings.Builder
	var before rune
	for _, r := range text {
		if unicode.IsUpper(r) && unicode.IsLower(before) {
			spaced.WriteByte(' ')
		}
		spaced.WriteRune(r)
		before = r
	}
	var list []string
	for word := range strings.FieldsFuncSeq(strings.ToLower(spaced.String()), func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) {
		if !slices.Contains(list, word) {
			list = append(list, word)
		}
	}
	return list
}
