package cuts_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"time"
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
func pause(ctx context.Context) bool {
	timer := time.NewTimer(5 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

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

// said is what a visitor has heard.
type said struct {
	status int
	id     string // of the completion
	text   string
	code   string // of an error
	whole  bool   // it ended as the protocol says
}

// say sends a visitor's message and listens to the answer. Where that breaks off, it does what a careful client does:
// it says the same again under the same key, or attaches to the answer that is under way.
func (w *world) say(ctx context.Context, thread, words string) string {
	w.t.Helper()
	body, err := json.Marshal(map[string]any{
		"model": "agent", "stream": true, "messages": []map[string]string{{"role": "user", "content": words}},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	method, path, attached := http.MethodPost, "/v1/chat/completions", false
	for {
		got := w.hear(ctx, method, path, string(body), thread)
		if got.whole && got.status == http.StatusOK {
			return got.text
		}
		w.note("the visitor was told: %d %s", got.status, got.code)
		if attached = got.id != ""; attached {
			method, path, body = http.MethodGet, "/v1/chat/completions/"+got.id+"?stream=true", nil
		}
		if !pause(ctx) {
			return got.text
		}
	}
}

// hear makes a request of the chat and reads what comes.
func (w *world) hear(ctx context.Context, method, path, body, thread string) (got said) {
	r, err := http.NewRequestWithContext(ctx, method, w.url+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+chatKey)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("X-Thread-Id", thread)
		r.Header.Set("Idempotency-Key", "message in "+thread)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	if err != nil {
		return got
	}
	defer response.Body.Close()
	got.status, got.id = response.StatusCode, response.Header.Get("X-Completion-Id")
	if !strings.HasPrefix(response.Header.Get("Content-Type"), "text/event-stream") {
		raw, err := io.ReadAll(response.Body)
		if err != nil {
			return got
		}
		got.add(raw)
		got.whole = got.code == ""
		return got
	}
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		switch {
		case !ok:
		case string(data) == "[DONE]":
			got.whole = got.code == ""
		default:
			got.add(data)
		}
	}
	return got
}

// add takes in a chunk, or a whole answer.
func (x *said) add(raw []byte) {
	var c struct {
		ID      string
		Choices []struct{ Delta, Message struct{ Content string } }
		Error   struct{ Code string }
	}
	if json.Unmarshal(raw, &c) != nil {
		return // cut off
	}
	x.id, x.code = cmp.Or(c.ID, x.id), cmp.Or(c.Error.Code, x.code)
	for _, choice := range c.Choices {
		x.text += choice.Delta.Content + choice.Message.Content
	}
}
