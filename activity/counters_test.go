package activity_test

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// countNow shortens the lag of counting, so a test need not wait. The trigger still lists every row older than half of
// the lag.
func countNow(t *testing.T, db postgres.DB) {
	t.Helper()
	pgtest.Exec(t, db, `
		do $do$ begin
		  execute replace(pg_get_functiondef('lanekeeper.agent_activity_written()'::regprocedure), '5 seconds', '30 milliseconds');
		end $do$;
		create or replace trigger agent_activity_written after insert on agent_activity for each row
		  when (new.claim is not null or new.id < lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '30 milliseconds'))
		  execute function lanekeeper.agent_activity_written()`)
}

// pass counts at most that many rows, with the lag for a hurry.
func pass(ctx context.Context, db postgres.Beginner, most int) error {
	_, _, err := activity.CountPass(ctx, db, most, 60*time.Millisecond)
	return err
}

// counted waits until no ended row is left to count.
func counted(t *testing.T, db postgres.Beginner, most int) {
	t.Helper()
	last := pgtest.Value[string](t, db, `select lanekeeper.agent_uuid7()::text`)
	pgtest.Exec(t, db, `insert into agent_activity (id, trace_id, kind, skill_name) values ($1, 'hb_x', 'note', 'last')`,
		last)
	pgtest.Eventually(t, func() bool {
		require.NoError(t, pass(t.Context(), db, most))
		var done bool
		err := db.QueryRow(t.Context(), `
			select c.counted_upto > $1::text::uuid and not exists (
			       select from agent_activity_uncounted u join agent_activity a on a.id = u.activity_id
			         where a.status <> 'running')
			  from agent_activity_counted c`, last).Scan(&done)
		require.NoError(t, err)
		return done
	}, "everything is counted")
}

// difference compares the counts with the views, in one snapshot.
func difference(ctx context.Context, db *pgxpool.Pool) (string, error) {
	var text string
	err := pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly},
		func(tx pgx.Tx) error {
			for _, by := range []activity.Dimension{activity.BySkill, activity.ByPurpose} {
				different, err := spendDifference(ctx, tx, by)
				if err != nil {
					return err
				}
				text += different
			}
			health, err := activity.CountedHealth(ctx, tx, activity.HealthFilter{})
			if err != nil {
				return err
			}
			rows, err := tx.Query(ctx, `
			select h.skill, h.calls, h.calls - round(h.calls * coalesce(h.success_rate, 0))::bigint as failed, h.streak,
			       false as streak_more, h.state, h.disabled_by, h.disabled_reason,
			       h.disabled_at from agent_skill_health h order by h.skill`)
			if err != nil {
				return err
			}
			fared, err := pgx.CollectRows(rows, pgx.RowToStructByName[activity.Health])
			if err != nil {
				return err
			}
			sameDay := cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) })
			approximate := cmpopts.IgnoreFields(activity.Health{}, "P50MS", "P95MS", "SuccessRate", "Streak")
			text += cmp.Diff(fared, health.Lines, approximate, sameDay, cmpopts.EquateEmpty())
			return nil
		})
	return text, err
}

