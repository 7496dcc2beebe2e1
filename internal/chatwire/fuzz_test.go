package chatwire_test

import (
	"encoding/json"
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

// FuzzStream writes an answer of any text as server-sent events and reads it as a client does: what comes out is what
// went in, and nothing in it can end an event or begin another.
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
		said, called, ends := read(t, w.Body.String())
		assert.Equal(t, 1, ends, w.Body)
		assert.Truef(t, (!utf8.ValidString(text) || said == text) && (!utf8.ValidString(arguments) || called == arguments),
			"%q and %q came out as %q and %q", text, arguments, said, called)
		assert.Equal(t, text, strings.Join(chatwire.Pieces(text), ""), chatwire.Pieces(text))
		for _, piece := range chatwire.Pieces(text) {
			assert.Truef(t, !utf8.ValidString(text) || utf8.ValidString(piece) && piece != "",
				"%q has the piece %q", text, piece)
		}
	})
}

// read takes a stream apart, as strict as a client may be: it is nothing but data.
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
