package webhook_test

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

const (
	testSecret  = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	otherSecret = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
)

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

// testWebhooks is a database with a receiving server, and the settings of its surfaces.
type testWebhooks struct {
	pool       *pgxpool.Pool
	url        string           // of the server
	surface    *webhook.Surface // of the server
	env        map[string]string
	newSurface func() *webhook.Surface
}

// newTestWebhooks starts a server that receives deliveries. The environment has the secrets SECRET and NEXT.
func newTestWebhooks(t *testing.T) *testWebhooks {
	t.Helper()
	w := &testWebhooks{pool: pgtest.DB(t), env: map[string]string{"SECRET": testSecret, "NEXT": otherSecret}}
	w.newSurface = func() *webhook.Surface {
		return &webhook.Surface{
			Pool: w.pool, Logger: slog.New(slog.DiscardHandler), Getenv: func(name string) string { return w.env[name] },
			Backoff: func(int) time.Duration { return 20 * time.Millisecond },
		}
	}
	w.surface = w.newSurface()
	w.engine(t, w.surface)
	mux := http.NewServeMux()
	mux.Handle("POST /webhooks/{endpoint}", w.surface.Receive())
	mux.Handle("GET /webhooks/{endpoint}", w.surface.Challenge())
	mux.Handle("POST /v1/webhooks/deliveries/{id}/replay", w.surface.ReplayDelivery())
	w.url = testkit.Serve(t, mux)
	return w
}

// addAutomation declares an automation whose first runs cannot be started. No runner is registered, so its other runs
// are claimed and stay so.
func (w *testWebhooks) addAutomation(t *testing.T, name string, failures int) {
	t.Helper()
	_, err := automations.Put(t.Context(), w.pool, automations.Definition{Name: name, Cron: "0 0 1 1 *", Skill: "none"})
	require.NoError(t, err)
	pgtest.Exec(t, w.pool, `create sequence run_count`)
	pgtest.Exec(t, w.pool, fmt.Sprintf(`
		create function fail_run() returns trigger language plpgsql as $$
		begin
		  if nextval('run_count') <= %d then
		    raise exception 'the automation is out of order';
		  end if;
		  return new;
		end $$`, failures))
	pgtest.Exec(t, w.pool, `create trigger fail_run before insert
		on agent_automation_runs for each row execute function fail_run()`)
}

// engine returns an engine that is not running.
func (w *testWebhooks) engine(
	t *testing.T, s *webhook.Surface, more ...func(e *executions.Engine),
) (*executions.Engine, *lanes.Keeper) {
	t.Helper()
	keeper := lanes.NewKeeper(w.pool, lanes.Options{})
	e := enginetest.New(t, w.pool, func(o *executions.Options) { o.Keeper = keeper })
	require.NoError(t, s.Register(e))
	for _, f := range more {
		f(e)
	}
	return e, keeper
}

// runEngine runs a process until the test ends.
func (w *testWebhooks) runEngine(t *testing.T, more ...func(e *executions.Engine)) *executions.Engine {
	t.Helper()
	e, keeper := w.engine(t, w.newSurface(), more...)
	testkit.Run(t, e.Run, keeper.Run)
	return e
}

// addEndpoint declares an endpoint with default scheme, secret and action. The default action raises an event.
func (w *testWebhooks) addEndpoint(t *testing.T, d webhooks.EndpointDefinition) {
	t.Helper()
	if d.Scheme == "" {
		d.Scheme = signature.Standard
	}
	if d.Secrets == nil {
		d.Secrets = []string{"${SECRET}"}
	}
	if d.Actions == nil {
		d.Actions = []webhooks.Action{{Event: "EVENT_COMPLETED", Key: "{delivery}"}}
	}
	_, err := webhooks.PutEndpoint(t.Context(), w.pool, d)
	require.NoError(t, err)
}

type reply struct {
	status int
	header http.Header
	body   string
	webhook.Response
}

// post sends a request.
func (w *testWebhooks) post(t *testing.T, path string, h http.Header, body io.Reader) reply {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.url+path, body)
	require.NoError(t, err)
	for name, values := range h {
		r.Header[http.CanonicalHeaderKey(name)] = values
	}
	return w.do(t, r)
}

func (w *testWebhooks) do(t *testing.T, r *http.Request) reply {
	t.Helper()
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Error(err)
		return reply{}
	}
	defer func() { _ = response.Body.Close() }()
	raw, err := io.ReadAll(response.Body)
	assert.NoError(t, err)
	got := reply{status: response.StatusCode, header: response.Header, body: string(raw)}
	_ = json.Unmarshal(raw, &got.Response) // a problem leaves it empty
	return got
}

// signedHeaders returns the headers of Standard Webhooks, made by the official library.
func signedHeaders(t *testing.T, secret, id string, at time.Time, body []byte) http.Header {
	t.Helper()
	wh, err := standardwebhooks.NewWebhook(secret)
	require.NoError(t, err)
	text, err := wh.Sign(id, at, body)
	require.NoError(t, err)
	h := http.Header{}
	h.Set("webhook-id", id)
	h.Set("webhook-timestamp", fmt.Sprint(at.Unix()))
	h.Set("webhook-signature", text)
	return h
}

// send sends a message of Standard Webhooks.
func (w *testWebhooks) send(t *testing.T, endpoint, id, body string) reply {
	t.Helper()
	return w.post(t, "/webhooks/"+endpoint, signedHeaders(t, testSecret, id, time.Now(), []byte(body)),
		bytes.NewReader([]byte(body)))
}

// sendAccepted sends a message and expects it to be accepted.
func (w *testWebhooks) sendAccepted(t *testing.T, endpoint, id, body string) reply {
	t.Helper()
	got := w.send(t, endpoint, id, body)
	require.Equal(t, http.StatusAccepted, got.status, got.body)
	require.Truef(t, trace.ID(got.TraceID).Valid(), "trace id %q", got.TraceID)
	require.Equal(t, got.TraceID, got.header.Get("X-Trace-Id"))
	return got
}

func hmacHex(secret string, message []byte) string {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write(message)
	return hex.EncodeToString(mac.Sum(nil))
}

// waitStatus waits for a delivery to reach a status.
func (w *testWebhooks) waitStatus(t *testing.T, id, want string) (d webhooks.Delivery) {
	t.Helper()
	deadline := time.Now().Add(pgtest.Timeout)
	pgtest.Eventually(t, func() bool {
		var err error
		d, err = webhooks.Get(t.Context(), w.pool, id)
		return err == nil && d.Status == want || time.Now().After(deadline.Add(-time.Second))
	}, "delivery "+id+" becomes "+want)
	require.Equal(t, want, d.Status, id, postgres.Deref(d.ErrorMessage))
	return d
}
