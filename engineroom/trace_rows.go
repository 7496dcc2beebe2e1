package engineroom

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// spanRow is an activity of a trace, its long values cut.
type spanRow struct {
	ID                                    string
	ExecutionID, ParentID                 *string
	Claim                                 *int64
	Step, Kind, Agent, Surface, Skill     string
	SkillID                               *string
	Purpose, Status                       string
	CauseID                               *string
	LedTo                                 string // JSON: calls of each skill in a model's answer
	Open                                  bool   // agent_activity_open has the row
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
	Decision                              string `db:"-"` // decision on the requested approval, its author and reason
	TraceID                               string `db:"-"`
	InputCut, OutputCut, MessageCut       bool   `db:"-"`
}

// show formats complete JSON texts.
func (r *spanRow) show(id string) {
	r.TraceID = id
	r.Input, r.InputCut = formatWhole(r.Input, r.InputBytes)
	r.Output, r.OutputCut = formatWhole(r.Output, r.OutputBytes)
	r.MessageCut = int64(len(r.Message)) < r.MessageBytes
}

// formatWhole formats complete JSON, and reports incomplete JSON.
func formatWhole(text string, size int64) (string, bool) {
	if text == "" || int64(len(text)) < size {
		return text, int64(len(text)) < size
	}
	return formatJSON(text), false
}

// spanColumns are all columns of a spanRow, texts cut at @text characters.
const spanColumns = `a.id::text, a.execution_id::text, a.parent_id::text, a.claim, left(a.step, 300) as step, a.kind,
	left(a.agent, 100) as agent, left(a.surface, 100) as surface, left(a.skill_name, 200) as skill, a.skill_id::text,
	left(a.purpose, 200) as purpose, a.status, a.cause_id::text, left(a.led_to::text, 400) as led_to,
	a.status = 'running' and exists (select from agent_activity_open o where o.activity_id = a.id) as open,
	coalesce(left(nullif(a.input::text, '{}'), @text::int), '') as input,
	coalesce(left(nullif(a.output::text, 'null'), @text::int), '') as output,
	left(coalesce(a.error_message, ''), @text::int) as message, octet_length(a.input::text)::bigint as input_bytes,
	coalesce(octet_length(a.output::text), 0)::bigint as output_bytes,
	coalesce(octet_length(a.error_message), 0)::bigint as message_bytes, left(a.error_class, 100) as class,
	left(a.model, 200) as model, lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens') as prompt,
	lanekeeper.agent_tokens(a.token_usage, 'cached_tokens') as cached,
	lanekeeper.agent_tokens(a.token_usage, 'cache_write_tokens') as cache_writes,
	lanekeeper.agent_tokens(a.token_usage, 'completion_tokens') as completion,
	lanekeeper.agent_tokens(a.token_usage, 'total_tokens') as tokens,
	lanekeeper.agent_tokens(a.token_usage, 'unknown_tokens') as unknown,
	coalesce(a.token_usage ->> 'estimated', '') = 'true' as estimated, a.cost_usd::float8 as cost_usd, a.duration_ms,
	left(a.idempotency_key, 200) as key, left(a.thread_id, 300) as thread_id, left(a.lane, 255) as lane, a.created_at,
	a.finished_at`

// lineColumns are the columns of a line of the waterfall, without those that only the panel shows.
const lineColumns = `a.id::text, a.execution_id::text, a.parent_id::text, a.claim, left(a.step, 300) as step, a.kind,
	left(a.skill_name, 200) as skill, left(a.purpose, 200) as purpose, a.status,
	case when a.kind = 'model' then left(a.led_to::text, 400) else '' end as led_to,
	a.status = 'running' and exists (select from agent_activity_open o where o.activity_id = a.id) as open,
	left(coalesce(a.error_message, ''), 300) as message, left(a.error_class, 100) as class, left(a.model, 200) as model,
	case when a.kind = 'model' then lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens') else 0 end as prompt,
	case when a.kind = 'model' then lanekeeper.agent_tokens(a.token_usage, 'completion_tokens') else 0 end as completion,
	case when a.kind = 'model' then lanekeeper.agent_tokens(a.token_usage, 'total_tokens') else 0 end as tokens,
	a.cost_usd::float8 as cost_usd, a.duration_ms, left(a.surface, 100) as surface, left(a.lane, 255) as lane,
	a.created_at, a.finished_at`

