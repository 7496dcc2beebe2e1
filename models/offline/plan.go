package offline

import (
	"cmp"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

const (
	maxParallel = 4   // read-only calls in one reply
	maxReads    = 10  // in one turn
	maxReports  = 6   // bookkeeping calls in one reply
	maxFacts    = 400 // bytes of a step's result or a remembered fact
)

// reply is either calls or a text.
type reply struct {
	calls []call
	text  string
}

// plan applies the rules of the package comment, in their order.
func plan(t turn) reply {
	answer, matched := t.matchIntent()
	rules := []func() []call{t.orders, t.reads, t.reports}
	if matched {
		rules = []func() []call{func() []call { return answer.calls }}
	}
	for _, rule := range rules {
		calls := slices.DeleteFunc(rule(), func(next call) bool {
			return slices.ContainsFunc(t.calls, func(c call) bool {
				return c.name == next.name && c.arguments == next.arguments
			})
		})
		if len(calls) > 0 {
			return reply{calls: calls}
		}
	}
	if answer.text != "" && !t.wantsJSON() {
		return answer
	}
	return reply{text: t.answer()}
}

// matchIntent answers a known phrase of a person. The lexicon has the patterns. An order takes precedence.
func (t turn) matchIntent() (reply, bool) {
	if t.isTask() || t.message == "" && t.document == "" {
		return reply{}, false
	}
	for _, in := range lexicon.Intents {
		m := in.Pattern.FindStringSubmatch(t.message)
		if m == nil || in.Document && (t.document == "" || t.index(in.Tools) < 0) || len(m) == 1 && t.hasOrder() {
			continue
		}
		if in.Text != "" {
			return reply{text: t.lexiconText(in.Text)}, true
		}
		m = append(m, "", "") // absent groups
		subject := strings.TrimSpace(m[1])
		values := strings.NewReplacer("$key", memoryKey(subject), "$words", strings.Join(keywords(subject), " "),
			"$1", subject, "$2", m[2], "$document", t.document)
		arguments := map[string]any{}
		for parameter, value := range in.Arguments {
			if text, isText := value.(string); isText {
				value = values.Replace(text)
			}
			arguments[parameter] = value
		}
		return t.callFirst(in.Tools, arguments), true
	}
	return reply{}, false
}

// callFirst calls the first offered tool of some names, without invented arguments. If that is impossible, the reply's
// text has the reason.
func (t turn) callFirst(names string, arguments map[string]any) reply {
	for name := range strings.FieldsSeq(names) {
		if i := t.index(name); i >= 0 {
			if c, ok := t.fill(t.tools[i], arguments); ok {
				return reply{calls: []call{c}}
			}
			return reply{text: t.needs(t.tools[i])}
		}
	}
	return reply{text: t.text("not_offered", "$tool", strings.Fields(names)[0])}
}

// index returns the place of a tool among those offered, or -1.
func (t turn) index(name string) int {
	return slices.IndexFunc(t.tools, func(tl tool) bool { return tl.name == name })
}

// memoryKey returns a stable key for a fact: backup_window for "the backup window is 3 to 4".
func memoryKey(fact string) string {
	if m := pattern("fact").FindStringSubmatch(fact); m != nil && len(keywords(m[1])) > 0 {
		fact = m[1]
	}
	return cmp.Or(strings.Join(keywords(fact), "_"), "note")
}

// orders calls the tools ordered by name. It invents no argument for a tool that changes something.
func (t turn) orders() []call {
	var calls []call
	for _, tl := range t.tools {
		if !tl.ordered || t.called(tl.name) || len(calls) == maxParallel {
			continue
		}
		c, known := t.fill(tl, nil)
		if m := pattern("arguments").FindStringSubmatch(tl.order); m != nil {
			if arguments, isObject := decode(m[1]).(map[string]any); isObject {
				c, known = call{name: tl.name, arguments: encode(arguments)}, true
			}
		}
		if known || !tl.changes() {
			calls = append(calls, c)
		}
	}
	return calls
}

func (t turn) hasOrder() bool {
	return slices.ContainsFunc(t.tools, func(tl tool) bool { return tl.ordered })
}

// reads calls the next relevant read-only tools. It makes a call with invented arguments only if no other call is
// possible. Without a relevant tool, it searches for more tools.
func (t turn) reads() []call {
	var relevant []tool
	switch {
	case t.isTask():
		relevant = t.relevant()
	case t.hasOrder():
		return nil
	case !orderPattern(`[a-z][a-z0-9]*_[a-z0-9_]+`).MatchString(t.message): // no order of an unoffered tool
		relevant = t.relevant()
	}
	var known, invented []call
	for _, tl := range relevant {
		c, ok := t.fill(tl, nil)
		switch {
		case t.called(tl.name):
		case ok:
			known = append(known, c)
		default:
			invented = append(invented, c)
		}
	}
	if len(known) == 0 && len(t.calls) == 0 {
		known = invented
	}
	if words := keywords(t.message); len(known)+len(t.calls) == 0 && len(words) > 0 {
		return t.callFirst("skill_search", map[string]any{"query": strings.Join(words, " ")}).calls
	}
	return known[:max(0, min(maxParallel, maxReads-len(t.work()), len(known)))]
}

// relevant returns the read-only tools close to the message, and the closest one of each open step. The closest come
// first.
func (t turn) relevant() []tool {
	reads := slices.DeleteFunc(slices.Clone(t.tools), func(tl tool) bool {
		return listed("bookkeeping", tl.name) || listed("navigation", tl.name) || tl.changes() ||
			pattern("discouraged").MatchString(tl.description)
	})
	if len(reads) == 0 {
		return nil
	}
	rank := func(text string) (scores map[string]int) { // the closest tool comes first
		scores, subject := map[string]int{}, stems(text)
		for _, tl := range reads {
			scores[tl.name] = 3*overlap(subject, stems(tl.name)) + overlap(subject, stems(tl.description))
		}
		slices.SortFunc(reads, func(a, b tool) int {
			return cmp.Or(cmp.Compare(scores[b.name], scores[a.name]), cmp.Compare(a.name, b.name))
		})
		return scores
	}
	wanted := map[string]bool{}
	for _, s := range t.steps {
		if scores := rank(s.title); s.open && scores[reads[0].name] > 0 {
			wanted[reads[0].name] = true
		}
	}
	scores := rank(t.message)
	best := scores[reads[0].name]
	return slices.DeleteFunc(reads, func(tl tool) bool {
		return !wanted[tl.name] && (scores[tl.name] == 0 || scores[tl.name]*4 < best)
	})
}

// changes reports whether a tool probably changes something: its name begins or ends with a verb of change, or its
// description begins with one. "Read-only" in the description takes precedence.
func (tl tool) changes() bool {
	description := strings.ToLower(strings.TrimSpace(tl.description))
	if strings.Contains(description, "read-only") || strings.Contains(description, "read only") {
		return false
	}
	isVerb := pattern("change").MatchString
	first, _, _ := strings.Cut(description, " ")
	parts := strings.FieldsFunc(strings.ToLower(tl.name), func(r rune) bool { return !unicode.IsLetter(r) })
	if isVerb(first) || len(parts) == 0 || listed("read_nouns", parts[len(parts)-1]) {
		return isVerb(first)
	}
	return isVerb(parts[0]) || isVerb(parts[len(parts)-1])
}

// reports returns the bookkeeping: outcomes of steps, a plan where there is none, and facts to remember.
func (t turn) reports() []call {
	var calls []call
	add := func(name string, arguments map[string]any) {
		calls = append(calls, t.callFirst(name, arguments).calls...)
	}
	remember := func(key, fact string) {
		add("remember", map[string]any{"key": key, "category": "observation", "value": textcut.Text(fact, maxFacts)})
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
			add("complete_step", map[string]any{"step_id": s.id, "result": textcut.Text(strings.Join(facts, "; "), maxFacts)})
		}
	}
	if pattern("no_steps").MatchString(t.prompt) && !t.called("add_steps") {
		var titles []any
		for _, tl := range t.relevant() {
			titles = append(titles, "Look at "+strings.ReplaceAll(tl.name, "_", " ")+" with "+tl.name)
		}
		if len(titles) > 0 {
			add("add_steps", map[string]any{"titles": titles[:min(len(titles), maxParallel)]})
		}
	}
	if !t.called("remember") {
		for _, c := range t.work() {
			if facts := c.facts(); !c.failed && hasDigit(facts) && !strings.HasSuffix(facts, nothing) {
				remember(c.name, facts)
			}
		}
		if len(t.work()) == 0 {
			for _, line := range factLines(t.prompt) {
				subject, _, _ := strings.Cut(line, "(")
				remember(memoryKey(subject), line)
			}
		}
	}
	return calls[:min(len(calls), maxReports)]
}

// evidence pairs each open step with a call of its own, as the runtime demands. A call that the step's title names
// comes before a related call, and a successful call before a failed one. A step that sums up accepts any successful
// call.
func (t turn) evidence() map[string]call {
	pairs := map[string]call{}
	free := slices.DeleteFunc(t.work(), func(c call) bool { return pattern("no_evidence").MatchString(c.name) })
	related := func(s step, c call) bool { return overlap(stems(s.title), stems(c.name)) > 0 }
	for _, matches := range []func(s step, c call) bool{
		func(s step, c call) bool { return s.names(c.name) && !c.failed },
		func(s step, c call) bool { return related(s, c) && !c.failed },
		related,
		func(s step, c call) bool { return pattern("sums_up").MatchString(s.title) && !c.failed },
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

// factLines returns a text's list items with figures, those with trouble first. Without such items it returns the
// remaining lines.
func factLines(text string) []string {
	var items, others []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		item, isItem := strings.CutPrefix(line, "- ")
		switch {
		case !hasDigit(line) || pattern("step").MatchString(line):
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
		return len(pattern("trouble").FindAllString(b, -1)) - len(pattern("trouble").FindAllString(a, -1))
	})
	return items
}
