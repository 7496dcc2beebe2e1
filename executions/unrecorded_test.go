package executions_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// unwritable keeps everybody from recording steps, and nobody from reading them, until the returned function is called.
func unwritable(t *testing.T, pool *pgxpool.Pool) (end func()) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	exec(t, tx, `lock table agent_checkpoints in share row exclusive mode`)
	ended := false
	end = func() {
		if !ended {
			ended = true
			if err := tx.Rollback(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(end)
	return end
}

func shortLease(o *executions.Options) { o.LeaseTTL = time.Second }

// The result of a step could not be written for as long as a lease lasts. That is no result: the run ends, the execution goes
// on elsewhere, and the step is made again.
func TestAResultThatCannotBeWrittenHandsTheRunOn(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	told := make(chan error, 1)
	var calls atomic.Int32
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		n, err := executions.Step(ctx, "step", func(context.Context) (int32, error) { return calls.Add(1), nil })
		if err != nil {
			select {
			case told <- err:
			default: // of a later try
			}
		}
		return ends(n, err)
	}), shortLease)
	end := unwritable(t, pool)
	id := p.begin(t, "flow")
	if err := receive(t, told); !errors.Is(err, executions.ErrLost) {
		t.Errorf("the flow was told %v", err)
	}
	end()
	x := until(t, pool, id, executions.Completed)
	if calls.Load() < 2 || string(x.Result) == "1" {
		t.Errorf("the step ran %d times, and ended with %s", calls.Load(), x.Result)
	}
}

// Meanwhile somebody else has the claim: the result came too late, and the log says what it would have been.
func TestAResultThatCameTooLateIsNoted(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	told := make(chan error, 1)
	var calls atomic.Int32
	body := flow(func(ctx context.Context) (executions.Result, error) {
		n, err := executions.Step(ctx, "step", func(ctx context.Context) (int32, error) {
			if calls.Add(1) > 1 {
				return 2, nil
			}
			x, _ := executions.Current(ctx)
			_, err := pool.Exec(ctx, `update agent_executions set claim = claim + 1, claimed_by = null, hinted_at = 'epoch' where id = @id`,
				postgres.Strict{"id": x.ID})
			return 1, err
		})
		if err != nil {
			told <- err
		}
		return ends(n, err)
	})
	ghost := prepare(t, pool, body, shortLease)
	end := unwritable(t, pool)
	wait := ghost.runAside(t)
	if err := receive(t, told); !errors.Is(err, executions.ErrStale) {
		t.Errorf("the flow was told %v", err)
	}
	end()
	x := wait()
	start(t, pool, body)
	if x = until(t, pool, x.ID, executions.Completed); string(x.Result) != "2" {
		t.Errorf("ended with %s", x.Result)
	}
	noted := value[string](t, pool, `
		select output ->> 'output' from agent_activity where execution_id = @id and skill_name = 'stale_write' and error_class = 'stale'`,
		postgres.Strict{"id": x.ID})
	if noted != "1" {
		t.Errorf("the log says it would have been %s", noted)
	}
}
