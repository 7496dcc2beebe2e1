package engineroom

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// spanNode is a line of a trace: a run, an activity, a wait, or omitted rows.
type spanNode struct {
	ID     string // id of the HTML element
	Type   string // run, model, call, retry, phase, note, wait, lane or more; selects a colour and a label
	Name   string
	Status string
	From   time.Time
	To     *time.Time // nil while the work runs
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
	Omitted  int64       // omitted rows; -1 if not counted
	After    string      // the id of the row before the omitted rows
	Hidden   bool        // the filter hides the line
	Lost     []lostClaim // claims of a run that ended without a wait or an end

	parent *spanNode
	placed bool // orderTree has placed the node in the order
}

// maxTreeLevel bounds the drawn depth of the lines. Deeper nodes show their depth.
const maxTreeLevel = 16

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

// DurationMS is the recorded duration, or otherwise the time from From to To; nil while the work runs.
func (n *spanNode) DurationMS() *int64 {
	if n.Row != nil && n.Row.DurationMS != nil {
		return n.Row.DurationMS
	}
	return millisBetween(n.From, n.To)
}

// Point reports whether the node has no duration.
func (n *spanNode) Point() bool { return n.Type == "note" || n.Type == "more" }

// Took is the duration in short form; empty while the work runs, or without a duration.
func (n *spanNode) Took() string {
	ms := n.DurationMS()
	if ms == nil || n.Point() {
		return ""
	}
	return human.Millis(*ms)
}

// Running reports whether the node's work is running.
func (n *spanNode) Running() bool { return n.To == nil && !n.Point() }

// Succeeded reports a success. Such a line shows no state, because its bar is enough.
func (n *spanNode) Succeeded() bool {
	return n.Status == "success" || n.Status == "completed" || n.Status == "done"
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

// nodesOf makes nodes in order of their start. It redacts the texts of runs; those of rows are redacted in the log.
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

// orderTree builds the tree and returns its nodes in drawing order, with the sums of their descendants. An activity is
// below its parent, or without a parent below its run. A run is below the run that started it. A wait is below the
// phase with the longest matching step, or below its run. Each node appears once, also with circular parents, which SQL
// writers can create.
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
