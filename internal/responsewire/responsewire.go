// Package responsewire writes the server's half of OpenAI's Responses protocol: a response as one document, or as a
// stream of typed events.
//
// Clients accumulate the events and throw on types that they do not know. So each event has its sequence_number, the
// order is fixed, and a sign of life is a comment of the stream:
//
//	response.created, response.in_progress, response.output_item.added, response.content_part.added,
//	response.output_text.delta …, response.output_text.done, response.content_part.done, response.output_item.done,
//	response.completed | response.incomplete | response.failed
//
// A [Stream] is used by one goroutine. The first write that fails is kept and ends all further writing.
package responsewire

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/sse"
)

// The states of a response.
const (
	InProgress = "in_progress"
	Completed  = "completed"
	Incomplete = "incomplete"
	Failed     = "failed"
	Cancelled  = "cancelled"
)

// Response is a response with at most one message.
type Response struct {
	ID           string
	ItemID       string // of its message
	Model        string
	Status       string
	Reason       string // of Incomplete
	Error        *Error // of Failed
	Created      int64  // unix seconds
	Text         string
	Usage        *Usage
	Previous     string // response that it continues; "" for none
	Conversation string
	Metadata     map[string]string
	MaxTokens    int            // 0 for no bound
	Format       map[string]any // of the text; nil for words
	Background   bool
}

// Error says why a response failed.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// Usage counts tokens. Input includes Cached.
type Usage struct{ Input, Cached, Output int }

// document is the response as JSON.
func (r Response) document() map[string]any {
	d := map[string]any{
		"id": r.ID, "object": "response", "created_at": r.Created, "status": r.Status, "background": r.Background,
		"error": nil, "incomplete_details": nil, "instructions": nil, "max_output_tokens": nil, "max_tool_calls": nil,
		"model": r.Model, "output": []any{}, "parallel_tool_calls": true, "previous_response_id": nil,
		"prompt_cache_key": nil, "reasoning": map[string]any{"effort": nil, "summary": nil}, "safety_identifier": nil,
		"service_tier": "default", "store": true, "temperature": 1.0, "top_p": 1.0, "top_logprobs": 0,
		"text":        map[string]any{"format": map[string]any{"type": "text"}, "verbosity": "medium"},
		"tool_choice": "auto", "tools": []any{}, "truncation": "disabled", "usage": nil, "user": nil,
		"metadata": map[string]string{}, "conversation": map[string]any{"id": r.Conversation},
	}
	if r.Format != nil {
		d["text"] = map[string]any{"format": r.Format, "verbosity": "medium"}
	}
	if r.Error != nil {
		d["error"] = r.Error
	}
	if r.Reason != "" {
		d["incomplete_details"] = map[string]any{"reason": r.Reason}
	}
	if r.MaxTokens > 0 {
		d["max_output_tokens"] = r.MaxTokens
	}
	if r.Previous != "" {
		d["previous_response_id"] = r.Previous
	}
	if r.Metadata != nil {
		d["metadata"] = r.Metadata
	}
	if r.Text != "" || r.Status == Completed {
		d["output"] = []any{r.item(r.Text)}
	}
	if u := r.Usage; u != nil {
		d["usage"] = map[string]any{
			"input_tokens": u.Input, "input_tokens_details": map[string]int{"cached_tokens": u.Cached},
			"output_tokens": u.Output, "output_tokens_details": map[string]int{"reasoning_tokens": 0},
			"total_tokens": u.Input + u.Output,
		}
	}
	return d
}

// item is the message of the response.
func (r Response) item(text string) map[string]any {
	status := r.Status
	if status == Failed || status == Cancelled {
		status = Incomplete
	}
	return map[string]any{
		"id": r.ItemID, "type": "message", "role": "assistant", "status": status, "content": []any{part(text)},
	}
}

func part(text string) map[string]any {
	return map[string]any{"type": "output_text", "text": text, "annotations": []any{}, "logprobs": []any{}}
}

// Write sends a response in one piece.
func Write(w http.ResponseWriter, r Response) error { return WriteJSON(w, r.document()) }

// WriteJSON sends a document.
func WriteJSON(w http.ResponseWriter, body any) error {
	encoded, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("encode response: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	if _, err := w.Write(append(encoded, '\n')); err != nil {
		return fmt.Errorf("send response: %w", err)
	}
	return nil
}

// Stream is a response under way.
type Stream struct {
	w      http.ResponseWriter
	head   Response
	number int // of the next event
	text   string
	begun  bool // the message is open
	err    error
}

// Open sends the headers and the events with which each stream begins.
func Open(w http.ResponseWriter, r Response) *Stream {
	sse.Open(w)
	r.Status, r.Text, r.Usage = InProgress, "", nil
	s := &Stream{w: w, head: r}
	s.send("response.created", map[string]any{"response": r.document()})
	s.send("response.in_progress", map[string]any{"response": r.document()})
	return s
}

// Text sends a piece of the answer.
func (s *Stream) Text(piece string) {
	s.begin()
	s.text += piece
	s.send("response.output_text.delta", s.place(map[string]any{"delta": piece, "logprobs": []any{}}))
}

// Idle sends a sign of life.
func (s *Stream) Idle() { s.write(sse.Comment(nil, "keep-alive")) }

// Finish sends the rest of the final response's text, and ends the stream.
func (s *Stream) Finish(r Response) {
	if rest, ok := strings.CutPrefix(r.Text, s.text); ok && rest != "" {
		s.Text(rest)
	}
	if r.Text != "" || r.Status == Completed || s.begun {
		s.begin()
		s.send("response.output_text.done", s.place(map[string]any{"text": s.text, "logprobs": []any{}}))
		s.send("response.content_part.done", s.place(map[string]any{"part": part(s.text)}))
		s.send("response.output_item.done", map[string]any{"output_index": 0, "item": r.item(s.text)})
	}
	r.Text = s.text
	name := "response." + r.Status
	if r.Status == Cancelled {
		name = "response.failed" // there is no event of that name
	}
	s.send(name, map[string]any{"response": r.document()})
}

// Err is the first error of the connection; nil when all was sent.
func (s *Stream) Err() error { return s.err }

// begin opens the message and its part, once.
func (s *Stream) begin() {
	if s.begun {
		return
	}
	s.begun = true
	item := s.head.item("")
	item["content"] = []any{}
	s.send("response.output_item.added", map[string]any{"output_index": 0, "item": item})
	s.send("response.content_part.added", s.place(map[string]any{"part": part("")}))
}

// place adds the position of the part that an event is about.
func (s *Stream) place(event map[string]any) map[string]any {
	event["item_id"], event["output_index"], event["content_index"] = s.head.ItemID, 0, 0
	return event
}

func (s *Stream) send(name string, event map[string]any) {
	event["type"], event["sequence_number"] = name, s.number
	s.number++
	encoded, err := json.Marshal(event)
	if err != nil && s.err == nil {
		s.err = fmt.Errorf("encode event: %w", err)
	}
	s.write(sse.Event{Name: name, Data: string(encoded)}.Append(nil))
}

func (s *Stream) write(event []byte) {
	if s.err == nil {
		s.err = sse.Send(s.w, event)
	}
}
