package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// startLocal starts an execution in a process that runs executions. If a worker is free and no queued execution comes
// first, the insert also claims the execution, so the flow runs after one round trip. Otherwise the execution is
// queued. Concurrent starts share a statement.
func (e *Engine) startLocal(ctx context.Context, s Spec) (Execution, bool, error) {
	// A start with a dedupe key may wait for another transaction and would delay a batch. Labels and a requester need
	// further rows.
	if s.DedupeKey != "" || len(s.Labels) > 0 || activity.HasActor(ctx) {
		return e.startPending(ctx, s)
	}
	p, err := s.insertParams(false)
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	single := func() (Execution, error) {
		x, err := e.startBatch(ctx, []insertParams{p})
		if postgres.IsCode(err, pausedCode) { // the agent was paused meanwhile
			queued, _, err := e.startPending(ctx, s)
			return queued, err
		}
		if err != nil {
			return Execution{}, err
		}
		return x[0].Value, nil
	}
	var x Execution
	if postgres.IsSealed(ctx) { // a replay must not join a batch
		x, err = single()
	} else {
		x, err = e.batchers.starts.Do(ctx, p, single)
	}
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	return x, true, nil
}

// startPending inserts a queued execution and wakes a worker of this process.
func (e *Engine) startPending(ctx context.Context, s Spec) (Execution, bool, error) {
	x, created, err := e.insertWithRetry(ctx, s, "pending", "")
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	if created {
		e.notifyReady(x.Queue, 1)
	}
	return x, created, nil
}

// startBatch inserts executions in one statement and runs those that it claimed for free workers.
//
// If all executions are claimed by their callers, the commit does not wait for the disk. The next commit of the run
// makes such a start durable, and the caller gets no result before. If the server crashes before that commit, the
// execution does not exist and its run ends with an error. All other starts are durable when startBatch returns. If the
// lease of this process has ended, the statement queues the executions instead of claiming them.
func (e *Engine) startBatch(ctx context.Context, inserts []insertParams) ([]batch.Result[Execution], error) {
	if len(inserts) > 1 {
		bounded, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
		defer cancel()
		ctx = bounded
	}
	worker, err := e.WorkerID(ctx)
	if err != nil {
		return nil, err
	}
	queued := 0
	for i := range inserts {
		if !inserts[i].claimedByCaller {
			queued++
		}
	}
	reserved := e.reserveSlots(queued)
	defer reserved.release()
	args, err := startBatchArgs(inserts)
	if err != nil {
		return nil, err
	}
	args["worker"], args["slots"] = worker, []int{reserved.background, reserved.interactive}
	args["durable"] = queued > 0
	args["skip"] = append(e.pools[Background].skippedFlows(), e.pools[Interactive].skippedFlows()...)
	rows, err := e.pool.Query(ctx, `
		select n, id::text, claimed, at, parent_id::text, on_lost, input,
		       case when n = 1 and claimed and not @durable then set_config('synchronous_commit', 'off', true) end
		  from lanekeeper.start_agent_executions(@traces, @surfaces, @flows, (@inputs::text[])::jsonb[], @options, @worker,
		                                         @slots, @skip)`, args)
	if err != nil {
		return nil, err
	}
	results := make([]batch.Result[Execution], len(inserts))
	var position int
	var row startedRow
	dest := []any{&position, &row.id, &row.claimed, &row.at, &row.parent, &row.onLost, &row.input, nil}
	_, err = pgx.ForEachRow(rows, dest, func() error {
		row.execution(&results[position-1].Value, &inserts[position-1], worker)
		row.input = nil // so the next row does not overwrite it
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range results {
		x := &results[i].Value
		switch {
		case inserts[i].claimedByCaller:
			continue
		case x.ClaimedBy == nil:
			e.notifyReady(x.Queue, 1)
			continue
		}
		claimed := claimedExecution{Execution: *x, checkpoints: map[string]Checkpoint{}, interrupted: map[string]bool{}}
		reserved.start(claimed, worker)
	}
	return results, nil
}

// startedRow has the columns of a started execution that the database sets.
type startedRow struct {
	id, onLost string
	claimed    bool
	at         time.Time
	parent     *string
	input      json.RawMessage
}

// execution sets x to the inserted row, as a query would read it.
func (row *startedRow) execution(x *Execution, p *insertParams, worker string) {
	*x = Execution{
		ID: row.id, ParentID: row.parent, Input: row.input, OnLost: row.onLost, Status: Pending,
		Variables: json.RawMessage("{}"), CreatedAt: row.at, UpdatedAt: row.at,
		TraceID: string(p.TraceID), Surface: string(p.Surface), Agent: p.Agent, Flow: p.Flow,
		ThreadID: null(p.ThreadID), Queue: p.Queue, Priority: p.Priority,
		MaxAttempts: p.MaxAttempts, Progress: p.ProgressSeconds, Inherits: p.Inherits,
	}
	if row.claimed {
		at := row.at
		x.Status, x.ClaimedBy, x.Claim, x.StartedAt = Running, &worker, 1, &at
	}
}

// startBatchArgs returns the arguments of start_agent_executions that describe the executions. An argument is null if
// all executions have the default.
func startBatchArgs(inserts []insertParams) (postgres.Strict, error) {
	n := len(inserts)
	traces, surfaces, flows, inputs, options := make([]string, n), make([]string, n), make([]string, n), make([]string, n),
		make([]startOptions, n)
	for i := range inserts {
		p := &inserts[i]
		traces[i], surfaces[i], flows[i], inputs[i], options[i] = string(p.TraceID), string(p.Surface), p.Flow,
			string(p.input), p.options()
	}
	args := postgres.Strict{"traces": traces, "surfaces": surfaces, "flows": flows, "inputs": nil, "options": nil}
	if slices.ContainsFunc(inputs, func(input string) bool { return input != emptyInput }) {
		args["inputs"] = inputs
	}
	if slices.ContainsFunc(options, func(p startOptions) bool { return p != startOptions{} }) {
		text, err := json.Marshal(options)
		if err != nil {
			return nil, fmt.Errorf("encode options: %w", err)
		}
		args["options"] = json.RawMessage(text)
	}
	return args, nil
}

// startOptions are parameters for which most starts use the defaults.
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

// options returns the parameters that differ from their defaults.
func (p *insertParams) options() startOptions {
	return startOptions{
		Queued: !p.claimedByCaller, ParentID: p.ParentID, Awaited: p.Awaited, Inherits: p.Inherits, ThreadID: p.ThreadID,
		Progress: p.ProgressSeconds,
		Queue:    zeroIfDefault(p.Queue, Background), Agent: zeroIfDefault(p.Agent, defaultAgent),
		OnLost:   zeroIfDefault(p.OnLost, defaultOnLost),
		Priority: zeroIfDefault(p.Priority, defaultPriority), MaxAttempts: zeroIfDefault(p.MaxAttempts, defaultMaxAttempts),
	}
}

func zeroIfDefault[T comparable](value, defaultValue T) T {
	if value == defaultValue {
		var zero T
		return zero
	}
	return value
}
