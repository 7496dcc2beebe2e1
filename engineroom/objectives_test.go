package engineroom

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// insertObjective inserts an objective with three steps: one done, one failed.
func insertObjective(t *testing.T, pool *pgxpool.Pool, name string) (id string) {
	t.Helper()
	id = insert(t, pool, `
		insert into agent_objectives (name, goal, last_trace_id)
		  values ($1, 'goal of ' || $1, 'hb_00000000000000000000000001') returning id::text`, name)
	insert(t, pool, `insert into agent_objective_steps (objective_id, position, title) values ($1, 1, 'collect')
		returning 'x'`, id)
	step := insert(t, pool, `select id::text from agent_objective_steps where objective_id = $1`, id)
	call := insert(t, pool, `
		insert into agent_activity (trace_id, skill_name, surface)
		  values ('hb_00000000000000000000000002', 'fetch', 'heartbeat') returning id::text`)
	insert(t, pool, `insert into agent_objective_evidence (step_id, activity_id) values ($1, $2) returning 'x'`, step,
		call)
	insert(t, pool, `
		update agent_objective_steps set status = 'done', trace_id = 'hb_00000000000000000000000002', result = 'all there'
		  where id = $1 returning 'x'`, step)
	insert(t, pool, `insert into agent_objective_steps (objective_id, position, title, status, attempts)
		values ($1, 2, 'compare', 'failed', 3) returning 'x'`, id)
	insert(t, pool,
		`insert into agent_objective_steps (objective_id, position, title) values ($1, 3, 'report') returning 'x'`, id)
	return id
}

func TestObjectiveShowsProgressAndEvidence(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/objectives", "No objective yet")
	id := insertObjective(t, pool, "grow")
	for _, path := range []string{"/", "/objectives", "/objectives?status=active"} {
		wantTexts(t, server.URL+path, "/objectives/grow", "1 of 3", "1 failed", `width="33"`)
	}
	for _, path := range []string{"/objectives/grow", "/objectives/" + id} {
		wantTexts(t, server.URL+path, "goal of grow", "collect", "all there", "#panel\">fetch</a>", "3 failed attempts",
			"gave evidence", "worked on a step",
			"hb_00000000000000000000000001", "/v1/objectives/"+id+"/pause")
	}
	rows.Quiet(t, pool, `update agent_objective_steps set attempts = 1 where attempts = 3`)
	wantTexts(t, server.URL+"/objectives/grow", "1 failed attempt<")
	wantError(t, server.URL+"/objectives/none", 404, "no objective")
	wantError(t, server.URL+"/objectives/%00", 404, "not found")
	wantError(t, server.URL+"/objectives?status=fine", 400, "status")
	wantError(t, server.URL+"/objectives?before=x", 400, "before")
	wantTexts(t, server.URL+"/objectives?status=failed", "No match")
}

func TestIdleObjectiveIsStale(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insertObjective(t, pool, "grow")
	assert.True(t, !strings.Contains(wantTexts(t, server.URL+"/"), ">stale<"),
		"an objective that has just changed is shown as stale")
	insert(t, pool, `update agent_objectives set due_at = clock_timestamp() - interval '4 days',
		updated_at = clock_timestamp() - interval '4 days' returning name`)
	assert.True(t, !strings.Contains(wantTexts(t, server.URL+"/"), ">stale<"),
		"an objective with a step that has just changed is shown as stale")
	pgtest.Exec(t, pool, `update agent_objective_steps set updated_at = clock_timestamp() - interval '4 days'`)
	for _, path := range []string{"/", "/objectives", "/objectives/grow"} {
		wantTexts(t, server.URL+path, ">stale<")
	}
}

func TestObjectiveActionsByState(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for status, want := range map[string]string{
		"proposed": "accept reject", "rejected": "accept", "active": "pause", "paused": "resume",
		"completed": "", "failed": "",
	} {
		id := insert(t, pool, `
			insert into agent_objectives (name, goal, status, proposed_by, decided_by) values ($1, 'g', $1, 'agent', 'admin')
			  returning id::text`, status)
		body := wantTexts(t, server.URL+"/objectives/"+status)
		for _, action := range []string{"accept", "reject", "pause", "resume"} {
			shown := strings.Contains(body, "/act/v1/objectives/"+id+"/"+action)
			assert.Truef(t, shown == strings.Contains(want, action), "%s: action %s is there: %v", status, action, shown)
		}
	}
	wantTexts(t, server.URL+"/objectives?status=proposed", "/accept", "/reject")
}
