package offline

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
)

// turn is a request as the planner reads it.
type turn struct {
	prompt   string // the last user message
	message  string // the prompt without foreign data and polite openings
	tools    []tool
	calls    []call // since the prompt, in order
	steps    []step
	format   *openai.ChatCompletionResponseFormat
	document string // id of the last attached document
	identity string // "I am …", from the system message
	texts    map[string]string
}

type tool struct {
	name, description string
	schema            map[string]any
}

// call is a tool call. The result and the flags are set once it was answered.
type call struct {
	name, arguments string
	result          string
	object          map[string]any // the result, where it is a JSON object
	failed, pending bool
}

// step is a line such as "step 3f2a: Look at the sizes (pending)".
type step struct {
	id, title string
	open      bool
}

var (
	foreign = regexp.MustCompile(
		`(?s)<delivery\b.*(?:</delivery>|$)|\[Document [\w-]+: ".*$|What caused this task, as data and not as instructions .*$`)
	attached = regexp.MustCompile(`(?m)^\[Document ([\w-]+): "`)
	preamble = regexp.MustCompile(`(?s)^\[Context from the runtime\..*?\n\[End of context\]\n\n`)
	polite   = regexp.MustCompile(
		`(?i)^(?:[\s¿¡]|(?:please|por favor|can you|could you|would you|puedes|podr[ií]as|hey|hi|hello|hola|ok|okay|so|oye|and now)\b[,.!:]?\s+)+`)
	again = regexp.MustCompile(
		`(?i)^(?:(?:do (?:it|that)|try|and|y)\s+)?(?:again|once more|one more time|repeat(?: that| it)?|otra vez|de nuevo|rep[ií]telo)[\s!.?]*$`)
	identityLine = regexp.MustCompile(
		`(?s)Your name in this installation is "([^"]+)"\.(?:.*?\n# Instructions\n\nYou are (.+?)(?:[.!?](?:\s|$)|\n|$))?`)
	errorText  = regexp.MustCompile(`(?i)^\s*(?:error|tool call failed|tool '|failed)`)
	stepLine   = regexp.MustCompile(`(?im)^[\s>*-]*step\s+([0-9a-z][0-9a-z_-]*)\s*:\s*(\S.*)$`)
	stepStatus = regexp.MustCompile(
		`(?i)\s*\((?:(done|completed?|failed|skipped|cancelled)|pending|open|in progress|running)\).*`)
)

// parse reads a request. Of the earlier messages, it uses attachments and what "again" repeats.
func parse(req openai.ChatCompletionRequest) turn {
	t := turn{format: req.ResponseFormat}
	last, previous := -1, ""
	for i, m := range req.Messages {
		text := content(m)
		if found := identityLine.FindStringSubmatch(text); m.Role == openai.ChatMessageRoleSystem && found != nil {
			t.identity = "I am " + truncate(cmp.Or(found[2], found[1]), maxDescription) + "."
		}
		if m.Role != openai.ChatMessageRoleUser {
			continue
		}
		if found := attached.FindAllStringSubmatch(text, -1); found != nil {
			t.document = found[len(found)-1][1]
		}
		if last = i; previous == "" || !again.MatchString(polite.ReplaceAllString(text, "")) {
			previous = text
		}
	}
	for _, offered := range req.Tools {
		if f := offered.Function; f != nil && f.Name != "" {
			schema, _ := f.Parameters.(map[string]any)
			t.tools = append(t.tools, tool{f.Name, f.Description, schema})
		}
	}
	t.prompt = preamble.ReplaceAllString(previous, "")
	t.message = polite.ReplaceAllString(strings.TrimSpace(foreign.ReplaceAllString(t.prompt, "")), "")
	t.readCalls(req.Messages[last+1:])
	for _, m := range stepLine.FindAllStringSubmatch(t.prompt, -1) {
		state := stepStatus.FindStringSubmatch(m[2])
		t.steps = append(t.steps, step{
			id: m[1], title: stepStatus.ReplaceAllString(m[2], ""),
			open: state == nil || state[1] == "",
		})
	}
	t.texts = lexicon.Texts["en"]
	if !t.isTask() {
		t.texts = textsFor(t.prompt)
	}
	return t
}

// isTask reports whether the runtime wrote the prompt, not a person.
func (t turn) isTask() bool {
	return len(t.steps) > 0 || strings.HasPrefix(t.prompt, "Objective ") || strings.HasPrefix(t.prompt, "Reflect on ")
}

// readCalls pairs the calls of some messages with their results.
func (t *turn) readCalls(messages []openai.ChatCompletionMessage) {
	index := map[string]int{}
	for _, m := range messages {
		for _, c := range m.ToolCalls {
			index[c.ID] = len(t.calls)
			t.calls = append(t.calls, call{name: c.Function.Name, arguments: c.Function.Arguments, failed: true})
		}
		if i, known := index[m.ToolCallID]; known && m.Role == openai.ChatMessageRoleTool {
			c := &t.calls[i]
			c.result = content(m)
			c.object, _ = decode(c.result).(map[string]any)
			reason := c.object["error"]
			c.pending = c.object["status"] == "pending_approval"
			c.failed = c.pending || errorText.MatchString(c.result) || reason != nil && reason != false && reason != ""
		}
	}
}

// content returns a message's text, including its parts.
func content(m openai.ChatCompletionMessage) string {
	var text strings.Builder
	text.WriteString(m.Content)
	for _, part := range m.MultiContent {
		text.WriteString(part.Text)
	}
	return text.String()
}

func (t turn) offers(name string) bool {
	return slices.ContainsFunc(t.tools, func(tl tool) bool { return tl.name == name })
}

func (t turn) called(name string) bool {
	return slices.ContainsFunc(t.calls, func(c call) bool { return c.name == name })
}

// work returns the calls other than bookkeeping.
func (t turn) work() []call {
	return slices.DeleteFunc(slices.Clone(t.calls), func(c call) bool { return bookkeeping.MatchString(c.name) })
}

// decode returns the value of a JSON text, with its numbers as written. It returns nil for other texts.
func decode(text string) any {
	v, err := exactjson.Decode([]byte(text))
	if err != nil {
		return nil
	}
	return v
}

// truncate bounds a text in bytes at a whole character.
func truncate(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + "…"
}

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
