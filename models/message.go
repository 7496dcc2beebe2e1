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
)

// Who speaks.
const (
	RoleSystem    = openai.ChatMessageRoleSystem
	RoleUser      = openai.ChatMessageRoleUser
	RoleAssistant = openai.ChatMessageRoleAssistant
	RoleTool      = openai.ChatMessageRoleTool
)

// FinishReason is why an answer ended, in the words of chat completions.
type FinishReason = openai.FinishReason

// Why an answer ended.
const (
	FinishStop          = openai.FinishReasonStop
	FinishLength        = openai.FinishReasonLength
	FinishToolCalls     = openai.FinishReasonToolCalls
	FinishContentFilter = openai.FinishReasonContentFilter
)

// Message is what somebody says: the one type for every protocol. Its JSON is that of chat completions and of the
// steps that earlier versions recorded, with the member opaque_secret besides, whose name redaction knows.
type Message struct {
	Role       string
	Content    string // text
	Parts      []Part // what follows the text, images above all
	ToolCalls  []ToolCall
	ToolCallID string // of the call that a message of [RoleTool] answers
	Name       string // of the tool, in a message of [RoleTool]
	Reasoning  string // what the model thought, as far as its server shows it
	Refusal    string // why the model will not answer, in place of Content
	Opaque     *Opaque
}

// Part is a piece of a message: text, or an image.
type Part struct {
	Text  string
	Image *Image
}

// Image is a picture: a URL of https, or one of data with the picture in it. Detail is low, high, auto or empty.
type Image struct {
	URL    string
	Detail string
}

// ToolCall is a call of a tool as a model makes it. The arguments should be JSON; they need not be.
type ToolCall struct {
	ID        string
	Name      string
	Arguments string
	Opaque    *Opaque
}

// Tool is a function that a model may call. Its parameters are a JSON Schema.
type Tool struct {
	Name        string
	Description string
	Parameters  any
}

// Opaque is what a provider wants back exactly as it came, such as signatures and encrypted reasoning. It goes to
// its origin alone, and only beside the words it came with. People and logs never see it. The JSON texts are kept
// as strings, because PostgreSQL's jsonb would order their members anew.
type Opaque struct {
	Origin      string            `json:"origin"`                 // base URL and model
	Digest      string            `json:"digest"`                 // of what it came with
	ReasoningAs string            `json:"reasoning_as,omitempty"` // the member that the reasoning came in
	Members     map[string]string `json:"members,omitempty"`      // JSON texts by name
	Items       []string          `json:"items,omitempty"`        // JSON texts of a response's output, in order
}

// String hides what it holds.
func (o *Opaque) String() string {
	if o == nil {
		return "none"
	}
	return "[opaque]"
}

// LogValue hides what it holds.
func (o *Opaque) LogValue() slog.Value { return slog.StringValue(o.String()) }

// from reports whether it came from an origin, beside words with that digest.
func (o *Opaque) from(origin, digest string) bool {
	return o != nil && o.Origin == origin && o.Digest == digest
}

// repaired keeps the members that came with a message whose calls were put in order: their origin wants them beside the
// repaired ones, too. Items hold the calls as they came, so they are left out.
func (o *Opaque) repaired(before, after string) *Opaque {
	if o == nil || before == after || o.Digest != before {
		return o
	}
	kept := *o
	kept.Digest, kept.Items = after, nil
	return &kept
}

// Shown is the message as rows and logs have it: without what is opaque, and without the bytes of images.
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

// shownParts says how large an image is, in place of it.
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

// imageURL is that of an image; "" for a text.
func (p Part) imageURL() string {
	if p.Image == nil {
		return ""
	}
	return p.Image.URL
}

// Shown is [Message.Shown] of each.
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

// LogValue is what a log shows of it.
func (m Message) LogValue() slog.Value { return slog.AnyValue(m.Shown()) }

// digest changes when anything is changed that a provider's opaque members belong to.
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

// messageJSON is a message as it is stored.
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

// partJSON is a part of a message as chat completions have it.
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
	return encode(out)
}

// content is text, or the list of parts where there are any; nil when there is nothing.
func (m Message) content() (json.RawMessage, error) {
	if len(m.Parts) == 0 {
		if m.Content == "" {
			return nil, nil
		}
		return encode(m.Content)
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
	return encode(parts)
}

// UnmarshalJSON reads that form, also as earlier versions stored it.
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
	return encode(toolCallJSON{c.ID, "function", functionCall{c.Name, arguments(c.Arguments)}, c.Opaque})
}

// UnmarshalJSON reads that form.
func (c *ToolCall) UnmarshalJSON(raw []byte) error {
	var in toolCallJSON
	if err := json.Unmarshal(raw, &in); err != nil {
		return err
	}
	*c = ToolCall{in.ID, in.Function.Name, string(in.Function.Arguments), in.Opaque}
	return nil
}

// noParameters is the schema of a tool that takes nothing.
const noParameters = `{"type":"object","properties":{}}`

// parameters is the tool's schema, also of one that takes nothing.
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
	return encode(struct {
		Type     string     `json:"type"`
		Function definition `json:"function"`
	}{"function", definition(t)})
}

