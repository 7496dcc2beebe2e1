package offline

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

const (
	maxParallel = 4  // read-only calls in one reply
	maxReads    = 10 // in one turn
)

const orderVerbs = `(?i)(?:^|\W)(?:call|run|use|execute|invoke|try|ejecuta|ejecutar|corre|usa|usar|llama(?:\s+a)?|llamar(?:\s+a)?|lanza|invoca)` +
	`\s+(?:(?:the|la|el)\s+)?(?:(?:tool|skill|herramienta|habilidad)\s+)?["'` + "`" + `]?`

var (
	anyOrder   = regexp.MustCompile(orderVerbs + `([a-z][a-z0-9]*_[a-z0-9_]+)`)
	negated    = regexp.MustCompile(`(?i)\b(?:not|never|don't|without|no|nunca|sin)\s*$`)
	quoted     = regexp.MustCompile(`"(?:[^"\\]|\\.)*(?:"|$)`)
	jsonObject = regexp.MustCompile(
		"(?i)^[\"'`]?\\s*(?:(?:with|using|con|arguments?|args|argumentos)\\s*)*[:(]?\\s*(?:```(?:json)?)?\\s*(\\{(?s:.*))$")
	discouraged = regexp.MustCompile(`(?i)\bbroken\b|always fails|deprecated|do not (?:use|call)`)
	bookkeeping = regexp.MustCompile(`^(?:complete_step|fail_step|add_steps|remember)$`)
	navigation  = regexp.MustCompile(`^(?:skill_search|read_result)$`) // leads to other tools or to the rest of a result
)

// reply is either calls or a text.
type reply struct {
	calls []call
	text  string
}

