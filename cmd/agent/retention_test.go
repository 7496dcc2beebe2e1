package main

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/retention"
)

func TestRetentionIsShownSetCountedAndRun(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	p := on(t, db.Config().ConnString())
	contains(t, p.must("retention", "show"), "KIND", "messages         forever  1 day")
	contains(t, p.must("retention", "set", "executions=30d", "events=1 day", "--reason", "little room"), "changed; trace op_")
	contains(t, p.must("retention", "set", "executions=30 days"), "it was so already")
	_, err := db.Exec(t.Context(), `
		insert into agent_executions (id, trace_id, surface, flow, created_at)
		select lanekeeper.agent_uuid7(at), 'fl_' || n, 'flow', 'f', at from (select n, clock_timestamp() - interval '40 days' as at from generate_series(1, 3) n) x`)
	if err != nil {
		t.Fatal(err)
	}
	for _, end := range []string{"running", "completed"} {
		_, err = db.Exec(t.Context(), `update agent_executions set status = $1::text, completed_at = case when $1::text = 'completed' then created_at end where trace_id <> 'fl_3'`, end)
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"retention", "run", "--dry-run"}, {"retention", "run", "executions"}} {
		var done struct{ Items []retention.Done }
		p.mustJSON(&done, args...)
		found := false
		for _, d := range done.Items {
			found = found || d.Kind == "executions" && d.Removed == 2 && d.Keep == "30 days"
		}
		if !found {
			t.Errorf("agent %v: %+v", args, done)
		}
	}
	contains(t, p.must("retention", "run", "executions"), "executions  30 days  0")
	for _, args := range [][]string{
		{"retention", "set", "memory=3d"},
		{"retention", "set", "executions=1h"},
		{"retention", "set", "executions"},
		{"retention", "run", "memory"},
		{"retention", "set", "executions=3d", "executions=4d"},
		{"retention", "set"},
	} {
		if got := p.run(args...); got.code != 2 || got.err == "" || got.out != "" {
			t.Errorf("agent %v: %+v", args, got)
		}
	}
}
