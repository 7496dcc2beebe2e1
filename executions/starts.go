package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

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
	rows, err := e.pool.Query(ctx, `
		select n, id::text, claimed, at, parent_id::text, on_lost, input,
		       case when n = 1 and claimed and not @waited_for then set_config('synchronous_commit', 'off', true) end
		  from lanekeeper.begin_agent_executions(@trace_id, @surface, @flow, @here, @worker, @background, @interactive, @skip, (@input::text[])::jsonb[],
		       @queue, @agent, @parent_id, @awaited, @inherits, @thread_id, @priority, @on_lost, @max_attempts, @progress_seconds)`,
		startArguments(opens, queued > 0, worker, at, append(e.crews[Background].skipped(), e.crews[Interactive].skipped()...)))
	if err != nil {
		return nil, err
	}
	answers := make([]batch.Answer[Execution], len(opens))
	var n int
	var b begun
	err = each(rows, []any{&n, &b.id, &b.claimed, &b.at, &b.parent, &b.onLost, &b.input, nil}, func() error {
		b.execution(&answers[n-1].Value, &opens[n-1], worker)
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

// startArguments turns several starts into arrays, side by side. One that all leave at its default is null, which is
// less to send and to take apart.
func startArguments(opens []opening, waitedFor bool, worker string, at *places, skip []string) postgres.Strict {
	return postgres.Strict{
		"waited_for": waitedFor,
		"trace_id":   column(opens, func(o *opening) string { return string(o.TraceID) }),
		"surface":    column(opens, func(o *opening) string { return string(o.Surface) }),
		"flow":       column(opens, func(o *opening) string { return o.Flow }),
		"here":       column(opens, func(o *opening) bool { return o.here }),
		"worker":     worker, "background": at.background, "interactive": at.interactive, "skip": skip,
		"input":            unless(opens, noInput, func(o *opening) string { return string(o.input) }),
		"queue":            unless(opens, Background, func(o *opening) string { return o.Queue }),
		"agent":            unless(opens, defaultAgent, func(o *opening) string { return o.Agent }),
		"parent_id":        unless(opens, nil, func(o *opening) *string { return null(o.ParentID) }),
		"awaited":          unless(opens, false, func(o *opening) bool { return o.Awaited }),
		"inherits":         unless(opens, false, func(o *opening) bool { return o.Inherits }),
		"thread_id":        unless(opens, nil, func(o *opening) *string { return null(o.ThreadID) }),
		"priority":         unless(opens, defaultPriority, func(o *opening) int { return o.Priority }),
		"on_lost":          unless(opens, defaultOnLost, func(o *opening) string { return o.OnLost }),
		"max_attempts":     unless(opens, defaultMaxAttempts, func(o *opening) int { return o.MaxAttempts }),
		"progress_seconds": unless(opens, 0, func(o *opening) int { return o.ProgressSeconds }),
	}
}

// column lists one argument of several starts.
func column[T any](opens []opening, of func(o *opening) T) []T {
	values := make([]T, len(opens))
	for i := range opens {
		values[i] = of(&opens[i])
	}
	return values
}

// unless is column; nil when all are as they are by default.
func unless[T comparable](opens []opening, usual T, of func(o *opening) T) []T {
	for i := range opens {
		if of(&opens[i]) != usual {
			return column(opens, of)
		}
	}
	return nil
}
