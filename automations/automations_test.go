package automations_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const traceID = "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"

func put(t *testing.T, pool *pgxpool.Pool, d automations.Definition) automations.Automation {
	t.Helper()
	if d.Skill == "" && d.Prompt == "" {
		d.Skill = "sizes"
	}
	if d.Cron == "" && d.Event == "" && d.Signal == "" {
		d.Cron = "*/30 * * * *"
	}
	_, err := automations.Put(t.Context(), pool, d)
	require.NoError(t, err)
	return get(t, pool, d.Name)
}

func get(t *testing.T, pool *pgxpool.Pool, name string) automations.Automation {
	t.Helper()
	a, err := automations.Get(t.Context(), pool, name)
	require.NoError(t, err)
	return a
}

// putDue declares an automation, and sets its next time to the past.
func putDue(t *testing.T, pool *pgxpool.Pool, d automations.Definition, ago string) automations.Automation {
	t.Helper()
	put(t, pool, d)
	pgtest.Exec(t, pool, `update agent_automations
		set next_run_at = date_trunc('hour', clock_timestamp()) - $2::text::interval where name = $1`, d.Name, ago)
	return get(t, pool, d.Name)
}

func claim(t *testing.T, pool *pgxpool.Pool, a automations.Automation) automations.Run {
	t.Helper()
	run, ok, err := automations.Claim(t.Context(), pool, a.ID, *a.NextRunAt, "", traceID)
	require.Truef(t, ok && err == nil, "claim: %v, %v", ok, err)
	return run
}

func finish(t *testing.T, pool *pgxpool.Pool, run automations.Run, result automations.Result) automations.Run {
	t.Helper()
	run, ok, err := automations.Finish(t.Context(), pool, run.ID, run.Attempt, result)
	require.Truef(t, ok && err == nil, "finish: %v, %v", ok, err)
	return run
}

func due(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	list, err := automations.Due(t.Context(), pool, time.Time{}, 0)
	require.NoError(t, err)
	var names []string
	for _, a := range list {
		names = append(names, a.Name)
	}
	return strings.Join(names, " ")
}

func TestValidate(t *testing.T) {
	t.Parallel()
	ok := automations.Definition{Name: "a", Cron: "@daily", Skill: "s"}
	with := func(change func(*automations.Definition)) automations.Definition {
		d := ok
		change(&d)
		return d
	}
	for name, test := range map[string]struct {
		d    automations.Definition
		want []string
	}{
		"nothing": {automations.Definition{}, []string{"name: ", ", an event, or a signal", "skill: "}},
		"all at once": {
			automations.Definition{
				Name: "a\x00", Cron: "61 * * * *", Timezone: "Mars/Base", Event: "e", Trigger: "cron",
				Skill: "a b", MaxAttempts: -1,
			},
			[]string{"name: ", "cron: ", "timezone: ", "event: ", "skill: ", "max_attempts: "},
		},
		"never fires": {with(func(d *automations.Definition) { d.Cron = "0 0 31 2 *" }), []string{"cron: "}},
		"zone alone":  {with(func(d *automations.Definition) { d.Cron = "TZ=UTC" }), []string{"cron: "}},
		"two zones": {with(func(d *automations.Definition) {
			d.Cron, d.Timezone = "CRON_TZ=America/New_York 30 2 * * *", "Europe/Madrid"
		}), []string{"cron: runs in America/New_York, and timezone names Europe/Madrid; keep one of them"}},
		"negative":      {with(func(d *automations.Definition) { d.Cron = "@every -1s" }), []string{"cron: "}},
		"local zone":    {with(func(d *automations.Definition) { d.Timezone = "Local" }), []string{"timezone: "}},
		"trigger":       {with(func(d *automations.Definition) { d.Trigger = "moon" }), []string{"trigger: "}},
		"cron on event": {with(func(d *automations.Definition) { d.Event = "e" }), []string{"cron: "}},
		"zone + event": {
			automations.Definition{Name: "a", Event: "e", Timezone: "Europe/Madrid", Skill: "s"}, []string{"timezone: "},
		},
		"zone + signal": {
			automations.Definition{Name: "a", Signal: "true", Timezone: "Europe/Madrid", Skill: "s"}, []string{"timezone: "},
		},
		"no event":      {automations.Definition{Name: "a", Trigger: "event", Skill: "s"}, []string{"event: "}},
		"no signal":     {automations.Definition{Name: "a", Trigger: "signal", Skill: "s"}, []string{"signal: "}},
		"signal + cron": {with(func(d *automations.Definition) { d.Signal = "true" }), []string{"cron: "}},
		"when + cron":   {with(func(d *automations.Definition) { d.When = "true" }), []string{"when: "}},
		"both actions":  {with(func(d *automations.Definition) { d.Prompt = "do" }), []string{"prompt: "}},
		"prompt args": {
			automations.Definition{Name: "a", Cron: "@daily", Prompt: "p", Arguments: map[string]any{"a": 1}},
			[]string{"arguments: "},
		},
		"NUL argument": {
			with(func(d *automations.Definition) { d.Arguments = map[string]any{"a": "\x00"} }),
			[]string{"arguments: "},
		},
		"not JSON": {
			with(func(d *automations.Definition) { d.Arguments = map[string]any{"a": map[any]any{}} }),
			[]string{"arguments: "},
		},
		"attempts":  {with(func(d *automations.Definition) { d.MaxAttempts = 99 }), []string{"max_attempts: "}},
		"NUL agent": {with(func(d *automations.Definition) { d.Agent = "a\x00" }), []string{"agent: "}},
	} {
		err := automations.Validate(test.d)
		for _, want := range test.want {
			assert.ErrorContains(t, err, want, name)
		}
	}
	err := automations.Validate(with(func(d *automations.Definition) {
		d.Cron, d.Timezone = "CRON_TZ=Asia/Tokyo 0 9 * * *", "Mars/Base"
	}))
	assert.Truef(t, err != nil && strings.HasPrefix(err.Error(), "timezone: ") && !strings.Contains(err.Error(), "cron: "),
		"an unknown time zone beside another: %v", err)
	for _, d := range []automations.Definition{
		ok,
		{Name: "a", Event: "DOCUMENT_UPLOADED", Prompt: strings.Repeat("x", 8192) + "\n"},
		{Name: "a", Signal: "pending_approvals > 3 and failures_24h >= 5", Skill: "s"},
		{Name: "a", Event: "e", When: `payload.action == "opened" and key startsWith "repo/" and memories < 10`, Skill: "s"},
		{Name: "a", Cron: "0 9 * * 1-5", Timezone: "Europe/Madrid", Skill: "s", Arguments: map[string]any{"a": 1}},
	} {
		assert.NoError(t, automations.Validate(d))
	}
}

