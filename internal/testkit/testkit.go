// Package testkit has helpers that tests of several packages share and no other kit owns: HTTP servers, HTTP requests,
// waits and the environment of a process.
//
// The other kits are internal/pgtest (databases), internal/proctest (processes of the program), internal/modeltest
// (scripted models), internal/pgproxy (connections that break), internal/browser (pages) and internal/leaks
// (goroutines).
package testkit

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// WriteFile writes a file that only its owner may read.
func WriteFile(tb testing.TB, path, text string) {
	tb.Helper()
	require.NoError(tb, os.WriteFile(path, []byte(text), 0o600))
}

// Serve starts a server for the duration of a test and returns its URL. At the end it breaks open connections.
func Serve(tb testing.TB, handler http.Handler) (url string) {
	tb.Helper()
	server := httptest.NewServer(handler)
	tb.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server.URL
}

// Run runs services until stop or the end of the test. An error of a service fails the test.
func Run(tb testing.TB, services ...func(ctx context.Context) error) (stop func()) {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	var group errgroup.Group
	for _, service := range services {
		group.Go(func() error { return service(ctx) })
	}
	stop = sync.OnceFunc(func() {
		cancel()
		if err := group.Wait(); err != nil {
			tb.Error(err)
		}
	})
	tb.Cleanup(stop)
	return stop
}

// Wait waits for d. It returns false if ctx has ended.
func Wait(ctx context.Context, d time.Duration) bool { return sleep.For(ctx, d) && ctx.Err() == nil }

// Response is an answer that was read to its end.
type Response struct {
	Status int
	Header http.Header
	Body   []byte
}

// Bearer is the header of a token.
func Bearer(token string) string { return "Authorization: Bearer " + token }

// Do sends a request and reads the answer. A header is "Name: value"; Do omits a header without a value. A body is JSON
// unless a header sets another type.
func Do(ctx context.Context, client *http.Client, method, url, body string, headers ...string) (result Response,
	err error,
) {
	request, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return result, err
	}
	if body != "" {
		request.Header.Set("Content-Type", "application/json")
	}
	for _, header := range headers {
		if name, value, _ := strings.Cut(header, ": "); value != "" {
			request.Header.Set(name, value)
		}
	}
	response, err := client.Do(request)
	if err != nil {
		return result, err
	}
	defer response.Body.Close()
	result = Response{Status: response.StatusCode, Header: response.Header}
	if result.Body, err = io.ReadAll(response.Body); err != nil {
		return result, fmt.Errorf("%s %s: %w", method, url, err)
	}
	return result, nil
}

// Environ is the environment of a process with a database and a model. Later settings override earlier ones.
func Environ(database string, model *modeltest.Server, more ...string) []string {
	return append([]string{
		"DATABASE_URL=" + database, "AGENT_LISTEN=127.0.0.1:0", "AGENT_CHAT_RATE=100000",
		"OPENAI_BASE_URL=" + model.URL(), "OPENAI_API_KEY=secret-of-the-test", "AGENT_MODEL=" + modeltest.Model,
		"AGENT_ALLOW_PRIVATE_HTTP=127.0.0.1",
	}, more...)
}

// Get reads a page. An error ends the test.
func Get(tb testing.TB, url string) (status int, body string) {
	tb.Helper()
	response, err := Do(tb.Context(), http.DefaultClient, http.MethodGet, url, "")
	require.NoError(tb, err)
	return response.Status, string(response.Body)
}

// Receive waits for a value, for a minute at most.
func Receive[T any](tb testing.TB, from <-chan T) (value T) {
	tb.Helper()
	select {
	case value = <-from:
	case <-time.After(time.Minute):
		tb.Fatal("nothing was sent within a minute")
	}
	return value
}

// Answer is the answer that a chat client received.
type Answer struct {
	Status   int    // 0: the connection broke before the status
	ID       string // of the completion
	Text     string
	Code     string // of an error
	Complete bool   // the stream ended as the protocol requires
	Header   http.Header
}

// Chat sends a request to the chat on a new connection, and reads as much of the answer as arrives. For a streamed
// answer, it calls received after each chunk, unless received is nil.
func Chat(r *http.Request, received func(text string)) (a Answer) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	if err != nil {
		return a
	}
	defer response.Body.Close()
	a.Status, a.ID, a.Header = response.StatusCode, response.Header.Get("X-Completion-Id"), response.Header
	if strings.HasPrefix(a.Header.Get("Content-Type"), "text/event-stream") {
		a.stream(response.Body, received)
		return a
	}
	if raw, err := io.ReadAll(response.Body); err == nil {
		a.add(raw)
		a.Complete = a.Code == ""
	}
	return a
}

// stream reads chunks.
func (a *Answer) stream(body io.Reader, received func(text string)) {
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		switch {
		case !ok:
		case string(data) == "[DONE]":
			a.Complete = a.Code == ""
		default:
			a.add(data)
			if received != nil {
				received(a.Text)
			}
		}
	}
}

// add adds a chunk, or a whole answer. It drops a truncated chunk.
func (a *Answer) add(raw []byte) {
	var c struct {
		ID      string
		Choices []struct{ Delta, Message struct{ Content string } }
		Error   struct{ Code string }
	}
	if json.Unmarshal(raw, &c) != nil {
		return
	}
	a.ID, a.Code = cmp.Or(c.ID, a.ID), cmp.Or(c.Error.Code, a.Code)
	for _, choice := range c.Choices {
		a.Text += choice.Delta.Content + choice.Message.Content
	}
}

// Counter counts the calls of many goroutines, by name.
type Counter struct {
	mu sync.Mutex
	n  map[string]int
}

// Add counts a call and returns the number of calls with this name.
func (c *Counter) Add(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[string]int{}
	}
	c.n[name]++
	return c.n[name]
}

// Of returns the number of calls with a name.
func (c *Counter) Of(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[name]
}

// Log collects the output of goroutines while a test reads it.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write appends to the log.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns the whole log.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Tail is the last n lines.
func (l *Log) Tail(n int) string {
	lines := strings.SplitAfter(l.String(), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "")
}

// Lines are the lines that contain all words.
func (l *Log) Lines(words ...string) (found []string) {
	for line := range strings.Lines(l.String()) {
		if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
			found = append(found, line)
		}
	}
	return found
}

// Records are the lines of a JSON log with one of the messages.
func (l *Log) Records(tb testing.TB, messages ...string) (found []map[string]any) {
	tb.Helper()
	for line := range strings.Lines(l.String()) {
		var record map[string]any
		require.NoError(tb, json.Unmarshal([]byte(line), &record))
		if message, ok := record["msg"].(string); ok && slices.Contains(messages, message) {
			found = append(found, record)
		}
	}
	return found
}
