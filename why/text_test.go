package why_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/why"
)

func TestAnAnswerIsReadFromTopToBottom(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 22, 9, 30, 0, 0, time.UTC)
	later := at.AddDate(0, 0, 1)
	const here, there = "fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE", "wh_01JD3V7K8ZQ6W2M5T9X4C1B0AF"
	answer := why.Answer{TraceID: here, OTelTraceID: trace.ID(here).OTel(), Reasons: []why.Reason{
		{Part: why.Head, At: &at, What: "automation completed after 3.0 s", ToRef: "trace " + here, TraceID: here},
		{Part: why.Because, At: &at, Kind: "webhook", What: "delivery 7 came to endpoint shop", FromRef: "delivery a", ToRef: "execution w", TraceID: here},
		{Part: why.Because, At: &at, Kind: "raised", What: "webhook raised event ORDER 7", FromRef: "execution w", ToRef: "event e", TraceID: there},
		{Part: why.Did, At: &at, Kind: "run", What: "automation completed", ToRef: "execution x", TraceID: here},
		{Part: why.Did, At: &later, Kind: "child", What: "child failed:\x1b[2J two\nlines", FromRef: "execution x", ToRef: "execution y", TraceID: here},
		{Part: why.Trouble, At: &at, Kind: "stale", What: "a write was refused", FromRef: "execution x", ToRef: "step s", TraceID: here},
		{Part: why.Spend, Kind: "more", What: "… and more than 10,000 actions, which were not looked through", TraceID: here},
	}}
	var out strings.Builder
	if err := why.Write(&out, answer, false); err != nil {
		t.Fatal(err)
	}
	want := here + `  automation completed after 3.0 s
019347b3cd1fb9b82a1749e91815814e  2026-11-22 09:30:00 UTC

Because
  09:30:00  delivery 7 came to endpoint shop
  09:30:00  └─ webhook raised event ORDER 7  ` + there + `

What it did
  09:30:00  automation completed
  2026-11-23 09:30:00  └─ child failed:` + "\uFFFD" + `[2J two lines

What went wrong
  09:30:00  ✗ a write was refused

What it cost
            … and more than 10,000 actions, which were not looked through
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestWhatIsNoTraceIsSaid(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if _, err := why.Of(t.Context(), w.pool, "nonsense"); !errors.Is(err, trace.ErrInvalid) {
		t.Errorf("of nonsense: %v", err)
	}
	if _, err := why.Of(t.Context(), w.pool, string(trace.New(trace.Chat))); !errors.Is(err, activity.ErrNotFound) {
		t.Errorf("of a trace that is not there: %v", err)
	}
	for _, sql := range []string{`select count(*) from why(null)`, `select count(*) from why('')`, `select count(*) from why('hb_', -1)`} {
		if n := value[int64](w, sql); n != 0 {
			t.Errorf("%s: %d", sql, n)
		}
	}
}

// Secrets that stand in what others wrote are not shown, and lists end, saying how much is left.
func TestALargeTraceIsBoundedAndSecretsAreNotShown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.newScenario(1)
	root := s.start(executions.Spec{Flow: "onboarding", Surface: trace.Flow}, nil, cause{})
	w.exec(`
		insert into agent_executions (trace_id, surface, flow, parent_id, error_message)
		select $1, 'flow', 'child', $2, null from generate_series(1, 4911)`, root.trace, root.id)
	s.claimed(root)
	w.exec(`update agent_executions set status = 'failed', error_message = 'GET /?api_key=hunter2hunter2 failed' where id = $1`, root.id)
	w.exec(`insert into agent_activity (trace_id, kind, skill_name, model, cost_usd) select $1, 'model', 'model', 'small', 0.01 from generate_series(1, 10001)`, root.trace)
	answer, err := why.Of(t.Context(), w.pool, root.trace)
	if err != nil {
		t.Fatal(err)
	}
	did := answer.Of(why.Did)
	if got := did[len(did)-1]; len(did) != why.Most+1 || got.Kind != why.More || got.What != "… and 4,812 more executions" {
		t.Errorf("%d rows, the last is %+v", len(did), got)
	}
	spent := answer.Of(why.Spend)
	if got := spent[len(spent)-1]; got.Kind != why.More || !strings.Contains(got.What, "more than 10,000 actions") {
		t.Errorf("the spend ends with %+v", got)
	}
	for _, r := range answer.Reasons {
		if strings.Contains(r.What+string(r.Detail), "hunter2") {
			t.Errorf("a secret is shown: %+v", r)
		}
	}
}
