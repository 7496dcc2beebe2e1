package webhook_test

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	stripe "github.com/stripe/stripe-go/v85/webhook"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func header(pairs ...string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Set(pairs[i], pairs[i+1])
	}
	return h
}

func TestSignatureSchemes(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	event := []byte(`{"id": "evt_1",  "type":"invoice.paid", "number": 1.10}`)
	w.env["GITHUB"] = "It's a Secret to Everybody"
	for name, c := range map[string]struct {
		d    webhooks.EndpointDefinition
		h    http.Header
		body []byte
		id   string
	}{
		"standard": {webhooks.EndpointDefinition{}, signedHeaders(t, testSecret, "msg_1", time.Now(), event), event, "msg_1"},
		"github": {
			webhooks.EndpointDefinition{Scheme: signature.GitHub, Secrets: []string{"${GITHUB}"}, Format: webhooks.FormatText},
			header("X-GitHub-Delivery", "72d3162e-cc78-11e3-81ab-4c9367dc0958", "X-GitHub-Event", "ping",
				"X-Hub-Signature-256", "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"),
			[]byte("Hello, World!"), "72d3162e-cc78-11e3-81ab-4c9367dc0958",
		},
		"stripe": {
			webhooks.EndpointDefinition{Scheme: signature.Stripe}, header("Stripe-Signature", stripe.GenerateTestSignedPayload(
				&stripe.UnsignedPayload{Payload: event, Secret: testSecret, Timestamp: time.Now()}).Header), event, "evt_1",
		},
		"hmac": {
			webhooks.EndpointDefinition{Scheme: signature.HMAC, ID: "body.type"},
			header("X-Signature", hmacHex(testSecret, event)),
			event, "invoice.paid",
		},
		"svix": {
			webhooks.EndpointDefinition{}, func() http.Header {
				h := signedHeaders(t, testSecret, "msg_svix", time.Now(), event)
				return header("svix-id", "msg_svix", "svix-timestamp", h.Get("webhook-timestamp"),
					"svix-signature", h.Get("webhook-signature"))
			}(), event, "msg_svix",
		},
		"hmac-id": {
			webhooks.EndpointDefinition{
				Scheme: signature.HMAC,
				HMAC:   webhooks.HMAC{IDHeader: "X-Id", Signed: "{id}/{body}"},
			},
			header("X-Id", "order 7", "X-Signature", hmacHex(testSecret, append([]byte("order 7/"), event...))),
			event, "order 7",
		},
		"bearer": {
			webhooks.EndpointDefinition{Scheme: signature.Bearer},
			header("Authorization", "Bearer "+testSecret), event,
			"sha256:" + sha256Hex(event),
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := c.d
			d.Name = name
			w.addEndpoint(t, d)
			c.h.Set("traceparent", parent)
			c.h.Set("Cookie", "session=secret-cookie")
			got := w.post(t, "/webhooks/"+name, c.h, bytes.NewReader(c.body))
			require.Truef(t, got.status == http.StatusAccepted && got.DeliveryID == c.id &&
				strings.HasPrefix(got.TraceID, "wh_"), "answer %d %s", got.status, got.body)
			stored, err := webhooks.Get(t.Context(), w.pool, pgtest.Value[string](t, w.pool,
				`select id::text from agent_webhook_deliveries where endpoint = $1 and delivery_id = $2`, name, c.id))
			require.NoError(t, err)
			body, err := webhooks.Body(t.Context(), w.pool, stored.ID)
			assert.Truef(t, err == nil && bytes.Equal(body, c.body), "stored %q, %v", body, err)
			assert.Truef(t, stored.TraceID == got.TraceID &&
				stored.Traceparent == parent && stored.BodySHA256 == sha256Hex(c.body) &&
				stored.ExecutionID != nil, "stored %+v", stored)
			pgtest.Equal(t, w.pool, parent, `select string_agg(traceparent, ' ') from agent_trace_links where trace_id = $1`,
				got.TraceID)
			for _, secret := range []string{testSecret, "secret-cookie", "757107ea", hmacHex(testSecret, event)} {
				assert.Truef(t, !strings.Contains(string(stored.Headers), secret),
					"the headers have %q: %s", secret, stored.Headers)
			}
			pgtest.Equal(t, w.pool, "webhook webhook background pending",
				`select flow || ' ' || surface || ' ' || queue || ' ' || status from agent_executions where trace_id = $1`,
				got.TraceID)
		})
	}
}

