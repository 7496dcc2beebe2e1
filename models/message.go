package models

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
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
