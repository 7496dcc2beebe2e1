package reason_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// crash is a place where the first process stops for good: its lease is over, and it wakes when all is done.
type crash struct {
	came chan string // the execution
	wake chan struct{}
	done atomic.Bool
}

func newCrash() *crash { return &crash{came: make(chan string, 1), wake: make(chan struct{})} }

// here stops the first who comes.
func (c *crash) here(ctx context.Context) {
	if !c.done.CompareAndSwap(false, true) {
		return
	}
	x, _ := executions.Current(ctx)
	c.came <- x.ID
	<-c.wake
}

// survive runs the turn in a process that stops at c, and then in another. It returns how the execution
// ended, or as it was if the first process never came to c.
func (w *world) survive(t *testing.T, c *crash) executions.Execution {
	t.Helper()
	var alone executions.Execution
	var first errgroup.Group
	over := make(chan struct{})
	engine := w.engine(t, false)
	first.Go(func() (err error) {
		defer close(over)
		alone, err = engine.RunSync(context.WithoutCancel(t.Context()), executions.Spec{Flow: "turn", Surface: trace.Flow})
		return err
	})
	var id string
	select {
	case id = <-c.came:
	case <-over:
		if err := first.Wait(); err != nil {
			t.Fatal(err)
		}
		return alone
	case <-t.Context().Done():
		t.Fatal("neither crashed nor ended")
	}
	pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
	w.engine(t, true)
	var got executions.Execution
	pgtest.Eventually(t, patience, func() bool {
		var err error
		got, err = executions.Get(t.Context(), w.pool, id)
		return err == nil && got.Status.Ended()
	}, "another process ends the execution")
	close(c.wake)
	if err := first.Wait(); err != nil {
		t.Fatal(err)
	}
	return got
}

// plan answers by what has been said, so that a request which is made twice is answered alike.
func (w *world) plan(replies ...modeltest.Reply) {
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		answers := 0
		for _, m := range req.Messages {
			if m.Role == openai.ChatMessageRoleAssistant {
				answers++
			}
		}
		return replies[min(answers, len(replies)-1)]
	})
}

// work is a turn with a result whose keys and numbers PostgreSQL writes differently, a bad call, an unknown one,
// a failing skill, and one that needs leave.
func (w *world) work(t *testing.T) *atomic.Int32 {
	t.Helper()
	calls := &atomic.Int32{}
	w.builtins["sizes"] = func(context.Context, skills.Call) (any, error) {
		calls.Add(1)
		return json.RawMessage(`{"zebra": 1e-07, "b": {"long key": -0.0, "k": 1.50e1}, "a": "<b>&", "zz": 1E3}`), nil
	}
	w.builtins["broken"] = func(context.Context, skills.Call) (any, error) {
		calls.Add(1)
		return nil, &skills.CallError{Class: "http_status", Message: "503"}
	}
	w.put(t, skills.Definition{Name: "broken", Idempotent: true})
	w.put(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove})
	w.builtins["drop"] = func(context.Context, skills.Call) (any, error) {
		t.Error("a skill that needs leave was called")
		return nil, nil
	}
	w.plan(
		modeltest.ToolCall("sizes", `{"limit":3}`).AndCall("sizes", `{"limit":0}`),
		modeltest.ToolCall("nope", `{}`),
		modeltest.ToolCall("broken", `{}`).AndCall("drop", `{"table":"x"}`).WithUsage(10, 5, 0),
		modeltest.Text("Done."),
	)
	w.put(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove, Parameters: map[string]any{
		"type": "object", "properties": map[string]any{"table": map[string]any{"type": "string"}},
	}})
	return calls
}

// transcripts are the messages of each request, by idempotency key; two requests under one key must agree.
func (w *world) transcripts(t *testing.T) map[string]string {
	t.Helper()
	got := map[string]string{}
	for _, r := range w.model.Requests() {
		key := r.IdempotencyKey()
		if key == "" {
			t.Error("a request has no idempotency key")
		}
		if said, again := got[key]; again && said != r.Body {
			t.Errorf("two requests under one key differ:\n%s", cmp.Diff(said, r.Body))
		}
		got[key] = r.Body
	}
	return got
}

