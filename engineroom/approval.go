package engineroom

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/principals"
)

// approvalPage shows one requested call in full, and accepts the decision.
func (room *Room) approvalPage() page {
	return page{
		path: "/approvals/{id}", name: "approval", title: "Approval", perViewer: true,
		open: room.openByID("approval", "Approval of ", `select skill_name from agent_approvals where id = @id`),
		parts: []part{
			{name: "decision", interval: 2 * time.Second, load: room.approvalDecision},
			{name: "arguments", load: room.approvalArguments},
			{name: "difference", load: room.approvalDifference},
			{name: "after", interval: 2 * time.Second, load: room.approvalAfter},
		},
	}
}

// maxArguments bounds the arguments shown in full, in bytes. The page offers no approval of longer arguments.
const maxArguments = 1 << 20

// approvalFacts is an approval with its skill's current state.
type approvalFacts struct {
	ID, SkillName, TraceID, Status, DecidedBy, Reason, ArgumentsHash string
	SkillRevision                                                    int
	Bytes                                                            int64
	RevisionNow                                                      *int // nil if the skill is deleted
	ExecutionID                                                      *string
	Parked                                                           bool
	DecidedAt, ConsumedAt                                            *time.Time
	ExpiresAt, CreatedAt                                             time.Time
	FourEyes                                                         bool
	RequestedBy                                                      []string
	RootOnly                                                         bool
	// The viewer may not decide: Own, because the viewer requested the call; Refused, because only root may decide.
	Own     bool `db:"-"`
	Refused bool `db:"-"`
}

// Pending reports an open decision.
func (a approvalFacts) Pending() bool { return a.Status == "pending" }

// Changed reports that the skill has changed since the request, so an approval would be void.
func (a approvalFacts) Changed() bool {
	return a.RevisionNow == nil || *a.RevisionNow != a.SkillRevision
}

// Whole reports that the page shows the arguments in full.
func (a approvalFacts) Whole() bool { return a.Bytes <= maxArguments }

func (room *Room) approvalDecision(ctx context.Context, req *pageRequest) (any, error) {
	approval, err := postgres.Row[approvalFacts](ctx, room.Read, "read approval", `
		select a.id::text, a.skill_name, a.skill_revision, a.trace_id, a.execution_id::text, a.parked, a.arguments_hash,
		       case when a.status in ('pending', 'approved') and a.expires_at <= clock_timestamp() then 'expired'
		            else a.status end as status,
		       case when a.decided_by <> '' then lanekeeper.agent_decider(
		              a.decided_by, a.decided_via, a.decided_token_id, a.decided_message)
		            else '' end as decided_by, a.four_eyes, a.requested_by,
		       a.four_eyes and a.requested_by = '{}' and not exists (
		         select from agent_executions x where x.id = a.execution_id and x.surface = 'chat') as root_only,
		       left(a.reason, 4000) as reason, a.decided_at, a.consumed_at, a.expires_at, a.created_at,
		       octet_length(a.arguments::text) as bytes, s.revision as revision_now
		  from agent_approvals a left join agent_skills s on s.name = a.skill_name where a.id = @id`,
		postgres.Strict{"id": req.Subject})
	principal := req.viewer                                               // a stream's ctx has no caller
	isRestricted := principal != nil && principal.Name != principals.Root // the page offers root every decision
	approval.Own = isRestricted && approval.FourEyes && slices.Contains(approval.RequestedBy, principal.Name)
	approval.Refused = isRestricted && approval.RootOnly
	return approval, err
}

// approvalArguments formats the stored arguments, unredacted, because the approver must see the exact call.
func (room *Room) approvalArguments(ctx context.Context, req *pageRequest) (any, error) {
	var text string
	var bytes int
	err := room.Read.QueryRow(ctx, `
		select case when octet_length(a.arguments::text) <= @limit then a.arguments::text
		            else left(a.arguments::text, 20000) end,
		       octet_length(a.arguments::text)
		  from agent_approvals a where a.id = @id`,
		postgres.Strict{"id": req.Subject, "limit": maxArguments}).Scan(&text, &bytes)
	if err != nil {
		return nil, fmt.Errorf("read arguments: %w", err)
	}
	whole := bytes <= maxArguments
	if whole {
		text = formatJSON(text)
	}
	return map[string]any{"Text": text, "Bytes": int64(bytes), "Whole": whole}, nil
}

