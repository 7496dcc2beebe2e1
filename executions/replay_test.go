package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

func replay(t *testing.T, p *testEngine, id string) executions.Replayed {
	t.Helper()
	got, err := p.Replay(t.Context(), id)
	require.NoError(t, err)
	require.Truef(t, got.Equal == (got.Divergence == nil) && got.Equal == (got.Digest == got.ReplayDigest),
		"digest and divergence contradict each other: %+v", got)
	return got
}

func TestReplayHasNoEffects(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	createEffects(t, pool)
	var done atomic.Int32
	flows := flowMap(func(ctx context.Context) (executions.Result, error) {
		// The database writes 1e21 and 0.50 in another form than encoding/json.
		act := func(context.Context) (float64, error) { done.Add(1); return 1e21, nil }
		n, err := executions.Step(ctx, "step", act)
		if err != nil {
			return executions.Result{}, err
		}
		hold, err := executions.Lane(ctx, "lane:x")
		if err != nil {
			return executions.Result{}, err
		}
		_, err = executions.Do(hold.Context(), "call",
			executions.Call{Entry: activity.Entry{Skill: "call"}, Idempotent: true},
			func(ctx context.Context, _ *executions.Effect) (float64, error) { return act(ctx) })
		if err != nil {
			return executions.Result{}, err
		}
		_, err = executions.StepTx(ctx, "write", func(ctx context.Context, tx pgx.Tx) (int, error) {
			done.Add(1)
			_, err := tx.Exec(ctx, `insert into effects (by) values ('x')`)
			return 0, err
		})
		if err != nil {
			return executions.Result{}, err
		}
		if err := hold.Release(ctx); err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Trigger(ctx, "child", executions.Child{Flow: "flow2", Wait: true}); err != nil {
			return executions.Result{}, err
		}
		_, err = executions.Wait(ctx, "pause", executions.Delay(time.Millisecond))
		return executions.Result{Summary: "done", Value: map[string]any{"n": n, "half": 0.50}}, err
	})
	flows["flow2"] = func(context.Context, json.RawMessage) (executions.Result, error) {
		return executions.Result{}, nil
	}
	p := startEngine(t, pool, flows)
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Completed)
	const count = `select count(*) from agent_executions`
	const token = `select fencing_token from agent_locks where lane = 'lane:x'` // grows with each acquisition
	dump, calls := dumpExecution(t, pool, id), done.Load()
	children, tokenBefore := pgtest.Value[int](t, pool, count), pgtest.Value[int64](t, pool, token)
	for range 2 {
		got := replay(t, p, id)
		// step, call, write, the child's start, wait and result, pause
		assert.Truef(t, got.Equal && got.Steps == 7 && got.Status == executions.Completed,
			"replay is %+v, %+v", got, got.Divergence)
	}
	assert.Equal(t, calls, done.Load(), "the replay called a step")
	assert.Equal(t, dump, dumpExecution(t, pool, id), "the replay changed the execution")
	assert.Equal(t, children, pgtest.Value[int](t, pool, count), "the replay started a child")
	assert.Equal(t, tokenBefore, pgtest.Value[int64](t, pool, token), "the replay acquired a lane")
}