// firstRowsOf reads the first activities of a trace: as many as a page can draw, and one more if more exist.
func (room *Room) firstRowsOf(ctx context.Context, id string) ([]spanRow, error) {
	rows, err := room.Read.Query(ctx, `
		select `+lineColumns+`
		  from agent_activity a where a.trace_id = @id order by a.created_at, a.id limit @limit`,
		postgres.Strict{"id": id, "limit": traceFirst + traceLast + 1})
	return room.collectSpans(ctx, rows, err, id)
}

// rowsOf reads the activities of the waterfall: all of them, or only the first, the last and the failed activities.
func (room *Room) rowsOf(ctx context.Context, h *traceHead) ([]spanRow, error) {
	if h.whole {
		return h.rows, nil
	}
	rows, err := room.Read.Query(ctx, `
		with picked as (
		  (select a.id from agent_activity a where a.trace_id = @id order by a.created_at, a.id limit @first)
		  union
		  (select a.id from agent_activity a where a.trace_id = @id order by a.created_at desc, a.id desc limit @last)
		  union
		  (select a.id from (select x.id, x.status, x.created_at from agent_activity x
		                      where x.trace_id = @id order by x.created_at limit @scan) a
		    where a.status in ('error', 'unknown') order by a.created_at limit @failed))
		select `+lineColumns+`
		  from picked p join agent_activity a on a.id = p.id
		 order by a.created_at, a.id`, customPlan, postgres.Strict{
		"id": h.ID, "first": traceFirst, "last": traceLast, "failed": traceFailed, "scan": traceSummed,
	})
	return room.collectSpans(ctx, rows, err, h.ID)
}

// pageOf reads a page of the table in order of the start, after a row.
func (room *Room) pageOf(ctx context.Context, id, after string) ([]spanRow, error) {
	rows, err := room.Read.Query(ctx, `
		select `+lineColumns+`
		  from agent_activity a
		 where a.trace_id = @id
		   and (@after::text = '' or a.created_at >= (select b.created_at from agent_activity b
		                                               where b.id = nullif(@after::text, '')::uuid and b.trace_id = @id))
		   and (@after::text = '' or (a.created_at, a.id) > (select b.created_at, b.id from agent_activity b
		                                               where b.id = nullif(@after::text, '')::uuid and b.trace_id = @id))
		 order by a.created_at, a.id limit @limit::int + 1`, customPlan, postgres.Strict{
		"id": id, "after": after, "limit": tracePerPage,
	})
	return room.collectSpans(ctx, rows, err, id)
}

// rowOf reads one activity of a trace, with its texts cut at maxSpanText. It returns no row for an unknown activity.
func (room *Room) rowOf(ctx context.Context, id, row string) ([]spanRow, error) {
	rows, err := room.Read.Query(ctx, `
		select `+spanColumns+`
		  from agent_activity a where a.id = @row::text::uuid and a.trace_id = @id`,
		customPlan, postgres.Strict{"id": id, "row": row, "text": maxSpanText})
	return room.collectSpans(ctx, rows, err, id)
}

// collectSpans reads rows, numbers the attempts at each step, and formats the texts. A request for approval gets the
// status of the decision.
func (room *Room) collectSpans(ctx context.Context, rows pgx.Rows, err error, id string) ([]spanRow, error) {
	list, err := postgres.Collect(rows, err, "list activities of trace", pgx.RowToStructByNameLax[spanRow])
	if err != nil {
		return nil, err
	}
	attempts := map[[2]string]int{}
	var approvalIDs []string
	for i := range list {
		r := &list[i]
		hide := activity.HidesTexts(ctx) && activity.HasTexts(activity.Kind(r.Kind), r.Skill)
		hideJSON(hide, &r.Input, &r.InputBytes)
		hideJSON(hide, &r.Output, &r.OutputBytes)
		r.show(id)
		if r.Status == string(activity.PendingApproval) {
			approvalIDs = append(approvalIDs, r.ID)
		}
		if r.Try = 1; r.ExecutionID != nil && r.Step != "" && r.isCall() {
			attempts[[2]string{*r.ExecutionID, r.Step}]++
			r.Try = attempts[[2]string{*r.ExecutionID, r.Step}]
		}
	}
	decisions, err := activity.Decisions(ctx, room.Read, approvalIDs)
	for i := range list {
		if d, ok := decisions[list[i].ID]; ok {
			list[i].Status, list[i].Decision = d.Status, d.String()
		}
	}
	return list, err
}

