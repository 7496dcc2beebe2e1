package engineroom

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

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

// hides reports whether JSON has anything that is shown otherwise than it is, or not at all: a form that began with what
// is shown would put that into its place.
func hides(text string) bool {
	shown := shownJSON(text, int64(len(text)))
	return !shown.Whole || shown.Text != setOut(text) || strings.ContainsFunc(text, tricky)
}