// spendDifference compares the counts and the view of spend with the rows of the log.
func spendDifference(ctx context.Context, tx pgx.Tx, by activity.Dimension) (string, error) {
	rows, err := tx.Query(ctx, `
		select coalesce(nullif(a.purpose, ''), a.skill_name) as purpose,
		       (a.created_at at time zone 'UTC')::date::timestamp at time zone 'UTC' as day, a.led_to,
		       array[lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens'),
		       lanekeeper.agent_tokens(a.token_usage, 'completion_tokens'),
		       lanekeeper.agent_tokens(a.token_usage, 'total_tokens'), (a.cost_usd * 1000000)::bigint,
		       lanekeeper.agent_tokens(a.token_usage, 'unknown_tokens'),
		       (coalesce((a.token_usage ->> 'unknown_usd')::numeric, 0) * 1000000)::bigint] as used
		  from agent_activity a where a.kind = 'model'`)
	if err != nil {
		return "", err
	}
	type modelCall struct {
		Purpose string
		Day     time.Time
		LedTo   map[string]int
		// prompt tokens, completion tokens, total tokens, millionths of a dollar, and the unknown part of the last two
		Used []int64
	}
	calls, err := pgx.CollectRows(rows, pgx.RowToStructByName[modelCall])
	if err != nil {
		return "", err
	}
	type key struct {
		name string
		day  time.Time
	}
	sums := map[key]*activity.SpendLine{}
	for _, c := range calls {
		shares := []charge{{c.Purpose, 1, c.Used}}
		if by == activity.BySkill {
			shares = charges(c.LedTo, c.Used)
		}
		for _, s := range shares {
			k := key{s.skill, c.Day.UTC()}
			if sums[k] == nil {
				sums[k] = &activity.SpendLine{Key: s.skill, Period: &k.day}
			}
			l := sums[k]
			l.Calls, l.PromptTokens, l.CompletionTokens = l.Calls+s.calls, l.PromptTokens+s.used[0], l.CompletionTokens+s.used[1]
			l.Tokens, l.CostUSD = l.Tokens+s.used[2], l.CostUSD+float64(s.used[3])/1e6
			l.UnknownTokens, l.UnknownUSD = l.UnknownTokens+s.used[4], l.UnknownUSD+float64(s.used[5])/1e6
		}
	}
	want := []activity.SpendLine{}
	for _, l := range sums {
		want = append(want, *l)
	}
	counts, err := activity.CountedSpend(ctx, tx, activity.SpendFilter{By: by, Period: activity.ByDay})
	if err != nil {
		return "", err
	}
	view := map[activity.Dimension]string{
		activity.BySkill:   "agent_spend",
		activity.ByPurpose: "agent_spend_by_purpose",
	}[by]
	rows, err = tx.Query(ctx, `
		select v.`+string(by)+` as key, v.day::timestamp at time zone 'UTC' as period, sum(v.calls)::bigint as calls,
		       sum(v.prompt_tokens)::bigint as prompt_tokens, sum(v.completion_tokens)::bigint as completion_tokens,
		       sum(v.tokens)::bigint as tokens, sum(v.cost_usd)::float8 as cost_usd,
		       sum(v.unknown_tokens)::bigint as unknown_tokens, sum(v.unknown_usd)::float8 as unknown_usd,
		       0::bigint as cached_tokens, 0::bigint as errors -- the views have none
		  from `+view+` v group by 1, 2`)
	if err != nil {
		return "", err
	}
	viewed, err := pgx.CollectRows(rows, pgx.RowToStructByName[activity.SpendLine])
	if err != nil {
		return "", err
	}
	same := cmp.Options{
		cmpopts.IgnoreFields(activity.SpendLine{}, "CachedTokens", "Errors"),
		cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) }), cmpopts.EquateEmpty(), cmpopts.EquateApprox(0, 1e-9),
		cmpopts.SortSlices(func(a, b activity.SpendLine) bool { return a.Key+a.Period.String() < b.Key+b.Period.String() }),
	}
	for i := range viewed {
		viewed[i].Period = new(viewed[i].Period.UTC())
	}
	return cmp.Diff(want, counts.Lines, same) + cmp.Diff(want, viewed, same), nil
}

// charge is the target of a model call's charge.
type charge struct {
	skill string
	calls int64
	used  []int64
}

// charges splits the usage of a model call among the skills that it called. By the rule, the sum up to each skill, in
// the order of names, is the whole part of the usage due to the calls so far (money in millionths).
func charges(ledTo map[string]int, used []int64) []charge {
	var total, upto int64
	most := ""
	for _, skill := range slices.Sorted(maps.Keys(ledTo)) {
		total += int64(ledTo[skill])
		if most == "" || ledTo[skill] > ledTo[most] {
			most = skill
		}
	}
	if total == 0 {
		return []charge{{"", 1, used}}
	}
	var list []charge
	for _, skill := range slices.Sorted(maps.Keys(ledTo)) {
		before := upto
		upto += int64(ledTo[skill])
		c := charge{skill: skill, used: make([]int64, len(used))}
		if skill == most {
			c.calls = 1
		}
		for i, n := range used {
			c.used[i] = n*upto/total - n*before/total
			if i == 3 || i == 5 {
				c.used[i] = (2*n*upto+total)/(2*total) - (2*n*before+total)/(2*total)
			}
		}
		list = append(list, c)
	}
	return list
}

