package chat

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

// maxReferences bounds the references to earlier answers that a new thread resolves, the latest first. Further
// references become empty, and are not imported.
const maxReferences = 50

// reference is the role of an item that refers to an answer by its id.
const reference = "reference"

// responseRequest is a request to /v1/responses. Its instructions are dropped, as a client's system message is.
type responseRequest struct {
	Model        json.RawMessage `json:"model"`
	Input        responseInput   `json:"input"`
	Stream       *bool           `json:"stream"`
	Background   *bool           `json:"background"`
	Previous     json.RawMessage `json:"previous_response_id"`
	Conversation json.RawMessage `json:"conversation"`
	MaxTokens    *int            `json:"max_output_tokens"`
	Metadata     json.RawMessage `json:"metadata"`
	User         json.RawMessage `json:"user"`

	Tools        json.RawMessage `json:"tools"`
	ToolChoice   json.RawMessage `json:"tool_choice"`
	MaxToolCalls json.RawMessage `json:"max_tool_calls"`
	Prompt       json.RawMessage `json:"prompt"`
	TopLogprobs  json.RawMessage `json:"top_logprobs"`
	Moderation   json.RawMessage `json:"moderation"`
	Include      []string        `json:"include"`
	Text         *responseText   `json:"text"`
}

// responseText has the format of the answer.
type responseText struct {
	Format json.RawMessage `json:"format"`
}

// refuse returns the refusal of the first unsupported parameter.
func (q responseRequest) refuse() error {
	if equalsJSON(q.ToolChoice, `"none"`) {
		q.Tools = nil
	}
	for _, what := range q.Include {
		if strings.HasSuffix(what, "logprobs") {
			return badRequest("include", "unsupported_value", "include: %s", reasonLogprobs)
		}
	}
	return refuse([]rule{
		{"tools", q.Tools, []string{`[]`}, reasonTools},
		{"tool_choice", q.ToolChoice, []string{`"none"`, `"auto"`}, reasonToolChoice},
		{"max_tool_calls", q.MaxToolCalls, nil, "How many tools the agent calls is its own limit."},
		{"prompt", q.Prompt, nil, "Prompt templates are not stored here; the agent has its own instructions."},
		{"top_logprobs", q.TopLogprobs, []string{`0`}, reasonLogprobs},
		{"moderation", q.Moderation, nil, reasonModeration},
	})
}

// responseInput is the input of a request: a text, or a list of items of which the latest are kept.
type responseInput struct{ history }

