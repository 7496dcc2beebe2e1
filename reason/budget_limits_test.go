package reason_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/trace"
)

// book is what the day's scope has: spent tokens, how much of that is unknown, tokens set aside.
type book struct {
	Spent, Unknown, Aside int64
}

func (w *world) book(t *testing.T) (b book) {
	t.Helper()
	standings, err := budgets.Today(t.Context(), w.pool)
	if err != nil || len(standings) == 0 {
		t.Fatalf("today has %d scopes: %v", len(standings), err)
	}
	return book{standings[0].Tokens, standings[0].UnknownTokens, standings[0].ReservedTokens}
}

func TestALimitOfTheDayOrTheSurfaceEndsATurnGracefully(t *testing.T) {
	t.Parallel()
	probe := modeltest.ToolCall("probe", `{}`).WithUsage(1000, 30, 0)
	for name, limits := range map[string]budgets.Limits{
		"day":     {Day: budgets.Limit{Tokens: 2500}},
		"surface": {Surface: map[trace.Surface]budgets.Limit{trace.Flow: {Tokens: 2500}, trace.Chat: {Tokens: 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.plan(probe)
			w.loop.Limits = limits
			x, got := w.completed(t)
			if got.Ended != name || len(w.model.Requests()) != 2 {
				t.Errorf("after %d requests the outcome is %+v", len(w.model.Requests()), got)
			}
			for _, said := range []string{"the limit of 2500 tokens for the ", "2060 tokens spent", "calls made: probe, probe."} {
				if !strings.Contains(got.Text, said) {
					t.Errorf("%q does not say %q", got.Text, said)
				}
			}
			rows := named(w.rows(t, x), "model_call")
			if last := rows[len(rows)-1]; last.Status != "error" || last.Class != "budget_"+name {
				t.Errorf("the refused call's row is %+v", last)
			}
			if got := w.book(t); got != (book{Spent: 2060}) {
				t.Errorf("the day has %+v", got)
			}
		})
	}
}

func TestAnUnpricedModelIsBoundedByTokensAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("ok").WithUsage(10, 10, 0), modeltest.Text("ok").WithUsage(10, 10, 0))
	client, err := models.New(models.Config{BaseURL: w.model.URL(), Model: "home-made"})
	if err != nil {
		t.Fatal(err)
	}
	w.loop.Model, w.loop.Limits = client, budgets.Limits{Day: budgets.Limit{USD: 0.000001}}
	if _, got := w.completed(t); got.Ended != reason.Answered {
		t.Errorf("without a price the turn ended %+v", got)
	}
	w.loop.Limits.Day.Tokens = 100
	if _, got := w.completed(t); got.Ended != "day" {
		t.Errorf("the turn ended %+v", got)
	}
}

// What a refused call found is recorded: a run that is taken up again decides as it did.
func TestARefusalIsRecorded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: 10}}
	e := w.engine(t, false)
	if err := e.Register("twice", func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		result, err := w.flow(ctx, input)
		if err != nil {
			return result, err
		}
		_, err = executions.Wait(ctx, "pause", executions.Event("go", 0))
		return result, err
	}); err != nil {
		t.Fatal(err)
	}
	x, err := e.RunSync(t.Context(), executions.Spec{Flow: "twice", Surface: trace.Flow})
	if err != nil || x.Status != executions.Waiting {
		t.Fatalf("the execution is %s: %v", x.Status, err)
	}
	w.loop.Limits = budgets.Limits{}
	pgtest.Exec(t, w.pool, `select deliver_agent_event('EVENT_COMPLETED', 'go')`)
	if err := e.ClaimAndRun(t.Context(), x.ID); err != nil {
		t.Fatal(err)
	}
	if len(w.took) != 2 || w.took[0].Ended != "day" || w.took[1].Ended != "day" || w.took[0].Text != w.took[1].Text {
		t.Errorf("the turn's outcomes are %+v", w.took)
	}
}

func TestAnotherRunsReservationIsWaitedForAndThenEndsTheTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("ok").WithUsage(100, 10, 0))
	w.loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: 3000}, Patience: 300 * time.Millisecond}
	other := pgtest.Value[string](t, w.pool, `
		with w as (insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 hour') returning id)
		insert into agent_executions (trace_id, surface, flow, status, claim, claimed_by)
		select 'fl_x', 'flow', 'other', 'running', 1, id from w returning id::text`)
	pgtest.Exec(t, w.pool, `
		select lanekeeper.reserve_agent_budget($1, 1, 'model', '[{"scope": "day:{day}", "tokens": 3000, "usd": 0}]',
		       '{"prompt_tokens": 1000, "prompt_usd": 0, "token_usd": 0, "wanted": 1950, "enough": 1000, "least": 100}')`, other)
	x, got := w.completed(t)
	if got.Ended != "day" || !strings.Contains(got.Text, "is taken up by calls under way: 0 tokens spent, 2950 tokens set aside") {
		t.Errorf("outcome is %+v", got)
	}
	if rows := named(w.rows(t, x), "model_call"); len(rows) != 1 || rows[0].Class != "budget_day" {
		t.Errorf("rows are %+v", rows)
	}
	pgtest.Exec(t, w.pool, `select lanekeeper.settle_agent_budget($1, 'model', '{"tokens": 500, "usd": 0, "unknown_tokens": 0, "unknown_usd": 0}')`, other)
	if _, got := w.completed(t); got.Ended != reason.Answered {
		t.Errorf("after the other was settled the outcome is %+v", got)
	}
}

func TestASmallRestShortensTheAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Half of it").WithUsage(500, 300, 0).WithFinish(openai.FinishReasonLength))
	w.loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: 1000}}
	x, got := w.completed(t)
	limit := w.model.Requests()[0].MaxTokens //nolint:staticcheck // what most servers know
	if limit < 64 || limit >= 1000 {
		t.Errorf("the answer was allowed %d tokens", limit)
	}
	if got.Ended != reason.Answered || !strings.HasPrefix(got.Text, "Half of it\n\n[The answer was cut off here") {
		t.Errorf("outcome is %+v", got)
	}
	if rows := named(w.rows(t, x), "model_call"); !strings.Contains(string(rows[0].Output), "cut off here") {
		t.Errorf("the row does not say that the answer was cut: %s", rows[0].Output)
	}
	if len(w.log.Records(t, "answer cut at its limit")) != 1 {
		t.Error("the cut was not logged")
	}
}

func TestAProviderThatIgnoresItsLimitIsCutAndSettledAsItIs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Add(modeltest.Custom(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "text/event-stream")
		for r.Context().Err() == nil {
			if _, err := rw.Write([]byte("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word word word word \"}}]}\n\n")); err != nil {
				return
			}
			rw.(http.Flusher).Flush()
		}
	}))
	w.loop.Budget = reason.Budget{Answer: 100}
	_, got := w.completed(t)
	if got.Ended != reason.Answered || !strings.HasSuffix(got.Text, "[The answer was cut off here: it had reached its limit of 100 tokens.]") {
		t.Errorf("outcome is %s: …%s", got.Ended, got.Text[max(0, len(got.Text)-100):])
	}
	if got.Usage.CompletionTokens <= 100 || got.Usage.UnknownTokens != got.Usage.TotalTokens {
		t.Errorf("usage is %+v, want what was said", got.Usage)
	}
	if b := w.book(t); b != (book{Spent: int64(got.Usage.TotalTokens), Unknown: int64(got.Usage.TotalTokens)}) {
		t.Errorf("the day has %+v, the turn %+v", b, got.Usage)
	}
}

func TestWhatMayBeBilledIsSpentAtItsWorstCase(t *testing.T) {
	t.Parallel()
	said := strings.Repeat("half an answer ", 20)
	for name, test := range map[string]struct {
		replies []modeltest.Reply
		known   int64
		unknown int64 // requests
	}{
		"refused":         {[]modeltest.Reply{modeltest.Status(http.StatusBadRequest, 0)}, 0, 0},
		"a storm of 429":  {[]modeltest.Reply{modeltest.Status(429, 0), modeltest.Status(429, 0), modeltest.Status(429, 0)}, 0, 0},
		"cut three times": {[]modeltest.Reply{modeltest.CutStream(said), modeltest.CutStream(said), modeltest.CutStream(said)}, 0, 3},
		"cut, then whole": {[]modeltest.Reply{modeltest.CutStream(said), modeltest.Text("ok").WithUsage(100, 10, 0)}, 110, 1},
		"out of time":     {[]modeltest.Reply{modeltest.Hang()}, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, test.replies...)
			w.loop.Budget.Time = 2 * time.Second
			x, _ := w.run(t)
			got := w.book(t)
			if got.Aside != 0 || got.Spent != test.known+got.Unknown ||
				got.Unknown < test.unknown*models.DefaultMaxTokens || got.Unknown > test.unknown*(models.DefaultMaxTokens+1000) {
				t.Errorf("the day has %+v", got)
			}
			w.agree(t, x.ID)
		})
	}
}

// agree checks that the log of a run and the day's budget say the same.
func (w *world) agree(t *testing.T, id string) {
	t.Helper()
	day := w.book(t)
	sum := pgtest.Value[int64](t, w.pool, `select coalesce(sum(tokens), 0)::bigint from agent_spend`)
	unknown := pgtest.Value[int64](t, w.pool, `
		select coalesce(sum((token_usage ->> 'unknown_tokens')::bigint), 0)::bigint from agent_activity where execution_id = $1`, id)
	if sum != day.Spent || unknown != day.Unknown {
		t.Errorf("the log has %d tokens, %d of them unknown, the day %+v", sum, unknown, day)
	}
}

