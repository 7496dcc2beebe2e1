package executions

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

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
		if postgres.IsCode(err, "LK003") { // paused in this moment
			queued, _, err := e.startQueued(ctx, s)
			return queued, err
		}
		if err != nil {
			return Execution{}, err
		}
		return got[0].value, nil
	}
	var got Execution
	if postgres.IsSealed(ctx) { // a replay: the seal is to refuse it, and others must not take it along
		got, err = alone()
	} else {
		got, err = e.starts.do(ctx, args, alone)
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
func (e *Engine) startSeveral(ctx context.Context, specs []postgres.Strict) ([]answer[Execution], error) {
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
		select n, `+columns+` from (select s.n, (s.execution).* from start_agent_executions(@trace_id, @surface, @agent, @flow, @parent_id, @awaited,
		         @inherits, @thread_id, @queue, @priority, (@input::text[])::jsonb[], @on_lost, @max_attempts, @progress_seconds,
		         @here, @worker, @background, @interactive, @skip) s) x`,
		startArguments(specs, worker, at, append(e.crews[Background].skipped(), e.crews[Interactive].skipped()...)))
	if err != nil {
		return nil, err
	}
	answers := make([]answer[Execution], len(specs))
	var n int
	var x Execution
	_, err = pgx.ForEachRow(rows, append([]any{&n}, x.targets()...), func() error {
		answers[n-1].value = x
		x = Execution{}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i, a := range answers {
		switch {
		case here(specs[i]): // the caller runs it
			continue
		case a.value.ClaimedBy == nil:
			e.ready(a.value.Queue, 1)
			continue
		}
		at.take(claimed{Execution: a.value, checkpoints: map[string]Checkpoint{}, interrupted: map[string]bool{}}, worker)
	}
	return answers, nil
}

// startArguments turns the arguments of several starts into arrays, side by side.
func startArguments(specs []postgres.Strict, worker string, at *places, skip []string) postgres.Strict {
	inputs, claimed := make([]string, len(specs)), make([]bool, len(specs))
	for i, s := range specs {
		claimed[i] = here(s)
		if text, ok := s["input"].(json.RawMessage); ok {
			inputs[i] = string(text)
		}
	}
	return postgres.Strict{
		"trace_id": column[string](specs, "trace_id"), "surface": column[string](specs, "surface"), "agent": column[string](specs, "agent"),
		"flow": column[string](specs, "flow"), "parent_id": column[*string](specs, "parent_id"), "awaited": column[bool](specs, "awaited"),
		"inherits": column[bool](specs, "inherits"), "thread_id": column[*string](specs, "thread_id"), "queue": column[string](specs, "queue"),
		"priority": column[int](specs, "priority"), "input": inputs, "on_lost": column[string](specs, "on_lost"),
		"max_attempts": column[int](specs, "max_attempts"), "progress_seconds": column[int](specs, "progress_seconds"),
		"here": claimed, "worker": worker, "background": at.background, "interactive": at.interactive, "skip": skip,
	}
}

// here reports whether a start is for a caller who runs it.
func here(s postgres.Strict) bool { return s["status"] == "running" }

// column lists one argument of several starts.
func column[T any](specs []postgres.Strict, name string) []T {
	values := make([]T, len(specs))
	for i, s := range specs {
		values[i], _ = s[name].(T)
	}
	return values
}
