package engineroom

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/ssetest"
)

// FuzzStream sends parts of a page with any text, and reads them as a browser does.
func FuzzStream(f *testing.F) {
	for _, text := range []string{
		"one", "<p>a</p>\n<p>b</p>\r\n", "\n\nevent: expired\ndata: login\n\n", "\rid: 9\r\r", "\x00", "\xff\xfe", "\u2028\ufeff", "</script>", strings.Repeat("<li>\r\n", 1000),
	} {
		f.Add(text, text, text)
	}
	f.Fuzz(func(t *testing.T, name, state, html string) {
		w := httptest.NewRecorder()
		out := &stream{w: w, control: http.NewResponseController(w)}
		out.part(update{name: name, state: state, html: []byte(html)})
		out.part(update{name: "last", state: "s", html: []byte("the end")})
		got := ssetest.Read(w.Body.String())
		if len(got.Events) != 2 || len(got.Unknown)+len(got.Comments)+len(got.Retry) > 0 || got.Left != "" || out.err != nil {
			t.Fatalf("%q are not two events (%v)", w.Body, out.err)
		}
		var part struct{ ID, HTML string }
		if err := json.Unmarshal([]byte(got.Events[0].Data), &part); err != nil || got.Events[0].Name != "part" {
			t.Fatalf("event %+v: %v", got.Events[0], err)
		}
		if utf8.ValidString(name+html) && (part.ID != name || part.HTML != html) {
			t.Errorf("%q and %q came out as %q and %q", name, html, part.ID, part.HTML)
		}
		if utf8.ValidString(state) && !strings.ContainsAny(state, "\r\n\x00") && got.Events[0].ID != state {
			t.Errorf("the id %q came out as %q", state, got.Events[0].ID)
		}
	})
}
