package heartbeat

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Bounds of the decided calls in a prompt: their number, and the bytes of their arguments and of their result.
const (
	maxDecided     = 10
	maxDecidedText = 300
)

// decidedCall is an approved call that was made, or a rejected call.
type decidedCall struct {
	Skill     string          `json:"skill"`
	Arguments json.RawMessage `json:"arguments"`
	Rejected  bool            `json:"rejected"`
	Reason    string          `json:"reason"` // of the decision
	Status    string          `json:"status"` // of the call
	Output    json.RawMessage `json:"output"`
	Error     string          `json:"error"`
}

// decidedCalls reads the calls that the agent's heartbeats requested, and that ended or were rejected since the agent's
// last heartbeat prompt. It returns the newest, oldest first. A call that still runs is for a later prompt.
func (b *heartbeatRun) decidedCalls(ctx context.Context) ([]decidedCall, error) {
	span, _ := trace.From(ctx)
	return executions.Step(ctx, "decided", func(ctx context.Context) ([]decidedCall, error) {
		return postgres.Rows[decidedCall](ctx, b.Pool, "read decided calls", `
			with last as (
			  select coalesce(max(p.created_at), @oldest) as at from agent_activity p
			   where p.skill_name = 'heartbeat_prompt' and p.kind = 'phase' and p.status = 'success' and p.agent = @agent
			     and p.id >= lanekeeper.agent_uuid7_floor(@oldest)),
			asked as (
			  select a.* from agent_approvals a
			    join agent_executions x on x.id = a.execution_id
			    left join agent_activity n on n.id = a.activity_id
			   where a.status in ('consumed', 'rejected') and not a.parked and x.surface = 'heartbeat'
			     and coalesce(n.agent, x.agent) = @agent and a.id >= lanekeeper.agent_uuid7_floor(@oldest)),
			decided as (
			  select a.*, c.status as call, c.output, c.error_message,
			         coalesce(c.finished_at, a.consumed_at, a.decided_at) as ended_at
			    from asked a
			    left join lateral (
			      select y.status, y.output, y.error_message, y.finished_at from agent_activity y
			       where y.execution_id = case when a.status = 'consumed' then lanekeeper.agent_uuid(left(a.consumed_for, 36)) end
			         and y.id >= a.id
			         and (y.step = substr(a.consumed_for, 38)
			              or right(y.step, length(a.consumed_for) - 36) = '/' || substr(a.consumed_for, 38))
			       order by y.id desc limit 1) c on true),
			recent as (
			  select * from decided where call is distinct from 'running' and ended_at >= (select at from last)
			   order by ended_at desc limit @limit)
			select skill_name as skill, arguments, status = 'rejected' as rejected, left(reason, 1000) as reason,
			       coalesce(call, '') as status, output, coalesce(left(error_message, 1000), '') as error
			  from recent order by ended_at`,
			postgres.Strict{"agent": span.Agent, "oldest": time.Now().Add(-2 * approvals.Lifetime), "limit": maxDecided})
	})
}

// decidedContext describes decided calls for a prompt, one a line; "" without any.
func decidedContext(calls []decidedCall) string {
	if len(calls) == 0 {
		return ""
	}
	var p strings.Builder
	p.WriteString("Approved calls that were made, and rejected calls, since your last heartbeat:\n")
	for _, c := range calls {
		fmt.Fprintf(&p, "- %s %s: ", c.Skill, shortJSON(c.Arguments))
		switch {
		case c.Rejected:
			fmt.Fprintf(&p, "rejected, reason %s\n", shortJSON(c.Reason))
		case c.Error != "":
			fmt.Fprintf(&p, "approved, %s, error %s\n", c.Status, shortJSON(c.Error))
		default:
			fmt.Fprintf(&p, "approved, %s, result %s\n", c.Status, shortJSON(c.Output))
		}
	}
	return strings.TrimSpace(p.String())
}

// shortJSON encodes a value on one line, redacted and bounded.
func shortJSON(value any) string { return string(redact.JSON(value, maxDecidedText)) }
