package activity_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// A model call is charged to the skills that its answer calls, by their calls; nothing is lost, and nothing counted
// twice.
func TestAModelCallIsChargedToTheSkillsThatItLedTo(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	day := 24 * time.Hour
	put(t, db, act{kind: "model", skill: "model", purpose: "turn", model: "m1", tokens: 100, cost: "0.10", ago: day, ledTo: map[string]int{"fetch": 25}})
	put(t, db, act{kind: "model", skill: "model", purpose: "turn", model: "m1", tokens: 50, cost: "0.05", ledTo: map[string]int{"fetch": 1, "note": 2}})
	put(t, db, act{kind: "model", skill: "model", purpose: "turn", model: "m1", tokens: 5, cost: "0.000001"})
	put(t, db, act{kind: "model", skill: "model", purpose: "turn", model: "m1", status: "error", class: "model", ledTo: map[string]int{"fetch": 0}})
	put(t, db, act{kind: "call", skill: "fetch", tokens: 999})
	put(t, db, act{kind: "model", skill: "ancient", model: "m1", tokens: 1000, ago: 20 * day})

	filter := activity.ReportFilter{Since: time.Now().Add(-3 * day)}
	got, next, err := activity.Spend(t.Context(), db, filter)
	if err != nil || next != "" {
		t.Fatal(err, next)
	}
	today, before := time.Now().UTC().Format(time.DateOnly), time.Now().UTC().Add(-day).Format(time.DateOnly)
	want := []activity.Spending{
		{Day: today, Skill: "note", Surface: "heartbeat", Model: "m1", Calls: 1, PromptTokens: 33, CompletionTokens: 1, Tokens: 34, CostUSD: 0.033333},
		{Day: today, Skill: "fetch", Surface: "heartbeat", Model: "m1", PromptTokens: 16, Tokens: 16, CostUSD: 0.016667},
		{Day: today, Surface: "heartbeat", Model: "m1", Calls: 2, PromptTokens: 4, CompletionTokens: 1, Tokens: 5, CostUSD: 0.000001},
		{Day: before, Skill: "fetch", Surface: "heartbeat", Model: "m1", Calls: 1, PromptTokens: 99, CompletionTokens: 1, Tokens: 100, CostUSD: 0.1},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	purposes, _, err := activity.SpendByPurpose(t.Context(), db, filter)
	want = []activity.Spending{
		{Day: today, Purpose: "turn", Surface: "heartbeat", Model: "m1", Calls: 3, PromptTokens: 53, CompletionTokens: 2, Tokens: 55, CostUSD: 0.050001},
		{Day: before, Purpose: "turn", Surface: "heartbeat", Model: "m1", Calls: 1, PromptTokens: 99, CompletionTokens: 1, Tokens: 100, CostUSD: 0.1},
	}
	if diff := cmp.Diff(want, purposes); diff != "" || err != nil {
		t.Error(diff, err)
	}
	filter.Skill, filter.Limit = "fetch", 1
	first, next, err := activity.Spend(t.Context(), db, filter)
	if err != nil || len(first) != 1 || next == "" {
		t.Fatalf("the first page is %+v, %q (%v)", first, next, err)
	}
	filter.Cursor = next
	if second, next, err := activity.Spend(t.Context(), db, filter); err != nil || len(second) != 1 || second[0].Day != before || next != "" {
		t.Errorf("the second page is %+v, %q (%v)", second, next, err)
	}
	if _, _, err := activity.SpendByPurpose(t.Context(), db, filter); !errors.Is(err, activity.ErrSkillOrPurpose) {
		t.Errorf("by a skill and by purpose: %v", err)
	}
}

// skillsThatAre declares skills.
func skillsThatAre(t *testing.T, db postgres.DB, names ...string) {
	t.Helper()
	_, err := db.Exec(t.Context(), `
		insert into agent_skills (name, tool_definition, handler, enabled_at) select n, '{}', 'builtin:x', 'epoch' from unnest($1::text[]) n`, names)
	if err != nil {
		t.Fatal(err)
	}
}

func TestSlowestIsByThe95thPercentile(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	skillsThatAre(t, db, "steady", "spiky", "waits", "idle")
	put(t, db, act{skill: "reasoning", ms: 1e6, status: "error", class: "stall"})
	put(t, db, act{skill: "imagined", ms: 1e6, status: "error", class: "unknown_tool"})
	put(t, db, act{skill: "no_skill", ms: 1e6})
	for i := range 20 {
		put(t, db, act{skill: "steady", ms: 900})
		put(t, db, act{skill: "spiky", ms: 10 + 2000*(i/18)})
	}
	put(t, db, act{skill: "spiky", ms: 99999, trace: "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE"})
	put(t, db, act{skill: "waits", ms: 1e6, status: "pending_approval"})
	got, next, err := activity.Slowest(t.Context(), db, activity.ReportFilter{Since: time.Now().Add(-time.Hour)})
	if err != nil || next != "" {
		t.Fatal(err)
	}
	want := []activity.Slow{
		{Skill: "spiky", Calls: 21, P50MS: 10, P95MS: 2010, MaxMS: new(int64(99999)), SlowestTraceID: "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE"},
		{Skill: "steady", Calls: 20, P50MS: 900, P95MS: 900, MaxMS: new(int64(900)), SlowestTraceID: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestFailingCountsWhatSelfHealCounts(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	skillsThatAre(t, db, "fetch", "always", "healthy")
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
	put(t, db, act{skill: "no_skill", status: "error", class: "timeout"})
	got, _, err := activity.Failing(t.Context(), db, activity.ReportFilter{Since: time.Now().Add(-time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	want := []activity.Failure{
		{Skill: "fetch", Calls: 4, Errors: 3, Rate: 0.75, Streak: 2, P50MS: 20, P95MS: 20, LastError: "last", LastClass: "timeout", LastTrace: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE", State: "enabled"},
		{Skill: "always", Calls: 1, Errors: 1, Rate: 1, Streak: 1, LastError: "no", LastClass: "timeout", LastTrace: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE", State: "enabled"},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(activity.Failure{}, "LastFailed")); diff != "" {
		t.Error(diff)
	}
	if ago := time.Since(*got[0].LastFailed); ago < 19*time.Minute || ago > 21*time.Minute {
		t.Errorf("last failed %s ago", ago)
	}
}
