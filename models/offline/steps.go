package offline

import (
	"regexp"
	"slices"
	"strings"
)

const (
	maxReports = 6   // bookkeeping calls in one reply
	maxFacts   = 400 // bytes of a step's result or a remembered fact
)

var (
	sumsUp  = regexp.MustCompile(`(?i)^\s*(?:report|summari[sz]e|write|describe|conclude|explain|tell|note)\b`)
	noSteps = regexp.MustCompile(`(?i)\bsteps?:?\s*\(?(?:none|no steps)`)
	trouble = regexp.MustCompile(`(?i)\b(?:fail|error|disabl|slow|broken|stall)`)
	// noEvidence matches skills that prove no step of an objective, as the runtime defines it.
	noEvidence = regexp.MustCompile(
		`^(?:objective_|automation_|skill_|remember$|complete_step$|fail_step$|add_steps$|objectives_list$|recent_activity$|read_result$)`)
)

// reports returns the bookkeeping: outcomes of steps, a plan where there is none, and facts to remember.
func (t turn) reports() []call {
	var calls []call
	add := func(name string, arguments map[string]any) {
		if c := t.callFirst(name, arguments).calls; len(calls) < maxReports {
			calls = append(calls, c...)
		}
	}
	evidence := t.evidence()
	for _, s := range t.steps {
		c, found := evidence[s.id]
		switch {
		case !found || t.reported(s):
		case c.failed:
			add("fail_step", map[string]any{"step_id": s.id, "reason": c.failure()})
		default:
			facts := []string{c.facts()}
			for _, other := range t.work() {
				if s.names(other.name) && !other.failed && other.name != c.name {
					facts = append(facts, other.facts())
				}
			}
			add("complete_step", map[string]any{"step_id": s.id, "result": truncate(strings.Join(facts, "; "), maxFacts)})
		}
	}
	if noSteps.MatchString(t.prompt) && !t.called("add_steps") {
		titles := []any{}
		for _, tl := range t.relevant() {
			titles = append(titles, "Look at "+strings.ReplaceAll(tl.name, "_", " ")+" with "+tl.name)
		}
		if len(titles) > 0 {
			add("add_steps", map[string]any{"titles": titles[:min(len(titles), maxParallel)]})
		}
	}
	if t.called("remember") {
		return calls
	}
	for _, c := range t.work() {
		if facts := c.facts(); !c.failed && hasDigit(facts) && !strings.HasSuffix(facts, nothing) {
			add("remember", map[string]any{"key": c.name, "category": "observation", "value": truncate(facts, maxFacts)})
		}
	}
	if len(t.work()) == 0 {
		for _, line := range factLines(t.prompt) {
			subject, _, _ := strings.Cut(line, "(")
			add("remember", map[string]any{
				"key": memoryKey(subject), "category": "observation",
				"value": truncate(line, maxFacts),
			})
		}
	}
	return calls
}

// evidence pairs each open step with a call of its own, as the runtime demands: one that the title names, else a
// related one. A successful call comes before a failed one. A step that sums up accepts any successful call.
func (t turn) evidence() map[string]call {
	pairs := map[string]call{}
	free := slices.DeleteFunc(t.work(), func(c call) bool { return noEvidence.MatchString(c.name) })
	related := func(s step, c call) bool { return overlap(stems(s.title), stems(c.name)) > 0 }
	for _, matches := range []func(s step, c call) bool{
		func(s step, c call) bool { return s.names(c.name) && !c.failed },
		func(s step, c call) bool { return related(s, c) && !c.failed },
		func(s step, c call) bool { return related(s, c) },
		func(s step, c call) bool { return sumsUp.MatchString(s.title) && !c.failed },
	} {
		for _, s := range t.steps {
			i := slices.IndexFunc(free, func(c call) bool { return matches(s, c) })
			if _, paired := pairs[s.id]; paired || !s.open || i < 0 {
				continue
			}
			pairs[s.id] = free[i]
			free = slices.DeleteFunc(free, func(c call) bool { return c.name == pairs[s.id].name || s.names(c.name) })
		}
	}
	return pairs
}

// names reports whether a step's title names a tool.
func (s step) names(tool string) bool {
	return regexp.MustCompile(`(?:^|[^\w-])` + regexp.QuoteMeta(tool) + `(?:[^\w-]|$)`).MatchString(s.title)
}

// reported reports whether a step was completed or failed in this turn.
func (t turn) reported(s step) bool {
	return slices.ContainsFunc(t.calls, func(c call) bool {
		return (c.name == "complete_step" || c.name == "fail_step") && strings.Contains(c.arguments, `"`+s.id+`"`)
	})
}

// factLines returns the list items of a text with figures, with trouble first. Without items it returns the other
// lines.
func factLines(text string) []string {
	var items, others []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		item, isItem := strings.CutPrefix(line, "- ")
		switch {
		case !hasDigit(line) || stepLine.MatchString(line):
		case isItem:
			items = append(items, item)
		default:
			others = append(others, line)
		}
	}
	if len(items) == 0 {
		return others
	}
	slices.SortStableFunc(items, func(a, b string) int {
		return len(trouble.FindAllString(b, -1)) - len(trouble.FindAllString(a, -1))
	})
	return items
}

func hasDigit(text string) bool { return strings.ContainsAny(text, "0123456789") }
