package chatwire

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"unicode/utf8"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/sse"
)

// pieceBytes is the approximate size of one chunk's text.
const pieceBytes = 24

// Stream is an answer under way.
type Stream struct {
	w    http.ResponseWriter
	head chunk
	err  error
}

type chunk struct {
	ID      string        `json:"id"`
	Object  string        `json:"object"`
	Created int64         `json:"created"`
	Model   string        `json:"model"`
	Choices []choice      `json:"choices"`
	Usage   *openai.Usage `json:"usage,omitempty"`
	// Activity extends OpenAI's protocol. Clients request it, and others ignore it.
	Activity *activity `json:"activity,omitempty"`
}

// activity is the agent's current action while it sends no text.
type activity struct {
	Type string `json:"type"` // tool, approval or none
	Name string `json:"name,omitempty"`
}

// The kinds of activities.
const (
	ActivityTool     = "tool"     // a tool runs
	ActivityApproval = "approval" // the answer waits for an approval
)

type choice struct {
	Index  int                 `json:"index"`
	Delta  delta               `json:"delta"`
	Finish openai.FinishReason `json:"finish_reason"`
}

type delta struct {
	Role    string            `json:"role,omitempty"`
	Content *string           `json:"content,omitempty"`
	Calls   []openai.ToolCall `json:"tool_calls,omitempty"`
}

// Open sends the headers of a stream.
func Open(w http.ResponseWriter, id, model string, created int64) *Stream {
	sse.Open(w)
	head := chunk{ID: id, Object: "chat.completion.chunk", Created: created, Model: model}
	return &Stream{w: w, head: head}
}

// Role sends the first chunk.
func (s *Stream) Role() {
	empty := ""
	s.delta(delta{Role: openai.ChatMessageRoleAssistant, Content: &empty}, "")
}

// Text sends a piece of the answer's text.
func (s *Stream) Text(piece string) { s.delta(delta{Content: &piece}, "") }

// Call sends a tool call: its name, then its arguments in fragments.
func (s *Stream) Call(index int, call openai.ToolCall) {
	head := openai.ToolCall{Index: &index, ID: call.ID, Type: openai.ToolTypeFunction}
	head.Function.Name = call.Function.Name
	s.delta(delta{Calls: []openai.ToolCall{head}}, "")
	for _, piece := range Pieces(call.Function.Arguments) {
		rest := openai.ToolCall{Index: &index, Type: openai.ToolTypeFunction}
		rest.Function.Arguments = piece
		s.delta(delta{Calls: []openai.ToolCall{rest}}, "")
	}
}

// Calls sends fragments of tool calls in one chunk, unchanged.
func (s *Stream) Calls(fragments ...openai.ToolCall) { s.delta(delta{Calls: fragments}, "") }

// Finish sends why the answer ended.
func (s *Stream) Finish(reason openai.FinishReason) { s.delta(delta{}, reason) }

// Idle sends an empty chunk: unlike a comment, every client counts it as a sign of life.
func (s *Stream) Idle() { s.delta(delta{}, "") }

// Usage sends the cost of the answer.
func (s *Stream) Usage(u openai.Usage) {
	c := s.head
	c.Choices, c.Usage = []choice{}, &u
	s.data(c)
}

// Activity sends the current activity; an empty kind ends it.
func (s *Stream) Activity(kind, name string) {
	c := s.head
	c.Choices, c.Activity = []choice{}, &activity{cmp.Or(kind, "none"), name}
	s.data(c)
}

// Comment sends a line that a client must ignore.
func (s *Stream) Comment(text string) { s.write(sse.Comment(nil, text)) }

// Failure sends an error in the middle of the stream. Nothing may follow it.
func (s *Stream) Failure(f Failure) { s.data(map[string]Failure{"error": f}) }

// Done ends the stream.
func (s *Stream) Done() { s.write(sse.Event{Data: "[DONE]"}.Append(nil)) }

// Err is the first error of the connection; nil if there was none.
func (s *Stream) Err() error { return s.err }

func (s *Stream) delta(d delta, reason openai.FinishReason) {
	c := s.head
	c.Choices = []choice{{Delta: d, Finish: reason}}
	s.data(c)
}

func (s *Stream) data(v any) {
	encoded, err := json.Marshal(v)
	if err != nil && s.err == nil {
		s.err = fmt.Errorf("encode chunk: %w", err)
	}
	s.write(sse.Event{Data: string(encoded)}.Append(nil))
}

func (s *Stream) write(event []byte) {
	if s.err == nil {
		s.err = sse.Send(s.w, event)
	}
}

// Pieces cuts text into the parts that a stream sends one by one. Together they are the text, and no part cuts a
// character in two.
func Pieces(text string) []string {
	var pieces []string
	for len(text) > pieceBytes {
		cut := pieceBytes
		if space := strings.LastIndexByte(text[:cut], ' '); space > 0 {
			cut = space
		}
		for cut < len(text) && !utf8.RuneStart(text[cut]) {
			cut++
		}
		pieces = append(pieces, text[:cut])
		text = text[cut:]
	}
	if text != "" {
		pieces = append(pieces, text)
	}
	return pieces
}