// randomWrites writes rows in every possible way, in one transaction.
func randomWrites(ctx context.Context, db *pgxpool.Pool, r *rand.Rand) error {
	tx, err := db.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	for range 1 + r.IntN(4) {
		id := "lanekeeper.agent_uuid7()"
		if r.IntN(3) == 0 {
			id = fmt.Sprintf("lanekeeper.agent_uuid7(clock_timestamp() - interval '%d milliseconds')",
				[]int{10, 50, 100, 5000, 86_400_000}[r.IntN(5)])
		}
		status := []string{"success", "error", "running", "skipped", "pending_approval", "unknown"}[r.IntN(6)]
		_, err := tx.Exec(ctx, `
			insert into agent_activity (id, trace_id, kind, skill_name, purpose, surface, status, error_class, token_usage,
			  cost_usd, duration_ms, led_to)
			values (`+id+`, 'hb_x', $1, $2, $3, $4, $5, $6, '{"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}'::jsonb || $9, 0.01, $7, $8)`,
			[]string{"model", "call", "call", "phase"}[r.IntN(4)], fmt.Sprintf("skill_%d", r.IntN(3)),
			[]string{"", "plan"}[r.IntN(2)],
			[]string{"heartbeat", "chat"}[r.IntN(2)], status, []string{"", "timeout", "denied"}[r.IntN(3)], r.IntN(5000),
			[]string{
				`{}`, `{"skill_0": 25}`, `{"skill_0": 2, "skill_1": 1}`,
				`{"skill_2": 1, "skill_1": 1, "gone": 5}`,
			}[r.IntN(4)],
			[]string{`{}`, `{"unknown_tokens": 5, "unknown_usd": 0.007}`}[r.IntN(2)])
		if err != nil {
			return err
		}
		testkit.Wait(ctx, time.Duration(r.IntN(30))*time.Millisecond)
	}
	if r.IntN(2) == 0 {
		_, err = tx.Exec(ctx, `
			update agent_activity a set status = 'success', cost_usd = 0.5
			 where a.id in (select x.id from agent_activity x where x.status = 'running' limit 2 for update skip locked)`)
		if err != nil {
			return err
		}
	}
	testkit.Wait(ctx, time.Duration(r.IntN(150))*time.Millisecond)
	if r.IntN(4) == 0 {
		return nil // rolled back
	}
	return tx.Commit(ctx)
}