// The flow differs from the recorded one as the case says.
func TestReplayReportsDivergence(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var how atomic.Value
	how.Store("")
	step := func(ctx context.Context, name string, opts ...executions.Option) error {
		_, err := executions.Step(ctx, name, func(context.Context) (string, error) { return name, nil }, opts...)
		return err
	}
	code := func(ctx context.Context) (executions.Result, error) {
		var names []string
		input := "same"
		switch how.Load() {
		case "order":
			names = []string{"b", "a", "c"}
		case "more":
			names = []string{"a", "b", "new", "c"}
		case "more at the end":
			names = []string{"a", "b", "c", "new"}
		case "less", "less, and failure":
			names = []string{"a", "b"}
		case "input":
			names, input = []string{"a", "b", "c"}, "other"
		case "wait":
			if _, err := executions.Wait(ctx, "pause", executions.Delay(time.Hour)); err != nil {
				return executions.Result{}, err
			}
		case "ask":
			err := pool.QueryRow(ctx, `select 1`).Scan(new(int))
			return executions.Result{}, err
		case "type":
			_, err := executions.Step(ctx, "a", func(context.Context) (int, error) { return 1, nil })
			return executions.Result{}, err
		default:
			names = []string{"a", "b", "c"}
		}
		for _, name := range names {
			var opts []executions.Option
			if name == "b" {
				opts = append(opts, executions.Input(input))
			}
			if err := step(ctx, name, opts...); err != nil {
				return executions.Result{}, err
			}
		}
		switch how.Load() {
		case "result":
			return executions.Result{Summary: "otherwise"}, nil
		case "failure", "less, and failure":
			return executions.Result{}, errors.New("out of order")
		case "panic":
			panic("out of order")
		case "ignoring":
			_, _ = executions.Wait(ctx, "pause", executions.Delay(time.Hour))
		}
		return executions.Result{Summary: "done"}, nil
	}
	p := startEngine(t, pool, flowMap(code))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Completed)
	before := dumpExecution(t, pool, id)
	for change, want := range map[string][2]string{
		"":                  {"", ""},
		"order":             {"b", executions.DivergedOrder},
		"more":              {"new", executions.DivergedUnrecorded},
		"more at the end":   {"new", executions.DivergedUnrecorded},
		"less":              {"c", executions.DivergedUnreached},
		"less, and failure": {"c", executions.DivergedUnreached}, // the message has the flow's error
		"input":             {"b", executions.DivergedInput},
		"type":              {"a", executions.DivergedInput},
		"wait":              {"pause", executions.DivergedUnrecorded},
		"ignoring":          {"pause", executions.DivergedUnrecorded},
		"ask":               {"", executions.DivergedDatabase},
		"result":            {"c", executions.DivergedResult},
		"failure":           {"c", executions.DivergedResult},
		"panic":             {"c", executions.DivergedResult},
	} {
		how.Store(change)
		got := replay(t, p, id)
		if change == "" {
			assert.Truef(t, got.Equal, "unchanged: %+v", got.Divergence)
			continue
		}
		require.Truef(t, !got.Equal, "%s: the replay is equal, want %v", change, want)
		assert.Truef(t, got.Divergence.Step == want[0] && got.Divergence.Kind == want[1] && got.Divergence.Message != "",
			"%s: %+v, want %v", change, got.Divergence, want)
		if strings.HasSuffix(change, "failure") && !strings.HasSuffix(got.Divergence.Message, ": out of order") {
			t.Errorf("%s: the reason is missing: %s", change, got.Divergence.Message)
		}
	}
	assert.Equal(t, before, dumpExecution(t, pool, id))
}

// A replay keeps the order of parallel branches: a branch that ends the others does not end them earlier.
func TestReplayOfParallelBranches(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	last := make(chan struct{})
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error {
			ctx := executions.Scope(ctx, "steady")
			for range 20 {
				if _, err := executions.Step(ctx, "s", func(context.Context) (int, error) { return 1, nil }); err != nil {
					return err
				}
			}
			select {
			case <-last:
			default:
				close(last)
			}
			_, err := executions.Wait(ctx, "long", executions.Event("never", 0))
			return err
		})
		group.Go(func() error {
			_, err := executions.Step(executions.Scope(ctx, "quick"), "fails", func(context.Context) (int, error) {
				<-last
				return 0, errors.New("no")
			})
			return err
		})
		return executions.Result{}, group.Wait()
	}))
	id := p.startFlow(t, "flow")
	pgtest.Eventually(t, func() bool {
		x := getExecution(t, pool, id)
		return x.Status == executions.Failed || x.Status == executions.Waiting
	}, "it ends or waits")
	for range 20 {
		got := replay(t, p, id)
		require.Truef(t, got.Equal, "%s: %+v", got.Status, got.Divergence)
	}
}

// A replay takes a timed-out step from the record, even if its limit passes again before its turn.
func TestReplayReturnsRecordedTimeout(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	recorded := make(chan struct{})
	var once sync.Once
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		var group errgroup.Group
		group.Go(func() error {
			time.Sleep(50 * time.Millisecond) // in a replay the other branch is first
			_, err := executions.Step(executions.Scope(ctx, "one"), "first",
				func(context.Context) (int, error) { return 1, nil })
			once.Do(func() { close(recorded) })
			return err
		})
		group.Go(func() error {
			<-recorded
			ctx, cancel := context.WithTimeout(executions.Scope(ctx, "other"), time.Millisecond)
			defer cancel()
			_, err := executions.Step(ctx, "bounded", func(ctx context.Context) (int, error) {
				<-ctx.Done()
				return 0, ctx.Err()
			})
			if _, ok := errors.AsType[*executions.StepError](err); ok {
				return nil
			}
			return fmt.Errorf("the step has no recorded end: %w", err)
		})
		return executions.Result{}, group.Wait()
	}))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Completed)
	got := replay(t, p, id)
	assert.Truef(t, got.Equal, "%+v", got.Divergence)
}

func TestReplayRejectsUnknownFlow(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(noop))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Completed)
	other := newEngine(t, pool, nil)
	_, err := other.Replay(t.Context(), id)
	assert.Truef(t, err != nil && errors.Is(err, executions.ErrUnknownFlow), "got %v", err)
	_, err = other.Replay(t.Context(), "nonsense")
	assert.ErrorIs(t, err, executions.ErrNotFound)
}