// Slack verifies an address with a signed body, Meta with a GET. The surface answers both and stores no delivery.
func TestChallenges(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	w.env["META"] = "verify-me"
	slack := webhooks.HMAC{
		Header: "X-Slack-Signature", Prefix: "v0=", TimestampHeader: "X-Slack-Request-Timestamp",
		Signed: "v0:{timestamp}:{body}",
	}
	w.addEndpoint(t, webhooks.EndpointDefinition{
		Name: "slack", Scheme: signature.HMAC, HMAC: slack, ID: "body.event_id", Challenge: webhooks.ChallengeSlack,
	})
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "plain", Scheme: signature.HMAC, HMAC: slack})
	w.addEndpoint(t, webhooks.EndpointDefinition{
		Name: "meta", Scheme: signature.GitHub, ID: webhooks.Digest,
		Challenge: webhooks.ChallengeMeta, VerifyToken: "${META}",
	})
	body := []byte(`{"token":"x","challenge":"3eZbrw1a","type":"url_verification"}`)
	sign := func(secret string) http.Header {
		at := fmt.Sprint(time.Now().Unix())
		return header("X-Slack-Request-Timestamp", at,
			"X-Slack-Signature", "v0="+hmacHex(secret, append([]byte("v0:"+at+":"), body...)))
	}
	got := w.post(t, "/webhooks/slack", sign(testSecret), bytes.NewReader(body))
	assert.Truef(t, got.status == http.StatusOK && strings.TrimSpace(got.body) == `{"challenge":"3eZbrw1a"}`,
		"Slack: %d %s", got.status, got.body)
	got = w.post(t, "/webhooks/slack", sign(otherSecret), bytes.NewReader(body))
	assert.Equal(t, http.StatusUnauthorized, got.status, "unsigned", got.body)
	pgtest.Equal(t, w.pool, 0, `select count(*) from agent_webhook_deliveries`)
	got = w.post(t, "/webhooks/plain", sign(testSecret), bytes.NewReader(body))
	assert.Equal(t, http.StatusAccepted, got.status, "without the setting the request is no delivery", got.body)
	for query, want := range map[string]int{
		"meta?hub.mode=subscribe&hub.verify_token=verify-me&hub.challenge=<b>1158":     200,
		"meta?hub.mode=subscribe&hub.verify_token=verify-yo&hub.challenge=1":           403,
		"meta?hub.mode=subscribe&hub.challenge=1":                                      403,
		"meta?hub.mode=unsubscribe&hub.verify_token=verify-me&hub.challenge=1":         400,
		"meta?hub.mode=subscribe&hub.verify_token=verify-me":                           400,
		"plain?hub.mode=subscribe&hub.verify_token=" + testSecret + "&hub.challenge=1": 404,
		"none?hub.mode=subscribe&hub.verify_token=verify-me&hub.challenge=1":           404,
		"slack?hub.mode=subscribe&hub.verify_token=verify-me&hub.challenge=1":          404,
		"meta?hub.mode=subscribe&hub.verify_token=verify-me&hub.challenge=1&more=true": 200,
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url+"/webhooks/"+query, nil)
		require.NoError(t, err)
		got := w.do(t, r)
		if got.status != want || want == 200 && (!strings.HasPrefix(got.header.Get("Content-Type"), "text/plain") ||
			got.body != r.URL.Query().Get("hub.challenge")) {
			t.Errorf("%s: %d %s", query, got.status, got.body)
		}
		assert.Truef(t, !strings.Contains(got.body, "verify-me"), "%s: the answer has the token: %s", query, got.body)
	}
}

