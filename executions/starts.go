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
	args, err := s.arguments("pending", "")
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	alone := func() (Execution, error) {
		got, err := e.startSeveral(ctx, []postgres.Strict{args})
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
		got, err = e.starts.Do(ctx, args, alone)
	}
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	return got, true, nil
}

// startQueued inserts an execution that the workers of this process look for at once.
func (e *Engine) startQueued(ctx context.Context, s Spec) (Execution, bool, error) {
	got, created, err := s.insert(ctx, e.pool, "pending", "")
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	if created {
		e.ready(got.Queue, 1)
	}
	return got, created, nil
}

// startSeveral starts executions in one statement, and puts workers to those that it claimed.
func (e *Engine) startSeveral(ctx context.Context, specs []postgres.Strict) ([]batch.Answer[Execution], error) {
	if len(specs) > 1 {
		bounded, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
		defer cancel()
		ctx = bounded
	}
	worker, err := e.current(ctx)
	if err != nil {
		return nil, err
	}
	queued := 0
	for _, s := range specs {
		if !here(s) {
			queued++
		}
	}
	at := e.setAside(queued)
	defer at.giveBack()
	rows, err := e.pool.Query(ctx, `
		select n, id::text, claimed, at, parent_id::text, on_lost, input
		  from begin_agent_executions(@trace_id, @surface, @flow, @here, @worker, @background, @interactive, @skip, (@input::text[])::jsonb[],
		       @queue, @agent, @parent_id, @awaited, @inherits, @thread_id, @priority, @on_lost, @max_attempts, @progress_seconds)`,
		startArguments(specs, worker, at, append(e.crews[Background].skipped(), e.crews[Interactive].skipped()...)))
	if err != nil {
		return nil, err
	}
	answers := make([]batch.Answer[Execution], len(specs))
	var n int
	var b begun
	_, err = pgx.ForEachRow(rows, []any{&n, &b.id, &b.claimed, &b.at, &b.parent, &b.onLost, &b.input}, func() error {
		answers[n-1].Value = b.execution(specs[n-1], worker)
		b = begun{}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i, a := range answers {
		switch {
		case here(specs[i]): // the caller runs it
			continue
		case a.Value.ClaimedBy == nil:
			e.ready(a.Value.Queue, 1)
			continue
		}
		at.take(claimed{Execution: a.Value, checkpoints: map[string]Checkpoint{}, interrupted: map[string]bool{}}, worker)
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

// execution is the row, as it would be read.
func (b begun) execution(s postgres.Strict, worker string) Execution {
	x := Execution{
		ID: b.id, ParentID: b.parent, Input: b.input, OnLost: b.onLost, Status: Pending, Variables: json.RawMessage("{}"),
		CreatedAt: b.at, UpdatedAt: b.at,
		TraceID: of[string](s, "trace_id"), Surface: of[string](s, "surface"), Agent: of[string](s, "agent"), Flow: of[string](s, "flow"),
		ThreadID: of[*string](s, "thread_id"), Queue: of[string](s, "queue"), Priority: of[int](s, "priority"),
		MaxAttempts: of[int](s, "max_attempts"), Progress: of[int](s, "progress_seconds"), Inherits: of[bool](s, "inherits"),
	}
	if b.claimed {
		at := b.at
		x.Status, x.ClaimedBy, x.Claim, x.StartedAt = Running, &worker, 1, &at
	}
	return x
}

// startArguments turns the arguments of several starts into arrays, side by side. One that all leave at its default is null, which is
// less to send and to take apart.
func startArguments(specs []postgres.Strict, worker string, at *places, skip []string) postgres.Strict {
	claimed := make([]bool, len(specs))
	for i, s := range specs {
		claimed[i] = here(s)
	}
	return postgres.Strict{
		"trace_id": column[string](specs, "trace_id"), "surface": column[string](specs, "surface"), "flow": column[string](specs, "flow"),
		"here": claimed, "worker": worker, "background": at.background, "interactive": at.interactive, "skip": skip,
		"input": inputs(specs), "queue": unless(specs, "queue", Background), "agent": unless(specs, "agent", defaultAgent),
		"parent_id": unless[*string](specs, "parent_id", nil), "awaited": unless(specs, "awaited", false),
		"inherits": unless(specs, "inherits", false), "thread_id": unless[*string](specs, "thread_id", nil),
		"priority": unless(specs, "priority", defaultPriority), "on_lost": unless(specs, "on_lost", defaultOnLost),
		"max_attempts": unless(specs, "max_attempts", defaultMaxAttempts), "progress_seconds": unless(specs, "progress_seconds", 0),
	}
}

// here reports whether a start is for a caller who runs it.
func here(s postgres.Strict) bool { return s["status"] == "running" }

// of is one argument of a start.
func of[T any](s postgres.Strict, name string) T {
	value, _ := s[name].(T)
	return value
}

// column lists one argument of several starts.
func column[T any](specs []postgres.Strict, name string) []T {
	values := make([]T, len(specs))
	for i, s := range specs {
		values[i] = of[T](s, name)
	}
	return values
}

// unless is column; nil when all are as they are by default.
func unless[T comparable](specs []postgres.Strict, name string, usual T) []T {
	values := column[T](specs, name)
	if slices.ContainsFunc(values, func(v T) bool { return v != usual }) {
		return values
	}
	return nil
}

// inputs lists the inputs of several starts; nil when none has one.
func inputs(specs []postgres.Strict) []string {
	texts, given := make([]string, len(specs)), false
	for i, s := range specs {
		texts[i] = string(of[json.RawMessage](s, "input"))
		given = given || texts[i] != noInput
	}
	if !given {
		return nil
	}
	return texts
}
