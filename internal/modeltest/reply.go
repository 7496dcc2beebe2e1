package modeltest

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
)

// created is the constant unix time of every reply, so the same script gives the same bytes.
const created = 1_700_000_000

// Reply is the server's reaction to one request. The functions of this package make replies.
type Reply struct {
	text   string
	calls  []openai.ToolCall
	model  string // empty: the request's model
	finish openai.FinishReason
	usage  *openai.Usage
	hidden bool // report no usage
	pause  time.Duration
	custom func(call)

	before      string   // a chunk before all others
	members     []string // members of the message, a chunk for each
	callMembers string   // members of the first call
}

// call is a request with its connection.
type call struct {
	w    http.ResponseWriter
	r    *http.Request
	req  Request
	n    int
	quit <-chan struct{}
}

// Text is a text answer.
func Text(text string) Reply { return Reply{text: text} }

// ToolCall is a reply that calls one tool. It sends the arguments unchanged; they need not be valid JSON.
func ToolCall(name, arguments string) Reply { return Text("").AndCall(name, arguments) }

// AndCall adds a tool call to the reply. Ids count from call_<request>_0.
func (r Reply) AndCall(name, arguments string) Reply {
	r.calls = append(slices.Clip(r.calls), openai.ToolCall{
		Type:     openai.ToolTypeFunction,
		Function: openai.FunctionCall{Name: name, Arguments: arguments},
	})
	return r
}

// WithUsage sets the token counts; cached tokens are part of the prompt's.
func (r Reply) WithUsage(prompt, completion, cached int) Reply {
	r.usage = &openai.Usage{
		PromptTokens: prompt, CompletionTokens: completion, TotalTokens: prompt + completion,
		PromptTokensDetails: &openai.PromptTokensDetails{CachedTokens: cached},
	}
	return r
}

// NoUsage omits the token counts, like some servers.
func (r Reply) NoUsage() Reply {
	r.hidden = true
	return r
}

// WithModel sets the model's name in the answer.
func (r Reply) WithModel(name string) Reply {
	r.model = name
	return r
}

// WithFinish sets the finish reason. The default is stop or tool_calls.
func (r Reply) WithFinish(reason openai.FinishReason) Reply {
	r.finish = reason
	return r
}

// Slowly waits before each chunk of the answer.
func (r Reply) Slowly(pause time.Duration) Reply {
	r.pause = pause
	return r
}

func (r Reply) serve(c call) {
	if r.custom != nil {
		r.custom(c)
		return
	}
	switch a := r.answer(c); { // an error means that the client disconnected
	case c.req.Path == "/v1/responses":
		_ = writeResponse(c.w, a, c.req.Stream)
	case !c.req.Stream:
		if c.sleep(r.pause) {
			_ = chatwire.WriteJSON(c.w, a)
		}
	case r.before != "" || r.members != nil:
		_ = r.streamWithMembers(c, a)
	case r.pause > 0:
		_ = r.streamSlowly(c, a)
	default:
		_ = chatwire.WriteStream(c.w, a, c.wantsUsage())
	}
}

// streamSlowly streams the answer with a pause before each chunk.
func (r Reply) streamSlowly(c call, a chatwire.Answer) error {
	s := chatwire.Open(c.w, a.ID, a.Model, a.Created)
	s.Role()
	for _, piece := range chatwire.Pieces(a.Text) {
		if !c.sleep(r.pause) {
			return s.Err()
		}
		s.Text(piece)
	}
	for i, call := range a.Calls {
		if !c.sleep(r.pause) {
			return s.Err()
		}
		s.Call(i, call)
	}
	s.Finish(a.Finish)
	if a.Usage != nil && c.wantsUsage() {
		s.Usage(*a.Usage)
	}
	s.Done()
	return s.Err()
}

// answer completes the reply for the request.
func (r Reply) answer(c call) chatwire.Answer {
	a := chatwire.Answer{
		ID: "chatcmpl-" + strconv.Itoa(c.n), Model: r.model, Created: created,
		Text: r.text, Finish: r.finish, Usage: r.usage,
	}
	for i, call := range r.calls {
		call.ID = fmt.Sprintf("call_%d_%d", c.n, i)
		a.Calls = append(a.Calls, call)
	}
	a.Model = cmp.Or(a.Model, c.req.Model)
	if a.Finish == "" {
		a.Finish = openai.FinishReasonStop
		if len(a.Calls) > 0 {
			a.Finish = openai.FinishReasonToolCalls
		}
	}
	if a.Usage == nil {
		a.Usage = r.countedUsage(c)
	}
	if r.hidden {
		a.Usage = nil
	}
	return a
}

// countedUsage counts a token for every four bytes.
func (r Reply) countedUsage(c call) *openai.Usage {
	prompt, completion := 0, tokens(len(r.text))
	for _, m := range c.req.Messages {
		prompt += tokens(len(m.Content))
	}
	for _, call := range r.calls {
		completion += tokens(len(call.Function.Name) + len(call.Function.Arguments))
	}
	return &openai.Usage{PromptTokens: prompt, CompletionTokens: completion, TotalTokens: prompt + completion}
}

func tokens(bytes int) int { return int(math.Ceil(float64(bytes) / 4)) }

func (c call) wantsUsage() bool {
	return c.req.StreamOptions != nil && c.req.StreamOptions.IncludeUsage
}

// sleep waits and returns false if the client disconnected.
func (c call) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-c.r.Context().Done():
		return false
	case <-c.quit:
		return false
	}
}

// Arguments encodes v as the arguments of a tool call. It panics if v has no JSON form.
func Arguments(v any) string {
	encoded, err := json.Marshal(v)
	if err != nil {
		panic("modeltest: encode arguments: " + err.Error())
	}
	return string(encoded)
}
