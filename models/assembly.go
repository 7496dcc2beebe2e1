package models

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// answer is the outcome of one attempt.
type answer struct {
	message Message
	finish  FinishReason
	model   string
	usage   Usage
}

// assembler assembles an answer in one protocol.
type assembler interface {
	add(raw []byte) (text string, err error)  // adds a chunk and returns its text
	flush() string                            // returns the text that was held back
	complete(sawDone bool) bool               // reports whether the server has completed the answer
	empty() bool                              // reports whether the answer has no content
	size() int                                // bytes of content
	overLimit(maxTokens int) bool             // reports whether the answer clearly exceeds its limit
	truncate(reason FinishReason)             // ends the answer here
	setUsagePending(pending bool)             // pending: the server may have had more to send, such as usage
	usageSoFar() (used Usage, pending bool)   // the reported usage
	answer(req Request, origin string) answer // returns the assembled answer
}

// assembly assembles an answer of chat completions. Its zero value is ready.
type assembly struct {
	text      strings.Builder
	reasoning strings.Builder
	refusal   strings.Builder
	calls     callAssembler
	thinker   reasoningSplitter
	thoughtAs string // the field that held the reasoning
	opaque    opaqueFields
	finish    FinishReason
	model     string
	usage     Usage
	pending   bool // the server may have had more to send, such as usage
}

// add handles a chunk and returns its text. The error is an *Error if the server sent one.
func (a *assembly) add(raw []byte) (text string, err error) {
	var c chunk
	if err := json.Unmarshal(raw, &c); err != nil {
		return "", invalidChunk(raw, err)
	}
	if len(c.Error) > 0 && string(c.Error) != "null" {
		return "", streamError(raw)
	}
	a.model = cmp.Or(c.Model, a.model)
	a.count(c.Usage)
	for _, choice := range c.Choices {
		if choice.Index != 0 {
			continue
		}
		if p := cmp.Or(choice.Delta, choice.Message); p != nil {
			text += a.addPart(p)
		}
		a.finish = cmp.Or(choice.Finish, a.finish)
	}
	return text, nil
}

// invalidChunk returns the error of an invalid chunk. A server may send an error as a list.
func invalidChunk(raw []byte, err error) *Error {
	if bytes.HasPrefix(raw, []byte("[")) && bytes.Contains(raw, []byte(`"error"`)) {
		return streamError(raw)
	}
	return &Error{Message: fmt.Sprintf("the answer is not understood: %v", err), Retryable: true, cause: err}
}

// addPart handles a part and returns the text to show.
func (a *assembly) addPart(p *part) string {
	text, thought := a.thinker.add(string(p.Content))
	a.text.WriteString(text)
	a.reasoning.WriteString(thought + p.reasoning)
	a.thoughtAs = cmp.Or(a.thoughtAs, p.reasoningAs)
	for name, piece := range p.opaque {
		a.opaque.add(name, piece)
	}
	a.refusal.WriteString(p.Refusal)
	for _, delta := range p.Calls {
		a.calls.add(delta)
	}
	return text
}

// maxPlausibleTokens is above the limits of known models.
const maxPlausibleTokens = 10_000_000

// plausible reports whether a count is plausible. Servers without counts send -1 or the largest number. Such a count
// would refund a budget, or inflate all later estimates.
func (u wireUsage) plausible() bool {
	return min(u.Prompt, u.Completion, u.Total) >= 0 && max(u.Prompt, u.Completion) <= maxPlausibleTokens &&
		u.Total <= 2*maxPlausibleTokens
}

// count stores the latest usage. Servers that report usage with every chunk report the running sum. Some servers count
// reasoning in the total only, and bill it like the answer.
func (a *assembly) count(u *wireUsage) {
	if u == nil || !u.plausible() || u.Prompt+u.Completion+u.Total == 0 {
		return
	}
	a.usage = Usage{
		PromptTokens: int(u.Prompt), CompletionTokens: int(max(u.Completion, u.Total-u.Prompt)), TotalTokens: int(u.Total),
	}
	if u.Details != nil {
		a.usage.CachedTokens = min(max(int(u.Details.Cached), 0), a.usage.PromptTokens)
		a.usage.CacheWriteTokens = min(max(int(u.Details.CacheWrite), 0), a.usage.PromptTokens-a.usage.CachedTokens)
	}
}

func (a *assembly) complete(sawDone bool) bool { return a.finish != "" || sawDone }

func (a *assembly) flush() string {
	text, thought := a.thinker.end()
	a.text.WriteString(text)
	a.reasoning.WriteString(thought)
	return text
}

func (a *assembly) truncate(reason FinishReason) { a.finish, a.pending = reason, true }

func (a *assembly) setUsagePending(pending bool) { a.pending = pending }

func (a *assembly) usageSoFar() (used Usage, pending bool) { return a.usage, a.pending }

