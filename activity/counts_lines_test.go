package activity_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

func TestSpendIsSummedByWhatIsAsked(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	hurry(t, db)
	day := 24 * time.Hour
	put(t, db, act{kind: "model", skill: "model", purpose: "plan", surface: "chat", model: "m1", tokens: 100, cost: "0.10", ago: 2 * day, ledTo: map[string]int{"fetch": 25}})
	put(t, db, act{kind: "model", skill: "model", purpose: "plan", model: "m2", tokens: 50, cost: "0.05", ago: 2 * day})
	counted(t, db, 20)
	put(t, db, act{kind: "model", skill: "reflect", model: "m1", tokens: 5, cost: "0.01"})
	put(t, db, act{kind: "model", skill: "ancient", tokens: 1000, ago: 20 * day})
	lines := func(f activity.SpendFilter) []string {
		sums, err := activity.CountedSpend(t.Context(), db, f)
		if err != nil {
			t.Fatal(err)
		}
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
		"skills":     {activity.SpendFilter{Since: since, By: activity.BySkill}, []string{"fetch i", " ii"}},
		"one skill":  {activity.SpendFilter{Since: since, Skill: "fetch"}, []string{" i"}},
		"purposes":   {activity.SpendFilter{Since: since, By: activity.ByPurpose}, []string{"plan ii", "reflect i"}},
		"a purpose":  {activity.SpendFilter{Since: since, By: activity.BySurface, Purpose: "plan"}, []string{"chat i", "heartbeat i"}},
		"ever":       {activity.SpendFilter{By: activity.ByPurpose}, []string{"plan ii", "reflect i", "ancient i"}},
		"surfaces":   {activity.SpendFilter{Since: since, By: activity.BySurface}, []string{"chat i", "heartbeat ii"}},
		"models":     {activity.SpendFilter{Since: since, By: activity.ByModel}, []string{"m1 ii", "m2 i"}},
		"one model":  {activity.SpendFilter{Since: since, By: activity.ByPurpose, Model: "m1"}, []string{"plan i", "reflect i"}},
		"together":   {activity.SpendFilter{Since: since}, []string{" iii"}},
		"days":       {activity.SpendFilter{Since: since, Period: activity.ByDay}, []string{" 0s i", " 48h0m0s ii"}},
		"hours":      {activity.SpendFilter{Since: since, Period: activity.ByHour}, []string{" 0s i", " 48h0m0s ii"}},
		"one hour":   {activity.SpendFilter{Since: time.Now(), By: activity.ByPurpose}, []string{"reflect i"}},
		"no surface": {activity.SpendFilter{Since: since, Surface: "webhook"}, []string{}},
	} {
		if diff := cmp.Diff(c.want, lines(c.filter)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	for _, bad := range []activity.SpendFilter{{Period: "week"}, {By: "lane"}, {By: activity.ByPurpose, Skill: "fetch"}, {By: activity.BySkill, Purpose: "plan"}} {
		if _, err := activity.CountedSpend(t.Context(), db, bad); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}

func TestHealthIsWhatTheViewSays(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	hurry(t, db)
	_, err := db.Exec(t.Context(), `
		insert into agent_skills (name, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at, trial_at, enabled_at)
		values ('idle', '{}', 'builtin:x', true, '', '', null, null, 'epoch'), ('flaky', '{}', 'builtin:x', true, '', '', null, null, 'epoch'),
		       ('broken', '{}', 'builtin:x', false, 'self-heal', '3 failed', clock_timestamp(), null, 'epoch'),
		       ('tried', '{}', 'builtin:x', false, 'self-heal', '3 failed', clock_timestamp(), clock_timestamp(), 'epoch'),
		       ('fresh', '{}', 'builtin:x', true, '', '', null, null, clock_timestamp() - interval '3 hours')`)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 60 {
		ago := time.Duration(60-i) * 2 * time.Hour
		put(t, db, act{skill: "flaky", ms: i * i, ago: ago, status: map[bool]string{true: "error", false: "success"}[i%7 == 0 || i > 55]})
		put(t, db, act{skill: "broken", ms: 3, ago: ago, status: "error"})
		put(t, db, act{skill: "fresh", ms: 3, ago: ago, status: "error"})
		put(t, db, act{skill: "flaky", ms: 9999, ago: ago, status: "error", class: "invalid_params"})
		if i == 40 {
			counted(t, db, 20)
		}
	}
	rows, err := db.Query(t.Context(), `
		select h.skill, h.calls, h.calls - round(h.calls * coalesce(h.success_rate, 0))::bigint as failed, h.streak, false as streak_more,
		       h.state, h.disabled_by, h.disabled_reason, h.disabled_at from agent_skill_health h order by h.skill`)
	if err != nil {
		t.Fatal(err)
	}
	want, err := pgx.CollectRows(rows, pgx.RowToStructByName[activity.Health])
	if err != nil {
		t.Fatal(err)
	}
	got, err := activity.CountedHealth(t.Context(), db, activity.HealthFilter{})
	if err != nil {
		t.Fatal(err)
	}
	sameTime := cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) })
	if diff := cmp.Diff(want, got.Lines, sameTime, cmpopts.IgnoreFields(activity.Health{}, "P50MS", "P95MS", "SuccessRate")); diff != "" {
		t.Error(diff)
	}
	if got.Until != nil {
		t.Errorf("the figures end at %s", got.Until)
	}
	for _, h := range got.Lines {
		var p50, p95 *float64
		if err := db.QueryRow(t.Context(), `select p50_ms, p95_ms from agent_skill_health where skill = $1`, h.Skill).Scan(&p50, &p95); err != nil {
			t.Fatal(err)
		}
		for name, p := range map[string][2]*float64{"p50": {p50, h.P50MS}, "p95": {p95, h.P95MS}} {
			if (p[0] == nil) != (p[1] == nil) || p[0] != nil && math.Abs(*p[0]-*p[1]) > 0.026**p[0] {
				t.Errorf("%s of %s is off: %v", name, h.Skill, p)
			}
		}
	}
	one, err := activity.CountedHealth(t.Context(), db, activity.HealthFilter{State: "disabled", After: "a", Limit: 1})
	if err != nil || len(one.Lines) != 1 || one.Lines[0].Skill != "broken" || *one.Lines[0].SuccessRate != 0 {
		t.Errorf("the disabled ones are %v (%v)", one.Lines, err)
	}
	calls, err := activity.CountedCalls(t.Context(), db, "flaky", time.Now().AddDate(0, 0, -7), activity.Total)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]activity.CallLine{{Calls: 120, Worked: 60, Failed: 12}}, calls.Lines); diff != "" {
		t.Error(diff)
	}
}

