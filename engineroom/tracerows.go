package engineroom

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// tracedRow is an activity of a trace, its long values cut.
type tracedRow struct {
	ID                                    string
	ExecutionID, ParentID                 *string
	Claim                                 *int64
	Step, Kind, Agent, Surface, Skill     string
	SkillID                               *string
	Purpose, Status                       string
	Input, Output, Message                string
	InputBytes, OutputBytes, MessageBytes int64
	Class, Model                          string
	Prompt, Completion, Tokens, Unknown   int64
	Cached, CacheWrites                   int64
	Estimated                             bool
	CostUSD                               float64
	DurationMS                            *int64
	Key                                   string
	ThreadID                              *string
	Lane                                  string
	CreatedAt                             time.Time
	FinishedAt                            *time.Time
	Try                                   int    `db:"-"` // which attempt at its step it is, from 1
	ApprovalID, ApprovalStatus            string `db:"-"`
	TraceID                               string `db:"-"`
	InputCut, OutputCut, MessageCut       bool   `db:"-"`
}

// show prepares the texts: JSON that was read whole is set out in lines.
func (r *tracedRow) show(id string) {
	r.TraceID = id
	r.Input, r.InputCut = setOutWhole(r.Input, r.InputBytes)
	r.Output, r.OutputCut = setOutWhole(r.Output, r.OutputBytes)
	r.MessageCut = int64(len(r.Message)) < r.MessageBytes
}

// setOutWhole is JSON in lines, when all of it is there, and whether it is not.
func setOutWhole(text string, size int64) (string, bool) {
	if int64(len(text)) < size {
		return text, true
	}
	return setOut(text), false
}

// tracedColumns are those of a tracedRow, of which texts have at most @text characters.
const tracedColumns = `a.id::text, a.execution_id::text, a.parent_id::text, a.claim, left(a.step, 300) as step, a.kind,
	left(a.agent, 100) as agent, left(a.surface, 100) as surface, left(a.skill_name, 200) as skill, a.skill_id::text,
	left(a.purpose, 200) as purpose, a.status, coalesce(left(nullif(a.input::text, '{}'), @text::int), '') as input,
	coalesce(left(nullif(a.output::text, 'null'), @text::int), '') as output,
	left(coalesce(a.error_message, ''), @text::int) as message, octet_length(a.input::text)::bigint as input_bytes,
	coalesce(octet_length(a.output::text), 0)::bigint as output_bytes,
	coalesce(octet_length(a.error_message), 0)::bigint as message_bytes, left(a.error_class, 100) as class,
	left(a.model, 200) as model, lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens') as prompt,
	lanekeeper.agent_tokens(a.token_usage, 'cached_tokens') as cached, lanekeeper.agent_tokens(a.token_usage, 'cache_write_tokens') as cache_writes,
	lanekeeper.agent_tokens(a.token_usage, 'completion_tokens') as completion,
	lanekeeper.agent_tokens(a.token_usage, 'total_tokens') as tokens,
	lanekeeper.agent_tokens(a.token_usage, 'unknown_tokens') as unknown, coalesce(a.token_usage ->> 'estimated', '') = 'true' as estimated, a.cost_usd::float8 as cost_usd, a.duration_ms,
	left(a.idempotency_key, 200) as key, left(a.thread_id, 300) as thread_id, left(a.lane, 255) as lane, a.created_at, a.finished_at`

// rowsOf reads the activities that the waterfall and the tree are made of: the first and the last, and those that
// failed.
func (room *Room) rowsOf(ctx context.Context, id string, count int64) ([]tracedRow, error) {
	rows, err := room.Read.Query(ctx, `
		with picked as (
		  (select a.id from agent_activity a where a.trace_id = @id order by a.created_at, a.id limit @first)
		  union
		  (select a.id from agent_activity a where a.trace_id = @id order by a.created_at desc, a.id desc limit @last)
		  union
		  (select a.id from (select x.id, x.status, x.created_at from agent_activity x
		                      where x.trace_id = @id order by x.created_at limit @scan) a
		    where a.status in ('error', 'unknown') order by a.created_at limit @failed))
		select `+tracedColumns+`
		  from picked p join agent_activity a on a.id = p.id
		 order by a.created_at, a.id`, freshPlan, postgres.Strict{
		"id": id, "first": traceFirst, "last": traceLast, "failed": traceFailed, "scan": traceSummed, "text": textEach(min(count, 350)),
	})
	return collectTraced(rows, err, id)
}

