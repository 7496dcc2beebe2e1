package monitor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/human"
)

// finding is a reason before it is merged with other findings of its class.
type finding struct {
	Reason
	class      string                          // empty: it is not merged
	mergedText func(n int) (text, link string) // of the reason for n findings of the class
}

// merge combines the findings of a class into one reason, at the position of the first.
func merge(found []finding) (why []Reason) {
	places, counts := map[string]int{}, map[string]int{} // by class
	for _, f := range found {
		if counts[f.class]++; f.class == "" || counts[f.class] == 1 {
			places[f.class] = len(why)
			why = append(why, f.Reason)
			continue
		}
		r := &why[places[f.class]]
		r.Text, r.Link = f.mergedText(counts[f.class])
		r.Since = earliest(r.Since, f.Since)
		r.keys = append(slices.Clip(r.keys), f.keys...)
	}
	return why
}

// earliest returns the earlier of two times. A nil time is ignored.
func earliest(a, b *time.Time) *time.Time {
	if a == nil || b != nil && b.Before(*a) {
		return b
	}
	return a
}

// deadHeartbeats returns the findings of dead heartbeats.
func (c Condition) deadHeartbeats(concerns func(string) bool) (found []finding) {
	beats := c.BeatsOf(concerns)
	for _, b := range beats {
		text, since := b.problem(c.now)
		if text == "" {
			continue
		}
		key := fmt.Sprintf("%s %s %d", text, b.Agent, since.Unix())
		if len(beats) > 1 {
			text += " for " + human.Cut(60, b.Agent)
		}
		found = append(found, finding{Reason: Reason{
			Text: text, Link: "/executions?flow=heartbeat", Since: &since, keys: []string{key},
		}})
	}
	return found
}

// brokenChannels returns the findings of broken channels.
func (c Condition) brokenChannels(concerns func(string) bool) (found []finding) {
	for _, b := range c.broken {
		if !concerns(b.Agent) {
			continue
		}
		text := "channel " + b.Name + " " + b.State
		found = append(found, finding{
			Reason: Reason{
				Text: text, Link: "/channels#channel-" + b.Name, Since: &b.Since, keys: []string{text + ": " + errorKey(b.Error)},
			},
			class:      "channel",
			mergedText: func(n int) (string, string) { return fmt.Sprintf("%d channels broken", n), "/channels" },
		})
	}
	return found
}

// spentBudgets returns the finding of a spent budget.
func (c Condition) spentBudgets(of *agents.Agent) []finding {
	text, unknown := "", ""
	if c.overBudget[""] {
		text, unknown = "today's budget is spent", c.unknownSpend()
	} else if of != nil && c.overBudget[of.Name] {
		text = "today's budget is spent"
	} else if of == nil && len(c.overBudget) > 0 {
		text = "today's budget is spent by " + agentsText(c.overBudget)
	}
	if text == "" {
		return nil
	}
	day := c.now.UTC().Format(time.DateOnly)
	return []finding{{Reason: Reason{
		Text: text + unknown, Link: "/spend?days=1", keys: []string{text + " " + day},
	}}}
}

// unknownSpend describes the unknown part of the day's spend; empty without one.
func (c Condition) unknownSpend() string {
	for _, b := range c.Budgets {
		if b.Scope == "day" && b.Limit > 0 && b.Unknown > 0 {
			return fmt.Sprintf(" (%s of the %s spent today are unknown)", b.Text(b.Unknown), b.Text(b.Spent))
		}
	}
	return ""
}

// agentsText names one agent, or counts several.
func agentsText(set map[string]bool) string {
	for name := range set {
		if len(set) == 1 {
			return human.Cut(60, name)
		}
	}
	return fmt.Sprintf("%d agents", len(set))
}