func TestPutKeepsWhatWasLearned(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	d := automations.Definition{Name: "a", Cron: "0 9 * * *", Timezone: "Europe/Madrid", Skill: "s"}
	a := put(t, pool, d)
	madrid, err := time.LoadLocation("Europe/Madrid")
	require.NoError(t, err)
	if at := a.NextRunAt.In(madrid); at.Hour() != 9 || at.Minute() != 0 || !at.After(time.Now()) || a.MaxAttempts != 3 {
		t.Errorf("next at %s, %+v", at, a)
	}
	changed, err := automations.Put(t.Context(), pool, d)
	assert.Truef(t, !changed && err == nil, "the same again: %v, %v", changed, err)
	pgtest.Exec(t, pool, `
		insert into agent_skills (name, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at)
		values ('s', '{}', 'builtin:x', false, 'self_heal', '3 failures', clock_timestamp())`)
	pgtest.Exec(t, pool, `update agent_automations set next_run_at = '2020-01-01'`)
	d.Description = "other"
	if a := put(t, pool, d); a.Enabled || a.PausedFor != "s" || a.NextRunAt.Year() != 2020 || a.Description != "other" {
		t.Errorf("got %+v", a)
	}
	d.Timezone = "UTC"
	if a := put(t, pool, d); a.NextRunAt.UTC().Hour() != 9 || a.NextRunAt.Before(time.Now()) {
		t.Errorf("the new schedule does not count: %s", a.NextRunAt)
	}
	d.Cron, d.Timezone, d.Event = "", "", "e"
	a = put(t, pool, d)
	assert.Truef(t, a.NextRunAt == nil && a.Trigger == "event", "got %+v", a)
}

func TestDueAndRemove(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	putDue(t, pool, automations.Definition{Name: "late"}, "1 hour")
	putDue(t, pool, automations.Definition{Name: "later"}, "2 hours")
	putDue(t, pool, automations.Definition{Name: "off"}, "3 hours")
	put(t, pool, automations.Definition{Name: "not yet", Cron: "0 0 1 1 *"})
	put(t, pool, automations.Definition{Name: "on event", Event: "e"})
	ok, err := automations.Disable(t.Context(), pool, "off", "admin", "r")
	require.True(t, ok && err == nil, ok, err)
	assert.Equal(t, "later late", due(t, pool))
	removed, err := automations.Remove(t.Context(), pool, []string{"late", "off", "on event"})
	assert.Truef(t, err == nil && slices.Equal(removed, []string{"later", "not yet"}), "removed %v, %v", removed, err)
	list, err := automations.List(t.Context(), pool, automations.Filter{Limit: 2})
	assert.Truef(t, err == nil && len(list) == 2 && list[0].Name == "on event", "got %+v, %v", list, err)
}

// explainer has the server explain each passing query with its arguments.
type explainer struct {
	postgres.DB
	t     *testing.T
	plans []string
}

func (e *explainer) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	e.plans = append(e.plans, strings.Join(pgtest.Column[string](e.t, e.DB, "explain "+sql, args...), "\n"))
	return e.DB.Query(ctx, sql, args...)
}

