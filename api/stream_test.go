package api_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/trace"
)

// listen serves the API on a port; change may adjust the server.
func (a *agent) listen(change func(*http.Server)) *httptest.Server {
	a.t.Helper()
	server := httptest.NewUnstartedServer(nil)
	server.Config = api.Server(a.handler, slog.New(slog.DiscardHandler))
	if change != nil {
		change(server.Config)
	}
	server.Start()
	a.t.Cleanup(server.Close)
	return server
}

// call sends a request to a listening server.
func (a *agent) call(ctx context.Context, method, url, key string) *http.Response {
	a.t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, url, http.NoBody)
	require.NoError(a.t, err)
	r.Header = bearer(key)
	answer, err := http.DefaultClient.Do(r)
	require.NoError(a.t, err)
	a.t.Cleanup(func() { _ = answer.Body.Close() })
	return answer
}

func stream(h http.HandlerFunc) api.Endpoint {
	return api.Endpoint{
		Method: "GET", Path: "/v1/stream", About: "A stream.", Access: api.Admin, Scope: principals.Operate,
		ContentType: "text/event-stream",
		Stream:      true, Handler: h,
	}
}

func TestRequestDeadlines(t *testing.T) {
	t.Parallel()
	deadline := func(w http.ResponseWriter, r *http.Request) {
		_, has := r.Context().Deadline()
		fmt.Fprint(w, has)
	}
	a := withEndpoints(t, stream(deadline), api.Endpoint{
		Method: "GET", Path: "/v1/plain", About: "None.", Access: api.Admin, Scope: principals.Operate,
		Handler: http.HandlerFunc(deadline),
	})
	for path, want := range map[string]string{"/v1/stream": "false", "/v1/plain": "true"} {
		assert.Equal(t, want, a.raw("GET", path, "", asAdmin()).Body.String(), path)
	}
}

func TestStreamOutlastsTimeouts(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t, stream(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for i := range 12 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			select {
			case <-tick.C:
			case <-r.Context().Done():
				return
			}
		}
		fmt.Fprint(w, "data: end\n\n")
	}))
	server := a.listen(func(s *http.Server) { s.ReadTimeout, s.WriteTimeout = 200*time.Millisecond, 200*time.Millisecond })
	answer := a.call(t.Context(), "GET", server.URL+"/v1/stream", token)
	defer answer.Body.Close()
	got, err := io.ReadAll(answer.Body)
	assert.Truef(t, err == nil && strings.HasSuffix(string(got), "data: end\n\n"), "%q, %v", got, err)
}

func TestStreamEndsOnDisconnect(t *testing.T) {
	t.Parallel()
	ended := make(chan error, 1)
	a := withEndpoints(t, stream(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, ": \n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		ended <- context.Cause(r.Context())
	}))
	server := a.listen(nil)
	ctx, cancel := context.WithCancel(t.Context())
	answer := a.call(ctx, "GET", server.URL+"/v1/stream", token)
	defer answer.Body.Close()
	_, err := bufio.NewReader(answer.Body).ReadString('\n')
	require.NoError(t, err)
	cancel()
	select {
	case cause := <-ended:
		assert.Truef(t, !errors.Is(cause, executions.ErrDraining), "cause is %v", cause)
	case <-time.After(pgtest.Timeout):
		t.Fatal("the stream did not end")
	}
}

// At shutdown, watching streams end first. A streamed response continues until the grace period ends.
func TestShutdownCutsResponsesLast(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	stopping, forceStop, ended := make(chan struct{}), make(chan struct{}), make(chan error, 2)
	wait := func(_ http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		ended <- fmt.Errorf("%s: %w", r.URL.Path, context.Cause(r.Context()))
	}
	answering := stream(wait)
	answering.Path, answering.Finite = "/v1/answer", true
	a := newAgentWith(t, api.Options{
		Pool: pool, Engine: engine(t, pool), Stopping: stopping, ForceStop: forceStop,
		Endpoints: []api.Endpoint{stream(wait), answering},
	})
	server := a.listen(nil)
	done := make(chan struct{}, 2)
	for _, path := range []string{"/v1/stream", "/v1/answer"} {
		go func() {
			defer func() { done <- struct{}{} }()
			_ = a.call(t.Context(), "GET", server.URL+path, token).Body.Close()
		}()
	}
	close(stopping)
	if cause := <-ended; !strings.HasPrefix(cause.Error(), "/v1/stream") || !errors.Is(cause, executions.ErrDraining) {
		t.Errorf("first ended %v", cause)
	}
	if len(ended) > 0 {
		t.Errorf("the answer ended too: %v", <-ended)
	}
	close(forceStop)
	if cause := <-ended; !strings.HasPrefix(cause.Error(), "/v1/answer") || !errors.Is(cause, executions.ErrDraining) {
		t.Errorf("then ended %v", cause)
	}
	<-done
	<-done
}

