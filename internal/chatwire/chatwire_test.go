package chatwire_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func answer() chatwire.Answer {
	return chatwire.Answer{
		ID: "chatcmpl-1", Model: "m", Created: 7, Text: "Hi", Finish: openai.FinishReasonStop,
		Usage: &openai.Usage{PromptTokens: 3, CompletionTokens: 1, TotalTokens: 4},
	}
}

func TestStreamHasTheFormStrictClientsInsistOn(t *testing.T) {
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

func TestStreamSendsUsageOnlyWhenAsked(t *testing.T) {
	w := httptest.NewRecorder()
	require.NoError(t, chatwire.WriteStream(w, answer(), false))
	assert.Truef(t, !strings.Contains(w.Body.String(), "usage"), "usage was sent unasked:\n%s", w.Body)
}

func TestFailureHasTheProtocolsShape(t *testing.T) {
	w := httptest.NewRecorder()
	f := chatwire.Failure{Message: "no such model", Type: "invalid_request_error", Code: "model_not_found"}
	require.NoError(t, chatwire.WriteFailure(w, http.StatusNotFound, f))
	want := `{"error":{"message":"no such model","type":"invalid_request_error","param":null,"code":"model_not_found"}}` +
		"\n"
	assert.Equal(t, http.StatusNotFound, w.Code, w.Body)
	assert.Equal(t, want, w.Body.String(), w.Body)
}

func TestPiecesMakeUpTheText(t *testing.T) {
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
