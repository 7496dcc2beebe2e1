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

// The closed sets are domains, which hold for every writer.
func TestARowKeepsItsRules(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := pending(t, pool)
	for column, bad := range map[string]string{
		"trace_id": `''`, "surface": `'page'`, "flow": `''`, "queue": `'slow'`, "priority": `5`, "max_attempts": `0`, "on_lost": `'hope'`,
		"progress_seconds": `-1`, "waiting_for": `'godot'`, "result_type": `'fine'`, "status": `'sleeping'`,
	} {
		_, err := pool.Exec(t.Context(), `update agent_executions set `+column+` = `+bad+` where id = $1`, id)
		if !postgres.IsCode(err, "23514") {
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
}
