package executions

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// snapshotEvery is how many iterations of a Loop lie between two snapshots.
const snapshotEvery = 16

// snapshot is the record of a Loop: its state before an iteration.
type snapshot[S any] struct {
	Next  int  `json:"next"`
	State S    `json:"state"`
	Done  bool `json:"done"`
}

// Loop calls body with the state that the call before returned, until body says that it is done, and
// returns the last state. It is for loops that may be long: after every 16 iterations the state takes the
// place of the records of the steps in them, so that a claim has at most 16 iterations to replay however
// many there were. Each iteration is a scope of its own. S must survive encoding/json, and body must put
// into its state whatever later iterations need.
func Loop[S any](ctx context.Context, name string, state S, body func(ctx context.Context, state S) (S, bool, error)) (S, error) {
	s := spec{name: name}
	r, err := s.begin(ctx)
	if err != nil {
		return state, err
	}
	at := snapshot[S]{State: state}
	if err := r.loopReplayed(ctx, s); err != nil {
		return state, err
	}
	r.mu.Lock()
	point, resumed := r.checkpoints[s.key]
	r.mu.Unlock()
	if resumed {
		if err := json.Unmarshal(point.Output, &at); err != nil {
			return state, r.changed(s.key, fmt.Errorf("loop %s: its record does not fit %T (%w): %w", s.key, state, err, ErrChanged))
		}
	}
	for !at.Done {
		at.State, at.Done, err = body(under(ctx, fmt.Sprintf("%s@%d/", s.key, at.Next)), at.State)
		if err != nil {
			return at.State, err
		}
		at.Next++
		if at.Done || at.Next%snapshotEvery == 0 {
			stored, mended, err := r.snapshot(ctx, s, at)
			if err == nil && mended { // what goes on from the snapshot has no other state
				at, err = decode[snapshot[S]](stored)
			}
			if err != nil {
				return at.State, err
			}
		}
	}
	return at.State, nil
}

// snapshot records a loop's state in place of the steps of its iterations, in one transaction. The fence
// is the checkpoint's own.
func (r *run) snapshot(ctx context.Context, s spec, at any) (output json.RawMessage, mended bool, err error) {
	if r.replay != nil {
		return nil, false, r.replay.beyond(r, s.key)
	}
	if err := r.flushDeferred(ctx); err != nil { // lest a record comes after those that the state stands for
		return nil, false, err
	}
	if output, mended, err = encode(at); err != nil {
		return nil, false, fmt.Errorf("loop %s: encode state: %w", s.key, err)
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.e.opts.LeaseTTL)
	defer cancel()
	err = r.write(bounded, func(b *pgx.Batch) {
		b.Queue(`
			insert into agent_checkpoints as c (execution_id, step, claim, output) values (@id, @step, @claim, @output)
			on conflict (execution_id, step) do update
			   set claim = excluded.claim, output = excluded.output, created_at = clock_timestamp()`,
			postgres.Strict{"id": r.exec.ID, "step": s.key, "claim": r.exec.Claim, "output": output})
		b.Queue(`
			delete from agent_checkpoints
			 where execution_id = @id and starts_with(step, @prefix) and substr(step, length(@prefix) + 1) ~ '^[0-9]+/'`,
			postgres.Strict{"id": r.exec.ID, "prefix": s.key + "@"})
	})
	return output, mended, r.written(ctx, s, err, activity.Outcome{Output: at})
}
