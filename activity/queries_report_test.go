package activity_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestSpendIsCountedWhereTheModelWasCalledFor(t *testing.T) {
	db := pgtest.DB(t)
	day := 24 * time.Hour
	put(t, db, act{kind: "model", skill: "model", purpose: "advance_plan", model: "m1", tokens: 100, cost: "0.10", ago: day})
	put(t, db, act{kind: "model", skill: "model", purpose: "advance_plan", model: "m1", tokens: 50, cost: "0.05"})
	put(t, db, act{kind: "model", skill: "reflect", model: "m1", tokens: 5, cost: "0.01"})
	put(t, db, act{kind: "call", skill: "fetch", tokens: 999})
	put(t, db, act{kind: "model", skill: "ancient", tokens: 1000, ago: 20 * day})

	got, err := activity.Spend(t.Context(), db, time.Now().Add(-3*day), activity.Total)
	if err != nil {
		t.Fatal(err)
	}
	want := []activity.Spending{
		{Skill: "advance_plan", Surface: "heartbeat", Model: "m1", Calls: 2, PromptTokens: 148, CompletionTokens: 2, Tokens: 150, CostUSD: 0.15},
		{Skill: "reflect", Surface: "heartbeat", Model: "m1", Calls: 1, PromptTokens: 4, CompletionTokens: 1, Tokens: 5, CostUSD: 0.01},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	daily, err := activity.Spend(t.Context(), db, time.Time{}, activity.ByDay)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, s := range daily {
		lines = append(lines, s.Skill)
		if _, err := time.Parse(time.DateOnly, s.Period); err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff([]string{"advance_plan", "reflect", "advance_plan", "ancient"}, lines); diff != "" {
		t.Error(diff)
	}
	if _, err := activity.Spend(t.Context(), db, time.Time{}, "week"); err == nil {
		t.Error("an unknown period is taken")
	}
}

func TestSlowestIsByThe95thPercentile(t *testing.T) {
	db := pgtest.DB(t)
	for i := range 20 {
		put(t, db, act{skill: "steady", ms: 900})
		put(t, db, act{skill: "spiky", ms: 10 + 2000*(i/18)})
	}
	put(t, db, act{skill: "spiky", ms: 99999, trace: "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE"})
	put(t, db, act{skill: "waits", ms: 1e6, status: "pending_approval"})
	got, err := activity.Slowest(t.Context(), db, time.Now().Add(-time.Hour), 0)
	if err != nil {
		t.Fatal(err)
	}
	want := []activity.Slow{
		{Skill: "spiky", Calls: 21, P50MS: 10, P95MS: 2010, MaxMS: 99999, TotalMS: 18*10 + 2*2010 + 99999, SlowestTraceID: "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE"},
		{Skill: "steady", Calls: 20, P50MS: 900, P95MS: 900, MaxMS: 900, TotalMS: 18000, SlowestTraceID: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestFailingCountsWhatSelfHealCounts(t *testing.T) {
	db := pgtest.DB(t)
	at := func(minutes int, status, class, message string) {
		put(t, db, act{skill: "fetch", ago: time.Duration(minutes) * time.Minute, status: status, class: class, message: message, ms: 20})
	}
	at(50, "error", "timeout", "first")
	at(40, "success", "", "")
	at(30, "error", "http_status", "second")
	at(20, "error", "timeout", "last")
	at(10, "error", "invalid_params", "the model's")
	at(5, "skipped", "", "")
	put(t, db, act{skill: "always", status: "error", class: "timeout", message: "no"})
	put(t, db, act{skill: "healthy"})
	got, err := activity.Failing(t.Context(), db, time.Now().Add(-time.Hour), 0)
	if err != nil {
		t.Fatal(err)
	}
	want := []activity.Failure{
		{Skill: "fetch", Calls: 4, Errors: 3, Rate: 0.75, Streak: 2, P50MS: 20, P95MS: 20, LastError: "last", LastClass: "timeout", LastTrace: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"},
		{Skill: "always", Calls: 1, Errors: 1, Rate: 1, Streak: 1, LastError: "no", LastClass: "timeout", LastTrace: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(activity.Failure{}, "LastFailed")); diff != "" {
		t.Error(diff)
	}
	if ago := time.Since(got[0].LastFailed); ago < 19*time.Minute || ago > 21*time.Minute {
		t.Errorf("last failed %s ago", ago)
	}
}
