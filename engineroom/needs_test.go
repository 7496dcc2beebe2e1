package engineroom

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// The overview asks what waits for a person again and again, and each table but that of skills grows. Each branch has an
// index that has only what waits, so the plan names it as soon as reading the whole table is made dear.
func TestWhatNeedsAPersonIsFoundByIndexes(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), `set local enable_seqscan = off`); err != nil {
		t.Fatal(err)
	}
	rows, err := tx.Query(t.Context(), `explain (costs off) `+needsSQL, pgx.QueryExecModeSimpleProtocol, postgres.Strict{"beyond": beyond, "most": mostOfAKind})
	if err != nil {
		t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	plan := strings.Join(lines, "\n")
	for _, index := range []string{
		"agent_approvals_state", "agent_requests_pending", "agent_objectives_proposed", "agent_memory_conflicts_status",
		"agent_executions_waiting_until", "agent_automation_runs_dead", "agent_webhook_deliveries_open", "agent_webhook_outbox_dead",
		"agent_messages_failed",
	} {
		if !strings.Contains(plan, index+" ") && !strings.Contains(plan, index+"\n") {
			t.Errorf("the plan does without %s", index)
		}
	}
	whole := slices.Compact(regexp.MustCompile(`Seq Scan on \w+`).FindAllString(plan, -1))
	if !slices.Equal(whole, []string{"Seq Scan on agent_skills"}) {
		t.Errorf("read as a whole: %q", whole)
	}
}
