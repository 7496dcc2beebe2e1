package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

// A background run makes sequential model calls, like heartbeats and automations.
const (
	backgroundFlow  = "bench_background"
	backgroundCalls = 5
)

type chatSettings struct {
	duration     time.Duration // of each variant
	background   int           // concurrent runs, including pending ones
	workers      int
	modelLatency time.Duration
	interval     time.Duration // between two visitors
}

// variant is one way to start a visitor's turn.
type variant struct {
	name   string
	queue  string // "" starts the turn in the process that has the connection
	loaded bool   // background runs occupy the workers
}

// chatPriority measures the wait of a visitor's turn while background runs take all workers.
func chatPriority(ctx context.Context, args []string, out, stderr io.Writer) error {
	var s chatSettings
	flags := newFlags("chat-priority", stderr)
	flags.DurationVar(&s.duration, "for", 20*time.Second, "how long each variant is measured")
	flags.IntVar(&s.background, "background", 50, "background runs at any time")
	flags.IntVar(&s.workers, "workers", 10, "workers, as AGENT_WORKERS")
	flags.DurationVar(&s.modelLatency, "model", 200*time.Millisecond, "latency of the model")
	flags.DurationVar(&s.interval, "every", 100*time.Millisecond, "time between two visitors")
	if err := flags.Parse(args); err != nil {
		return err
	}
	b := &chatBench{chatSettings: s, modelCalls: map[string]time.Time{}}
	return withTestAgent(ctx, s.workers, &modelServer{s.modelLatency, b.recordModelCall}, nil, stderr,
		func(ctx context.Context, w *testAgent) error {
			b.testAgent = w
			return b.measure(ctx, out, stderr)
		})
}

type chatBench struct {
	*testAgent
	chatSettings

	mu         sync.Mutex
	modelCalls map[string]time.Time // when the model first received a message
}

