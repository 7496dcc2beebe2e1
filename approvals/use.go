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

// Use queues the consumption of an approval, as executions.Call.OnIntent. The transaction fails with an error for which
// [IsUnusable] is true if the approval cannot be used.
func Use(id, executionID, step string) func(b *pgx.Batch, _ string) {
	return func(b *pgx.Batch, _ string) {
		b.Queue(`select lanekeeper.use_agent_approval(@id, @execution_id, @step)`,
			postgres.Strict{"id": id, "execution_id": executionID, "step": step})
	}
}

// codeUnusable is the SQLSTATE of an approval that cannot be used.
const codeUnusable = "LK003"

// IsUnusable reports whether a call failed because its approval is used, undecided, rejected, expired or another
// execution's, or because the skill has changed since the request.
func IsUnusable(err error) bool { return postgres.IsCode(err, codeUnusable) }
