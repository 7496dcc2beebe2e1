package engineroom

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
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
	Try                                   int    `db:"-"` // number of the attempt at its step, from 1
	ApprovalID, ApprovalStatus            string `db:"-"`
	TraceID                               string `db:"-"`
	InputCut, OutputCut, MessageCut       bool   `db:"-"`
}

// show formats complete JSON texts.
func (r *tracedRow) show(id string) {
	r.TraceID = id
	r.Input, r.InputCut = setOutWhole(r.Input, r.InputBytes)
	r.Output, r.OutputCut = setOutWhole(r.Output, r.OutputBytes)
	r.MessageCut = int64(len(r.Message)) < r.MessageBytes
}

// setOutWhole formats JSON if it is complete, and reports if it is not.
func setOutWhole(text string, size int64) (string, bool) {
	if int64(len(text)) < size {
		return text, true
	}
	return formatJSON(text), false
}

// tracedColumns are the columns of a tracedRow, texts cut at @text characters.
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

// rowsOf reads the activities of the waterfall and the tree: the first, the last, and the failed ones.
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
		"id": id, "first": traceFirst, "last": traceLast, "failed": traceFailed, "scan": traceSummed,
		"text": textEach(min(count, 350)),
	})
	return collectTraced(rows, err, id)
}

// pageOf reads a page of the table in order of the start, after a row.
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

// rowOf reads one activity of a trace, almost uncut; none if it is unknown.
func (room *Room) rowOf(ctx context.Context, id, row string) ([]tracedRow, error) {
	rows, err := room.Read.Query(ctx, `
		select `+tracedColumns+`
		  from agent_activity a where a.id = @row::text::uuid and a.trace_id = @id`,
		freshPlan, postgres.Strict{"id": id, "row": row, "text": traceWhole})
	return collectTraced(rows, err, id)
}

