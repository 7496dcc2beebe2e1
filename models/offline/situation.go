package offline

import (
	"cmp"
	"encoding/json"
	"regexp"
	"strings"

	openai "github.com/sashabaranov/go-openai"
)

// situation is what the planner sees of a request.
type situation struct {
	prompt   string // the last user message
	said     string // of it what is no quoted data of others
	asked    string // the same without forms of politeness
	topic    string // what the tools to look with are chosen by
	tools    []tool // in the order offered, those that may be called
	forced   string // a tool that must be called now, or "*" for any
	oneAtime bool
	made     []call // since the prompt, in order
	steps    []step
	format   *openai.ChatCompletionResponseFormat
	document string // the id of the last document that was attached
	identity string // "I am", and the name in the instructions' first sentence or else the agent's name
}

// named matches the agent's name in a system message, and what its instructions say first when they begin with "You are".
var named = regexp.MustCompile(`(?s)Your name in this installation is "([^"]+)"\.(?:.*?\n# Instructions\n\nYou are (.+?)(?:[.!?](?:\s|$)|\n|$))?`)

// tool is something that can be called.
type tool struct {
	name, description string
	schema            map[string]any
}

// call is a tool call; the rest is known once it was answered.
type call struct {
	name, arguments string
	result          string
	cut             string // how much of the result is there, when it is not all
	failed          bool
	pending         bool // it waits for an administrator, and was not made
}

// succeeded reports whether the call did what it is for.
func (c call) succeeded() bool { return !c.failed && !c.pending }

// step is a line such as "step 3f2a: Look at the sizes (pending)".
type step struct {
	id, title string
	open      bool
}

// understand reads a request. Turns before the last user message are history: only "again" and "and …?" refer to them.
func understand(req openai.ChatCompletionRequest) situation {
	s := situation{format: req.ResponseFormat, oneAtime: req.ParallelToolCalls == false}
	last := -1
	for i, m := range req.Messages {
		if m.Role == openai.ChatMessageRoleUser {
			last = i
		}
		if found := named.FindStringSubmatch(content(m)); m.Role == openai.ChatMessageRoleSystem && found != nil {
			s.identity = "I am " + clip(cmp.Or(found[2], found[1]), maxAbout) + "."
		}
	}
	s.made = calls(req.Messages[last+1:])
	if s.forced = choice(req.ToolChoice); s.forced != "none" {
		s.tools = tools(req.Tools)
	}
	if last >= 0 {
		s.hear(withoutContext(content(req.Messages[last])), req.Messages[:last])
	}
	return s
}

// withoutContext is a prompt without what the runtime says before it.
func withoutContext(text string) string {
	if !strings.HasPrefix(text, "[Context from the runtime.") {
		return text
	}
	_, after, found := strings.Cut(text, "\n[End of context]\n\n")
	if !found {
		return text
	}
	return after
}

func tools(offered []openai.Tool) []tool {
	var list []tool
	for _, t := range offered {
		if t.Function != nil && t.Function.Name != "" {
			schema, _ := t.Function.Parameters.(map[string]any)
			list = append(list, tool{t.Function.Name, t.Function.Description, schema})
		}
	}
	return list
}

// choice reads tool_choice: "none", "*" for required, a tool's name, or nothing for auto.
func choice(raw any) string {
	switch c := raw.(type) {
	case string:
		return map[string]string{"none": "none", "required": "*"}[c]
	case map[string]any:
		function, _ := c["function"].(map[string]any)
		name, _ := function["name"].(string)
		return name
	}
	return ""
}

// calls pairs tool calls with their results, and refused ones with what was said about them afterwards.
func calls(messages []openai.ChatCompletionMessage) []call {
	var made []call
	place := map[string]int{}
	for _, m := range messages {
		for _, c := range m.ToolCalls {
			place[c.ID] = len(made)
			made = append(made, call{name: c.Function.Name, arguments: c.Function.Arguments, failed: true})
		}
		if i, known := place[m.ToolCallID]; known && m.Role == openai.ChatMessageRoleTool {
			made[i].take(content(m))
		}
		if m.Role == openai.ChatMessageRoleSystem {
			correct(made, content(m))
		}
	}
	return made
}