func TestDueRunsAreCountedByIndex(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, name := range []string{"slow", "slower", "off", "idle"} {
		put(t, pool, automations.Definition{Name: name, Event: "e"})
	}
	pgtest.Exec(t, pool, `update agent_automations set enabled = false, disabled_by = 'admin' where name = 'off'`)
	pgtest.Exec(t, pool, `
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status, retry_at, created_at)
		select a.id, 'signal', x.at, x.status,
		       case x.status when 'error'
		         then '2026-01-30T00:00:00Z'::timestamptz + (x.n - 1) * interval '100 years' end,
		       x.at + s * interval '1 second'
		  from agent_automations a
		  join (values ('slow', 'success', 20000, '2026-01-01T00:00:00Z'::timestamptz),
		               ('slow', 'due', 30, '2026-02-02T00:00:00Z'), ('slow', 'claimed', 1, '2026-02-01T00:00:00Z'),
		               ('slower', 'due', 2, '2026-02-01T00:00:00Z'),
		               ('slower', 'error', 1, '2026-01-01T00:00:00Z'), ('slow', 'error', 2, '2026-01-01T00:00:00Z'),
		               ('off', 'due', 7, '2026-01-02T00:00:00Z'),
		               ('idle', 'success', 9, '2026-01-02T00:00:00Z')) as x (name, status, n, at) using (name)
		 cross join lateral generate_series(1, x.n) s`)
	pgtest.Exec(t, pool, `analyze agent_automation_runs`)
	e := &explainer{DB: pool, t: t}
	list, err := automations.List(t.Context(), e, automations.Filter{})
	require.NoError(t, err)
	got := map[string]string{}
	for _, a := range list {
		got[a.Name] = fmt.Sprint(a.RunsDue)
		if a.OldestDueAt != nil {
			got[a.Name] += " since " + a.OldestDueAt.UTC().Format(time.RFC3339)
		}
	}
	assert.NoDiff(t, map[string]string{
		"slow": "30 since 2026-02-02T00:00:01Z", "slower": "3 since 2026-01-30T00:00:00Z",
		"off": "7 since 2026-01-02T00:00:01Z", "idle": "0",
	}, got)
	longest, err := automations.LongestDue(t.Context(), e)
	assert.Truef(t, err == nil && longest.Name == "slower", "got %+v, %v", longest, err)
	for _, plan := range e.plans {
		assert.Contains(t, plan, "agent_automation_runs_ready")
	}
	pgtest.Exec(t, pool, `update agent_automation_runs set status = 'success'`)
	_, err = automations.LongestDue(t.Context(), pool)
	assert.ErrorIs(t, err, automations.ErrNotFound)
}

func TestOneOfManyClaimersGetsARun(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, d := range []automations.Definition{{Name: "cron"}} {
		a := putDue(t, pool, d, "5 hours")
		at := *a.NextRunAt
		var wins atomic.Int32
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				run, ok, err := automations.Claim(t.Context(), pool, a.ID, at, "00000000-0000-0000-0000-00000000000a", traceID)
				assert.NoError(t, err)
				if ok {
					wins.Add(1)
					assert.Truef(t, run.Status == automations.Claimed && run.Attempt == 1 && run.ScheduledFor.Equal(at) &&
						run.TraceID == traceID && run.ExecutionID != nil, "got %+v", run)
				}
			})
		}
		wg.Wait()
		assert.Equal(t, 1, wins.Load(), d.Name)
		after := get(t, pool, d.Name)
		assert.Truef(t, after.LastTraceID == traceID && after.LastRunAt != nil, "%s: got %+v", d.Name, after)
	}
}

func TestMissedTimesAreRunOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, cron := range map[string]string{"minutely": "* * * * *", "interval": "@every 7m", "secondly": "@every 1s"} {
		a := putDue(t, pool, automations.Definition{Name: name, Cron: cron}, "1 day")
		before := pgtest.Value[time.Time](t, pool, `select clock_timestamp()`)
		claim(t, pool, a)
		after := get(t, pool, name)
		assert.Truef(t, after.NextRunAt.After(before),
			"%s: next at %s, and it was run after %s", name, after.NextRunAt, before)
		assert.Truef(t, name != "interval" || after.NextRunAt.Sub(*a.NextRunAt)%(7*time.Minute) == 0,
			"the interval lost its beat: %s after %s", after.NextRunAt, a.NextRunAt)
	}
}

func TestClaimRefuses(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := putDue(t, pool, automations.Definition{Name: "a"}, "1 hour")
	future := put(t, pool, automations.Definition{Name: "future", Cron: "0 0 1 1 *"})
	for name, test := range map[string]struct {
		id string
		at time.Time
	}{"another time": {a.ID, a.NextRunAt.Add(time.Second)}, "before its time": {future.ID, *future.NextRunAt}} {
		_, ok, err := automations.Claim(t.Context(), pool, test.id, test.at, "", traceID)
		assert.Truef(t, !ok && err == nil, "%s: %v, %v", name, ok, err)
	}
	_, err := automations.Disable(t.Context(), pool, "a", "admin", "")
	require.NoError(t, err)
	_, ok, err := automations.Claim(t.Context(), pool, a.ID, *a.NextRunAt, "", traceID)
	assert.Truef(t, !ok && err == nil, "a disabled one: %v, %v", ok, err)
	_, _, err = automations.Claim(t.Context(), pool, "00000000-0000-0000-0000-000000000000", time.Now(), "", "")
	assert.ErrorIs(t, err, automations.ErrNotFound)
}