func (a *assembly) empty() bool { return a.text.Len()+a.refusal.Len()+len(a.calls.calls) == 0 }

func (a *assembly) size() int {
	n := a.text.Len() + a.reasoning.Len() + a.refusal.Len()
	for _, call := range a.calls.calls {
		n += len(call.name) + call.arguments.Len()
	}
	return n
}

func (a *assembly) overLimit(maxTokens int) bool { return exceedsLimit(a.size(), a.usage, maxTokens) }

// exceedsLimit reports whether an answer clearly exceeds its limit. A token is about four bytes, and rarely more than
// eight. A server may count a few tokens differently.
func exceedsLimit(size int, u Usage, maxTokens int) bool {
	return maxTokens > 0 && (size > 8*maxTokens+512 || u.CompletionTokens > maxTokens+maxTokens/10+16)
}

// answer returns the assembled answer. It derives missing ids from the request.
func (a *assembly) answer(req Request, origin string) answer {
	finish := a.finish
	called := a.calls.finish(req, origin, finish == FinishLength)
	if len(called) > 0 && finish != FinishLength && finish != FinishContentFilter {
		finish = FinishToolCalls
	}
	m := Message{
		Role: RoleAssistant, Content: a.text.String(), Refusal: a.refusal.String(), Reasoning: a.reasoning.String(),
		ToolCalls: called,
	}
	if members := a.opaque.texts(); members != nil || a.thoughtAs != "" {
		m.Opaque = &Opaque{Origin: origin, Digest: m.digest(), ReasoningAs: a.thoughtAs, Members: members}
	}
	return answer{message: m, finish: cmp.Or(finish, FinishStop), model: a.model, usage: a.usage}
}

// chunk is a part of an answer: a delta of a stream, or the whole message.
type chunk struct {
	Model   string `json:"model"`
	Choices []struct {
		Index   int          `json:"index"`
		Delta   *part        `json:"delta"`
		Message *part        `json:"message"`
		Finish  FinishReason `json:"finish_reason"`
	} `json:"choices"`
	Usage *wireUsage      `json:"usage"`
	Error json.RawMessage `json:"error"`
}

type part struct {
	Content contentText `json:"content"`
	Refusal string      `json:"refusal"`
	Calls   []callDelta `json:"tool_calls"`

	reasoning   string
	reasoningAs string // the field that held it
	opaque      map[string]json.RawMessage
}

func (p *part) UnmarshalJSON(raw []byte) error {
	type plain part
	if err := json.Unmarshal(raw, (*plain)(p)); err != nil {
		return err
	}
	if err := json.Unmarshal(raw, &p.opaque); err != nil {
		return err
	}
	for _, name := range reasoningNames {
		var text contentText
		if json.Unmarshal(p.opaque[name], &text) == nil && text != "" {
			p.reasoning, p.reasoningAs = string(text), name
			break
		}
	}
	maps.DeleteFunc(p.opaque, func(name string, _ json.RawMessage) bool {
		return !slices.Contains(opaqueMembers, name)
	})
	return nil
}

// reasoningNames are the fields in which servers send reasoning as text.
var reasoningNames = []string{"reasoning_content", "reasoning", "thinking"}

type wireUsage struct {
	Prompt     tokenCount    `json:"prompt_tokens"`
	Completion tokenCount    `json:"completion_tokens"`
	Total      tokenCount    `json:"total_tokens"`
	Details    *usageDetails `json:"prompt_tokens_details"`
}

// usageDetails split the prompt's tokens.
type usageDetails struct {
	Cached     tokenCount `json:"cached_tokens"`
	CacheWrite tokenCount `json:"cache_write_tokens"`
}

// tokenCount is a server's count, which may have a point. It is -1 for a value that is no plausible count, so the
// answer does not fail.
type tokenCount int

func (t *tokenCount) UnmarshalJSON(raw []byte) error {
	if string(raw) == "null" {
		return nil
	}
	*t = -1
	if n, err := strconv.ParseFloat(string(raw), 64); err == nil && n >= 0 && n <= 2*maxPlausibleTokens {
		*t = tokenCount(n)
	}
	return nil
}

// contentText is content: a string, a part, or a list of parts whose texts count. The deltas of some items of an answer
// are objects without a text. contentText replaces a NUL like the stored records do, so shown and stored texts agree.
type contentText string

func (w *contentText) UnmarshalJSON(raw []byte) error {
	defer func() { *w = contentText(strings.ReplaceAll(string(*w), "\x00", "\uFFFD")) }()
	if bytes.HasPrefix(raw, []byte("{")) {
		raw = slices.Concat([]byte("["), raw, []byte("]"))
	}
	if !bytes.HasPrefix(raw, []byte("[")) {
		return json.Unmarshal(raw, (*string)(w))
	}
	var parts []struct {
		Text string `json:"text"`
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return err
	}
	for _, p := range parts {
		*w += contentText(p.Text)
	}
	return nil
}