func TestFiguresSayUntilWhenTheyAreComplete(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	_, err := db.Exec(t.Context(), `
		insert into agent_activity (id, trace_id, kind, skill_name, created_at)
		select lanekeeper.agent_uuid7(at), 'hb_x', 'model', 'm', at
		  from (select clock_timestamp() - interval '1 second' * (25001 - n) / 10 as at from generate_series(1, 25000) n) x`)
	if err != nil {
		t.Fatal(err)
	}
	sums, err := activity.CountedSpend(t.Context(), db, activity.SpendFilter{})
	if err != nil {
		t.Fatal(err)
	}
	if sums.Until == nil || sums.Lines[0].Calls < 19_000 || sums.Lines[0].Calls > 20_000 {
		t.Fatalf("of 25000 rows that are not counted: %+v", sums)
	}
	var before int64
	err = db.QueryRow(t.Context(), `select count(*) from agent_activity where id < lanekeeper.agent_uuid7_floor(@until::timestamptz + interval '1 ms')`,
		postgres.Strict{"until": *sums.Until}).Scan(&before)
	if err != nil || before < sums.Lines[0].Calls || before > sums.Lines[0].Calls+2 {
		t.Errorf("until %s there are %d rows, not %d (%v)", sums.Until, before, sums.Lines[0].Calls, err)
	}
}