func TestATimeThatWasRunBeforeIsPassedBy(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := putDue(t, pool, automations.Definition{Name: "a"}, "1 hour")
	claim(t, pool, a)
	pgtest.Exec(t, pool, `update agent_automations set next_run_at = '`+a.NextRunAt.Format(time.RFC3339Nano)+`'`)
	_, ok, err := automations.Claim(t.Context(), pool, a.ID, *a.NextRunAt, "", traceID)
	assert.Truef(t, !ok && err == nil, "run twice: %v, %v", ok, err)
	assert.Equal(t, "", due(t, pool))
}

func TestARunIsTriedAgainUntilItIsDead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := putDue(t, pool, automations.Definition{Name: "a", MaxAttempts: 3}, "1 hour")
	run := claim(t, pool, a)
	for attempt, wait := range []time.Duration{time.Minute, 4 * time.Minute} {
		run = finish(t, pool, run, automations.Result{Error: "no luck\x00"})
		require.Truef(t, run.Status == automations.Error && run.Attempt == attempt+1 && run.RetryAt != nil &&
			run.RetryAt.Sub(*run.FinishedAt).Round(time.Second) == wait, "attempt %d: %+v", attempt+1, run)
		_, ok, _ := automations.ClaimRun(t.Context(), pool, run.ID, run.Attempt, "", traceID)
		assert.True(t, !ok, "retried before its time")
		pgtest.Exec(t, pool, `update agent_automation_runs set retry_at = clock_timestamp()`)
		retries, err := automations.Ready(t.Context(), pool, 0)
		require.Truef(t, err == nil && len(retries) == 1, "retries %+v, %v", retries, err)
		run = retry(t, pool, retries[0])
	}
	run = finish(t, pool, run, automations.Result{Error: "no luck"})
	assert.Truef(t, run.Status == automations.Dead && run.RetryAt == nil && run.Attempt == 3 &&
		*run.ErrorMessage == "no luck", "got %+v", run)
	dead, err := automations.Runs(t.Context(), pool, automations.RunFilter{Status: automations.Dead, AutomationID: a.ID})
	assert.NoError(t, err, dead)
	assert.Equal(t, 1, len(dead), dead)
	ok, err := automations.Redrive(t.Context(), pool, run.ID)
	require.True(t, ok && err == nil, ok, err)
	run = finish(t, pool, retry(t, pool, run), automations.Result{Output: map[string]int{"n": 1}})
	assert.Truef(t, run.Status == automations.Success && string(run.Output) == `{"n": 1}` && run.ErrorMessage == nil,
		"got %+v", run)
	ok, err = automations.Redrive(t.Context(), pool, run.ID)
	assert.Truef(t, !ok && err == nil, "redrove a success: %v, %v", ok, err)
}

// retry claims the next attempt, with many concurrent callers.
func retry(t *testing.T, pool *pgxpool.Pool, failed automations.Run) automations.Run {
	t.Helper()
	var mu sync.Mutex
	var won []automations.Run
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			run, ok, err := automations.ClaimRun(t.Context(), pool, failed.ID, failed.Attempt, "", traceID)
			assert.NoError(t, err)
			if ok {
				mu.Lock()
				defer mu.Unlock()
				won = append(won, run)
			}
		})
	}
	wg.Wait()
	require.Equal(t, 1, len(won))
	return won[0]
}

// TestReadyReadsOneRunOfABacklog, since each of its runs leads to another call of Ready.
func TestReadyReadsOneRunOfABacklog(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := put(t, pool, automations.Definition{Name: "a", Signal: "pending_approvals > 3"})
	pgtest.Exec(t, pool, `
		insert into agent_automation_runs (automation_id, cause, status, scheduled_for, created_at, retry_at)
		select $1::uuid, 'signal', s.status, now() - n * interval '1 s', now() - n * interval '1 s', now() + s.wait
		  from generate_series(1, 3000) n,
		       (values ('due', null), ('error', interval '1 hour')) s (status, wait)`, a.ID)
	pgtest.Exec(t, pool, `analyze agent_automation_runs`)
	recorded, recorder := pgtest.Recorded(t, pool)
	ready, err := automations.Ready(t.Context(), recorded, 0)
	require.NoError(t, err)
	require.Equal(t, 1, len(ready))
	assert.Truef(t, time.Since(ready[0].CreatedAt) > 3000*time.Second, "not the longest waiting one: %+v", ready[0])
	q := recorder.Queries()[0]
	rows, err := pool.Query(t.Context(), "explain (analyze, timing off, summary off) "+q.SQL, q.Args...)
	require.NoError(t, err)
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	text := strings.Join(plan, "\n")
	assert.Truef(t, !strings.Contains(text, "rows=3000") && !strings.Contains(text, "Filter: 2"),
		"reads the backlog:\n%s", text)
}