func TestRowsAreCountedOnceDespiteLateCommits(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	countNow(t, db)
	pgtest.Exec(t, db, `
		insert into agent_skills (name, tool_definition, handler)
		select 'skill_' || n, '{}', 'builtin:x' from generate_series(0, 3) n`)
	writing, stop := context.WithCancel(t.Context())
	defer stop()
	var writers, counters errgroup.Group
	for w := range 5 {
		writers.Go(func() error {
			r := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), uint64(w)))
			for range 25 {
				if err := randomWrites(t.Context(), db, r); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for range 2 {
		counters.Go(func() error {
			for writing.Err() == nil {
				if err := pass(t.Context(), db, 7); err != nil {
					return err
				}
				testkit.Wait(writing, 3*time.Millisecond)
			}
			return nil
		})
	}
	counters.Go(func() error {
		for writing.Err() == nil {
			diff, err := difference(t.Context(), db)
			if err != nil || diff != "" {
				return fmt.Errorf("at some moment: %s %w", diff, err)
			}
			testkit.Wait(writing, 10*time.Millisecond)
		}
		return nil
	})
	err := writers.Wait()
	stop()
	assert.NoError(t, counters.Wait())
	require.NoError(t, err)
	counted(t, db, 7)
	diff, err := difference(t.Context(), db)
	require.Truef(t, err == nil && diff == "", "in the end: %v %s", err, diff)
	var inTable, inLog int
	require.NoError(t, db.QueryRow(t.Context(), `
		select (select sum(calls)::int from agent_activity_counts
		         where span = 'hour' and kind not in ('charge', 'agent', 'key')),
		       (select count(*)::int from agent_activity where status <> 'running')`).Scan(&inTable, &inLog))
	require.True(t, inLog > 0, "no row has ended")
	require.Equal(t, inLog, inTable, "counted rows")
	pgtest.Exec(t, db, `delete from agent_activity`)
	counted(t, db, 7)
	var kept int
	if err := db.QueryRow(t.Context(), `select sum(calls)::int from agent_activity_counts where span = 'day'
		and kind not in ('charge', 'agent', 'key')`).Scan(&kept); err != nil || kept != inTable+1 {
		t.Errorf("after the log was deleted the counts say %d (%v), want %d", kept, err, inTable+1)
	}
}

func TestCountedSpendByDimension(t *testing.T) {
	t.Parallel()
	pgtest.AvoidMidnight(t)
	db := pgtest.DB(t)
	countNow(t, db)
	day := 24 * time.Hour
	put(t, db, act{
		kind: "model", skill: "model", purpose: "plan", surface: "chat", model: "m1", tokens: 100, cost: "0.10",
		ago: 2 * day, ledTo: map[string]int{"fetch": 25},
	})
	put(t, db, act{kind: "model", skill: "model", purpose: "plan", model: "m2", tokens: 50, cost: "0.05", ago: 2 * day})
	counted(t, db, 20)
	put(t, db, act{kind: "model", skill: "reflect", model: "m1", tokens: 5, cost: "0.01"})
	put(t, db, act{kind: "model", skill: "ancient", tokens: 1000, ago: 20 * day})
	lines := func(f activity.SpendFilter) []string {
		sums, err := activity.CountedSpend(t.Context(), db, f)
		require.NoError(t, err)
		list := []string{}
		for _, l := range sums.Lines {
			period := ""
			if l.Period != nil {
				period = " " + time.Since(*l.Period).Truncate(day).String()
			}
			list = append(list, l.Key+period+" "+strings.Repeat("i", int(l.Calls)))
		}
		return list
	}
	since := time.Now().Add(-5 * day)
	for name, c := range map[string]struct {
		filter activity.SpendFilter
		want   []string
	}{
		"skills":    {activity.SpendFilter{Since: since, By: activity.BySkill}, []string{"fetch i", " ii"}},
		"one skill": {activity.SpendFilter{Since: since, Skill: "fetch"}, []string{" i"}},
		"purposes":  {activity.SpendFilter{Since: since, By: activity.ByPurpose}, []string{"plan ii", "reflect i"}},
		"a purpose": {
			activity.SpendFilter{Since: since, By: activity.BySurface, Purpose: "plan"},
			[]string{"chat i", "heartbeat i"},
		},
		"ever":     {activity.SpendFilter{By: activity.ByPurpose}, []string{"plan ii", "reflect i", "ancient i"}},
		"surfaces": {activity.SpendFilter{Since: since, By: activity.BySurface}, []string{"chat i", "heartbeat ii"}},
		"models":   {activity.SpendFilter{Since: since, By: activity.ByModel}, []string{"m1 ii", "m2 i"}},
		"one model": {
			activity.SpendFilter{Since: since, By: activity.ByPurpose, Model: "m1"},
			[]string{"plan i", "reflect i"},
		},
		"together": {activity.SpendFilter{Since: since}, []string{" iii"}},
		"days":     {activity.SpendFilter{Since: since, Period: activity.ByDay}, []string{" 0s i", " 48h0m0s ii"}},
		"hours":    {activity.SpendFilter{Since: since, Period: activity.ByHour}, []string{" 0s i", " 48h0m0s ii"}},
		"one hour": {
			activity.SpendFilter{Since: time.Now().Add(-time.Hour), By: activity.ByPurpose},
			[]string{"reflect i"},
		},
		"no surface": {activity.SpendFilter{Since: since, Surface: "webhook"}, []string{}},
	} {
		assert.Equal(t, "", cmp.Diff(c.want, lines(c.filter)), name)
	}
	for _, bad := range []activity.SpendFilter{
		{Period: "week"},
		{By: "lane"},
		{By: activity.ByPurpose, Skill: "fetch"},
		{By: activity.BySkill, Purpose: "plan"},
	} {
		_, err := activity.CountedSpend(t.Context(), db, bad)
		assert.Error(t, err, bad, "is taken")
	}
}

func TestHealthEqualsView(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	countNow(t, db)
	pgtest.Exec(t, db, `
		insert into agent_skills (name, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at,
		  trial_at, enabled_at)
		values ('idle', '{}', 'builtin:x', true, '', '', null, null, 'epoch'),
		  ('flaky', '{}', 'builtin:x', true, '', '', null, null, 'epoch'),
		       ('broken', '{}', 'builtin:x', false, 'self-heal', '3 failed', clock_timestamp(), null, 'epoch'),
		       ('tried', '{}', 'builtin:x', false, 'self-heal', '3 failed', clock_timestamp(), clock_timestamp(), 'epoch'),
		       ('fresh', '{}', 'builtin:x', true, '', '', null, null, clock_timestamp() - interval '3 hours')`)
	for i := range 60 {
		ago := time.Duration(60-i) * 2 * time.Hour
		put(t, db, act{
			skill: "flaky", ms: i * i, ago: ago,
			status: map[bool]string{true: "error", false: "success"}[i%7 == 0 || i > 55],
		})
		put(t, db, act{skill: "broken", ms: 3, ago: ago, status: "error"})
		put(t, db, act{skill: "fresh", ms: 3, ago: ago, status: "error"})
		put(t, db, act{skill: "flaky", ms: 9999, ago: ago, status: "error", class: "invalid_params"})
		if i == 40 {
			counted(t, db, 20)
		}
	}
	rows, err := db.Query(t.Context(), `
		select h.skill, h.calls, h.calls - round(h.calls * coalesce(h.success_rate, 0))::bigint as failed, h.streak,
		       false as streak_more, h.state, h.disabled_by, h.disabled_reason,
		       h.disabled_at from agent_skill_health h order by h.skill`)
	require.NoError(t, err)
	want, err := pgx.CollectRows(rows, pgx.RowToStructByName[activity.Health])
	require.NoError(t, err)
	got, err := activity.CountedHealth(t.Context(), db, activity.HealthFilter{})
	require.NoError(t, err)
	sameTime := cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) })
	assert.NoDiff(t, want, got.Lines, sameTime, cmpopts.IgnoreFields(activity.Health{}, "P50MS", "P95MS", "SuccessRate"))
	assert.Truef(t, got.Until == nil, "the figures end at %s", got.Until)
	for _, h := range got.Lines {
		var p50, p95 *float64
		require.NoError(t, db.QueryRow(t.Context(), `select p50_ms, p95_ms from agent_skill_health where skill = $1`,
			h.Skill).Scan(&p50, &p95))
		for name, p := range map[string][2]*float64{"p50": {p50, h.P50MS}, "p95": {p95, h.P95MS}} {
			assert.Truef(t, (p[0] == nil) == (p[1] == nil) && (p[0] == nil || math.Abs(*p[0]-*p[1]) <= 0.026**p[0]),
				"%s of %s is off: %v", name, h.Skill, p)
		}
	}
	one, err := activity.CountedHealth(t.Context(), db, activity.HealthFilter{State: "disabled", After: "a", Limit: 1})
	assert.Truef(t, err == nil && len(one.Lines) == 1 && one.Lines[0].Skill == "broken" && *one.Lines[0].SuccessRate == 0,
		"the disabled ones are %v (%v)", one.Lines, err)
	calls, err := activity.CountedCalls(t.Context(), db, "flaky", time.Now().AddDate(0, 0, -7), activity.Total)
	require.NoError(t, err)
	assert.NoDiff(t, []activity.CallLine{{Calls: 120, Worked: 60, Failed: 12}}, calls.Lines)
}