func TestABadRowDoesNotStopTheCount(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	hurry(t, db)
	name := strings.Repeat("ñ", 100_000)
	_, err := db.Exec(t.Context(), `
		insert into agent_activity (trace_id, kind, skill_name, surface, token_usage, duration_ms, cost_usd)
		values ('hb_x', 'model', $1, $1, '{"total_tokens": "many", "prompt_tokens": 1e300, "completion_tokens": [1]}', null, 1),
		       ('hb_x', 'call', $1, $1, '[]', -9223372036854775808, 0), ('hb_x', 'call', 'long', '', '{}', 9223372036854775807, 0)`, name)
	if err != nil {
		t.Fatal(err)
	}
	counted(t, db, 20)
	sums, err := activity.CountedSpend(t.Context(), db, activity.SpendFilter{Purpose: name, By: activity.ByPurpose})
	if err != nil || len(sums.Lines) != 1 || sums.Lines[0].CostUSD != 1 || len(sums.Lines[0].Key) > 300 {
		t.Errorf("got %+v (%v)", sums.Lines, err)
	}
}

// seqScans is how often tables were read whole through the connection so far.
func seqScans(t *testing.T, tx pgx.Tx, tables []string) (n int64) {
	t.Helper()
	err := tx.QueryRow(t.Context(), `
		select coalesce(sum(s.seq_scan), 0) from pg_stat_xact_user_tables s where s.relname = any ($1)`, tables).Scan(&n)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestCountedFiguresReadNothingWhole(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	fill(t, db)
	hurry(t, db)
	_, err := db.Exec(t.Context(), `
		insert into agent_skills (name, tool_definition, handler) select 'skill_' || n, '{}', 'builtin:x' from generate_series(0, 96) n`)
	if err != nil {
		t.Fatal(err)
	}
	counted(t, db, 20_000)
	// All days are of the last seven, which makes reading them whole look cheap; and there are many rows.
	_, err = db.Exec(t.Context(), `
		delete from agent_activity_durations where day < current_date - 6;
		delete from agent_activity_counts where start < current_date - 6;
		insert into agent_activity_counts (span, start, kind, skill, surface, model)
		select 'day', date_trunc('day', clock_timestamp() at time zone 'UTC') at time zone 'UTC' - make_interval(days => d), kind, 'skill_' || n, s::text, ''
		  from generate_series(0, 5) d, (values ('call'), ('model')) k (kind), generate_series(0, 96) n, generate_series(0, 9) s
		    on conflict do nothing;
		insert into agent_activity_durations (day, skill, bucket, calls)
		select current_date - d, 'skill_' || n, b, 1 from generate_series(0, 6) d, generate_series(0, 96) n, generate_series(0, 60) b on conflict do nothing;
		analyze agent_activity_counts; analyze agent_activity_durations; analyze agent_activity`)
	if err != nil {
		t.Fatal(err)
	}
	var tables []string
	err = db.QueryRow(t.Context(), `
		select array_agg(distinct a.tableoid::regclass::text) || array['agent_activity_counts', 'agent_activity_durations']
		  from agent_activity a`).Scan(&tables)
	if err != nil {
		t.Fatal(err)
	}
	day := time.Now().Add(-24 * time.Hour)
	for name, query := range map[string]func(postgres.Beginner) error{
		"count": func(db postgres.Beginner) error {
			_, err := activity.Count(t.Context(), db)
			return err
		},
		"spend": func(db postgres.Beginner) error {
			_, err := activity.CountedSpend(t.Context(), db, activity.SpendFilter{Since: day.AddDate(0, 0, -29), By: activity.BySkill})
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
			_, err := db.Exec(t.Context(), `select from lanekeeper.read_agent_skill_figures(clock_timestamp() - interval '7 days', 0)`)
			return err
		},
	} {
		err := pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
			before := seqScans(t, tx, tables)
			if err := query(tx); err != nil {
				return err
			}
			if n := seqScans(t, tx, tables); n > before {
				t.Errorf("%s reads %d tables whole", name, n-before)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestAStreakIsWalkedSoFarOnly(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	_, err := db.Exec(t.Context(), `
		insert into agent_skills (name, tool_definition, handler) values ('broken', '{}', 'builtin:x');
		insert into agent_activity (trace_id, skill_name, status) select 'hb_x', 'broken', 'error' from generate_series(1, 501)`)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []struct {
		streak int64
		more   bool
	}{{500, true}, {0, false}} {
		got, err := activity.CountedHealth(t.Context(), db, activity.HealthFilter{Skill: "broken"})
		if err != nil || got.Lines[0].Streak != want.streak || got.Lines[0].StreakMore != want.more {
			t.Errorf("got %+v (%v), want %+v", got.Lines, err, want)
		}
		put(t, db, act{skill: "broken"})
	}
}
