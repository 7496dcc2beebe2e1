package offline

import (
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// isBookkeeping knows the tools that record work instead of doing it, by the names that the runtime gives them.
func isBookkeeping(name string) bool {
	switch name {
	case "complete_step", "fail_step", "add_steps", "note_progress", "remember":
		return true
	}
	return false
}

const (
	maxResult   = 400 // bytes of a step's result or a remembered fact
	maxMemories = 4
	category    = "observation"
)

// bookkeeping is what there is to record, once.
func bookkeeping(s situation) []call {
	var calls []call
	offer := func(name string, values map[string]any) {
		if t, offered := s.tool(name); offered && len(calls) < reports {
			if c, ok := s.fillWith(t, values); ok {
				calls = append(calls, c)
			}
		}
	}
	s.settleSteps(offer)
	if titles := s.plan(); len(titles) > 0 && !s.has("add_steps") {
		offer("add_steps", map[string]any{"titles": titles, "steps": titles})
	}
	if !s.has("remember") {
		for _, m := range s.memories() {
			offer("remember", map[string]any{"key": m.key, "category": category, "value": m.value})
		}
	}
	if text := s.progress(); text != "" && !s.has("note_progress") && !s.has("complete_step") && len(calls) == 0 {
		offer("note_progress", map[string]any{
			"note": text, "text": text, "progress": text, "summary": text, "message": text, "step_id": s.firstOpen(),
		})
	}
	return calls
}

// settleSteps reports the open steps that results speak to: as done with what was found, or as failed.
func (s situation) settleSteps(offer func(string, map[string]any)) {
	shown := s.ledger()
	for _, step := range s.steps {
		if !step.open || s.settled(step.id) {
			continue
		}
		found, failures := s.evidence(step)
		switch {
		case len(found) > 0 && shown.take(step):
			for _, failure := range failures {
				found = append(found, "failed: "+failure)
			}
			offer("complete_step", map[string]any{"step_id": step.id, "result": clip(strings.Join(found, "; "), maxResult)})
		case len(found) > 0: // no call of its own shows it; the answer says so
		case len(failures) > 0:
			reason := clip(strings.Join(failures, "; "), maxResult)
			offer("fail_step", map[string]any{"step_id": step.id, "reason": reason, "result": reason})
		}
	}
}

// settled reports whether something was already said about a step.
func (s situation) settled(id string) bool {
	return s.reported(id, "complete_step") || s.reported(id, "fail_step")
}

func (s situation) reported(id, tool string) bool {
	for _, c := range s.made {
		if c.name == tool && strings.Contains(c.arguments, `"`+id+`"`) {
			return true
		}
	}
	return false
}

var summing = regexp.MustCompile(`(?i)^\s*(report|summari[sz]e|write|describe|conclude|explain|tell|note)\b`)

// evidence is what the results say about a step: those of the tools closest to its title, or all of them for a
// step that sums up, or where the step is the only one open.
func (s situation) evidence(step step) (found, failures []string) {
	title := words(step.title)
	all := summing.MatchString(step.title) || s.openSteps() == 1
	best, named := 0, false
	for _, c := range s.looks() {
		if t, offered := s.tool(c.name); offered {
			best = max(best, t.closeness(title))
			named = named || step.names(c.name)
		}
	}
	for _, c := range s.looks() {
		t, offered := s.tool(c.name)
		speaks := best > 0 && t.closeness(title) >= best
		if named {
			speaks = step.names(c.name)
		}
		switch {
		case !offered || !all && !speaks:
		case c.succeeded():
			found = append(found, c.facts())
		default:
			failures = append(failures, c.failure())
		}
	}
	return found, failures
}

func (s situation) openSteps() int {
	n := 0
	for _, step := range s.steps {
		if step.open {
			n++
		}
	}
	return n
}

func (s situation) firstOpen() any {
	for _, step := range s.steps {
		if step.open {
			return step.id
		}
	}
	return nil
}

var noSteps = regexp.MustCompile(`(?i)\bsteps?:?\s*\(?(?:none|no steps)`)

// plan is the steps for an objective that has none: a look with each relevant tool, and a report where a call can
// show that, too.
func (s situation) plan() []any {
	if !noSteps.MatchString(s.prompt) || len(s.steps) > 0 {
		return nil
	}
	var titles []any
	for _, t := range s.relevant() {
		if len(titles) < atOnce {
			titles = append(titles, "Look at "+strings.ReplaceAll(t.name, "_", " ")+" with "+t.name)
		}
	}
	if t, offered := s.reader(); offered && len(titles) > 0 {
		titles = append(titles, "Report what was found, beside what "+t.name+" has kept")
	}
	return titles
}

// memory is a fact worth keeping under a stable key.
type memory struct{ key, value string }

// memories are the figures found, a memory for each tool; or, where nothing was looked at, those of the prompt.
func (s situation) memories() []memory {
	var kept []memory
	for _, c := range s.looks() {
		facts := c.facts()
		if c.succeeded() && hasDigit(facts) && !strings.HasSuffix(facts, nothing) && len(kept) < maxMemories {
			kept = append(kept, memory{key: c.name, value: clip(facts, maxResult)})
		}
	}
	if len(s.looks()) > 0 {
		return kept
	}
	for _, line := range factLines(s.prompt) {
		if len(kept) < maxMemories {
			kept = append(kept, memory{key: clip(slug(line), 60), value: clip(line, maxResult)})
		}
	}
	return kept
}

// progress is a line on what was done; empty when nothing was.
func (s situation) progress() string {
	var parts []string
	for _, c := range s.looks() {
		if c.succeeded() {
			parts = append(parts, c.facts())
		}
	}
	return clip(strings.Join(parts, "; "), maxResult)
}

// factLines are the lines of a text that have figures in them, listed items if there are any, and of these what
// tells of trouble first.
func factLines(text string) []string {
	var items, others []string
	for line := range strings.Lines(text) {
		trimmed := strings.TrimSpace(line)
		item := strings.TrimLeft(trimmed, "-*• ")
		switch {
		case !hasDigit(item) || stepLine.MatchString(line):
		case item != trimmed:
			items = append(items, item)
		default:
			others = append(others, item)
		}
	}
	if len(items) == 0 {
		items = others
	}
	slices.SortStableFunc(items, func(a, b string) int { return trouble(b) - trouble(a) })
	return items
}

func trouble(line string) int {
	n := 0
	for _, w := range words(line) {
		switch w {
		case "fail", "failur", "failures", "error", "disabl", "slow", "broken", "stall":
			n++
		}
	}
	return n
}

// slug is the beginning of a line up to its first sign, as a key.
func slug(line string) string {
	head := line
	if i := strings.IndexAny(line, ":(=,;"); i > 0 {
		head = line[:i]
	}
	fields := strings.FieldsFunc(strings.ToLower(head), func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) && r != '_' })
	return strings.Join(fields[:min(len(fields), 6)], "_")
}

func hasDigit(text string) bool { return strings.ContainsAny(text, "0123456789") }