func TestFiguresHaveEndOfCompleteRange(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		insert into agent_activity (id, trace_id, kind, skill_name, created_at)
		select lanekeeper.agent_uuid7(at), 'hb_x', 'model', 'm', at
		  from (select clock_timestamp() - interval '1 second' * (25001 - n) / 10 as at from generate_series(1, 25000) n) x`)
	sums, err := activity.CountedSpend(t.Context(), db, activity.SpendFilter{})
	require.NoError(t, err)
	require.Truef(t, sums.Until != nil && sums.Lines[0].Calls >= 19_000 && sums.Lines[0].Calls <= 20_000,
		"of 25000 rows that are not counted: %+v", sums)
	var before int64
	err = db.QueryRow(t.Context(), `select count(*) from agent_activity
		where id < lanekeeper.agent_uuid7_floor(@until::timestamptz + interval '1 ms')`,
		postgres.Strict{"until": *sums.Until}).Scan(&before)
	assert.Truef(t, err == nil && before >= sums.Lines[0].Calls && before <= sums.Lines[0].Calls+2,
		"until %s there are %d rows, not %d (%v)", sums.Until, before, sums.Lines[0].Calls, err)
}

func TestInvalidRowDoesNotStopCount(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	countNow(t, db)
	name := strings.Repeat("ñ", 100_000)
	pgtest.Exec(t, db, `
		insert into agent_activity (trace_id, kind, skill_name, surface, token_usage, duration_ms, cost_usd)
		values ('hb_x', 'model', $1, $1, '{"total_tokens": "many", "prompt_tokens": 1e300, "completion_tokens": [1]}', null,
		  1),
		       ('hb_x', 'call', $1, $1, '[]', -9223372036854775808, 0),
		         ('hb_x', 'call', 'long', '', '{}', 9223372036854775807, 0)`, name)
	counted(t, db, 20)
	sums, err := activity.CountedSpend(t.Context(), db, activity.SpendFilter{Purpose: name, By: activity.ByPurpose})
	assert.Truef(t, err == nil && len(sums.Lines) == 1 && sums.Lines[0].CostUSD == 1 && len(sums.Lines[0].Key) <= 300,
		"got %+v (%v)", sums.Lines, err)
}

// The durations have rows for all skills together and for models, beside those of skills.
func TestOddSkillNamesDoNotStopCount(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	countNow(t, db)
	pgtest.Exec(t, db, `
		insert into agent_activity (trace_id, kind, skill_name, model, duration_ms)
		values ('hb_x', 'call', '', '', 7), ('hb_x', 'call', 'fetch', '', 7),
		       ('hb_x', 'call', 'model m', '', 7), ('hb_x', 'model', 'ask', 'm', 7)`)
	counted(t, db, 20)
	durations := pgtest.Value[string](t, db, `
		select string_agg(skill || '=' || calls, ', ' order by skill collate "C") from agent_activity_durations`)
	assert.Equal(t, "=3, fetch=1, model m=2", durations, "durations")
}

// seqScans returns the number of sequential scans of tables by the connection.
func seqScans(t *testing.T, tx pgx.Tx, tables []string) int64 {
	t.Helper()
	return pgtest.Value[int64](t, tx, `
		select coalesce(sum(s.seq_scan), 0) from pg_stat_xact_user_tables s where s.relname = any ($1)`, tables)
}

func TestCountedFiguresScanNoTable(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	fill(t, db)
	countNow(t, db)
	pgtest.Exec(t, db, `
		insert into agent_skills (name, tool_definition, handler) select 'skill_' || n, '{}', 'builtin:x'
		  from generate_series(0, 96) n`)
	counted(t, db, 20_000)
	// All days are in the last seven, so a scan of whole tables looks cheap; and there are many rows.
	pgtest.Exec(t, db, `
		delete from agent_activity_durations where day < current_date - 6;
		delete from agent_activity_counts where start < current_date - 6;
		insert into agent_activity_counts (span, start, kind, skill, surface, model)
		select 'day', date_trunc('day', clock_timestamp() at time zone 'UTC') at time zone 'UTC' - make_interval(days => d),
		       kind, 'skill_' || n, s::text, ''
		  from generate_series(0, 5) d, (values ('call'), ('model')) k (kind), generate_series(0, 96) n,
		    generate_series(0, 9) s
		    on conflict do nothing;
		insert into agent_activity_durations (day, skill, bucket, calls)
		select current_date - d, 'skill_' || n, b, 1 from generate_series(0, 6) d, generate_series(0, 96) n,
		       generate_series(0, 60) b on conflict do nothing;
		analyze agent_activity_counts; analyze agent_activity_durations; analyze agent_activity`)
	tables := append(largePartitions(t, db), "agent_activity_counts", "agent_activity_durations")
	day := time.Now().Add(-24 * time.Hour)
	for name, query := range map[string]func(postgres.Beginner) error{
		"count": func(db postgres.Beginner) error {
			_, err := activity.Count(t.Context(), db)
			return err
		},
		"spend": func(db postgres.Beginner) error {
			_, err := activity.CountedSpend(t.Context(), db, activity.SpendFilter{
				Since: day.AddDate(0, 0, -29),
				By:    activity.BySkill,
			})
			return err
		},
		"slowest": func(db postgres.Beginner) error {
			_, _, err := activity.Slowest(t.Context(), db, activity.ReportFilter{})
			return err
		},
		"failing": func(db postgres.Beginner) error {
			_, _, err := activity.Failing(t.Context(), db, activity.ReportFilter{})
			return err
		},
		"health": func(db postgres.Beginner) error {
			_, err := activity.CountedHealth(t.Context(), db, activity.HealthFilter{})
			return err
		},
		"calls": func(db postgres.Beginner) error {
			_, err := activity.CountedCalls(t.Context(), db, "skill_3", day, activity.ByDay)
			return err
		},
		"the view of health": func(db postgres.Beginner) error {
			_, err := db.Exec(t.Context(), `select from agent_skill_health`)
			return err
		},
		"health of many calls": func(db postgres.Beginner) error {
			_, err := db.Exec(t.Context(), `select
				from lanekeeper.read_agent_skill_figures(clock_timestamp() - interval '7 days', 0)`)
			return err
		},
	} {
		err := pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
			before := seqScans(t, tx, tables)
			if err := query(tx); err != nil {
				return err
			}
			n := seqScans(t, tx, tables)
			assert.Truef(t, n <= before, "%s reads %d tables whole", name, n-before)
			return nil
		})
		require.NoError(t, err)
	}
}

func TestStreakReadsBoundedRows(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		insert into agent_skills (name, tool_definition, handler) values ('broken', '{}', 'builtin:x');
		insert into agent_activity (trace_id, skill_name, status) select 'hb_x', 'broken', 'error'
		  from generate_series(1, 501)`)
	for _, want := range []struct {
		streak int64
		more   bool
	}{{500, true}, {0, false}} {
		got, err := activity.CountedHealth(t.Context(), db, activity.HealthFilter{Skill: "broken"})
		assert.Truef(t, err == nil && got.Lines[0].Streak == want.streak && got.Lines[0].StreakMore == want.more,
			"got %+v (%v), want %+v", got.Lines, err, want)
		put(t, db, act{skill: "broken"})
	}
}

