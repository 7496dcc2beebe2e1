package engineroom

import (
	"context"
	"fmt"
	"hash/fnv"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// tracedView is the head of a trace and its spans, in one of the views.
type tracedView struct {
	*tracedHead

	View, Span string
	Base       string // address of a span, without its id
	Filter     lineFilter
	Shown      int           // shown rows
	Order      []*tracedNode // lines of the waterfall
	Wanted     int           // lines that the filter shows
	Ticks      []tracedTick
	Gaps       []tracedGap
	Sorts      []string // present sorts, for the legend
	Table      []tracedRow
	Waits      []tracedWait
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

// Set reports whether a filter is set.
func (w lineFilter) Set() bool { return w != lineFilter{} }

// has reports whether a line matches.
func (w lineFilter) has(n *tracedNode) bool {
	if w.Errors && !n.Bad() || w.Kind != "" && w.Kind != n.Kind() {
		return false
	}
	if w.Text == "" {
		return true
	}
	text := strings.Join([]string{n.Name, n.Label(), n.Status, n.Message(), n.ID}, " ")
	if n.Row != nil {
		text += " " + n.Row.Skill + " " + n.Row.Model + " " + n.Row.Step
	}
	return strings.Contains(strings.ToLower(text), strings.ToLower(w.Text))
}

// Kind is the node's sort without the distinction of retries and lanes.
func (n *tracedNode) Kind() string {
	switch {
	case n.Row != nil:
		return n.Row.Kind
	case n.Wait != nil:
		return "wait"
	}
	return n.Sort
}

// traceView loads the head and the chosen view.
func (room *Room) traceView(ctx context.Context, v *visit) (any, error) {
	about, _ := v.About.(*tracedVisit)
	return room.settled(ctx, about, "view", func(now traceState) (any, bool, error) {
		head, err := room.readHead(ctx, about.ID, about.View != "table")
		if err != nil {
			return nil, false, err
		}
		head.Pending = now.Pending
		view := &tracedView{
			tracedHead: head, View: about.View, Span: about.Span, Filter: about.Filter, Paged: about.After != "",
			Base: spanBase(v),
		}
		open := head.Sums.Running
		if about.View == "table" {
			open, err = room.loadTable(ctx, about, view)
		} else {
			err = room.loadLines(ctx, view)
		}
		if err != nil || head.Root == nil {
			return view, open, err
		}
		head.Unforkable = room.Unforkable()[head.Root.Flow] != ""
		head.First, err = room.firstStep(ctx, head.Root.ID)
		return view, open, err
	})
}

// spanBase returns the address of a span on this page, up to its id.
func spanBase(v *visit) string {
	_, query, _ := strings.Cut(v.at("span", ""), "?")
	if query != "" {
		query += "&"
	}
	return "?" + query + "span="
}

// firstStep returns the first recorded step of an execution; empty for none. A fork from it repeats all steps.
func (room *Room) firstStep(ctx context.Context, id string) (step string, err error) {
	steps, err := postgres.Values[string](ctx, room.Read, "read first step", `
		select c.step from agent_checkpoints c where c.execution_id = @id order by c.created_at, c.step limit 1`,
		postgres.Strict{"id": id})
	if err != nil || len(steps) == 0 || len(steps[0]) > maxFilter {
		return "", err
	}
	return steps[0], nil
}

// loadTable reads a page of the table, and on the first page the waits.
func (room *Room) loadTable(ctx context.Context, about *tracedVisit, view *tracedView) (open bool, err error) {
	rows, err := room.pageOf(ctx, view.ID, about.After)
	if err != nil {
		return false, err
	}
	rows, more := onPage(rows, tracePerPage)
	if view.Table = rows; more {
		view.Next = rows[len(rows)-1].ID
	}
	if about.After == "" {
		if view.Waits, err = room.waitsOf(ctx, view.Runs); err != nil {
			return false, err
		}
	}
	return slices.ContainsFunc(view.Table, func(r tracedRow) bool { return r.Status == "running" }), nil
}

// loadLines reads the lines of the waterfall.
func (room *Room) loadLines(ctx context.Context, view *tracedView) error {
	order, shown, err := room.linesOf(ctx, view.tracedHead)
	if err != nil {
		return err
	}
	view.Shown = shown
	view.fill(order)
	return nil
}

// linesOf reads the lines of a trace in drawing order, and returns their number of rows.
func (room *Room) linesOf(ctx context.Context, h *tracedHead) (order []*tracedNode, shown int, err error) {
	rows, err := room.rowsOf(ctx, h)
	if err != nil {
		return nil, 0, err
	}
	waits, err := room.waitsOf(ctx, h.Runs)
	if err != nil {
		return nil, 0, err
	}
	lost, err := room.lostOf(ctx, h.Runs)
	if err != nil {
		return nil, 0, err
	}
	nodes := nodesOf(rows, h.Runs, waits)
	stopLost(nodes, h.Runs, lost)
	incomplete := int64(len(rows)) < h.Sums.Rows
	if incomplete && len(rows) > traceFirst {
		nodes = withRest(nodes, rows, h.Sums.Rows, h.MoreRows)
	}
	order = arrange(nodes)
	if incomplete {
		rollUp(order, h.byRun)
	}
	return order, len(rows), nil
}

// withRest adds a line for the omitted rows after the first ones.
func withRest(nodes []*tracedNode, rows []tracedRow, count int64, more bool) []*tracedNode {
	before, after := rows[traceFirst-1], rows[traceFirst]
	last := rows[max(len(rows)-traceLast, traceFirst)] // the order up to here is unknown
	rest := &tracedNode{
		ID: "rest", Sort: "more", From: before.CreatedAt, To: new(last.CreatedAt), After: before.ID,
		Left: count - int64(len(rows)),
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

// rollUp sets the exact totals of runs, and marks other sums as lower bounds.
func rollUp(order []*tracedNode, byRun map[string]tracedSums) {
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

// fill draws the lines, and hides those that do not match the filter. The ancestors of a match stay.
func (view *tracedView) fill(order []*tracedNode) {
	if t := newTraceScale(order); t != nil {
		t.draw(order)
		view.Ticks, view.Gaps = t.ticks(), t.gaps()
	}
	view.Order = order
	if view.Filter.Set() {
		shown := map[*tracedNode]bool{}
		for _, n := range order {
			for at := n; at != nil && !shown[at] && (at != n || view.Filter.has(n)); at = at.parent {
				shown[at] = true
			}
		}
		for _, n := range order {
			n.Out = !shown[n]
		}
		view.Wanted = len(shown)
	}
	for _, n := range view.Order {
		for _, b := range n.Bars {
			if !slices.Contains(view.Sorts, b.sort()) && n.Sort != "more" {
				view.Sorts = append(view.Sorts, b.sort())
			}
		}
	}
	slices.SortFunc(view.Sorts, func(a, b string) int { return slices.Index(legend, a) - slices.Index(legend, b) })
}

// sort returns the legend's word for a bar.
func (b tracedBar) sort() string {
	if b.Class == "bad-run" {
		return "bad"
	}
	return b.Class
}

// legend has the legend's words in order.
var legend = []string{"queue", "run", "phase", "model", "call", "wait", "lane", "bad", "halted", "lost", "note"}

// SortLabel returns the legend's label of a bar.
func (view *tracedView) SortLabel(sort string) string {
	switch sort {
	case "bad":
		return "failed"
	case "halted":
		return "stopped, cancelled or unknown"
	case "lost":
		return "worker lost"
	}
	return sortLabels[sort]
}

// Partly reports whether rows are omitted.
func (view *tracedView) Partly() bool {
	return view.View != "table" && int64(view.Shown) < view.Sums.Rows
}

// Idle reports whether idle time is drawn shorter.
func (view *tracedView) Idle() bool {
	return slices.ContainsFunc(view.Gaps, func(g tracedGap) bool { return !g.Rest })
}

// tracedWait is a wait of a run.
type tracedWait struct {
	ExecutionID, Step string
	Event, Kind       string
	From              time.Time
	To                *time.Time // nil while it lasts
	Until             *time.Time // its deadline, while it lasts
	TimedOut          bool
	Key               string // of the awaited approval, execution, lane or event
	Standing          bool   // in the queue of a lane, with its process
}

// waitWords name what each kind of wait waits for.
var waitWords = map[string]string{
	"response": "a message", "agent": "another run", "document": "documents", "signature": "a signature", "test": "a test",
	"event": "an event", "delay": "time to pass", "approval": "an approval", "lane": "a lane",
}

// About names what the wait is for.
func (w tracedWait) About() string { return waitWords[w.Kind] }

// elementID stays the same when the wait ends.
func (w tracedWait) elementID() string {
	place := "step " + w.Step
	if w.Standing {
		place = "lane " + w.Key
	}
	sum := fnv.New64a()
	_, _ = sum.Write([]byte(place)) // never fails
	return fmt.Sprintf("wait-%s-%x", w.ExecutionID, sum.Sum64())
}

// waitsOf reads the past and present waits of runs, and their places in the queues of lanes.
func (room *Room) waitsOf(ctx context.Context, runs []tracedRun) ([]tracedWait, error) {
	var parked, queued []string
	var waits []tracedWait
	for _, r := range runs {
		if r.WaitNumber > 0 {
			parked = append(parked, r.ID)
		}
		switch r.Status {
		case "running":
			queued = append(queued, fmt.Sprintf("%s#%d", r.ID, r.Claim))
		case "waiting":
			waits = append(waits, tracedWait{
				ExecutionID: r.ID, Step: postgres.Deref(r.WaitingStep), Kind: postgres.Deref(r.WaitingFor),
				Key: redact.Text(postgres.Deref(r.WaitingKey), 300), From: r.UpdatedAt, Until: r.WaitingUntil,
			})
		}
	}
	over, err := room.pastWaits(ctx, parked)
	if err != nil || len(queued) == 0 {
		return append(over, waits...), err
	}
	inQueue, err := room.queuedWaits(ctx, queued)
	return append(append(over, waits...), inQueue...), err
}

// pastWaits reads the ended waits of runs.
func (room *Room) pastWaits(ctx context.Context, runs []string) ([]tracedWait, error) {
	if len(runs) == 0 {
		return nil, nil
	}
	list, err := postgres.Rows[struct {
		ExecutionID, Step, Event, Kind, Key string
		TimedOut                            bool
		Since                               *time.Time
		Ended                               time.Time
	}](ctx, room.Read, "list waits of trace", `
		select r.id::text as execution_id, left(c.step, 300) as step, left(coalesce(c.event, ''), 100) as event,
		       c.kind, left(coalesce(c.key, ''), 300) as key, c.timed_out, c.since, c.until as ended
		  from unnest(@runs::text[]::uuid[]) r (id) cross join lateral lanekeeper.agent_past_waits(r.id) c
		 order by c.until limit @most`,
		freshPlan, postgres.Strict{"runs": runs, "most": traceWaits})
	if err != nil {
		return nil, err
	}
	waits := make([]tracedWait, len(list))
	for i, l := range list {
		from := l.Ended
		if l.Since != nil && l.Since.Before(from) {
			from = *l.Since
		}
		waits[i] = tracedWait{
			ExecutionID: l.ExecutionID, Step: l.Step, Event: l.Event, Kind: l.Kind, From: from, To: new(l.Ended),
			TimedOut: l.TimedOut, Key: redact.Text(l.Key, 300),
		}
	}
	return waits, nil
}

// queuedWaits reads the places of runs in the queues of lanes. Such a wait occupies a process, and is not recorded.
func (room *Room) queuedWaits(ctx context.Context, owners []string) ([]tracedWait, error) {
	rows, err := room.Read.Query(ctx, `
		select left(w.owner, 36) as execution_id, w.lane, w.since from agent_lock_waiters w
		 where w.owner = any (@owners) order by w.since limit @most`,
		freshPlan, postgres.Strict{"owners": owners, "most": traceWaits})
	list, err := postgres.Collect(rows, err, "list places in queues", pgx.RowToStructByName[struct {
		ExecutionID, Lane string
		Since             time.Time
	}])
	if err != nil {
		return nil, err
	}
	waits := make([]tracedWait, len(list))
	for i, l := range list {
		waits[i] = tracedWait{ExecutionID: l.ExecutionID, Kind: "lane", Key: l.Lane, From: l.Since, Standing: true}
	}
	return waits, nil
}

// Took returns the formatted duration; empty while the wait lasts.
func (w tracedWait) Took() string {
	if w.To == nil {
		return ""
	}
	return human.Duration(w.To.Sub(w.From))
}

// Link returns the page of what the wait is for; empty if there is none.
func (w tracedWait) Link() string {
	switch {
	case w.Key == "":
	case w.Kind == "approval":
		return "/approvals/" + url.PathEscape(w.Key)
	case w.Kind == "agent":
		return "/executions/" + url.PathEscape(w.Key)
	case w.Kind == "response":
		return "/threads/" + url.PathEscape(w.Key)
	case w.Kind == "lane":
		return "/lanes"
	}
	return ""
}
