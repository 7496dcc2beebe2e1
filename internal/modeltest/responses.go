package modeltest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
)

// responseRequest has the evaluated members of a Responses request.
type responseRequest struct {
	Model     string            `json:"model"`
	Input     []json.RawMessage `json:"input"`
	Stream    bool              `json:"stream"`
	MaxTokens int               `json:"max_output_tokens"`
	Tools     []struct {
		Name        string          `json:"name"`
		Description string          `json:"description"`
		Parameters  json.RawMessage `json:"parameters"`
	} `json:"tools"`
	Reasoning struct {
		Effort string `json:"effort"`
	} `json:"reasoning"`
}

type inputItem struct {
	Type      string          `json:"type"`
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	CallID    string          `json:"call_id"`
	Name      string          `json:"name"`
	Arguments string          `json:"arguments"`
	Output    string          `json:"output"`
}

// respond answers a Responses request with the script, which sees it as a chat completion.
func (s *Server) respond(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client disconnected
	}
	var in responseRequest
	if err := json.Unmarshal(body, &in); err != nil {
		s.note("undecodable request: " + err.Error())
		s.failure(w, http.StatusBadRequest, "invalid_request_error", "decode request: "+err.Error())
		return
	}
	req := Request{Header: r.Header.Clone(), Body: string(body), Path: r.URL.Path, Query: r.URL.Query()}
	req.ChatCompletionRequest = in.asChat()
	s.reply(w, r, req)
}

func (in responseRequest) asChat() openai.ChatCompletionRequest {
	out := openai.ChatCompletionRequest{
		Model: in.Model, Stream: in.Stream, MaxCompletionTokens: in.MaxTokens, ReasoningEffort: in.Reasoning.Effort,
	}
	for _, t := range in.Tools {
		out.Tools = append(out.Tools, openai.Tool{Type: openai.ToolTypeFunction, Function: &openai.FunctionDefinition{
			Name: t.Name, Description: t.Description, Parameters: t.Parameters,
		}})
	}
	for _, raw := range in.Input {
		var item inputItem
		if json.Unmarshal(raw, &item) != nil {
			continue
		}
		out.Messages = item.appendTo(out.Messages)
	}
	return out
}

// appendTo adds an item to the messages. An assistant's text, thoughts and calls become one message.
func (item inputItem) appendTo(messages []openai.ChatCompletionMessage) []openai.ChatCompletionMessage {
	if item.Type == "function_call_output" {
		return append(messages, openai.ChatCompletionMessage{
			Role: openai.ChatMessageRoleTool, ToolCallID: item.CallID, Content: item.Output,
		})
	}
	if item.Role == "user" || item.Role == "system" || item.Role == "developer" {
		return append(messages, openai.ChatCompletionMessage{Role: item.Role, Content: item.text()})
	}
	last := len(messages) - 1
	if last < 0 || messages[last].Role != openai.ChatMessageRoleAssistant {
		messages = append(messages, openai.ChatCompletionMessage{Role: openai.ChatMessageRoleAssistant})
		last++
	}
	switch item.Type {
	case "function_call":
		messages[last].ToolCalls = append(messages[last].ToolCalls, openai.ToolCall{
			ID: item.CallID, Type: openai.ToolTypeFunction,
			Function: openai.FunctionCall{Name: item.Name, Arguments: item.Arguments},
		})
	case "message":
		messages[last].Content += item.text()
	}
	return messages
}

func (item inputItem) text() string {
	var text string
	if json.Unmarshal(item.Content, &text) == nil {
		return text
	}
	var parts []struct{ Text string }
	if json.Unmarshal(item.Content, &parts) != nil {
		return ""
	}
	var texts []string
	for _, p := range parts {
		texts = append(texts, p.Text)
	}
	return strings.Join(texts, "\n")
}

// Items returns the input items of a Responses request verbatim; nil for a chat completion.
func (r Request) Items() []string {
	var in responseRequest
	if err := json.Unmarshal([]byte(r.Body), &in); err != nil {
		return nil
	}
	items := make([]string, len(in.Input))
	for i, raw := range in.Input {
		items[i] = string(raw)
	}
	return items
}

