package offline

import (
	"cmp"
	"regexp"
	"slices"
	"strings"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
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
	ordered           bool   // the message orders the tool by name
	order             string // the message from the name on
}

// call is a tool call. An answered call has its result and flags.
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

// parse reads a request. From earlier messages, it uses attachments and the message that "again" repeats.
func parse(req openai.ChatCompletionRequest) turn {
	t := turn{format: req.ResponseFormat}
	last, previous := -1, ""
	for i, m := range req.Messages {
		text := content(m)
		if found := pattern("identity").FindStringSubmatch(text); m.Role == openai.ChatMessageRoleSystem && found != nil {
			t.identity = "I am " + textcut.Text(cmp.Or(found[2], found[1]), maxDescription) + "."
		}
		if m.Role != openai.ChatMessageRoleUser {
			continue
		}
		for _, found := range pattern("attached").FindAllStringSubmatch(text, -1) {
			t.document = found[1]
		}
		if last = i; previous == "" || !pattern("again").MatchString(withoutCourtesy(text)) {
			previous = text
		}
	}
	t.prompt = pattern("preamble").ReplaceAllString(previous, "")
	t.message = withoutCourtesy(strings.TrimSpace(pattern("foreign").ReplaceAllString(t.prompt, "")))
	t.readCalls(req.Messages[last+1:])
	for _, m := range pattern("step").FindAllStringSubmatch(t.prompt, -1) {
		status := pattern("step_status").FindStringSubmatch(m[2])
		title := pattern("step_status").ReplaceAllString(m[2], "")
		t.steps = append(t.steps, step{id: m[1], title: title, open: status == nil || status[1] == ""})
	}
	for _, offered := range req.Tools {
		if f := offered.Function; f != nil && f.Name != "" {
			tl := tool{name: f.Name, description: f.Description}
			tl.schema, _ = f.Parameters.(map[string]any)
			tl.order, tl.ordered = t.orderOf(tl.name)
			t.tools = append(t.tools, tl)
		}
	}
	t.texts = lexicon.Texts["en"]
	if !t.isTask() {
		t.texts = textsFor(t.prompt)
	}
	return t
}

func withoutCourtesy(text string) string { return pattern("polite").ReplaceAllString(text, "") }

// isTask reports whether the runtime wrote the prompt, not a person.
func (t turn) isTask() bool {
	return len(t.steps) > 0 || strings.HasPrefix(t.prompt, "Objective ") || strings.HasPrefix(t.prompt, "Reflect on ")
}

// orderOf finds an order of a tool: "run NAME …", or the name and its arguments. A negated order and a quoted
// sentence order nothing.
func (t turn) orderOf(name string) (order string, ok bool) {
	masked := pattern("quotation").ReplaceAllStringFunc(t.message, func(q string) string {
		if strings.ContainsAny(q, " \t\n\\") {
			return strings.Repeat("-", len(q))
		}
		return q
	})
	at := orderPattern(regexp.QuoteMeta(name)).FindStringSubmatchIndex(masked)
	if at != nil && !pattern("negation").MatchString(masked[:at[0]]) {
		return t.message[at[3]:], true
	}
	order, ok = strings.CutPrefix(t.message, name)
	return order, ok && strings.HasPrefix(strings.TrimLeft(order, " :"), "{")
}

// orderPattern matches an order of a tool. Its group is the name.
func orderPattern(tool string) *regexp.Regexp {
	return regexp.MustCompile(pattern("order").String() + `(` + tool + `)(?:\W|$)`)
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
			c.pending = c.object["approval_id"] != nil
			c.failed = c.pending || pattern("error").MatchString(c.result) || reason != nil && reason != false && reason != ""
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

func (t turn) called(name string) bool {
	return slices.ContainsFunc(t.calls, func(c call) bool { return c.name == name })
}

// work returns the calls other than bookkeeping.
func (t turn) work() []call {
	return slices.DeleteFunc(slices.Clone(t.calls), func(c call) bool { return listed("bookkeeping", c.name) })
}

// decode returns the value of a JSON text, with its numbers unchanged. It returns nil for other texts.
func decode(text string) any {
	v, err := exactjson.Decode([]byte(text))
	if err != nil {
		return nil
	}
	return v
}
