package builtins_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const traceID = "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"

// call declares the builtins and calls one as the agent does.
func call(t *testing.T, pool *pgxpool.Pool, name, args string) (map[string]any, error) {
	t.Helper()
	if _, err := builtins.Put(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	registry, err := skills.New(skills.Options{Builtins: builtins.New(pool, nil, nil)})
	if err != nil {
		t.Fatal(err)
	}
	skill, err := skills.Get(t.Context(), pool, name)
	if err != nil {
		t.Fatal(err)
	}
	ctx := trace.With(t.Context(), trace.Span{TraceID: traceID, Agent: "agent", Surface: trace.Heartbeat})
	raw, err := registry.Invoke(ctx, skills.Call{Skill: skill, Args: json.RawMessage(args)})
	if err != nil {
		return nil, err
	}
	var answer map[string]any
	if err := json.Unmarshal(raw, &answer); err != nil {
		t.Fatal(err)
	}
	return answer, nil
}

// column is one field of each row of the answer's list.
func column(t *testing.T, answer map[string]any, list, field string) string {
	t.Helper()
	rows, ok := answer[list].([]any)
	if !ok {
		t.Fatalf("no list %s in %v", list, answer)
	}
	var values []string
	for _, row := range rows {
		values = append(values, fmt.Sprint(row.(map[string]any)[field]))
	}
	return strings.Join(values, " ")
}

func TestPutDeclaresOnceAndLeavesWhatAWorkspaceDeclared(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	own := skills.Definition{Name: "recall", Handler: "sql:select 1 as one"}
	if _, err := skills.Put(t.Context(), pool, own, skills.SourceWorkspace); err != nil {
		t.Fatal(err)
	}
	var changed atomic.Int64
	var group errgroup.Group
	for range 8 {
		group.Go(func() error {
			n, err := builtins.Put(t.Context(), pool)
			changed.Add(int64(n))
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if changed.Load() != int64(len(builtins.Names())-1) {
		t.Errorf("8 processes changed %d rows", changed.Load())
	}
	if s, err := skills.Get(t.Context(), pool, "recall"); err != nil || s.Handler != "sql:select 1 as one" || s.Source != skills.SourceWorkspace {
		t.Errorf("the workspace's recall is %+v, %v", s, err)
	}
	if _, err := skills.Remove(t.Context(), pool, skills.SourceWorkspace, nil); err != nil {
		t.Fatal(err)
	}
	if n, err := builtins.Put(t.Context(), pool); n != 1 || err != nil {
		t.Errorf("put %d rows, %v, after the workspace's was removed", n, err)
	}
}

func TestEveryRowHasItsCode(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	if _, err := builtins.Put(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	registry, err := skills.New(skills.Options{Builtins: builtins.New(pool, nil, nil)})
	if err != nil {
		t.Fatal(err)
	}
	all, err := registry.Available(t.Context(), pool, skills.ScopeInternal)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range all {
		names = append(names, s.Name)
		if !s.Idempotent || s.Trust == skills.TrustApprove || s.Scope != skills.ScopeInternal {
			t.Errorf("%s is %s, %s, idempotent %v", s.Name, s.Trust, s.Scope, s.Idempotent)
		}
	}
	if diff := cmp.Diff(builtins.Names(), names); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(builtins.Names(), slices.Sorted(maps.Keys(builtins.New(pool, nil, nil)))); diff != "" {
		t.Error(diff)
	}
	if visible, err := registry.Available(t.Context(), pool, skills.ScopeExternal); err != nil || len(visible) > 0 {
		t.Errorf("visitors are offered %v, %v", visible, err)
	}
}

func TestRecall(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for i := range 12 {
		save(t, pool, "observation", fmt.Sprintf("size_%02d", i), "the orders table grows")
	}
	save(t, pool, "admin", "name", "orders are Ana's")
	for name, test := range map[string]struct {
		args, want string
		found      int
	}{
		"the last written": {`{}`, "name size_11", 10},
		"a category":       {`{"category": "admin"}`, "name", 1},
		"words":            {`{"query": "grows", "limit": 50}`, "size_11", 12},
		"words within":     {`{"query": "orders", "category": "admin", "limit": 1}`, "name", 1},
		"limit within":     {`{"query": "orders", "category": "observation", "limit": 2}`, "size_", 2},
		"nothing":          {`{"query": "weather"}`, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			answer, err := call(t, pool, "recall", test.args)
			if err != nil {
				t.Fatal(err)
			}
			keys := column(t, answer, "memories", "key")
			if !strings.HasPrefix(keys, test.want) || len(strings.Fields(keys)) != test.found {
				t.Errorf("got %q", keys)
			}
		})
	}
	for _, args := range []string{`{"limit": 0}`, `{"limit": 51}`, `{"question": "x"}`} {
		if answer, err := call(t, pool, "recall", args); err == nil {
			t.Errorf("%s answers %v", args, answer)
		}
	}
}

func TestRecallLeavesOutWhatIsTooLong(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for i := range 6 {
		save(t, pool, "general", fmt.Sprintf("long_%d", i), strings.Repeat("x", 60<<10))
	}
	answer, err := call(t, pool, "recall", `{}`)
	if err != nil {
		t.Fatal(err)
	}
	if keys := column(t, answer, "memories", "key"); keys != "long_5 long_4" || answer["left_out"] != 4.0 {
		t.Errorf("got %q and %v left out", keys, answer["left_out"])
	}
}

func save(t *testing.T, pool *pgxpool.Pool, category, key, value string) {
	t.Helper()
	if _, err := memory.Save(t.Context(), pool, memory.Note{Category: category, Key: key, Value: value, TraceID: traceID}); err != nil {
		t.Fatal(err)
	}
}

func TestObjectivesList(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, name := range []string{"tidy", "healthy"} {
		d := objectives.Definition{Name: name, Goal: strings.Repeat("be good ", 100), Steps: []string{"one", "two"}}
		if _, err := objectives.Put(t.Context(), pool, d, objectives.SourceWorkspace); err != nil {
			t.Fatal(err)
		}
	}
	o, err := objectives.Get(t.Context(), pool, "tidy")
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := objectives.SetStatus(t.Context(), pool, o.ID, objectives.Active, objectives.Paused); !ok || err != nil {
		t.Fatal(ok, err)
	}
	for args, want := range map[string]string{`{}`: "healthy tidy", `{"status": "paused"}`: "tidy", `{"status": "failed"}`: ""} {
		answer, err := call(t, pool, "objectives_list", args)
		if err != nil {
			t.Fatal(err)
		}
		if got := column(t, answer, "objectives", "name"); got != want {
			t.Errorf("%s: got %q, not %q", args, got, want)
		}
	}
	answer, err := call(t, pool, "objectives_list", `{}`)
	if err != nil || column(t, answer, "objectives", "pending") != "2 2" || len(column(t, answer, "objectives", "goal")) > 1000 {
		t.Errorf("got %v, %v", answer, err)
	}
	if _, err := call(t, pool, "objectives_list", `{"status": "lost"}`); err == nil {
		t.Error("a status that there is not was taken")
	}
}

func TestRecentActivity(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	note := func(skill string, kind activity.Kind, o activity.Outcome) {
		e := activity.Entry{TraceID: traceID, Kind: kind, Skill: skill, Input: map[string]string{"secret": "stays here"}}
		if _, err := activity.Note(t.Context(), pool, e, o); err != nil {
			t.Fatal(err)
		}
	}
	note("sizes", activity.KindCall, activity.Outcome{Status: activity.Success})
	note("think", activity.KindModel, activity.Outcome{Status: activity.Success})
	note("ticket", activity.KindCall, activity.Outcome{Status: activity.Error, Message: strings.Repeat("no luck ", 100)})
	for args, want := range map[string]string{
		`{}`: "ticket sizes", `{"limit": 1}`: "ticket", `{"skill": "sizes"}`: "sizes", `{"status": "error"}`: "ticket", `{"status": "running"}`: "",
	} {
		answer, err := call(t, pool, "recent_activity", args)
		if err != nil {
			t.Fatal(err)
		}
		if got := column(t, answer, "activities", "skill"); got != want {
			t.Errorf("%s: got %q, not %q", args, got, want)
		}
	}
	answer, err := call(t, pool, "recent_activity", `{"status": "error"}`)
	if err != nil {
		t.Fatal(err)
	}
	row := answer["activities"].([]any)[0].(map[string]any)
	if got := slices.Sorted(maps.Keys(row)); !slices.Equal(got, []string{"duration_ms", "error", "skill", "status", "time", "trace_id"}) {
		t.Errorf("a row has %v", got)
	}
	if row["trace_id"] != traceID || len(row["error"].(string)) > 310 {
		t.Errorf("got %v", row)
	}
}