func sha256Hex(body []byte) string {
	return fmt.Sprintf("%x", sha256.Sum256(body))
}

func TestConcurrentDeliveries(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "storm"})
	w.runEngine(t)
	var accepted atomic.Int32
	traces := make([]string, 50)
	var group sync.WaitGroup
	for i := range traces {
		group.Go(func() {
			got := w.send(t, "storm", "msg_same", `{"a":1}`)
			traces[i] = got.TraceID
			switch got.status {
			case http.StatusAccepted:
				accepted.Add(1)
			case http.StatusOK:
			default:
				t.Errorf("answer %d %s", got.status, got.body)
			}
		})
	}
	group.Wait()
	for _, id := range traces {
		require.Truef(t, id == traces[0] && id != "", "traces differ: %v", traces)
	}
	d := w.waitStatus(t, "msg_same", webhooks.Done)
	assert.Truef(t, accepted.Load() == 1 && d.Repeats == 49, "%d accepted, %d repeats", accepted.Load(), d.Repeats)
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_executions where surface = 'webhook'`)
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_events where event = 'EVENT_COMPLETED' and key = 'msg_same'`)
	later := w.send(t, "storm", "msg_same", `{"a":1}`)
	assert.Truef(t, later.status == http.StatusOK && later.TraceID == traces[0], "later: %d %s", later.status, later.body)
}

func TestUnauthenticatedDeliveryIsNotStored(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "strict"})
	body := []byte(`{"a":1}`)
	for name, h := range map[string]http.Header{
		"no signature": {},
		"forged":       signedHeaders(t, otherSecret, "msg", time.Now(), body),
		"late":         signedHeaders(t, testSecret, "msg", time.Now().Add(-6*time.Minute), body),
		"future":       signedHeaders(t, testSecret, "msg", time.Now().Add(6*time.Minute), body),
		"other body":   signedHeaders(t, testSecret, "msg", time.Now(), []byte(`{"a":2}`)),
	} {
		got := w.post(t, "/webhooks/strict", h, bytes.NewReader(body))
		assert.Truef(t, got.status == http.StatusUnauthorized && got.header.Get("Content-Type") == "application/problem+json",
			"%s: %d %s", name, got.status, got.body)
	}
	pgtest.Equal(t, w.pool, 0, `select (select count(*) from agent_webhook_deliveries) + (select count(*)
		from agent_executions)`)
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_activity where skill_name = 'webhook_refused'
		and trace_id like 'wh_%'`)
}

// Strangers choose the names in the paths of their requests.
func TestBusyEndpointIsCounted(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "storm"})
	var counted []string
	w.surface.Received = func(endpoint, result string) { counted = append(counted, endpoint+" "+result) }
	w.send(t, "storm", "msg_1", `{"a":1}`)
	for _, name := range []string{"storm", "guess", "storm"} {
		r := httptest.NewRequestWithContext(t.Context(), "POST", "/webhooks/"+name, nil)
		r.SetPathValue("endpoint", name)
		w.surface.Busy(r)
	}
	assert.Equal(t, "[storm accepted storm busy storm busy]", fmt.Sprint(counted))
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_activity where skill_name = 'webhook_refused'
		and error_class = 'busy' and input->>'endpoint' = 'storm'`)
}

