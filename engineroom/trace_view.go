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
	reasons "github.com/lanekeeper/lanekeeper/why"
)

// tracedView is the content below the head, in one of the views.
type tracedView struct {
	ID, View, Row string
	Rows          int64 // of the trace
	More          bool  // the count of rows reached its bound
	Shown         int   // shown rows
	MoreRuns      bool

	Order  []*tracedNode // lines of the waterfall
	Top    []*tracedNode // the tree
	Ticks  []tracedTick
	Gaps   []tracedGap
	Sorts  []string // present sorts, for the legend
	Guess  bool     // a wait's start is an estimate
	Table  []tracedRow
	Waits  []tracedWait
	Next   string // last row of this page of the table
	Paged  bool   // not the first page
	Single *tracedRow
	Prompt *tracedPrompt // of a single model call
}

// traceView loads the chosen view.
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

// loadRow reads the one shown activity.
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

// loadTable reads a page of the table, and on the first page the waits.
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

// loadTree reads the rows of the waterfall and the tree.
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

// rollUp sets the exact totals at the runs, and marks incomplete ones.
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

// fill builds the drawing or the tree.
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

// legend is the order of the legend's words.
var legend = []string{"run", "phase", "model", "call", "retry", "wait", "lane", "note"}

// SortLabel returns the label of a sort.
func (view *tracedView) SortLabel(sort string) string { return sortLabels[sort] }

// Thin reports bars of containers, which are drawn flat.
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
	return human.Count(n.Left)
}

// Idle reports whether time is drawn shorter because nothing was done in it.
func (view *tracedView) Idle() bool {
	return slices.ContainsFunc(view.Gaps, func(g tracedGap) bool { return !g.Rest })
}

// tracedWait is a time in which a run did nothing but wait.
type tracedWait struct {
	ExecutionID, Step string
	Event, Kind       string
	From              time.Time
	To                *time.Time // nil while it goes on
	Until             *time.Time // its deadline, while it goes on
	TimedOut          bool
	Key               string // what is waited for: an approval, an execution, a lane, the key of an event
	Guessed           bool   // its beginning is not recorded
	Standing          bool   // in the queue of a lane, with its process
}

// waitKindOf is the kind of wait that an event ends.
var waitKindOf = map[string]string{
	"MESSAGE_RECEIVED": "response", "AGENT_COMPLETED": "agent", "DOCUMENT_UPLOADED": "document",
	"SIGNATURE_COMPLETED": "signature",
	"TEST_COMPLETED":      "test", "EVENT_COMPLETED": "event", "SCHEDULE_REACHED": "delay", "APPROVAL_DECIDED": "approval",
	"LANE_FREED": "lane",
}

// waitWords say what is waited for.
var waitWords = map[string]string{
	"response": "a message", "agent": "another run", "document": "documents", "signature": "a signature", "test": "a test",
	"event": "an event", "delay": "time to pass", "approval": "an approval", "lane": "a lane",
}

// About says what is waited for.
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

// waitsOf are the waits of runs: those that are over, those that go on, and the places in queues of lanes.
//
// The end of a wait is a checkpoint, the beginning of one that goes on is in the execution's row. The beginning of one
// that is over is not recorded: it is taken to be when the run last wrote something before.
func (room *Room) waitsOf(ctx context.Context, runs []tracedRun) ([]tracedWait, error) {
	var parked, standing []string
	began := map[string]time.Time{}
	var waits []tracedWait
	for _, r := range runs {
		began[r.ID] = r.began()
		if r.WaitNumber > 0 {
			parked = append(parked, r.ID)
		}
		switch r.Status {
		case "running":
			standing = append(standing, fmt.Sprintf("%s#%d", r.ID, r.Claim))
		case "waiting":
			waits = append(waits, tracedWait{
				ExecutionID: r.ID, Step: text(r.WaitingStep), Kind: text(r.WaitingFor), Key: redact.Text(text(r.WaitingKey), 300),
				From: r.UpdatedAt, Until: r.WaitingUntil,
			})
		}
	}
	over, err := room.pastWaits(ctx, parked, began)
	if err != nil || len(standing) == 0 {
		return append(over, waits...), err
	}
	queued, err := room.standingWaits(ctx, standing)
	return append(append(over, waits...), queued...), err
}