// responseItems are the items of an answer: first the encrypted reasoning, as from OpenAI's models.
func responseItems(a chatwire.Answer) []string {
	id := strings.TrimPrefix(a.ID, "chatcmpl-")
	items := []string{fmt.Sprintf(
		`{"id": "rs_%s", "type": "reasoning", "summary": [], "encrypted_content": "gAAAA<%s>&", "status": null}`,
		id,
		id,
	)}
	if a.Text != "" {
		phase := "final_answer"
		if len(a.Calls) > 0 {
			phase = "commentary"
		}
		items = append(items, fmt.Sprintf(`{"id": "msg_%s", "type": "message", "role": "assistant", "phase": %q, `+
			`"status": "completed", "content": [{"type": "output_text", "annotations": [], "text": %s}]}`,
			id, phase, jsonText(a.Text)))
	}
	for i, call := range a.Calls {
		items = append(items, fmt.Sprintf(`{"id": "fc_%s_%d", "type": "function_call", "status": "completed", `+
			`"call_id": %q, "name": %s, "arguments": %s}`,
			id, i, call.ID, jsonText(call.Function.Name), jsonText(call.Function.Arguments)))
	}
	return items
}

func jsonText(text string) string {
	encoded, err := json.Marshal(text)
	if err != nil {
		panic("modeltest: encode text: " + err.Error())
	}
	return string(encoded)
}

// writeResponse sends an answer of the Responses API.
func writeResponse(w http.ResponseWriter, a chatwire.Answer, stream bool) error {
	items := responseItems(a)
	status, detail := "completed", "null"
	reasons := map[openai.FinishReason]string{
		openai.FinishReasonLength: "max_output_tokens", openai.FinishReasonContentFilter: "content_filter",
	}
	if reason := reasons[a.Finish]; reason != "" {
		status, detail = "incomplete", fmt.Sprintf(`{"reason": %q}`, reason)
	}
	usage := "null"
	if u := a.Usage; u != nil {
		cached := 0
		if u.PromptTokensDetails != nil {
			cached = u.PromptTokensDetails.CachedTokens
		}
		usage = fmt.Sprintf(`{"input_tokens": %d, "output_tokens": %d, "total_tokens": %d, `+
			`"input_tokens_details": {"cached_tokens": %d, "cache_write_tokens": 0}}`,
			u.PromptTokens, u.CompletionTokens, u.TotalTokens, cached)
	}
	whole := fmt.Sprintf(`{"id": "resp_%s", "object": "response", "status": %q, "model": %q, `+
		`"incomplete_details": %s, "error": null, "output": [%s], "usage": %s}`,
		a.ID, status, a.Model, detail, strings.Join(items, ", "), usage)
	if !stream {
		w.Header().Set("Content-Type", "application/json")
		_, err := io.WriteString(w, whole)
		return err
	}
	return writeEvents(w, a, items, "response."+status, whole)
}

func writeEvents(w http.ResponseWriter, a chatwire.Answer, items []string, last, whole string) error {
	w.Header().Set("Content-Type", "text/event-stream")
	var out strings.Builder
	n := 0
	event := func(kind, members string) {
		fmt.Fprintf(&out, "event: %s\ndata: {\"type\": %q, \"sequence_number\": %d, %s}\n\n", kind, kind, n, members)
		n++
	}
	event(
		"response.created",
		`"response": {"object": "response", "status": "in_progress", "model": `+jsonText(a.Model)+`}`,
	)
	for i, item := range items {
		event("response.output_item.added", fmt.Sprintf(`"output_index": %d, "item": %s`, i, item))
		if strings.Contains(item, `"type": "message"`) {
			for _, piece := range chatwire.Pieces(a.Text) {
				event("response.output_text.delta", fmt.Sprintf(`"output_index": %d, "delta": %s`, i, jsonText(piece)))
			}
		}
		event("response.output_item.done", fmt.Sprintf(`"output_index": %d, "item": %s`, i, item))
	}
	event(last, `"response": `+whole)
	_, err := io.WriteString(w, out.String())
	return err
}
