package operate_test

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// keyed sends a turn under an Idempotency-Key, straight to the surface: as a request comes here again when the process
// of the first attempt is dead.
func (p *process) keyed(t *testing.T, key, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.http.URL+"/v1/operate", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Idempotency-Key", key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

func TestARequestWithAKeyIsOneTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Two."))
	p, other := w.process(t, false), w.process(t, false)
	events, _ := readEvents(p.keyed(t, "k", `{"message":"Hello."}`).Body, nil)
	start := read[operate.Start](t, events, "start")
	pgtest.Eventually(t, patience, func() bool { return w.held(t) == "" }, "the lane is freed")
	resp := other.keyed(t, "k", `{"message":"Hello."}`)
	got := decode[problem.Problem](t, resp.Body)
	if resp.StatusCode != http.StatusConflict || !strings.HasSuffix(got.Type, ":idempotency-key-used") || got.TraceID != start.TraceID ||
		!strings.Contains(got.Detail, start.SessionID) {
		t.Errorf("the same again: %d, %+v", resp.StatusCode, got)
	}
	if events, _ := readEvents(other.keyed(t, "k", `{"message":"Hello you."}`).Body, nil); named(events) != "start delta done" {
		t.Errorf("another message: %s", named(events))
	}
}

func TestRequestsWithAKeyThatWaitForTheLaneAreOneTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Hello."))
	p := w.process(t, false)
	first := p.open(t, "ses_one")
	if err := first.Hold(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	var got [2][]sse
	var reading sync.WaitGroup
	for i := range got {
		body := p.keyed(t, "k", `{"message":"Hello.","wait":true}`).Body // it waits: neither has begun
		reading.Go(func() { got[i], _ = readEvents(body, nil) })
	}
	if err := first.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	reading.Wait()
	if named(got[0]) == "error" {
		got[0], got[1] = got[1], got[0]
	}
	if named(got[0]) != "start delta done" || named(got[1]) != "error" {
		t.Fatalf("events are %s and %s", named(got[0]), named(got[1]))
	}
	refused, start := read[problem.Problem](t, got[1], "error"), read[operate.Start](t, got[0], "start")
	if !strings.HasSuffix(refused.Type, ":idempotency-key-used") || refused.TraceID != start.TraceID {
		t.Errorf("the second was told %+v", refused)
	}
	if n := value[int](t, w.pool, `select count(*) from agent_threads`); n != 1 {
		t.Errorf("%d sessions", n)
	}
}

func TestARequestWhoseTurnFailedOrIsOldMayBeSentAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Refusal(401, "invalid_request_error", "", "Incorrect API key provided", 0), modeltest.Text("Now."), modeltest.Text("And now."))
	p := w.process(t, false)
	for _, want := range []string{"start error", "start delta done"} {
		if events, _ := readEvents(p.keyed(t, "k", `{"message":"Hello."}`).Body, nil); named(events) != want {
			t.Fatalf("events are %s, not %s", named(events), want)
		}
		pgtest.Eventually(t, patience, func() bool { return w.held(t) == "" }, "the lane is freed")
	}
	if resp := p.keyed(t, "k", `{"message":"Hello."}`); resp.StatusCode != http.StatusConflict {
		t.Errorf("after the turn that did not fail: %d", resp.StatusCode)
	}
	exec(t, w.pool, `update agent_executions set created_at = created_at - interval '1 day'`)
	if events, _ := readEvents(p.keyed(t, "k", `{"message":"Hello."}`).Body, nil); named(events) != "start delta done" {
		t.Errorf("a day later: %s", named(events))
	}
}
