package engineroom

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// How much of a trace is read. What is left out is always told, with a link to it.
const (
	traceFirst   = 200    // rows from its beginning
	traceLast    = 100    // rows from its end
	traceFailed  = 50     // rows that failed, wherever they are
	traceRuns    = 200    // executions
	traceWaits   = 200    // waits that are over
	traceSummed  = 20_000 // rows that are added up and looked through for errors
	tracePoints  = 5000   // checkpoints that are looked through for waits
	tracePerPage = 100    // rows of a page of the table
	traceText    = 8000   // characters of an input or an output
	traceWhole   = 64_000 // characters of them where one row is shown alone
	traceAllText = 600_000
)

// textEach is how much of an input or an output is read where so many rows are: the page stays one that a phone can load.
func textEach(rows int64) int { return int(min(max(traceAllText/max(2*rows, 1), 400), traceText)) }

var traceViews = []string{"waterfall", "tree", "table"}

// tracePage shows one piece of work, from its beginning to its end.
func (room *Room) tracePage() page {
	return page{
		path: "/traces/{id}", name: "trace", open: room.openTrace,
		parts: []part{
			{name: "summary", every: time.Second, calm: true, load: room.traceSummary},
			{name: "why", every: 2 * time.Second, calm: true, load: room.traceWhy},
			{name: "view", every: time.Second, calm: true, load: room.traceView},
		},
	}
}

// tracedVisit is what a visit of a trace is about. Whoever looks at the same address shares it.
type tracedVisit struct {
	ID    string // in its stored form
	View  string
	Row   string // the one activity that is shown; empty for all
	After string // where the page of the table begins

	mu   sync.Mutex
	seen map[string]settledPart // by part, once the trace has ended
}

// settledPart is what a part of a trace that has ended was loaded with.
type settledPart struct {
	state traceState
	data  any
}

// openTrace finds a trace by any form of its id.
func (room *Room) openTrace(ctx context.Context, v *visit) (string, error) {
	if found, is := v.About.(*tracedVisit); is {
		return "Trace " + found.ID, nil // it was found for the same address, and what was read is kept with it
	}
	q, err := filtersOf(v.Query, "view", "row", "after")
	if err != nil {
		return "", err
	}
	about := &tracedVisit{View: q["view"], seen: map[string]settledPart{}}
	if err := oneOf("view", about.View, traceViews); err != nil {
		return "", err
	}
	if about.View == "" {
		about.View = traceViews[0]
	}
	if about.Row, err = v.uuidFilter("row"); err != nil {
		return "", err
	}
	if about.After, err = v.uuidFilter("after"); err != nil {
		return "", err
	}
	if about.ID, err = room.findTrace(ctx, v.path("id")); err != nil {
		return "", err
	}
	v.About = about
	return "Trace " + about.ID, nil
}

// findTrace is the stored form of an id in any form.
func (room *Room) findTrace(ctx context.Context, anyForm string) (string, error) {
	ids, err := trace.ParseAny(anyForm)
	if err != nil {
		return "", fmt.Errorf("open trace: %w", err)
	}
	forms := make([]string, len(ids))
	for i, id := range ids {
		forms[i] = string(id)
	}
	rows, err := room.Read.Query(ctx, `
		select i.id from unnest(@ids::text[]) i (id)
		 where exists (select from agent_executions e where e.trace_id = i.id)
		    or exists (select from agent_activity a where a.trace_id = i.id) limit 1`,
		freshPlan, postgres.Strict{"ids": forms})
	if err != nil {
		return "", fmt.Errorf("find trace: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return "", fmt.Errorf("find trace: %w", err)
	}
	if len(found) == 0 {
		return "", fmt.Errorf("open trace %s: %w", anyForm, activity.ErrNotFound)
	}
	return found[0], nil
}

// traceState tells whether a trace that has ended is still as it was.
type traceState struct {
	Ended  bool
	Runs   int64
	Moved  *time.Time // the latest change of an execution
	Latest *time.Time // the beginning of the latest activity
}

// settled returns what a part was loaded with when the trace has ended and nothing came since, and loads it otherwise.
// So a trace that somebody keeps open costs two looks at an index once it is over. load also says whether something in
// it is still under way.
func (room *Room) settled(ctx context.Context, about *tracedVisit, part string, load func() (any, bool, error)) (any, error) {
	var now traceState
	rows, err := room.Read.Query(ctx, `
		select r.runs, r.moved, r.ended and not exists (
		         select from agent_activity_open o where o.execution_id = any (r.ids)) as ended,
		       (select a.created_at from agent_activity a where a.trace_id = @id order by a.created_at desc limit 1) as latest
		  from (select count(*) as runs, max(e.updated_at) as moved, array_agg(e.id) as ids,
		               count(*) > 0 and bool_and(e.completed_at is not null) as ended
		          from (select x.id, x.updated_at, x.completed_at from agent_executions x
		                 where x.trace_id = @id order by x.id desc limit @most) e) r`,
		freshPlan, postgres.Strict{"id": about.ID, "most": traceRuns})
	if err != nil {
		return nil, fmt.Errorf("look at trace: %w", err)
	}
	if now, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[traceState]); err != nil {
		return nil, fmt.Errorf("look at trace: %w", err)
	}
	about.mu.Lock()
	was, has := about.seen[part]
	about.mu.Unlock()
	if has && now.Ended && was.state.same(now) {
		return was.data, nil
	}
	data, open, err := load()
	if err != nil {
		return nil, err
	}
	now.Ended = now.Ended && !open
	about.mu.Lock()
	defer about.mu.Unlock()
	about.seen[part] = settledPart{now, data}
	return data, nil
}

// same reports whether nothing was written between two states.
func (s traceState) same(other traceState) bool {
	return s.Ended == other.Ended && s.Runs == other.Runs && sameMoment(s.Moved, other.Moved) && sameMoment(s.Latest, other.Latest)
}

func sameMoment(a, b *time.Time) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Equal(*b)
}
