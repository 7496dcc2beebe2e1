package models

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// signatureLeftOut replaces a signature that Gemini demands and that an edit or a change of models lost.
const signatureLeftOut = `{"google":{"thought_signature":"skip_thought_signature_validator"}}`

// chatBody adds the fields of a chat completion.
func (c *Client) chatBody(o *object, req Request, d dialect, known ModelInfo) error {
	messages := make([]string, len(req.Messages))
	for i, m := range req.Messages {
		text, err := chatWriter{c.origin(req.Model), d, known}.message(m)
		if err != nil {
			return err
		}
		messages[i] = text
	}
	o.raw("messages", list(messages))
	if len(req.Tools) > 0 {
		o.set("tools", req.Tools)
	}
	if !d.has(noStream) && !d.has(noUsage) {
		o.set("stream_options", map[string]bool{"include_usage": true})
	}
	if req.MaxTokens > 0 {
		name := "max_tokens" // the name that most servers know
		if d.has(maxCompletionTokens) || known.MaxCompletionTokens {
			name = "max_completion_tokens"
		}
		o.set(name, req.MaxTokens)
	}
	if req.Effort != "" {
		o.set("reasoning_effort", req.Effort)
	}
	if req.Schema != nil {
		o.set("response_format", req.Schema.format())
	}
	return nil
}

// chatWriter encodes messages for one origin.
type chatWriter struct {
	origin string
	d      dialect
	known  ModelInfo
}

// message encodes a message with the fields that its origin requires back.
func (w chatWriter) message(m Message) (string, error) {
	var o object
	o.set("role", m.Role)
	content, err := m.content()
	if err != nil {
		return "", err
	}
	if content != nil {
		o.raw("content", string(content))
	}
	for _, member := range []struct{ name, text string }{
		{"refusal", m.Refusal}, {"name", m.Name}, {"tool_call_id", m.ToolCallID},
	} {
		if member.text != "" {
			o.set(member.name, member.text)
		}
	}
	w.thoughts(&o, m)
	if len(m.ToolCalls) == 0 {
		return o.end()
	}
	calls := make([]string, len(m.ToolCalls))
	for i, call := range m.ToolCalls {
		if calls[i], err = w.call(call, i == 0); err != nil {
			return "", err
		}
	}
	o.raw("tool_calls", list(calls))
	return o.end()
}

// thoughts adds the reasoning, under its original name, and the opaque fields.
func (w chatWriter) thoughts(o *object, m Message) {
	own := m.Opaque.from(w.origin, m.digest())
	if own && !w.d.has(noOpaque) {
		o.members(m.Opaque.Members)
	}
	if w.d.has(noReasoning) || m.Role != RoleAssistant {
		return
	}
	if own && m.Opaque.ReasoningAs != "" {
		o.set(m.Opaque.ReasoningAs, m.Reasoning)
	}
	wanted := w.known.ReasoningField
	if w.d.has(needsReasoning) {
		wanted = "reasoning_content"
	}
	if wanted == "" || len(m.ToolCalls) == 0 {
		return
	}
	if _, there := o.texts[wanted]; !there {
		o.set(wanted, m.Reasoning) // even if empty
	}
}

// call encodes a call with the fields that its origin requires back.
func (w chatWriter) call(call ToolCall, first bool) (string, error) {
	var o object
	o.set("id", call.ID)
	o.set("type", "function")
	o.set("function", functionCall{call.Name, arguments(call.Arguments)})
	switch {
	case w.d.has(noOpaque):
	case call.Opaque.from(w.origin, call.digest()):
		o.members(call.Opaque.Members)
	case first && w.known.RequiresCallSignature:
		o.raw("extra_content", signatureLeftOut)
	}
	return o.end()
}

// origin identifies the owner of a provider's opaque fields.
func (c *Client) origin(model string) string { return c.config.BaseURL + " " + model }

// fragment is a tool call or a part of one.
type fragment struct {
	Index    *int   `json:"index"`
	ID       string `json:"id"`
	Function struct {
		Name      string    `json:"name"`
		Arguments arguments `json:"arguments"`
	} `json:"function"`

	opaque map[string]json.RawMessage
}

func (f *fragment) UnmarshalJSON(raw []byte) error {
	type plain fragment
	if err := json.Unmarshal(raw, (*plain)(f)); err != nil {
		return err
	}
	if err := json.Unmarshal(raw, &f.opaque); err != nil {
		return err
	}
	maps.DeleteFunc(f.opaque, func(name string, _ json.RawMessage) bool { return slices.Contains(callMembers, name) })
	return nil
}

// arguments are a text that should be JSON. Some servers send the JSON itself.
type arguments string

func (a *arguments) UnmarshalJSON(raw []byte) error {
	if bytes.HasPrefix(raw, []byte(`"`)) || string(raw) == "null" {
		return json.Unmarshal(raw, (*string)(a))
	}
	*a = arguments(raw)
	return nil
}