func (b *chatBench) recordModelCall(prompt string, at time.Time) {
	if !strings.HasPrefix(prompt, "visitor") {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, again := b.modelCalls[prompt]; !again {
		b.modelCalls[prompt] = at
	}
}

// measure runs all variants, and measures the floor idle and under load.
func (b *chatBench) measure(ctx context.Context, out, stderr io.Writer) error {
	if err := createFloor(ctx, b.pool); err != nil {
		return err
	}
	idle, err := b.floor(ctx, 2000)
	if err != nil {
		return err
	}
	variants := []variant{
		{"chat, no other work", "", false},
		{"chat (as shipped)", "", true},
		{"chat, on the interactive queue", executions.Interactive, true},
		{"chat, on the background queue (no priority)", executions.Background, true},
	}
	results := make([]variantResult, len(variants))
	var loaded samples
	for i, v := range variants {
		fmt.Fprintf(stderr, "%s: %s …\n", v.name, b.duration)
		results[i], err = b.run(ctx, v, func(ctx context.Context) error {
			if i != 1 {
				return nil
			}
			loaded, err = b.floor(ctx, 500)
			return err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
	}
	b.print(out, variants, results, idle, loaded)
	return nil
}

// floor measures single-row updates in sequence.
func (b *chatBench) floor(ctx context.Context, n int) (latencies samples, err error) {
	for range n {
		began := time.Now()
		if err := updateFloor(ctx, b.pool, 0); err != nil {
			return nil, err
		}
		latencies = append(latencies, time.Since(began))
	}
	return latencies, nil
}

type variantResult struct {
	started, model, text samples // time from the request to each
	background           int     // runs that ended during the measurement
}

// run sends visitors for b.duration and calls during once in parallel.
func (b *chatBench) run(
	ctx context.Context, v variant, during func(ctx context.Context) error,
) (r variantResult, err error) {
	loadCtx, stopLoad := context.WithCancel(ctx)
	var load errgroup.Group
	defer func() {
		stopLoad()
		err = errors.Join(err, load.Wait())
	}()
	if v.loaded {
		for range b.background {
			load.Go(func() error { return b.keepBusy(loadCtx) })
		}
		if err := b.waitSaturated(ctx); err != nil {
			return r, err
		}
	}
	before, err := b.countEnded(ctx)
	if err != nil {
		return r, err
	}
	group, visiting := errgroup.WithContext(ctx)
	group.Go(func() error { return during(visiting) })
	var mu sync.Mutex
	ticker := time.NewTicker(b.interval)
	defer ticker.Stop()
	end := time.After(b.duration)
	for n, more := 0, true; more; n++ {
		select {
		case <-ticker.C:
			group.Go(func() error { return b.visit(visiting, v, n, &mu, &r) })
		case <-end:
			more = false
		case <-visiting.Done():
			more = false
		}
	}
	if err := group.Wait(); err != nil {
		return r, err
	}
	after, err := b.countEnded(ctx)
	r.background = after - before
	return r, err
}

// runBackground is the flow of a background run.
func (w *testAgent) runBackground(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
	for i := range backgroundCalls {
		_, err := w.loop.Run(executions.Scope(ctx, fmt.Sprint(i)),
			reason.Turn{Purpose: "bench", System: "You work.", Prompt: fmt.Sprint("background ", i)})
		if err != nil {
			return executions.Result{}, err
		}
	}
	return executions.Result{Summary: "done"}, nil
}

// keepBusy starts background runs sequentially until ctx ends. It finishes the last run.
func (b *chatBench) keepBusy(ctx context.Context) error {
	runCtx := context.WithoutCancel(ctx)
	for ctx.Err() == nil {
		spec := executions.Spec{Flow: backgroundFlow, Surface: trace.Flow, Agent: "bench"}
		x, _, err := b.engine.Start(runCtx, b.pool, spec)
		if err != nil {
			return err
		}
		if err := b.waitEnded(runCtx, x.ID); err != nil {
			return err
		}
	}
	return nil
}

func (b *chatBench) waitEnded(ctx context.Context, id string) error {
	return poll(ctx, 100*time.Millisecond, func() (bool, error) {
		x, err := executions.Get(ctx, b.pool, id)
		return x.Status.Ended(), err
	})
}

// waitSaturated waits until every worker is busy and further runs are pending.
func (b *chatBench) waitSaturated(ctx context.Context) error {
	return poll(ctx, 50*time.Millisecond, func() (bool, error) {
		var running, pending int
		err := b.pool.QueryRow(ctx, `
			select count(*) filter (where status = 'running'), count(*) filter (where status = 'pending')
			  from agent_executions where flow = @flow
			    and completed_at is null`, postgres.Strict{"flow": backgroundFlow}).Scan(&running, &pending)
		return running >= min(b.workers, b.background) && running+pending >= b.background*9/10, err
	})
}

func (b *chatBench) countEnded(ctx context.Context) (n int, err error) {
	err = b.pool.QueryRow(ctx, `select count(*) from agent_executions where flow = @flow and completed_at is not null`,
		postgres.Strict{"flow": backgroundFlow}).Scan(&n)
	return n, err
}

// visit sends one message of a new visitor and records its times.
func (b *chatBench) visit(ctx context.Context, v variant, n int, mu *sync.Mutex, r *variantResult) error {
	content := fmt.Sprintf("visitor %d: %s", n, v.name)
	thread := "bench " + content
	began := time.Now()
	var text time.Duration
	var turn string
	var err error
	if v.queue == "" {
		turn, text, err = b.send(ctx, thread, content)
	} else {
		turn, err = b.enqueue(ctx, v.queue, thread, content)
	}
	if err != nil {
		return err
	}
	var started time.Time
	if err := b.pool.QueryRow(ctx, `select started_at from agent_executions where trace_id = @turn`,
		postgres.Strict{"turn": turn}).Scan(&started); err != nil {
		return fmt.Errorf("read start of %s: %w", turn, err)
	}
	b.mu.Lock()
	modelCalled, called := b.modelCalls[content]
	b.mu.Unlock()
	if !called {
		return fmt.Errorf("visitor %d: the model received no call", n)
	}
	mu.Lock()
	defer mu.Unlock()
	// The database runs on this machine, so both clocks agree.
	r.started = append(r.started, max(started.Sub(began), 0))
	r.model = append(r.model, modelCalled.Sub(began))
	r.text = append(r.text, text)
	return nil
}

// send sends a message as a client does. It returns the trace and the time to the first text.
func (b *chatBench) send(ctx context.Context, thread, content string) (turn string, first time.Duration, err error) {
	return sendMessage(ctx, b.url, "Done", map[string]any{
		"metadata": map[string]string{"thread_id": thread},
		"messages": []map[string]string{{"role": "user", "content": content}},
	}, func() {})
}

// enqueue starts a turn on a queue, where any worker may claim it.
func (b *chatBench) enqueue(ctx context.Context, queue, thread, content string) (turn string, err error) {
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
		if _, _, err := threads.Open(ctx, tx, threads.Admin,
			threads.Thread{ID: thread, Channel: "chat", Agent: chat.Agent}); err != nil {
			return err
		}
		_, err = threads.Post(ctx, tx, threads.NewMessage{
			ThreadID: thread, Role: threads.User, Content: content, Channel: "chat", ExecutionID: x.ID, TraceID: x.TraceID,
			Status: threads.Received,
		})
		return err
	})
	if err != nil {
		return "", fmt.Errorf("enqueue message: %w", err)
	}
	return turn, b.waitEnded(ctx, id)
}
