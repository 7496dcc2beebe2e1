package why_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/why"
)

func TestWriteAnswer(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 22, 9, 30, 0, 0, time.UTC)
	later := at.AddDate(0, 0, 1)
	const here, there = "fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE", "wh_01JD3V7K8ZQ6W2M5T9X4C1B0AF"
	answer := why.Answer{TraceID: here, OTelTraceID: trace.ID(here).OTel(), Reasons: []why.Reason{
		{Part: why.Head, At: &at, What: "automation completed after 3.0 s", ToRef: "trace " + here, TraceID: here},
		{
			Part: why.Because, At: &at, Kind: "webhook", What: "delivery 7 came to endpoint shop", FromRef: "delivery a",
			ToRef: "execution w", TraceID: here,
		},
		{
			Part: why.Because, At: &at, Kind: "raised", What: "webhook raised event ORDER 7", FromRef: "execution w",
			ToRef: "event e", TraceID: there,
		},
		{Part: why.Did, At: &at, Kind: "run", What: "automation completed", ToRef: "execution x", TraceID: here},
		{
			Part: why.Did, At: &later, Kind: "child", What: "child failed:\x1b[2J two\nlines", FromRef: "execution x",
			ToRef: "execution y", TraceID: here,
		},
		{
			Part: why.Trouble, At: &at, Kind: "stale", What: "a write was refused", FromRef: "execution x",
			ToRef: "step s", TraceID: here,
		},
		{Part: why.Spend, Kind: "more", What: "… and more than 10,000 actions, which were not read", TraceID: here},
	}}
	var out strings.Builder
	require.NoError(t, why.Write(&out, answer, false))
	want := here + `  automation completed after 3.0 s
019347b3cd1fb9b82a1749e91815814e  2026-11-22 09:30:00 UTC

Causes
  09:30:00  delivery 7 came to endpoint shop
  09:30:00  └─ webhook raised event ORDER 7  ` + there + `

Executions
  09:30:00  automation completed
  2026-11-23 09:30:00  └─ child failed:` + "\uFFFD" + `[2J two lines

Problems
  09:30:00  ✗ a write was refused

Cost
            … and more than 10,000 actions, which were not read
`
	assert.NoDiff(t, want, out.String())
}

func TestUnknownTraceIsReported(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, err := why.Of(t.Context(), w.pool, "nonsense")
	assert.ErrorIs(t, err, trace.ErrInvalid, "of nonsense")
	_, err = why.Of(t.Context(), w.pool, string(trace.New(trace.Chat)))
	assert.ErrorIs(t, err, activity.ErrNotFound, "of a trace that is not there")
	for _, sql := range []string{
		`select count(*) from why(null)`, `select count(*) from why('')`,
		`select count(*) from why('hb_', -1)`,
	} {
		assert.Equal(t, 0, value[int64](w, sql), sql)
	}
}

func TestAShutdownIsExplained(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	engine := enginetest.New(t, w.pool, func(o *executions.Options) { o.StopTimeout = time.Millisecond })
	held := make(chan struct{})
	enginetest.Register(t, engine, "order", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		if _, err := executions.Lane(ctx, "orders"); err != nil {
			return executions.Result{}, err
		}
		close(held)
		<-ctx.Done()
		return executions.Result{}, context.Cause(ctx)
	})
	r := w.newScenario(1).start(executions.Spec{Flow: "order", Surface: trace.Flow}, nil, cause{})
	stop := testkit.Run(t, engine.Run)
	testkit.Receive(t, held)
	stop()
	answer, err := why.Of(t.Context(), w.pool, r.trace)
	require.NoError(t, err)
	var texts strings.Builder
	for _, reason := range answer.Reasons {
		if reason.Kind == "held" || reason.Kind == "lost" {
			texts.WriteString(reason.What + "\n")
		}
	}
	assert.Contains(t, texts.String(), "order held lane orders for ", ", until its process handed the execution back\n",
		" under claim 1, which handed it back: it shut down, was paused or lacks the flow; it is ready to continue\n")
}

func TestUnknownCallIsSaidOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`insert into agent_activity (trace_id, skill_name, status, error_message) values
		('hb_1', 'pay', 'unknown', 'the process was lost during the call; nobody knows whether it took effect')`)
	assert.Equal(t, "nobody knows whether pay took effect: the process was lost during the call",
		value[string](w, `select r.what from why('hb_1') r where r.kind = 'unknown'`))
}

