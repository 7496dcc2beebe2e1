package chatwire_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode/utf8"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/ssetest"
)

func answer() chatwire.Answer {
	return chatwire.Answer{
		ID: "chatcmpl-1", Model: "m", Created: 7, Text: "Hi", Finish: openai.FinishReasonStop,
		Usage: &openai.Usage{PromptTokens: 3, CompletionTokens: 1, TotalTokens: 4},
	}
}

func TestStreamFormatForStrictClients(t *testing.T) {
	w := httptest.NewRecorder()
	require.NoError(t, chatwire.WriteStream(w, answer(), true))
	head := `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[`
	want := head + `{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n" +
		head + `{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}` + "\n\n" +
		head + `{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n" +
		head + `],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,` +
		`"prompt_tokens_details":null,"completion_tokens_details":null}}` + "\n\n" +
		"data: [DONE]\n\n"
	assert.NoDiff(t, want, w.Body.String())
	assert.True(t, w.Flushed, "the stream was not flushed")
	assert.Equal(t, "no", w.Header().Get("X-Accel-Buffering"))
}

func TestStreamSendsUsageOnlyOnRequest(t *testing.T) {
	w := httptest.NewRecorder()
	require.NoError(t, chatwire.WriteStream(w, answer(), false))
	assert.Truef(t, !strings.Contains(w.Body.String(), "usage"), "usage was sent unasked:\n%s", w.Body)
}

func TestFailureFormat(t *testing.T) {
	w := httptest.NewRecorder()
	f := chatwire.Failure{Message: "no such model", Type: "invalid_request_error", Code: "model_not_found"}
	require.NoError(t, chatwire.WriteFailure(w, http.StatusNotFound, f))
	want := `{"error":{"message":"no such model","type":"invalid_request_error","param":null,"code":"model_not_found"}}` +
		"\n"
	assert.Equal(t, http.StatusNotFound, w.Code, w.Body)
	assert.Equal(t, want, w.Body.String(), w.Body)
}

func TestPiecesJoinToText(t *testing.T) {
	for name, text := range map[string]string{
		"empty":     "",
		"short":     "hello",
		"sentences": "The quick brown fox jumps over the lazy dog, and then over another one.",
		"one word":  strings.Repeat("x", 100),
		"umlauts":   strings.Repeat("ü", 101),
		"not utf-8": strings.Repeat("\x80", 99),
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, text, strings.Join(chatwire.Pieces(text), ""))
		})
	}
}

// FuzzStream writes an answer of any text as server-sent events and reads it like a client. The text arrives unchanged,
// and cannot end an event or begin another.
func FuzzStream(f *testing.F) {
	for _, s := range []string{
		"", "Hello, world. ", "a\nb\r\nc\rd", "data: [DONE]\n\n", "\n\nevent: x\ndata: y\n\n", "\x00\u2028\u2029\ufeff",
		"ñandú 日本 🎉 👨‍👩‍👧", "\xff\xfe", strings.Repeat("äö", 300),
	} {
		f.Add(s, s, "m")
	}
	f.Fuzz(func(t *testing.T, text, arguments, model string) {
		w := httptest.NewRecorder()
		s := chatwire.Open(w, "id", model, 1)
		s.Role()
		for _, piece := range chatwire.Pieces(text) {
			s.Text(piece)
		}
		s.Call(0, openai.ToolCall{ID: model, Function: openai.FunctionCall{Name: "f", Arguments: arguments}})
		s.Finish(openai.FinishReasonStop)
		s.Done()
		require.NoError(t, s.Err())
		content, called, ends := read(t, w.Body.String())
		assert.Equal(t, 1, ends, w.Body)
		assert.Truef(t, (!utf8.ValidString(text) || content == text) && (!utf8.ValidString(arguments) || called == arguments),
			"%q and %q came out as %q and %q", text, arguments, content, called)
		assert.Equal(t, text, strings.Join(chatwire.Pieces(text), ""), chatwire.Pieces(text))
		for _, piece := range chatwire.Pieces(text) {
			assert.Truef(t, !utf8.ValidString(text) || utf8.ValidString(piece) && piece != "",
				"%q has the piece %q", text, piece)
		}
	})
}

// read parses a stream strictly: it contains only data.
func read(t *testing.T, stream string) (text, arguments string, ends int) {
	t.Helper()
	got := ssetest.Read(stream)
	require.Truef(t, len(got.Comments)+len(got.Unknown)+len(got.Retry) == 0 && got.Left == "",
		"the stream %q has more than data", stream)
	for _, event := range got.Events {
		require.Truef(t, event.Name == "" && event.ID == "", "event %+v", event)
		if event.Data == "[DONE]" {
			ends++
			continue
		}
		var chunk openai.ChatCompletionStreamResponse
		err := json.Unmarshal([]byte(event.Data), &chunk)
		require.Truef(t, err == nil && len(chunk.Choices) == 1, "chunk %q: %v", event.Data, err)
		delta := chunk.Choices[0].Delta
		text += delta.Content
		for _, call := range delta.ToolCalls {
			arguments += call.Function.Arguments
		}
	}
	return text, arguments, ends
}