var shortened = regexp.MustCompile(`… \((\d+) of (\d+) bytes shown`)

// take reads the answer to a call.
func (c *call) take(result string) {
	c.result, c.failed = result, isFailure(result)
	if m := shortened.FindStringSubmatch(result); m != nil {
		c.cut = m[1] + "/" + m[2]
	}
	object, _ := mustDecode(result).(map[string]any)
	c.pending = object["status"] == "pending_approval"
}

// correct adds to the first refused call that has no reason yet what the runtime says about it.
func correct(made []call, text string) {
	reason, refused := strings.CutPrefix(text, "Tool call failed: INVALID_PARAMS.")
	if _, errors, has := strings.Cut(reason, " Errors: "); refused && has {
		reason = errors
	} else if !strings.HasPrefix(text, "Tool '") {
		return
	}
	for i := range made {
		object, _ := mustDecode(made[i].result).(map[string]any)
		if _, has := object["message"]; made[i].failed && len(object) == 1 && !has {
			object["message"] = strings.TrimSpace(reason)
			made[i].result = encoded("", object).arguments
			return
		}
	}
}

// isFailure reports whether a tool's answer is an error: a JSON object with an error in it, or words that begin so.
func isFailure(result string) bool {
	var object map[string]any
	if err := json.Unmarshal([]byte(result), &object); err == nil {
		switch e := object["error"].(type) {
		case nil:
			return false
		case string:
			return e != ""
		case bool:
			return e
		}
		return true
	}
	start := strings.ToLower(strings.TrimSpace(result))
	for _, sign := range []string{"error", "tool call failed", "tool '", "failed"} {
		if strings.HasPrefix(start, sign) {
			return true
		}
	}
	return false
}

var (
	stepLine   = regexp.MustCompile(`(?im)^[\s>*-]*(\[[ x]\]\s*)?step\s+([0-9a-z][0-9a-z_-]*)\s*(?:\(([^)\n]*)\)|\[([^\]\n]*)\])?\s*:\s*(\S.*)$`)
	stepStatus = regexp.MustCompile(`(?i)[(\[](pending|open|in progress|running|done|completed?|failed|skipped|cancelled)[)\]]`)
)

// steps finds the steps that a prompt lists.
func steps(prompt string) []step {
	var found []step
	for _, m := range stepLine.FindAllStringSubmatch(prompt, -1) {
		status := strings.ToLower(m[3] + m[4])
		title, _, _ := strings.Cut(m[5], " → ")
		if said := stepStatus.FindStringSubmatchIndex(title); said != nil {
			status += strings.ToLower(title[said[2]:said[3]])
			title = title[:said[0]] + title[said[1]:]
		}
		closed := strings.Contains(strings.ToLower(m[1]), "x")
		for _, end := range []string{"done", "complete", "failed", "skipped", "cancelled"} {
			closed = closed || strings.Contains(status, end)
		}
		found = append(found, step{id: m[2], title: strings.TrimSpace(title), open: !closed})
	}
	return found
}

// content is a message's text, of parts too.
func content(m openai.ChatCompletionMessage) string {
	parts := []string{m.Content}
	for _, p := range m.MultiContent {
		parts = append(parts, p.Text)
	}
	return strings.Join(parts, "")
}

// has reports whether a tool was called since the prompt.
func (s situation) has(name string) bool {
	for _, c := range s.made {
		if c.name == name {
			return true
		}
	}
	return false
}

// repeated reports whether exactly this call was made since the prompt.
func (s situation) repeated(next call) bool {
	for _, c := range s.made {
		if c.name == next.name && c.arguments == next.arguments {
			return true
		}
	}
	return false
}

// tool finds an offered tool.
func (s situation) tool(name string) (tool, bool) {
	for _, t := range s.tools {
		if t.name == name {
			return t, true
		}
	}
	return tool{}, false
}

// looks is the calls of tools that are not bookkeeping.
func (s situation) looks() []call {
	var looks []call
	for _, c := range s.made {
		if !isBookkeeping(c.name) {
			looks = append(looks, c)
		}
	}
	return looks
}
