package activity

import (
	"context"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// Decision is the outcome of an activity's approval.
type Decision struct {
	ApprovalID string     `json:"approval_id"`
	Status     string     `json:"status"`     // approved, rejected or expired
	DecidedBy  string     `json:"decided_by"` // with how; empty if nobody decided
	Reason     string     `json:"reason"`
	DecidedAt  *time.Time `json:"decided_at"`
}

// String formats the decision with its person and reason.
func (d Decision) String() string {
	reason := d.Reason
	if d.DecidedBy != "" {
		reason = strings.TrimSuffix("by "+d.DecidedBy+": "+d.Reason, ": ")
	}
	return reason
}

// Decisions returns the outcomes of the approvals that activities requested, by the id of the activity. The row of such
// an activity keeps the status pending_approval. Undecided approvals are left out.
func Decisions(ctx context.Context, db postgres.DB, ids []string) (map[string]Decision, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	rows, err := postgres.Rows[struct {
		ActivityID string
		Decision
	}](ctx, db, "list decisions", `
		select a.id::text as activity_id, p.id::text as approval_id, s.status, p.decided_at, left(p.reason, 1000) as reason,
		       lanekeeper.agent_decider(p.decided_by, p.decided_via, p.decided_token_id, p.decided_message) as decided_by
		  from agent_activity a
		  join agent_approvals p on p.id = lanekeeper.agent_uuid(
		         coalesce(a.output ->> 'approval_id', a.output -> 'output' ->> 'approval_id')) -- of a call, of a run
		 cross join lateral (
		       select case when p.status = 'rejected' then 'rejected'
		                   when p.decided_at is not null then 'approved'
		                   when p.status = 'expired' or p.expires_at <= clock_timestamp() then 'expired' end as status) s
		 where a.id = any (@ids::text[]::uuid[]) and s.status is not null`,
		customPlan, postgres.Strict{"ids": ids})
	if err != nil {
		return nil, err
	}
	found := make(map[string]Decision, len(rows))
	for _, r := range rows {
		r.Reason, r.DecidedAt = redact.Text(r.Reason, 1000), utc(r.DecidedAt)
		found[r.ActivityID] = r.Decision
	}
	return found, nil
}

// DecisionsOf returns the decisions on rows; see [Decisions].
func DecisionsOf(ctx context.Context, db postgres.DB, rows []Row) (map[string]Decision, error) {
	var asked []string
	for _, row := range rows {
		if row.Status == PendingApproval {
			asked = append(asked, row.ID)
		}
	}
	return Decisions(ctx, db, asked)
}
