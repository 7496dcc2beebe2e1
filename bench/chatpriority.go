package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// backgroundFlow is work as heartbeats and automations do it: one model call after the other.
const (
	backgroundFlow  = "bench_background"
	backgroundCalls = 5
)

// chatSettings say how chat-priority measures.
type chatSettings struct {
	lasts      time.Duration // of each way
	background int           // runs at any time, those that wait for a worker included
	workers    int
	latency    time.Duration // of the model
	every      time.Duration // between two visitors
}

// way is one way to begin a visitor's turn.
type way struct {
	name  string
	queue string // "" for the surface's own: claimed by the process that has the connection
	busy  bool   // background runs are there
}

// chatPriority measures how long a visitor's turn waits while background runs take all workers.
func chatPriority(ctx context.Context, args []string, out, errw io.Writer) error {
	var s chatSettings
	flags := flag.NewFlagSet("chat-priority", flag.ContinueOnError)
	flags.SetOutput(errw)
	flags.DurationVar(&s.lasts, "for", 20*time.Second, "how long each way is measured")
	flags.IntVar(&s.background, "background", 50, "background runs at any time")
	flags.IntVar(&s.workers, "workers", 10, "workers, as AGENT_WORKERS")
	flags.DurationVar(&s.latency, "model", 200*time.Millisecond, "how long the model takes for an answer")
	flags.DurationVar(&s.every, "every", 100*time.Millisecond, "a visitor comes that often")
	if err := flags.Parse(args); err != nil {
		return err
	}
	b := &chatBench{chatSettings: s, asked: map[string]time.Time{}}
	return withWorld(ctx, s.workers, &model{s.latency, b.note}, nil, errw, func(ctx context.Context, w *world) error {
		b.world = w
		return b.measure(ctx, out, errw)
	})
}

// chatBench is a benchmark under way.
type chatBench struct {
	*world
	chatSettings

	mu    sync.Mutex
	asked map[string]time.Time // when the model first heard a visitor's words
}