func TestFinishIsComparedAndSet(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	run := claim(t, pool, putDue(t, pool, automations.Definition{Name: "a"}, "1 hour"))
	got := finish(t, pool, run, automations.Result{Skipped: true, Error: "lane busy"})
	assert.Truef(t, got.Status == automations.Skipped && got.RetryAt == nil, "got %+v", got)
	_, ok, err := automations.Finish(t.Context(), pool, run.ID, 1, automations.Result{})
	assert.Truef(t, !ok && err == nil, "finished twice: %v, %v", ok, err)
	run = claim(t, pool, putDue(t, pool, automations.Definition{Name: "b"}, "1 hour"))
	_, ok, _ = automations.Finish(t.Context(), pool, run.ID, 2, automations.Result{})
	assert.True(t, !ok, "finished another attempt")
	_, _, err = automations.Finish(t.Context(), pool, run.ID, 1, automations.Result{Output: "\x00"})
	assert.Error(t, err, "a NUL character was accepted")
	got = finish(t, pool, claim(t, pool, putDue(t, pool, automations.Definition{Name: "c"}, "1 hour")), automations.Result{
		Output: map[string]string{"password": "hunter22"}, Error: "refused: password=hunter22",
	})
	assert.Truef(t, !strings.Contains(string(got.Output)+*got.ErrorMessage, "hunter22"), "a secret is stored: %+v", got)
	got = finish(t, pool, run, automations.Result{Output: strings.Repeat("x", 300<<10)})
	assert.Truef(t, strings.Contains(string(got.Output), "omitted"), "got %.100s", got.Output)
}

func TestAutomationsArePausedWithTheirSkillWhoeverDisablesIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_skills (name, tool_definition, handler) values ('broken', '{}', 'builtin:x'),
		('fine', '{}', 'builtin:x')`)
	for _, name := range []string{"one", "two", "admins"} {
		putDue(t, pool, automations.Definition{Name: name, Skill: "broken"}, "1 hour")
	}
	put(t, pool, automations.Definition{Name: "other", Skill: "fine"})
	disable := func(name string, want bool) {
		t.Helper()
		ok, err := automations.Disable(t.Context(), pool, name, "admin", "mine")
		require.Truef(t, ok == want && err == nil, "disable %s: %v, %v", name, ok, err)
	}
	paused := func(want ...string) {
		t.Helper()
		got, err := automations.PausedFor(t.Context(), pool, "broken")
		assert.Truef(t, err == nil && slices.Equal(got, want), "paused are %v (%v), want %v", got, err, want)
	}
	run := finish(t, pool, claim(t, pool, get(t, pool, "one")), automations.Result{Error: "x"})
	pgtest.Exec(t, pool, `update agent_automation_runs set retry_at = clock_timestamp()`)
	disable("admins", true)
	for _, by := range []string{"self_heal", "admin", "mcp"} {
		pgtest.Exec(t, pool, `update agent_skills set enabled = false, disabled_by = '`+by+
			`', disabled_reason = 'broken' where name = 'broken'`)
		paused("one", "two")
		a := get(t, pool, "one")
		assert.Truef(t, a.DisabledBy == by && a.DisabledReason == "its skill broken is disabled: broken" &&
			a.DisabledAt != nil, "got %+v", a)
		retries, _ := automations.Ready(t.Context(), pool, 0)
		assert.True(t, len(retries) == 0 && due(t, pool) == "", "a paused automation still runs")
		_, ok, _ := automations.ClaimRun(t.Context(), pool, run.ID, 1, "", traceID)
		assert.True(t, !ok, "a paused automation was retried")
		pgtest.Exec(t, pool, `update agent_skills set enabled = true, disabled_by = '' where name = 'broken'`)
		paused()
		if a, b, c := get(t, pool, "one"), get(t, pool, "admins"), get(t, pool, "other"); !a.Enabled || a.DisabledAt != nil ||
			b.Enabled || !c.Enabled {
			t.Errorf("after the skill was enabled again: %+v, %+v, %+v", a, b, c)
		}
	}
	ok, err := automations.Enable(t.Context(), pool, "admins")
	assert.Truef(t, ok && err == nil, "enable: %v, %v", ok, err)
	pgtest.Exec(t, pool, `update agent_skills set enabled = false, disabled_by = 'self_heal' where name = 'broken'`)
	pgtest.Exec(t, pool, `update agent_skills set disabled_by = 'admin', disabled_reason = 'for good'
		where name = 'broken'`)
	paused("admins", "one", "two")
	a := get(t, pool, "two")
	assert.Truef(t, a.DisabledBy == "admin" && a.DisabledReason == "its skill broken is disabled: for good", "got %+v", a)
	disable("two", true)
	disable("two", false)
	paused("admins", "one")
	_, err = automations.Enable(t.Context(), pool, "nobody")
	assert.ErrorIs(t, err, automations.ErrNotFound)
	_, err = automations.Disable(t.Context(), pool, "one", automations.SelfHeal, "")
	assert.Error(t, err, "an admin passed as self-heal")
}