// isCall reports whether the row is a call of a skill or a model, which a process can retry.
func (r *spanRow) isCall() bool { return r.Kind == "call" || r.Kind == "model" }

// addApprovals adds each row's approval.
func (room *Room) addApprovals(ctx context.Context, id string, list []spanRow) error {
	rows, err := room.Read.Query(ctx, `
		select p.id::text, coalesce(p.activity_id::text, '') as activity_id,
		       coalesce(p.execution_id::text, '') as execution_id, p.step, p.status
		  from agent_approvals p where p.trace_id = @id order by p.id desc limit @limit`,
		customPlan, postgres.Strict{"id": id, "limit": traceWaits})
	approvals, err := postgres.Collect(rows, err, "list approvals of trace", pgx.RowToStructByName[struct {
		ID, ActivityID, ExecutionID, Step, Status string
	}])
	if err != nil {
		return err
	}
	byRow, byStep := map[string]int{}, map[[2]string]int{}
	for i, p := range approvals {
		byRow[p.ActivityID] = i
		byStep[[2]string{p.ExecutionID, p.Step}] = i
	}
	for i := range list {
		r := &list[i]
		at, ok := byRow[r.ID]
		if !ok && r.ExecutionID != nil && r.Step != "" {
			at, ok = byStep[[2]string{*r.ExecutionID, r.Step}]
		}
		if ok {
			r.ApprovalID, r.ApprovalStatus = approvals[at].ID, approvals[at].Status
		}
	}
	return nil
}

// Type is the row's kind, for texts and colours.
func (r *spanRow) Type() string { return rowNode(r).Type }

// Name is the purpose of a model call, and the skill of any other row.
func (r *spanRow) Name() string { return rowNode(r).Name }

// ForkURL is the form that forks the execution from the row's step; empty for none.
func (r *spanRow) ForkURL() string {
	if r.ExecutionID == nil || r.Step == "" || len(r.Step) > maxFilterBytes {
		return ""
	}
	return "/executions/" + *r.ExecutionID + "?from=" + url.QueryEscape(r.Step) + "#fork"
}

// Label is the row's kind as text.
func (r *spanRow) Label() string { return rowNode(r).Label() }

// Took is its duration in short form; empty while it runs, or without one.
func (r *spanRow) Took() string { return rowNode(r).Took() }

// maxTreeLevel bounds the drawn depth of the lines. Deeper nodes show their depth.
const maxTreeLevel = 16

// spanNode is a line of a trace: a run, an activity, a wait, or omitted rows.
type spanNode struct {
	ID     string // id of the HTML element
	Type   string // run, model, call, retry, phase, note, wait, lane or more; selects a colour and a label
	Name   string
	Status string
	From   time.Time
	To     *time.Time // nil while it runs
	Level  int        // in the tree, from 0

	Run  *traceRun
	Row  *spanRow
	Wait *spanWait

	// The sums of the node and its descendants. AtLeast marks incomplete sums.
	Tokens  int64
	CostUSD float64
	Errors  int64
	AtLeast bool

	Children []*spanNode
	Bars     []spanBar
	Omitted  int64 // omitted rows; -1 if not counted
	After    string
	Hidden   bool        // the filter hides it
	Lost     []lostClaim // claims of a run that ended without a wait or an end

	parent *spanNode
	placed bool
}

// kindLabels name the kinds of lines.
var kindLabels = map[string]string{
	"run": "run", "model": "model call", "call": "skill call", "retry": "retry", "phase": "phase", "note": "note",
	"wait": "wait", "lane": "lane wait", "more": "not shown", "queue": "in the queue", "failed": "failed",
}

// Label is the node's kind as text, with the round of its loop.
func (n *spanNode) Label() string {
	label, step := kindLabels[n.Type], ""
	switch {
	case n.Row != nil:
		step = n.Row.Step
	case n.Wait != nil:
		step = n.Wait.Step
	}
	if n.Type == "retry" && n.Row != nil {
		label = "attempt " + strconv.Itoa(n.Row.Try)
	}
	if round := activity.Round(step); round != "" {
		label += ", round " + round
	}
	return label
}

