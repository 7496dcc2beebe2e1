package activity_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// written has the compared columns of a row.
type written struct {
	Skill, Step, Kind, Status, Class, Message, Input, Output, Usage string
	Cost                                                            float64
	Finished                                                        bool
}

func writtenRow(t *testing.T, db postgres.DB, id string) written {
	t.Helper()
	got := pgtest.Rows[written](t, db, `
		select skill_name, step, kind, status, error_class, coalesce(error_message, ''), input::text,
		       coalesce(output::text, ''), token_usage::text, cost_usd::float8,
		       finished_at is not null and duration_ms is not null
		  from agent_activity where id = @id`, postgres.Strict{"id": id})
	require.Equal(t, 1, len(got), id)
	return got[0]
}

// claimed returns an entry of the claim of a running execution.
func claimed(t *testing.T, pool *pgxpool.Pool) activity.Entry {
	t.Helper()
	e := activity.Entry{TraceID: string(trace.New(trace.Flow)), Claim: 1, Step: "pay", Skill: "pay"}
	err := pool.QueryRow(t.Context(), `
		with w as (insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 minute') returning id)
		insert into agent_executions (trace_id, surface, flow, status, claim, claimed_by)
		select @trace, 'flow', 'test', 'running', 1, w.id from w returning id::text`,
		postgres.Strict{"trace": e.TraceID}).Scan(&e.ExecutionID)
	require.NoError(t, err)
	return e
}

// handOn gives the execution to another claim, like a takeover.
func handOn(t *testing.T, pool *pgxpool.Pool, id string) {
	t.Helper()
	pgtest.Exec(t, pool, `update agent_executions set claim = claim + 1 where id = @id`, postgres.Strict{"id": id})
}

