package approvals

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Grant returns the step of the approved call in the execution of ctx, and its executions.Call.OnIntent.
func Grant(ctx context.Context, id string) (step string, onIntent func(b *pgx.Batch, _ string)) {
	current, _ := executions.Current(ctx)
	step = "approved " + id
	return step, Use(id, current.ID, step)
}

// Use queues the consumption of an approval, as executions.Call.OnIntent. The transaction fails with SQLSTATE LK003 if
// the approval is used, rejected, expired or another execution's.
func Use(id, executionID, step string) func(b *pgx.Batch, _ string) {
	return func(b *pgx.Batch, _ string) {
		b.Queue(`select lanekeeper.use_agent_approval(@id, @execution_id, @step)`,
			postgres.Strict{"id": id, "execution_id": executionID, "step": step})
	}
}

// codeUsed is the SQLSTATE of an approval that cannot be used.
const codeUsed = "LK003"

// IsUsed reports whether a call failed because its approval is used, rejected or expired.
func IsUsed(err error) bool { return postgres.IsCode(err, codeUsed) }