// plan applies the rules of the package comment, in their order.
func plan(t turn) reply {
	answer, matched := t.matchIntent()
	rules := []func() []call{func() []call { return answer.calls }, t.orders, t.reads, t.reports}
	if matched {
		rules = rules[:1]
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

// ordered returns the text behind an order of a tool: "run NAME …", or the name and its arguments. A negated order
// and a quoted sentence order nothing.
func (t turn) ordered(name string) (rest string, ok bool) {
	masked := quoted.ReplaceAllStringFunc(t.message, func(q string) string {
		if strings.ContainsAny(q, " \t\n\\") {
			return strings.Repeat("-", len(q))
		}
		return q
	})
	at := regexp.MustCompile(orderVerbs + `(` + regexp.QuoteMeta(name) + `)(?:\W|$)`).FindStringSubmatchIndex(masked)
	if at != nil && !negated.MatchString(masked[:at[0]]) {
		return t.message[at[3]:], true
	}
	rest, ok = strings.CutPrefix(t.message, name)
	return rest, ok && strings.HasPrefix(strings.TrimLeft(rest, " :"), "{")
}

// orders calls the tools ordered by name. It invents no argument for a tool that changes something.
func (t turn) orders() []call {
	var calls []call
	for _, tl := range t.tools {
		rest, ordered := t.ordered(tl.name)
		if !ordered || t.called(tl.name) || len(calls) == maxParallel {
			continue
		}
		c, known := t.fill(tl, nil)
		if m := jsonObject.FindStringSubmatch(rest); m != nil {
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
	return slices.ContainsFunc(t.tools, func(tl tool) bool { _, ordered := t.ordered(tl.name); return ordered })
}

// reads calls the next relevant read-only tools. A call with invented arguments comes only where nothing else does.
// Without a relevant tool, it searches for more tools.
func (t turn) reads() []call {
	if t.hasOrder() && !t.isTask() {
		return nil
	}
	relevant := t.relevant()
	if anyOrder.MatchString(t.message) && !t.isTask() {
		relevant = nil // it orders a tool that was not offered
	}
	var known, invented []call
	for _, tl := range relevant {
		if c, ok := t.fill(tl, nil); t.called(tl.name) {
			continue
		} else if ok {
			known = append(known, c)
		} else {
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

// score rates how well a tool matches some stems. A word of its name counts three times.
func (tl tool) score(subject []string) int {
	return 3*overlap(subject, stems(tl.name)) + overlap(subject, stems(tl.description))
}

// relevant returns the read-only tools close to the message, and the closest one of each open step. The closest come
// first.
func (t turn) relevant() []tool {
	scores, best := map[string]int{}, 0
	reads := slices.DeleteFunc(slices.Clone(t.tools), func(tl tool) bool {
		return bookkeeping.MatchString(tl.name) || navigation.MatchString(tl.name) || tl.changes() ||
			discouraged.MatchString(tl.description)
	})
	rank := func(text string) {
		subject := stems(text)
		slices.SortFunc(reads, func(a, b tool) int {
			return cmp.Or(cmp.Compare(b.score(subject), a.score(subject)), cmp.Compare(a.name, b.name))
		})
		for _, tl := range reads {
			scores[tl.name] = tl.score(subject)
		}
	}
	wanted := map[string]bool{}
	for _, s := range t.steps {
		if rank(s.title); s.open && len(reads) > 0 && scores[reads[0].name] > 0 {
			wanted[reads[0].name] = true
		}
	}
	if rank(t.message); len(reads) > 0 {
		best = scores[reads[0].name]
	}
	return slices.DeleteFunc(reads, func(tl tool) bool {
		return !wanted[tl.name] && (scores[tl.name] == 0 || scores[tl.name]*4 < best)
	})
}

// changes reports whether a tool seems to change something. The sign is a verb of change at the beginning or end of
// its name, or at the beginning of its description. "Read-only" in the description decides against it.
func (tl tool) changes() bool {
	description := strings.ToLower(strings.TrimSpace(tl.description))
	if strings.Contains(description, "read-only") || strings.Contains(description, "read only") {
		return false
	}
	isVerb := func(word string) bool {
		return word != "" && (listed("change_verbs", word) || listed("change_verbs", strings.TrimSuffix(word, "s")) ||
			listed("change_verbs", strings.TrimSuffix(word, "es")))
	}
	first, _, _ := strings.Cut(description, " ")
	parts := strings.FieldsFunc(strings.ToLower(tl.name), func(r rune) bool { return !unicode.IsLetter(r) })
	if isVerb(first) || len(parts) == 0 || listed("read_nouns", parts[len(parts)-1]) {
		return isVerb(first)
	}
	return isVerb(parts[0]) || isVerb(parts[len(parts)-1])
}

// matchIntent answers a known phrase of a person. The lexicon has the patterns. An order takes precedence.
func (t turn) matchIntent() (reply, bool) {
	if t.isTask() || t.message == "" && t.document == "" {
		return reply{}, false
	}
	for _, in := range lexicon.Intents {
		m := in.Pattern.FindStringSubmatch(t.message)
		if m == nil || in.Document && (t.document == "" || !t.offers(in.Tools)) || len(m) == 1 && t.hasOrder() {
			continue
		}
		if in.Text != "" {
			return reply{text: t.fixedText(in.Text)}, true
		}
		m = append(m, "", "") // absent groups
		subject := strings.TrimSpace(m[1])
		values := strings.NewReplacer("$key", memoryKey(subject), "$words", strings.Join(keywords(subject), " "), "$1",
			subject, "$2", m[2], "$document", t.document)
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

// callFirst calls the first offered tool of some, without inventing arguments. If it cannot, the text says why.
func (t turn) callFirst(names string, arguments map[string]any) reply {
	for name := range strings.FieldsSeq(names) {
		if i := slices.IndexFunc(t.tools, func(tl tool) bool { return tl.name == name }); i >= 0 {
			if c, ok := t.fill(t.tools[i], arguments); ok {
				return reply{calls: []call{c}}
			}
			return reply{text: t.needs(t.tools[i])}
		}
	}
	return reply{text: fmt.Sprintf(t.texts["not_offered"], strings.Fields(names)[0])}
}

// memoryKey returns a stable key for a fact: backup_window for "the backup window is 3 to 4".
func memoryKey(fact string) string {
	for _, verb := range []string{" is ", " are ", " es ", " son ", ": ", " = "} {
		if before, _, has := strings.Cut(fact, verb); has && len(keywords(before)) > 0 {
			fact = before
		}
	}
	return cmp.Or(strings.Join(keywords(fact), "_"), "note")
}
