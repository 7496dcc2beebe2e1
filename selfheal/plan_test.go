package selfheal_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/selfheal"
)

// explainer has the server explain the queries that read the activity log.
type explainer struct {
	postgres.Beginner
	t     *testing.T
	plans []string
}

func (e *explainer) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if strings.Contains(sql, "agent_skill_calls") {
		rows, err := e.Beginner.Query(ctx, "explain "+sql, args...)
		if err != nil {
			e.t.Fatal(err)
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			e.t.Fatal(err)
		}
		e.plans = append(e.plans, strings.Join(lines, "\n"))
	}
	return e.Beginner.Query(ctx, sql, args...)
}

func TestEachSkillIsARangeOfAnIndex(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for _, name := range []string{"skill_1", "skill_2", "skill_3"} {
		skill(t, db, name)
	}
	exec(t, db, `
		insert into agent_activity (id, trace_id, skill_name, status, created_at)
		select lanekeeper.agent_uuid7(at), 'hb_x', 'skill_' || n % 97, 'success', at
		  from (select n, clock_timestamp() - n * interval '120 seconds' as at from generate_series(1, 20000) n) x`)
	exec(t, db, "analyze agent_activity")
	e := &explainer{Beginner: db, t: t}
	run(t, e, selfheal.Default())
	if len(e.plans) != 1 {
		t.Fatalf("%d queries read the log for healthy skills, want one", len(e.plans))
	}
	var last string // the partition that the newest rows are in
	err := db.QueryRow(t.Context(), "select tableoid::regclass::text from agent_activity order by id desc limit 1").Scan(&last)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(e.plans[0], "Seq Scan on "+last) || !strings.Contains(e.plans[0], last+"_skill_name_id_idx") {
		t.Errorf("the log is read whole:\n%s", e.plans[0])
	}
}
