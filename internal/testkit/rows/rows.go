// Package rows writes rows for tests of pages and reports.
package rows

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Quiet runs a statement without triggers, so a test can write rows in any state.
func Quiet(tb testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	tb.Helper()
	tx := pgtest.Begin(tb, pool)
	pgtest.Exec(tb, tx, `set local session_replication_role = replica`)
	pgtest.Exec(tb, tx, sql, args...)
	require.NoError(tb, tx.Commit(tb.Context()))
}

// Execution writes an execution in a state and returns its id.
func Execution(tb testing.TB, pool *pgxpool.Pool, status, surface, flow string) string {
	tb.Helper()
	id := pgtest.Value[string](tb, pool, `select lanekeeper.agent_uuid7()::text`)
	Quiet(tb, pool, `
		insert into agent_executions (id, trace_id, surface, flow, is_external, status, waiting_for, waiting_key,
		  waiting_until, waiting_step, updated_at, completed_at)
		select @id::uuid, lanekeeper.agent_trace_id('fl'), @surface, @flow, @flow like 'external%', @status::text, x.kind,
		       x.key, x.until, x.step, x.at, x.ended
		  from (select case when @status = 'waiting' then 'event' end as kind,
		               case when @status = 'waiting' then 'news' end as key,
		               case when @status = 'waiting' then clock_timestamp() + interval '1 hour' end as until,
		               case when @status = 'waiting' then 'wait for news' end as step, clock_timestamp() as at,
		               case when @status not in ('pending', 'running', 'waiting') then clock_timestamp() end as ended) x`,
		postgres.Strict{"id": id, "status": status, "surface": surface, "flow": flow})
	return id
}

// Skill writes an enabled skill, or a skill that disabledBy has disabled.
func Skill(tb testing.TB, pool *pgxpool.Pool, name, description, disabledBy, reason string) {
	tb.Helper()
	pgtest.Value[string](tb, pool, `
		insert into agent_skills (name, description, tool_definition, handler, enabled, disabled_by, disabled_reason,
		  disabled_at, evidence)
		values ($1, $2, jsonb_build_object('name', $1::text, 'description', $2::text), 'builtin:x', $3 = '', $3, $4,
		        case when $3 <> '' then clock_timestamp() end, '{}')
		          returning id::text`, name, description, disabledBy, reason)
}

// Calls writes n calls of a skill.
func Calls(tb testing.TB, pool *pgxpool.Pool, name, status, message string, n int) {
	tb.Helper()
	pgtest.Exec(tb, pool, `
		insert into agent_activity (trace_id, surface, skill_name, status, error_class, error_message, duration_ms)
		select 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'heartbeat', $1, $2, case when $2 = 'error' then 'timeout' else '' end,
		       nullif($3, ''), 120
		  from generate_series(1, $4::int)`, name, status, message, n)
}
