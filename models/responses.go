package models

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
)

// responsesBody adds the fields of the Responses API. The server stores nothing, so each request has the whole history,
// with the items of earlier answers unchanged.
func (c *Client) responsesBody(o *object, req Request, d dialect) error {
	var input []string
	origin := c.origin(req.Model)
	for _, m := range req.Messages {
		items, err := responseItems(m, origin, d)
		if err != nil {
			return err
		}
		input = append(input, items...)
	}
	o.raw("input", list(input))
	if len(req.Tools) > 0 {
		tools := make([]responseTool, len(req.Tools))
		for i, t := range req.Tools {
			tools[i] = responseTool{Type: "function", Name: t.Name, Description: t.Description, Parameters: t.parameters()}
		}
		o.set("tools", tools)
	}
	if !d.has(noStore) {
		o.set("store", false)
	}
	if !d.has(noInclude) {
		o.set("include", []string{"reasoning.encrypted_content"})
	}
	if req.MaxTokens > 0 {
		o.set("max_output_tokens", req.MaxTokens)
	}
	if req.Effort != "" {
		o.set("reasoning", map[string]string{"effort": req.Effort})
	}
	if req.Schema != nil {
		o.set("text", map[string]any{"format": req.Schema.flatFormat()})
	}
	return nil
}

// responseTool is a function in the Responses API, where strict is the default.
type responseTool struct {
	Type        string `json:"type"`
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	Parameters  any    `json:"parameters"`
	Strict      bool   `json:"strict"`
}

// responseItem is a message without items of its own.
type responseItem struct {
	Type      string         `json:"type"`
	Role      string         `json:"role,omitempty"`
	Content   []responsePart `json:"content,omitempty"`
	CallID    string         `json:"call_id,omitempty"`
	Name      string         `json:"name,omitempty"`
	Arguments string         `json:"arguments,omitempty"`
	Output    string         `json:"output,omitempty"`
}

type responsePart struct {
	Type   string `json:"type"`
	Text   string `json:"text,omitempty"`
	URL    string `json:"image_url,omitempty"`
	Detail string `json:"detail,omitempty"`
}

// responseItems converts a message to items: the original items for their origin, new items for other servers.
func responseItems(m Message, origin string, d dialect) ([]string, error) {
	if m.Opaque.from(origin, m.digest()) && len(m.Opaque.Items) > 0 && !d.has(noOpaque) {
		return m.Opaque.Items, nil
	}
	var items []responseItem
	switch m.Role {
	case RoleTool:
		items = append(items, responseItem{Type: "function_call_output", CallID: m.ToolCallID, Output: m.Text()})
	case RoleAssistant:
		text := m.Text()
		text = cmp.Or(text, m.Refusal)
		if text != "" {
			items = append(items, responseItem{Type: "message", Role: m.Role, Content: []responsePart{
				{Type: "output_text", Text: text},
			}})
		}
	default:
		items = append(items, responseItem{Type: "message", Role: m.Role, Content: inputParts(m)})
	}
	for _, call := range m.ToolCalls {
		items = append(items, responseItem{
			Type: "function_call", CallID: call.ID, Name: call.Name, Arguments: call.Arguments,
		})
	}
	texts := make([]string, len(items))
	for i, item := range items {
		encoded, err := exactjson.Encode(item)
		if err != nil {
			return nil, err
		}
		texts[i] = string(encoded)
	}
	return texts, nil
}

// inputParts converts the content of a user or system message.
func inputParts(m Message) (parts []responsePart) {
	if m.Content != "" {
		parts = append(parts, responsePart{Type: "input_text", Text: m.Content})
	}
	for _, p := range m.Parts {
		if p.Image == nil {
			parts = append(parts, responsePart{Type: "input_text", Text: p.Text})
			continue
		}
		detail := p.Image.Detail
		detail = cmp.Or(detail, "auto")
		parts = append(parts, responsePart{Type: "input_image", URL: p.Image.URL, Detail: detail})
	}
	return parts
}