func TestNoAutomationIsInServiceWhileItsSkillIsNot(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into agent_skills (name, tool_definition, handler, enabled, disabled_by)
		values ('broken', '{}', 'builtin:x', false, 'admin'), ('fine', '{}', 'builtin:x', true, '')`)
	a := put(t, pool, automations.Definition{Name: "a", Cron: "@daily", Skill: "broken"})
	assert.Truef(t, !a.Enabled && a.PausedFor == "broken", "the new automation runs: %+v", a)
	if ok, err := automations.Enable(t.Context(), pool, "a"); ok || !errors.Is(err, automations.ErrSkillDisabled) {
		t.Errorf("enable: %v, %v", ok, err)
	}
	a = put(t, pool, automations.Definition{Name: "a", Cron: "@daily", Skill: "fine"})
	assert.Truef(t, a.Enabled && a.PausedFor == "", "an automation with a new skill stays paused: %+v", a)
	a = put(t, pool, automations.Definition{Name: "a", Cron: "@daily", Skill: "broken"})
	assert.Truef(t, !a.Enabled, "an automation with a disabled skill runs: %+v", a)
	_, err := automations.Propose(t.Context(), pool, automations.Definition{Name: "p", Cron: "@daily", Skill: "broken"},
		"agent", traceID)
	require.NoError(t, err)
	ok, err := automations.Accept(t.Context(), pool, "p", "admin")
	require.Truef(t, ok && err == nil, "accept: %v, %v", ok, err)
	p := get(t, pool, "p")
	assert.Truef(t, !p.Enabled && p.PausedFor == "broken" && p.DecidedBy == "admin", "the accepted proposal is %+v", p)
	pgtest.Exec(t, pool, `update agent_skills set enabled = true, disabled_by = '' where name = 'broken'`)
	if a, p := get(t, pool, "a"), get(t, pool, "p"); !a.Enabled || !p.Enabled {
		t.Errorf("they do not resume: %+v, %+v", a, p)
	}
}

// Automations are declared while their skill is switched on and off. In the end each one follows the skill.
func TestAnAutomationIsNotMissedThatIsMadeWhileItsSkillIsDisabled(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_skills (name, tool_definition, handler) values ('s', '{}', 'builtin:x')`)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range 15 {
				d := automations.Definition{Name: strings.Repeat("a", i*20+n+1), Cron: "@daily", Skill: "s"}
				_, err := automations.Put(t.Context(), pool, d)
				assert.NoError(t, err)
			}
		})
	}
	for i := range 41 {
		pgtest.Exec(t, pool, `update agent_skills set enabled = `+[]string{
			"false, disabled_by = 'admin'",
			"true, disabled_by = ''",
		}[i%2]+` where name = 's'`)
	}
	wg.Wait()
	list, err := automations.List(t.Context(), pool, automations.Filter{Limit: 1000})
	require.Truef(t, err == nil && len(list) == 60, "%d automations, %v", len(list), err)
	for _, a := range list {
		assert.Truef(t, !a.Enabled, "%s is in service", a.Name)
	}
}

// execution creates an execution and brings it to a status.
func execution(t *testing.T, pool *pgxpool.Pool, status string) (id string) {
	t.Helper()
	id = pgtest.Value[string](t, pool, `
		insert into agent_executions (trace_id, surface, flow, status) values ($1, 'heartbeat', 'heartbeat', 'running')
		  returning id::text`, traceID)
	if status != "running" {
		pgtest.Exec(t, pool, `update agent_executions set status = '`+status+`' where id = '`+id+`'`)
	}
	return id
}

func abandoned(t *testing.T, pool *pgxpool.Pool) []automations.Run {
	t.Helper()
	runs, err := automations.Abandoned(t.Context(), pool)
	require.NoError(t, err)
	return runs
}

func TestARunIsAbandonedWhenItsExecutionHasEnded(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	of := map[string]string{} // by run
	for name, executionID := range map[string]string{
		"running": execution(t, pool, "running"), "waiting": execution(t, pool, "waiting"),
		"cancelled": execution(t, pool, "cancelled"), "failed": execution(t, pool, "failed"),
		"timeout":   execution(t, pool, "timeout"),
		"completed": execution(t, pool, "completed"), "gone": "00000000-0000-0000-0000-000000000001",
		"none": "", "none, old": "",
	} {
		a := putDue(t, pool, automations.Definition{Name: name}, "1 hour")
		run, ok, err := automations.Claim(t.Context(), pool, a.ID, *a.NextRunAt, executionID, traceID)
		require.True(t, ok && err == nil, ok, err)
		of[run.ID] = name
		if name == "none, old" {
			pgtest.Exec(t, pool, `update agent_automation_runs set claimed_at = claimed_at - interval '25 hours' where id = '`+
				run.ID+`'`)
		}
	}
	ended := finish(t, pool, claim(t, pool, putDue(t, pool, automations.Definition{Name: "ended"}, "1 hour")),
		automations.Result{})
	pgtest.Exec(t, pool, `update agent_automation_runs set execution_id = '`+execution(t, pool, "failed")+
		`' where id = '`+ended.ID+`'`)
	var got []string
	for _, r := range abandoned(t, pool) {
		got = append(got, of[r.ID])
	}
	slices.Sort(got)
	assert.Equal(t, "cancelled/completed/failed/gone/none, old/timeout", strings.Join(got, "/"))
}

