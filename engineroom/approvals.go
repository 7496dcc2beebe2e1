package engineroom

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// mostApprovals is how many approvals a page of the list has.
const mostApprovals = 50

// approvalStates are the states of the rows behind each tab. "live" has to be before its time is over, "over" after.
var approvalStates = map[string][][2]string{
	"pending": {{"pending", "live"}},
	"decided": {{"approved", "live"}, {"rejected", ""}, {"consumed", ""}},
	"expired": {{"expired", ""}, {"pending", "over"}, {"approved", "over"}},
	// What the API calls the states; they have no tab.
	"approved": {{"approved", "live"}},
	"rejected": {{"rejected", ""}},
	"consumed": {{"consumed", ""}},
}

// approvalsPage lists what needs an admin's leave, and what was said.
func (room *Room) approvalsPage() page {
	return page{
		path: "/approvals", name: "approvals", nav: "Approvals", title: "Approvals",
		open: func(_ context.Context, v *visit) (string, error) {
			about, err := approvalsAsked(v)
			v.About = about
			return "Approvals", err
		},
		parts: []part{{name: "list", every: 2 * time.Second, load: room.approvalsList}},
	}
}

// approvalsWanted is what the address of the list asks for.
type approvalsWanted struct {
	Status   string
	BeforeAt time.Time // with BeforeID the last row of the page before
	BeforeID string
}

func approvalsAsked(v *visit) (want approvalsWanted, err error) {
	want.Status, err = v.oneOf("status", "pending", "decided", "expired", "approved", "rejected", "consumed")
	before := v.Query.Get("before")
	if err != nil || before == "" {
		return want, err
	}
	moment, id, _ := strings.Cut(before, "_")
	at, wrong := time.Parse(time.RFC3339Nano, moment)
	if wrong != nil || !uuidShape.MatchString(id) {
		return want, problem.New(http.StatusBadRequest, "before is %.60q, which is no place in this list; begin at its top", before).
			Kind("bad-parameter", "Bad filter")
	}
	want.BeforeAt, want.BeforeID = at, id
	return want, nil
}

// approvalRow is an approval in the list.
type approvalRow struct {
	ID, SkillName, TraceID, Flow, Status, DecidedBy, Reason, Arguments string
	SkillRevision                                                      int
	ExecutionID                                                        *string
	Parked                                                             bool
	DecidedAt, ConsumedAt                                              *time.Time
	ExpiresAt, CreatedAt                                               time.Time
}

// approvalsList reads a page, the newest first. Each state has its place in the index; what they give is merged.
func (room *Room) approvalsList(ctx context.Context, v *visit) (any, error) {
	want, _ := v.About.(approvalsWanted)
	var all []approvalRow
	for _, state := range approvalStates[want.Status] {
		rows, err := room.approvalsIn(ctx, want, state[0], state[1])
		if err != nil {
			return nil, err
		}
		all = append(all, rows...)
	}
	slices.SortFunc(all, func(a, b approvalRow) int {
		return cmp.Or(b.ExpiresAt.Compare(a.ExpiresAt), strings.Compare(b.ID, a.ID))
	})
	list, more := onPage(all, mostApprovals)
	older := ""
	if more {
		last := list[len(list)-1]
		older = v.at("before", last.ExpiresAt.UTC().Format(time.RFC3339Nano)+"_"+last.ID)
	}
	return map[string]any{"Approvals": list, "Status": want.Status, "Older": older, "First": want.BeforeID == ""}, nil
}

// approvalsIn reads approvals in one state, whose time is over, is not, or (empty) does not matter.
func (room *Room) approvalsIn(ctx context.Context, want approvalsWanted, status, times string) ([]approvalRow, error) {
	before := pgtype.Timestamptz{Time: want.BeforeAt, InfinityModifier: pgtype.Infinity, Valid: true}
	if want.BeforeID != "" {
		before.InfinityModifier = pgtype.Finite
	}
	rows, err := room.Read.Query(ctx, `
		select a.id::text, a.skill_name, a.skill_revision, a.trace_id, a.execution_id::text, a.parked, a.decided_by,
		       left(a.reason, 300) as reason, a.decided_at, a.consumed_at, a.expires_at, a.created_at, coalesce(e.flow, '') as flow,
		       case when @time::text = 'over' then 'expired' else a.status end as status,
		       case when pg_column_size(a.arguments) < 10000 then left(a.arguments::text, 200) else '' end as arguments
		  from agent_approvals a left join agent_executions e on e.id = a.execution_id
		 where a.status = @status and (@time::text <> 'live' or a.expires_at > now()) and (@time::text <> 'over' or a.expires_at <= now())
		   and (a.expires_at, a.id) < (@before_at::timestamptz, @before_id::uuid)
		 order by a.expires_at desc, a.id desc limit @most + 1`,
		freshPlan, postgres.Strict{
			"status": status, "time": times, "before_at": before, "most": mostApprovals,
			"before_id": cmp.Or(want.BeforeID, "ffffffff-ffff-ffff-ffff-ffffffffffff"),
		})
	if err != nil {
		return nil, fmt.Errorf("list approvals: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[approvalRow])
	if err != nil {
		return nil, fmt.Errorf("list approvals: %w", err)
	}
	return list, nil
}