func TestCrashBetweenAnyTwoStepsRepeatsNothing(t *testing.T) {
	t.Parallel()
	for at := 1; ; at++ {
		ended := false
		ok := t.Run(fmt.Sprintf("before new step %d", at), func(t *testing.T) {
			w := newWorld(t)
			calls := w.work(t)
			c := newCrash()
			var steps atomic.Int32
			w.wrap = func(ctx context.Context) context.Context {
				return executions.Gate(ctx, func(ctx context.Context) error {
					if int(steps.Add(1)) == at {
						c.here(ctx)
					}
					return nil
				})
			}
			x := w.survive(t, c)
			ended = !c.done.Load()
			got := outcome(t, x)
			if x.Status != executions.Completed || got.Text != "Done." || got.Iterations != 4 {
				t.Fatalf("execution is %s (%s), outcome %+v", x.Status, testkit.Deref(x.ErrorMessage), got)
			}
			if n := len(w.model.Requests()); n != 4 || len(w.transcripts(t)) != 4 {
				t.Errorf("the model was asked %d times, want 4", n)
			}
			if calls.Load() != 2 {
				t.Errorf("skills were called %d times, want 2", calls.Load())
			}
			if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_approvals`); n != 1 {
				t.Errorf("%d approvals, want 1", n)
			}
			if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_activity where status = 'pending_approval'`); n != 1 {
				t.Errorf("%d rows that await approval, want 1", n)
			}
			if want := []string{"sizes", "broken (failed)", "drop (awaits approval)"}; !slices.Equal(got.Calls, want) {
				t.Errorf("calls are %q", got.Calls)
			}
		})
		if ended || !ok {
			if at < 9 {
				t.Errorf("the turn had %d steps only", at-1)
			}
			return
		}
	}
}

func TestCrashDuringAModelCallAsksAgainUnderTheSameKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := newCrash()
	var asked atomic.Int32
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		switch {
		case len(req.Messages) == 2:
			return modeltest.ToolCall("probe", `{}`)
		case asked.Add(1) == 1: // the process dies while it waits for this answer
			c.done.Store(true)
			c.came <- pgtest.Value[string](t, w.pool, `select id::text from agent_executions`)
			return modeltest.Custom(func(http.ResponseWriter, *http.Request) {
				<-c.wake
				panic(http.ErrAbortHandler)
			})
		}
		return modeltest.Text("Done.")
	})
	x := w.survive(t, c)
	if x.Status != executions.Completed {
		t.Fatalf("execution is %s: %s", x.Status, testkit.Deref(x.ErrorMessage))
	}
	if n := len(w.transcripts(t)); n != 2 || asked.Load() != 2 && asked.Load() != 3 {
		t.Errorf("%d keys were used, and the last was asked %d times", n, asked.Load())
	}
}

func TestCrashDuringASkillCall(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		idempotent bool
		calls      int32
		reply      string
		ended      string
	}{
		"idempotent": {true, 2, `"alive"`, "success"},
		"not":        {false, 1, `"error":"unknown"`, "unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			c := newCrash()
			var calls atomic.Int32
			keys := make(chan string, 5)
			w.builtins["act"] = func(ctx context.Context, call skills.Call) (any, error) {
				calls.Add(1)
				keys <- call.IdempotencyKey
				c.here(ctx)
				return "alive", nil
			}
			w.put(t, skills.Definition{Name: "act", Idempotent: test.idempotent})
			w.plan(modeltest.ToolCall("act", `{}`), modeltest.Text("Done."))
			x := w.survive(t, c)
			if x.Status != executions.Completed || calls.Load() != test.calls {
				t.Fatalf("execution is %s, %d calls", x.Status, calls.Load())
			}
			if test.calls == 2 {
				if first, second := <-keys, <-keys; first != second {
					t.Errorf("the second call had the key %s, the first %s", second, first)
				}
			}
			requests := w.model.Requests()
			last := requests[len(requests)-1].Messages
			if len(requests) != 2 || !strings.Contains(last[len(last)-1].Content, test.reply) {
				t.Errorf("%d requests; the model was told %q", len(requests), last[len(last)-1].Content)
			}
			states := pgtest.Value[[]string](t, w.pool, `
				select array_agg(status order by id) from agent_activity
				 where execution_id = @id and skill_name = 'act' and error_class <> 'stale'`, postgres.Strict{"id": x.ID})
			if states[len(states)-1] != test.ended || slices.Contains(states, "running") {
				t.Errorf("rows are %q", states)
			}
		})
	}
}

func TestAWaitOfTheTurnDoesNotUseItsTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.plan(modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.loop.Budget = reason.Budget{Time: 4 * time.Second}
	var steps atomic.Int32
	w.wrap = func(ctx context.Context) context.Context {
		return executions.Gate(ctx, func(ctx context.Context) error {
			if steps.Add(1) != 3 && steps.Load() != 4 { // before the skill's call, and again on the way back to it
				return nil
			}
			_, err := executions.Wait(ctx, "somebody else first", executions.Delay(4500*time.Millisecond))
			return err
		})
	}
	e := w.engine(t, true)
	x, err := e.RunSync(t.Context(), executions.Spec{Flow: "turn", Surface: trace.Flow})
	if err != nil || x.Status != executions.Waiting {
		t.Fatalf("execution is %s: %v", x.Status, err)
	}
	pgtest.Eventually(t, patience, func() bool {
		x, err = executions.Get(t.Context(), w.pool, x.ID)
		return err == nil && x.Status.Ended()
	}, "the turn goes on")
	if got := outcome(t, x); got.Ended != reason.Answered {
		t.Errorf("outcome is %+v", got)
	}
}