// The age of a run without execution counts from its last attempt, not from its first.
func TestARetryIsNotAbandonedBecauseTheRunIsOld(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	run := claim(t, pool, putDue(t, pool, automations.Definition{Name: "a"}, "1 hour"))
	pgtest.Exec(t, pool, `update agent_automation_runs set created_at = created_at - interval '3 days',
		claimed_at = claimed_at - interval '3 days'`)
	require.Equal(t, 1, len(abandoned(t, pool)))
	run = finish(t, pool, run, automations.Result{Error: "abandoned"})
	pgtest.Exec(t, pool, `update agent_automation_runs set retry_at = clock_timestamp()`)
	retry(t, pool, run)
	runs := abandoned(t, pool)
	assert.Truef(t, len(runs) == 0, "the second is too: %+v", runs)
}

func TestAnAbandonedRunIsEndedOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := putDue(t, pool, automations.Definition{Name: "a"}, "1 hour")
	_, ok, err := automations.Claim(t.Context(), pool, a.ID, *a.NextRunAt, execution(t, pool, "cancelled"), traceID)
	require.True(t, ok && err == nil, ok, err)
	var ended atomic.Int64
	var group errgroup.Group
	for range 8 {
		group.Go(func() error {
			runs, err := automations.Abandoned(t.Context(), pool)
			for _, r := range runs {
				_, ok, err := automations.Finish(t.Context(), pool, r.ID, r.Attempt,
					automations.Result{Error: "its execution ended"})
				if err != nil {
					return err
				}
				if ok {
					ended.Add(1)
				}
			}
			return err
		})
	}
	require.NoError(t, group.Wait())
	runs, err := automations.Runs(t.Context(), pool, automations.RunFilter{})
	assert.Truef(t, err == nil && len(runs) == 1 && ended.Load() == 1 && runs[0].Status == automations.Error &&
		runs[0].Attempt == 1, "ended %d times: %+v, %v", ended.Load(), runs, err)
}

// A heartbeat runs several automations, and several runs of one, under a trace of its own. A run is dead after its own
// call that took effect, or may have.
func TestRunThatActedIsNotRepeated(t *testing.T) {
	t.Parallel()
	for call, want := range map[string]string{
		"'automation a', 'call', 'unknown', '', 'post'":          automations.Dead,
		"'automation a', 'call', 'success', '', 'post'":          automations.Dead,
		"'automation a', 'call', 'success', '', 'flow'":          automations.Dead,
		"'automation a', 'call', 'success', '', 'insert'":        automations.Dead,
		"'automation a', 'call', 'error', 'no_answer', 'post'":   automations.Dead,
		"'automation a', 'call', 'error', 'network', 'post'":     automations.Error,
		"'automation a', 'call', 'error', 'flow_failed', 'flow'": automations.Dead,
		"'automation a', 'call', 'error', 'handler', 'flow'":     automations.Error, // there is no such flow
		"'automation a', 'call', 'error', 'timeout', 'insert'":   automations.Error, // rolled back
		"'automation a', 'call', 'error', 'timeout', 'search'":   automations.Error,
		"'automation a', 'call', 'success', '', 'search'":        automations.Error,
		"'automation a', 'call', 'unknown', '', 'search'":        automations.Error,
		"'automation a', 'call', 'unknown', '', 'nothing'":       automations.Error, // a tool of the runtime
		"'automation b', 'call', 'unknown', '', 'post'":          automations.Error,
		"'automation a', 'model', 'unknown', '', 'post'":         automations.Error,
	} {
		pool := pgtest.DB(t)
		pgtest.Exec(t, pool, `
			insert into agent_skills (name, tool_definition, handler, config, idempotent)
			values ('post', '{}', 'builtin:x', '{}', false), ('search', '{}', 'builtin:x', '{}', true),
			       ('flow', '{}', 'flow:x', '{}', true), ('insert', '{}', 'sql:', '{"writes": true}', true)`)
		run := claim(t, pool, putDue(t, pool, automations.Definition{Name: "a"}, "1 hour"))
		pgtest.Exec(t, pool, `update agent_automation_runs set execution_id = $1`, execution(t, pool, "running"))
		pgtest.Exec(t, pool, `
			insert into agent_activity (execution_id, trace_id, purpose, kind, status, error_class, skill_name, skill_id)
			select r.execution_id, 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', c.purpose, c.kind, c.status, c.class, c.skill, s.id
			  from agent_automation_runs r cross join (values (`+call+`)) c (purpose, kind, status, class, skill)
			  left join agent_skills s on s.name = c.skill`)
		if want == automations.Dead { // an earlier run of the same heartbeat made the call
			pgtest.Exec(t, pool, `update agent_automation_runs set claimed_at = clock_timestamp()`)
			assert.Equal(t, automations.Error, finish(t, pool, run, automations.Result{Error: "cancelled"}).Status, call)
			pgtest.Exec(t, pool, `
				update agent_automation_runs set status = 'claimed', claimed_at = claimed_at - interval '1 minute'`)
		}
		run = finish(t, pool, run, automations.Result{Error: "cancelled", Released: true})
		assert.Equal(t, want, run.Status, call)
		assert.Equal(t, want == automations.Dead, strings.Contains(*run.ErrorMessage, "may have acted"), call)
	}
}

