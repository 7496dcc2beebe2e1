package models

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
)

// Roles of a message.
const (
	RoleSystem    = openai.ChatMessageRoleSystem
	RoleUser      = openai.ChatMessageRoleUser
	RoleAssistant = openai.ChatMessageRoleAssistant
	RoleTool      = openai.ChatMessageRoleTool
)

// FinishReason is why an answer ended, in the terms of chat completions.
type FinishReason = openai.FinishReason

// Finish reasons.
const (
	FinishStop          = openai.FinishReasonStop
	FinishLength        = openai.FinishReasonLength
	FinishToolCalls     = openai.FinishReasonToolCalls
	FinishContentFilter = openai.FinishReasonContentFilter
)

// Message is a message in every protocol. Its JSON is that of chat completions, also for recorded steps, with the
// extra field opaque_secret, which redaction knows.
type Message struct {
	Role       string
	Content    string // text
	Parts      []Part // content after the text, mostly images
	ToolCalls  []ToolCall
	ToolCallID string // id of the call that a [RoleTool] message answers
	Name       string // of the tool, in a [RoleTool] message
	Reasoning  string // the model's reasoning, if its server shows it
	Refusal    string // the model's refusal, instead of Content
	Opaque     *Opaque
}

// Part is a part of a message: text or an image.
type Part struct {
	Text  string
	Image *Image
}

// Image is a picture: an https URL, or a data URL. Detail is low, high, auto or empty.
type Image struct {
	URL    string
	Detail string
}

// ToolCall is a model's call of a tool. The arguments may be invalid JSON.
type ToolCall struct {
	ID        string
	Name      string
	Arguments string
	Opaque    *Opaque
}

// Tool is a function for a model. Its parameters are a JSON Schema.
type Tool struct {
	Name        string
	Description string
	Parameters  any
}

// Opaque holds fields that a provider requires back unchanged, such as signatures and encrypted reasoning. The client
// sends the fields to their origin only, beside the unchanged message. Logs and pages never show them. The JSON texts
// are strings, because jsonb would reorder their members.
type Opaque struct {
	Origin      string            `json:"origin"`                 // base URL and model
	Digest      string            `json:"digest"`                 // of the message
	ReasoningAs string            `json:"reasoning_as,omitempty"` // the field that held the reasoning
	Members     map[string]string `json:"members,omitempty"`      // JSON texts by field name
	Items       []string          `json:"items,omitempty"`        // JSON texts of a response's output items, in order
}

// String hides the content.
func (o *Opaque) String() string {
	if o == nil {
		return "none"
	}
	return "[opaque]"
}

// LogValue hides the content.
func (o *Opaque) LogValue() slog.Value { return slog.StringValue(o.String()) }

// from reports whether an origin sent the fields, with a message of that digest.
func (o *Opaque) from(origin, digest string) bool {
	return o != nil && o.Origin == origin && o.Digest == digest
}

// repaired keeps the fields of a message with repaired calls, because their origin requires them. It drops the items,
// which hold the original calls.
func (o *Opaque) repaired(before, after string) *Opaque {
	if o == nil || before == after || o.Digest != before {
		return o
	}
	kept := *o
	kept.Digest, kept.Items = after, nil
	return &kept
}

// Shown returns the message for rows and logs, without opaque fields and image bytes.
func (m Message) Shown() Message {
	m.Opaque = nil
	m.Parts = shownParts(m.Parts)
	if len(m.ToolCalls) > 0 {
		calls := make([]ToolCall, len(m.ToolCalls))
		for i, c := range m.ToolCalls {
			c.Opaque = nil
			calls[i] = c
		}
		m.ToolCalls = calls
	}
	return m
}

// shownParts replaces images with their sizes.
func shownParts(parts []Part) []Part {
	if !slices.ContainsFunc(parts, isImage) {
		return parts
	}
	shown := slices.Clone(parts)
	for i, p := range shown {
		if kind, data, inside := strings.Cut(p.imageURL(), ","); inside && strings.HasPrefix(kind, "data:") {
			shown[i].Image = &Image{URL: fmt.Sprintf("%s,(%d characters)", kind, len(data)), Detail: p.Image.Detail}
		}
	}
	return shown
}

