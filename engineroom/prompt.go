package engineroom

import (
	"context"
	"encoding/json"
	"strings"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/prompts"
)

// maxPromptText bounds the characters of all texts of a prompt on the page: contents, reasoning, arguments of calls,
// and definitions of tools. It does not count names and the notes of cut texts.
const maxPromptText = 600_000

// promptView is the prompt of a model call: its messages in their order, the answer, and the tools.
type promptView struct {
	Call     prompts.Call
	Messages []promptPart
	Answer   *promptPart
	Tools    *promptPart  // without Text if ToolList has the definitions
	ToolList []promptTool // empty if the definitions are no list of tools
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

// textBudget is the number of characters that a prompt may still show.
type textBudget int

// cut returns at most limit characters of a text, and at most the rest of the budget. It subtracts them.
func (b *textBudget) cut(limit int, text string) string {
	limit = min(limit, int(*b))
	*b -= textBudget(min(limit, utf8.RuneCountInString(text)))
	return cut(limit, text)
}

// promptOf reads the prompt of a model call; nil if it was not recorded.
func (room *Room) promptOf(ctx context.Context, id string, row *spanRow) (*promptView, error) {
	page, err := prompts.Of(ctx, room.Read, id, prompts.Filter{ActivityID: row.ID})
	if err != nil || len(page.Calls) == 0 {
		return nil, err
	}
	p := &promptView{Call: page.Calls[0]}
	shared := p.Call.SharedParts
	if p.Call.Tools != nil {
		shared--
	}
	budget := textBudget(maxPromptText)
	for i, digest := range p.Call.Messages {
		m := partOf(page, digest)
		m.fill(page.Parts[digest].Body, &budget)
		m.Shared = i < shared
		p.Messages = append(p.Messages, m)
	}
	p.Answer = answerOf(row, &budget)
	if p.Call.Tools != nil {
		tools, body := partOf(page, *p.Call.Tools), page.Parts[*p.Call.Tools].Body
		if p.ToolList = toolsOf(body, &budget); p.ToolList == nil {
			tools.fill(body, &budget)
		}
		p.Tools = &tools
	}
	return p, nil
}

// partOf returns a part without its texts.
func partOf(page prompts.Page, digest string) promptPart {
	part, found := page.Parts[digest]
	return promptPart{
		Digest: digest, Role: cut(40, part.Role), Found: found, Bytes: int64(part.Bytes), Truncated: part.Truncated,
	}
}

// answerOf returns the answer of a model call; nil if there is none. The row has the beginning of a long answer.
func answerOf(row *spanRow, budget *textBudget) *promptPart {
	if row.Output == "" {
		return nil
	}
	answer := &promptPart{Role: "assistant", Found: true, Bytes: row.OutputBytes}
	answer.fill(json.RawMessage(row.Output), budget)
	answer.TextCut = answer.TextCut || row.OutputCut
	return answer
}

// fill splits a message into its fields. Any other value becomes the text.
func (part *promptPart) fill(body json.RawMessage, budget *textBudget) {
	var m models.Message
	whole := ""
	if json.Unmarshal(body, &m) == nil && (m.Role != "" || m.Content != "" || len(m.ToolCalls) > 0) {
		whole, part.Name, part.Reasoning = m.Content, cut(80, m.Name), budget.cut(maxSpanText, m.Reasoning)
		for _, p := range m.Parts {
			if p.Image != nil {
				part.Images++
			} else {
				whole = strings.TrimPrefix(whole+"\n"+p.Text, "\n")
			}
		}
		if m.Refusal != "" {
			whole = strings.TrimPrefix(whole+"\n"+m.Refusal, "\n")
		}
	} else {
		whole, part.JSON = formatJSON(string(body)), true
	}
	part.Text = budget.cut(maxSpanText, whole)
	part.TextCut = part.Text != whole
	for _, c := range m.ToolCalls {
		part.Calls = append(part.Calls, promptTool{
			Name: cut(80, c.Name), Text: budget.cut(maxSpanText, formatJSON(c.Arguments)),
		})
	}
}

// toolsOf lists the tools of a request; nil if the definitions are no list of tools.
func toolsOf(body json.RawMessage, budget *textBudget) (list []promptTool) {
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
			return nil
		}
		list = append(list, promptTool{
			Name: cut(80, name), About: cut(120, about), Text: budget.cut(4000, formatJSON(string(each[i]))),
		})
	}
	return list
}