// An automation and its skill change at the same time. The automation is in service exactly if its skill is.
func TestAnAutomationFollowsItsSkillThroughEveryRace(t *testing.T) {
	t.Parallel()
	const disable = `update agent_skills set enabled = false, disabled_by = 'self-heal', disabled_reason = 'it fails'
		where name = 'sizes'`
	for name, race := range map[string]struct{ before, first, second string }{
		"enabled while its skill is disabled": {
			`update agent_automations set enabled = false, disabled_by = 'admin' where name = 'a'`,
			`update agent_automations set enabled = true, disabled_by = '' where name = 'a'`, disable,
		},
		"given the skill while that is disabled": {
			`update agent_automations set skill_name = 'other' where name = 'a'`,
			`update agent_automations set skill_name = 'sizes' where name = 'a'`, disable,
		},
		"paused while its skill is enabled": {
			`update agent_automations set enabled = false, disabled_by = 'admin' where name = 'a';` + disable,
			`update agent_automations set enabled = true, disabled_by = '' where name = 'a'`,
			`update agent_skills set enabled = true, disabled_by = '' where name = 'sizes'`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			pool := pgtest.DB(t)
			pgtest.Exec(t, pool, `
				insert into agent_skills (name, tool_definition, handler) values ('sizes', '{}', 'builtin:x'),
				  ('other', '{}', 'builtin:x')`)
			put(t, pool, automations.Definition{Name: "a"})
			pgtest.Exec(t, pool, race.before)
			tx, err := pool.Begin(t.Context())
			require.NoError(t, err)
			pgtest.Exec(t, tx, race.first)
			done := make(chan error, 1)
			go func() {
				_, err := pool.Exec(t.Context(), race.second)
				done <- err
			}()
			ended := false
			pgtest.EventuallyWithin(t, 20*time.Second, func() bool {
				select {
				case err := <-done:
					ended = true
					assert.NoError(t, err)
				default:
				}
				return ended || pgtest.Value[bool](t, pool, `
					select exists (select from pg_stat_activity where datname = current_database()
					  and wait_event_type = 'Lock')`)
			}, "the second waits for the first, or has passed it")
			require.NoError(t, tx.Commit(t.Context()))
			if !ended {
				require.NoError(t, <-done)
			}
			skill := pgtest.Value[bool](t, pool, `select enabled from agent_skills where name = 'sizes'`)
			if a := get(t, pool, "a"); a.Enabled != skill {
				t.Errorf("its skill is enabled: %t, the automation: %t, paused for %q", skill, a.Enabled, a.PausedFor)
			}
		})
	}
}

func TestFailingSignalsDoNotStopTheOthers(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, name := range []string{"invalid", "refused", "good"} {
		put(t, pool, automations.Definition{Name: name, Signal: "memories == 0"})
	}
	pgtest.Exec(t, pool, `update agent_automations set signal = 'nope' where name = 'invalid'`)
	pgtest.Exec(t, pool, `alter table agent_automation_runs add constraint refuse
		check (automation_id <> '`+get(t, pool, "refused").ID+`')`)
	fired, err := automations.Watch(t.Context(), pool)
	assert.Equal(t, 1, fired)
	assert.ErrorContains(t, err, `automation "invalid"`)
	assert.ErrorContains(t, err, `automation "refused"`)
}

func TestAManualRunThatCannotBeRecordedIsNotInserted(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	put(t, pool, automations.Definition{Name: "a"})
	pgtest.Exec(t, pool, `alter table agent_links add constraint refuse check (kind <> 'asked')`)
	_, err := automations.RunManually(activity.WithActor(t.Context(), activity.Actor{Name: "ana"}), pool, "a", traceID)
	assert.ErrorContains(t, err, "record who asked")
	runs, err := automations.Runs(t.Context(), pool, automations.RunFilter{})
	assert.Truef(t, err == nil && len(runs) == 0, "got %+v, %v", runs, err)
}