// Depth is the drawn depth.
func (n *spanNode) Depth() int { return min(n.Level, maxTreeLevel) }

// Deep reports whether the node is below the drawn depth.
func (n *spanNode) Deep() bool { return n.Level > maxTreeLevel }

// DurationMS is the duration; nil while it runs.
func (n *spanNode) DurationMS() *int64 {
	if n.Row != nil && n.Row.DurationMS != nil {
		return n.Row.DurationMS
	}
	return millisBetween(n.From, n.To)
}

// Point reports whether the node has no duration.
func (n *spanNode) Point() bool { return n.Type == "note" || n.Type == "more" }

// nodesOf makes nodes in order of their start.
func nodesOf(rows []spanRow, runs []traceRun, waits []spanWait) []*spanNode {
	var nodes []*spanNode
	for i := range runs {
		r := &runs[i]
		r.Error, r.Summary = redact.Text(r.Error, 4000), redact.Text(r.Summary, 1000)
		nodes = append(nodes, &spanNode{
			ID: "run-" + r.ID, Type: "run", Name: r.Flow, Status: r.State(), From: r.CreatedAt, To: r.CompletedAt, Run: r,
		})
		if r.Lost != nil {
			nodes[len(nodes)-1].To = r.Lost
		}
	}
	for i := range rows {
		nodes = append(nodes, rowNode(&rows[i]))
	}
	for i := range waits {
		nodes = append(nodes, waitNode(&waits[i]))
	}
	slices.SortStableFunc(nodes, func(a, b *spanNode) int {
		return cmp.Or(a.From.Compare(b.From), cmp.Compare(containerRank(a), containerRank(b)))
	})
	return nodes
}

// containerRank orders a container before its children at equal times.
func containerRank(n *spanNode) int {
	switch n.Type {
	case "run":
		return 0
	case "phase":
		return 1
	}
	return 2
}

func rowNode(r *spanRow) *spanNode {
	n := &spanNode{
		ID: "row-" + r.ID, Type: r.Kind, Name: r.Skill, Status: r.Status, From: r.CreatedAt, To: r.FinishedAt, Row: r,
		Tokens: r.Tokens, CostUSD: r.CostUSD,
	}
	if r.Kind == "model" {
		n.Name = modelName(r.Purpose, r.LedTo)
	}
	if r.Try > 1 {
		n.Type = "retry"
	}
	if r.Status == "error" {
		n.Errors = 1
	}
	return n
}

