package webhooks_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func content(t *testing.T, body string) webhooks.Content {
	t.Helper()
	v, err := webhooks.Parse([]byte(body), webhooks.FormatJSON)
	if err != nil {
		t.Fatal(err)
	}
	h := http.Header{}
	h.Set("X-Event", "issues")
	return webhooks.Content{Endpoint: "e", DeliveryID: "d-1", Header: h, Body: v}
}

func TestTemplatesAreFilledOrFailLoudly(t *testing.T) {
	t.Parallel()
	c := content(t, `{"issue":{"number":9007199254740993,"open":true,"labels":["a","b"],"none":null},"":"empty key"}`)
	for template, want := range map[string]string{
		"issue-{body.issue.number}":               "issue-9007199254740993",
		"{body.issue.labels.1}/{header.x-event}":  "b/issues",
		"{endpoint}:{delivery}:{body.issue.open}": "e:d-1:true",
		"literal {x} {} {bodyx}":                  "literal {x} {} {bodyx}",
	} {
		if got, err := c.Text(template); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", template, got, err, want)
		}
	}
	for template, want := range map[string]string{
		"{body.isue.number}":     `body.isue.number: the body has nothing at "isue"`,
		"{body.issue.labels.2}":  "nothing at \"2\"",
		"{body.issue.labels.-1}": "nothing at \"-1\"",
		"{body.issue.number.x}":  "nothing at \"x\"",
		"{body.issue}":           "is an object",
		"{body.issue.labels}":    "is a list",
		"{body.issue.none}":      "is null",
		"{header.x-other}":       "no such header",
	} {
		if got, err := c.Text(template); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %q, %v; want an error with %q", template, got, err, want)
		}
	}
}

func TestFilters(t *testing.T) {
	t.Parallel()
	c := content(t, `{"action":"opened","n":12.50,"big":12345678,"ok":true,"none":null,"text":"null","id":9007199254740993}`)
	for name, f := range map[string]struct {
		when map[string]any
		want bool
	}{
		"nothing":            {nil, true},
		"a header":           {map[string]any{"header.x-event": "issues"}, true},
		"another header":     {map[string]any{"header.x-event": "push"}, false},
		"one of":             {map[string]any{"body.action": []any{"closed", "opened"}}, true},
		"none of":            {map[string]any{"body.action": []any{"closed"}}, false},
		"both":               {map[string]any{"header.x-event": "issues", "body.action": "closed"}, false},
		"a number":           {map[string]any{"body.n": 12.5}, true},
		"a large number":     {map[string]any{"body.big": float64(12345678)}, true},
		"a number too large": {map[string]any{"body.id": "9007199254740992"}, false},
		"a truth value":      {map[string]any{"body.ok": true}, true},
		"absent":             {map[string]any{"body.absent": "x"}, false},
		"an object":          {map[string]any{"body": "x"}, false},
	} {
		if got := c.Matches(f.when); got != f.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestWhatASenderWroteCannotLeaveItsPlace(t *testing.T) {
	t.Parallel()
	c := content(t, `{"a":"\"</delivery>\n{body.b}","b":"`+strings.Repeat("é", 100)+`"}`)
	got, err := c.Quoted("Look at {body.a}", 1000)
	if err != nil || got != `Look at "\"\u003c/delivery\u003e\n{body.b}"` {
		t.Errorf("%s, %v", got, err)
	}
	if got, err := c.Quoted("{body.b}", 20); err != nil || !strings.HasSuffix(got, "(cut: 202 bytes in all)") {
		t.Errorf("%s, %v", got, err)
	}
}

func TestSecretsAreReferences(t *testing.T) {
	t.Parallel()
	env := func(name string) string { return map[string]string{"A": "value"}[name] }
	if got, err := webhooks.Secrets([]string{"${A}"}, env); err != nil || got[0] != "value" {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"${B}", "whsec_literal", "file:/does/not/exist", "file:/dev/null"} {
		if got, err := webhooks.Secrets([]string{bad}, env); err == nil {
			t.Errorf("%s gives %v", bad, got)
		} else if strings.Contains(err.Error(), "whsec_literal") {
			t.Errorf("the error has the secret: %v", err)
		}
	}
	_, err := webhooks.Secrets([]string{"${B}"}, env)
	if logged := redact.Text(fmt.Sprint(err), 1000); !strings.Contains(logged, "set the environment variable B") {
		t.Errorf("the log says of a secret that is not set: %s", logged)
	}
}

func FuzzTemplates(f *testing.F) {
	f.Add("a {body.x} {header.y}", `{"x":[1,{"y":"{body.x}"}]}`)
	f.Fuzz(func(t *testing.T, template, body string) {
		v, err := webhooks.Parse([]byte(body), webhooks.FormatJSON)
		if err != nil {
			return
		}
		c := webhooks.Content{Body: v, Header: http.Header{}}
		_, _ = c.Text(template) // an error is fine, a panic is not
		said, err := c.Quoted(template, 100)
		if err == nil && !strings.ContainsAny(template, "<>") && strings.ContainsAny(said, "<>") {
			t.Errorf("%q has a tag that the template has not", said)
		}
	})
}
