package resourcefaults_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// engine runs an engine of this process until the test ends.
func engine(t *testing.T, pool *pgxpool.Pool, flows map[string]executions.Func, log *testkit.Log,
	change ...func(*executions.Options),
) *executions.Engine {
	t.Helper()
	opts := executions.Options{
		Keeper: lanes.NewKeeper(pool, lanes.Options{}), SweepEvery: 100 * time.Millisecond, LeaseTTL: 2 * time.Second,
		Logger: slog.New(slog.NewTextHandler(log, nil)),
	}
	for _, c := range change {
		c(&opts)
	}
	e, err := executions.New(pool, opts)
	require.NoError(t, err)
	for name, fn := range flows {
		require.NoError(t, e.Register(name, fn))
	}
	testkit.Run(t, e.Run)
	return e
}

// largeText returns an incompressible text that needs new pages.
func largeText() string {
	b := make([]byte, 128<<10)
	rand.Read(b)
	return hex.EncodeToString(b)
}

// TestUnrecordableStepEndsRun: the run ends, and its error names the fault. The execution keeps a true state. It
// completes after the fault, and takes earlier steps from the record.
func TestUnrecordableStepEndsRun(t *testing.T) {
	t.Parallel()
	for name, arrange := range faults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bad := arrange(t)
			db := admin(t, bad.url)
			pool := pgtest.Pool(t, bad.url, postgres.Options{ApplicationName: "engine"})
			var first, second atomic.Int32
			at, outcome, log := newGate(), newFirstError(), &testkit.Log{}
			e := engine(t, pool, map[string]executions.Func{"two": func(ctx context.Context,
				_ json.RawMessage,
			) (executions.Result, error) {
				if _, err := executions.Step(ctx, "first",
					func(context.Context) (int32, error) { return first.Add(1), nil }); err != nil {
					return executions.Result{}, err
				}
				_, err := executions.Step(ctx, "second", func(context.Context) (string, error) {
					second.Add(1)
					at.enter()
					return largeText(), nil
				})
				outcome.set(err)
				return executions.Result{Summary: "done"}, err
			}}, log)
			x, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "two", Surface: trace.Flow})
			require.NoError(t, err)
			testkit.Receive(t, at.entered)
			bad.begin()
			close(at.opened)
			assert.ErrorIs(t, testkit.Receive(t, outcome.ch), executions.ErrLost)
			got := pgtest.Value[string](t, db, `select status from agent_executions where id = $1`, x.ID)
			assert.Truef(t, got == "running" || got == "pending", "the execution is %s, and its step is not recorded", got)
			assert.Equal(t, 1, pgtest.Value[int](t, db, `select count(*) from agent_checkpoints where execution_id = $1`, x.ID))
			bad.end()
			eventually(t, "the execution completes", func() bool {
				return pgtest.Value[string](t, db, `select status from agent_executions where id = $1`, x.ID) == "completed"
			})
			assert.Truef(t, first.Load() == 1 && second.Load() >= 2,
				"the first step ran %d times, the second %d times", first.Load(), second.Load())
			assert.Contains(t, log.String(), "database unavailable, trying again", bad.message, bad.hint)
		})
	}
}

// TestAcknowledgedWorkIsStored has starts, events and steps with an effect in the database, while the fault comes and
// goes. All work that was confirmed without an error exists, and had its effect once.
func TestAcknowledgedWorkIsStored(t *testing.T) {
	t.Parallel()
	for name, arrange := range faults {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bad := arrange(t)
			db := admin(t, bad.url)
			pgtest.Exec(t, db, `create table effects (by text not null, what text not null)`)
			pool := pgtest.Pool(t, bad.url, postgres.Options{ApplicationName: "engine"})
			e := engine(t, pool, map[string]executions.Func{"effect": effect}, &testkit.Log{})
			var started, events []string
			refused := func(round int) (failed error) {
				for i := range 400 {
					x, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "effect", Surface: trace.Flow, Input: largeText()})
					if err == nil {
						started = append(started, x.ID)
					}
					event := rand.Text()
					_, other := e.Deliver(t.Context(), pool, "EVENT_COMPLETED", event, json.RawMessage(`"`+largeText()+`"`), event)
					if other == nil {
						events = append(events, event)
					}
					if failed = errors.Join(err, other); failed != nil || round == 0 && i == 5 {
						return failed
					}
				}
				return nil
			}
			require.NoError(t, refused(0))
			for round := range 2 {
				bad.begin()
				if err := refused(round + 1); err == nil {
					t.Error("nothing was refused")
				} else if what, _ := postgres.Diagnose(err); !strings.Contains(what, bad.message) {
					t.Errorf("the rejected request returned %v", err)
				}
				bad.end()
				eventually(t, "work is taken again", func() bool { return refused(0) == nil })
			}
			eventually(t, "all that was started has ended", func() bool {
				return pgtest.Value[int](t, db, `select count(*) from agent_executions where completed_at is null`) == 0
			})
			for what, sql := range map[string]string{
				"executions that were acknowledged and are not completed": `
					select count(*) from unnest($1::text[]) a left join agent_executions x on x.id = a::uuid where x.status is distinct
					  from 'completed'`,
				"executions with an effect that is not there, or twice": `
					select count(*) from unnest($1::text[]) a where (select count(*) from effects where by = a) <> 1`,
			} {
				assert.Equal(t, 0, pgtest.Value[int](t, db, sql, started), len(started), what)
			}
			lost := pgtest.Value[int](t, db, `select count(*) from unnest($1::text[]) a
				where not exists (select from agent_events where key = a)`, events)
			assert.Equal(t, 0, lost, len(events))
		})
	}
}

// effect writes a row and its checkpoint in one transaction.
func effect(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	x, _ := executions.Current(ctx)
	_, err := executions.StepTx(ctx, "write", func(ctx context.Context, tx pgx.Tx) (int, error) {
		_, err := tx.Exec(ctx, `insert into effects (by, what) values (@by, @what)`,
			postgres.Strict{"by": x.ID, "what": string(bytes.Trim(input, `"`))})
		return 1, err
	})
	return executions.Result{}, err
}

// gate blocks the first caller.
type gate struct {
	entries         atomic.Int32
	entered, opened chan struct{}
}

func newGate() *gate { return &gate{entered: make(chan struct{}), opened: make(chan struct{})} }

func (g *gate) enter() {
	if g.entries.Add(1) == 1 {
		close(g.entered)
		<-g.opened
	}
}

// firstError keeps the first error of a flow.
type firstError struct{ ch chan error }

func newFirstError() firstError { return firstError{make(chan error, 1)} }

func (h firstError) set(err error) {
	select {
	case h.ch <- err:
	default:
	}
}
