//go:build unix

package failover_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// load is everybody outside: who starts executions, gives events, speaks in threads and asks as a visitor, and who
// takes a lane by plain SQL. All try again until they are answered, under the same key; what was answered is noted.
type load struct {
	*world
	ctx   context.Context // ends when no more may begin
	stop  context.CancelFunc
	group sync.WaitGroup
	jobs  errgroup.Group

	mu     sync.Mutex
	turn   int
	runs   map[int]string    // executions that were started: their ids
	given  map[string]string // events that were accepted: their keys by id
	notes  map[string]string // messages: their content by id
	heard  map[string]string // answers that visitors got, by thread and question
	tokens []int64           // of the lane probe, as they were answered
	tries  int               // requests that were not answered, or with an error of the server
}

// newLoad is one that has not begun.
func (w *world) newLoad() *load {
	ctx, stop := context.WithCancel(w.t.Context())
	l := &load{
		world: w, ctx: ctx, stop: stop, runs: map[int]string{}, given: map[string]string{}, notes: map[string]string{},
		heard: map[string]string{},
	}
	l.jobs.SetLimit(8)
	w.t.Cleanup(func() {
		stop()
		w.open()
		l.group.Wait()
		_ = l.jobs.Wait() // none fails
	})
	return l
}

func (w *world) begin() *load {
	l := w.newLoad()
	l.group.Go(l.people)
	l.group.Go(l.lane)
	return l
}

// end lets nothing more begin, and what has begun come to its answer.
func (l *load) end() {
	l.stop()
	l.group.Wait()
	_ = l.jobs.Wait() // none fails
}

// people start an execution, give its event, and say something, over and over.
func (l *load) people() {
	for n := 1; testkit.Wait(l.ctx, 250*time.Millisecond); n++ {
		l.jobs.Go(func() error {
			l.start(n)
			if n%3 == 0 {
				l.say(n)
			}
			l.give(n)
			return nil
		})
		if n%4 == 0 {
			l.jobs.Go(func() error { l.ask(n); return nil })
		}
	}
}

func (l *load) start(n int) {
	var got struct{ ID string }
	l.insist("/v1/executions", adminToken, fmt.Sprintf("start %d", n), "", map[string]any{
		"flow": "errand", "thread_id": fmt.Sprintf("t%d", n), "input": map[string]any{"n": n},
	}, &got)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.runs[n] = got.ID
}

func (l *load) give(n int) {
	key, id := fmt.Sprintf("event %d", n), fmt.Sprintf("given %d", n)
	l.insist("/v1/events", adminToken, "", "",
		map[string]any{"event": "EVENT_COMPLETED", "key": key, "data": map[string]any{"is": key}, "id": id}, nil)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.given[id] = key
}

func (l *load) say(n int) {
	var got struct {
		ID string `json:"message_id"`
	}
	content := fmt.Sprintf("note %d", n)
	l.insist(fmt.Sprintf("/v1/threads/t%d/messages", n), adminToken, content, "", map[string]any{"content": content}, &got)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.notes[got.ID] = content
}

func (l *load) ask(n int) {
	var got struct {
		Choices []struct{ Message struct{ Content string } }
	}
	question := fmt.Sprintf("question %d", n)
	l.insist("/v1/chat/completions", visitorKey, question, fmt.Sprintf("v%d", n), map[string]any{
		"model": "agent", "messages": []map[string]any{{"role": "user", "content": question}},
	}, &got)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range got.Choices {
		l.heard[question] = c.Message.Content
	}
}

// lane acquires and releases a lane, over and over.
func (l *load) lane() {
	for n := 0; testkit.Wait(l.ctx, 200*time.Millisecond); n++ {
		ctx, cancel := context.WithTimeout(l.ctx, 10*time.Second)
		var token int64
		owner := fmt.Sprintf("prober %d", n)
		err := l.db.QueryRow(ctx, `select fencing_token from acquire_agent_lock('probe', $1, 1) where acquired`,
			owner).Scan(&token)
		if err == nil { // else the last owner's lease has not ended, because an outage kept it from releasing
			l.mu.Lock()
			l.tokens = append(l.tokens, token)
			l.mu.Unlock()
			_, _ = l.db.Exec(ctx, `select release_agent_lock('probe', $1)`, owner) // else it expires
		}
		cancel()
	}
}

// insist sends a request to the processes by turns until one answers it well.
func (l *load) insist(path, token, key, thread string, body, into any) {
	text, err := json.Marshal(body)
	if err != nil {
		l.t.Error(err)
		return
	}
	for ctx := l.t.Context(); ctx.Err() == nil; testkit.Wait(ctx, 100*time.Millisecond) {
		status, answer := l.post(ctx, path, token, key, thread, text)
		switch {
		case status >= 200 && status < 300:
			if into != nil {
				assert.NoError(l.t, json.Unmarshal(answer, into), "POST", path, "in", answer)
			}
			return
		case status >= 400 && status < 500 && status != http.StatusConflict && status != http.StatusTooManyRequests:
			l.t.Errorf("POST %s %s: %d %s", path, text, status, answer)
			return
		}
		l.mu.Lock()
		l.tries++
		l.mu.Unlock()
	}
}

func (l *load) post(ctx context.Context, path, token, key, thread string, body []byte) (int, []byte) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	l.mu.Lock()
	l.turn++
	base := l.bases[l.turn%len(l.bases)]
	l.mu.Unlock()
	got, err := testkit.Do(ctx, http.DefaultClient, http.MethodPost, base+path, string(body), testkit.Bearer(token),
		"Idempotency-Key: "+key, "X-Thread-Id: "+thread)
	if err != nil {
		return 0, nil
	}
	return got.Status, got.Body
}

// started is how many executions were confirmed.
func (l *load) started() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.runs)
}