// imageURL returns an image's URL; "" for a text.
func (p Part) imageURL() string {
	if p.Image == nil {
		return ""
	}
	return p.Image.URL
}

// Shown applies [Message.Shown] to each message.
func Shown(messages []Message) []Message {
	if messages == nil {
		return nil
	}
	shown := make([]Message, len(messages))
	for i, m := range messages {
		shown[i] = m.Shown()
	}
	return shown
}

// LogValue returns the message as shown.
func (m Message) LogValue() slog.Value { return slog.AnyValue(m.Shown()) }

// digest changes with any content that opaque fields depend on.
func (m Message) digest() string {
	texts := []string{m.Role, m.Content, m.Refusal}
	for _, c := range m.ToolCalls {
		texts = append(texts, c.ID, c.Name, c.Arguments)
	}
	return digestOf(texts...)
}

func (c ToolCall) digest() string { return digestOf(c.Name, c.Arguments) }

func digestOf(texts ...string) string {
	hash := sha256.New()
	for _, text := range texts {
		fmt.Fprintf(hash, "%d:%s", len(text), text)
	}
	return hex.EncodeToString(hash.Sum(nil))[:16]
}

// messageJSON is the stored form of a message.
type messageJSON struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content,omitempty"`
	Refusal    string          `json:"refusal,omitempty"`
	Name       string          `json:"name,omitempty"`
	Reasoning  string          `json:"reasoning_content,omitempty"`
	ToolCalls  []ToolCall      `json:"tool_calls,omitempty"`
	ToolCallID string          `json:"tool_call_id,omitempty"`
	Opaque     *Opaque         `json:"opaque_secret,omitempty"`
}

// partJSON is the form of a part in chat completions.
type partJSON struct {
	Type  string     `json:"type"`
	Text  string     `json:"text,omitempty"`
	Image *imageJSON `json:"image_url,omitempty"`
}

type imageJSON struct {
	URL    string `json:"url"`
	Detail string `json:"detail,omitempty"`
}

// MarshalJSON writes the form of chat completions.
func (m Message) MarshalJSON() ([]byte, error) {
	out := messageJSON{
		Role: m.Role, Refusal: m.Refusal, Name: m.Name, Reasoning: m.Reasoning,
		ToolCalls: m.ToolCalls, ToolCallID: m.ToolCallID, Opaque: m.Opaque,
	}
	content, err := m.content()
	if err != nil {
		return nil, err
	}
	out.Content = content
	return exactjson.Encode(out)
}

// content returns the text, or the list of parts; nil for an empty message.
func (m Message) content() (json.RawMessage, error) {
	if len(m.Parts) == 0 {
		if m.Content == "" {
			return nil, nil
		}
		return exactjson.Encode(m.Content)
	}
	parts := make([]partJSON, 0, len(m.Parts)+1)
	if m.Content != "" {
		parts = append(parts, partJSON{Type: "text", Text: m.Content})
	}
	for _, p := range m.Parts {
		if p.Image != nil {
			parts = append(parts, partJSON{Type: "image_url", Image: &imageJSON{p.Image.URL, p.Image.Detail}})
			continue
		}
		parts = append(parts, partJSON{Type: "text", Text: p.Text})
	}
	return exactjson.Encode(parts)
}

// UnmarshalJSON reads the form of chat completions, and the form that earlier versions stored.
func (m *Message) UnmarshalJSON(raw []byte) error {
	var in messageJSON
	if err := json.Unmarshal(raw, &in); err != nil {
		return err
	}
	*m = Message{
		Role: in.Role, Refusal: in.Refusal, Name: in.Name, Reasoning: in.Reasoning,
		ToolCalls: in.ToolCalls, ToolCallID: in.ToolCallID, Opaque: in.Opaque,
	}
	switch {
	case len(in.Content) == 0:
		return nil
	case !bytes.HasPrefix(in.Content, []byte("[")):
		return json.Unmarshal(in.Content, &m.Content)
	}
	var parts []partJSON
	if err := json.Unmarshal(in.Content, &parts); err != nil {
		return err
	}
	for i, p := range parts {
		switch {
		case p.Image != nil:
			m.Parts = append(m.Parts, Part{Image: &Image{p.Image.URL, p.Image.Detail}})
		case i == 0:
			m.Content = p.Text
		default:
			m.Parts = append(m.Parts, Part{Text: p.Text})
		}
	}
	return nil
}