// pageOf reads a page of the table: the rows after one, in the order in which they began.
func (room *Room) pageOf(ctx context.Context, id, after string) ([]tracedRow, error) {
	rows, err := room.Read.Query(ctx, `
		select `+tracedColumns+`
		  from agent_activity a
		 where a.trace_id = @id
		   and (@after::text = '' or a.created_at >= (select b.created_at from agent_activity b
		                                               where b.id = nullif(@after::text, '')::uuid and b.trace_id = @id))
		   and (@after::text = '' or (a.created_at, a.id) > (select b.created_at, b.id from agent_activity b
		                                               where b.id = nullif(@after::text, '')::uuid and b.trace_id = @id))
		 order by a.created_at, a.id limit @limit::int + 1`, freshPlan, postgres.Strict{
		"id": id, "after": after, "limit": tracePerPage, "text": textEach(tracePerPage),
	})
	return collectTraced(rows, err, id)
}

// rowOf reads one activity of a trace, nearly whole; none when it has no such one.
func (room *Room) rowOf(ctx context.Context, id, row string) ([]tracedRow, error) {
	rows, err := room.Read.Query(ctx, `
		select `+tracedColumns+`
		  from agent_activity a where a.id = @row::text::uuid and a.trace_id = @id`,
		freshPlan, postgres.Strict{"id": id, "row": row, "text": traceWhole})
	return collectTraced(rows, err, id)
}

// collectTraced reads rows, numbers the attempts at each step, and prepares what is shown.
func collectTraced(rows pgx.Rows, err error, id string) ([]tracedRow, error) {
	if err != nil {
		return nil, fmt.Errorf("list activities of trace: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[tracedRow])
	if err != nil {
		return nil, fmt.Errorf("list activities of trace: %w", err)
	}
	tries := map[[2]string]int{}
	for i := range list {
		r := &list[i]
		r.show(id)
		if r.Try = 1; r.ExecutionID != nil && r.Step != "" && r.acts() {
			tries[[2]string{*r.ExecutionID, r.Step}]++
			r.Try = tries[[2]string{*r.ExecutionID, r.Step}]
		}
	}
	return list, nil
}

// acts reports whether the row is a call, of a skill or a model, which can be made again.
func (r *tracedRow) acts() bool { return r.Kind == "call" || r.Kind == "model" }

// addApprovals notes at each row which leave was asked for it.
func (room *Room) addApprovals(ctx context.Context, id string, list []tracedRow) error {
	rows, err := room.Read.Query(ctx, `
		select p.id::text, coalesce(p.activity_id::text, '') as activity_id, coalesce(p.execution_id::text, '') as execution_id,
		       p.step, p.status
		  from agent_approvals p where p.trace_id = @id order by p.id desc limit @most`,
		freshPlan, postgres.Strict{"id": id, "most": traceWaits})
	if err != nil {
		return fmt.Errorf("list approvals of trace: %w", err)
	}
	asked, err := pgx.CollectRows(rows, pgx.RowToStructByName[struct {
		ID, ActivityID, ExecutionID, Step, Status string
	}])
	if err != nil {
		return fmt.Errorf("list approvals of trace: %w", err)
	}
	byRow, byStep := map[string]int{}, map[[2]string]int{}
	for i, p := range asked {
		byRow[p.ActivityID] = i
		byStep[[2]string{p.ExecutionID, p.Step}] = i
	}
	for i := range list {
		r := &list[i]
		at, has := byRow[r.ID]
		if !has && r.ExecutionID != nil && r.Step != "" {
			at, has = byStep[[2]string{*r.ExecutionID, r.Step}]
		}
		if has {
			r.ApprovalID, r.ApprovalStatus = asked[at].ID, asked[at].Status
		}
	}
	return nil
}

// Sort is the row's sort in words and colours.
func (r *tracedRow) Sort() string { return rowNode(r).Sort }

// Label is the row's sort for people.
func (r *tracedRow) Label() string { return rowNode(r).Label() }

// Took is its duration in few characters; empty while it goes on, and for what has none.
func (r *tracedRow) Took() string { return rowNode(r).Took() }