// Tokens of a model without a price cost an unknown amount, not nothing.
func TestSpendOfUnpricedModel(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`
		insert into agent_activity (trace_id, kind, skill_name, model, cost_usd, token_usage)
		values ('hb_1', 'model', 'model', 'priced', 0.000179, '{"prompt_tokens": 900, "completion_tokens": 8, "total_tokens": 908}'),
		       ('hb_1', 'model', 'model', 'unpriced', 0, '{"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}'),
		       ('hb_1', 'model', 'model', 'refused', 0, '{}')`)
	assert.Equal(t, "priced: 1 call, 908 tokens, $0.000179\nrefused: 1 call, 0 tokens\nunpriced: 1 call, 3 tokens, no price",
		value[string](w, `select string_agg(r.what, e'\n' order by r.what) from why('hb_1') r where r.part = 'spend'`))
}

// why hides secrets in the texts of others, and cuts lists, with the number of omitted rows.
func TestLargeTraceIsBoundedAndRedacted(t *testing.T) {
	t.Parallel()
	const extra = 4812 // executions beyond the bound
	w := newWorld(t)
	s := w.newScenario(1)
	root := s.start(executions.Spec{Flow: "onboarding", Surface: trace.Flow}, nil, cause{})
	w.exec(`
		insert into agent_executions (trace_id, surface, flow, parent_id, error_message)
		select $1, 'flow', 'child', $2, null from generate_series(1, $3::int)`, root.trace, root.id, why.MaxRows+extra-1)
	s.claimed(root)
	w.exec(`update agent_executions set status = 'failed', error_message = 'GET /?api_key=hunter2hunter2 failed'
		where id = $1`, root.id)
	w.exec(`insert into agent_activity (trace_id, kind, skill_name, model, cost_usd) select $1, 'model', 'model', 'small',
		0.01 from generate_series(1, 10001)`, root.trace)
	answer, err := why.Of(t.Context(), w.pool, root.trace)
	require.NoError(t, err)
	did := answer.Of(why.Did)
	got := did[len(did)-1]
	assert.Truef(t, len(did) == why.MaxRows+1 && got.Kind == why.More && got.What == "… and 4,812 more executions",
		"%d rows, the last is %+v", len(did), got)
	spent := answer.Of(why.Spend)
	if got := spent[len(spent)-1]; got.Kind != why.More || !strings.Contains(got.What, "more than 10,000 actions") {
		t.Errorf("the spend ends with %+v", got)
	}
	for _, r := range answer.Reasons {
		assert.Truef(t, !strings.Contains(r.What+string(r.Detail), "hunter2"), "a secret is shown: %+v", r)
	}
}

// Every part that is cut ends with a row of kind more, and most is at most 1,000.
func TestEachCutPartEndsWithMore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, c := range []struct {
		rows, most int
		part       why.Part
	}{{3, 2, why.Because}, {3, 2, why.Did}, {3, 2, why.LedTo}, {1002, 1000, why.Did}} {
		id := trace.New(trace.Flow)
		w.exec(`
			insert into agent_executions (trace_id, surface, flow) select $1, 'flow', 'root' from generate_series(1, $2)`,
			id, c.rows)
		w.exec(`select raise_agent_event('EVENT_COMPLETED', $1 || n, '{}', null, $1) from generate_series(1, $2::int) n`,
			string(id), c.rows)
		got := pgtest.Column[string](t, w.pool, `select kind from why($1, $2) where part = $3`, string(id), c.most, c.part)
		assert.Truef(t, len(got) == c.most+1 && got[c.most] == why.More, "%d of %d rows of %s: %d, the last is of kind %s",
			c.most, c.rows, c.part, len(got), got[len(got)-1])
	}
}

func TestTrialIsFoundByEachFormOfItsTrace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := trace.New(trace.Eval)
	w.exec(`insert into agent_activity (trace_id, kind, skill_name, surface, status)
		values ($1, 'phase', 'turn', 'eval', 'success')`, id)
	for _, form := range []string{string(id), id.Suffix(), id.OTel()} {
		got := value[string](w, `select trace_id from why($1)`, form)
		assert.Equal(t, string(id), got)
	}
}
