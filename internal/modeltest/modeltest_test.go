package modeltest_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// recordingTB is a testing.TB that records a failure without failing this test.
type recordingTB struct {
	testing.TB
	errors   []string
	cleanups []func()
}

func (w *recordingTB) Errorf(format string, args ...any) {
	w.errors = append(w.errors, fmt.Sprintf(format, args...))
}
func (w *recordingTB) Cleanup(f func()) { w.cleanups = append(w.cleanups, f) }
func (w *recordingTB) end() {
	for _, f := range w.cleanups {
		f()
	}
}

func post(ctx context.Context, t *testing.T, url, body string) (status int, header http.Header, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/chat/completions", strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Idempotency-Key", "k1")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, resp.Header, string(raw)
}

func TestRepliesAreInOrder(t *testing.T) {
	server := modeltest.New(t, modeltest.ToolCall("f", `{"a":1}`), modeltest.Status(429, 1500*time.Millisecond))
	server.Add(modeltest.Text("done").WithUsage(10, 2, 4))

	_, _, first := post(t.Context(), t, server.URL(), `{"model":"m","messages":[{"role":"user","content":"one"}]}`)
	status, header, _ := post(t.Context(), t, server.URL(), `{"model":"m","messages":[]}`)
	_, _, third := post(t.Context(), t, server.URL(),
		`{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}`)

	assert.Truef(t, strings.Contains(first, `"arguments":"{\"a\":1}"`) &&
		strings.Contains(first, `"finish_reason":"tool_calls"`), "first answer = %s", first)
	assert.Truef(t, status == 429 && header.Get("Retry-After") == "2",
		"second answer = %d, retry after %q", status, header.Get("Retry-After"))
	assert.Truef(t, strings.Contains(third, `"cached_tokens":4`) && strings.HasSuffix(third, "data: [DONE]\n\n"),
		"third answer = %s", third)
	received := server.Requests()
	assert.Truef(t, len(received) == 3 && received[0].Messages[0].Content == "one" && received[0].IdempotencyKey() == "k1",
		"requests = %+v", received)
}

func TestExhaustedScriptFailsTest(t *testing.T) {
	w := &recordingTB{TB: t}
	server := modeltest.New(w)
	status, _, body := post(t.Context(), t, server.URL(), `{"messages":[{"role":"user","content":"and now?"}]}`)
	assert.Truef(t, status == 500 && strings.Contains(body, "script exhausted") && strings.Contains(body, "and now?"),
		"answer = %d %s", status, body)
	w.end()
	assert.Equal(t, 1, len(w.errors), w.errors)
}

func TestUndecodableRequestFailsTest(t *testing.T) {
	w := &recordingTB{TB: t}
	server := modeltest.New(w)
	status, _, _ := post(t.Context(), t, server.URL(), `{"messages":`)
	assert.Equal(t, 400, status, "status =")
	w.end()
	assert.Equal(t, 1, len(w.errors), w.errors)
}

func TestHandle(t *testing.T) {
	server := modeltest.New(t)
	server.Handle(func(n int, req openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.Text(fmt.Sprintf("%d %s", n, req.Model))
	})
	for n := range 2 {
		_, _, body := post(t.Context(), t, server.URL(), `{"model":"m"}`)
		assert.Truef(t, strings.Contains(body, fmt.Sprintf(`"%d m"`, n)), "answer %d = %s", n, body)
	}
}

func TestHangingReplyEndsWithTest(t *testing.T) {
	w := &recordingTB{TB: t}
	server := modeltest.New(w, modeltest.Hang())
	result := make(chan error, 1)
	go func() {
		resp, err := http.Post(server.URL()+"/chat/completions", "application/json", strings.NewReader("{}"))
		if err == nil {
			resp.Body.Close()
		}
		result <- err
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for len(server.Requests()) == 0 {
		<-tick.C
	}
	w.end()
	<-result
	assert.Equal(t, 0, len(w.errors), w.errors)
}

func TestModelsAreListed(t *testing.T) {
	server := modeltest.New(t)
	resp, err := http.Get(server.URL() + "/models")
	require.NoError(t, err)
	defer resp.Body.Close()
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	assert.Truef(t, err == nil && strings.Contains(line, modeltest.Model), "models = %s (%v)", line, err)
}