func waitNode(w *spanWait) *spanNode {
	n := &spanNode{
		ID: w.elementID(), Type: "wait", Name: "for " + w.About(), Status: "done", From: w.From, To: w.To, Wait: w,
	}
	if w.Kind == "lane" {
		n.Type = "lane"
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

// orderTree builds the tree and returns its nodes in drawing order. An activity is below its parent, or without a
// parent below its run. A run is below the run that started it. A wait is below the phase of its step. Each node
// appears once, also with circular parents, which SQL writers can create.
func orderTree(nodes []*spanNode) []*spanNode {
	byID := make(map[string]*spanNode, len(nodes))
	phases := map[string][]*spanNode{}
	for _, n := range nodes {
		byID[n.ID] = n
		if n.Row != nil && n.Row.Kind == "phase" && n.Row.ExecutionID != nil {
			phases[*n.Row.ExecutionID] = append(phases[*n.Row.ExecutionID], n)
		}
	}
	var roots []*spanNode
	for _, n := range nodes {
		parent := n.findParent(byID, phases)
		if parent == nil || parent == n {
			roots = append(roots, n)
			continue
		}
		parent.Children = append(parent.Children, n)
	}
	order := make([]*spanNode, 0, len(nodes))
	for _, n := range append(roots, nodes...) { // unreached nodes form a circle; its first node breaks it
		order = n.appendTree(nil, order)
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

// findParent returns the parent of n; nil for none.
func (n *spanNode) findParent(byID map[string]*spanNode, phases map[string][]*spanNode) *spanNode {
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
		if parent := byID["row-"+*n.Row.ParentID]; parent != nil {
			return parent
		}
	}
	return byID["run-"+postgres.Deref(n.Row.ExecutionID)]
}

// appendTree appends n and its unplaced descendants. It does not recurse, because a chain of parents may be long.
func (n *spanNode) appendTree(parent *spanNode, order []*spanNode) []*spanNode {
	type visit struct{ node, parent *spanNode }
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

// Took is its duration in short form; empty while it runs, or without one.
func (n *spanNode) Took() string {
	ms := n.DurationMS()
	if ms == nil || n.Point() {
		return ""
	}
	return human.Millis(*ms)
}

// Running reports whether the node's work is running.
func (n *spanNode) Running() bool { return n.To == nil && !n.Point() }

// Succeeded reports a state whose sign is enough.
func (n *spanNode) Succeeded() bool {
	return n.Status == "success" || n.Status == "completed" || n.Status == "done"
}

// Queued is a run's queue time; empty before the claim, or if it was short.
func (r traceRun) Queued() string {
	if r.StartedAt == nil || r.StartedAt.Sub(r.CreatedAt) < time.Millisecond {
		return ""
	}
	return human.Duration(r.StartedAt.Sub(r.CreatedAt))
}

// purposeNames name model calls by the purpose that the caller records.
var purposeNames = map[string]string{
	"chat": "answer the visitor", "operate": "answer the admin", "summary": "compress the context",
	"chat_summary": "compress the context", "advance_plan": "advance the plan", "reflect": "reflect",
	"heartbeat_prompt": "follow the heartbeat's prompt",
}

// modelName names a model call by the tools that its answer calls, or by the recorded purpose if it calls none.
func modelName(purpose, ledTo string) string {
	var calls map[string]any
	if json.Unmarshal([]byte(ledTo), &calls) == nil && len(calls) > 0 {
		names := slices.Sorted(maps.Keys(calls))
		for i, name := range names {
			if n, ok := calls[name].(float64); ok && n > 1 {
				names[i] = name + " ×" + strconv.FormatFloat(n, 'f', 0, 64)
			}
		}
		if len(names) == 1 {
			return "choose a tool: " + names[0]
		}
		return "choose tools: " + strings.Join(names, ", ")
	}
	if name, known := purposeNames[purpose]; known {
		return name
	}
	kind, name, _ := strings.Cut(purpose, " ")
	switch {
	case purpose == "":
		return "ask the model"
	case kind == "flow" || kind == "automation" || kind == "webhook":
		return "work on " + kind + " " + name
	}
	return strings.ReplaceAll(purpose, "_", " ")
}

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

// markLost marks orphaned activities as stopped or lost: no process works on them any more. Their rows say running
// until the sweep closes them.
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
		if n.Row == nil || n.Row.Status != "running" || n.To != nil {
			continue
		}
		run := byID[postgres.Deref(n.Row.ExecutionID)]
		switch {
		case run != nil && run.CompletedAt != nil:
			n.Status, n.To = stateStopped, run.CompletedAt
		case run != nil && run.Lost != nil:
			n.Status, n.To = stateLost, run.Lost
		case run != nil && n.Row.Kind != "phase" && n.Row.Claim != nil && *n.Row.Claim < run.Claim:
			n.Status, n.To = stateLost, new(run.UpdatedAt)
			for _, l := range lost {
				if l.ExecutionID == run.ID && l.Claim == *n.Row.Claim {
					n.To = new(l.At)
				}
			}
		case !n.Row.Open:
			n.Status, n.To = stateStopped, new(n.From)
		}
		if n.To != nil && n.To.Before(n.From) {
			n.To = new(n.From)
		}
	}
}

// Failed reports a failure, which the page draws red.
func (n *spanNode) Failed() bool {
	switch n.Status {
	case "error", "failed", "timeout":
		return true
	}
	return false
}

// Halted reports whether the work ended without a result: it was cancelled or stopped, or its outcome is unknown.
func (n *spanNode) Halted() bool {
	switch n.Status {
	case "cancelled", "unknown", stateStopped, stateLost:
		return true
	}
	return false
}

// Message is the beginning of the node's error, or the author of a decision.
func (n *spanNode) Message() string {
	switch {
	case n.Row != nil:
		return cmp.Or(n.Row.Message, n.Row.Decision)
	case n.Run != nil && n.Failed():
		return n.Run.Error
	}
	return ""
}

// Span is the value of the parameter span that selects the node.
func (n *spanNode) Span() string {
	switch {
	case n.Row != nil:
		return n.Row.ID
	case n.Run != nil:
		return n.Run.ID
	}
	return n.ID
}
