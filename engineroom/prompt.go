package engineroom

import (
	"context"
	"encoding/json"
	"strings"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/prompts"
)

// maxPromptText bounds the characters of all texts of a prompt on the page.
const maxPromptText = 600_000

// promptView is the prompt of a model call: its messages in their order, the tools, and the answer.
type promptView struct {
	prompts.Call

	List   []promptPart // messages
	Tools  *promptPart
	Names  []promptTool
	Answer *promptPart
}

// promptPart is a message of a prompt, or the definitions of the tools.
type promptPart struct {
	Digest, Role, Name, Text  string
	Reasoning                 string
	Calls                     []promptTool // calls in a message of the model
	Images                    int
	Bytes                     int64
	Found, Truncated, TextCut bool
	Shared                    bool // the previous model call has it too
	JSON                      bool // Text is JSON, because it is no message
}

// promptTool is a tool or a call of one, with its definition or arguments as JSON.
type promptTool struct{ Name, About, Text string }

// promptOf reads the prompt of a model call; nil if it was not recorded. All texts of its messages and of the answer
// together have at most maxPromptText characters.
func (room *Room) promptOf(ctx context.Context, id, row, answer string) (*promptView, error) {
	page, err := prompts.Of(ctx, room.Read, id, prompts.Filter{ActivityID: row})
	if err != nil || len(page.Calls) == 0 {
		return nil, err
	}
	p := &promptView{Call: page.Calls[0]}
	remaining := maxPromptText
	read := func(digest string) promptPart {
		part, found := page.Parts[digest]
		shown := promptPart{
			Digest: digest, Role: cut(40, part.Role), Found: found, Bytes: int64(part.Bytes), Truncated: part.Truncated,
		}
		if found {
			shown.fill(part.Body, &remaining)
		}
		return shown
	}
	shared := p.SharedParts
	if p.Call.Tools != nil {
		tools := read(*p.Call.Tools)
		p.Tools, p.Names = &tools, toolsOf(page.Parts[*p.Call.Tools].Body)
		shared--
	}
	for i, digest := range p.Messages {
		part := read(digest)
		part.Shared = i < shared
		p.List = append(p.List, part)
	}
	if answer != "" {
		p.Answer = &promptPart{Role: "assistant", Found: true, Bytes: int64(len(answer))}
		p.Answer.fill(json.RawMessage(answer), &remaining)
	}
	return p, nil
}

// fill splits a message into its fields. Any other value becomes the text. The text has at most as many characters as
// remaining, from which fill subtracts them.
func (part *promptPart) fill(body json.RawMessage, remaining *int) {
	var m models.Message
	whole := ""
	if json.Unmarshal(body, &m) == nil && (m.Role != "" || m.Content != "" || len(m.ToolCalls) > 0) {
		whole, part.Name, part.Reasoning = m.Content, cut(80, m.Name), cut(maxSpanText, m.Reasoning)
		for _, p := range m.Parts {
			if p.Image != nil {
				part.Images++
			} else {
				whole = strings.TrimPrefix(whole+"\n"+p.Text, "\n")
			}
		}
		for _, c := range m.ToolCalls {
			part.Calls = append(part.Calls, promptTool{Name: cut(80, c.Name), Text: cut(maxSpanText, formatJSON(c.Arguments))})
		}
		if m.Refusal != "" {
			whole += "\n" + m.Refusal
		}
	} else {
		whole, part.JSON = formatJSON(string(body)), true
	}
	part.Text = cut(min(*remaining, maxSpanText), whole)
	part.TextCut = part.Text != whole
	*remaining = max(*remaining-utf8.RuneCountInString(part.Text), 0)
}

// toolsOf names the tools of a request.
func toolsOf(body json.RawMessage) (list []promptTool) {
	var tools []struct {
		Name, Description string
		Function          struct{ Name, Description string }
	}
	var each []json.RawMessage
	if json.Unmarshal(body, &tools) != nil || json.Unmarshal(body, &each) != nil {
		return nil
	}
	for i, t := range tools {
		name, about := t.Function.Name, t.Function.Description
		if name == "" {
			name, about = t.Name, t.Description
		}
		if name == "" {
			return nil // no list of tools
		}
		list = append(list, promptTool{
			Name: cut(80, name), About: cut(120, about), Text: cut(4000, formatJSON(string(each[i]))),
		})
	}
	return list
}
