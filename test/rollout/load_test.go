package rollout_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// load plays all clients of the proxy.
type load struct {
	*testEnv
	ctx   context.Context // ends when no client may start more
	stop  context.CancelFunc
	group sync.WaitGroup

	crossing  atomic.Bool  // processes of a version that cannot write any more may get requests
	crossed   bool         // a bridge was crossed: a call in flight may be unknown
	migrating atomic.Bool  // a migration may hold locks
	holders   atomic.Int32 // holders of the lane of the counter

	mu               sync.Mutex
	unconfirmedTexts map[string]bool     // messages with a rejected request: stored or not
	runs             map[int]string      // confirmed executions
	sent             map[string][]string // by thread, in order
	counts           map[string]int      // counts of each kind of work
}

func (w *testEnv) startLoad() *load {
	ctx, stop := context.WithCancel(w.t.Context())
	l := &load{
		testEnv: w, ctx: ctx, stop: stop, unconfirmedTexts: map[string]bool{}, runs: map[int]string{},
		sent: map[string][]string{}, counts: map[string]int{},
	}
	w.t.Cleanup(l.end)
	for i := range 4 {
		l.group.Go(func() { l.askQuestions(fmt.Sprintf("visitor-%d", i), i%2 == 0) })
	}
	for i := range 2 {
		l.group.Go(func() { l.sendMessages(fmt.Sprintf("talk-%d", i)) })
		l.group.Go(func() { l.runExecutions(i, 2) })
		l.group.Go(func() { l.incrementUnderLane(fmt.Sprintf("importer-%d", i)) })
	}
	return l
}

// end starts no more requests, and waits for the answers of those in progress.
func (l *load) end() {
	l.stop()
	l.group.Wait()
}

func (l *load) count(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[what]++
}

// waitForWork waits until more of each kind of work is done.
func (l *load) waitForWork() {
	l.t.Helper()
	l.mu.Lock()
	before := maps.Clone(l.counts)
	l.mu.Unlock()
	pgtest.Eventually(l.t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.t.Failed() || l.counts["answer"] > before["answer"]+2 && l.counts["message"] > before["message"] &&
			l.counts["end"] > before["end"] && l.counts["tally"] > before["tally"]
	}, "everybody goes on")
}

// request is a request to the proxy.
type request struct {
	method, path, token, key, thread string
	body                             any
}

// send sends a request, and repeats it while the locks of a migration refuse it: such a request has changed nothing.
func (l *load) send(r request) (status int, answer []byte, err error) {
	for {
		idle := !l.migrating.Load()
		got, err := l.sendOne(r)
		idle = idle && !l.migrating.Load()
		if err != nil || idle || got.Status != http.StatusServiceUnavailable ||
			got.Header.Get("Retry-After") == "" || !bytes.Contains(got.Body, []byte("locked")) {
			return got.Status, got.Body, err
		}
		l.count("locked")
		testkit.Wait(l.t.Context(), 50*time.Millisecond)
	}
}

// sendOne sends a request once.
func (l *load) sendOne(r request) (testkit.Response, error) {
	ctx, cancel := context.WithTimeout(l.t.Context(), pgtest.Timeout)
	defer cancel()
	body := ""
	if r.body != nil {
		body = modeltest.Arguments(r.body)
	}
	return testkit.Do(ctx, http.DefaultClient, r.method, l.proxy.URL+r.path, body, testkit.Bearer(r.token),
		"Idempotency-Key: "+r.key, "X-Thread-Id: "+r.thread)
}

// sendOnce sends a request that must not be repeated. Any failure is the agent's, unless a bridge is crossed.
func (l *load) sendOnce(r request) (answer []byte, ok bool) {
	crossing := l.crossing.Load()
	status, answer, err := l.send(r)
	if err != nil || status < 200 || status >= 300 {
		if crossing || l.crossing.Load() {
			l.count("refused")
			return nil, false
		}
		l.t.Errorf("%s %s without a key: %d %v %s", r.method, r.path, status, err, answer)
		return nil, false
	}
	return answer, true
}

// retryUntilDone repeats a request until it succeeds.
func (l *load) retryUntilDone(r request) (answer []byte) {
	for l.t.Context().Err() == nil {
		status, answer, err := l.send(r)
		switch {
		case err == nil && status >= 200 && status < 300:
			return answer
		case err == nil && status >= 400 && status < 500 && status != http.StatusConflict &&
			status != http.StatusTooManyRequests:
			l.t.Errorf("%s %s: %d %s", r.method, r.path, status, answer)
			return nil
		}
		l.count("again")
		l.t.Logf("sent again: %s %s: %d %v %s", r.method, r.path, status, err, answer)
		testkit.Wait(l.t.Context(), 50*time.Millisecond)
	}
	return nil
}

// askQuestions asks one question after the other.
func (l *load) askQuestions(thread string, stream bool) {
	for n := 1; testkit.Wait(l.ctx, 10*time.Millisecond); n++ {
		question := fmt.Sprintf("question %d of %s", n, thread)
		crossing := l.crossing.Load()
		answer, well := l.sendOnce(request{"POST", "/v1/chat/completions", visitorKey, "", thread, map[string]any{
			"model": "agent", "stream": stream, "messages": []map[string]any{{"role": "user", "content": question}},
		}})
		want := "This is the answer to " + question
		got := answerText(answer, stream)
		switch {
		case well && got == want:
		case l.t.Failed():
			return
		case !well, (crossing || l.crossing.Load()) && strings.HasPrefix(got, incompleteMark):
			l.noteUnconfirmed(question, want)
			continue
		default:
			l.t.Errorf("%s got %q, want %q: %s", thread, got, want, answer)
			return
		}
		l.mu.Lock()
		l.sent[thread] = append(l.sent[thread], question, want)
		l.mu.Unlock()
		l.count("answer")
	}
}