func (b *chatBench) note(prompt string, at time.Time) {
	if !strings.HasPrefix(prompt, "visitor") {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, again := b.asked[prompt]; !again {
		b.asked[prompt] = at
	}
}

// measure takes one way after the other, and the floor before and under the load.
func (b *chatBench) measure(ctx context.Context, out, errw io.Writer) error {
	idle, err := b.floor(ctx, 2000)
	if err != nil {
		return err
	}
	ways := []way{
		{"chat, nothing else to do", "", false},
		{"chat (as shipped)", "", true},
		{"chat, on the interactive queue", executions.Interactive, true},
		{"chat, on the background queue (no priority)", executions.Background, true},
	}
	results := make([]result, len(ways))
	var loaded samples
	for i, way := range ways {
		fmt.Fprintf(errw, "%s: %s …\n", way.name, b.lasts)
		results[i], err = b.take(ctx, way, func(ctx context.Context) error {
			if i != 1 {
				return nil
			}
			loaded, err = b.floor(ctx, 500)
			return err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", way.name, err)
		}
	}
	b.print(out, ways, results, idle, loaded)
	return nil
}

// floor is single-row updates by pgx, one after the other.
func (b *chatBench) floor(ctx context.Context, n int) (samples, error) {
	if _, err := b.pool.Exec(ctx, `create table if not exists bench_floor (id int primary key, n bigint not null) with (fillfactor = 50)`); err != nil {
		return nil, err
	}
	if _, err := b.pool.Exec(ctx, `insert into bench_floor (id, n) values (1, 0) on conflict do nothing`); err != nil {
		return nil, err
	}
	var took samples
	for range n {
		began := time.Now()
		if _, err := b.pool.Exec(ctx, `update bench_floor set n = n + 1 where id = 1`); err != nil {
			return nil, err
		}
		took = append(took, time.Since(began))
	}
	return took, nil
}

// result is what one way came to.
type result struct {
	started, model, text samples // from the request to the run's start, to its first model call, to the first text
	background           int     // runs that ended meanwhile
}

// take lets visitors come for a while; beside runs in the middle of it.
func (b *chatBench) take(ctx context.Context, how way, beside func(ctx context.Context) error) (r result, err error) {
	loading, unload := context.WithCancel(ctx)
	defer unload()
	var load errgroup.Group
	if how.busy {
		for range b.background {
			load.Go(func() error { return b.keepBusy(loading) })
		}
		if err := b.saturated(ctx); err != nil {
			return r, err
		}
	}
	before, err := b.ended(ctx)
	if err != nil {
		return r, err
	}
	group, visiting := errgroup.WithContext(ctx)
	group.Go(func() error { return beside(visiting) })
	var mu sync.Mutex
	ticker := time.NewTicker(b.every)
	defer ticker.Stop()
	end := time.After(b.lasts)
	for n, more := 0, true; more; n++ {
		select {
		case <-ticker.C:
			group.Go(func() error { return b.visit(visiting, how, n, &mu, &r) })
		case <-end:
			more = false
		case <-visiting.Done():
			more = false
		}
	}
	if err := group.Wait(); err != nil {
		return r, err
	}
	after, err := b.ended(ctx)
	r.background = after - before
	unload()
	return r, errors.Join(err, load.Wait())
}

// think is the flow of a background run.
func (w *world) think(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
	for i := range backgroundCalls {
		_, err := w.loop.Run(executions.Scope(ctx, fmt.Sprint(i)), reason.Turn{Purpose: "bench", System: "You work.", Prompt: fmt.Sprint("background ", i)})
		if err != nil {
			return executions.Result{}, err
		}
	}
	return executions.Result{Summary: "done"}, nil
}

// keepBusy has one background run at any time, until ctx ends and the last one has.
func (b *chatBench) keepBusy(ctx context.Context) error {
	whole := context.WithoutCancel(ctx)
	for ctx.Err() == nil {
		x, _, err := b.engine.Start(whole, b.pool, executions.Spec{Flow: backgroundFlow, Surface: trace.Flow, Agent: "bench"})
		if err != nil {
			return err
		}
		if err := b.await(whole, x.ID); err != nil {
			return err
		}
	}
	return nil
}

// await polls, rarely, for the end of a background run.
func (b *chatBench) await(ctx context.Context, id string) error {
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		<-ticker.C
		x, err := executions.Get(ctx, b.pool, id)
		if err != nil || x.Status.Ended() {
			return err
		}
	}
}

// saturated waits until every worker is busy and others wait.
func (b *chatBench) saturated(ctx context.Context) error {
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		var running, pending int
		err := b.pool.QueryRow(ctx, `
			select count(*) filter (where status = 'running'), count(*) filter (where status = 'pending')
			  from agent_executions where flow = @flow and completed_at is null`, postgres.Strict{"flow": backgroundFlow}).Scan(&running, &pending)
		if err != nil || running >= min(b.workers, b.background) && running+pending >= b.background*9/10 {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (b *chatBench) ended(ctx context.Context) (n int, err error) {
	err = b.pool.QueryRow(ctx, `select count(*) from agent_executions where flow = @flow and completed_at is not null`,
		postgres.Strict{"flow": backgroundFlow}).Scan(&n)
	return n, err
}

// visit is one visitor with one message.
func (b *chatBench) visit(ctx context.Context, how way, n int, mu *sync.Mutex, r *result) error {
	words := fmt.Sprintf("visitor %d: %s", n, how.name)
	thread := "bench " + words
	began := time.Now()
	var text time.Duration
	var turn string
	var err error
	if how.queue == "" {
		turn, text, err = b.say(ctx, thread, words, began)
	} else {
		turn, text, err = b.enqueue(ctx, how.queue, thread, words, began)
	}
	if err != nil {
		return err
	}
	var started time.Time
	if err := b.pool.QueryRow(ctx, `select started_at from agent_executions where trace_id = @turn`, postgres.Strict{"turn": turn}).Scan(&started); err != nil {
		return fmt.Errorf("read start of %s: %w", turn, err)
	}
	b.mu.Lock()
	heard := b.asked[words]
	b.mu.Unlock()
	mu.Lock()
	defer mu.Unlock()
	// The database's clock is this machine's, so the two can be compared.
	r.started = append(r.started, max(started.Sub(began), 0))
	r.model = append(r.model, heard.Sub(began))
	r.text = append(r.text, text)
	return nil
}

// say sends a message as a client does, and streams the answer to its end; it returns the turn's trace and when text
// first came.
func (b *chatBench) say(ctx context.Context, thread, words string, began time.Time) (turn string, first time.Duration, err error) {
	body, err := json.Marshal(map[string]any{
		"model": agents.Alias, "stream": true, "metadata": map[string]string{"thread_id": thread},
		"messages": []map[string]string{{"role": "user", "content": words}},
	})
	if err != nil {
		return "", 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url, bytes.NewReader(body))
	if err != nil {
		return "", 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", 0, fmt.Errorf("send message: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", 0, fmt.Errorf("send message: status %d", resp.StatusCode)
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if first == 0 && strings.Contains(lines.Text(), `"content":"Done`) {
			first = time.Since(began)
		}
	}
	if err := lines.Err(); err != nil || first > 0 {
		return resp.Header.Get("X-Trace-Id"), first, err
	}
	return "", 0, errors.New("read answer: there was none")
}

// enqueue begins a turn that no connection has claimed: what the surface does, but for a worker of the queue to take.
func (b *chatBench) enqueue(ctx context.Context, queue, thread, words string, began time.Time) (turn string, _ time.Duration, err error) {
	var id string
	err = postgres.InTx(ctx, b.pool, func(tx pgx.Tx) error {
		x, _, err := b.engine.StartTx(ctx, tx, executions.Spec{
			Flow: chat.Flow, Surface: trace.Chat, Agent: chat.Agent, ThreadID: thread, Queue: queue,
			Input: map[string]string{"thread_id": thread, "model": agents.Alias},
		})
		if err != nil {
			return err
		}
		id, turn = x.ID, x.TraceID
		if _, _, err := threads.Open(ctx, tx, threads.Admin, threads.Thread{ID: thread, Channel: "chat", Agent: chat.Agent}); err != nil {
			return err
		}
		_, err = threads.Post(ctx, tx, threads.Draft{
			ThreadID: thread, Role: threads.User, Content: words, Channel: "chat", ExecutionID: x.ID, TraceID: x.TraceID, Status: threads.Received,
		})
		return err
	})
	if err != nil {
		return "", 0, fmt.Errorf("enqueue message: %w", err)
	}
	if err := b.await(ctx, id); err != nil {
		return "", 0, err
	}
	return turn, time.Since(began), nil
}