// failingSubjects returns the findings of failing flows, skills, actions and models.
func (c Condition) failingSubjects(concerns func(string) bool) (found []finding) {
	disabled := map[string]bool{} // disabled skills have findings of their own
	for _, s := range c.disabled {
		disabled[s.Name] = true
	}
	var roots map[string]string
	for _, kind := range []string{"flow", "skill", "action", "model"} {
		positions := map[string]int{} // in found, by name
		for _, f := range c.list {
			o := c.outcomeOf(f)
			if f.Kind != kind || !concerns(f.Agent) || !o.Failing() || kind == "skill" && disabled[f.Name] {
				continue
			}
			if roots == nil {
				roots = c.roots()
			}
			key := kind + " " + f.Name + " fails: " + errorKey(roots[f.ID])
			i, known := positions[f.Name]
			if !known {
				i = len(found)
				positions[f.Name] = i
				many := func(n int) (string, string) { return fmt.Sprintf("%d %ss failing", n, kind), "#failing" }
				found = append(found, finding{Reason: c.failingReason(f, o.Since, key), class: kind, mergedText: many})
			}
			found[i].Since = earliest(found[i].Since, o.Since)
			if !slices.Contains(found[i].keys, key) { // the newest failure comes first
				found[i].keys = append(found[i].keys, key)
			}
		}
	}
	return found
}

// failingReason returns the reason of a failure. A model call that a limit refused has its own text, because it did not
// reach the model.
func (c Condition) failingReason(f failure, since *time.Time, key string) Reason {
	text, link := f.Kind+" "+human.Cut(60, f.Name)+" failing", SubjectURL(f.Kind, f.Name)
	switch {
	case f.Kind == "model" && strings.HasPrefix(f.Class, "budget_"):
		text, link = "model calls refused by a limit", "/spend?days=1"
		if f.Class == "budget_day" {
			text += c.unknownSpend()
		}
	case f.Kind == "model":
		text = "model calls failing"
	}
	return Reason{Text: text, Link: link, Since: since, keys: []string{key}}
}

// disabledSkills returns the findings of skills that self-heal disabled and that the agent may call.
func (c Condition) disabledSkills(of *agents.Agent) (found []finding) {
	for _, trial := range []bool{false, true} {
		text, link := "disabled by self-heal", "/skills?state=disabled"
		if trial {
			text, link = "on trial", "/skills?state=on+trial"
		}
		for _, s := range c.disabled {
			if s.OnTrial != trial || s.ByAdmin || of != nil && !of.May(s.Name) {
				continue
			}
			found = append(found, finding{
				Reason: Reason{
					Text: "skill " + s.Name + " " + text, Link: SubjectURL("skill", s.Name), Since: s.At,
					keys: []string{fmt.Sprintf("skill %s %s %d", s.Name, text, unixSeconds(s.At))},
				},
				class: text, mergedText: func(n int) (string, string) { return fmt.Sprintf("%d skills %s", n, text), link },
			})
		}
	}
	return found
}

func unixSeconds(at *time.Time) int64 {
	if at == nil {
		return 0
	}
	return at.Unix()
}

// stuckFindings returns the findings of stuck executions of an agent, and of stuck lanes.
func (c Condition) stuckFindings(concerns func(string) bool) (found []finding) {
	var runs, lanes stuckWork
	for _, s := range c.stuck {
		sum := &runs
		if s.Lane != "" {
			sum = &lanes
		} else if !concerns(s.Agent) {
			continue
		}
		sum.N, sum.Since = sum.N+s.N, earliest(sum.Since, s.Since)
	}
	add := func(noun, link string, s stuckWork) {
		if s.N > 0 {
			found = append(found, finding{Reason: Reason{
				Text: Counted(s.N, noun) + " stuck", Link: link, Since: s.Since,
				keys: []string{fmt.Sprintf("%d %s stuck %d", s.N, noun, unixSeconds(s.Since))},
			}})
		}
	}
	add("execution", "/executions?view=stuck", runs)
	add("lane", "/lanes", lanes)
	return found
}

// Counted formats a count with its noun: "1 lane", "2 lanes", "1,000+ lanes".
func Counted(n int64, noun string) string {
	if n >= countLimit {
		return human.Count(countLimit-1) + "+ " + noun + "s"
	}
	return human.Counted(n, noun)
}