// response assembles an answer of the Responses API. Its zero value is ready.
type response struct {
	assembly
	items         []outputItem
	textItems     int // items of text started
	argumentBytes int // bytes of arguments received
	over          bool
}

// outputItem is an item of an answer, with its bytes.
type outputItem struct {
	raw       string
	ID        string `json:"id"`
	Type      string `json:"type"`
	CallID    string `json:"call_id"`
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
	Content   []struct {
		Type    string      `json:"type"`
		Text    contentText `json:"text"`
		Refusal contentText `json:"refusal"`
	} `json:"content"`
	Summary []struct {
		Text contentText `json:"text"`
	} `json:"summary"`
}

// event holds the relevant fields of a stream's event.
type event struct {
	Type     string          `json:"type"`
	Delta    contentText     `json:"delta"`
	Item     json.RawMessage `json:"item"`
	Response *responseObject `json:"response"`
}

type responseObject struct {
	Object     string            `json:"object"`
	Status     string            `json:"status"`
	Model      string            `json:"model"`
	Output     []json.RawMessage `json:"output"`
	Error      json.RawMessage   `json:"error"`
	Incomplete *struct {
		Reason string `json:"reason"`
	} `json:"incomplete_details"`
	Usage *struct {
		Input   tokenCount    `json:"input_tokens"`
		Output  tokenCount    `json:"output_tokens"`
		Total   tokenCount    `json:"total_tokens"`
		Details *usageDetails `json:"input_tokens_details"`
	} `json:"usage"`
}

// add handles an event or a whole answer, and returns its text.
func (r *response) add(raw []byte) (text string, err error) {
	var e event
	if err := json.Unmarshal(raw, &e); err != nil {
		return "", invalidChunk(raw, err)
	}
	switch e.Type {
	case "":
		return r.addDocument(raw)
	case "error":
		return "", streamError(unnested(raw))
	case "response.output_item.added":
		return r.startItem(e.Item)
	case "response.output_text.delta":
		r.text.WriteString(string(e.Delta))
		return string(e.Delta), nil
	case "response.refusal.delta":
		r.refusal.WriteString(string(e.Delta))
	case "response.reasoning_summary_text.delta", "response.reasoning_text.delta":
		r.reasoning.WriteString(string(e.Delta))
	case "response.function_call_arguments.delta":
		r.argumentBytes += len(e.Delta)
	case "response.output_item.done":
		return "", r.done(e.Item)
	case "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed":
		if e.Response != nil {
			return "", r.end(*e.Response)
		}
	}
	return "", nil
}

// addDocument handles an answer in one piece.
func (r *response) addDocument(raw []byte) (string, error) {
	var document responseObject
	if err := json.Unmarshal(raw, &document); err != nil {
		return "", invalidChunk(raw, err)
	}
	if document.Status == "" && document.Output == nil {
		return "", streamError(raw)
	}
	document.Status = cmp.Or(document.Status, "completed")
	if err := r.end(document); err != nil {
		return "", err
	}
	text, _, _ := r.parts()
	return text, nil
}

// unnested returns the error of an event, nested or not.
func unnested(raw []byte) []byte {
	var e struct {
		Error json.RawMessage `json:"error"`
	}
	if json.Unmarshal(raw, &e) == nil && !isNull(e.Error) {
		return raw
	}
	var members map[string]json.RawMessage
	if json.Unmarshal(raw, &members) != nil {
		return raw
	}
	delete(members, "type")
	if encoded, err := exactjson.Encode(members); err == nil {
		return encoded
	}
	return raw
}

// startItem returns the separator before the text of a further item.
func (r *response) startItem(item json.RawMessage) (string, error) {
	var begun outputItem
	if err := json.Unmarshal(item, &begun); err != nil {
		begun.Type = "" // an unknown type of item
	}
	if begun.Type != "message" {
		return "", nil
	}
	if r.textItems++; r.textItems > 1 && r.text.Len() > 0 {
		r.text.WriteString(betweenItems)
		return betweenItems, nil
	}
	return "", nil
}

