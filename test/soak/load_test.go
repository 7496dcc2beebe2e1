package soak_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// load plays all clients during the soak.
type load struct {
	*testEnv
	ctx   context.Context // ends when no client may start more
	group sync.WaitGroup

	mu          sync.Mutex
	bases       []string // of the serving processes
	next        int
	finished    []*proctest.Process // heartbeats of the load
	asked       int                 // sent questions of visitors
	disconnects int
}

// nextBase returns the address for the next request, of each process in turn.
func (l *load) nextBase() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next++
	return l.bases[l.next%len(l.bases)]
}

func (l *load) add(base string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bases = append(l.bases, base)
}

// pause waits. It returns false when no client may start more.
func (l *load) pause(d time.Duration) bool { return testkit.Wait(l.ctx, d) }

// insertFact stores a fact. It works until the test ends.
func (l *load) insertFact(sql string, args ...any) {
	_, err := l.db.Exec(l.t.Context(), sql, args...)
	assert.Truef(l.t, err == nil, "%v\n%s", err, sql)
}

// runHeartbeats runs one `agent heartbeat` after the other.
func (l *load) runHeartbeats() {
	for l.pause(700 * time.Millisecond) {
		a := launch(l.t, l.dir, l.environ(), "heartbeat")
		code := a.Exit()
		assert.Truef(l.t, code == 0, "agent heartbeat: exit code %d: %s", code, a.Err.Tail(30))
		l.mu.Lock()
		l.finished = append(l.finished, a)
		l.mu.Unlock()
	}
}

// runAdmin sends messages as the admin, one turn after the other.
func (l *load) runAdmin() {
	for n := 1; l.pause(500 * time.Millisecond); n++ {
		body := fmt.Sprintf(`{"message": "Count one more, please; this is turn %d.", "wait": true}`, n)
		status, raw := l.post("/v1/operate", body, testkit.Bearer(adminToken), "Accept: application/json")
		var got struct {
			TraceID string `json:"trace_id"`
			Ended   string `json:"ended"`
			Text    string `json:"text"`
		}
		if err := json.Unmarshal(raw, &got); err != nil || status != http.StatusOK || got.Ended != "answered" {
			l.t.Errorf("operate answers %d %s", status, raw)
			continue
		}
		l.insertFact(`insert into soak.operated (n, trace_id, answer) values ($1, $2, $3)`, n, got.TraceID, got.Text)
	}
}

// post sends a request and returns the response; status 0 means none.
func (l *load) post(path, body string, headers ...string) (int, []byte) {
	got, err := testkit.Do(l.t.Context(), http.DefaultClient, http.MethodPost, l.nextBase()+path, body, headers...)
	assert.NoError(l.t, err, "POST", path)
	return got.Status, got.Body
}

// runVisitor asks one question after the other in its own thread. Every fourth time it sends a second question before
// the first answer. An impatient visitor disconnects in the middle of every third answer.
func (l *load) runVisitor(thread string, impatient bool) {
	q := 0
	next := func() int {
		q++
		l.mu.Lock()
		defer l.mu.Unlock()
		l.asked++
		return q
	}
	for round := 1; l.pause(150 * time.Millisecond); round++ {
		first := next()
		if impatient && round%3 == 0 {
			l.disconnect(thread, first)
			continue
		}
		var both sync.WaitGroup
		both.Go(func() { l.askQuestion(thread, first, round%2 == 0) })
		if round%4 == 0 {
			second := next()
			both.Go(func() { l.askQuestion(thread, second, false) })
		}
		both.Wait()
	}
}

func (l *load) client() *openai.Client {
	config := openai.DefaultConfig(visitorKey)
	config.BaseURL = l.nextBase() + "/v1"
	return openai.NewClientWithConfig(config)
}

func newQuestion(thread string, n int) openai.ChatCompletionRequest {
	return openai.ChatCompletionRequest{
		Model: "agent", Metadata: map[string]string{"thread_id": thread}, Messages: []openai.ChatCompletionMessage{{
			Role: openai.ChatMessageRoleUser, Content: fmt.Sprintf("Here is question %d of thread %s.", n, thread),
		}},
	}
}

