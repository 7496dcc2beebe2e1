package executions_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// A thousand executions wait for an event each, in two processes, while every event comes several times, in any order, by
// program and by SQL, and sweeps run in between: each wait ends once, with the first event of its id.
func TestAThousandWaitsLoseNoWakeAndDoubleNone(t *testing.T) {
	t.Parallel()
	const many = 1000
	pool := pgtest.DB(t)
	one, two := start(t, pool, awaits(0)), start(t, pool, awaits(0))
	exec(t, pool, `
		insert into agent_executions (trace_id, surface, flow, input)
		select 'fl_storm', 'flow', 'flow', to_jsonb('key ' || n) from generate_series(1, @many::int) n`, postgres.Strict{"many": many})
	var sent []int
	for n := range many {
		for range 1 + n%3 {
			sent = append(sent, n+1)
		}
	}
	rand.Shuffle(len(sent), func(i, j int) { sent[i], sent[j] = sent[j], sent[i] })
	group, ctx := errgroup.WithContext(t.Context())
	const senders = 4
	for s := range senders {
		group.Go(func() error {
			for i := s; i < len(sent); i += senders {
				if err := strike(ctx, []*process{one, two}[s%2], fmt.Sprint("key ", sent[i]), s); err != nil {
					return err
				}
				if i%97 == s {
					if err := two.Sweep(ctx); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, 2*patience, func() bool {
		return value[int](t, pool, `select count(*) from agent_executions where status <> 'completed'`) == 0
	}, "all are completed")
	for what, sql := range map[string]string{
		"events that nobody took": `select count(*) from agent_events where event = 'EVENT_COMPLETED' and consumed_by is null`,
		"events beyond one for each wait": `
			select count(*) - (select count(distinct key) from agent_events where event = 'EVENT_COMPLETED')
			  from agent_events where event = 'EVENT_COMPLETED'`,
		"waits whose outcome is not their event": `
			select count(*) from agent_executions x join agent_checkpoints c on c.execution_id = x.id and c.step = 'event'
			  join agent_events v on v.id = (c.output ->> 'event_id')::uuid where v.key <> x.input #>> '{}' or v.consumed_by <> x.id`,
		"waits beyond one":    `select count(*) from agent_executions where wait_number > 1`,
		"results not of them": `select count(*) from agent_executions where result ->> 'event' <> 'EVENT_COMPLETED' or (result ->> 'timed_out')::boolean`,
		"ends told twice": `
			select count(*) - count(distinct key) from agent_events where event = 'AGENT_COMPLETED'`,
	} {
		if n := value[int](t, pool, sql); n != 0 {
			t.Errorf("%d %s", n, what)
		}
	}
	if n := value[int](t, pool, `select count(*) from agent_checkpoints where step = 'event'`); n != many {
		t.Errorf("%d outcomes", n)
	}
}

// strike delivers an event under its one id, by the engine or by plain SQL.
func strike(ctx context.Context, p *process, key string, sender int) error {
	if sender%2 == 0 {
		_, err := p.Deliver(ctx, p.pool, "EVENT_COMPLETED", key, json.RawMessage(`{}`), "id of "+key)
		return err
	}
	return deliver(ctx, p.pool, key, `{}`, "id of "+key)
}