func TestInvalidBodies(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "small", MaxBytes: 100})
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "off"})
	_, err := webhooks.SetEndpoint(t.Context(), w.pool, "off", false, "admin", "not now")
	require.NoError(t, err)
	big := `{"a":"` + strings.Repeat("x", 200) + `"}`
	for name, c := range map[string]struct {
		endpoint, body, contentType string
		chunked                     bool
		want                        int
	}{
		"at the limit":                  {"small", `{"a":"` + strings.Repeat("x", 92) + `"}`, "application/json", false, 202},
		"too large":                     {"small", big, "application/json", false, 413},
		"too large, without a length":   {"small", big, "application/json", true, 413},
		"chunked without a length":      {"small", `{"chunked":1}`, "application/json", true, 202},
		"not JSON":                      {"small", `{"a":`, "application/json", false, 400},
		"two values":                    {"small", `{} {}`, "application/json", false, 400},
		"nothing":                       {"small", ``, "application/json", false, 400},
		"not UTF-8":                     {"small", "{\"a\":\"\xff\"}", "application/json", false, 400},
		"a form":                        {"small", `payload=%7B%7D`, "application/x-www-form-urlencoded", false, 400},
		"JSON with a form content type": {"small", `{"form":1}`, "application/x-www-form-urlencoded", false, 202},
		"unknown endpoint":              {"none", `{}`, "application/json", false, 404},
		"disabled endpoint":             {"off", `{}`, "application/json", false, 404},
		"an invalid name":               {"..%2f..", `{}`, "application/json", false, 404},
		"a name with NUL":               {"a%00", `{}`, "application/json", false, 404},
		"a name that is not UTF-8":      {"a%ff", `{}`, "application/json", false, 404},
		"JSON with \\u0000":             {"small", `{"a":"\u0000"}`, "application/json", false, 202},
	} {
		t.Run(name, func(t *testing.T) {
			h := signedHeaders(t, testSecret, "msg_"+strings.ReplaceAll(name, " ", "_"), time.Now(), []byte(c.body))
			h.Set("Content-Type", c.contentType)
			var body io.Reader = strings.NewReader(c.body)
			if c.chunked {
				body = io.MultiReader(body) // of unknown length
			}
			got := w.post(t, "/webhooks/"+c.endpoint, h, body)
			assert.Equal(t, c.want, got.status, got.body)
			assert.Truef(t, c.want < 400 || got.header.Get("Content-Type") == "application/problem+json",
				"content type %s", got.header.Get("Content-Type"))
			assert.Truef(t, name != "a form" || strings.Contains(got.body, "choose the content type application/json"),
				"answer %s", got.body)
		})
	}
	pgtest.Equal(t, w.pool, 4, `select count(*) from agent_webhook_deliveries`)
}

func TestTruncatedBody(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "cut"})
	body := `{"a":1}`
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(w.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	h := signedHeaders(t, testSecret, "msg_cut", time.Now(), []byte(body))
	fmt.Fprintf(conn, "POST /webhooks/cut HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n", len(body)+10)
	require.NoError(t, h.Write(conn))
	fmt.Fprintf(conn, "\r\n%s", body)
	require.NoError(t, conn.(*net.TCPConn).CloseWrite())
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer func() { _ = response.Body.Close() }()
	assert.Equal(t, http.StatusBadRequest, response.StatusCode, response.Status)
	pgtest.Equal(t, w.pool, 0, `select count(*) from agent_webhook_deliveries`)
}

