package executions_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Each end of a batch is fenced by its own claim.
func TestOfABatchOfEndsTheStaleOneIsRefusedAlone(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	live, dead := worker(t, pool), worker(t, pool)
	names := []string{"live", "stale", "dead", "lane", "locked", "cancelled", "reserved", "last"}
	ids, claims := make([]string, len(names)), make([]int64, len(names))
	for i, name := range names {
		w := live
		if name == "dead" {
			w = dead
		}
		ids[i] = pending(t, pool)
		claims[i] = mustClaim(t, pool, ids[i], w)
		args := postgres.Strict{"id": ids[i]}
		switch name {
		case "stale":
			claims[i]--
		case "lane":
			exec(t, pool, `select acquire_agent_lock('lane', @id || '#1')`, args)
		case "cancelled":
			exec(t, pool, `select cancel_agent_execution(@id, 'test', 'test')`, args)
		case "reserved":
			exec(t, pool, `
				insert into agent_budget_reservations (execution_id, step, scopes, granted, tokens, cost_usd) values (@id, 's', '{}', 1, 1, 0)`, args)
		}
	}
	expire(t, pool, ids[2])
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	exec(t, tx, `select fence_agent_execution(@id, @claim)`, postgres.Strict{"id": ids[4], "claim": claims[4]}) // it writes
	rows, err := pool.Query(t.Context(), `
		select verdict = 'ended' from finish_agent_executions(@ids, @claims, array_fill('completed'::text, array[@n::int]), array_fill('said'::text, array[@n::int]),
		       array_fill('{"v": 1}'::jsonb, array[@n::int]), array_fill(null::text, array[@n::int]), array_fill(null::text, array[@n::int]),
		       array_fill('{"x": 2}'::jsonb, array[@n::int])) order by n`,
		postgres.Strict{"ids": ids, "claims": claims, "n": len(ids)})
	if err != nil {
		t.Fatal(err)
	}
	i := 0
	var ended bool
	for ; rows.Next(); i++ {
		if err := rows.Scan(&ended); err != nil {
			t.Fatal(err)
		}
		want := names[i] == "live" || names[i] == "last"
		if ended != want {
			t.Errorf("%s: ended %t, want %t", names[i], ended, want)
		}
	}
	if rows.Err() != nil || i != len(names) {
		t.Fatalf("%d answers, %v", i, rows.Err())
	}
	for i, name := range names {
		x := get(t, pool, ids[i])
		n := completions(t, pool, ids[i])
		switch name {
		case "live", "last":
			if x.Status != executions.Completed || n != 1 || x.ResultSummary != "said" || string(x.Result) != `{"v": 1}` || string(x.Variables) != `{"x": 2}` {
				t.Errorf("%s: %s, %d events, %q, %s, %s", name, x.Status, n, x.ResultSummary, x.Result, x.Variables)
			}
		case "cancelled":
		default:
			if x.Status != executions.Running || n != 0 || len(x.Result) != 0 {
				t.Errorf("%s: %s, %d events, result %s", name, x.Status, n, x.Result)
			}
		}
	}
}

func TestAnEndThatNamesItselfTwiceCountsForItsOwnClaim(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := pending(t, pool)
	n := mustClaim(t, pool, id, worker(t, pool))
	stale := value[string](t, pool, `
		select string_agg(verdict, ' ' order by n) from finish_agent_executions(array[@id, @id]::uuid[], array[@claim::bigint, @claim::bigint - 1],
		       '{completed,failed}', '{a,b}', '{null,null}', '{null,null}', '{null,null}', '{null,null}')`, postgres.Strict{"id": id, "claim": n})
	if x := get(t, pool, id); stale != "ended alone" || x.Status != executions.Completed {
		t.Errorf("the answers are %s, it is %s", stale, x.Status)
	}
}

// What the database refuses of one run does not touch those that end with it.
func TestAnEndThatIsRefusedFailsAlone(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	gathered := make(chan struct{})
	p := start(t, pool, map[string]executions.Func{"flow": func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		<-gathered
		if string(input) == "3" {
			return executions.Result{Value: json.RawMessage(`1e999999`)}, nil // JSON, and more than jsonb can hold
		}
		return executions.Result{Value: input}, nil
	}}, never, func(o *executions.Options) { o.Workers = 12 })
	ids := make([]string, 12)
	for i := range ids {
		ids[i] = p.beginWith(t, i)
	}
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null`) == len(ids)
	}, "all are claimed")
	close(gathered)
	for i, id := range ids {
		want := executions.Completed
		if i == 3 {
			want = executions.Failed
		}
		if x := until(t, pool, id, want); want == executions.Completed && string(x.Result) != fmt.Sprint(i) {
			t.Errorf("the result of %d is %s", i, x.Result)
		}
	}
}

func TestAnEventThatIsRefusedFailsAlone(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, awaits(0))
	pgtest.Eventually(t, patience, func() bool { return p.Live() == nil }, "the engine lives")
	group, ctx := errgroup.WithContext(t.Context())
	for caller := range 8 {
		group.Go(func() error {
			for i := range 25 {
				id, wrong := fmt.Sprint(caller, "-", i), (caller+i)%5 == 0
				if wrong {
					id = "completed " + id // reserved
				}
				_, err := p.Deliver(ctx, pool, "EVENT_COMPLETED", fmt.Sprint(caller, "-", i), nil, id)
				if wrong != postgres.IsCode(err, "22023") || !wrong && err != nil {
					return fmt.Errorf("event %s: %w", id, err)
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := value[int](t, pool, `select count(*) from agent_events where event = 'EVENT_COMPLETED'`); n != 160 {
		t.Errorf("%d events are recorded, want 160", n)
	}
}

// The rules of the row that are checked by a trigger hold as the constraints did.
func TestARowKeepsItsRules(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := pending(t, pool)
	for column, bad := range map[string]string{
		"trace_id": `''`, "surface": `'page'`, "flow": `''`, "queue": `'slow'`, "priority": `5`, "max_attempts": `0`, "on_lost": `'hope'`,
		"progress_seconds": `-1`, "waiting_for": `'godot'`, "result_type": `'fine'`,
	} {
		_, err := pool.Exec(t.Context(), `update agent_executions set `+column+` = `+bad+` where id = $1`, id)
		if !postgres.IsCode(err, "23514") || postgres.Constraint(err) != "agent_executions_"+column+"_check" {
			t.Errorf("%s = %s: %v", column, bad, err)
		}
		if column == "trace_id" || column == "surface" || column == "flow" {
			continue
		}
		_, err = pool.Exec(t.Context(), `insert into agent_executions (trace_id, surface, flow, `+column+`) values ($1, 'flow', 'flow', `+bad+`)`, string(trace.New(trace.Flow)))
		if !postgres.IsCode(err, "23514") {
			t.Errorf("a row with %s = %s: %v", column, bad, err)
		}
	}
	if _, err := pool.Exec(t.Context(), `update agent_executions set status = 'sleeping' where id = $1`, id); !postgres.IsCode(err, "LK002") {
		t.Errorf("a status that there is not: %v", err)
	}
}