// incompleteMark marks the text of an incomplete stream.
const incompleteMark = "(broken off) "

// noteUnconfirmed notes words that the agent did not confirm.
func (l *load) noteUnconfirmed(words ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range words {
		l.unconfirmedTexts[w] = true
	}
}

// answerText returns the text of an answer, or of a complete stream.
func answerText(answer []byte, stream bool) string {
	type choice struct{ Message, Delta struct{ Content string } }
	type chunk struct{ Choices []choice }
	if !stream {
		var one chunk
		if json.Unmarshal(answer, &one) != nil || len(one.Choices) != 1 {
			return ""
		}
		return one.Choices[0].Message.Content
	}
	var text strings.Builder
	for line := range strings.Lines(string(answer)) {
		data, is := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if data == "[DONE]" {
			return text.String()
		}
		var one chunk
		if is && json.Unmarshal([]byte(data), &one) == nil && len(one.Choices) == 1 {
			text.WriteString(one.Choices[0].Delta.Content)
		}
	}
	return incompleteMark + text.String()
}

// sendMessages sends one message after the other in a thread.
func (l *load) sendMessages(thread string) {
	l.sendOnce(request{"POST", "/v1/threads", adminToken, "", "", map[string]any{"id": thread}})
	for n := 1; testkit.Wait(l.ctx, 30*time.Millisecond); n++ {
		words := fmt.Sprintf("note %d of %s", n, thread)
		if _, well := l.sendOnce(request{
			"POST", "/v1/threads/" + thread + "/messages", adminToken, "", "",
			map[string]any{"content": words},
		}); !well {
			if l.t.Failed() {
				return
			}
			l.noteUnconfirmed(words)
			continue
		}
		l.mu.Lock()
		l.sent[thread] = append(l.sent[thread], words)
		l.mu.Unlock()
		l.count("message")
	}
}

// runExecutions starts executions, each under a key, sends their events, and follows them to their end.
func (l *load) runExecutions(first, step int) {
	for n := first; testkit.Wait(l.ctx, 20*time.Millisecond); n += step {
		start := request{"POST", "/v1/executions", adminToken, fmt.Sprintf("start %d", n), "", map[string]any{
			"flow": "errand", "thread_id": fmt.Sprintf("errand-%d", n), "input": map[string]any{"n": n},
		}}
		var got, again struct{ ID string }
		if err := json.Unmarshal(l.retryUntilDone(start), &got); err != nil {
			l.t.Error(err)
			return
		}
		l.mu.Lock()
		l.runs[n] = got.ID
		l.mu.Unlock()
		if n%3 == 0 {
			key := fmt.Sprintf("hook %d", n)
			l.retryUntilDone(request{"POST", "/webhooks/shop", shopSecret, key, "", map[string]any{"n": n}})
			l.count("hook")
		} else {
			l.retryUntilDone(request{"POST", "/v1/events", adminToken, "", "", map[string]any{
				"event": "EVENT_COMPLETED", "key": fmt.Sprintf("event %d", n), "id": fmt.Sprintf("given %d", n),
			}})
		}
		if err := json.Unmarshal(l.retryUntilDone(start), &again); err != nil || again.ID != got.ID {
			l.t.Errorf("number %d under the same key: %s %v, the first was %s", n, again.ID, err, got.ID)
		}
		l.retryUntilDone(request{"GET", "/v1/executions/" + got.ID, adminToken, "", "", nil})
		l.count("read")
		l.followExecution(got.ID)
	}
}

// incrementUnderLane increments a number under a lane, again and again, like an importer in SQL.
func (l *load) incrementUnderLane(owner string) {
	for testkit.Wait(l.ctx, 20*time.Millisecond) {
		crossing := l.crossing.Load()
		if err := l.increment(owner); err != nil {
			if !crossing && !l.crossing.Load() {
				l.t.Errorf("%s: %v", owner, err)
				return
			}
			l.count("refused")
		}
	}
}

// increment does nothing while another owner holds the lane. Two concurrent holders would read the same number.
func (l *load) increment(owner string) error {
	ctx := l.t.Context()
	var acquired bool
	var token int64
	err := l.db.QueryRow(ctx, `select a.acquired, coalesce(a.fencing_token, 0) from acquire_agent_lock('tally', $1, 60) a`,
		owner).Scan(&acquired, &token)
	if err != nil || !acquired {
		return err
	}
	assert.Equal(l.t, 1, l.holders.Add(1), "lane tally has", "holders")
	err = pgx.BeginFunc(ctx, l.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `select fence_agent_lock('tally', $1)`, token); err != nil {
			return err
		}
		var n int
		if err := tx.QueryRow(ctx, `select n from tally`).Scan(&n); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `update tally set n = $1`, n+1)
		return err
	})
	l.holders.Add(-1)
	if err == nil {
		l.count("tally")
	}
	_, released := l.db.Exec(ctx, `select release_agent_lock('tally', $1, $2)`, owner, token)
	return errors.Join(err, released)
}

// followExecution reads the stream of an execution until its end, with reconnects.
func (l *load) followExecution(id string) {
	for l.t.Context().Err() == nil {
		_, answer, _ := l.send(request{"GET", "/v1/executions/" + id + "/events", adminToken, "", "", nil})
		for lines := bufio.NewScanner(bytes.NewReader(answer)); lines.Scan(); {
			if strings.HasPrefix(lines.Text(), "data: ") &&
				(strings.Contains(lines.Text(), `"status":"completed"`) || strings.Contains(lines.Text(), `"status":"failed"`)) {
				l.count("end")
				return
			}
		}
		testkit.Wait(l.t.Context(), 50*time.Millisecond)
	}
}