// At shutdown a follower gets a short reconnect delay.
func TestFollowersReconnectAfterShutdown(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	stopping := make(chan struct{})
	a := newAgentWith(t, api.Options{Pool: pool, Engine: engine(t, pool), Stopping: stopping})
	server := a.listen(nil)
	x := a.startExternal("")
	answer := a.call(t.Context(), "GET", server.URL+"/v1/executions/"+x.ID+"/events", token)
	close(stopping)
	body, err := io.ReadAll(answer.Body)
	assert.Truef(t, err == nil && strings.Contains(string(body), `"status":"pending"`) &&
		strings.HasSuffix(string(body), "\n\nretry: 1000\n\n"), "the stream was %q, %v", body, err)
}

func TestHeadOfStream(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t, stream(func(http.ResponseWriter, *http.Request) { t.Error("the stream was opened") }))
	w := a.raw("HEAD", "/v1/stream", "", asAdmin())
	assert.Truef(t, w.Code == 200 && w.Header().Get("Content-Type") == "text/event-stream" && w.Body.Len() == 0,
		"%d %v %s", w.Code, w.Header(), w.Body)
}

func TestHeaderLimit(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	server := a.listen(nil)
	r, err := http.NewRequestWithContext(t.Context(), "GET", server.URL+"/healthz", http.NoBody)
	require.NoError(t, err)
	r.Header.Set("X-Large", strings.Repeat("x", 64<<10))
	answer, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer answer.Body.Close()
	assert.Equal(t, http.StatusRequestHeaderFieldsTooLarge, answer.StatusCode)
}

// readEvent reads the next event of a stream and skips comments.
func readEvent(t *testing.T, lines *bufio.Scanner) map[string]string {
	t.Helper()
	got := map[string]string{}
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ": ")
		switch {
		case lines.Text() == "" && len(got) > 0:
			return got
		case name != "":
			got[name] = value
		}
	}
	return got
}

func TestStatusStreamEndsWithExecution(t *testing.T) {
	t.Parallel()
	a := start(t)
	server := a.listen(nil)
	x := a.start("beat", trace.New(trace.Flow))
	url := server.URL + "/v1/executions/" + x.ID + "/events"
	answer := a.call(t.Context(), "GET", url, token)
	defer answer.Body.Close()
	assert.Truef(t, answer.Header.Get("Content-Type") == "text/event-stream" &&
		answer.Header.Get("X-Trace-Id") == x.TraceID, "header is %v", answer.Header)
	lines := bufio.NewScanner(answer.Body)
	var last map[string]string
	for _, step := range []struct {
		status string
		then   func()
	}{
		{"pending", func() { a.claim(x) }},
		{"running", func() {
			pgtest.Exec(t, a.pool, `update agent_executions set status = 'waiting', claim = claim + 1, waiting_for = 'event',
				waiting_key = 'k',
				waiting_until = '2999-01-01' where id = @id`, postgres.Strict{"id": x.ID})
		}},
		{"waiting", func() {
			_, err := a.engine.Cancel(t.Context(), x.ID, "admin", "enough")
			require.NoError(t, err)
		}},
		{"cancelled", func() {}},
	} {
		last = readEvent(t, lines)
		require.Truef(t, last["event"] == "status" && last["id"] != "" &&
			strings.Contains(last["data"], `"status":"`+step.status+`"`) && strings.Contains(last["data"], `"id":"`+x.ID+`"`) &&
			strings.Contains(last["data"], `"at":"`), "event is %v, want %s", last, step.status)
		if step.status == "waiting" {
			<-time.After(700 * time.Millisecond) // several polls see this state; the stream sends it once
		}
		step.then()
	}
	more := readEvent(t, lines)
	assert.Truef(t, len(more) == 0 && lines.Err() == nil, "after the end: %v, %v", more, lines.Err())
	header := asAdmin()
	again := a.raw("GET", "/v1/executions/"+x.ID+"/events", "", header)
	assert.Truef(t, strings.Contains(again.Body.String(), "cancelled"), "later: %d %s", again.Code, again.Body)
	header.Set("Last-Event-Id", last["id"])
	again = a.raw("GET", "/v1/executions/"+x.ID+"/events", "", header)
	assert.Truef(t, again.Code == http.StatusNoContent, "a reader that has the end gets: %d %s", again.Code, again.Body)
	a.checkProblem(a.raw("GET", "/v1/executions/x/events", "", asAdmin()), 400, "uuid")
	a.checkProblem(a.raw("GET", "/v1/executions/018f0000-0000-7000-8000-000000000000/events", "", asAdmin()),
		404, "no such execution")
	a.checkProblem(a.raw("GET", "/v1/executions/"+x.ID+"/events?full=1", "", asAdmin()), 400, `"full"`)
}
