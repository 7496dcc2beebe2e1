package cuts_test

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// ask makes a request of the process's HTTP, and makes it again, under the same Idempotency-Key, where a careful
// client would: when the connection broke, the process said that it cannot now, or that the first request is still
// being handled. What was told instead of an answer is noted.
func (w *world) ask(ctx context.Context, method, path, body, key string) []byte {
	w.t.Helper()
	for {
		status, answer, err := w.request(ctx, method, path, adminToken, body, "Idempotency-Key", key)
		if err == nil && status < 300 {
			return answer
		}
		w.note("%s %s: %s", method, strings.SplitN(path, "-", 2)[0], told(status, answer, err))
		again := err != nil || status >= 500 || strings.Contains(string(answer), "idempotency-key-running")
		if !again || !pause(ctx) {
			return nil
		}
	}
}

// told is an answer that is an error, in few words.
func told(status int, answer []byte, err error) string {
	if err != nil {
		return "the connection broke"
	}
	var p struct {
		Title string
		Error struct{ Code string }
	}
	if json.Unmarshal(answer, &p) != nil {
		return http.StatusText(status)
	}
	return strings.TrimSpace(http.StatusText(status) + ": " + cmp.Or(p.Title, p.Error.Code))
}

// pause lets a moment pass before something is asked again.
func pause(ctx context.Context) bool { return testkit.Wait(ctx, 5*time.Millisecond) }

// request makes one request; further words are headers.
func (w *world) request(ctx context.Context, method, path, key, body string, header ...string) (int, []byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, w.url+path, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	r.Header.Set("Authorization", "Bearer "+key)
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	return response.StatusCode, answer, err
}

// say sends a visitor's message and listens to the answer. Where that breaks off, it does what a careful client does:
// it says the same again under the same key, or attaches to the answer that is under way.
func (w *world) say(ctx context.Context, thread, words string) string {
	w.t.Helper()
	body, err := json.Marshal(map[string]any{
		"model": "agent", "stream": true, "messages": []map[string]string{{"role": "user", "content": words}},
	})
	require.NoError(w.t, err)
	method, path, attached := http.MethodPost, "/v1/chat/completions", false
	for {
		got := w.hear(ctx, method, path, string(body), thread)
		if got.Complete && got.Status == http.StatusOK {
			return got.Text
		}
		w.note("the visitor was told: %d %s", got.Status, got.Code)
		if attached = got.ID != ""; attached {
			method, path, body = http.MethodGet, "/v1/chat/completions/"+got.ID+"?stream=true", nil
		}
		if !pause(ctx) {
			return got.Text
		}
	}
}

// hear makes a request of the chat and reads what comes.
func (w *world) hear(ctx context.Context, method, path, body, thread string) testkit.Answer {
	r, err := http.NewRequestWithContext(ctx, method, w.url+path, strings.NewReader(body))
	require.NoError(w.t, err)
	r.Header.Set("Authorization", "Bearer "+chatKey)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("X-Thread-Id", thread)
		r.Header.Set("Idempotency-Key", "message in "+thread)
	}
	return testkit.Chat(r, nil)
}
