package retention_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// effects are the rows whose causes are noted for why().
const effects = `
	select 'execution ' || id as effect from agent_executions
	union all select 'event ' || id from agent_events
	union all select 'run ' || id from agent_automation_runs
	union all select 'outgoing ' || id from agent_webhook_outbox`

// noteCauses notes a cause for every row that can have one, and a lane and a lost claim for every execution.
func noteCauses(t *testing.T, db postgres.DB) {
	t.Helper()
	pgtest.Exec(t, db, `delete from agent_links`)
	pgtest.Exec(t, db, `insert into agent_links (cause, kind, effect) select 'trace of a test', 'raised', e.effect from (`+
		effects+`) e`)
	pgtest.Exec(t, db, `
		insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended)
		select 'lane ' || id, id, 1, created_at, created_at, 'released' from agent_executions`)
	pgtest.Exec(t, db, `insert into agent_claims_lost (execution_id, claim, how) select id, 1, 'lost'
		from agent_executions`)
}

// causesAreOfWhatIsThere checks that the causes of what went have gone with it, and no others.
func causesAreOfWhatIsThere(t *testing.T, db postgres.DB) {
	t.Helper()
	for what, sql := range map[string][2]string{
		"causes": {effects + ` order by 1`, `select effect from agent_links where cause = 'trace of a test' order by 1`},
		"lanes held": {
			`select id::text from agent_executions order by 1`,
			`select execution_id::text from agent_lane_holds where ended = 'released' order by 1`,
		},
		"claims lost": {
			`select id::text from agent_executions order by 1`,
			`select execution_id::text from agent_claims_lost order by 1`,
		},
	} {
		assert.Equal(t, "", cmp.Diff(pgtest.Column[string](t, db, sql[0]), pgtest.Column[string](t, db, sql[1])), what)
	}
}
