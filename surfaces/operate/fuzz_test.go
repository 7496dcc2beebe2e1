package operate

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/ssetest"
)

// FuzzStream writes events of any content and reads them as a client does: each is one event, with the data it was given.
func FuzzStream(f *testing.F) {
	for _, s := range []string{"", "a\nb\r\nc\rd", "\n\nevent: done\ndata: {}\n\n", "\x00\u2028\xff", "</script>", strings.Repeat("a\r\n", 2000)} {
		f.Add(s, `{"a": "b"}`)
		f.Add(s, "{\n\n\"event\":\t\"\\n\\n\"\r\n}")
	}
	f.Fuzz(func(t *testing.T, text, arguments string) {
		if !json.Valid([]byte(arguments)) {
			arguments = "null"
		}
		w := httptest.NewRecorder()
		_, leave := context.WithCancelCause(t.Context())
		s := newStream(w, leave)
		sent := []Event{
			{"start", Start{TraceID: "op_0", SessionID: text}},
			{"delta", Delta{text}},
			{"tool", ToolCall{ID: text, Name: "f", Arguments: json.RawMessage(arguments), Error: text}},
			{text, Delta{text}},
			{"done", Done{Text: text}},
		}
		for _, e := range sent {
			s.event(e)
			s.comment("sign of life")
		}
		got := ssetest.Read(w.Body.String())
		if len(got.Events) != len(sent) || len(got.Comments) != len(sent) || len(got.Unknown)+len(got.Retry) > 0 || got.Left != "" {
			t.Fatalf("%d events: %q", len(got.Events), w.Body)
		}
		for i, e := range got.Events {
			if !json.Valid([]byte(e.Data)) || i != 3 && e.Name != sent[i].Name {
				t.Errorf("event %d is %+v", i, e)
			}
		}
		var delta Delta
		var call ToolCall
		var done Done
		for i, into := range map[int]any{1: &delta, 2: &call, 4: &done} {
			if err := json.Unmarshal([]byte(got.Events[i].Data), into); err != nil {
				t.Errorf("event %d is %q: %v", i, got.Events[i].Data, err)
			}
		}
		if !utf8.ValidString(text + arguments) {
			return
		}
		call.Arguments = nil // as JSON they are the same, not as text
		want := ToolCall{ID: text, Name: "f", Error: text}
		if diff := cmp.Diff(want, call) + cmp.Diff(Done{Text: text}, done) + cmp.Diff(Delta{text}, delta); diff != "" {
			t.Errorf("%q came out otherwise: %s", text, diff)
		}
	})
}
