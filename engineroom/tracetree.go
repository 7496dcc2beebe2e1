package engineroom

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// deepestLevel is how deep a tree is drawn: what lies deeper stands at that depth, and says how deep it is.
const deepestLevel = 16

// tracedNode is a line of a trace: a run, an activity, a wait, or rows that are left out.
type tracedNode struct {
	ID     string // of its element
	Sort   string // run, model, call, retry, phase, note, wait, lane or more: it has a colour and a label
	Name   string
	Status string
	From   time.Time
	To     *time.Time // nil while it goes on
	Level  int        // in the tree, from 0

	Run  *tracedRun
	Row  *tracedRow
	Wait *tracedWait

	// What it and all below it add up to. AtLeast says that not all of it was read.
	Tokens  int64
	CostUSD float64
	Errors  int64
	AtLeast bool

	Children []*tracedNode
	Bars     []tracedBar
	Left     int64 // rows left out here; -1 when they were not counted
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

// Depth is how deep it is drawn.
func (n *tracedNode) Depth() int { return min(n.Level, deepestLevel) }

// Deep reports whether it lies deeper than it is drawn.
func (n *tracedNode) Deep() bool { return n.Level > deepestLevel }

// DurationMS is how long it took; nil while it goes on.
func (n *tracedNode) DurationMS() *int64 {
	if n.Row != nil && n.Row.DurationMS != nil {
		return n.Row.DurationMS
	}
	return between(n.From, n.To)
}

// Point reports something that has no duration.
func (n *tracedNode) Point() bool { return n.Sort == "note" || n.Sort == "more" }

// nodesOf makes nodes of what was read, in the order in which they began.
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

// rank puts what contains others before them, where both began at once.
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

// arrange puts nodes under one another and returns them in the order in which they are drawn. An activity stands under
// its parent, else under its run; a run under the run that started it; a wait under the phase that its step belongs to.
// Each node appears once, also where rows, which anybody may write by SQL, name each other as parents.
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
	for _, n := range append(top, nodes...) { // those that nothing leads to are in a circle: its first breaks it
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

// above is the node that n stands under; nil for none.
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

// walk appends n and what is below it that has no place yet. It does not recurse: a chain of parents may be long.
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

// branches are the nodes as a tree that is no deeper than it is drawn: what lies deeper stands beside its parent.
func branches(order []*tracedNode) []*tracedNode {
	var top []*tracedNode
	for _, n := range order {
		n.Children = nil
		above := n.parent
		for above != nil && above.Level >= deepestLevel {
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

// Took is its duration in few characters; empty while it goes on, and for what has none.
func (n *tracedNode) Took() string {
	ms := n.DurationMS()
	if ms == nil || n.Point() {
		return ""
	}
	return lastingMS(*ms)
}

// Goes reports whether it goes on.
func (n *tracedNode) Goes() bool { return n.To == nil && !n.Point() }

// Fine reports a state that needs no word beside its sign.
func (n *tracedNode) Fine() bool {
	return n.Status == "success" || n.Status == "completed" || n.Status == "done"
}

// Unfolded reports whether the tree shows what is below at once.
func (n *tracedNode) Unfolded() bool { return n.Level < 3 }

// Queued is how long a run stood in the queue before somebody began it; empty when nobody has, or it was at once.
func (r tracedRun) Queued() string {
	if r.StartedAt == nil || r.StartedAt.Sub(r.CreatedAt) < time.Millisecond {
		return ""
	}
	return lasting(r.StartedAt.Sub(r.CreatedAt))
}