// Several bodies have one delivery id: the first is handled, the others are stored as conflicts.
func TestConflictingBodyIsStored(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "twice"})
	var log testkit.Log
	var err error
	w.surface.Logger, err = logging.New(&log, "json", "info")
	require.NoError(t, err)
	w.runEngine(t)
	first := w.sendAccepted(t, "twice", "msg_1", `{"order": 7, "note": "a"}`)
	for body, conflict := range map[string]bool{
		`{"order": 7, "note": "a"}`: false,
		`{"note":"a","order":7}`:    false, // the same value in another encoding
		`{"order": 8, "note": "a"}`: true,
	} {
		got := w.send(t, "twice", "msg_1", body)
		assert.Truef(t, got.status == http.StatusOK && got.TraceID == first.TraceID && got.Conflict == conflict,
			"%s: answer %d %s", body, got.status, got.body)
	}
	for i := range 9 { // 100 to 103 twice, 104 once
		w.send(t, "twice", "msg_1", fmt.Sprintf(`{"order": %d}`, 100+i/2))
	}
	d, err := webhooks.Get(t.Context(), w.pool, "msg_1")
	assert.Truef(t, err == nil && d.Repeats == 12 && d.Conflicts == 10,
		"%d repeats, %d conflicts (%v), want 12 and 10", d.Repeats, d.Conflicts, err)
	shown, err := webhook.Show(t.Context(), w.pool, d)
	require.NoError(t, err)
	require.Equal(t, 5, len(shown.OtherBodies), shown)
	body := strings.ReplaceAll(string(shown.OtherBodies[0].Body), " ", "")
	assert.Contains(t, body, `"order":8`)
	pgtest.Equal(t, w.pool, 5, `
		select count(*) from agent_activity where trace_id = $1 and skill_name = 'webhook_conflict' and status = 'error'
		  and error_class = 'conflict'`,
		first.TraceID)
	w.waitStatus(t, d.ID, "done")
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_executions where flow = 'webhook'`)
	repeated := 0
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "webhook repeated") {
			repeated++
			assert.Contains(t, line, `"trace_id":"`+first.TraceID+`"`)
		}
	}
	assert.Equal(t, 12, repeated)
}

func TestStripeRetriesAreNoConflict(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "pay", Scheme: signature.Stripe})
	for i, c := range []struct {
		body     string
		status   int
		conflict bool
	}{
		{`{"id": "evt_1", "pending_webhooks": 2, "data": {"pending_webhooks": 1}}`, 202, false},
		{`{"id": "evt_1", "pending_webhooks": 1, "data": {"pending_webhooks": 1}}`, 200, false},
		{`{"id": "evt_1", "pending_webhooks": 1, "data": {"pending_webhooks": 2}}`, 200, true},
	} {
		got := w.post(t, "/webhooks/pay", header("Stripe-Signature", stripe.GenerateTestSignedPayload(
			&stripe.UnsignedPayload{Payload: []byte(c.body), Secret: testSecret, Timestamp: time.Now()}).Header),
			strings.NewReader(c.body))
		assert.Equal(t, c.status, got.status, i, got.body)
		assert.Equal(t, c.conflict, got.Conflict, i, got.body)
	}
}

// Slack signs a retry with a new time, so the endpoint names the event's id.
func TestSlackRetriesAreOneDelivery(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	w.addEndpoint(t, webhooks.EndpointDefinition{
		Name: "slack", Scheme: signature.HMAC, ID: "body.event_id", Challenge: webhooks.ChallengeSlack,
		HMAC: webhooks.HMAC{
			Header: "X-Slack-Signature", Prefix: "v0=", TimestampHeader: "X-Slack-Request-Timestamp",
			Signed: "v0:{timestamp}:{body}",
		},
	})
	const body = `{"type": "event_callback", "event_id": "Ev1", "event": {"type": "message"}}`
	for i, status := range []int{http.StatusAccepted, http.StatusOK} {
		at := fmt.Sprint(time.Now().Unix() - 60 + 60*int64(i))
		got := w.post(t, "/webhooks/slack", header("X-Slack-Request-Timestamp", at,
			"X-Slack-Signature", "v0="+hmacHex(testSecret, []byte("v0:"+at+":"+body))), strings.NewReader(body))
		assert.Truef(t, got.status == status && got.DeliveryID == "Ev1" && !got.Conflict, "%d %s", got.status, got.body)
	}
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_executions where flow = 'webhook'`)
}