// collectTraced reads rows, numbers the attempts at each step, and formats the texts.
func collectTraced(rows pgx.Rows, err error, id string) ([]tracedRow, error) {
	list, err := postgres.Collect(rows, err, "list activities of trace", pgx.RowToStructByName[tracedRow])
	if err != nil {
		return nil, err
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

// acts reports a call of a skill or model, which can be retried.
func (r *tracedRow) acts() bool { return r.Kind == "call" || r.Kind == "model" }

// addApprovals adds each row's approval.
func (room *Room) addApprovals(ctx context.Context, id string, list []tracedRow) error {
	rows, err := room.Read.Query(ctx, `
		select p.id::text, coalesce(p.activity_id::text, '') as activity_id, coalesce(p.execution_id::text, '')
		  as execution_id,
		       p.step, p.status
		  from agent_approvals p where p.trace_id = @id order by p.id desc limit @most`,
		freshPlan, postgres.Strict{"id": id, "most": traceWaits})
	asked, err := postgres.Collect(rows, err, "list approvals of trace", pgx.RowToStructByName[struct {
		ID, ActivityID, ExecutionID, Step, Status string
	}])
	if err != nil {
		return err
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

// Sort is the row's sort, for texts and colours.
func (r *tracedRow) Sort() string { return rowNode(r).Sort }

// Label is the row's sort for people.
func (r *tracedRow) Label() string { return rowNode(r).Label() }

// Took is its duration in short form; empty while it runs, or without one.
func (r *tracedRow) Took() string { return rowNode(r).Took() }

// maxTreeLevel bounds the drawn depth of a tree. Deeper nodes show their depth.
const maxTreeLevel = 16

// tracedNode is a line of a trace: a run, an activity, a wait, or omitted rows.
type tracedNode struct {
	ID     string // of its element
	Sort   string // run, model, call, retry, phase, note, wait, lane or more: it selects a colour and a label
	Name   string
	Status string
	From   time.Time
	To     *time.Time // nil while it runs
	Level  int        // in the tree, from 0

	Run  *tracedRun
	Row  *tracedRow
	Wait *tracedWait

	// The sums of the node and its descendants. AtLeast marks incomplete sums.
	Tokens  int64
	CostUSD float64
	Errors  int64
	AtLeast bool

	Children []*tracedNode
	Bars     []tracedBar
	Left     int64 // omitted rows; -1 if not counted
	After    string

	parent *tracedNode
	placed bool
}

// sortLabels name the sorts of lines.
var sortLabels = map[string]string{
	"run": "run", "model": "model call", "call": "skill call", "retry": "retry", "phase": "phase", "note": "note",
	"wait": "wait", "lane": "lane wait", "more": "not shown",
}

// Label is the node's sort for people.
func (n *tracedNode) Label() string {
	if n.Sort == "retry" && n.Row != nil {
		return "retry " + strconv.Itoa(n.Row.Try)
	}
	return sortLabels[n.Sort]
}

// Depth is the drawn depth.
func (n *tracedNode) Depth() int { return min(n.Level, maxTreeLevel) }

// Deep reports a node below the drawn depth.
func (n *tracedNode) Deep() bool { return n.Level > maxTreeLevel }

// DurationMS is the duration; nil while it runs.
func (n *tracedNode) DurationMS() *int64 {
	if n.Row != nil && n.Row.DurationMS != nil {
		return n.Row.DurationMS
	}
	return between(n.From, n.To)
}

// Point reports a node without a duration.
func (n *tracedNode) Point() bool { return n.Sort == "note" || n.Sort == "more" }

// nodesOf makes nodes in order of their start.
func nodesOf(rows []tracedRow, runs []tracedRun, waits []tracedWait) []*tracedNode {
	var nodes []*tracedNode
	for i := range runs {
		r := &runs[i]
		r.Error, r.Summary = redact.Text(r.Error, 4000), redact.Text(r.Summary, 1000)
		nodes = append(nodes, &tracedNode{
			ID: "run-" + r.ID, Sort: "run", Name: r.Flow, Status: r.Status, From: r.CreatedAt, To: r.CompletedAt, Run: r,
		})
	}
	for i := range rows {
		nodes = append(nodes, rowNode(&rows[i]))
	}
	for i := range waits {
		nodes = append(nodes, waitNode(&waits[i]))
	}
	slices.SortStableFunc(nodes, func(a, b *tracedNode) int {
		return cmp.Or(a.From.Compare(b.From), cmp.Compare(rank(a), rank(b)))
	})
	return nodes
}

// rank orders a container before its children at equal times.
func rank(n *tracedNode) int {
	switch n.Sort {
	case "run":
		return 0
	case "phase":
		return 1
	}
	return 2
}

func rowNode(r *tracedRow) *tracedNode {
	n := &tracedNode{
		ID: "row-" + r.ID, Sort: r.Kind, Name: r.Skill, Status: r.Status, From: r.CreatedAt, To: r.FinishedAt, Row: r,
		Tokens: r.Tokens, CostUSD: r.CostUSD,
	}
	if r.Try > 1 {
		n.Sort = "retry"
	}
	if r.Status == "error" {
		n.Errors = 1
	}
	return n
}

func waitNode(w *tracedWait) *tracedNode {
	n := &tracedNode{
		ID: w.elementID(), Sort: "wait", Name: "for " + w.About(), Status: "done", From: w.From, To: w.To, Wait: w,
	}
	if w.Kind == "lane" {
		n.Sort = "lane"
	}
	if w.Kind == "lane" && w.Key != "" {
		n.Name = "for " + w.Key
	}
	switch {
	case w.To == nil:
		n.Status = "waiting"
	case w.TimedOut && w.Kind != "delay":
		n.Status = "timeout"
	}
	return n
}

// arrange builds the tree and returns its nodes in drawing order. An activity is below its parent, or else its run; a
// run is below the run that started it; a wait is below the phase of its step. Each node appears once, also with
// circular parents, which SQL writers can create.
func arrange(nodes []*tracedNode) []*tracedNode {
	byID := make(map[string]*tracedNode, len(nodes))
	phases := map[string][]*tracedNode{}
	for _, n := range nodes {
		byID[n.ID] = n
		if n.Row != nil && n.Row.Kind == "phase" && n.Row.ExecutionID != nil {
			phases[*n.Row.ExecutionID] = append(phases[*n.Row.ExecutionID], n)
		}
	}
	var top []*tracedNode
	for _, n := range nodes {
		above := n.above(byID, phases)
		if above == nil || above == n {
			top = append(top, n)
			continue
		}
		above.Children = append(above.Children, n)
	}
	order := make([]*tracedNode, 0, len(nodes))
	for _, n := range append(top, nodes...) { // unreached nodes form a circle; its first node breaks it
		order = n.walk(nil, order)
	}
	for _, n := range slices.Backward(order) {
		if n.parent != nil {
			n.parent.Tokens += n.Tokens
			n.parent.CostUSD += n.CostUSD
			n.parent.Errors += n.Errors
		}
	}
	return order
}

// above returns the parent of n; nil for none.
func (n *tracedNode) above(byID map[string]*tracedNode, phases map[string][]*tracedNode) *tracedNode {
	switch {
	case n.Run != nil && n.Run.ParentID != nil:
		return byID["run-"+*n.Run.ParentID]
	case n.Wait != nil:
		best := byID["run-"+n.Wait.ExecutionID]
		longest := 0
		for _, p := range phases[n.Wait.ExecutionID] {
			if step := p.Row.Step; len(step) > longest && strings.HasPrefix(n.Wait.Step, step+"/") {
				best, longest = p, len(step)
			}
		}
		return best
	case n.Row == nil:
		return nil
	}
	if n.Row.ParentID != nil {
		if above := byID["row-"+*n.Row.ParentID]; above != nil {
			return above
		}
	}
	return byID["run-"+text(n.Row.ExecutionID)]
}

// walk appends n and its unplaced descendants. It does not recurse, because a chain of parents may be long.
func (n *tracedNode) walk(parent *tracedNode, order []*tracedNode) []*tracedNode {
	type visit struct{ node, parent *tracedNode }
	stack := []visit{{n, parent}}
	for len(stack) > 0 {
		v := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if v.node.placed {
			continue
		}
		v.node.placed, v.node.parent = true, v.parent
		if v.parent != nil {
			v.node.Level = v.parent.Level + 1
		}
		order = append(order, v.node)
		for _, child := range slices.Backward(v.node.Children) {
			stack = append(stack, visit{child, v.node})
		}
	}
	return order
}

// branches returns the nodes as a tree of bounded depth: a deeper node is beside its parent.
func branches(order []*tracedNode) []*tracedNode {
	var top []*tracedNode
	for _, n := range order {
		n.Children = nil
		above := n.parent
		for above != nil && above.Level >= maxTreeLevel {
			above = above.parent
		}
		if above == nil {
			top = append(top, n)
		} else {
			above.Children = append(above.Children, n)
		}
	}
	return top
}

// Took is its duration in short form; empty while it runs, or without one.
func (n *tracedNode) Took() string {
	ms := n.DurationMS()
	if ms == nil || n.Point() {
		return ""
	}
	return human.Millis(*ms)
}

// Goes reports whether it is running.
func (n *tracedNode) Goes() bool { return n.To == nil && !n.Point() }

// Fine reports a state whose sign is enough.
func (n *tracedNode) Fine() bool {
	return n.Status == "success" || n.Status == "completed" || n.Status == "done"
}

// Unfolded reports whether the tree starts expanded here.
func (n *tracedNode) Unfolded() bool { return n.Level < 3 }

// Queued is a run's queue time; empty before the claim, or if it was short.
func (r tracedRun) Queued() string {
	if r.StartedAt == nil || r.StartedAt.Sub(r.CreatedAt) < time.Millisecond {
		return ""
	}
	return human.Duration(r.StartedAt.Sub(r.CreatedAt))
}
