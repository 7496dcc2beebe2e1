package engineroom

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

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

// approvalsList reads a page, the newest first.
func (room *Room) approvalsList(ctx context.Context, v *visit) (any, error) {
	want, _ := v.About.(approvalsWanted)
	var states, times []string
	for _, s := range approvalStates[want.Status] {
		states, times = append(states, s[0]), append(times, s[1])
	}
	var beforeAt *time.Time
	if want.BeforeID != "" {
		beforeAt = &want.BeforeAt
	}
	rows, err := room.Pool.Query(ctx, `
		select a.id::text, a.skill_name, a.skill_revision, a.trace_id, a.execution_id::text, a.parked, a.decided_by,
		       left(a.reason, 300) as reason, a.decided_at, a.consumed_at, a.expires_at, a.created_at, coalesce(e.flow, '') as flow,
		       case when s.time = 'over' then 'expired' else s.status end as status,
		       case when pg_column_size(a.arguments) < 10000 then left(a.arguments::text, 200) else '' end as arguments
		  from unnest(@states::text[], @times::text[]) s (status, time)
		 cross join lateral (
		    select * from agent_approvals x
		     where x.status = s.status
		       and x.expires_at > case when s.time = 'live' then now() else '-infinity' end
		       and x.expires_at <= case when s.time = 'over' then now() else 'infinity' end
		       and (x.expires_at, x.id) < (coalesce(@before_at::timestamptz, 'infinity'),
		                                   coalesce(nullif(@before_id::text, ''), 'ffffffff-ffff-ffff-ffff-ffffffffffff')::uuid)
		     order by x.expires_at desc, x.id desc limit @most + 1) a
		  left join agent_executions e on e.id = a.execution_id
		 order by a.expires_at desc, a.id desc limit @most + 1`,
		freshPlan, postgres.Strict{
			"states": states, "times": times, "before_at": beforeAt, "before_id": want.BeforeID, "most": mostApprovals,
		})
	if err != nil {
		return nil, fmt.Errorf("list approvals: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[approvalRow])
	if err != nil {
		return nil, fmt.Errorf("list approvals: %w", err)
	}
	list, more := onPage(all, mostApprovals)
	older := ""
	if more {
		last := list[len(list)-1]
		older = v.at("before", last.ExpiresAt.UTC().Format(time.RFC3339Nano)+"_"+last.ID)
	}
	return map[string]any{"Approvals": list, "Status": want.Status, "Older": older, "First": want.BeforeID == ""}, nil
}