type toolCallJSON struct {
	ID       string       `json:"id,omitempty"`
	Type     string       `json:"type"`
	Function functionCall `json:"function"`
	Opaque   *Opaque      `json:"opaque_secret,omitempty"`
}

type functionCall struct {
	Name      string    `json:"name,omitempty"`
	Arguments arguments `json:"arguments,omitempty"`
}

// MarshalJSON writes the form of chat completions.
func (c ToolCall) MarshalJSON() ([]byte, error) {
	return exactjson.Encode(toolCallJSON{c.ID, "function", functionCall{c.Name, arguments(c.Arguments)}, c.Opaque})
}

// UnmarshalJSON reads the form of chat completions.
func (c *ToolCall) UnmarshalJSON(raw []byte) error {
	var in toolCallJSON
	if err := json.Unmarshal(raw, &in); err != nil {
		return err
	}
	*c = ToolCall{in.ID, in.Function.Name, string(in.Function.Arguments), in.Opaque}
	return nil
}

// noParameters is the schema of a tool without parameters.
const noParameters = `{"type":"object","properties":{}}`

// parameters returns the tool's schema, or the empty one.
func (t Tool) parameters() any {
	if t.Parameters == nil {
		return json.RawMessage(noParameters)
	}
	return t.Parameters
}

// MarshalJSON writes the form of chat completions.
func (t Tool) MarshalJSON() ([]byte, error) {
	t.Parameters = t.parameters()
	type definition struct {
		Name        string `json:"name"`
		Description string `json:"description,omitempty"`
		Parameters  any    `json:"parameters"`
	}
	return exactjson.Encode(struct {
		Type     string     `json:"type"`
		Function definition `json:"function"`
	}{"function", definition(t)})
}