func TestSecretRotation(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	define := func(secrets ...string) {
		w.addEndpoint(t, webhooks.EndpointDefinition{Name: "rotate", Secrets: secrets})
	}
	body := []byte(`{}`)
	for i, c := range []struct {
		secrets []string
		signer  string
		want    int
	}{
		{[]string{"${SECRET}"}, testSecret, 202},
		{[]string{"${SECRET}", "${NEXT}"}, testSecret, 202},
		{[]string{"${SECRET}", "${NEXT}"}, otherSecret, 202},
		{[]string{"${NEXT}"}, otherSecret, 202},
		{[]string{"${NEXT}"}, testSecret, 401},
		{[]string{"${MISSING}"}, testSecret, 500}, // a setup error, so the sender retries
		{[]string{"${SECRET}", "${MISSING}"}, testSecret, 202},
		{[]string{"${SECRET}", "${MISSING}"}, otherSecret, 500}, // the missing one may have signed it
	} {
		define(c.secrets...)
		got := w.post(t, "/webhooks/rotate", signedHeaders(t, c.signer, fmt.Sprint("msg_", i), time.Now(), body),
			bytes.NewReader(body))
		assert.Truef(t, got.status == c.want && !strings.Contains(got.body, "MISSING"),
			"%d: answer %d %s, want %d", i, got.status, got.body, c.want)
	}
}

// Requests to an endpoint without a secret do not fill the log.
func TestMissingSecretIsLoggedOnce(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	var log bytes.Buffer
	w.surface.Logger = slog.New(slog.NewTextHandler(&log, nil))
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "unset", Secrets: []string{"${MISSING}"}})
	for range 50 {
		got := w.post(t, "/webhooks/unset", signedHeaders(t, testSecret, "msg_1", time.Now(), []byte("{}")),
			strings.NewReader("{}"))
		require.Truef(t, got.status == 500 && !strings.Contains(got.body, "MISSING"), "answer %d %s", got.status, got.body)
	}
	n := strings.Count(log.String(), "\n")
	assert.Truef(t, n == 1 && strings.Contains(log.String(), "level=ERROR") && strings.Contains(log.String(), "MISSING"),
		"%d lines:\n%s", n, &log)
}

// A failed transaction is not acknowledged. The sender's retry counts as the first.
func TestStorageFailureIsNotAcknowledged(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "lost"})
	pgtest.Exec(t, w.pool, `alter table agent_executions add constraint broken check (flow <> 'webhook')`)
	got := w.send(t, "lost", "msg_1", `{}`)
	assert.Truef(t, got.status == http.StatusInternalServerError && !strings.Contains(got.body, "broken"),
		"answer %d %s", got.status, got.body)
	pgtest.Equal(t, w.pool, 0, `select count(*) from agent_webhook_deliveries`)
	pgtest.Exec(t, w.pool, `alter table agent_executions drop constraint broken`)
	w.sendAccepted(t, "lost", "msg_1", `{}`)
}

// After many wrong bearer tokens from an address, the guard throttles weak tokens from it, but no strong ones.
func TestWrongTokensAreThrottled(t *testing.T) {
	t.Parallel()
	w := newTestWebhooks(t)
	w.env["WEAK"], w.env["TINY"] = "correct-horse-17", "abc"
	for name, secret := range map[string]string{"strong": "${SECRET}", "weak": "${WEAK}", "tiny": "${TINY}"} {
		w.addEndpoint(t, webhooks.EndpointDefinition{Name: name, Scheme: signature.Bearer, Secrets: []string{secret}})
	}
	post := func(endpoint, token string) reply {
		return w.post(t, "/webhooks/"+endpoint, http.Header{"Authorization": {"Bearer " + token}}, strings.NewReader(`{}`))
	}
	got := post("weak", w.env["WEAK"])
	assert.Equal(t, http.StatusAccepted, got.status, "a right token", got.body)
	got = post("tiny", w.env["TINY"])
	assert.Equal(t, http.StatusInternalServerError, got.status, "a token that is too weak", got.body)
	statuses := map[int]int{}
	for range 200 {
		got := post("weak", "sesame-sesame-sesame")
		statuses[got.status]++
		require.True(t, got.status != http.StatusTooManyRequests || got.header.Get("Retry-After") != "",
			"the response has no Retry-After")
	}
	assert.Truef(t, statuses[401] >= 5 && statuses[401] <= 20 && statuses[401]+statuses[429] == 200,
		"the answers are %v", statuses)
	pgtest.Eventually(t, func() bool { // on a slow machine the guard may allow another guess
		post("weak", "sesame-sesame-sesame")
		return post("weak", w.env["WEAK"]).status == http.StatusTooManyRequests
	}, "a weak token from an address that guesses is refused")
	got = post("strong", testSecret)
	assert.Equal(t, http.StatusAccepted, got.status, "a strong token from there", got.body)
}