// askQuestion notes the client's answer.
func (l *load) askQuestion(thread string, n int, stream bool) {
	var words string
	var err error
	if stream {
		words, err = l.streamAnswer(l.t.Context(), thread, n, nil)
	} else {
		var got openai.ChatCompletionResponse
		if got, err = l.client().CreateChatCompletion(l.t.Context(), newQuestion(thread, n)); err == nil {
			words = got.Choices[0].Message.Content
		}
	}
	if err != nil {
		l.t.Errorf("question %d of %s: %v", n, thread, err)
		return
	}
	l.insertFact(`insert into soak.answers (thread, question, answer) values ($1, $2, $3)`, thread, n, words)
}

// streamAnswer streams an answer. It calls onChunk, if set, with each chunk.
func (l *load) streamAnswer(ctx context.Context, thread string, n int, onChunk func()) (string, error) {
	stream, err := l.client().CreateChatCompletionStream(ctx, newQuestion(thread, n))
	if err != nil {
		return "", err
	}
	defer stream.Close()
	var words strings.Builder
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return words.String(), nil
		}
		if err != nil {
			return "", err
		}
		for _, c := range chunk.Choices {
			words.WriteString(c.Delta.Content)
		}
		if onChunk != nil {
			onChunk()
		}
	}
}

// disconnect disconnects after the first chunk.
func (l *load) disconnect(thread string, n int) {
	ctx, cancel := context.WithCancel(l.t.Context())
	defer cancel()
	_, err := l.streamAnswer(ctx, thread, n, cancel)
	assert.Truef(l.t, err == nil || errors.Is(err, context.Canceled), "question %d of %s: %v", n, thread, err)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.disconnects++
}

// sendWebhooks sends 20 webhooks a second. It repeats every fourth, at once or later, at another process.
func (l *load) sendWebhooks() {
	var sent sync.WaitGroup
	defer sent.Wait()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for n := 1; ; n++ {
		select {
		case <-ticker.C:
		case <-l.ctx.Done():
			return
		}
		kind := "noise"
		switch {
		case n%5 == 0:
			kind = "order.paid"
		case n%10 == 3:
			kind = "question"
		case n%10 == 7:
			kind = "stock.low"
		}
		sent.Go(func() { l.deliver(n, kind) })
		if n%4 == 0 {
			sent.Go(func() {
				if n%8 == 0 {
					timer := time.NewTimer(300 * time.Millisecond)
					defer timer.Stop()
					<-timer.C
				}
				l.deliver(n, kind)
			})
		}
	}
}

// deliver posts a webhook and notes the response. It repeats a delivery rejected with 429.
func (l *load) deliver(n int, kind string) {
	for !l.deliverOnce(n, kind) {
		time.Sleep(2 * time.Second) // from the response
	}
}

// deliverOnce posts a webhook once. It returns false for a 429.
func (l *load) deliverOnce(n int, kind string) bool {
	id := fmt.Sprintf("msg_%d", n)
	body := fmt.Appendf(nil, `{"type": %q, "n": %d}`, kind, n)
	header, err := signature.Sign([]string{"whsec_" + shopKey}, id, time.Now(), body)
	if err != nil {
		l.t.Error(err)
		return true
	}
	var headers []string
	for name := range header {
		headers = append(headers, name+": "+header.Get(name))
	}
	status, raw := l.post("/webhooks/shop", string(body), headers...)
	if status == http.StatusTooManyRequests {
		return false
	}
	assert.Truef(l.t, status == http.StatusAccepted || status == http.StatusOK, "delivery %d: %d %s", n, status, raw)
	l.insertFact(`insert into soak.deliveries (id, n, type, status) values ($1, $2, $3, $4)`, id, n, kind, status)
	return true
}

// storeLaneLines stores the log lines about lanes.
func (l *load) storeLaneLines(agents ...*proctest.Process) {
	for _, a := range agents {
		for _, line := range a.Lines() {
			if line.Message == "lane acquired" {
				l.insertFact(`insert into soak.lanes (lane, owner, token) values ($1, $2, $3)`, line.Lane, line.Owner,
					line.Token.String())
			}
		}
	}
}