// A running phase has no record yet. A replay enters it, up to the end of the records.
func TestReplayEntersUnfinishedPhase(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var changed atomic.Bool
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		_, err := executions.Phase(ctx, "outer", func(ctx context.Context, _ *executions.Effect) (int, error) {
			if _, err := executions.Step(ctx, "a", func(context.Context) (int, error) { return 1, nil }); err != nil {
				return 0, err
			}
			return executions.Step(ctx, "inner", func(ctx context.Context) (int, error) {
				name := "news"
				if changed.Load() {
					name = "other"
				}
				_, err := executions.Wait(ctx, name, executions.Event("news", 0))
				return 1, err
			})
		})
		return executions.Result{}, err
	}))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Waiting)
	before := dumpExecution(t, pool, id)
	got := replay(t, p, id)
	assert.Truef(t, got.Equal, "waiting: %+v", got.Divergence)
	assert.Equal(t, "outer/inner/news", got.EndedAt)
	assert.Equal(t, 1, got.Steps, "steps")
	changed.Store(true)
	got = replay(t, p, id)
	assert.Truef(t, !got.Equal && got.Divergence.Step == "outer/inner/other", "changed: %+v", got.Divergence)
	assert.Equal(t, before, dumpExecution(t, pool, id))
	changed.Store(false)
	_, err := p.Cancel(t.Context(), id, "test", "enough")
	require.NoError(t, err)
	if got := replay(t, p, id); !got.Equal || got.EndedAt != "outer/inner/news" && got.EndedAt != "outer/inner" {
		t.Errorf("cancelled: %+v, %+v", got, got.Divergence)
	}
}

// FuzzStoredText has code return any text and raw JSON wherever it may: as result, summary and error, and in the
// activity log. The database cannot store NUL or half of a surrogate pair, so the engine may replace them. But the run
// ends as the code decided, and reading the result of its step returns the same value.
func FuzzStoredText(f *testing.F) {
	pool := pgtest.DB(f)
	e, err := executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
	require.NoError(f, err)
	var text, raw string
	var stored map[string]string
	err = e.Register("says", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		texts, err := executions.Step(ctx, "text", func(context.Context) (map[string]string, error) {
			return map[string]string{"a": text, text: "b"}, nil
		})
		if err != nil {
			return executions.Result{}, err
		}
		stored = texts
		_, failure := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "call", Input: text}},
			func(context.Context, *executions.Effect) (json.RawMessage, error) {
				if json.Valid([]byte(raw)) {
					return json.RawMessage(raw), nil
				}
				return nil, errors.New(raw)
			})
		if executions.IsControl(failure) {
			return executions.Result{}, failure
		}
		return executions.Result{Summary: text, Value: []any{texts, raw}}, nil
	})
	require.NoError(f, err)
	for _, s := range []string{
		"", "a", "\x00", `"\u0000"`, `"\ud800"`, `["\udc00\ud800", "\ud83d\ude00"]`, "\xff", "\xed\xa0\x80", `1e400`,
		`{"a\u0000": 1, "a\ufffd": 2}`, `{"\ud800": "\uD800"}`,
		`-0.0`, `1E-7000`, strings.Repeat("[", 7000) + strings.Repeat("]", 7000), `"\\u0000"`, `"\\\u0000"`,
		`123456789012345678901234567890.5`, "\u2028",
	} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, one, two string) {
		text, raw = one, two
		x, err := e.RunSync(t.Context(), executions.Spec{Flow: "says", Surface: trace.Flow})
		require.Truef(t, err == nil && x.Status == executions.Completed,
			"%q and %q: %s %s, %v", one, two, x.Status, postgres.Deref(x.ErrorMessage), err)
		assert.Truef(t, utf8.ValidString(x.ResultSummary), "the summary of %q is %q", one, x.ResultSummary)
		recorded := recordedOf(t, pool, x.ID)
		i := slices.IndexFunc(recorded, func(c executions.Checkpoint) bool { return c.Step == "text" })
		require.Truef(t, i >= 0, "step text is not recorded: %+v", recorded)
		var again map[string]string
		require.NoError(t, json.Unmarshal(recorded[i].Output, &again))
		assert.Truef(t, maps.Equal(stored, again), "%q: the step returned %q, later runs get %q", one, stored, again)
	})
}

// recordedOf returns the checkpoints of an execution.
func recordedOf(t *testing.T, db postgres.DB, id string) []executions.Checkpoint {
	t.Helper()
	got, err := executions.Checkpoints(t.Context(), db, id)
	require.NoError(t, err)
	return got
}
