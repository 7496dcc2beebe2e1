package engineroom

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// executionPage shows one durable run, and what can be done with it.
func (room *Room) executionPage() page {
	return page{
		path: "/executions/{id}", name: "execution", title: "Execution", open: room.openExecution,
		parts: []part{
			{name: "facts", every: time.Second, load: room.executionFacts},
			{name: "wait", every: time.Second, load: room.executionWait},
			{name: "timeline", every: 2 * time.Second, load: room.executionTimeline},
			{name: "values", every: 5 * time.Second, load: room.executionValues},
			{name: "relatives", every: 3 * time.Second, load: room.executionRelatives},
			{name: "lanes", every: 2 * time.Second, load: room.executionLanes},
			{name: "messages", every: 3 * time.Second, load: room.executionMessages},
			{name: "fork", load: room.executionFork},
		},
	}
}

// executionVisit is what a page of one execution is about.
type executionVisit struct {
	ID   string
	From string // the step that the form for a fork begins with
	// before is where a page of the timeline begins; nil for the newest.
	before *stepPlace
}

// openExecution finds the execution.
func (room *Room) openExecution(ctx context.Context, v *visit) (string, error) {
	id := v.path("id")
	if !uuidShape.MatchString(id) {
		return "", problem.New(http.StatusBadRequest, "%.60q is not the id of an execution, which is a uuid in lower case", id).
			Kind("malformed-id", "Malformed id")
	}
	q, err := filtersOf(v.Query, "before", "from")
	if err != nil {
		return "", err
	}
	about := executionVisit{ID: id, From: q["from"]}
	if about.before, err = stepPlaceOf(q["before"]); err != nil {
		return "", err
	}
	var flow string
	err = room.Read.QueryRow(ctx, `select left(flow, 100) from agent_executions where id = @id`, postgres.Strict{"id": id}).Scan(&flow)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return "", problem.New(http.StatusNotFound, "there is no execution %s", id)
	case err != nil:
		return "", fmt.Errorf("read execution: %w", err)
	}
	v.About = about
	return flow + " " + short(id), nil
}

// executionFact is what an execution's row says of it, with who runs it.
type executionFact struct {
	ID, TraceID, Surface, Agent, Flow, Status, Queue string
	FlowVersion                                      *int
	ParentID, ThreadID, ForkedFrom, ForkedStep       *string
	Priority, Attempt, MaxAttempts, WaitNumber       int
	ProgressSeconds                                  int
	OnLost                                           string
	Outside                                          bool
	Claim                                            int64
	ClaimedBy, Worker                                *string
	LeaseUntil                                       *time.Time
	FailedStep, CancelledBy, CancelReason            *string
	CreatedAt, UpdatedAt                             time.Time
	StartedAt, CompletedAt                           *time.Time
}

// Ended reports whether the execution has come to its end.
func (x executionFact) Ended() bool { return executions.Status(x.Status).Ended() }

// Retriable reports whether it can be retried.
func (x executionFact) Retriable() bool {
	return x.Ended() && x.Status != string(executions.Completed)
}

// Took is how long it took from its beginning to its end, in milliseconds.
func (x executionFact) Took() int64 {
	if x.CompletedAt == nil {
		return 0
	}
	return x.CompletedAt.Sub(x.CreatedAt).Milliseconds()
}

// executionFacts reads the row. The secret of a lock, which makes its holder the run, stays where it is.
func (room *Room) executionFacts(ctx context.Context, v *visit) (any, error) {
	return room.factOf(ctx, v.About.(executionVisit).ID)
}

