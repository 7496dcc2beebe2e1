package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// startHere starts an execution in a process that runs executions. As long as this process has workers free and nothing
// else is to come before it, it begins claimed by one of them, so that one round trip lies between the call and the
// function. Starts at the same time share a statement. The rest goes to the queue, where workers look at once.
func (e *Engine) startHere(ctx context.Context, s Spec) (Execution, bool, error) {
	if s.DedupeKey != "" { // another transaction may hold the key: not one to wait for with others
		return e.startQueued(ctx, s)
	}
	o, err := s.opening(false)
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	alone := func() (Execution, error) {
		got, err := e.startSeveral(ctx, []opening{o})
		if postgres.IsCode(err, pausedCode) { // paused in this moment
			queued, _, err := e.startQueued(ctx, s)
			return queued, err
		}
		if err != nil {
			return Execution{}, err
		}
		return got[0].Value, nil
	}
	var got Execution
	if postgres.IsSealed(ctx) { // a replay: the seal is to refuse it, and others must not take it along
		got, err = alone()
	} else {
		got, err = e.batchers.starts.Do(ctx, o, alone)
	}
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	return got, true, nil
}

// startQueued inserts an execution that the workers of this process look for at once.
func (e *Engine) startQueued(ctx context.Context, s Spec) (Execution, bool, error) {
	got, created, err := e.insertNow(ctx, s, "pending", "")
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	if created {
		e.ready(got.Queue, 1)
	}
	return got, created, nil
}

// startSeveral starts executions in one statement, and puts workers to those that it claimed.
//
// Who starts one for others waits until it is on disk. Where each is for a caller who runs it here, nobody is told
// before it has ended, and what is committed after it makes it durable with itself: its first record, the intent of a
// call, a lane, its end. So the statement does not wait for the disk, unless the lease of this process has ended, so
// that they are in the queue, of which callers are told. A server that crashes before any of these has never had the
// execution, and the run, whose claim is gone, ends with an error.
func (e *Engine) startSeveral(ctx context.Context, opens []opening) ([]batch.Answer[Execution], error) {
	if len(opens) > 1 {
		bounded, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
		defer cancel()
		ctx = bounded
	}
	worker, err := e.current(ctx)
	if err != nil {
		return nil, err
	}
	queued := 0
	for i := range opens {
		if !opens[i].here {
			queued++
		}
	}
	at := e.setAside(queued)
	defer at.giveBack()
	args, err := startArguments(opens)
	if err != nil {
		return nil, err
	}
	args["worker"], args["places"], args["waited_for"] = worker, []int{at.background, at.interactive}, queued > 0
	args["skip"] = append(e.crews[Background].skipped(), e.crews[Interactive].skipped()...)
	rows, err := e.pool.Query(ctx, `
		select n, id::text, claimed, at, parent_id::text, on_lost, input,
		       case when n = 1 and claimed and not @waited_for then set_config('synchronous_commit', 'off', true) end
		  from lanekeeper.start_agent_executions(@traces, @surfaces, @flows, (@inputs::text[])::jsonb[], @options, @worker, @places, @skip)`, args)
	if err != nil {
		return nil, err
	}
	answers := make([]batch.Answer[Execution], len(opens))
	var n int
	var b begun
	_, err = pgx.ForEachRow(rows, []any{&n, &b.id, &b.claimed, &b.at, &b.parent, &b.onLost, &b.input, nil}, func() error {
		b.execution(&answers[n-1].Value, &opens[n-1], worker)
		b.input = nil // the next row has bytes of its own
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range answers {
		x := &answers[i].Value
		switch {
		case opens[i].here: // the caller runs it
			continue
		case x.ClaimedBy == nil:
			e.ready(x.Queue, 1)
			continue
		}
		at.take(claimed{Execution: *x, checkpoints: map[string]Checkpoint{}, interrupted: map[string]bool{}}, worker)
	}
	return answers, nil
}

// begun is what only the database knows of an execution that was started.
type begun struct {
	id, onLost string
	claimed    bool
	at         time.Time
	parent     *string
	input      json.RawMessage
}

// execution makes the row, as it would be read.
func (b *begun) execution(x *Execution, o *opening, worker string) {
	*x = Execution{
		ID: b.id, ParentID: b.parent, Input: b.input, OnLost: b.onLost, Status: Pending, Variables: json.RawMessage("{}"),
		CreatedAt: b.at, UpdatedAt: b.at,
		TraceID: string(o.TraceID), Surface: string(o.Surface), Agent: o.Agent, Flow: o.Flow,
		ThreadID: null(o.ThreadID), Queue: o.Queue, Priority: o.Priority,
		MaxAttempts: o.MaxAttempts, Progress: o.ProgressSeconds, Inherits: o.Inherits,
	}
	if b.claimed {
		at := b.at
		x.Status, x.ClaimedBy, x.Claim, x.StartedAt = Running, &worker, 1, &at
	}
}

// startArguments turns several starts into what start_agent_executions takes. What all leave at its default is null.
func startArguments(opens []opening) (postgres.Strict, error) {
	n := len(opens)
	traces, surfaces, flows, inputs, options := make([]string, n), make([]string, n), make([]string, n), make([]string, n), make([]startOptions, n)
	for i := range opens {
		o := &opens[i]
		traces[i], surfaces[i], flows[i], inputs[i], options[i] = string(o.TraceID), string(o.Surface), o.Flow, string(o.input), o.options()
	}
	args := postgres.Strict{"traces": traces, "surfaces": surfaces, "flows": flows, "inputs": nil, "options": nil}
	if slices.ContainsFunc(inputs, func(input string) bool { return input != noInput }) {
		args["inputs"] = inputs
	}
	if slices.ContainsFunc(options, func(o startOptions) bool { return o != startOptions{} }) {
		text, err := json.Marshal(options)
		if err != nil {
			return nil, fmt.Errorf("encode options: %w", err)
		}
		args["options"] = json.RawMessage(text)
	}
	return args, nil
}

// startOptions are what most starts leave at its default.
type startOptions struct {
	Queued      bool   `json:"queued,omitempty"`
	Queue       string `json:"queue,omitempty"`
	Agent       string `json:"agent,omitempty"`
	ParentID    string `json:"parent_id,omitempty"`
	Awaited     bool   `json:"awaited,omitempty"`
	Inherits    bool   `json:"inherits,omitempty"`
	ThreadID    string `json:"thread_id,omitempty"`
	Priority    int    `json:"priority,omitempty"`
	OnLost      string `json:"on_lost,omitempty"`
	MaxAttempts int    `json:"max_attempts,omitempty"`
	Progress    int    `json:"progress_seconds,omitempty"`
}

func (o *opening) options() startOptions {
	return startOptions{
		Queued: !o.here, ParentID: o.ParentID, Awaited: o.Awaited, Inherits: o.Inherits, ThreadID: o.ThreadID, Progress: o.ProgressSeconds,
		Queue: unless(o.Queue, Background), Agent: unless(o.Agent, defaultAgent), OnLost: unless(o.OnLost, defaultOnLost),
		Priority: unless(o.Priority, defaultPriority), MaxAttempts: unless(o.MaxAttempts, defaultMaxAttempts),
	}
}

// unless is a value; zero where it is the default.
func unless[T comparable](value, standard T) T {
	if value == standard {
		var zero T
		return zero
	}
	return value
}
