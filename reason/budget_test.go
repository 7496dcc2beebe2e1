package reason_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestEachBudgetEndsTurnGracefully(t *testing.T) {
	t.Parallel()
	probe := modeltest.ToolCall("probe", `{}`)
	for name, test := range map[string]struct {
		budget reason.Budget
		reply  modeltest.Reply
		asked  int
		calls  string
	}{
		"iterations": {reason.Budget{Iterations: 3}, probe, 3, "calls made: probe, probe, probe"},
		"tokens":     {reason.Budget{Tokens: 2000}, probe.WithUsage(300, 700, 0), 2, "calls made: probe, probe"},
		"money": {
			reason.Budget{CostUSD: 0.2, Tokens: 10_000_000},
			probe.WithUsage(100, 250_000, 0), 2,
			"calls made: probe, probe",
		},
		"time": {reason.Budget{Time: 6 * time.Second}, modeltest.Hang(), 1, "nothing was done"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.plan(test.reply)
			w.loop.Budget = test.budget
			x, got := w.completed(t)
			want := "Stopped because the budget of " + name + " ran out; " + test.calls + "."
			assert.Truef(t, got.Ended == name && got.Text == want && x.ResultSummary == want, "outcome is %+v", got)
			assert.Equal(t, test.asked, len(w.model.Requests()))
		})
	}
}

func TestLoopWithChangingArgumentsLeavesStall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.ToolCall("sizes", fmt.Sprintf(`{"limit": %d}`, n+1))
	})
	w.loop.Budget = reason.Budget{Iterations: 7}
	x, got := w.completed(t)
	assert.Equal(t, "iterations", got.Ended, got)
	rows := named(w.rows(t, x), "reasoning")
	require.Truef(t, len(rows) == 1 && rows[0].Status == "error" && rows[0].Class == "stall",
		"the rows of the stall are %+v", rows)
	assert.Contains(t, rows[0].Message, "the model replied 7 times and gave no answer", got.Text)
	assert.Truef(t, strings.Contains(string(rows[0].Input), `{"limit": 7}`),
		"the evidence lacks the last attempt: %s", rows[0].Input)
}