func (room *Room) factOf(ctx context.Context, id string) (executionFact, error) {
	rows, err := room.Read.Query(ctx, `
		select e.id::text, e.trace_id, e.surface, left(e.agent, 100) as agent, e.flow, e.status, left(e.queue, 100) as queue, e.flow_version, e.parent_id::text, e.thread_id,
		       e.forked_from::text, left(e.forked_step, 600) as forked_step, e.priority, e.attempt, e.max_attempts, e.wait_number,
		       e.progress_seconds, left(e.on_lost, 100) as on_lost, e.outside, e.claim, e.claimed_by::text,
		       left(coalesce(nullif(w.owner, ''), w.name), 200) as worker, w.expires_at as lease_until, left(e.failed_step, 600) as failed_step,
		       left(e.cancelled_by, 200) as cancelled_by, left(e.cancel_reason, 1200) as cancel_reason, e.created_at, e.updated_at,
		       e.started_at, e.completed_at
		  from agent_executions e left join agent_workers w on w.id = e.claimed_by
		 where e.id = @id`, postgres.Strict{"id": id})
	if err != nil {
		return executionFact{}, fmt.Errorf("read execution: %w", err)
	}
	x, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[executionFact])
	if err != nil {
		return executionFact{}, fmt.Errorf("read execution: %w", err)
	}
	for _, text := range []**string{&x.ForkedStep, &x.FailedStep, &x.CancelReason} {
		if *text != nil {
			*text = new(redact.Text(**text, maxValue))
		}
	}
	return x, nil
}

// openWait is what an execution waits for now.
type openWait struct {
	ID, For, Key, Step string
	Until              *time.Time // nil: without end
	Since              time.Time
	Number             int
	Data               shownValue
	Event              string // which ends it
	Raise              bool   // the event may come from outside
	Requests           []openRequest
}

// openRequest is what was asked of people.
type openRequest struct {
	ID, Kind, Title, Status string
	Items                   int
	CreatedAt               time.Time
}

