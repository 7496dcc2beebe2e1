package webhooks_test

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

const testSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

// testReceiver is a server that records the requests of a dispatcher.
type testReceiver struct {
	*httptest.Server
	mu       sync.Mutex
	requests []*http.Request
	bodies   []string
}

// newReceiver starts a receiver. handle gets the number of earlier requests.
func newReceiver(t *testing.T, handle func(n int, w http.ResponseWriter, r *http.Request)) *testReceiver {
	t.Helper()
	l := &testReceiver{}
	l.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		assert.NoError(t, err)
		l.mu.Lock()
		n := len(l.requests)
		l.requests, l.bodies = append(l.requests, r), append(l.bodies, string(body))
		l.mu.Unlock()
		handle(n, w, r)
	}))
	t.Cleanup(l.Close)
	return l
}

func respondWith(code int) func(int, http.ResponseWriter, *http.Request) {
	return func(_ int, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }
}

func (l *testReceiver) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.requests)
}

func (l *testReceiver) host(t *testing.T) string {
	t.Helper()
	host, _, err := net.SplitHostPort(strings.TrimPrefix(l.URL, "http://"))
	require.NoError(t, err)
	return host
}

// putTarget stores a target, by default named them and for all events.
func putTarget(t *testing.T, db postgres.DB, d webhooks.TargetDefinition) {
	t.Helper()
	if d.Name == "" {
		d.Name = "them"
	}
	if d.Events == nil {
		d.Events = []string{"*"}
	}
	d.Secrets = []string{"${SECRET}"}
	_, err := webhooks.PutTarget(t.Context(), db, d)
	require.NoError(t, err)
}

// startDispatcher runs a dispatcher until the test ends. It may reach the private addresses in allow.
func startDispatcher(t *testing.T, pool *pgxpool.Pool, allow []string, schedule ...time.Duration) {
	t.Helper()
	client, err := skills.NewGuardedClient(allow, nil)
	require.NoError(t, err)
	listener := postgres.NewListener(postgres.Dialer(pool), slog.New(slog.DiscardHandler))
	d := &webhooks.Dispatcher{
		Pool: pool, Client: client, Logger: slog.New(slog.DiscardHandler), Schedule: schedule, Listener: listener,
		Getenv: func(name string) string { return map[string]string{"SECRET": testSecret}[name] },
	}
	testkit.Run(t, d.Run, listener.Run)
}

// verify checks a request with the official library.
func (l *testReceiver) verify(t *testing.T, i int) {
	t.Helper()
	wh, err := standardwebhooks.NewWebhook(testSecret)
	require.NoError(t, err)
	assert.NoError(t, wh.Verify([]byte(l.bodies[i]), l.requests[i].Header), "request", i)
}

// emitEvent inserts an event, as a trigger does.
func emitEvent(t *testing.T, db postgres.DB, event string) {
	t.Helper()
	pgtest.Exec(t, db, `select lanekeeper.emit_agent_webhook($1, 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', '{"id": "x"}')`, event)
}

// waitForStatus waits until the only message has a status.
func waitForStatus(t *testing.T, pool *pgxpool.Pool, want string) {
	t.Helper()
	pgtest.Until(t, pool, want, `select status from agent_webhook_outbox`)
}

func newContent(t *testing.T, body string) webhooks.Content {
	t.Helper()
	v, err := webhooks.Parse([]byte(body), webhooks.FormatJSON)
	require.NoError(t, err)
	h := http.Header{}
	h.Set("X-Event", "issues")
	return webhooks.Content{Endpoint: "e", DeliveryID: "d-1", Header: h, Body: v}
}