// healthByRows is the view in its old form, without counts: it reads every call of seven days.
const healthByRows = `
	with calls as (
	  select c.*, max(c.created_at) filter (where c.status = 'success') over (partition by c.skill_name) as last_ok
	    from agent_skill_calls c
	   where c.id >= (select lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '7 days'))
	     and c.created_at >= clock_timestamp() - interval '7 days')
	select s.name as skill, count(c.id) as calls,
	       case when count(c.id) > 0 then round(avg((c.status = 'success')::int), 3) end::text as success_rate,
	       count(c.id) filter (where c.status = 'error' and c.created_at > greatest(c.last_ok, s.enabled_at)) as streak,
	       percentile_cont(0.5) within group (order by c.duration_ms) as p50_ms,
	       percentile_cont(0.95) within group (order by c.duration_ms) as p95_ms
	  from agent_skills s left join calls c on c.skill_name = s.name
	 group by s.id order by s.name`

// viewed is a row of the view.
type viewed struct {
	Skill       string
	Calls       int64
	SuccessRate *string
	Streak      int64
	P50MS       *float64
	P95MS       *float64
}

func healthBy(t *testing.T, db postgres.DB, query string, args ...any) []viewed {
	t.Helper()
	rows, err := db.Query(t.Context(), query, args...)
	require.NoError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[viewed])
	require.NoError(t, err)
	return list
}