// UnmarshalJSON reads a text or a list of items.
func (i *responseInput) UnmarshalJSON(raw []byte) error {
	i.history = history{}
	if words, ok := text(raw); ok {
		if words != "" {
			i.latest = []wireMessage{{Role: threads.User, Content: bytes.Clone(raw)}}
		}
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	if open, err := dec.Token(); err != nil || open != json.Delim('[') {
		return badRequest("input", "invalid_type", "The parameter input must be a string or a list of items.")
	}
	for n := 0; dec.More(); n++ {
		m, err := readItem(dec, n)
		if err != nil {
			return err
		}
		i.latest = append(i.latest, m)
		if len(i.latest) == 2*maxReadMessages {
			i.skipped += maxReadMessages
			i.latest = append(i.latest[:0], i.latest[maxReadMessages:]...)
		}
	}
	return nil
}

// readItem reads one item of the input.
func readItem(dec *json.Decoder, n int) (wireMessage, error) {
	var it struct {
		wireMessage
		Type string `json:"type"`
		ID   string `json:"id"`
	}
	if err := dec.Decode(&it); err != nil {
		return wireMessage{}, badRequest(fmt.Sprintf("input[%d]", n), "invalid_type",
			"An item is an object with role and content, or with a type.")
	}
	switch it.Type {
	case "", "message":
		return it.wireMessage, nil
	case "item_reference":
		id, err := json.Marshal(it.ID)
		return wireMessage{Role: reference, Content: id}, err
	case "reasoning": // not part of the conversation
		return wireMessage{Role: "system"}, nil
	}
	return wireMessage{}, badRequest(fmt.Sprintf("input[%d]", n), "unsupported_value",
		"Items of the type %q are not supported: client tools are not called.", truncate(it.Type, 40))
}

// responseMessage converts a request to a message. An error in the request is a *Refusal.
func (c *Chat) responseMessage(r *http.Request, q responseRequest, secret string) (*UserMessage, error) {
	req := &request{Model: q.Model, User: json.RawMessage("null")}
	a, err := c.newMessage(r, req, secret)
	if err != nil {
		return a, err
	}
	if err := q.refuse(); err != nil {
		return a, err
	}
	if q.Text != nil {
		a.formParam = "text.format"
		if a.form, err = formOf(a.formParam, q.Text.Format, false); err != nil {
			return a, err
		}
	}
	echo := &responseEcho{Background: q.Background != nil && *q.Background}
	if a.response = echo; q.MaxTokens != nil {
		if a.MaxTokens = *q.MaxTokens; a.MaxTokens < 1 {
			return a, badRequest("max_output_tokens", "invalid_value", "max_output_tokens must be at least 1.")
		}
	}
	if echo.Metadata, err = metadata(q.Metadata); err != nil {
		return a, err
	}
	if err := c.resolveResponseThread(r.Context(), a, q); err != nil {
		return a, err
	}
	if a.Name != "" && threads.CheckID(a.Name) != nil {
		return a, badRequest("conversation", "invalid_thread_id",
			"A conversation's id is 1 to %d printable characters in Unicode NFC.", threads.MaxID)
	}
	if err := c.dereference(r.Context(), a, q.Input.latest); err != nil {
		return a, err
	}
	if err := c.readMessages(a, q.Input.history); err != nil {
		return a, renameParam(err)
	}
	return a, renameParam(c.checkImages(a))
}

// resolveResponseThread names the thread: the conversation, else that of the previous response, else X-Thread-Id.
func (c *Chat) resolveResponseThread(ctx context.Context, a *UserMessage, q responseRequest) error {
	previous, ok := text(q.Previous)
	if !ok {
		return badRequest("previous_response_id", "invalid_type", "The parameter previous_response_id must be a string.")
	}
	conversation, ok := text(q.Conversation)
	if !ok {
		var named struct {
			ID string `json:"id"`
		}
		if json.Unmarshal(q.Conversation, &named) != nil || named.ID == "" {
			return badRequest("conversation", "invalid_type",
				"The parameter conversation must be an id, or an object with one.")
		}
		conversation = named.ID
	}
	switch {
	case conversation != "" && previous != "":
		return badRequest("previous_response_id", "mutually_exclusive_parameters",
			"Send conversation or previous_response_id, not both: each names the thread.")
	case conversation != "":
		a.Name = conversation
	case previous != "":
		x, in, err := c.find(ctx, a.principal(), "response", previous)
		if _, refused := errors.AsType[*Refusal](err); refused {
			return badRequest("previous_response_id", "previous_response_not_found", "Previous response with id %q not found.",
				truncate(previous, 100))
		}
		if err != nil {
			return err
		}
		a.Name, a.Join, a.requiredLast, a.response.Previous = in.name(), "", x.ID, previous
	}
	return nil
}

// metadata decodes the client's metadata, within OpenAI's limits.
func metadata(raw json.RawMessage) (map[string]string, error) {
	var m map[string]string
	if len(raw) > 0 && json.Unmarshal(raw, &m) != nil || len(m) > 16 {
		return nil, badRequest("metadata", "invalid_type", "metadata is an object of at most 16 texts.")
	}
	for key, value := range m {
		if len(key) > 64 || len(value) > 512 {
			return nil, badRequest("metadata", "invalid_value", "A key of metadata has at most 64 bytes, a value 512.")
		}
		if !postgres.IsText(key + value) {
			return nil, badRequest("metadata", "invalid_value", "metadata has a NUL character.")
		}
	}
	return m, nil
}

// dereference replaces references to the caller's answers by their text, for a thread without a name, which is new. In
// a named thread the references become empty: it has its own history, unless the name is new too.
func (c *Chat) dereference(ctx context.Context, a *UserMessage, items []wireMessage) error {
	remaining := maxReferences
	if a.Name != "" {
		remaining = 0
	}
	for i := len(items) - 1; i >= 0; i-- {
		if items[i].Role != reference {
			continue
		}
		items[i].Role = threads.Assistant
		id, _ := text(items[i].Content)
		items[i].Content = json.RawMessage(`""`)
		if remaining--; remaining < 0 {
			continue
		}
		x, _, err := c.find(ctx, a.principal(), "response", responsePrefix+strings.TrimPrefix(id, itemPrefix))
		if _, refused := errors.AsType[*Refusal](err); refused {
			return badRequest(fmt.Sprintf("input[%d]", i), "item_not_found", "There is no item %q of yours.", truncate(id, 100))
		}
		if err != nil {
			return err
		}
		got, _ := answerOf(x)
		if items[i].Content, err = json.Marshal(got.Text); err != nil {
			return fmt.Errorf("encode answer: %w", err)
		}
	}
	return nil
}

// renameParam replaces messages by input in the parameter of a refusal.
func renameParam(err error) error {
	if r, refused := errors.AsType[*Refusal](err); refused {
		r.Param = cmp.Or(strings.Replace(r.Param, "messages", "input", 1), "input")
		r.Message = strings.Replace(r.Message, "messages must", "input must", 1)
	}
	return err
}
