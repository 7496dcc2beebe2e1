package engineroom

import (
	"context"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// lostClaim is a claim of a run that ended without a wait or an end.
type lostClaim struct {
	ExecutionID string
	Claim       int64
	At          time.Time
	How, Worker string
}

// readLostClaims reads the lost claims of runs.
func (room *Room) readLostClaims(ctx context.Context, runs []traceRun) ([]lostClaim, error) {
	var reclaimed []string
	for _, r := range runs {
		if r.Claim > 1 {
			reclaimed = append(reclaimed, r.ID)
		}
	}
	if len(reclaimed) == 0 {
		return nil, nil
	}
	return postgres.Rows[lostClaim](ctx, room.Read, "list lost claims", `
		select l.execution_id::text, l.claim, l.at, l.how,
		       left(coalesce(nullif(l.worker_name, ''), l.worker::text, ''), 200) as worker
		  from agent_claims_lost l where l.execution_id = any (@runs::text[]::uuid[])
		 order by l.execution_id, l.claim limit @limit`, customPlan, postgres.Strict{"runs": reclaimed, "limit": traceWaits})
}

// markLost adds the lost claims to their runs, and marks orphaned activities as stopped or lost: no process works on
// them any more, though their rows say running until the sweep closes them.
func markLost(nodes []*spanNode, runs []traceRun, lost []lostClaim) {
	byID := map[string]*traceRun{}
	for i := range runs {
		byID[runs[i].ID] = &runs[i]
	}
	for _, n := range nodes {
		if n.Run != nil {
			for _, l := range lost {
				if l.ExecutionID == n.Run.ID {
					n.Lost = append(n.Lost, l)
				}
			}
		}
		if n.Row != nil && n.Row.Status == "running" && n.To == nil {
			n.markOrphan(byID[postgres.Deref(n.Row.ExecutionID)], lost)
		}
	}
}

// markOrphan marks a running activity that no process works on. run is nil for an activity outside the executions read.
func (n *spanNode) markOrphan(run *traceRun, lost []lostClaim) {
	switch {
	case run != nil && run.CompletedAt != nil:
		n.Status, n.To = stateStopped, run.CompletedAt
	case run != nil && run.Lost != nil:
		n.Status, n.To = stateLost, run.Lost
	case run != nil && n.Row.Kind != "phase" && n.Row.Claim != nil && *n.Row.Claim < run.Claim:
		// A later claim continues phases, but repeats calls.
		n.Status, n.To = stateLost, new(run.UpdatedAt)
		for _, l := range lost {
			if l.ExecutionID == run.ID && l.Claim == *n.Row.Claim {
				n.To = new(l.At)
			}
		}
	case !n.Row.Open:
		n.Status, n.To = stateStopped, new(n.From)
	}
	if n.To != nil && n.To.Before(n.From) { // the clocks of processes differ
		n.To = new(n.From)
	}
}