// text is what a pointer points to; empty when it is nil.
func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// pastWaits are the waits of runs that are over.
func (room *Room) pastWaits(ctx context.Context, runs []string, began map[string]time.Time) ([]tracedWait, error) {
	if len(runs) == 0 {
		return nil, nil
	}
	rows, err := room.Read.Query(ctx, `
		select w.execution_id::text, left(w.step, 300) as step, left(w.event, 100) as event, w.timed_out, w.ended,
		       left(coalesce(v.key, ''), 300) as key, greatest(w.before, a.before) as before
		  from (select c.execution_id, c.step, c.ended, c.before, c.output ->> 'event' as event,
		               c.output ->> 'timed_out' = 'true' as timed_out, lanekeeper.agent_uuid(c.output ->> 'event_id')
		                 as event_id
		          from (select k.execution_id, k.step, k.created_at as ended, k.output,
		                       lag(k.created_at) over (partition by k.execution_id order by k.created_at) as before
		                  from (select x.execution_id, x.step, x.created_at, x.output from agent_checkpoints x
		                         where x.execution_id = any (@runs::text[]::uuid[]) limit @scan) k) c
		         where case when pg_column_size(c.output) < 65536     -- a larger output is the result of a step
		                    then jsonb_typeof(c.output) = 'object' and c.output ?& array['event', 'timed_out'] else false end
		         order by c.ended limit @most) w
		  left join agent_events v on v.id = w.event_id
		 cross join lateral (
		       select max(case when b.finished_at <= w.ended then b.finished_at else b.created_at end) as before
		         from (select y.created_at, y.finished_at from agent_activity y
		                where y.execution_id = w.execution_id and y.id < lanekeeper.agent_uuid7_floor(w.ended)
		                  and y.created_at <= w.ended
		                order by y.id desc limit 5) b) a
		 order by w.ended`,
		freshPlan, postgres.Strict{"runs": runs, "scan": tracePoints, "most": traceWaits})
	list, err := postgres.Collect(rows, err, "list waits of trace", pgx.RowToStructByName[struct {
		ExecutionID, Step, Event, Key string
		TimedOut                      bool
		Ended                         time.Time
		Before                        *time.Time
	}])
	if err != nil {
		return nil, err
	}
	waits := make([]tracedWait, 0, len(list))
	for _, l := range list {
		kind, is := waitKindOf[l.Event]
		if !is {
			continue // the result of a step that happens to look like the end of a wait
		}
		from := began[l.ExecutionID]
		if l.Before != nil && l.Before.After(from) {
			from = *l.Before
		}
		if from.After(l.Ended) {
			from = l.Ended
		}
		waits = append(waits, tracedWait{
			ExecutionID: l.ExecutionID, Step: l.Step, Event: l.Event, Kind: kind, From: from, To: new(l.Ended),
			TimedOut: l.TimedOut, Key: redact.Text(l.Key, 300), Guessed: true,
		})
	}
	return waits, nil
}

// standingWaits are the places that runs have in queues of lanes now. They hold a process, and leave no record.
func (room *Room) standingWaits(ctx context.Context, owners []string) ([]tracedWait, error) {
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

// Took is how long it lasted in few characters; empty while it goes on.
func (w tracedWait) Took() string {
	if w.To == nil {
		return ""
	}
	return human.Duration(w.To.Sub(w.From))
}

// Link is the page of what is waited for; empty when it has none.
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

// whyPanel is why a trace is what it is.
type whyPanel struct {
	ID    string
	Parts []whyPart
}

type whyPart struct {
	Title string
	Rows  []whyRow
}

// whyRow is a reason with where it leads.
type whyRow struct {
	reasons.Reason
	Depth int
	Links []whyLink
}

type whyLink struct{ Word, URL string }

func (room *Room) traceWhy(ctx context.Context, v *visit) (any, error) {
	about, _ := v.About.(*tracedVisit)
	answer, err := reasons.Of(ctx, room.Read, about.ID)
	if err != nil {
		return nil, err
	}
	panel := &whyPanel{ID: about.ID}
	for _, p := range answer.Parts() {
		part, depths := whyPart{Title: p.Title()}, answer.Depths(p)
		for i, r := range answer.Of(p) {
			part.Rows = append(part.Rows, whyRow{Reason: r, Depth: depths[i], Links: whyLinks(about.ID, r)})
		}
		panel.Parts = append(panel.Parts, part)
	}
	return panel, nil
}

// Trouble reports a row about something that went wrong.
func (r whyRow) Trouble() bool { return r.Part == reasons.Trouble && r.Kind != reasons.More }

// whyLinks are the other trace of a row, where it has one, and what else of it has a page.
func whyLinks(trace string, r reasons.Reason) []whyLink {
	var links []whyLink
	if r.TraceID != trace && r.Kind != reasons.More {
		links = append(links, whyLink{"trace " + r.TraceID, "/traces/" + url.PathEscape(r.TraceID)})
	}
	for _, ref := range []string{r.FromRef, r.ToRef} {
		word, id, _ := strings.Cut(ref, " ")
		pages := map[string]string{
			"execution": "/executions/", "approval": "/approvals/", "delivery": "/deliveries/", "outgoing": "/outgoing/",
			"thread": "/threads/",
		}
		at, has := pages[word]
		if !has || id == "" {
			continue
		}
		if word != "thread" {
			id = strings.TrimSpace(id)
			links = append(links, whyLink{word + " " + short(id), at + url.PathEscape(id)})
			continue
		}
		links = append(links, whyLink{"thread " + cut(40, id), at + url.PathEscape(id)})
	}
	return links
}