// TestConcurrentDuplicates sends every delivery twice, out of order, to a server. Two engines run the deliveries,
// with automations that fail at first.
func TestConcurrentDuplicates(t *testing.T) {
	t.Parallel()
	const deliveries, senders = 200, 16
	w := newTestWebhooks(t)
	w.addAutomation(t, "work", 20)
	w.addEndpoint(t, webhooks.EndpointDefinition{Name: "storm", MaxAttempts: 20, Actions: []webhooks.Action{
		{Event: "EVENT_COMPLETED", Key: "storm-{body.n}"}, {Automation: "work"},
	}})
	w.runEngine(t)
	w.runEngine(t)
	numbers := make(chan int, 2*deliveries)
	for i := range 2 * deliveries {
		numbers <- (i * 7) % deliveries
	}
	close(numbers)
	var mu sync.Mutex
	var latencies []time.Duration
	codes := map[int]int{}
	var group sync.WaitGroup
	for range senders {
		group.Go(func() {
			for i := range numbers {
				start := time.Now()
				got := w.send(t, "storm", fmt.Sprint("msg_", i), fmt.Sprintf(`{"n":%d}`, i))
				mu.Lock()
				latencies = append(latencies, time.Since(start))
				codes[got.status]++
				mu.Unlock()
			}
		})
	}
	group.Wait()
	slices.Sort(latencies)
	t.Logf("acknowledged in p50 %s, p99 %s, with %d senders", latencies[len(latencies)/2],
		latencies[len(latencies)*99/100], senders)
	require.Truef(t, codes[http.StatusAccepted] == deliveries && codes[http.StatusOK] == deliveries, "answers %v", codes)
	pgtest.Until(t, w.pool, deliveries, `select count(*) from agent_executions where flow = 'webhook'
		and status = 'completed'`)
	for what, sql := range map[string]string{
		"each is done": `select count(*) = 200 from agent_webhook_deliveries where status = 'done'
			and repeats = 1`,
		"one event each": `select count(*) = 200 and count(distinct key) = 200 from agent_events
			where event = 'EVENT_COMPLETED'`,
		"one run each": `select count(*) = 200 from agent_automation_runs`,
		"a trace each": `select count(distinct trace_id) = 200 from agent_executions`,
		"each trace is complete": `select count(*) = 200
			from (select trace_id from agent_activity where skill_name = 'webhook_action' and status = 'success'
			group by 1 having count(*) = 2) x`,
		"the 20 failures are recorded": `select count(*) = 20 from agent_activity where skill_name = 'webhook_action'
			and status = 'error'`,
		"nothing is left running": `select count(*) = 0 from agent_activity where status = 'running'`,
		"no lane is held":         `select count(*) = 0 from agent_locks_live`,
		"nothing under an unknown trace": `select count(*) = 0 from agent_activity a
			where not exists (select from agent_executions x where x.trace_id = a.trace_id)`,
	} {
		assert.Truef(t, pgtest.Value[bool](t, w.pool, sql), "not so: %s", what)
	}
}