// Text returns all text of the message, including its parts.
func (m Message) Text() string {
	texts := make([]string, 0, len(m.Parts)+1)
	for _, text := range append([]string{m.Content}, partTexts(m.Parts)...) {
		if text != "" {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, "\n")
}

func partTexts(parts []Part) (texts []string) {
	for _, p := range parts {
		texts = append(texts, p.Text)
	}
	return texts
}

// maxToolName bounds a tool's name.
const maxToolName = 64

var notInNames = regexp.MustCompile(`[^a-zA-Z0-9_-]`)

// repairHistory returns a history that servers accept. A model may call an impossible name (multi_tool_use.parallel) or
// send arguments that are no object. The next request quotes that call, so repairHistory repairs it. Servers also
// reject messages without content, above all tool results.
func repairHistory(history []Message) []Message {
	messages := make([]Message, len(history))
	for i, m := range history {
		asReceived := m.digest()
		if m.Content == "" && len(m.Parts) == 0 && len(m.ToolCalls) == 0 {
			m.Content = "(empty)"
		}
		if m.Role == RoleTool && m.Name != "" {
			m.Name = validName(m.Name)
		}
		m.ToolCalls = repairCalls(m.ToolCalls)
		m.Opaque = m.Opaque.repaired(asReceived, m.digest())
		messages[i] = m
	}
	return messages
}

// Sendable returns a reply for the next request: invalid arguments become an empty object, because servers reject
// them. Opaque fields stay.
func (m Message) Sendable() Message {
	asReceived := m.digest()
	m.ToolCalls = slices.Clone(m.ToolCalls)
	for i, c := range m.ToolCalls {
		if !json.Valid([]byte(c.Arguments)) {
			m.ToolCalls[i].Arguments = "{}"
		}
	}
	m.Opaque = m.Opaque.repaired(asReceived, m.digest())
	return m
}

// repairCalls repairs calls and leaves valid ones unchanged.
func repairCalls(made []ToolCall) []ToolCall {
	if len(made) == 0 {
		return nil
	}
	calls := make([]ToolCall, len(made))
	for i, c := range made {
		c.Name = validName(c.Name)
		if !isObject(c.Arguments) {
			c.Arguments = "{}"
		}
		calls[i] = c
	}
	return calls
}

func validName(name string) string {
	name = notInNames.ReplaceAllString(name, "_")
	return name[:min(len(name), maxToolName)]
}

// isObject rejects null, unlike decoding into a map.
func isObject(arguments string) bool {
	var members map[string]json.RawMessage
	return json.Unmarshal([]byte(arguments), &members) == nil && members != nil
}

// opaqueMembers are fields of a chat completion's message that providers require back. The client drops other unknown
// fields, because servers reject them.
var opaqueMembers = []string{
	"reasoning_details", "extra_content", "thinking_blocks", "provider_specific_fields",
	"thought_signature", "signature",
}

// callMembers are the known fields of a tool call. The client sends all other fields back.
var callMembers = []string{"index", "id", "type", "function"}

// reasoningNames are the fields in which servers send reasoning as text.
var reasoningNames = []string{"reasoning_content", "reasoning", "thinking"}

// opaqueFields collects opaque fields from a stream. Its zero value is ready.
type opaqueFields map[string]json.RawMessage

// add merges a piece. A field that arrives once stays unchanged.
func (g *opaqueFields) add(name string, piece json.RawMessage) {
	if isNull(piece) {
		return
	}
	if *g == nil {
		*g = opaqueFields{}
	}
	if have, known := (*g)[name]; known {
		piece = mergeJSON(have, piece)
	}
	(*g)[name] = slices.Clone(piece)
}

// texts returns the fields; nil if there are none.
func (g *opaqueFields) texts() map[string]string {
	if len(*g) == 0 {
		return nil
	}
	texts := make(map[string]string, len(*g))
	for name, raw := range *g {
		texts[name] = string(raw)
	}
	return texts
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// pieces are the fields whose text is streamed in pieces.
var pieces = []string{"text", "summary", "data", "signature", "thinking"}

// mergeJSON merges two pieces of a value: lists by index and type of their entries, objects by member. Otherwise the
// later piece wins.
func mergeJSON(a, b json.RawMessage) json.RawMessage {
	var lists [2][]json.RawMessage
	if json.Unmarshal(a, &lists[0]) == nil && json.Unmarshal(b, &lists[1]) == nil {
		return mergeLists(lists[0], lists[1])
	}
	var objects [2]map[string]json.RawMessage
	if json.Unmarshal(a, &objects[0]) == nil && json.Unmarshal(b, &objects[1]) == nil && objects[0] != nil {
		return mergeObjects(objects[0], objects[1])
	}
	return b
}

func mergeLists(a, b []json.RawMessage) json.RawMessage {
	for _, entry := range b {
		at := slices.IndexFunc(a, func(have json.RawMessage) bool { return continues(have, entry) })
		if at < 0 {
			a = append(a, entry)
			continue
		}
		a[at] = mergeJSON(a[at], entry)
	}
	texts := make([]string, len(a))
	for i, entry := range a {
		texts[i] = string(entry)
	}
	return json.RawMessage(list(texts))
}

// continues reports whether an entry continues another.
func continues(have, entry json.RawMessage) bool {
	type place struct {
		Index *int   `json:"index"`
		Type  string `json:"type"`
	}
	var a, b place
	if json.Unmarshal(have, &a) != nil || json.Unmarshal(entry, &b) != nil {
		return false
	}
	return a.Index != nil && b.Index != nil && *a.Index == *b.Index && a.Type == b.Type
}

func mergeObjects(a, b map[string]json.RawMessage) json.RawMessage {
	for name, value := range b {
		var old, more string
		_, known := a[name]
		switch {
		case isNull(value):
			if !known {
				a[name] = value
			}
		case slices.Contains(pieces, name) && json.Unmarshal(a[name], &old) == nil && json.Unmarshal(value, &more) == nil:
			if encoded, err := exactjson.Encode(old + more); err == nil {
				a[name] = encoded
			}
		case known && bytes.HasPrefix(value, []byte("{")):
			a[name] = mergeJSON(a[name], value)
		default:
			a[name] = value
		}
	}
	var o object
	texts := make(map[string]string, len(a))
	for name, value := range a {
		texts[name] = string(value)
	}
	o.members(texts)
	text, err := o.end()
	if err != nil {
		return nil
	}
	return json.RawMessage(text)
}
