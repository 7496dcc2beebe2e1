package engineroom

import (
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// aims makes an objective with three steps, of which one is done and one failed.
func aims(t *testing.T, pool *pgxpool.Pool, name string) (id string) {
	t.Helper()
	id = put(t, pool, `
		insert into agent_objectives (name, goal, last_trace_id) values ($1, 'goal of ' || $1, 'hb_00000000000000000000000001') returning id::text`, name)
	put(t, pool, `insert into agent_objective_steps (objective_id, position, title) values ($1, 1, 'collect') returning 'x'`, id)
	step := put(t, pool, `select id::text from agent_objective_steps where objective_id = $1`, id)
	call := put(t, pool, `
		insert into agent_activity (trace_id, skill_name, surface) values ('hb_00000000000000000000000002', 'fetch', 'heartbeat') returning id::text`)
	put(t, pool, `insert into agent_objective_evidence (step_id, activity_id) values ($1, $2) returning 'x'`, step, call)
	put(t, pool, `
		update agent_objective_steps set status = 'done', trace_id = 'hb_00000000000000000000000002', result = 'all there' where id = $1 returning 'x'`, step)
	put(t, pool, `insert into agent_objective_steps (objective_id, position, title, status, attempts) values ($1, 2, 'compare', 'failed', 3) returning 'x'`, id)
	put(t, pool, `insert into agent_objective_steps (objective_id, position, title) values ($1, 3, 'report') returning 'x'`, id)
	return id
}

func TestAnObjectiveShowsItsProgressAndItsEvidence(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/objectives", "works towards nothing yet")
	id := aims(t, pool, "grow")
	for _, path := range []string{"/", "/objectives", "/objectives?status=active"} {
		shows(t, server.URL+path, "/objectives/grow", "1 of 3", "1 failed", `width="33"`)
	}
	for _, path := range []string{"/objectives/grow", "/objectives/" + id} {
		shows(t, server.URL+path, "goal of grow", "collect", "all there", ">fetch</a>", "3 failed attempts", "gave evidence", "ended a step",
			"hb_00000000000000000000000001", "/v1/objectives/"+id+"/pause")
	}
	turnsAway(t, server.URL+"/objectives/none", 404, "no objective")
	turnsAway(t, server.URL+"/objectives/%00", 404, "not found")
	turnsAway(t, server.URL+"/objectives?status=fine", 400, "status")
	turnsAway(t, server.URL+"/objectives?before=x", 400, "before")
	shows(t, server.URL+"/objectives?status=failed", "There is none")
}

func TestAnObjectiveThatNothingTouchesIsStale(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	aims(t, pool, "grow")
	if body := shows(t, server.URL+"/"); strings.Contains(body, ">stale<") {
		t.Error("it was touched just now")
	}
	put(t, pool, `update agent_objectives set due_at = clock_timestamp() - interval '4 days', updated_at = clock_timestamp() - interval '4 days' returning name`)
	if body := shows(t, server.URL+"/"); strings.Contains(body, ">stale<") {
		t.Error("its steps were touched just now")
	}
	_, err := pool.Exec(t.Context(), `update agent_objective_steps set updated_at = clock_timestamp() - interval '4 days'`)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/", "/objectives", "/objectives/grow"} {
		shows(t, server.URL+path, ">stale<")
	}
}

func TestAnObjectiveHasTheLeversOfItsState(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	for status, want := range map[string]string{
		"proposed": "accept reject", "rejected": "accept", "active": "pause", "paused": "resume", "completed": "", "failed": "",
	} {
		id := put(t, pool, `
			insert into agent_objectives (name, goal, status, proposed_by, decided_by) values ($1, 'g', $1, 'agent', 'admin') returning id::text`, status)
		body := shows(t, server.URL+"/objectives/"+status)
		for _, action := range []string{"accept", "reject", "pause", "resume"} {
			has := strings.Contains(body, "/act/v1/objectives/"+id+"/"+action)
			if has != strings.Contains(want, action) {
				t.Errorf("%s: lever %s is there: %v", status, action, has)
			}
		}
	}
	shows(t, server.URL+"/objectives?status=proposed", "/accept", "/reject")
}

func TestHostileObjectivesAreText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := put(t, pool, `
		insert into agent_objectives (name, goal, success_criteria, note, status, proposed_by, decided_reason, source, proposed_trace)
		values ($1, $1 || repeat('x', 1000000), $1, $1, 'proposed', $1, $1, $1, $1) returning id::text`, hostile)
	put(t, pool, `
		insert into agent_objective_steps (objective_id, position, title, result, trace_id) values ($1, 1, $2, $2 || repeat('x', 1000000), $2)
		returning id::text`, id, hostile)
	for _, path := range []string{"/", "/objectives", "/objectives/" + id, "/objectives/" + url.PathEscape(hostile)} {
		harmless(t, server.URL+path)
	}
}

func TestObjectivesAreReadByTheirIndexes(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	id := aims(t, pool, "grow")
	_, err := pool.Exec(t.Context(), `
		insert into agent_objectives (name, goal, status) select 'o' || n, 'g', 'completed' from generate_series(1, 4000) n;
		insert into agent_objective_steps (objective_id, position, title) select o.id, 9, 'x' from agent_objectives o`)
	if err != nil {
		t.Fatal(err)
	}
	analyse(t, pool, "agent_objectives", "agent_objective_steps", "agent_objective_evidence")
	for _, path := range []string{"/", "/objectives", "/objectives?status=active", "/objectives?status=failed", "/objectives/grow", "/objectives/" + id} {
		indexed(t, pool, path, "agent_objectives", "agent_objective_steps")
	}
}
