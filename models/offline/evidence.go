package offline

import (
	"regexp"
	"slices"
	"strings"
)

// ledger is which calls can still show that a step is done. The runtime counts a step as done only when a successful call
// shows it that shows no other; this follows its rule, so that nothing is reported that it would refuse.
type ledger struct {
	free []string // names of successful calls that show nothing yet, oldest first
	open []step   // steps that may still take some
}

// ownBooks are the skills whose calls are no work.
var ownBooks = regexp.MustCompile(`^(?:objective_|automation_|skill_|complete_step$|fail_step$|add_steps$|objectives_list$|recent_activity$|read_result$)`)

// ledger follows the reports made so far.
func (s situation) ledger() *ledger {
	l := &ledger{}
	for _, step := range s.steps {
		if step.open {
			l.open = append(l.open, step)
		}
	}
	for _, c := range s.made {
		switch {
		case c.name == "complete_step" && c.succeeded():
			for _, step := range s.steps {
				if step.open && strings.Contains(c.arguments, `"`+step.id+`"`) {
					l.take(step)
				}
			}
		case c.succeeded() && !isBookkeeping(c.name) && !ownBooks.MatchString(c.name):
			l.free = append(l.free, c.name)
		}
	}
	return l
}

// take uses up the calls that show a step: those it names, or else the oldest that no other step names.
func (l *ledger) take(s step) bool {
	others := slices.DeleteFunc(slices.Clone(l.open), func(o step) bool { return o.id == s.id })
	rest := slices.DeleteFunc(slices.Clone(l.free), s.names)
	if len(rest) == len(l.free) {
		i := slices.IndexFunc(l.free, func(name string) bool {
			return !slices.ContainsFunc(others, func(o step) bool { return o.names(name) })
		})
		if i < 0 {
			return false
		}
		rest = slices.Delete(rest, i, i+1)
	}
	l.free, l.open = rest, others
	return true
}

// names reports whether a step's title names a tool, as a word of its own.
func (s step) names(tool string) bool {
	return regexp.MustCompile(`(?:^|[^\w-])` + regexp.QuoteMeta(tool) + `(?:[^\w-]|$)`).MatchString(s.title)
}

// unshown are the open steps that nothing was said about: what was found shows others.
func (s situation) unshown() []step {
	if !s.offered("complete_step") {
		return nil
	}
	var left []step
	for _, step := range s.steps {
		if step.open && !s.settled(step.id) {
			left = append(left, step)
		}
	}
	return left
}

// reader is a tool that reads the agent's memory.
func (s situation) reader() (tool, bool) {
	for _, name := range []string{"recall", "memory_search"} {
		if t, offered := s.tool(name); offered {
			return t, true
		}
	}
	return tool{}, false
}

// proofs looks into the memory for a step that sums up, when all that was found shows the steps before it: a report
// is made beside what is known from earlier.
func proofs(s situation) []call {
	t, offered := s.reader()
	if !offered || s.has(t.name) || !s.offered("complete_step") {
		return nil
	}
	l := s.ledger()
	for _, step := range s.steps {
		if !step.open || s.settled(step.id) {
			continue
		}
		if found, _ := s.evidence(step); len(found) > 0 && !l.take(step) {
			c, known := s.fill(t)
			if known {
				return []call{c}
			}
		}
	}
	return nil
}