// calledAtRandom inserts skills with different outcomes over nine days. No call becomes seven days old within ten
// minutes.
func calledAtRandom(t *testing.T, pool *pgxpool.Pool, calls int) {
	t.Helper()
	seed := rand.Float64()
	t.Logf("random calls of seed %v", seed)
	db := pgtest.Begin(t, pool)
	pgtest.Exec(t, db, `select setseed($1)`, seed)
	pgtest.Exec(t, db, `
		insert into agent_skills (name, tool_definition, handler, enabled_at)
		select n, '{}', 'builtin:x', case n when 'enabled' then clock_timestamp() - interval '200 minutes' else 'epoch' end
		  from unnest(array['idle', 'fine', 'mixed', 'broken', 'down', 'enabled', 'seldom', 'older', 'refused']) n
		on conflict do nothing`)
	pgtest.Exec(t, db, `
		insert into agent_activity (id, trace_id, kind, skill_name, surface, status, error_class, duration_ms, created_at)
		select lanekeeper.agent_uuid7(z.at), 'hb_x', case when random() < 0.05 then 'phase' else 'call' end, z.skill, case
		  when random() < 0.5 then 'chat' else '' end,
		       case when random() < 0.03 then 'running' when random() < 0.03 then 'skipped'
		         when random() < z.rate then 'error' else 'success' end,
		       case when z.skill = 'refused' or random() < 0.05 then 'denied' when random() < 0.1 then 'timeout' else '' end,
		       case when random() < 0.95 then exp(random() * 9)::bigint - 1 end, z.at
		  from (select y.skill, y.at,
		               case y.skill when 'fine' then 0 when 'mixed' then 0.4 when 'refused' then 0.5 when 'broken' then 1
		                    when 'down' then case when y.ago < interval '30 hours' then 1 else 0.1 end
		                    else case when y.ago < interval '5 hours' then 1 else 0.7 end end as rate
		          from (select x.skill, x.ago, clock_timestamp() - x.ago as at
		                  from (select (array['fine', 'mixed', 'broken', 'down', 'enabled',
		                    'refused'])[1 + floor(random() * 6)] as skill,
		                               interval '1 minute' * (floor(power(random(), 2) * 9 * 1440) + 0.5) as ago
		                          from generate_series(1, $1::int)
		                        union all
		                        select 'seldom', interval '1 minute' * (floor(random() * 9 * 1440) + 0.5)
		                          from generate_series(1, 3)
		                        union all
		                        select 'older', interval '7 days' + interval '1 minute' * (floor(random() * 61) + 0.5)
		                          from generate_series(1, 5)) x
		                 where x.ago not between interval '7 days' - interval '10 minutes' and interval '7 days') y) z`, calls)
	require.NoError(t, db.Commit(t.Context()))
}

