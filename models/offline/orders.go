package offline

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
)

const orderVerbs = `(?:call|run|use|execute|invoke|try|ejecuta|ejecutar|corre|usa|usar|llama(?:\s+a)?|llamar(?:\s+a)?|lanza|invoca)` +
	`\s+(?:(?:the|la|el)\s+)?(?:(?:tool|skill|herramienta|habilidad)\s+)?["'` + "`" + `]?`

var (
	// forbids matches a text that ends in a denial, before the verb.
	forbids = regexp.MustCompile(`(?i)\b(?:not|never|don't|without|no|nunca|sin)\s*$`)
	denies  = regexp.MustCompile(`(?i)\b(?:not|never|don't|without|no|nunca|sin)\s`)
	// strung matches what is quoted; a quote that is never closed reaches to the end.
	strung  = regexp.MustCompile(`"(?:[^"\\]|\\.)*(?:"|$)`)
	clauses = regexp.MustCompile(`(?i)[.;!?]\s|\n|\s(?:and|then|y|luego|despu[eé]s)\s`)
	anOrder = regexp.MustCompile(`(?i)(?:^|[^\w])` + orderVerbs + `([a-z][a-z0-9]*_[a-z0-9_]+)`)
	joins   = regexp.MustCompile(`(?i)^["'` + "`" + `]?\s*(?:(?:with|using|con|arguments?|args|argumentos)\s*)*[:(]?\s*(?:` + "```" + `(?:json)?)?\s*$`)
)

// order finds where a text orders the tool by its name, or names it right before its arguments; the index behind the name.
func (t tool) order(text string) (end int, ok bool) {
	name := regexp.QuoteMeta(t.name)
	masked := withoutStrings(text)
	at := regexp.MustCompile(`(?i)(?:^|[^\w])` + orderVerbs + `(` + name + `)(?:[^\w]|$)`).FindStringSubmatchIndex(masked)
	if at != nil && !forbids.MatchString(masked[:at[0]]) {
		return at[3], true
	}
	if at := regexp.MustCompile(`^\s*(` + name + `)\s*:?\s*\{`).FindStringSubmatchIndex(text); at != nil {
		return at[3], true
	}
	return 0, false
}

// withoutStrings blanks quoted texts of several words, which may be anybody's. Its length stays.
func withoutStrings(text string) string {
	return strung.ReplaceAllStringFunc(text, func(quoted string) string {
		if !strings.ContainsAny(quoted, " \t\n") && !strings.Contains(quoted, `\`) {
			return quoted
		}
		return strings.Repeat("-", len(quoted))
	})
}

// written are the arguments that a person has written as JSON behind a tool's name.
func written(rest string) (arguments map[string]any, ok bool) {
	open := strings.IndexByte(rest, '{')
	if open < 0 || !joins.MatchString(rest[:open]) {
		return nil, false
	}
	d := json.NewDecoder(bytes.NewReader([]byte(rest[open:])))
	d.UseNumber()
	return arguments, d.Decode(&arguments) == nil
}

// orders are the tools that the person orders by name, whatever they do. One that does more than look is not
// called with invented arguments.
func orders(s situation) []call {
	var calls []call
	for _, t := range s.tools {
		end, ordered := t.order(s.said)
		if !ordered || s.has(t.name) || len(calls) == atOnce {
			continue
		}
		if arguments, given := written(s.said[end:]); given {
			calls = append(calls, encoded(t.name, arguments))
		} else if c, known := s.fill(t); known || !t.changes() {
			calls = append(calls, c)
		}
	}
	if len(calls) == 0 {
		return s.sought()
	}
	return calls
}

// sought looks for an ordered tool that was not offered at once.
func (s situation) sought() []call {
	search, offered := s.tool("skill_search")
	name := s.unknownOrder()
	if !offered || name == "" || s.has(search.name) {
		return nil
	}
	c, ok := s.fillWith(search, map[string]any{"query": strings.ReplaceAll(name, "_", " ")})
	if !ok {
		return nil
	}
	return []call{c}
}

// unknownOrder is the name of a tool that is ordered and not offered; else empty.
func (s situation) unknownOrder() string {
	masked := withoutStrings(s.said)
	for _, at := range anOrder.FindAllStringSubmatchIndex(masked, -1) {
		name := masked[at[2]:at[3]]
		if _, offered := s.tool(name); !offered && !forbids.MatchString(masked[:at[0]]) && !s.isTask() {
			return name
		}
	}
	return ""
}

// unmet are the ordered tools that were not called, because an argument is missing, with what they need.
func (s situation) unmet() (t tool, needs []string, found bool) {
	for _, t := range s.tools {
		if _, ordered := t.order(s.said); ordered && !s.has(t.name) && t.changes() {
			if _, known := s.fill(t); !known {
				return t, required(t.schema), true
			}
		}
	}
	return tool{}, nil, false
}

// withoutOrders leaves out the clauses that order or forbid a tool: they say nothing about what else to look at.
func (s situation) withoutOrders(text string) string {
	parts := clauses.Split(withoutStrings(text), -1)
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool {
		return anOrder.MatchString(part) || slices.ContainsFunc(s.tools, func(t tool) bool {
			_, ordered := t.order(part)
			return ordered || denies.MatchString(part) && strings.Contains(part, t.name)
		})
	}), " . ")
}
