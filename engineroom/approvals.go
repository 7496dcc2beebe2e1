package engineroom

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// maxApprovals bounds the approvals on a page.
const maxApprovals = 50

// approvalState selects approvals of a status in the database. expiry is "live" for those that have not expired, "over"
// for those that have, and empty for both: rows get the status expired only later.
type approvalState struct{ status, expiry string }

// approvalStates are the states of the rows behind each value of the filter.
var approvalStates = map[string][]approvalState{
	"pending": {{"pending", "live"}},
	"decided": {{"approved", "live"}, {"rejected", ""}, {"consumed", ""}},
	"expired": {{"expired", ""}, {"pending", "over"}, {"approved", "over"}},
	// The API has these values too; the page has no tab for them.
	"approved": {{"approved", "live"}},
	"rejected": {{"rejected", ""}},
	"consumed": {{"consumed", ""}},
}

// approvalsPage lists requested and decided approvals.
func (room *Room) approvalsPage() page {
	return page{
		path: "/approvals", name: "approvals", navLabel: "Approvals", title: "Approvals",
		open: func(_ context.Context, req *pageRequest) (string, error) {
			about, err := openApprovals(req)
			req.Subject = about
			return "Approvals", err
		},
		parts: []part{{name: "list", interval: 2 * time.Second, load: room.approvalsList}},
	}
}

// approvalFilter holds the parameters of the list.
type approvalFilter struct {
	Status   string
	BeforeAt time.Time // with BeforeID the last row of the previous page
	BeforeID string
}

func openApprovals(req *pageRequest) (filter approvalFilter, err error) {
	filter.Status, err = req.oneOf("status", "pending", "decided", "expired", "approved", "rejected", "consumed")
	before := req.Query.Get("before")
	if err != nil || before == "" {
		return filter, err
	}
	timeText, id, _ := strings.Cut(before, "_")
	at, parseErr := time.Parse(time.RFC3339Nano, timeText)
	if parseErr != nil || !uuidPattern.MatchString(id) {
		return filter, problem.BadParameter("before is %.60q, which is no place in this list; begin at its top", before)
	}
	filter.BeforeAt, filter.BeforeID = at, id
	return filter, nil
}

// maxListedArguments bounds the arguments of one approval in a list, in bytes. A list offers a decision only on
// arguments that it shows in full.
const maxListedArguments = 4000

// approvalRow is an approval in a list.
type approvalRow struct {
	ID, SkillName, TraceID, Flow, Status, DecidedBy, Reason, Arguments string
	Description                                                        string // of the skill
	Whole                                                              bool   // Arguments has them in full
	SkillRevision                                                      int
	Bytes                                                              int64
	RevisionNow                                                        *int // nil if the skill is deleted
	ExecutionID                                                        *string
	Parked                                                             bool
	DecidedAt, ConsumedAt                                              *time.Time
	ExpiresAt, CreatedAt                                               time.Time
}

// pendingApproval is the data of the template approval-card.
type pendingApproval struct {
	approvalRow
	Back string // the page to return to after the decision
}

// Changed reports that the skill has changed since the request, so an approval would be void.
func (a approvalRow) Changed() bool { return a.RevisionNow == nil || *a.RevisionNow != a.SkillRevision }

// Text formats the arguments, or their beginning.
func (a approvalRow) Text() string {
	if a.Whole {
		return formatJSON(a.Arguments)
	}
	return a.Arguments + "…"
}

// approvalCards returns the approvals as cards of a page.
func approvalCards(rows []approvalRow, back string) []pendingApproval {
	list := make([]pendingApproval, 0, len(rows))
	for _, a := range rows {
		list = append(list, pendingApproval{a, back})
	}
	return list
}

// approvalsList reads a page, the latest expiry first. It merges the rows of each state, which the index yields in
// order.
func (room *Room) approvalsList(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(approvalFilter)
	var all []approvalRow
	for _, state := range approvalStates[filter.Status] {
		rows, err := room.approvalsIn(ctx, filter, state)
		if err != nil {
			return nil, err
		}
		all = append(all, rows...)
	}
	slices.SortFunc(all, func(a, b approvalRow) int {
		return cmp.Or(b.ExpiresAt.Compare(a.ExpiresAt), strings.Compare(b.ID, a.ID))
	})
	list, links := paginate(req, all, maxApprovals, func(a approvalRow) string {
		return a.ExpiresAt.UTC().Format(time.RFC3339Nano) + "_" + a.ID
	})
	return map[string]any{
		"Approvals": list, "Cards": approvalCards(list, req.URL), "Status": filter.Status,
		"Links": links,
	}, nil
}

// selectApproval reads approvals a of executions e, with up to @listed bytes of arguments.
const selectApproval = `
		select a.id::text, a.skill_name, a.skill_revision, a.trace_id, a.execution_id::text, a.parked, a.decided_by,
		       left(a.reason, 300) as reason, a.decided_at, a.consumed_at, a.expires_at, a.created_at,
		       coalesce(e.flow, '') as flow,
		       case when @time::text = 'over' then 'expired' else a.status end as status, s.revision as revision_now,
		       octet_length(a.arguments::text)::bigint as bytes, left(a.arguments::text, @listed::int) as arguments,
		       octet_length(a.arguments::text) <= @listed::int as whole, coalesce(left(s.description, 200), '') as description
		  from agent_approvals a
		  left join agent_executions e on e.id = a.execution_id
		  left join agent_skills s on s.name = a.skill_name`

// approvalsIn reads approvals in one state. Without a cursor it begins at infinity, before the latest expiry.
func (room *Room) approvalsIn(ctx context.Context, filter approvalFilter, state approvalState) ([]approvalRow, error) {
	before := pgtype.Timestamptz{Time: filter.BeforeAt, InfinityModifier: pgtype.Infinity, Valid: true}
	if filter.BeforeID != "" {
		before.InfinityModifier = pgtype.Finite
	}
	return postgres.Rows[approvalRow](ctx, room.Read, "list approvals", selectApproval+`
		 where a.status = @status and (@time::text <> 'live' or a.expires_at > now())
		   and (@time::text <> 'over' or a.expires_at <= now())
		   and (a.expires_at, a.id) < (@before_at::timestamptz, @before_id::uuid)
		 order by a.expires_at desc, a.id desc limit @limit + 1`,
		customPlan, postgres.Strict{
			"status": state.status, "time": state.expiry, "limit": maxApprovals, "listed": maxListedArguments,
			"before_at": before,
			"before_id": cmp.Or(filter.BeforeID, "ffffffff-ffff-ffff-ffff-ffffffffffff"),
		})
}

// approvalsOf lists the pending approvals of a trace, which has a turn and its delegated tasks.
func (room *Room) approvalsOf(ctx context.Context, trace, back string) ([]pendingApproval, error) {
	rows, err := postgres.Rows[approvalRow](ctx, room.Pool, "list approvals of a turn", selectApproval+`
		 where a.execution_id in (select x.id from agent_executions x where x.trace_id = @trace)
		   and a.parked and a.status = 'pending' and a.expires_at > now()
		 order by a.id limit @limit`,
		postgres.Strict{"trace": trace, "limit": maxApprovals, "time": "live", "listed": maxListedArguments})
	return approvalCards(rows, back), err
}