// calls assembles tool calls from fragments. Its zero value is ready.
type calls struct {
	list []*collected
}

type collected struct {
	index     int // -1 if the server sends none
	id, name  string
	arguments strings.Builder
	opaque    opaqueFields
}

// add continues the call of a fragment, or starts one.
func (c *calls) add(f fragment) {
	call := c.continued(f)
	if call == nil {
		call = &collected{index: -1, id: f.ID, name: f.Function.Name}
		if f.Index != nil {
			call.index = *f.Index
		}
		c.list = append(c.list, call)
	} else if call.name == "" {
		call.name = f.Function.Name
	}
	call.id = cmp.Or(call.id, f.ID)
	call.arguments.WriteString(string(f.Function.Arguments))
	for name, piece := range f.opaque {
		call.opaque.add(name, piece)
	}
}

// continued returns the call that f continues; nil if f starts a call. The index decides; without an index, the id
// decides. Without both, a name starts a call, and any other fragment belongs to the last call.
func (c *calls) continued(f fragment) *collected {
	for _, call := range slices.Backward(c.list) {
		switch {
		case f.Index != nil && call.index == *f.Index:
			if call.another(f) {
				return nil
			}
			return call
		case f.Index == nil && f.ID != "" && call.id == f.ID:
			return call
		}
	}
	if f.Index == nil && f.Function.Name == "" && len(c.list) > 0 {
		return c.list[len(c.list)-1]
	}
	return nil
}

// another reports whether f starts a new call under the same index. Servers that send whole calls may give each the
// index 0. Others repeat the name in every fragment.
func (call *collected) another(f fragment) bool {
	if f.Function.Name == "" || call.name == "" {
		return false
	}
	if f.ID != "" {
		return f.ID != call.id
	}
	return f.Function.Name != call.name || json.Valid([]byte(call.arguments.String()))
}

// finished returns the calls by index, or in their order without an index. Every call has a unique id. A hash of the
// request and the position replaces a missing or repeated id, so equal answers have equal ids. finished drops a call
// without arguments from a truncated answer, because the cut lost them.
func (c *calls) finished(req Request, origin string, cut bool) []ToolCall {
	var out []ToolCall
	seen := map[string]bool{}
	slices.SortStableFunc(c.list, func(a, b *collected) int { return cmp.Compare(a.index, b.index) })
	for place, call := range c.list {
		if call.arguments.Len() == 0 && (cut || call.name == "") {
			continue
		}
		if call.id == "" || seen[call.id] {
			call.id = derivedID(req, place, call.name)
		}
		seen[call.id] = true
		toolCall := ToolCall{
			ID:        call.id,
			Name:      cmp.Or(call.name, "unnamed"), // no tool has this name; servers reject an empty name in a history
			Arguments: cmp.Or(call.arguments.String(), "{}"),
		}
		if members := call.opaque.texts(); members != nil {
			toolCall.Opaque = &Opaque{Origin: origin, Digest: toolCall.digest(), Members: members}
		}
		out = append(out, toolCall)
	}
	return out
}

// derivedID has the form of a server's id.
func derivedID(req Request, place int, name string) string {
	hash := sha256.New()
	for _, v := range []any{req.Model, req.Messages, req.IdempotencyKey, place, name} {
		encoded, err := json.Marshal(v)
		if err != nil {
			encoded = fmt.Appendf(nil, "%v", v) // a message that does not encode was never sent
		}
		hash.Write(append(encoded, '\n'))
	}
	return "call_" + hex.EncodeToString(hash.Sum(nil))[:24]
}

// imageLeftOut replaces an image that the model does not accept.
const imageLeftOut = "[An image was left out here: this model takes text alone.]"

// adaptHistory returns the history in a form that the model accepts.
func adaptHistory(messages []Message, d dialect, known ModelInfo) []Message {
	if d.has(noImages) || known.NoImages {
		messages = withoutImages(messages)
	}
	if d.has(singleSystemMessage) || known.SingleSystemMessage {
		messages = foldSystem(messages)
	}
	return messages
}

// adaptRequest returns a request in a form that the server accepts.
func adaptRequest(req Request, d dialect) Request {
	known := LookupModel(req.Model)
	req.Messages = adaptHistory(withForm(req, d, known), d, known)
	if req.Schema != nil && asInstruction(req.Schema, d, known) {
		req.Schema = nil
	}
	if d.has(noTemperature) || known.NoTemperature {
		req.Temperature = nil
	}
	if d.has(noEffort) {
		req.Effort = ""
	}
	return req
}

