package engineroom

import (
	"context"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// spansView is the head of a trace and its spans, in one of the views.
type spansView struct {
	*traceHead

	View, Span string
	Base       string // address of a span, without its id
	Filter     lineFilter
	Shown      int         // shown rows
	Order      []*spanNode // lines of the waterfall
	Wanted     int         // lines that the filter shows
	Ticks      []timeTick
	Gaps       []timeGap
	Kinds      []string // present kinds, for the legend
	Table      []spanRow
	Waits      []spanWait
	Next       string // last row of this page of the table
	Paged      bool   // not the first page
}

// lineFilter selects lines of a waterfall.
type lineFilter struct {
	Text, Kind string
	Errors     bool
}

// traceKinds are the values of lineFilter.Kind.
var traceKinds = []string{"run", "phase", "model", "call", "wait", "note"}

// Kinds returns the values of Kind.
func (lineFilter) Kinds() []string { return traceKinds }

// IsSet reports whether a filter is set.
func (f lineFilter) IsSet() bool { return f != lineFilter{} }

// has reports whether a line matches.
func (f lineFilter) has(n *spanNode) bool {
	if f.Errors && !n.Failed() || f.Kind != "" && f.Kind != n.Kind() {
		return false
	}
	return strings.Contains(strings.ToLower(n.searchText()), strings.ToLower(f.Text))
}

// searchText is the text that a search of lines compares.
func (n *spanNode) searchText() string {
	text := strings.Join([]string{n.Name, n.Label(), n.Status, n.Message(), n.Span()}, " ")
	if n.Row != nil {
		text += " " + n.Row.Skill + " " + n.Row.Model + " " + n.Row.Step
	}
	return text
}

// Kind is the node's kind without the distinction of retries and lanes.
func (n *spanNode) Kind() string {
	switch {
	case n.Row != nil:
		return n.Row.Kind
	case n.Wait != nil:
		return "wait"
	}
	return n.Type
}

// traceView loads the head and the chosen view.
func (room *Room) traceView(ctx context.Context, req *pageRequest) (any, error) {
	t, _ := req.Subject.(*traceSubject)
	return room.loadUnlessEnded(ctx, t, "view", func(now traceState) (any, bool, error) {
		head, err := room.readHead(ctx, t.ID, t.View != "table")
		if err != nil {
			return nil, false, err
		}
		head.Pending = now.Pending
		view := &spansView{
			traceHead: head, View: t.View, Span: t.Span, Filter: t.Filter, Paged: t.After != "",
			Base: spanBase(req),
		}
		running := head.Sums.Running
		if t.View == "table" {
			running, err = room.loadTable(ctx, t, view)
		} else {
			err = room.loadLines(ctx, view)
		}
		if err != nil || head.Root == nil {
			return view, running, err
		}
		head.Unforkable = room.Unforkable()[head.Root.Flow] != ""
		head.First, err = room.firstStep(ctx, head.Root.ID)
		return view, running, err
	})
}

// spanBase returns the address of a span on this page, up to its id.
func spanBase(req *pageRequest) string {
	_, query, _ := strings.Cut(req.withParam("span", ""), "?")
	if query != "" {
		query += "&"
	}
	return "?" + query + "span="
}

// firstStep returns the first recorded step of an execution; empty for none, or for a name too long for a URL. A fork
// from it repeats all steps.
func (room *Room) firstStep(ctx context.Context, id string) (step string, err error) {
	steps, err := postgres.Values[string](ctx, room.Read, "read first step", `
		select c.step from agent_checkpoints c where c.execution_id = @id order by c.created_at, c.step limit 1`,
		postgres.Strict{"id": id})
	if err != nil || len(steps) == 0 || len(steps[0]) > maxFilterBytes {
		return "", err
	}
	return steps[0], nil
}

// loadTable reads a page of the table, and on the first page the waits. It reports whether a row of that page is
// running.
func (room *Room) loadTable(ctx context.Context, t *traceSubject, view *spansView) (running bool, err error) {
	rows, err := room.pageOf(ctx, view.ID, t.After)
	if err != nil {
		return false, err
	}
	rows, more := firstN(rows, tracePerPage)
	if view.Table = rows; more {
		view.Next = rows[len(rows)-1].ID
	}
	if t.After == "" {
		if view.Waits, err = room.waitsOf(ctx, view.Runs); err != nil {
			return false, err
		}
	}
	return slices.ContainsFunc(view.Table, func(r spanRow) bool { return r.Status == "running" }), nil
}

// loadLines reads the lines of the waterfall.
func (room *Room) loadLines(ctx context.Context, view *spansView) error {
	order, count, err := room.linesOf(ctx, view.traceHead)
	if err != nil {
		return err
	}
	view.Shown = count
	view.fill(order)
	return nil
}

// linesOf reads the lines of a trace in drawing order, and returns their number of rows.
func (room *Room) linesOf(ctx context.Context, h *traceHead) (order []*spanNode, count int, err error) {
	rows, err := room.rowsOf(ctx, h)
	if err != nil {
		return nil, 0, err
	}
	waits, err := room.waitsOf(ctx, h.Runs)
	if err != nil {
		return nil, 0, err
	}
	lost, err := room.readLostClaims(ctx, h.Runs)
	if err != nil {
		return nil, 0, err
	}
	nodes := nodesOf(rows, h.Runs, waits)
	markLost(nodes, h.Runs, lost)
	incomplete := int64(len(rows)) < h.Sums.Rows
	if incomplete && len(rows) > traceFirst {
		nodes = withOmitted(nodes, rows, h.Sums.Rows, h.MoreRows)
	}
	order = orderTree(nodes)
	if incomplete {
		rollUp(order, h.byRun)
	}
	for _, n := range order {
		if n.Run != nil { // the sums lack rows beyond traceSummed, and executions that are not drawn
			n.AtLeast = h.MoreRows || h.MoreRuns
		}
	}
	return order, len(rows), nil
}

// withOmitted adds a line for the omitted rows after the first rows.
func withOmitted(nodes []*spanNode, rows []spanRow, count int64, more bool) []*spanNode {
	before, after := rows[traceFirst-1], rows[traceFirst]
	last := rows[max(len(rows)-traceLast, traceFirst)] // the order up to here is unknown
	omitted := &spanNode{
		ID: "rest", Type: "more", From: before.CreatedAt, To: new(last.CreatedAt), After: before.ID,
		Omitted: count - int64(len(rows)),
	}
	if more {
		omitted.Omitted = -1
	}
	for i, n := range nodes {
		if n.Row != nil && n.Row.ID == after.ID {
			return slices.Insert(nodes, i, omitted)
		}
	}
	return append(nodes, omitted)
}

// rollUp sets the totals of runs, and marks other sums as lower bounds.
func rollUp(order []*spanNode, byRun map[string]traceSums) {
	below := map[*spanNode]traceSums{}
	for _, n := range slices.Backward(order) {
		if n.Run == nil {
			n.AtLeast = len(n.Children) > 0
			continue
		}
		own, all := byRun[n.Run.ID], below[n]
		n.Tokens, n.CostUSD, n.Errors = own.Tokens+all.Tokens, own.CostUSD+all.CostUSD, own.Failed+all.Failed
		above := n.parent
		for above != nil && above.Run == nil {
			above = above.parent
		}
		if above != nil {
			sum := below[above]
			sum.Tokens, sum.CostUSD, sum.Failed = sum.Tokens+n.Tokens, sum.CostUSD+n.CostUSD, sum.Failed+n.Errors
			below[above] = sum
		}
	}
}

// fill draws the lines, and hides lines that do not match the filter. The ancestors of a match stay.
func (view *spansView) fill(order []*spanNode) {
	if t := newTraceScale(order); t != nil {
		t.setBars(order)
		view.Ticks, view.Gaps = t.ticks(), t.gaps()
	}
	view.Order = order
	if view.Filter.IsSet() {
		visible := map[*spanNode]bool{}
		for _, n := range order {
			for at := n; at != nil && !visible[at] && (at != n || view.Filter.has(n)); at = at.parent {
				visible[at] = true
			}
		}
		for _, n := range order {
			n.Hidden = !visible[n]
		}
		view.Wanted = len(visible)
	}
	for _, n := range view.Order {
		for _, b := range n.Bars {
			if !slices.Contains(view.Kinds, b.kind()) && n.Type != "more" {
				view.Kinds = append(view.Kinds, b.kind())
			}
		}
	}
	slices.SortFunc(view.Kinds, func(a, b string) int { return slices.Index(legend, a) - slices.Index(legend, b) })
}

// kind returns the legend's word for a bar.
func (b spanBar) kind() string {
	if b.Class == "bad-run" {
		return "bad"
	}
	return b.Class
}

// legend has the legend's words in order.
var legend = []string{"queue", "run", "phase", "model", "call", "wait", "lane", "bad", "halted", "lost", "note"}

// KindLabel returns the legend's label of a bar.
func (view *spansView) KindLabel(barKind string) string {
	switch barKind {
	case "bad":
		return "failed"
	case "halted":
		return "stopped, cancelled or unknown"
	case "lost":
		return "worker lost"
	}
	return kindLabels[barKind]
}

// Partly reports whether the view omits rows.
func (view *spansView) Partly() bool {
	return view.View != "table" && int64(view.Shown) < view.Sums.Rows
}

// Idle reports whether the view draws idle time shorter.
func (view *spansView) Idle() bool {
	return slices.ContainsFunc(view.Gaps, func(g timeGap) bool { return !g.Omitted })
}