func TestACancelledCallCountsInFull(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Hang())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	e := w.engine(t, false)
	var run errgroup.Group
	run.Go(func() error {
		_, err := e.RunSync(ctx, executions.Spec{Flow: "turn", Surface: trace.Flow})
		return err
	})
	pgtest.Eventually(t, patience, func() bool { return len(w.model.Requests()) == 1 }, "the model is asked")
	cancel()
	if err := run.Wait(); err != nil {
		t.Logf("RunSync: %v", err)
	}
	pgtest.Eventually(t, patience, func() bool { return w.book(t).Unknown > 0 }, "the reservation is written off")
	if got := w.book(t); got.Aside != 0 || got.Spent < models.DefaultMaxTokens || got.Unknown != got.Spent {
		t.Errorf("the day has %+v", got)
	}
	w.agree(t, pgtest.Value[string](t, w.pool, `select id::text from agent_executions`))
}

func TestACallRepeatedAfterACrashIsCountedTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		if n == 0 {
			return modeltest.Hang()
		}
		if got := w.book(t); got.Unknown < models.DefaultMaxTokens || got.Aside != got.Unknown {
			t.Errorf("during the second try the day has %+v", got)
		}
		return modeltest.Text("ok").WithUsage(100, 10, 0)
	})
	engine := w.engine(t, false)
	stopped, stop := context.WithCancelCause(context.WithoutCancel(t.Context()))
	var first errgroup.Group
	first.Go(func() error {
		_, err := engine.RunDetached(stopped, executions.Spec{Flow: "turn", Surface: trace.Flow})
		return err
	})
	pgtest.Eventually(t, patience, func() bool { return len(w.model.Requests()) == 1 }, "the model is asked")
	pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
	w.engine(t, true)
	until(t, w, pgtest.Value[string](t, w.pool, `select id::text from agent_executions`), executions.Completed)
	stop(context.Canceled)
	if err := first.Wait(); err != nil {
		t.Logf("first process: %v", err)
	}
	if got := w.book(t); got.Aside != 0 || got.Spent != got.Unknown+110 {
		t.Errorf("the day has %+v", got)
	}
	w.agree(t, pgtest.Value[string](t, w.pool, `select id::text from agent_executions`))
}

// 64 runs at once, of which the day's limit lets some through: no more than fit, and as many as fit.
func TestConcurrentRunsDoNotOverspendTogether(t *testing.T) {
	t.Parallel()
	const runs, limit, each = 64, 10_000, 260
	w := newWorld(t)
	w.plan(modeltest.Text("ok").WithUsage(each-10, 10, 0).Slowly(5 * time.Millisecond))
	w.turn.Scopes = nil
	w.turn.Prompt = strings.Repeat("look ", 60) // reckoned at about 180 tokens; the model counts 250
	w.loop.Budget = reason.Budget{Answer: 200}
	w.loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: limit}}
	engines := []*executions.Engine{w.engine(t, false), w.engine(t, false), w.engine(t, false), w.engine(t, false)}
	var group errgroup.Group
	for i := range runs {
		group.Go(func() error {
			_, err := engines[i%len(engines)].RunSync(t.Context(), executions.Spec{Flow: "turn", Surface: trace.Flow})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	answered := 0
	for _, got := range w.took {
		switch got.Ended {
		case reason.Answered:
			answered++
		case "day":
		default:
			t.Errorf("a turn ended %+v", got)
		}
	}
	spent := w.book(t)
	t.Logf("%d of %d runs were answered with %d of %d tokens", answered, runs, spent.Spent, limit)
	if spent.Spent > limit || spent.Aside != 0 || spent.Spent != int64(answered*each) {
		t.Errorf("the day has %+v of %d", spent, limit)
	}
	if len(w.took) != runs || answered < (limit-500)/each || len(w.model.Requests()) != answered {
		t.Errorf("%d of %d runs were answered with %d requests, want %d at least", answered, len(w.took), len(w.model.Requests()), (limit-500)/each)
	}
}

// A server that counts a prompt at several times what it was reckoned at: what one run has learned holds for the others, also
// for those that wait already.
func TestConcurrentRunsLearnFromEachOtherHowTheServerCounts(t *testing.T) {
	t.Parallel()
	const runs, limit, each = 24, 9_500, 1000
	w := newWorld(t)
	w.plan(modeltest.Text("ok").WithUsage(each-50, 50, 0).Slowly(5 * time.Millisecond))
	w.turn.Scopes = nil
	w.loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: limit}}
	engines := []*executions.Engine{w.engine(t, false), w.engine(t, false)}
	var group errgroup.Group
	for i := range runs {
		group.Go(func() error {
			_, err := engines[i%len(engines)].RunSync(t.Context(), executions.Spec{Flow: "turn", Surface: trace.Flow})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	spent := w.book(t)
	if spent.Spent > limit || spent.Aside != 0 || spent.Spent < limit-2*each {
		t.Errorf("the day has %+v of %d", spent, limit)
	}
}
