package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// parking is a wait that begins, as it is written.
type parking struct {
	id, step, kind, key string
	claim               int64
	seconds             float64
	data                json.RawMessage
	variables           json.RawMessage // nil when the row has them
}

// sharedKinds are the kinds of waits that need nothing but an event or a time.
var sharedKinds = []string{"event", "approval", "delay"}

// parkShared begins a wait, together with those of other runs that come at the same time, or by itself where the kind
// of wait or the run needs more. What it waited for may have come already.
func (r *run) parkShared(ctx context.Context, step string, w WaitFor, data, variables json.RawMessage) (came []byte, err error) {
	alone := func() ([]byte, error) { return r.tryPark(ctx, step, w, data, variables) }
	if !slices.Contains(sharedKinds, w.kind) || r.exec.ThreadID != nil { // it likely holds the thread's lane
		return alone()
	}
	return r.e.batchers.waits.Do(ctx, parking{
		id: r.exec.ID, step: step, kind: w.kind, key: w.key, claim: r.exec.Claim, seconds: w.timeout.Seconds(), data: data, variables: variables,
	}, alone)
}

// parkSeveral lets executions wait in one commit, each under its own claim. What has lanes, is locked or stale, or
// may find what it waits for is left to be parked by itself.
func (e *Engine) parkSeveral(ctx context.Context, parks []parking) ([]batch.Answer[[]byte], error) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	n := len(parks)
	ids, claims, steps, kinds, keys := make([]string, n), make([]int64, n), make([]string, n), make([]string, n), make([]string, n)
	seconds, data, variables := make([]float64, n), make([]*string, n), make([]*string, n)
	for i, p := range parks {
		ids[i], claims[i], steps[i], kinds[i], keys[i], seconds[i] = p.id, p.claim, p.step, p.kind, p.key, p.seconds
		data[i], variables[i] = jsonText(p.data), jsonText(p.variables)
	}
	rows, err := e.pool.Query(ctx, `
		select lanekeeper.wait_agent_executions(@ids, @claims, @steps, @kinds, @keys, @seconds, (@data::text[])::jsonb[],
		       (@variables::text[])::jsonb[])`,
		postgres.Strict{
			"ids": ids, "claims": claims, "steps": steps, "kinds": kinds, "keys": keys, "seconds": seconds, "data": data, "variables": variables,
		})
	if err != nil {
		return nil, fmt.Errorf("park %d executions: %w", n, err)
	}
	answers, err := leftAlone[[]byte](rows, n)
	if err != nil {
		return nil, fmt.Errorf("park %d executions: %w", n, err)
	}
	return answers, nil
}
