package models

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
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
