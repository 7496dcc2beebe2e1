// Package enginetest starts engines for tests and waits for their executions.
package enginetest

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// New returns an engine that sweeps often. The functions change its options.
func New(tb testing.TB, pool *pgxpool.Pool, change ...func(*executions.Options)) *executions.Engine {
	tb.Helper()
	o := executions.Options{SweepEvery: 100 * time.Millisecond, LeaseTTL: 20 * time.Second}
	for _, c := range change {
		c(&o)
	}
	if o.Keeper == nil {
		o.Keeper = lanes.NewKeeper(pool, lanes.Options{})
	}
	e, err := executions.New(pool, o)
	require.NoError(tb, err)
	return e
}

// Register registers a flow.
func Register(
	tb testing.TB, e *executions.Engine, flow string,
	fn func(ctx context.Context, input json.RawMessage) (executions.Result, error),
) {
	tb.Helper()
	require.NoError(tb, e.Register(flow, fn))
}

// Await waits until an execution has a status. It fails if the execution ends with another one.
func Await(tb testing.TB, db postgres.DB, id string, want executions.Status) (x executions.Execution) {
	tb.Helper()
	pgtest.Eventually(tb, func() bool {
		var err error
		if x, err = executions.Get(tb.Context(), db, id); err == nil && x.Status != want && x.Status.Ended() {
			tb.Fatalf("execution %s is %s, not %s: %s", id, x.Status, want, message(x))
		}
		return err == nil && x.Status == want
	}, "execution "+id+" is "+string(want))
	return x
}

// message returns the failed step and the error of an execution.
func message(x executions.Execution) (text string) {
	for _, part := range []*string{x.FailedStep, x.ErrorMessage} {
		if part != nil {
			text += *part + " "
		}
	}
	return text
}

// ReserveDay reserves the tokens of a prompt and an answer for a new execution, within a limit of the day. It returns
// the execution's id; the step is "model".
func ReserveDay(tb testing.TB, db postgres.DB, limit, prompt, answer int64) (id string) {
	tb.Helper()
	id = pgtest.Value[string](tb, db, `
		with w as (insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 hour') returning id)
		insert into agent_executions (trace_id, surface, flow, status, claim, claimed_by)
		select 'fl_x', 'flow', 'other', 'running', 1, id from w returning id::text`)
	pgtest.Exec(tb, db, `
		select lanekeeper.reserve_agent_budget($4, 1, 'model',
		         jsonb_build_array(jsonb_build_object('scope', 'day:{day}', 'tokens', $1::bigint, 'usd', 0)),
		         jsonb_build_object('prompt_tokens', $2::bigint, 'prompt_usd', 0, 'token_usd', 0, 'wanted', $3::bigint,
		           'enough', $3, 'least', $3))`, limit, prompt, answer, id)
	return id
}
