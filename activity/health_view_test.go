package activity_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// healthByRows is what the view was before it went by what is counted: every call of seven days.
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
	if err != nil {
		t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[viewed])
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// calledAtRandom are skills that fare in different ways, over nine days: half a minute off each full one, so that
// none is just seven days old.
func calledAtRandom(t *testing.T, db postgres.DB, calls int) {
	t.Helper()
	_, err := db.Exec(t.Context(), `
		insert into agent_skills (name, tool_definition, handler, enabled_at)
		select n, '{}', 'builtin:x', case n when 'enabled' then clock_timestamp() - interval '200 minutes' else 'epoch' end
		  from unnest(array['idle', 'fine', 'mixed', 'broken', 'down', 'enabled', 'seldom', 'older', 'refused']) n
		on conflict do nothing`)
	if err != nil {
		t.Fatal(err)
	}
	_, err = db.Exec(t.Context(), `
		insert into agent_activity (id, trace_id, kind, skill_name, surface, status, error_class, duration_ms, created_at)
		select lanekeeper.agent_uuid7(z.at), 'hb_x', case when random() < 0.05 then 'phase' else 'call' end, z.skill, case when random() < 0.5 then 'chat' else '' end,
		       case when random() < 0.03 then 'running' when random() < 0.03 then 'skipped' when random() < z.rate then 'error' else 'success' end,
		       case when z.skill = 'refused' or random() < 0.05 then 'denied' when random() < 0.1 then 'timeout' else '' end,
		       case when random() < 0.95 then exp(random() * 9)::bigint - 1 end, z.at
		  from (select y.skill, y.at,
		               case y.skill when 'fine' then 0 when 'mixed' then 0.4 when 'refused' then 0.5 when 'broken' then 1
		                    when 'down' then case when y.ago < interval '30 hours' then 1 else 0.1 end
		                    else case when y.ago < interval '5 hours' then 1 else 0.7 end end as rate
		          from (select x.skill, x.ago, clock_timestamp() - x.ago as at
		                  from (select (array['fine', 'mixed', 'broken', 'down', 'enabled', 'refused'])[1 + floor(random() * 6)] as skill,
		                               interval '1 minute' * (floor(power(random(), 2) * 9 * 1440) + 0.5) as ago
		                          from generate_series(1, $1::int)
		                        union all
		                        select 'seldom', interval '1 minute' * (floor(random() * 9 * 1440) + 0.5) from generate_series(1, 3)
		                        union all
		                        select 'older', interval '7 days' + interval '1 minute' * (floor(random() * 61) + 0.5) from generate_series(1, 5)) x) y) z`, calls)
	if err != nil {
		t.Fatal(err)
	}
}

func TestTheViewOfHealthSaysWhatTheRowsSay(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	hurry(t, db)
	for _, stage := range []string{"not counted", "counted", "counted and not"} {
		if stage != "counted" {
			calledAtRandom(t, db, 3000)
		}
		if stage == "counted" {
			counted(t, db, 500)
		}
		want := healthBy(t, db, healthByRows)
		got := healthBy(t, db, `select skill, calls, success_rate::text as success_rate, streak, p50_ms, p95_ms from agent_skill_health order by skill`)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", stage, diff)
		}
		for _, read := range []int{0, 300, 2000} {
			sums := healthBy(t, db, `
				select s.name as skill, coalesce(f.calls, 0) as calls, round((f.calls - f.failed)::numeric / nullif(f.calls, 0), 3)::text as success_rate,
				       coalesce(f.streak, 0) as streak, null::float8 as p50_ms, null::float8 as p95_ms
				  from agent_skills s left join lanekeeper.read_agent_skill_figures(clock_timestamp() - interval '7 days', $1) f on f.skill = s.name order by s.name`, read)
			for i := range want {
				want[i].P50MS, want[i].P95MS = nil, nil
			}
			if diff := cmp.Diff(want, sums); diff != "" {
				t.Errorf("%s, of which %d rows are read: %s", stage, read, diff)
			}
		}
		percentilesOfWholeDays(t, db, stage)
	}
}

// percentilesOfWholeDays compares what is added up of buckets with the rows.
func percentilesOfWholeDays(t *testing.T, db postgres.DB, stage string) {
	t.Helper()
	rows, err := db.Query(t.Context(), `
		select f.skill, f.p50_ms, f.p95_ms, percentile_cont(0.5) within group (order by c.duration_ms),
		       percentile_cont(0.95) within group (order by c.duration_ms)
		  from lanekeeper.read_agent_skill_figures(clock_timestamp() - interval '7 days', 0) f
		  left join agent_skill_calls c on c.skill_name = f.skill
		   and c.created_at >= date_trunc('day', (clock_timestamp() - interval '7 days') at time zone 'UTC') at time zone 'UTC'
		 group by f.skill, f.p50_ms, f.p95_ms`)
	if err != nil {
		t.Fatal(err)
	}
	var skill string
	var p [4]*float64
	_, err = pgx.ForEachRow(rows, []any{&skill, &p[0], &p[1], &p[2], &p[3]}, func() error {
		for i, want := range p[2:] {
			got := p[i]
			if (got == nil) != (want == nil) || got != nil && math.Abs(*got-*want) > 0.026**want {
				return fmt.Errorf("%s: p50 and p95 of %s are %v and %v, by the rows %v and %v", stage, skill, deref(p[0]), deref(p[1]), deref(p[2]), deref(p[3]))
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func deref(p *float64) float64 {
	if p == nil {
		return math.NaN()
	}
	return *p
}
