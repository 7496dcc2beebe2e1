package webhooks_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/webhooks"
)

// FuzzParse looks for a body that is taken and is not what it says it is, or whose parts cannot be named.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		`{"a": [1, {"b": null}], "n": 1e400, "big": 12345678901234567890}`, `"\ud800"`, `{"a": 1, "a": 2}`, "\xff", "\ufeff{}", "{}{}", "[" + strings.Repeat("[", 200),
		`{"\u0000": "\u0000"}`, "", " ", "nul", "-0", `"` + strings.Repeat("x", 3000) + `"`,
	} {
		f.Add([]byte(s), "a {body.a.0} {body.n} {header.x}")
	}
	f.Fuzz(func(t *testing.T, raw []byte, template string) {
		for _, format := range []string{webhooks.FormatJSON, webhooks.FormatText} {
			v, err := webhooks.Parse(raw, format)
			if err != nil {
				continue
			}
			if !utf8.Valid(raw) || format == webhooks.FormatJSON && !json.Valid(raw) {
				t.Errorf("%q is taken as %s", raw, format)
			}
			if _, err := json.Marshal(v); err != nil {
				t.Errorf("%q is %v, which is not JSON: %v", raw, v, err)
			}
			c := webhooks.Content{Body: v, Header: http.Header{"X": {string(raw)}}}
			said, err := c.Text(template)
			if err == nil && utf8.ValidString(template) && !utf8.ValidString(said) {
				t.Errorf("%q of %q is %q", template, raw, said)
			}
		}
	})
}