func TestTimeThatRanOutDuringSkillEndsTurnBeforeNextRequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`))
	w.builtins["probe"] = func(ctx context.Context, _ skills.Call) (any, error) {
		timer := time.NewTimer(6500 * time.Millisecond)
		defer timer.Stop()
		<-timer.C
		return "slow", nil
	}
	w.loop.Budget = reason.Budget{Time: 6 * time.Second}
	x, got := w.completed(t)
	assert.Truef(t, got.Ended == "time" && slices.Equal(got.Calls, []string{"probe"}), "outcome is %+v", got)
	rows := named(w.rows(t, x), "model_call")
	assert.Truef(t, len(rows) == 2 && rows[1].Class == "budget" && rows[1].Status == "error", "rows are %+v", rows)
}

func TestTimeIsCountedOnce(t *testing.T) {
	t.Parallel()
	probe := modeltest.ToolCall("probe", `{}`)
	w := newWorld(t, probe, probe, probe, modeltest.Text("Done."))
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) {
		timer := time.NewTimer(2500 * time.Millisecond)
		defer timer.Stop()
		<-timer.C
		return "slow", nil
	}
	w.loop.Budget = reason.Budget{Time: 14 * time.Second}
	_, got := w.completed(t)
	assert.Truef(t, got.Ended == reason.Answered, "outcome is %+v", got)
}

func TestTroubleOfProvider(t *testing.T) {
	t.Parallel()
	ok := modeltest.Text("Fine.")
	for name, test := range map[string]struct {
		replies []modeltest.Reply
		failure string // empty if the turn succeeds
	}{
		"too many requests, once": {[]modeltest.Reply{modeltest.Status(429, time.Second), ok}, ""},
		"server errors, twice":    {[]modeltest.Reply{modeltest.Status(500, 0), modeltest.Status(503, 0), ok}, ""},
		"cut stream":              {[]modeltest.Reply{modeltest.CutStream("Fi"), ok}, ""},
		"ended early":             {[]modeltest.Reply{modeltest.EndedStream("Fi"), ok}, ""},
		"error in the middle":     {[]modeltest.Reply{modeltest.MidStreamError("Fi", "overloaded"), ok}, ""},
		"reset":                   {[]modeltest.Reply{modeltest.Reset(), ok}, ""},
		"no usage":                {[]modeltest.Reply{ok.NoUsage()}, ""},
		"down": {
			[]modeltest.Reply{modeltest.Status(500, 0), modeltest.Status(500, 0), modeltest.Status(500, 0)}, "500",
		},
		"too many, for long": {[]modeltest.Reply{modeltest.Status(429, time.Hour)}, "429"},
		"bad key": {[]modeltest.Reply{modeltest.Refusal(401, "invalid_request_error", "",
			"Incorrect API key provided", 0)}, "Incorrect API key"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, test.replies...)
			x, got := w.run(t)
			rows := named(w.rows(t, x), "model_call")
			if test.failure == "" {
				assert.Truef(t, x.Status == executions.Completed && got.Text == "Fine." && got.Usage.TotalTokens != 0 &&
					len(rows) == 1, "execution is %s, outcome %+v, rows %+v", x.Status, got, rows)
				assert.True(t, name != "no usage" || got.Usage.Estimated, "an estimate is not marked")
				return
			}
			assert.Truef(t, x.Status == executions.Failed && strings.Contains(postgres.Deref(x.ErrorMessage), test.failure) &&
				strings.Contains(postgres.Deref(x.ErrorMessage), "ask the model"), "execution is %s: %s", x.Status,
				postgres.Deref(x.ErrorMessage))
			assert.Truef(t, len(rows) == 1 && rows[0].Status == "error" && rows[0].Class == "model", "rows are %+v", rows)
		})
	}
}

// book has the day's spent tokens, their unknown part, and the reserved tokens.
type book struct {
	Spent, Unknown, Aside int64
}

func (w *world) book(t *testing.T) (b book) {
	t.Helper()
	standings, err := budgets.Today(t.Context(), w.pool)
	require.Truef(t, err == nil && len(standings) > 0, "today has %d scopes: %v", len(standings), err)
	return book{standings[0].Tokens, standings[0].UnknownTokens, standings[0].ReservedTokens}
}

func TestFilteredAnswerSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("").WithFinish("content_filter"))
	_, got := w.completed(t)
	assert.Truef(t, got.Ended == "answered" && got.Cut == "content_filter" &&
		strings.Contains(got.Text, "content filter") && len(w.model.Requests()) == 1, "after %d requests: %+v",
		len(w.model.Requests()), got)
}

func TestLimitOfDayOrSurfaceEndsTurnGracefully(t *testing.T) {
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
			assert.Truef(t, got.Ended == name && len(w.model.Requests()) == 2,
				"after %d requests the outcome is %+v", len(w.model.Requests()), got)
			assert.Contains(t, got.Text, "the limit of 2500 tokens for the ", "2060 tokens spent", "calls made: probe, probe.")
			rows := named(w.rows(t, x), "model_call")
			last := rows[len(rows)-1]
			assert.Truef(t, last.Status == "error" && last.Class == "budget_"+name, "the refused call's row is %+v", last)
			assert.Equal(t, (book{Spent: 2060}), w.book(t))
		})
	}
}

func TestUnpricedModelIsBoundedByTokensAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("ok").WithUsage(10, 10, 0), modeltest.Text("ok").WithUsage(10, 10, 0))
	client, err := models.New(models.Config{BaseURL: w.model.URL(), Model: "home-made"})
	require.NoError(t, err)
	w.loop.Model, w.loop.Limits = client, budgets.Limits{Day: budgets.Limit{USD: 0.000001}}
	_, got := w.completed(t)
	assert.Truef(t, got.Ended == reason.Answered, "without a price the turn ended %+v", got)
	w.loop.Limits.Day.Tokens = 100
	_, got = w.completed(t)
	assert.Truef(t, got.Ended == "day", "the turn ended %+v", got)
}

// The result of a rejected reservation is recorded, so a resumed run decides the same.
func TestRefusalIsRecorded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: 10}}
	e := w.engine(t, false)
	require.NoError(t, e.Register("twice", func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		result, err := w.flow(ctx, input)
		if err != nil {
			return result, err
		}
		_, err = executions.Wait(ctx, "pause", executions.Event("go", 0))
		return result, err
	}))
	x, err := e.RunSync(t.Context(), executions.Spec{Flow: "twice", Surface: trace.Flow})
	require.Truef(t, err == nil && x.Status == executions.Waiting, "the execution is %s: %v", x.Status, err)
	w.loop.Limits = budgets.Limits{}
	pgtest.Exec(t, w.pool, `select deliver_agent_event('EVENT_COMPLETED', 'go')`)
	require.NoError(t, e.ClaimAndRun(t.Context(), x.ID))
	assert.Truef(t, len(w.took) == 2 && w.took[0].Ended == "day" && w.took[1].Ended == "day" &&
		w.took[0].Text == w.took[1].Text, "the turn's outcomes are %+v", w.took)
}

func TestAnotherRunsReservationIsWaitedForAndThenEndsTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("ok").WithUsage(100, 10, 0))
	w.loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: 3000}, MaxWait: 300 * time.Millisecond}
	other := enginetest.ReserveDay(t, w.pool, 3000, 1000, 1950)
	x, got := w.completed(t)
	assert.Truef(t, got.Ended == "day" &&
		strings.Contains(got.Text, "is reserved by calls in progress: 0 tokens spent, 2950 tokens reserved"),
		"outcome is %+v", got)
	assert.Truef(t, got.Until.IsZero() && !strings.Contains(got.Text, "begins again"), "a limit with room: %+v", got)
	rows := named(w.rows(t, x), "model_call")
	assert.Truef(t, len(rows) == 1 && rows[0].Class == "budget_day", "rows are %+v", rows)
	pgtest.Equal(t, w.pool, 0, `select count(*) from agent_spend`)
	pgtest.Exec(t, w.pool, `select lanekeeper.settle_agent_budget($1, 'model',
		'{"tokens": 500, "usd": 0, "unknown_tokens": 0, "unknown_usd": 0}')`, other)
	_, got = w.completed(t)
	assert.Truef(t, got.Ended == reason.Answered, "after the other was settled the outcome is %+v", got)
}

func TestSmallRestShortensAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Half of it").WithUsage(500, 300, 0).WithFinish(openai.FinishReasonLength))
	w.loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: 1000}}
	x, got := w.completed(t)
	limit := w.model.Requests()[0].MaxTokens //nolint:staticcheck // the field of most servers
	assert.Truef(t, limit >= 64 && limit < 1000, "the answer was allowed %d tokens", limit)
	assert.Truef(t, got.Ended == reason.Answered &&
		strings.HasPrefix(got.Text, "Half of it\n\n[The answer was cut off here"), "outcome is %+v", got)
	if rows := named(w.rows(t, x), "model_call"); !strings.Contains(string(rows[0].Output), "cut off here") {
		t.Errorf("the row does not report the cut answer: %s", rows[0].Output)
	}
	assert.Equal(t, 1, len(w.log.Records(t, "answer cut at its limit")))
}

func TestProviderThatIgnoresItsLimitIsCutAndSettledAsItIs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Add(modeltest.Custom(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "text/event-stream")
		for r.Context().Err() == nil {
			if _, err := rw.Write([]byte("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word word word word " +
				"\"}}]}\n\n")); err != nil {
				return
			}
			rw.(http.Flusher).Flush()
		}
	}))
	w.loop.Budget = reason.Budget{Answer: 100}
	_, got := w.completed(t)
	if got.Ended != reason.Answered || !strings.HasSuffix(got.Text, "[The answer was cut off here: it had reached its "+
		"limit of 100 tokens.]") {
		t.Errorf("outcome is %s: …%s", got.Ended, got.Text[max(0, len(got.Text)-100):])
	}
	assert.Truef(t, got.Usage.CompletionTokens > 100 && got.Usage.UnknownTokens == got.Usage.TotalTokens,
		"usage is %+v, want what was said", got.Usage)
	assert.Equal(t, (book{Spent: int64(got.Usage.TotalTokens), Unknown: int64(got.Usage.TotalTokens)}),
		w.book(t), got.Usage)
}

func TestWhatMayBeBilledIsSpentAtItsWorstCase(t *testing.T) {
	t.Parallel()
	half := strings.Repeat("half an answer ", 20)
	for name, test := range map[string]struct {
		replies []modeltest.Reply
		known   int64
		unknown int64 // requests
	}{
		"refused": {[]modeltest.Reply{modeltest.Status(http.StatusBadRequest, 0)}, 0, 0},
		"a storm of 429": {
			[]modeltest.Reply{modeltest.Status(429, 0), modeltest.Status(429, 0), modeltest.Status(429, 0)},
			0, 0,
		},
		"cut three times": {[]modeltest.Reply{
			modeltest.CutStream(half), modeltest.CutStream(half),
			modeltest.CutStream(half),
		}, 0, 3},
		"cut, then whole": {[]modeltest.Reply{modeltest.CutStream(half), modeltest.Text("ok").WithUsage(100, 10, 0)}, 110, 1},
		"out of time":     {[]modeltest.Reply{modeltest.Hang()}, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, test.replies...)
			if name == "out of time" {
				w.loop.Budget.Time = 6 * time.Second
			}
			x, _ := w.run(t)
			got := w.book(t)
			assert.Truef(t, got.Aside == 0 && got.Spent == test.known+got.Unknown &&
				got.Unknown >= test.unknown*models.DefaultMaxTokens && got.Unknown <= test.unknown*(models.DefaultMaxTokens+1000),
				"the day has %+v", got)
			w.agree(t, x.ID)
		})
	}
}

// agree checks that the log of a run and the day's budget have the same amounts.
func (w *world) agree(t *testing.T, id string) {
	t.Helper()
	day := w.book(t)
	sum := pgtest.Value[int64](t, w.pool, `select coalesce(sum(tokens), 0)::bigint from agent_spend`)
	unknown := pgtest.Value[int64](t, w.pool, `
		select coalesce(sum((token_usage ->> 'unknown_tokens')::bigint), 0)::bigint from agent_activity
		  where execution_id = $1`, id)
	assert.Equal(t, day.Spent, sum, day)
	assert.Equal(t, day.Unknown, unknown, day)
}

func TestCancelledCallCountsInFull(t *testing.T) {
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
	pgtest.Eventually(t, func() bool { return len(w.model.Requests()) == 1 }, "the model is asked")
	cancel()
	if err := run.Wait(); err != nil {
		t.Logf("RunSync: %v", err)
	}
	pgtest.Eventually(t, func() bool { return w.book(t).Unknown > 0 }, "the reservation is written off")
	if got := w.book(t); got.Aside != 0 || got.Spent < models.DefaultMaxTokens || got.Unknown != got.Spent {
		t.Errorf("the day has %+v", got)
	}
	w.agree(t, pgtest.Value[string](t, w.pool, `select id::text from agent_executions`))
}

func TestCallRepeatedAfterCrashIsCountedTwice(t *testing.T) {
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
		_, err := engine.RunSync(stopped, executions.Spec{Flow: "turn", Surface: trace.Flow})
		return err
	})
	pgtest.Eventually(t, func() bool { return len(w.model.Requests()) == 1 }, "the model is asked")
	pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
	w.engine(t, true)
	enginetest.Await(t, w.pool, pgtest.Value[string](t, w.pool, `select id::text from agent_executions`),
		executions.Completed)
	stop(context.Canceled)
	if err := first.Wait(); err != nil {
		t.Logf("first process: %v", err)
	}
	got := w.book(t)
	assert.Truef(t, got.Aside == 0 && got.Spent == got.Unknown+110, "the day has %+v", got)
	w.agree(t, pgtest.Value[string](t, w.pool, `select id::text from agent_executions`))
}

// runTogether runs turns at once, distributed over engines.
func runTogether(t *testing.T, runs int, engines []*executions.Engine) {
	t.Helper()
	var group errgroup.Group
	for i := range runs {
		group.Go(func() error {
			_, err := engines[i%len(engines)].RunSync(t.Context(), executions.Spec{Flow: "turn", Surface: trace.Flow})
			return err
		})
	}
	require.NoError(t, group.Wait())
}

// 64 runs start at once. As many run as the day's limit allows, no more and no fewer.
func TestConcurrentRunsDoNotOverspendTogether(t *testing.T) {
	t.Parallel()
	const runs, limit, each = 64, 10_000, 260
	w := newWorld(t)
	w.plan(modeltest.Text("ok").WithUsage(each-10, 10, 0).Slowly(5 * time.Millisecond))
	w.turn.Scopes = nil
	w.turn.Prompt = strings.Repeat("look ", 60) // estimated at about 180 tokens; the server counts 250
	w.loop.Budget = reason.Budget{Answer: 200}
	w.loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: limit}}
	engines := []*executions.Engine{w.engine(t, false), w.engine(t, false), w.engine(t, false), w.engine(t, false)}
	runTogether(t, runs, engines)
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
	assert.Truef(t, spent.Spent <= limit && spent.Aside == 0 && spent.Spent == int64(answered*each),
		"the day has %+v of %d", spent, limit)
	if len(w.took) != runs || answered < (limit-500)/each || len(w.model.Requests()) != answered {
		t.Errorf("%d of %d runs were answered with %d requests, want %d at least", answered, len(w.took),
			len(w.model.Requests()), (limit-500)/each)
	}
}

// A server counts several times the estimated tokens of a prompt. All runs use the factor that one run has learned,
// even those already waiting.
func TestConcurrentRunsLearnFromEachOtherHowServerCounts(t *testing.T) {
	t.Parallel()
	const runs, limit, each = 24, 9_500, 1000
	w := newWorld(t)
	w.plan(modeltest.Text("ok").WithUsage(each-50, 50, 0).Slowly(5 * time.Millisecond))
	w.turn.Scopes = nil
	w.loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: limit}}
	engines := []*executions.Engine{w.engine(t, false), w.engine(t, false)}
	runTogether(t, runs, engines)
	spent := w.book(t)
	assert.Truef(t, spent.Spent <= limit && spent.Aside == 0 && spent.Spent >= limit-2*each,
		"the day has %+v of %d", spent, limit)
}

// If one answer calls a skill 25 times, its cost is that skill's spend. The cost of calls that are no skill, and of a
// text answer, belongs to the surface.
func TestModelCallIsChargedToWhatItsAnswerCalls(t *testing.T) {
	many := modeltest.Text("").WithUsage(900, 100, 0)
	for i := range 25 {
		many = many.AndCall("sizes", fmt.Sprintf(`{"limit":%d}`, i+1))
	}
	w := newWorld(t, many, modeltest.ToolCall("imagined", `{}`).WithUsage(10, 1, 0),
		modeltest.Text("Done.").WithUsage(20, 2, 0))
	x, _ := w.completed(t)
	pgtest.Equal(t, w.pool, "|2|33 sizes|1|1000", `
		select string_agg(format('%s|%s|%s', s.skill, s.calls, s.tokens), ' ' order by s.skill) from agent_spend s
		  where s.surface = $1`, x.Surface)
	pgtest.Equal(t, w.pool, "26 of 26, by 2", `
		select format('%s of %s, by %s', count(m.id), count(*), count(distinct m.id))
		  from agent_activity a left join agent_activity m on m.id = a.cause_id and m.kind = 'model'
		 where a.execution_id = $1 and a.kind = 'call'`, x.ID)
}