func TestHealthViewEqualsRows(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	countNow(t, db)
	for _, stage := range []string{"not counted", "counted", "counted and not"} {
		if stage != "counted" {
			calledAtRandom(t, db, 3000)
		}
		if stage == "counted" {
			counted(t, db, 500)
		}
		want := healthBy(t, db, healthByRows)
		got := healthBy(t, db, `select skill, calls, success_rate::text as success_rate, streak, p50_ms, p95_ms
			from agent_skill_health order by skill`)
		assert.Equal(t, "", cmp.Diff(want, got), stage)
		for _, read := range []int{0, 300, 2000} {
			sums := healthBy(t, db, `
				select s.name as skill, coalesce(f.calls, 0) as calls,
				  round((f.calls - f.failed)::numeric / nullif(f.calls, 0), 3)::text as success_rate,
				       coalesce(f.streak, 0) as streak, null::float8 as p50_ms, null::float8 as p95_ms
				  from agent_skills s left join lanekeeper.read_agent_skill_figures(clock_timestamp() - interval '7 days', $1) f
				    on f.skill = s.name order by s.name`, read)
			for i := range want {
				want[i].P50MS, want[i].P95MS = nil, nil
			}
			assert.Equal(t, "", cmp.Diff(want, sums), stage, read)
		}
		percentilesOfWholeDays(t, db, stage)
	}
}

// percentilesOfWholeDays compares the sums of buckets with the rows.
func percentilesOfWholeDays(t *testing.T, db postgres.DB, stage string) {
	t.Helper()
	rows, err := db.Query(t.Context(), `
		select f.skill, f.p50_ms, f.p95_ms, percentile_cont(0.5) within group (order by c.duration_ms),
		       percentile_cont(0.95) within group (order by c.duration_ms)
		  from lanekeeper.read_agent_skill_figures(clock_timestamp() - interval '7 days', 0) f
		  left join agent_skill_calls c on c.skill_name = f.skill
		   and c.created_at >= date_trunc('day',
		     (clock_timestamp() - interval '7 days') at time zone 'UTC') at time zone 'UTC'
		 group by f.skill, f.p50_ms, f.p95_ms`)
	require.NoError(t, err)
	var skill string
	var p [4]*float64
	_, err = pgx.ForEachRow(rows, []any{&skill, &p[0], &p[1], &p[2], &p[3]}, func() error {
		for i, want := range p[2:] {
			got := p[i]
			if (got == nil) != (want == nil) || got != nil && math.Abs(*got-*want) > 0.026**want {
				return fmt.Errorf("%s: p50 and p95 of %s are %v and %v, by the rows %v and %v", stage, skill, postgres.Deref(p[0]),
					postgres.Deref(p[1]), postgres.Deref(p[2]), postgres.Deref(p[3]))
			}
		}
		return nil
	})
	assert.NoError(t, err)
}