func TestOpenAndCloseWriteOneRow(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := claimed(t, pool)
	e.Input = map[string]int{"amount": 7}
	id, err := activity.Open(t.Context(), pool, e)
	require.NoError(t, err)
	want := written{Skill: "pay", Step: "pay", Kind: "call", Status: "running", Input: `{"amount": 7}`, Usage: "{}"}
	assert.NoDiff(t, want, writtenRow(t, pool, id))
	out := activity.Outcome{
		Status: activity.Error, Output: []int{1}, Message: "the quota is spent", Class: "quota", CostUSD: 0.25,
		Usage: activity.Usage{PromptTokens: 2, CompletionTokens: 3, TotalTokens: 5},
	}
	for range 2 { // the second time changes nothing
		require.NoError(t, activity.Close(t.Context(), pool, id, e, out))
		out = activity.Outcome{Status: activity.Success}
	}
	want.Status, want.Class, want.Message, want.Output, want.Finished = "error", "quota", "the quota is spent", "[1]", true
	want.Usage, want.Cost = `{"total_tokens": 5, "prompt_tokens": 2, "completion_tokens": 3}`, 0.25
	assert.NoDiff(t, want, writtenRow(t, pool, id))
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_activity_open`))
}

func TestReopenedStepHasOneRow(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := claimed(t, pool)
	one, err := activity.Open(t.Context(), pool, e)
	require.NoError(t, err)
	two, err := activity.Open(t.Context(), pool, e)
	assert.NoError(t, err)
	assert.Equal(t, two, one)
	e.Step = "pay#2"
	three, err := activity.Open(t.Context(), pool, e)
	assert.Truef(t, err == nil && three != one, "another step has row %s too, %v", three, err)
	e.Step = "" // no step: each activity is a new one
	for range 2 {
		_, err := activity.Open(t.Context(), pool, e)
		require.NoError(t, err)
	}
	assert.Equal(t, 4, pgtest.Value[int](t, pool, `select count(*) from agent_activity`))
}

func TestStaleClaimWritesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	stale := map[string]func(t *testing.T, e activity.Entry){
		"handed on": func(t *testing.T, e activity.Entry) { handOn(t, pool, e.ExecutionID) },
		"expired": func(t *testing.T, e activity.Entry) {
			pgtest.Exec(t, pool, `
				update agent_workers set expires_at = clock_timestamp()
				  where id = (select claimed_by from agent_executions where id = @id)`,
				postgres.Strict{"id": e.ExecutionID})
		},
		"cancelled": func(t *testing.T, e activity.Entry) {
			pgtest.Exec(t, pool, `select cancel_agent_execution(@id, 'test', '')`, postgres.Strict{"id": e.ExecutionID})
		},
	}
	for name, make := range stale {
		t.Run(name, func(t *testing.T) {
			e := claimed(t, pool)
			id, err := activity.Open(t.Context(), pool, e)
			require.NoError(t, err)
			make(t, e)
			before := writtenRow(t, pool, id)
			rows := pgtest.Value[int](t, pool, `select count(*) from agent_activity`)
			other := e
			other.Step = "other"
			_, err = activity.Open(t.Context(), pool, other)
			assert.ErrorIs(t, err, activity.ErrStale, "open")
			_, err = activity.Note(t.Context(), pool, e, activity.Outcome{})
			assert.ErrorIs(t, err, activity.ErrStale, "note")
			err = activity.Close(t.Context(), pool, id, e, activity.Outcome{})
			if open := before.Status == "running"; !errors.Is(err, activity.ErrStale) && (open || err != nil) {
				t.Errorf("close: %v", err) // closing a row that closed with its execution changes nothing and returns no error
			}
			diff := cmp.Diff(before, writtenRow(t, pool, id))
			assert.Truef(t, diff == "" && pgtest.Value[int](t, pool, `select count(*) from agent_activity`) == rows,
				"the log changed (-before +after):\n%s", diff)
		})
	}
}

func TestRejectedWriteIsRecorded(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := claimed(t, pool)
	handOn(t, pool, e.ExecutionID)
	err := activity.Reject(t.Context(), pool, e,
		activity.Outcome{Status: activity.Success, Output: map[string]string{"paid": "7", "api_key": "sk-secret"}})
	require.NoError(t, err)
	id := pgtest.Value[string](t, pool, `select id::text from agent_activity`)
	want := written{
		Skill: "stale_write", Step: "pay", Kind: "note", Status: "error", Class: "stale",
		Message: activity.ErrStale.Error(), Usage: "{}",
		Input:  `{"step": "pay", "claim": 1, "rejected_write": "pay"}`,
		Output: `{"error": "", "output": {"paid": "7", "api_key": "[redacted]"}, "status": "success"}`, Finished: true,
	}
	assert.NoDiff(t, want, writtenRow(t, pool, id))
	// The rejected write may be a model's answer.
	shown, _, err := activity.Recent(activity.WithoutTexts(t.Context()), pool, activity.Filter{})
	require.NoError(t, err)
	assert.Equal(t, `{"note":"`+activity.HiddenText+`"}`, string(shown[0].Output))
}

func TestInputAndOutputAreRedactedAndBounded(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	const secret = "hunter2-hunter2"
	long := strings.Repeat("long ", 50_000)
	e := activity.Entry{
		TraceID: string(trace.New(trace.Operate)), Skill: "ask",
		Input: map[string]any{"password": secret, "text": long},
	}
	id, err := activity.Note(t.Context(), pool, e, activity.Outcome{
		Status: activity.Error, Output: json.RawMessage(`{"url": "postgres://u:` + secret + `@h/d", "nul": "a\u0000b"}`),
		Message: "connect postgres://u:" + secret + "@h/d\x00: refused " + long,
	})
	require.NoError(t, err)
	got := writtenRow(t, pool, id)
	for name, text := range map[string]string{"input": got.Input, "output": got.Output, "error": got.Message} {
		assert.Truef(t, !strings.Contains(text, secret) && strings.Contains(text, "redacted"), "%s: %.200s", name, text)
		if len(text) > activity.MaxField+1024 { // jsonb writes a space after each colon and comma
			t.Errorf("%s has %d bytes", name, len(text))
		}
	}
	assert.Truef(t, strings.Contains(got.Input, "bytes]") && strings.Contains(got.Message, "bytes]"),
		"no marker says what was cut: %.100s … %.100s", got.Input, got.Message)
}

func TestEntryTakesEmptyFieldsFromContext(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := trace.New(trace.Heartbeat)
	ctx := trace.WithLane(trace.With(t.Context(), trace.Span{TraceID: id, Surface: trace.Heartbeat, Agent: "nightwatch"}),
		"heartbeat")
	parent, err := activity.Open(ctx, pool, activity.Entry{Skill: "plan", Kind: activity.KindPhase})
	require.NoError(t, err)
	child, err := activity.Note(trace.WithActivity(ctx, parent), pool, activity.Entry{Skill: "look"}, activity.Outcome{})
	require.NoError(t, err)
	var got [6]string
	err = pool.QueryRow(ctx, `
		select trace_id, conversation_id, surface, agent, lane, parent_id::text from agent_activity where id = @id`,
		postgres.Strict{"id": child}).Scan(&got[0], &got[1], &got[2], &got[3], &got[4], &got[5])
	want := [6]string{string(id), string(id), "heartbeat", "nightwatch", "heartbeat", parent}
	diff := cmp.Diff(want, got)
	assert.Truef(t, diff == "" && err == nil, "row %v (-want +got):\n%s", err, diff)
}

func TestUnrecordableActionIsError(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	whole := activity.Entry{TraceID: string(trace.New(trace.Flow)), Skill: "ask"}
	cases := map[string]struct {
		entry   activity.Entry
		outcome activity.Outcome
	}{
		"no trace":       {activity.Entry{Skill: "ask"}, activity.Outcome{}},
		"unknown status": {whole, activity.Outcome{Status: "splendid"}},
		"unknown kind":   {activity.Entry{TraceID: whole.TraceID, Skill: "ask", Kind: "song"}, activity.Outcome{}},
		"claim alone":    {activity.Entry{TraceID: whole.TraceID, Skill: "ask", Claim: 3}, activity.Outcome{}},
		"no such claim": {activity.Entry{
			TraceID: whole.TraceID, Skill: "ask", Claim: 3,
			ExecutionID: "01a1fc71-3adb-78b8-86ab-983dc5c92f7f",
		}, activity.Outcome{}},
		"execution is no": {activity.Entry{TraceID: whole.TraceID, Skill: "ask", ExecutionID: "seven"}, activity.Outcome{}},
	}
	for name, c := range cases {
		_, err := activity.Note(t.Context(), pool, c.entry, c.outcome)
		assert.Truef(t, err != nil && strings.HasPrefix(err.Error(), "note activity ask: "), "%s: %v", name, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := activity.Open(ended, pool, whole)
	assert.ErrorIs(t, err, context.Canceled, "with an ended context")
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select (select count(*) from agent_activity) + (select count(*)
		from agent_activity_open)`))
}
