package offline

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	openai "github.com/sashabaranov/go-openai"
)

// answer is what is said when there is nothing left to call, as JSON where the request wants that.
func (s situation) answer() string {
	text, isDigest := s.digest()
	if !isDigest {
		text = s.summary()
	}
	if !s.structured() {
		return text
	}
	schema := map[string]any{}
	if s.format.JSONSchema != nil && s.format.JSONSchema.Schema != nil {
		raw, err := s.format.JSONSchema.Schema.MarshalJSON()
		if err == nil {
			err = json.Unmarshal(raw, &schema)
		}
		if err != nil {
			schema = map[string]any{} // a schema that cannot be read binds nobody
		}
	}
	if len(schema) == 0 {
		return encoded("", map[string]any{"summary": text}).arguments
	}
	f := filler{situation: s, text: text, root: schema}
	return encoded("", f.value("summary", schema, 0)).arguments
}

// structured reports whether the request wants JSON.
func (s situation) structured() bool {
	return s.format != nil && s.format.Type != openai.ChatCompletionResponseFormatTypeText
}

// account is what has become of the calls, in words.
type account struct {
	found, trouble, recorded []string
	waiting                  int
}

func (s situation) account(p phrases) account {
	var a account
	for _, c := range s.made {
		switch {
		case !c.succeeded():
			a.trouble = append(a.trouble, c.trouble(p))
			if c.pending {
				a.waiting++
			}
		case isPlumbing(c.name), s.has("memory_forget") && strings.HasPrefix(c.name, "memory_search"): // only the way there
		case isBookkeeping(c.name):
			a.recorded = append(a.recorded, c.name)
		default:
			a.found = append(a.found, c.line(p))
		}
	}
	return a
}

// summary tells what was found, what did not work and what was recorded. Its first line stands alone.
func (s situation) summary() string {
	p := s.phrases()
	a := s.account(p)
	if len(a.found)+len(a.trouble)+len(a.recorded) == 0 {
		return s.withoutCalls(p)
	}
	var b strings.Builder
	b.WriteString(a.headline(s, p))
	if alone := len(a.found) == 1 && len(a.trouble)+len(a.recorded) == 0; !alone {
		for _, fact := range a.found {
			b.WriteString("\n- " + fact)
		}
	}
	for _, trouble := range a.trouble {
		b.WriteString("\n- " + trouble)
	}
	if len(a.recorded) > 0 && len(a.found) > 0 {
		b.WriteString("\n" + fmt.Sprintf(p.recorded, count(len(a.recorded), p.thing, p.things), tally(a.recorded)))
	}
	for _, step := range s.unshown() {
		b.WriteString("\n- not done: " + clip(step.title, 100) + " (no call of its own shows it)")
	}
	return b.String()
}

// headline is the first line of a summary.
func (a account) headline(s situation, p phrases) string {
	switch {
	case len(a.found) == 1 && len(a.trouble)+len(a.recorded) == 0:
		return strings.TrimRight(a.found[0], ".") + "."
	case len(a.found) > 0:
		return fmt.Sprintf(p.found, count(len(a.found), p.call, p.calls), clip(strings.Join(a.found, "; "), 170))
	case len(a.trouble) > 0 && a.waiting == len(a.trouble):
		return fmt.Sprintf(p.nothingRan, count(a.waiting, p.call, p.calls))
	case len(a.trouble) > 0:
		return fmt.Sprintf(p.nothingFound, count(len(a.trouble), p.call, p.calls))
	}
	return fmt.Sprintf(p.recorded, count(len(a.recorded), p.thing, p.things), clip(s.subject(), 150))
}

// withoutCalls answers from the message alone.
func (s situation) withoutCalls(p phrases) string {
	if t, needs, unmet := s.unmet(); unmet {
		return fmt.Sprintf(p.needs, t.name, strings.Join(needs, ", "))
	}
	if name := s.unknownOrder(); name != "" {
		return fmt.Sprintf(p.noTool, name)
	}
	talks := len(s.tools) > 0 && !s.isTask() && s.said == s.prompt
	if lines := factLines(s.prompt); len(lines) > 0 && !talks {
		return "From what I was given: " + clip(strings.Join(lines[:min(len(lines), 3)], "; "), 400) + "."
	}
	return s.introduction()
}

// subject is the figures of the prompt, or its first line.
func (s situation) subject() string {
	if lines := factLines(s.prompt); len(lines) > 0 {
		return lines[0]
	}
	return firstFigures(s.prompt)
}

// tally names each thing once, with how often it is there.
func tally(names []string) string {
	var parts []string
	times := map[string]int{}
	for _, name := range names {
		times[name]++
	}
	for _, name := range slices.Sorted(maps.Keys(times)) {
		parts = append(parts, fmt.Sprintf("%d × %s", times[name], name))
	}
	return strings.Join(parts, ", ")
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