// encode is json.Marshal without the escapes for HTML, which would change what must stay byte-equal.
func encode(v any) ([]byte, error) {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimRight(out.Bytes(), "\n"), nil
}

// Text is all text of the message, its parts' included.
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

// longestName is how long a tool's name may be.
const longestName = 64

var notInNames = regexp.MustCompile(`[^a-zA-Z0-9_-]`)

// acceptable is a history as servers take it. A model may call a tool by a name that no tool can have
// (multi_tool_use.parallel), or with arguments that are no object; it is told so, but the request that tells it
// carries the call, and would be refused for it. Without content a message is refused,
// above all the answer of a tool.
func acceptable(history []Message) []Message {
	messages := make([]Message, len(history))
	for i, m := range history {
		asReceived := m.digest()
		if m.Content == "" && len(m.Parts) == 0 && len(m.ToolCalls) == 0 {
			m.Content = "(empty)"
		}
		if m.Role == RoleTool && m.Name != "" {
			m.Name = possibleName(m.Name)
		}
		m.ToolCalls = possibleCalls(m.ToolCalls)
		m.Opaque = m.Opaque.repaired(asReceived, m.digest())
		messages[i] = m
	}
	return messages
}

// Sendable is a reply as it goes back to the model with the next request: arguments that are no JSON become an empty
// object, because servers refuse a history that holds them. What came with the reply still goes back beside it.
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

// possibleCalls leaves calls that are in order as they are.
func possibleCalls(made []ToolCall) []ToolCall {
	if len(made) == 0 {
		return nil
	}
	calls := make([]ToolCall, len(made))
	for i, c := range made {
		c.Name = possibleName(c.Name)
		if !isObject(c.Arguments) {
			c.Arguments = "{}"
		}
		calls[i] = c
	}
	return calls
}

func possibleName(name string) string {
	name = notInNames.ReplaceAllString(name, "_")
	return name[:min(len(name), longestName)]
}

// isObject takes null for none, which a Go map does not.
func isObject(arguments string) bool {
	var members map[string]json.RawMessage
	return json.Unmarshal([]byte(arguments), &members) == nil && members != nil
}

// opaqueMembers are the members of a chat completion's message that providers want back and that nobody else
// understands. Others are left out: servers refuse a history with members that they do not know.
var opaqueMembers = []string{
	"reasoning_details", "extra_content", "thinking_blocks", "provider_specific_fields",
	"thought_signature", "signature",
}

// callMembers are the members of a tool call that are understood here. All others go back.
var callMembers = []string{"index", "id", "type", "function"}

// reasoningNames are the members in which servers send what a model thinks, as text.
var reasoningNames = []string{"reasoning_content", "reasoning", "thinking"}

// gathered collects opaque members from the pieces of a stream. Its zero value is ready.
type gathered map[string]json.RawMessage

// add joins a piece to what is there. A member that comes once stays byte for byte as it came.
func (g *gathered) add(name string, piece json.RawMessage) {
	if isNull(piece) {
		return
	}
	if *g == nil {
		*g = gathered{}
	}
	if have, known := (*g)[name]; known {
		piece = joined(have, piece)
	}
	(*g)[name] = slices.Clone(piece)
}

// texts is what was gathered; nil when that is nothing.
func (g *gathered) texts() map[string]string {
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

// pieces are the members whose texts a stream sends in pieces.
var pieces = []string{"text", "summary", "data", "signature", "thinking"}

// joined is two pieces of one value: lists entry by entry where these have the same index and type, objects member
// by member, and of anything else the later.
func joined(a, b json.RawMessage) json.RawMessage {
	var lists [2][]json.RawMessage
	if json.Unmarshal(a, &lists[0]) == nil && json.Unmarshal(b, &lists[1]) == nil {
		return joinedLists(lists[0], lists[1])
	}
	var objects [2]map[string]json.RawMessage
	if json.Unmarshal(a, &objects[0]) == nil && json.Unmarshal(b, &objects[1]) == nil && objects[0] != nil {
		return joinedObjects(objects[0], objects[1])
	}
	return b
}

func joinedLists(a, b []json.RawMessage) json.RawMessage {
	for _, entry := range b {
		at := slices.IndexFunc(a, func(have json.RawMessage) bool { return continues(have, entry) })
		if at < 0 {
			a = append(a, entry)
			continue
		}
		a[at] = joined(a[at], entry)
	}
	texts := make([]string, len(a))
	for i, entry := range a {
		texts[i] = string(entry)
	}
	return json.RawMessage(list(texts))
}

// continues reports whether an entry is a further piece of another.
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

func joinedObjects(a, b map[string]json.RawMessage) json.RawMessage {
	for name, value := range b {
		var old, more string
		_, known := a[name]
		switch {
		case isNull(value):
			if !known {
				a[name] = value
			}
		case slices.Contains(pieces, name) &&
			json.Unmarshal(a[name], &old) == nil && json.Unmarshal(value, &more) == nil:
			if encoded, err := encode(old + more); err == nil {
				a[name] = encoded
			}
		case known && bytes.HasPrefix(value, []byte("{")):
			a[name] = joined(a[name], value)
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
