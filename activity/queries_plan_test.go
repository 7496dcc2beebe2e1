package activity_test

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// explainer has the server explain each query that passes, with its arguments.
type explainer struct {
	postgres.DB
	t     *testing.T
	plans []string
}

func (e *explainer) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := e.DB.Query(ctx, "explain "+sql, args...)
	if err != nil {
		e.t.Fatalf("explain %s: %v", sql, err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		e.t.Fatalf("explain %s: %v", sql, err)
	}
	e.plans = append(e.plans, strings.Join(lines, "\n"))
	return e.DB.Query(ctx, sql, args...)
}

// fill writes 24,000 rows and 4,000 executions, evenly since the beginning of last month.
func fill(t *testing.T, db postgres.DB) {
	t.Helper()
	_, err := db.Exec(t.Context(), `
		create temp table since as select clock_timestamp() as now,
		       clock_timestamp() - (date_trunc('month', clock_timestamp() at time zone 'UTC') - interval '1 month') at time zone 'UTC' as span;
		insert into agent_activity (id, trace_id, kind, skill_name, status, error_class, surface, token_usage, created_at,
		       finished_at, duration_ms)
		select lanekeeper.agent_uuid7(at), 'hb_' || lpad((n / 6)::text, 26, '0'), case n % 6 when 0 then 'model' else 'call' end,
		       'skill_' || n % 97, case n % 11 when 0 then 'error' else 'success' end, '',
		       case n % 5 when 0 then 'chat' else 'heartbeat' end, '{"total_tokens": 5}', at, at, n % 1000
		  from (select n, now - span * n / 24001 as at from since, generate_series(1, 24000) n) x;
		insert into agent_executions (id, trace_id, surface, flow, status, created_at)
		select lanekeeper.agent_uuid7(at), 'hb_' || lpad(n::text, 26, '0'), case n % 5 when 0 then 'chat' else 'heartbeat' end, 'beat',
		       'pending', at
		  from (select n, now - span * n / 4001 as at from since, generate_series(1, 4000) n) x;
		drop table since;
		analyze agent_activity; analyze agent_executions; analyze agent_activity_open`)
	if err != nil {
		t.Fatal(err)
	}
}

// populated are the partitions that have rows: an empty one is best read as it is.
func populated(t *testing.T, db postgres.DB) *regexp.Regexp {
	t.Helper()
	rows, err := db.Query(t.Context(), "select distinct tableoid::regclass::text from agent_activity")
	if err != nil {
		t.Fatal(err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if len(names) < 2 {
		t.Fatalf("rows are in %v only: nothing could be left out", names)
	}
	return regexp.MustCompile(`Seq Scan on (agent_executions|` + strings.Join(names, "|") + ")")
}

func TestEveryQueryIsAnsweredByAnIndex(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	fill(t, db)
	scanned := populated(t, db)
	day := time.Now().Add(-24 * time.Hour)
	recent := func(f activity.Filter) func(postgres.DB) error {
		return func(db postgres.DB) error {
			_, _, err := activity.Recent(t.Context(), db, f)
			return err
		}
	}
	lines := func(f activity.Filter) func(postgres.DB) error {
		return func(db postgres.DB) error {
			_, err := activity.Lines(t.Context(), db, f)
			return err
		}
	}
	traces := func(f activity.TraceFilter) func(postgres.DB) error {
		return func(db postgres.DB) error {
			_, _, err := activity.Traces(t.Context(), db, f)
			return err
		}
	}
	for name, query := range map[string]func(postgres.DB) error{
		"lines":            lines(activity.Filter{}),
		"lines of a lane":  lines(activity.Filter{Lane: "none"}),
		"lines of a trace": lines(activity.Filter{TraceID: "hb_00000000000000000000000042"}),
		"lines of a skill": lines(activity.Filter{Skill: "skill_3", Status: activity.Error}),
		"unfold": func(db postgres.DB) error {
			_, err := activity.Unfold(t.Context(), db, "018f0000-0000-7000-8000-000000000000")
			if errors.Is(err, activity.ErrNoRow) {
				err = nil
			}
			return err
		},
		"newest":  recent(activity.Filter{}),
		"trace":   recent(activity.Filter{TraceID: trace.ID("hb_00000000000000000000000042").OTel()}),
		"skill":   recent(activity.Filter{Skill: "skill_3"}),
		"running": recent(activity.Filter{Status: activity.Running}),
		"chat":    recent(activity.Filter{Surface: "chat", Status: activity.Error}),
		"a day":   recent(activity.Filter{Since: day, Until: day.Add(time.Hour)}),
		"trace of": func(db postgres.DB) error {
			_, err := activity.TraceOf(t.Context(), db, "hb_00000000000000000000000042")
			return err
		},
		"traces":            traces(activity.TraceFilter{}),
		"traces of chat":    traces(activity.TraceFilter{Surface: "chat"}),
		"traces of a state": traces(activity.TraceFilter{Status: "failed"}),
		"traces of a day":   traces(activity.TraceFilter{Since: day}),
		"audit": func(db postgres.DB) error {
			_, err := activity.Audit(t.Context(), db, activity.Filter{Since: day, Limit: 10})
			return err
		},
		"audit of a trace": func(db postgres.DB) error {
			_, err := activity.Audit(t.Context(), db, activity.Filter{TraceID: "hb_00000000000000000000000042"})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := &explainer{DB: db, t: t}
			if err := query(e); err != nil {
				t.Fatal(err)
			}
			for _, plan := range e.plans {
				if scanned.MatchString(plan) {
					t.Errorf("the table is read whole:\n%s", plan)
				}
			}
			if len(e.plans) == 0 {
				t.Error("nothing was asked")
			}
		})
	}
}

// A prepared statement gets one plan for all arguments after a few uses, and that reads everything.
func TestNoPlanIsKept(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for range 8 {
		if _, _, err := activity.Recent(t.Context(), conn, activity.Filter{Skill: "fetch"}); err != nil {
			t.Fatal(err)
		}
	}
	var kept int
	err = conn.QueryRow(t.Context(), `
		select count(*) from pg_prepared_statements where statement like '%from agent_activity a%where%limit%'
		   and statement not like '%pg_prepared_statements%'`).Scan(&kept)
	if err != nil {
		t.Fatal(err)
	}
	if kept > 0 {
		t.Errorf("%d statements are prepared", kept)
	}
}