// foldSystem returns a history with one system message, at the front. It appends a later system text to the preceding
// tool result, or to a user message.
func foldSystem(messages []Message) []Message {
	var out []Message
	for _, m := range messages {
		last := len(out) - 1
		switch {
		case last >= 0 && m.Role == RoleSystem && out[last].Role != RoleAssistant:
			out[last] = appendContent(out[last], m)
		case last >= 0 && m.Role == RoleSystem:
			m.Role = RoleUser
			out = append(out, m)
		case last >= 0 && m.Role == RoleUser && out[last].Role == RoleUser:
			out[last] = appendContent(out[last], m)
		default:
			out = append(out, m)
		}
	}
	return out
}

// appendContent returns m with the content of another message appended.
func appendContent(m, next Message) Message {
	if len(m.Parts) == 0 {
		m.Content = strings.Join(slices.DeleteFunc([]string{m.Content, next.Content}, isBlank), "\n\n")
		m.Parts = next.Parts
		return m
	}
	m.Parts = slices.Clip(m.Parts)
	if next.Content != "" {
		m.Parts = append(m.Parts, Part{Text: next.Content})
	}
	m.Parts = append(m.Parts, next.Parts...)
	return m
}

func isBlank(text string) bool { return text == "" }

// needsFolding reports whether folding changes the history.
func needsFolding(messages []Message) bool {
	for i, m := range messages {
		if i > 0 && m.Role == RoleSystem {
			return true
		}
	}
	return false
}

// withoutImages replaces images with words.
func withoutImages(messages []Message) []Message {
	out := slices.Clone(messages)
	for i, m := range out {
		if !slices.ContainsFunc(m.Parts, isImage) {
			continue
		}
		texts := []string{m.Content}
		for _, p := range m.Parts {
			if isImage(p) {
				p.Text = imageLeftOut
			}
			texts = append(texts, p.Text)
		}
		out[i].Content, out[i].Parts = strings.Join(slices.DeleteFunc(texts, isBlank), "\n"), nil
	}
	return out
}

func isImage(p Part) bool { return p.Image != nil }

func (r Request) hasImages() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool { return slices.ContainsFunc(m.Parts, isImage) })
}

// hasCalls reports whether the history has calls.
func (r Request) hasCalls() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool { return len(m.ToolCalls) > 0 })
}

// hasReasoning reports whether the history has reasoning.
func (r Request) hasReasoning() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool { return m.Reasoning != "" })
}

// hasOpaque reports whether the history has opaque fields.
func (r Request) hasOpaque() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool {
		return m.Opaque != nil || slices.ContainsFunc(m.ToolCalls, func(c ToolCall) bool { return c.Opaque != nil })
	})
}

const (
	thinkBegins = "<think>"
	thinkEnds   = "</think>"
)

// reasoningSplitter separates reasoning from text, for servers that send both as text: a leading block
// <think>…</think> is reasoning. Chunks may split tags. Its zero value is ready.
type reasoningSplitter struct {
	state thinkState
	held  string // a possible beginning of a tag, or blanks before it
}

type thinkState int

const (
	thinkOpen thinkState = iota // only blanks so far
	thinkInside
	thinkBehind // after the block, before the text
	thinkDone
)

// add splits a piece of text.
func (t *reasoningSplitter) add(piece string) (text, thought string) {
	if t.state == thinkDone {
		return piece, ""
	}
	t.held += piece
	if t.state == thinkOpen {
		trimmed := strings.TrimLeft(t.held, " \t\r\n")
		switch {
		case strings.HasPrefix(trimmed, thinkBegins):
			t.state, t.held = thinkInside, strings.TrimPrefix(trimmed, thinkBegins)
		case strings.HasPrefix(thinkBegins, trimmed):
			return "", "" // the rest may follow
		default:
			t.state = thinkDone
			return t.rest(), ""
		}
	}
	if t.state == thinkInside {
		before, after, ended := strings.Cut(t.held, thinkEnds)
		if !ended {
			keep := partialEnd(t.held)
			thought, t.held = t.held[:len(t.held)-keep], t.held[len(t.held)-keep:]
			return "", thought
		}
		t.state, t.held, thought = thinkBehind, after, before
	}
	t.held = strings.TrimLeft(t.held, " \t\r\n")
	if t.held == "" {
		return "", thought
	}
	t.state = thinkDone
	return t.rest(), thought
}

// end flushes the held text.
func (t *reasoningSplitter) end() (text, thought string) {
	if t.state == thinkInside {
		return "", t.rest()
	}
	return t.rest(), ""
}

func (t *reasoningSplitter) rest() string {
	held := t.held
	t.held = ""
	return held
}

// partialEnd returns how many final bytes of a text may begin the end tag.
func partialEnd(text string) int {
	for n := min(len(text), len(thinkEnds)-1); n > 0; n-- {
		if strings.HasSuffix(text, thinkEnds[:n]) {
			return n
		}
	}
	return 0
}