// betweenItems separates the texts of two items.
const betweenItems = "\n\n"

// done adds a complete item.
func (r *response) done(raw json.RawMessage) error {
	item := outputItem{raw: string(raw)}
	if err := json.Unmarshal(raw, &item); err != nil {
		return invalidChunk(raw, err)
	}
	r.items = append(r.items, item)
	return nil
}

// end applies the state of the whole answer.
func (r *response) end(state responseObject) error {
	r.model = cmp.Or(state.Model, r.model)
	if u := state.Usage; u != nil {
		r.count(&wireUsage{Prompt: u.Input, Completion: u.Output, Total: u.Total, Details: u.Details})
	}
	switch state.Status {
	case "completed":
		r.finish = FinishStop
	case "incomplete":
		r.finish = FinishLength
		if state.Incomplete != nil && strings.Contains(state.Incomplete.Reason, "content_filter") {
			r.finish = FinishContentFilter
		}
	case "failed", "cancelled":
		if isNull(state.Error) {
			return &Error{Message: "the server ended the answer as failed without an error", Retryable: true}
		}
		return streamError(fmt.Appendf(nil, `{"error":%s}`, state.Error))
	default:
		return nil
	}
	r.over = true
	if len(r.items) >= len(state.Output) {
		return nil
	}
	r.items = nil
	for _, raw := range state.Output {
		if err := r.done(raw); err != nil {
			return err
		}
	}
	return nil
}

// complete reports whether the server completed the answer. The end marker of chat completions does not count.
func (r *response) complete(bool) bool { return r.over }

func (r *response) empty() bool { return r.assembly.empty() && len(r.items) == 0 }

func (r *response) overLimit(maxTokens int) bool {
	return exceedsLimit(r.size()+r.argumentBytes, r.usage, maxTokens)
}

// parts returns the texts of the items.
func (r *response) parts() (text, refusal, reasoning string) {
	var texts, refusals, thoughts []string
	for _, item := range r.items {
		var one strings.Builder
		for _, part := range item.Content {
			switch item.Type {
			case "reasoning":
				thoughts = append(thoughts, string(part.Text))
			case "message":
				one.WriteString(string(part.Text))
				if part.Refusal != "" {
					refusals = append(refusals, string(part.Refusal))
				}
			}
		}
		for _, part := range item.Summary {
			thoughts = append(thoughts, string(part.Text))
		}
		if one.Len() > 0 {
			texts = append(texts, one.String())
		}
	}
	return strings.Join(texts, betweenItems), strings.Join(refusals, "\n"), strings.Join(thoughts, "\n\n")
}

// answer returns the assembled answer.
func (r *response) answer(req Request, origin string) answer {
	text, refusal, reasoning := r.parts()
	m := Message{
		Role: RoleAssistant, Content: cmp.Or(text, r.text.String()), Refusal: cmp.Or(refusal, r.refusal.String()),
		Reasoning: cmp.Or(reasoning, r.reasoning.String()),
	}
	cut := r.finish == FinishLength || r.finish == FinishContentFilter
	missingID := false // a call lacks an id, so its result could not name the call
	for _, item := range r.items {
		if item.Type != "function_call" {
			continue
		}
		missingID = missingID || item.CallID == ""
		delta := callDelta{ID: cmp.Or(item.CallID, item.ID)}
		delta.Function.Name, delta.Function.Arguments = item.Name, arguments(item.Arguments)
		r.calls.add(delta)
	}
	m.ToolCalls = r.calls.finish(req, origin, r.finish == FinishLength)
	finish := r.finish
	if len(m.ToolCalls) > 0 && !cut {
		finish = FinishToolCalls
	}
	if len(r.items) > 0 && !cut && !missingID { // the client cannot send a truncated item back
		m.Opaque = &Opaque{Origin: origin, Digest: m.digest()}
		for _, item := range r.items {
			m.Opaque.Items = append(m.Opaque.Items, item.raw)
		}
	}
	return answer{message: m, finish: cmp.Or(finish, FinishStop), model: r.model, usage: r.usage}
}