// executionWait reads what it waits for; the template says so when there is nothing.
func (room *Room) executionWait(ctx context.Context, v *visit) (any, error) {
	w := openWait{ID: v.About.(executionVisit).ID}
	var data string
	err := room.Read.QueryRow(ctx, `
		select left(coalesce(e.waiting_for, ''), 200), left(coalesce(e.waiting_key, ''), 1000), left(coalesce(e.waiting_step, ''), 1000), e.waiting_until, e.updated_at,
		       e.wait_number, left(coalesce(e.waiting_data::text, ''), 8192), octet_length(coalesce(e.waiting_data::text, '')),
		       coalesce((select k.event from lanekeeper.agent_wait_events k where k.kind = e.waiting_for), '')
		  from agent_executions e where e.id = @id and e.status = 'waiting'`, postgres.Strict{"id": w.ID}).
		Scan(&w.For, &w.Key, &w.Step, &w.Until, &w.Since, &w.Number, &data, &w.Data.Bytes, &w.Event)
	if errors.Is(err, pgx.ErrNoRows) {
		return openWait{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read what the execution waits for: %w", err)
	}
	w.Data = shownJSON(data, w.Data.Bytes)
	switch w.For {
	case "response", "document", "signature", "test", "event":
		// A form that would change the key on its way is not offered.
		w.Raise = len(w.Key) <= maxEventKey && redact.Text(w.Key, maxValue) == w.Key && !strings.ContainsFunc(w.Key, tricky)
	}
	w.Key, w.Step = redact.Text(w.Key, maxValue), redact.Text(w.Step, maxValue)
	rows, err := room.Read.Query(ctx, `
		select r.id::text, r.kind, left(r.title, 400) as title, r.status, cardinality(r.items) as items, r.created_at
		  from agent_requests r where r.execution_id = @id order by r.id desc limit 20`, postgres.Strict{"id": w.ID})
	if err != nil {
		return nil, fmt.Errorf("read what was asked of people: %w", err)
	}
	if w.Requests, err = pgx.CollectRows(rows, pgx.RowToStructByName[openRequest]); err != nil {
		return nil, fmt.Errorf("read what was asked of people: %w", err)
	}
	return w, nil
}

// maxEventKey is how long the key of an event may be that comes over HTTP, in bytes.
const maxEventKey = 500

const (
	lanesShown    = 50
	messagesShown = 20
	stepsOffered  = 200 // to fork from
)

// valuesOf is what an execution was given, remembers and came to.
type valuesOf struct {
	Status                   string
	Input, Variables, Result shownValue
	Summary, Error           shownValue
}

// executionValues reads the values of the row, each up to maxValue characters.
func (room *Room) executionValues(ctx context.Context, v *visit) (any, error) {
	var got valuesOf
	var input, variables, result, summary, failure string
	err := room.Read.QueryRow(ctx, `
		select e.status, left(v.input, 8192), octet_length(v.input), left(v.variables, 8192), octet_length(v.variables),
		       left(v.result, 8192), octet_length(v.result), left(e.result_summary, 8192), octet_length(e.result_summary),
		       left(v.error, 8192), octet_length(v.error)
		  from agent_executions e
		 cross join lateral (select e.input::text as input, e.variables::text as variables, coalesce(e.result::text, '') as result,
		                            coalesce(e.error_message, '') as error) v
		 where e.id = @id`, postgres.Strict{"id": v.About.(executionVisit).ID}).
		Scan(&got.Status, &input, &got.Input.Bytes, &variables, &got.Variables.Bytes, &result, &got.Result.Bytes,
			&summary, &got.Summary.Bytes, &failure, &got.Error.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read the values of the execution: %w", err)
	}
	got.Input, got.Variables, got.Result = shownJSON(input, got.Input.Bytes), shownJSON(variables, got.Variables.Bytes), shownJSON(result, got.Result.Bytes)
	got.Summary, got.Error = shownText(summary, got.Summary.Bytes), shownText(failure, got.Error.Bytes)
	return got, nil
}

// executionLane is a lane that an execution has, or has lent.
type executionLane struct {
	Lane         string
	FencingToken int64
	LockedAt     time.Time
	ExpiresAt    *time.Time // nil when parked
	Lender       *string    // of a lane that it borrows
	Borrower     *string    // of a lane that it has lent
}

// executionLanes reads the lanes that it holds or borrows, and those that it has lent.
func (room *Room) executionLanes(ctx context.Context, v *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select k.* from ((select l.lane, l.fencing_token, l.locked_at, case when not l.parked then l.expires_at end as expires_at,
		        (select o.lender::text from agent_lock_loans o where o.lane = l.lane order by o.depth desc limit 1) as lender,
		        null::text as borrower
		   from agent_locks l
		  where l.execution_id = @id and l.locked_by <> '' and l.expires_at > clock_timestamp() limit @most)
		union all
		(select l.lane, l.fencing_token, o.lent_at, case when not l.parked then l.expires_at end, null, o.borrower::text
		   from agent_lock_loans o join agent_locks l on l.lane = o.lane
		  where o.lender = @id limit @most)) k order by k.lane`, freshPlan,
		postgres.Strict{"id": v.About.(executionVisit).ID, "most": lanesShown})
	if err != nil {
		return nil, fmt.Errorf("read the lanes of the execution: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[executionLane])
	if err != nil {
		return nil, fmt.Errorf("read the lanes of the execution: %w", err)
	}
	return map[string]any{"Lanes": list}, nil
}

// sentMessage is what an execution said in a conversation.
type sentMessage struct {
	ID, ThreadID, Status, Text string
	Bytes                      int64
	CreatedAt                  time.Time
}

// executionMessages reads what it said, newest first, in the order of the index on the execution; see descendants.
func (room *Room) executionMessages(ctx context.Context, v *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select m.id::text, m.thread_id, m.status, left(m.content, 600) as text, octet_length(m.content) as bytes, m.created_at
		  from (select y.id from (select x.id, x.execution_id from agent_messages x
		          where x.execution_id <= @id order by x.execution_id desc limit @near) y
		         where y.execution_id = @id order by y.id desc limit @most + 1) p
		  join agent_messages m on m.id = p.id
		 order by m.id desc`, freshPlan, postgres.Strict{"id": v.About.(executionVisit).ID, "most": messagesShown, "near": 20 * messagesShown})
	if err != nil {
		return nil, fmt.Errorf("read the messages of the execution: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[sentMessage])
	if err != nil {
		return nil, fmt.Errorf("read the messages of the execution: %w", err)
	}
	for i := range list {
		list[i].Text = clip(list[i].Text, list[i].Bytes, 300)
	}
	list, more := onPage(list, messagesShown)
	return map[string]any{"Messages": list, "More": more}, nil
}

// forkForm is what the form for a fork begins with.
type forkForm struct {
	ID, From string
	Flow     string
	Data     bool // the flow is written down as data, in versions
	Input    string
	Hidden   bool     // the input is not offered for editing: it is long, or has what is not shown
	Steps    []string // some of those that can be named
}

// executionFork reads what can be forked from. It does not follow what happens: somebody may be writing in the form.
func (room *Room) executionFork(ctx context.Context, v *visit) (any, error) {
	about := v.About.(executionVisit)
	f := forkForm{ID: about.ID, From: about.From}
	var size int64
	err := room.Read.QueryRow(ctx, `
		select left(e.flow, 200), e.flow_version is not null, left(i.text, 8192), octet_length(i.text)
		  from agent_executions e cross join lateral (select e.input::text as text) i where e.id = @id`,
		postgres.Strict{"id": about.ID}).Scan(&f.Flow, &f.Data, &f.Input, &size)
	if err != nil {
		return nil, fmt.Errorf("read the input of the execution: %w", err)
	}
	if f.Hidden = int64(len(f.Input)) < size || hides(f.Input); f.Hidden {
		f.Input = ""
	}
	rows, err := room.Read.Query(ctx, `
		select c.step from agent_checkpoints c where c.execution_id = @id and octet_length(c.step) <= 300
		 order by c.created_at desc, c.step desc limit @most`, postgres.Strict{"id": about.ID, "most": stepsOffered})
	if err != nil {
		return nil, fmt.Errorf("read recorded steps: %w", err)
	}
	if f.Steps, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
		return nil, fmt.Errorf("read recorded steps: %w", err)
	}
	return f, nil
}

// hides reports whether JSON has anything that is shown otherwise than it is, or not at all: a form that began with
// what is shown would put that into its place.
func hides(text string) bool {
	shown := shownJSON(text, int64(len(text)))
	return !shown.Whole || shown.Text != setOut(text) || strings.ContainsFunc(text, tricky)
}

const (
	treeDeep = 4   // levels below an execution
	treeWide = 50  // children of each
	treeMost = 100 // in all
	forksMax = 50
)

// relative is an execution of a family.
type relative struct {
	ID, Flow, Status string
	ParentID         *string
	CreatedAt        time.Time
	Level            int
	Here             bool // the one that the page is about
	Children         []*relative
}

// fork is an execution that began with what this one had recorded.
type fork struct {
	ID, Status, From string
	CreatedAt        time.Time
}

// executionFamily is where an execution stands.
type executionFamily struct {
	Root  *relative // the first ancestor; nil for one that has neither a parent nor children
	More  bool
	Forks []fork
}

// executionRelatives reads the ancestors, what was started below, and the forks.
func (room *Room) executionRelatives(ctx context.Context, v *visit) (any, error) {
	id := v.About.(executionVisit).ID
	above, err := room.ancestors(ctx, id)
	if err != nil {
		return nil, err
	}
	below, err := room.descendants(ctx, id)
	if err != nil {
		return nil, err
	}
	below, more := onPage(below, treeMost)
	family := executionFamily{More: more}
	if len(above) > 1 || len(below) > 0 {
		family.Root = treeOf(above, below, id)
	}
	family.Forks, err = room.forks(ctx, id)
	return family, err
}

// ancestors are the execution and what is above it, the nearest first.
func (room *Room) ancestors(ctx context.Context, id string) ([]relative, error) {
	rows, err := room.Read.Query(ctx, `
		with recursive line (id, level) as (
		  select x.id, 0 from agent_executions x where x.id = @id
		  union all
		  select p.id, l.level + 1 from line l join agent_executions x on x.id = l.id
		    join agent_executions p on p.id = x.parent_id where l.level < @deepest)
		select x.id::text, left(x.flow, 100) as flow, x.status, x.parent_id::text, x.created_at, l.level
		  from line l join agent_executions x on x.id = l.id order by l.level`, freshPlan,
		postgres.Strict{"id": id, "deepest": executions.MaxDepth})
	if err != nil {
		return nil, fmt.Errorf("read the parents of the execution: %w", err)
	}
	list, err := collectRelatives(rows)
	if err != nil {
		return nil, fmt.Errorf("read the parents of the execution: %w", err)
	}
	return list, nil
}

// descendants are what it has started, level by level: about the oldest treeWide of each, treeMost and one more in
// all. They are read in the order of the index on the parent, some way on: with a condition on the parent and the
// order of the ids the planner may walk through the whole table by id.
func (room *Room) descendants(ctx context.Context, id string) ([]relative, error) {
	rows, err := room.Read.Query(ctx, `
		with recursive tree (id, level) as (
		  select @id::uuid, 0
		  union all
		  select c.id, t.level + 1 from tree t cross join lateral (
		    select y.id from (select x.id, x.parent_id from agent_executions x where x.parent_id >= t.id order by x.parent_id limit @near) y
		     where y.parent_id = t.id order by y.id limit @wide) c
		   where t.level < @deep)
		select x.id::text, left(x.flow, 100) as flow, x.status, x.parent_id::text, x.created_at, t.level
		  from (select id, level from tree limit @most + 2) t join agent_executions x on x.id = t.id
		 where t.level > 0 order by t.level, x.id`, freshPlan,
		postgres.Strict{"id": id, "wide": treeWide, "near": 4 * treeWide, "deep": treeDeep, "most": treeMost})
	if err != nil {
		return nil, fmt.Errorf("read the children of the execution: %w", err)
	}
	list, err := collectRelatives(rows)
	if err != nil {
		return nil, fmt.Errorf("read the children of the execution: %w", err)
	}
	return list, nil
}

func collectRelatives(rows pgx.Rows) ([]relative, error) {
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (r relative, err error) {
		return r, row.Scan(&r.ID, &r.Flow, &r.Status, &r.ParentID, &r.CreatedAt, &r.Level)
	})
}

