package executions

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Loop calls body with the state of the previous call until body returns true, and returns the last state. Use it for
// long loops: after every 16 iterations, a snapshot of the state replaces the checkpoints of their steps, so a claim
// replays at most 16 iterations. Each iteration is a scope. S must survive a round trip through encoding/json and
// contain everything that later iterations need.
func Loop[S any](
	ctx context.Context, name string, state S, body func(ctx context.Context, state S) (S, bool, error),
) (S, error) {
	s := stepSpec{name: name}
	r, err := s.start(ctx)
	if err != nil {
		return state, err
	}
	current := snapshot[S]{State: state}
	if err := r.replayLoop(ctx, s); err != nil {
		return state, err
	}
	r.mu.Lock()
	checkpoint, resumed := r.checkpoints[s.key]
	r.mu.Unlock()
	if resumed {
		if err := json.Unmarshal(checkpoint.Output, &current); err != nil {
			return state, r.failChanged(s.key, fmt.Errorf("loop %s: its checkpoint does not fit %T (%w): %w", s.key,
				state, err, ErrChanged))
		}
	}
	for !current.Done {
		current.State, current.Done, err = body(withPrefix(ctx, fmt.Sprintf("%s@%d/", s.key, current.Next)), current.State)
		if err != nil {
			return current.State, err
		}
		current.Next++
		if current.Done || current.Next%snapshotInterval == 0 {
			stored, altered, err := r.snapshot(ctx, s, current)
			if err == nil && altered { // continue with the state as a replay decodes it
				current, err = decode[snapshot[S]](stored)
			}
			if err != nil {
				return current.State, err
			}
		}
	}
	return current.State, nil
}

// snapshotInterval is the number of iterations of a Loop between two snapshots.
const snapshotInterval = 16

// snapshot is the checkpoint of a Loop: its state before an iteration.
type snapshot[S any] struct {
	Next  int  `json:"next"`
	State S    `json:"state"`
	Done  bool `json:"done"`
}

// snapshot replaces the checkpoints of the iterations by one checkpoint with the loop's state and a list of their
// waits.
func (r *run) snapshot(ctx context.Context, s stepSpec, state any) (output json.RawMessage, altered bool, err error) {
	if r.replay != nil {
		return nil, false, r.replay.beyondRecord(r, s.key)
	}
	if err := r.flushDeferred(ctx); err != nil { // a later checkpoint must not precede the snapshot
		return nil, false, err
	}
	if output, altered, err = encode(state); err != nil {
		return nil, false, fmt.Errorf("loop %s: encode state: %w", s.key, err)
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.e.opts.LeaseTTL)
	defer cancel()
	err = r.write(bounded, func(b *pgx.Batch) {
		b.Queue(`
			with replaced as (
			  delete from agent_checkpoints
			   where execution_id = @id and starts_with(step, @prefix) and substr(step, length(@prefix) + 1) ~ '^[0-9]+/'
			  returning step, output, created_at, waited_for, waited_key, waited_since, waits),
			waits as (
			  select jsonb_agg(w.wait order by w.until) as all
			    from (select r.created_at as until, jsonb_build_object('step', r.step, 'kind', r.waited_for, 'key', r.waited_key,
			                   'since', r.waited_since, 'until', r.created_at, 'event_id', r.output ->> 'event_id',
			                   'event', r.output ->> 'event', 'timed_out', r.output ->> 'timed_out') as wait
			            from replaced r where r.waited_for is not null
			          union all
			          select (l ->> 'until')::timestamptz, l from replaced r, jsonb_array_elements(r.waits) l
			          order by 1 limit 1000) w)
			insert into agent_checkpoints as c (execution_id, step, claim, output, waits)
			select @id, @step, @claim, @output, w.all from waits w
			on conflict (execution_id, step) do update
			   set claim = excluded.claim, output = excluded.output, created_at = clock_timestamp(),
			       waits = case when excluded.waits is null or jsonb_array_length(c.waits) >= 1000 then c.waits
			                    else jsonb_path_query_array(coalesce(c.waits, '[]') || excluded.waits, '$[0 to 999]') end`,
			postgres.Strict{
				"id": r.exec.ID, "step": s.key, "claim": r.exec.Claim, "output": output, "prefix": s.key + "@",
			})
	})
	return output, altered, r.handleWriteError(ctx, s, err, activity.Outcome{Output: state})
}
