package modeltest_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

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

func post(ctx context.Context, t *testing.T, url, body string) (status int, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/chat/completions", strings.NewReader(body))
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(raw)
}

func TestExhaustedScriptFailsTest(t *testing.T) {
	w := &recordingTB{TB: t}
	server := modeltest.New(w)
	status, body := post(t.Context(), t, server.URL(), `{"messages":[{"role":"user","content":"and now?"}]}`)
	assert.Truef(t, status == 500 && strings.Contains(body, "script exhausted") && strings.Contains(body, "and now?"),
		"answer = %d %s", status, body)
	w.end()
	assert.Equal(t, 1, len(w.errors), w.errors)
}

func TestUndecodableRequestFailsTest(t *testing.T) {
	w := &recordingTB{TB: t}
	server := modeltest.New(w)
	status, _ := post(t.Context(), t, server.URL(), `{"messages":`)
	assert.Equal(t, 400, status, "status =")
	w.end()
	assert.Equal(t, 1, len(w.errors), w.errors)
}
