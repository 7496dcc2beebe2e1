// Package chatwire writes the server's half of the OpenAI chat completions protocol.
//
// The agent's chat and the scripted models of tests use this package. It meets the demands of strict clients:
//
//   - every chunk but an error carries id, object, created and model;
//   - the first delta has the role and an empty content, later ones have no role;
//   - the last delta is empty and has the finish reason;
//   - usage comes in a separate chunk without choices, only on request;
//   - the stream ends with [DONE], except after an error, which itself ends the stream;
//   - each chunk is flushed, and a header stops proxies from buffering.
//
// One goroutine uses a [Stream]. After the first failed write it writes nothing more; [Stream.Err] returns that error,
// so a caller checks once, at the end.
package chatwire

import (
	"encoding/json"
	"fmt"
	"net/http"

	openai "github.com/sashabaranov/go-openai"
)

// Answer is one whole reply of a model.
type Answer struct {
	ID      string
	Model   string
	Created int64 // unix seconds
	Text    string
	Calls   []openai.ToolCall
	Finish  openai.FinishReason
	Usage   *openai.Usage // nil if unknown
}

// WriteStream sends the answer chunk by chunk; withUsage adds the usage chunk if the answer has one.
// The error is that of the connection.
func WriteStream(w http.ResponseWriter, a Answer, withUsage bool) error {
	s := Open(w, a.ID, a.Model, a.Created)
	s.Role()
	for _, piece := range Pieces(a.Text) {
		s.Text(piece)
	}
	for i, call := range a.Calls {
		s.Call(i, call)
	}
	s.Finish(a.Finish)
	if withUsage && a.Usage != nil {
		s.Usage(*a.Usage)
	}
	s.Done()
	return s.Err()
}

// WriteJSON sends the answer in one piece.
func WriteJSON(w http.ResponseWriter, a Answer) error { return writeAnswer(w, http.StatusOK, a) }

// WriteUnfinished sends the text so far of an unfinished answer: 202, without a finish reason.
func WriteUnfinished(w http.ResponseWriter, a Answer) error {
	a.Finish = ""
	return writeAnswer(w, http.StatusAccepted, a)
}

func writeAnswer(w http.ResponseWriter, status int, a Answer) error {
	message := map[string]any{"role": openai.ChatMessageRoleAssistant, "content": a.Text, "refusal": nil}
	if len(a.Calls) > 0 {
		message["tool_calls"] = a.Calls
	}
	body := map[string]any{
		"id":      a.ID,
		"object":  "chat.completion",
		"created": a.Created,
		"model":   a.Model,
		"choices": []map[string]any{{
			"index":         0,
			"message":       message,
			"logprobs":      nil,
			"finish_reason": a.Finish,
		}},
	}
	if a.Usage != nil {
		body["usage"] = a.Usage
	}
	return writeJSON(w, status, body)
}

// Failure is the protocol's error object.
type Failure struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    string  `json:"code,omitempty"`
}

// WriteFailure answers with an HTTP status and an error body.
func WriteFailure(w http.ResponseWriter, status int, f Failure) error {
	return writeJSON(w, status, map[string]Failure{"error": f})
}

// WriteModels answers a listing of models; created is unix seconds.
func WriteModels(w http.ResponseWriter, created int64, owner string, list ...Model) error {
	models := make([]modelObject, 0, len(list))
	for _, m := range list {
		models = append(models, modelObject{m, "model", created, owner})
	}
	return writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": models})
}

// WriteModel answers with one model.
func WriteModel(w http.ResponseWriter, created int64, owner string, m Model) error {
	return writeJSON(w, http.StatusOK, modelObject{m, "model", created, owner})
}

// Model is an entry of the listing of models. Description and greeting extend the protocol.
type Model struct {
	ID          string `json:"id"`
	Description string `json:"description,omitempty"`
	Greeting    string `json:"greeting,omitempty"`
}

// modelObject is the protocol's model object.
type modelObject struct {
	Model
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
}

func writeJSON(w http.ResponseWriter, status int, body any) error {
	encoded, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if _, err := w.Write(append(encoded, '\n')); err != nil {
		return fmt.Errorf("send answer: %w", err)
	}
	return nil
}