// approvalDifference compares the arguments with those of the latest earlier approval of the same skill that was
// approved.
func (room *Room) approvalDifference(ctx context.Context, req *pageRequest) (any, error) {
	var last struct {
		ID, Before, After, By string
		At                    *time.Time
	}
	err := room.Read.QueryRow(ctx, `
		select p.id::text, p.decided_by, p.decided_at,
		       case when octet_length(p.arguments::text) <= @limit then p.arguments::text else '' end,
		       case when octet_length(a.arguments::text) <= @limit then a.arguments::text else '' end
		  from agent_approvals a
		 cross join lateral (
		    select x.id, x.decided_by, x.decided_at, x.arguments from agent_approvals x
		     where x.skill_name = a.skill_name and x.decided_at is not null and x.status <> 'rejected' and x.id < a.id
		     order by x.id desc limit 1) p
		 where a.id = @id`, postgres.Strict{"id": req.Subject, "limit": maxArguments}).
		Scan(&last.ID, &last.By, &last.At, &last.Before, &last.After)
	if errors.Is(err, pgx.ErrNoRows) {
		return map[string]any{"First": true}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the last approved arguments: %w", err)
	}
	shown := map[string]any{"ID": last.ID, "By": last.By, "At": last.At}
	if last.Before == "" || last.After == "" {
		shown["Long"] = true
		return shown, nil
	}
	lines, compared := compare(formatJSON(last.Before), formatJSON(last.After))
	shown["Lines"], shown["Long"] = lines, !compared
	return shown, nil
}

// approvalOutcome is the effect of a decision: the requesting execution, and the call that used the grant.
type approvalOutcome struct {
	Status                                    string
	Parked                                    bool
	ConsumedAt                                *time.Time
	ExecutionID, Flow, State, WaitingFor      string // of the requesting execution; empty if deleted
	Summary, Error, Surface                   string
	ThreadID                                  *string
	UsedBy, CallStatus, CallError, CallOutput string
	CallTrace, CallSkill                      string
	CallKind                                  activity.Kind
	CallMillis                                *int64
	AskedBy                                   string `db:"-"`
}

// approvalAfter reads what came of a decision: the execution that asked, and the call that used the approval.
func (room *Room) approvalAfter(ctx context.Context, req *pageRequest) (any, error) {
	outcome, err := postgres.Row[approvalOutcome](ctx, room.Read, "read outcome of decision", `
		select case when a.status in ('pending', 'approved') and a.expires_at <= clock_timestamp() then 'expired'
		            else a.status end as status, a.parked, a.consumed_at,
		       coalesce(e.id::text, '') as execution_id, coalesce(e.flow, '') as flow, coalesce(e.status, '') as state,
		       coalesce(e.waiting_for, '') as waiting_for, coalesce(left(e.result_summary, 2000), '') as summary,
		       coalesce(e.surface, '') as surface, e.thread_id,
		       coalesce(left(e.error_message, 2000), '') as error, coalesce(u.id::text, '') as used_by,
		       coalesce(c.status, '') as call_status, coalesce(left(c.error_message, 2000), '') as call_error,
		       coalesce(left(c.output::text, 4000), '') as call_output, coalesce(c.trace_id, '') as call_trace,
		       coalesce(c.kind, '') as call_kind, coalesce(c.skill_name, '') as call_skill, c.duration_ms as call_millis
		  from agent_approvals a
		  left join agent_executions e on e.id = a.execution_id
		  left join agent_executions u on u.id =
		       case when a.consumed_for ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12} '
		         then left(a.consumed_for, 36)::uuid end
		  left join lateral (
		    select x.status, x.kind, x.skill_name, x.error_message, x.output, x.trace_id, x.duration_ms from agent_activity x
		     where x.execution_id = u.id and x.id >= a.id
		       and (x.step = substr(a.consumed_for, 38)
		            or right(x.step, length(a.consumed_for) - 36) = '/' || substr(a.consumed_for, 38)) -- within a phase
		     order by x.id desc limit 1) c on true
		 where a.id = @id`, postgres.Strict{"id": req.Subject})
	if err != nil {
		return nil, err
	}
	outcome.Summary, outcome.Error = redact.Text(outcome.Summary, maxValue), redact.Text(outcome.Error, maxValue)
	hideResult(ctx, &outcome.Summary, outcome.Flow, outcome.Surface, outcome.ThreadID)
	hideJSON(activity.HidesTexts(ctx) && activity.HasTexts(outcome.CallKind, outcome.CallSkill), &outcome.CallOutput,
		new(int64))
	id, _ := req.Subject.(string)
	approval, err := approvals.Get(ctx, room.Read, id)
	outcome.AskedBy = approval.AskedBy()
	return outcome, err
}
