package engineroom

import (
	"context"
	"slices"
)

// tracedView is what the page shows below its head, in one of its ways.
type tracedView struct {
	ID, View, Row string
	Rows          int64 // of the trace
	More          bool  // the trace has more rows than were counted
	Shown         int   // rows that are shown
	MoreRuns      bool

	Order  []*tracedNode // the waterfall's lines
	Top    []*tracedNode // the tree
	Ticks  []tracedTick
	Gaps   []tracedGap
	Sorts  []string // that occur, for the legend
	Guess  bool     // a wait is drawn whose beginning is not recorded
	Table  []tracedRow
	Waits  []tracedWait
	Next   string // the row behind which the table's next page begins
	Paged  bool   // this is not the first page
	Single *tracedRow
	Prompt *tracedPrompt // of the single row, when it is a model call
}

// traceView loads the view that is asked for.
func (room *Room) traceView(ctx context.Context, v *visit) (any, error) {
	about, _ := v.About.(*tracedVisit)
	return room.settled(ctx, about, "view", func() (any, bool, error) {
		view := &tracedView{ID: about.ID, View: about.View, Row: about.Row, Paged: about.After != ""}
		var open bool
		var err error
		switch {
		case about.Row != "":
			open, err = room.loadRow(ctx, view)
		case about.View == "table":
			open, err = room.loadTable(ctx, about, view)
		default:
			open, err = room.loadTree(ctx, about, view)
		}
		return view, open, err
	})
}

// loadRow reads the one activity that is shown.
func (room *Room) loadRow(ctx context.Context, view *tracedView) (open bool, err error) {
	rows, err := room.rowOf(ctx, view.ID, view.Row)
	if err != nil || len(rows) == 0 {
		return true, err
	}
	if err := room.addApprovals(ctx, view.ID, rows); err != nil {
		return false, err
	}
	view.Single = &rows[0]
	if view.Single.Kind == "model" {
		if view.Prompt, err = room.promptOf(ctx, view.ID, view.Row); err != nil {
			return false, err
		}
	}
	return view.Single.Status == "running", nil
}

// loadTable reads a page of the table, and on the first one the waits.
func (room *Room) loadTable(ctx context.Context, about *tracedVisit, view *tracedView) (open bool, err error) {
	rows, err := room.pageOf(ctx, view.ID, about.After)
	if err != nil {
		return false, err
	}
	if rows, more := onPage(rows, tracePerPage); more {
		view.Table, view.Next = rows, rows[len(rows)-1].ID
	} else {
		view.Table = rows
	}
	if err := room.addApprovals(ctx, view.ID, view.Table); err != nil {
		return false, err
	}
	if about.After == "" {
		runs, _, err := room.runsOf(ctx, view.ID)
		if err != nil {
			return false, err
		}
		if view.Waits, err = room.waitsOf(ctx, runs); err != nil {
			return false, err
		}
	}
	return slices.ContainsFunc(view.Table, func(r tracedRow) bool { return r.Status == "running" }), nil
}

// loadTree reads what the waterfall and the tree are made of.
func (room *Room) loadTree(ctx context.Context, about *tracedVisit, view *tracedView) (open bool, err error) {
	runs, moreRuns, err := room.runsOf(ctx, about.ID)
	if err != nil {
		return false, err
	}
	byRun, sums, more, err := room.sumsOf(ctx, about.ID)
	if err != nil {
		return false, err
	}
	rows, err := room.rowsOf(ctx, about.ID, sums.Rows)
	if err != nil {
		return false, err
	}
	if err := room.addApprovals(ctx, about.ID, rows); err != nil {
		return false, err
	}
	waits, err := room.waitsOf(ctx, runs)
	if err != nil {
		return false, err
	}
	view.Rows, view.More, view.Shown, view.MoreRuns = sums.Rows, more, len(rows), moreRuns
	nodes := nodesOf(rows, runs, waits)
	partly := int64(len(rows)) < sums.Rows
	if partly && len(rows) > traceFirst {
		nodes = withRest(nodes, rows, sums.Rows, more)
	}
	order := arrange(nodes)
	rollUp(order, byRun, partly)
	view.fill(order)
	return sums.Running, nil
}

// withRest adds a line for the rows that are left out, after the first ones that are shown.
func withRest(nodes []*tracedNode, rows []tracedRow, count int64, more bool) []*tracedNode {
	before, after := rows[traceFirst-1], rows[traceFirst]
	last := rows[max(len(rows)-traceLast, traceFirst)] // up to here nobody knows what ran when
	rest := &tracedNode{
		ID: "rest", Sort: "more", From: before.CreatedAt, To: new(last.CreatedAt), After: before.ID, Left: count - int64(len(rows)),
	}
	if more {
		rest.Left = -1
	}
	for i, n := range nodes {
		if n.Row != nil && n.Row.ID == after.ID {
			return slices.Insert(nodes, i, rest)
		}
	}
	return append(nodes, rest)
}

// rollUp puts the exact sums at the runs, which count every row, and marks what could not be counted.
func rollUp(order []*tracedNode, byRun map[string]tracedSums, partly bool) {
	if !partly {
		return
	}
	below := map[*tracedNode]tracedSums{}
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

// fill makes the drawing or the tree of what was arranged.
func (view *tracedView) fill(order []*tracedNode) {
	for _, n := range order {
		if !slices.Contains(view.Sorts, n.Sort) && n.Sort != "more" {
			view.Sorts = append(view.Sorts, n.Sort)
		}
		view.Guess = view.Guess || n.Wait != nil && n.Wait.Guessed
	}
	slices.SortFunc(view.Sorts, func(a, b string) int { return slices.Index(legend, a) - slices.Index(legend, b) })
	if view.View == "tree" {
		view.Top = branches(order)
		return
	}
	view.Order = order
	if t := newTraceScale(order); t != nil {
		t.draw(order)
		view.Ticks, view.Gaps = t.ticks(), t.gaps()
	}
}

// legend is the order of its words.
var legend = []string{"run", "phase", "model", "call", "retry", "wait", "lane", "note"}

// SortLabel names a sort for the legend.
func (view *tracedView) SortLabel(sort string) string { return sortLabels[sort] }

// Thin reports the bars of what contains others, which are drawn flat.
func (view *tracedView) Thin(class string) bool {
	return class == "run" || class == "phase" || class == "queue"
}

// Counted is how many rows the trace has, as far as they were counted.
func (view *tracedView) Counted() int64 { return min(view.Rows, traceSummed) }

// Partly reports whether rows are left out.
func (view *tracedView) Partly() bool { return int64(view.Shown) < view.Rows }

// LeftWord is how many rows are left out; empty when nobody counted.
func (n *tracedNode) LeftWord() string {
	if n.Left <= 0 {
		return ""
	}
	return thousands(n.Left)
}

// Idle reports whether time is drawn shorter because nothing was done in it.
func (view *tracedView) Idle() bool {
	return slices.ContainsFunc(view.Gaps, func(g tracedGap) bool { return !g.Rest })
}