func TestTemplates(t *testing.T) {
	t.Parallel()
	c := newContent(t, `{"issue":{"number":9007199254740993,"open":true,"labels":["a","b"],"none":null},"":"empty key"}`)
	for template, want := range map[string]string{
		"issue-{body.issue.number}":               "issue-9007199254740993",
		"{body.issue.labels.1}/{header.x-event}":  "b/issues",
		"{endpoint}:{delivery}:{body.issue.open}": "e:d-1:true",
		"literal {x} {} {bodyx}":                  "literal {x} {} {bodyx}",
	} {
		got, err := c.Text(template)
		assert.Truef(t, err == nil && got == want, "%s: %q, %v; want %q", template, got, err, want)
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
	c := newContent(t,
		`{"action":"opened","n":12.50,"big":12345678,"ok":true,"none":null,"text":"null","id":9007199254740993,"v":"1.10"}`)
	for name, test := range map[string]struct {
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
		"a version":          {map[string]any{"body.v": "1.1"}, false},
		"a text as a number": {map[string]any{"body.v": 1.1}, true},
		"a number too large": {map[string]any{"body.id": "9007199254740992"}, false},
		"a truth value":      {map[string]any{"body.ok": true}, true},
		"absent":             {map[string]any{"body.absent": "x"}, false},
		"an object":          {map[string]any{"body": "x"}, false},
	} {
		assert.Equal(t, test.want, c.Matches(test.when), name)
	}
	for text, want := range map[string]bool{"9007199254740993": true, "9007199254740992": false} {
		var stored webhooks.Action
		require.NoError(t, json.Unmarshal([]byte(`{"when": {"body.id": `+text+`}}`), &stored))
		assert.Equal(t, want, c.Matches(stored.When), text)
	}
}

func TestQuotedEscapesPayload(t *testing.T) {
	t.Parallel()
	c := newContent(t, `{"a":"\"</delivery>\n{body.b}","b":"`+strings.Repeat("é", 100)+`"}`)
	got, err := c.Quoted("Look at {body.a}", 1000)
	assert.NoError(t, err)
	assert.Equal(t, `Look at "\"\u003c/delivery\u003e\n{body.b}"`, got)
	got, err = c.Quoted("{body.b}", 20)
	assert.Truef(t, err == nil && strings.HasSuffix(got, "(cut: 202 bytes in all)"), "%s, %v", got, err)
}

func TestSecretsAreReferences(t *testing.T) {
	t.Parallel()
	message := fmt.Sprintf("%v: it is empty", signature.ErrSecret)
	assert.Equal(t, message, redact.Text(message, 100))
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
	assert.Contains(t, redact.Text(fmt.Sprint(err), 1000), "set the environment variable B")
}

func FuzzTemplates(f *testing.F) {
	f.Add("a {body.x} {header.y}", `{"x":[1,{"y":"{body.x}"}]}`)
	f.Fuzz(func(t *testing.T, template, body string) {
		v, err := webhooks.Parse([]byte(body), webhooks.FormatJSON)
		if err != nil {
			return
		}
		c := webhooks.Content{Body: v, Header: http.Header{}}
		_, _ = c.Text(template) // it may fail but not panic
		quoted, err := c.Quoted(template, 100)
		assert.Truef(t, err != nil || strings.ContainsAny(template, "<>") || !strings.ContainsAny(quoted, "<>"),
			"%q contains a tag, unlike the template", quoted)
	})
}

// FuzzParse searches for an accepted body that is not in its format, or that breaks templates.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		`{"a": [1, {"b": null}], "n": 1e400, "big": 12345678901234567890}`, `"\ud800"`, `{"a": 1, "a": 2}`, "\xff",
		"\ufeff{}", "{}{}", "[" + strings.Repeat("[", 200),
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
			assert.Truef(t, utf8.Valid(raw) && (format != webhooks.FormatJSON || json.Valid(raw)),
				"%q is accepted as %s", raw, format)
			_, err = json.Marshal(v)
			assert.NoError(t, err, raw, v, "which is not JSON")
			c := webhooks.Content{Body: v, Header: http.Header{"X": {string(raw)}}}
			text, err := c.Text(template)
			assert.Truef(t, err != nil || !utf8.ValidString(template) || utf8.ValidString(text),
				"%q of %q is %q", template, raw, text)
		}
	})
}

func TestResendDeadMessage(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	receiver := newReceiver(t, func(n int, w http.ResponseWriter, _ *http.Request) {
		if n < 2 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	putTarget(t, pool, webhooks.TargetDefinition{URL: receiver.URL})
	startDispatcher(t, pool, []string{receiver.host(t)}, time.Millisecond)
	emitEvent(t, pool, "execution.failed")
	waitForStatus(t, pool, "dead")
	id := pgtest.Value[string](t, pool, `select id::text from agent_webhook_outbox`)
	resend := func(id string) (resent bool, err error) {
		err = postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
			resent, err = webhooks.Resend(t.Context(), tx, id)
			return err
		})
		return resent, err
	}
	resent, err := resend(id)
	require.Truef(t, resent && err == nil, "resent: %v, %v", resent, err)
	waitForStatus(t, pool, "sent")
	if first, last := receiver.requests[0].Header.Get("webhook-id"),
		receiver.requests[receiver.count()-1].Header.Get("webhook-id"); first != last {
		t.Errorf("the webhook-id changed from %s to %s", first, last)
	}
	resent, err = resend(id)
	assert.Truef(t, !resent && err == nil, "a sent message is sent again: %v, %v", resent, err)
	_, err = resend("01890000-0000-7000-8000-000000000000")
	assert.ErrorIs(t, err, webhooks.ErrNotFound, "an unknown message")
}