// treeOf puts a family together, from the first ancestor down.
func treeOf(above, below []relative, id string) *relative {
	known := map[string]*relative{}
	var root *relative
	slices.Reverse(above)
	all := append(above, below...)
	for i := range all {
		r := &all[i]
		r.Here = r.ID == id
		known[r.ID] = r
		if root == nil {
			root = r
		} else if r.ParentID != nil && known[*r.ParentID] != nil {
			known[*r.ParentID].Children = append(known[*r.ParentID].Children, r)
		}
	}
	return root
}

// forks are the executions that began with what this one had recorded, newest first.
func (room *Room) forks(ctx context.Context, id string) ([]fork, error) {
	rows, err := room.Read.Query(ctx, `
		select x.id::text, x.status, left(coalesce(x.forked_step, ''), 600), x.created_at from (
		  select y.id, y.status, y.forked_step, y.created_at, y.forked_from from agent_executions y
		   where y.forked_from <= @id order by y.forked_from desc limit @near) x
		 where x.forked_from = @id order by x.id desc limit @most`, freshPlan, postgres.Strict{"id": id, "most": forksMax, "near": 4 * forksMax})
	if err != nil {
		return nil, fmt.Errorf("read the forks of the execution: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[fork])
	if err != nil {
		return nil, fmt.Errorf("read the forks of the execution: %w", err)
	}
	for i := range list {
		list[i].From = strings.TrimSpace(redact.Text(list[i].From, maxValue))
	}
	return list, nil
}
