package executions_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Everything that touches the same few runs at once: whoever is refused is refused for a reason of the product's, never
// by a deadlock; each step keeps its first output; and no step is recorded under a claim that was over.
func TestWorkersSweepsAndCancelsNeverDeadlock(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, nil)
	const runs, actors, rounds = 4, 12, 40
	ids := make([]string, runs)
	for i := range ids {
		ids[i] = p.external(t, handOn, func(s *executions.Spec) {
			s.MaxAttempts, s.ProgressSeconds = 1000, 1
			if i > 0 {
				s.ParentID, s.Awaited = ids[0], true
			}
		})
	}
	var recorded atomic.Int32
	began := time.Now()
	hopeful := func() bool { return recorded.Load() == 0 && time.Since(began) < patience } // a step has to be recorded, however slow the machine is
	group, ctx := errgroup.WithContext(t.Context())
	for a := range actors {
		group.Go(func() error {
			locks := map[string]string{}
			for n := 0; n < rounds || hopeful(); n++ {
				id := ids[rand.IntN(runs)]
				var err error
				switch what := rand.IntN(12); {
				case what < 4:
					var lock executions.RunLock
					if lock, err = p.LockRun(ctx, id, fmt.Sprint("actor ", a), time.Second); err == nil {
						locks[id] = lock.LockID
					}
				case what < 6:
					var anew bool
					if _, anew, err = p.CheckpointRun(ctx, id, locks[id], fmt.Sprint("step ", a, " ", n), json.RawMessage(`1`)); anew {
						recorded.Add(1)
					}
				case what < 8:
					all := []string{"none"}
					for _, l := range locks {
						all = append(all, l)
					}
					_, err = p.BeatRuns(ctx, all)
				case what == 8:
					_, _, err = p.UnlockRun(ctx, id, locks[id], executions.Release{Status: executions.Waiting, For: "event", Key: "k", Timeout: 50 * time.Millisecond})
				case what == 9:
					_, err = p.Deliver(ctx, pool, "EVENT_COMPLETED", "k", nil, "")
				case what == 10:
					_, err = pool.Exec(ctx, `update agent_workers set expires_at = clock_timestamp() - interval '1 ms' where execution_id = @id`,
						postgres.Strict{"id": id})
				default:
					err = p.Sweep(ctx)
				}
				if refused := new(executions.RunError); err != nil && !errors.As(err, &refused) {
					return fmt.Errorf("actor %d, round %d: %w", a, n, err)
				}
			}
			return nil
		})
	}
	group.Go(func() error {
		for wait := true; wait && ctx.Err() == nil; wait = hopeful() {
			select {
			case <-ctx.Done():
			case <-time.After(500 * time.Millisecond):
			}
		}
		_, err := p.Cancel(ctx, ids[0], "admin", "enough")
		return err
	})
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := value[int](t, pool, `select count(*)::int from agent_checkpoints where step like 'step %'`); n != int(recorded.Load()) || n == 0 {
		t.Errorf("%d steps are recorded, %d were confirmed", n, recorded.Load())
	}
	for _, id := range ids {
		if x := get(t, pool, id); x.Status != executions.Cancelled {
			t.Errorf("it is %+v", x)
		}
	}
}
