package operate

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"
)

// FuzzStream writes events of any content and reads them as a client does: each is one event, with the data it was given.
func FuzzStream(f *testing.F) {
	for _, s := range []string{"", "a\nb\r\nc", "\n\nevent: done\ndata: {}\n\n", "\x00\u2028\xff", "</script>"} {
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
		s.event(Event{"start", Start{TraceID: "op_0"}})
		s.comment("sign of life")
		s.event(Event{"delta", Delta{text}})
		s.event(Event{"tool", ToolCall{ID: text, Name: "f", Arguments: json.RawMessage(arguments), Error: text}})
		s.event(Event{"done", Done{Text: text}})
		blocks := strings.Split(w.Body.String(), "\n\n")
		if len(blocks) != 6 || blocks[5] != "" {
			t.Fatalf("%d events: %q", len(blocks)-1, w.Body)
		}
		for i, name := range map[int]string{0: "start", 2: "delta", 3: "tool", 4: "done"} {
			head, data, cut := strings.Cut(blocks[i], "\ndata: ")
			if !cut || head != "event: "+name || !json.Valid([]byte(data)) || strings.ContainsAny(data, "\r\n") {
				t.Errorf("event %d is %q", i, blocks[i])
			}
		}
		var delta Delta
		if err := json.Unmarshal([]byte(strings.TrimPrefix(blocks[2], "event: delta\ndata: ")), &delta); err != nil ||
			delta.Text != strings.ToValidUTF8(text, "\ufffd") && strings.ToValidUTF8(text, "") == text {
			t.Errorf("%q came out as %q, %v", text, delta.Text, err)
		}
	})
}
