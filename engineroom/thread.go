package engineroom

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/threads"
)

const (
	wordsShown = 50  // messages on a page
	lineShown  = 100 // messages of the queue
)

// threadPage shows one conversation, and lets the admin speak in it.
func (room *Room) threadPage() page {
	return page{
		path: "/threads/{id}", name: "thread", title: "Thread", open: room.openThread,
		parts: []part{
			{name: "about", every: time.Second, load: room.threadFacts},
			{name: "conversation", every: time.Second, load: room.conversation},
			{name: "queued", every: time.Second, load: room.queuedMessages},
			{name: "say", load: room.sayForm},
		},
	}
}

// threadVisit is what a page of one thread is about.
type threadVisit struct {
	ID string
	// turn and seq are where a page of the conversation ends; zero for the newest.
	turn, seq int64
}

// openThread finds the thread.
func (room *Room) openThread(ctx context.Context, v *visit) (string, error) {
	id := v.path("id")
	if err := threads.CheckID(id); err != nil {
		return "", problem.New(http.StatusBadRequest, "%s", err).Kind("malformed-id", "Malformed id")
	}
	q, err := filtersOf(v.Query, "before")
	if err != nil {
		return "", err
	}
	about := threadVisit{ID: id}
	if q["before"] != "" {
		turn, seq, _ := strings.Cut(q["before"], "-")
		var one, two error
		about.turn, one = strconv.ParseInt(turn, 10, 64)
		about.seq, two = strconv.ParseInt(seq, 10, 64)
		if one != nil || two != nil || about.turn < 1 || about.seq < 1 {
			return "", badCursor()
		}
	}
	var participant string
	err = room.Read.QueryRow(ctx, `select left(participant, 100) from agent_threads where id = @id`, postgres.Strict{"id": id}).Scan(&participant)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return "", problem.New(http.StatusNotFound, "there is no thread %.200q", id)
	case err != nil:
		return "", fmt.Errorf("read thread: %w", err)
	}
	v.About = about
	if participant != "" {
		return "Thread with " + participant, nil
	}
	return "Thread " + cut(60, id), nil
}

// threadFact is what is known of a thread, and who holds it.
type threadFact struct {
	ID, Channel, Target, Agent, Owner, Participant string
	IdleSeconds                                    int
	Said                                           int64
	Summary                                        string
	SummaryBytes, SummaryThrough                   int64
	CreatedAt, UpdatedAt                           time.Time
	Holder                                         string
	HolderID                                       *string
	HeldSince, ExpiresAt                           *time.Time
	Parked, Stale                                  bool
	Waiters                                        int64
	Turns                                          []threadTurn
}

// Lane is the lane in which the thread is spoken.
func (t threadFact) Lane() string { return threads.Lane(t.ID) }

// SummaryShown is the summary, cut.
func (t threadFact) SummaryShown() string { return clip(t.Summary, t.SummaryBytes, maxPre) }

// threadTurn is an execution that has something to say in a thread and has not ended.
type threadTurn struct {
	ID, Flow, Status string
	Draft            string // what it has said so far, from its end
	DraftBytes       int64
	CreatedAt        time.Time
}

// threadFacts reads the thread with the lane and the turns under way.
func (room *Room) threadFacts(ctx context.Context, v *visit) (any, error) {
	id := v.About.(threadVisit).ID
	rows, err := room.Read.Query(ctx, `
		select t.id, left(t.channel, 100) as channel, left(t.target, 200) as target, left(t.agent, 100) as agent, left(t.owner, 200) as owner,
		       left(t.participant, 200) as participant, t.idle_seconds, t.next_seq - 1 as said, left(t.summary, 8192) as summary,
		       octet_length(t.summary) as summary_bytes, t.summary_through, t.created_at, t.updated_at,
		       left(coalesce(l.locked_by, ''), 255) as holder, l.execution_id::text as holder_id,
		       case when l.parked then l.locked_at else l.expires_at - make_interval(secs => l.ttl_seconds) end as held_since,
		       case when not l.parked then l.expires_at end as expires_at, coalesce(l.parked, false) as parked,
		       coalesce(l.expires_at <= clock_timestamp(), false) as stale,
		       (select count(*) from (select from agent_lock_waiters w where w.lane = l.lane limit 100) c) as waiters
		  from agent_threads t left join agent_locks l on l.lane = 'thread:' || @id and l.locked_by <> ''
		 where t.id = @id`, postgres.Strict{"id": id})
	if err != nil {
		return nil, fmt.Errorf("read thread: %w", err)
	}
	t, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByNameLax[threadFact])
	if err != nil {
		return nil, fmt.Errorf("read thread: %w", err)
	}
	rows, err = room.Read.Query(ctx, `
		select e.id::text, left(e.flow, 100) as flow, e.status, right(coalesce(d.content, ''), 2000) as draft,
		       octet_length(coalesce(d.content, '')) as draft_bytes, e.created_at
		  from (select x.id, x.flow, x.status, x.created_at, x.thread_id from agent_executions x
		         where x.thread_id <= @id and x.completed_at is null order by x.thread_id desc limit @near) e
		  left join agent_message_drafts d on d.execution_id = e.id
		 where e.thread_id = @id order by e.id desc limit 20`, freshPlan, postgres.Strict{"id": id, "near": 200})
	if err != nil {
		return nil, fmt.Errorf("read the turns of the thread: %w", err)
	}
	if t.Turns, err = pgx.CollectRows(rows, pgx.RowToStructByName[threadTurn]); err != nil {
		return nil, fmt.Errorf("read the turns of the thread: %w", err)
	}
	return t, nil
}

// bubble is a message.
type bubble struct {
	ID, Role, Text, Channel, Target, Status string
	Bytes                                   int64
	Turn, Seq                               *int64
	ExecutionID                             *string
	TraceID                                 string
	Interrupted                             bool
	Attempts                                int
	Error                                   *string
	CreatedAt                               time.Time
	DeliveredAt, NextAttemptAt              *time.Time
	Place                                   int64 // in the queue
}

// bubbleColumns are those of bubble, of agent_messages m.
const bubbleColumns = ` m.id::text, m.role, left(m.content, 4001) as text, left(m.channel, 100) as channel, left(m.target, 200) as target, m.status,
	octet_length(m.content) as bytes, m.turn, m.seq, m.execution_id::text, left(m.trace_id, 200) as trace_id, m.interrupted, m.attempts,
	left(m.error_message, 1000) as error, m.created_at, m.delivered_at, m.next_attempt_at `

func collectBubbles(rows pgx.Rows, err error) ([]bubble, error) {
	if err != nil {
		return nil, fmt.Errorf("read messages: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByNameLax[bubble])
	if err != nil {
		return nil, fmt.Errorf("read messages: %w", err)
	}
	for i := range list {
		list[i].Text = clip(list[i].Text, list[i].Bytes, maxPre)
	}
	return list, nil
}

// conversation reads a page of what was said, as it is read: turn by turn, oldest first.
func (room *Room) conversation(ctx context.Context, v *visit) (any, error) {
	about := v.About.(threadVisit)
	rows, err := room.Read.Query(ctx, `
		select `+bubbleColumns+` from (
		  select x.id from agent_messages x
		   where x.thread_id = @id and x.turn > 0 and (@turn::bigint = 0 or (x.turn, x.seq) < (@turn, @seq::bigint))
		   order by x.turn desc, x.seq desc limit @most + 1) p
		  join agent_messages m on m.id = p.id
		 order by m.turn desc, m.seq desc`, freshPlan,
		postgres.Strict{"id": about.ID, "turn": about.turn, "seq": about.seq, "most": wordsShown})
	list, err := collectBubbles(rows, err)
	if err != nil {
		return nil, err
	}
	list, more := onPage(list, wordsShown)
	slices.Reverse(list)
	got := map[string]any{"Messages": list, "Older": "", "Latest": ""}
	address := "/threads/" + url.PathEscape(about.ID)
	if more {
		got["Older"] = fmt.Sprintf("%s?before=%d-%d#conversation", address, *list[0].Turn, *list[0].Seq)
	}
	if about.turn != 0 {
		got["Latest"] = address + "#conversation"
	}
	return got, nil
}

// queuedMessages reads what stands in the queue, in its order, and what was last taken back or never left.
func (room *Room) queuedMessages(ctx context.Context, v *visit) (any, error) {
	id := v.About.(threadVisit).ID
	rows, err := room.Read.Query(ctx, `
		select `+bubbleColumns+`, row_number() over (order by m.id) as place from (
		  select x.id from agent_messages x where x.thread_id = @id and x.status = 'queued' order by x.id limit @most + 1) p
		  join agent_messages m on m.id = p.id
		 order by m.id`, freshPlan, postgres.Strict{"id": id, "most": lineShown})
	line, err := collectBubbles(rows, err)
	if err != nil {
		return nil, err
	}
	rows, err = room.Read.Query(ctx, `
		select `+bubbleColumns+` from (
		  select x.id from agent_messages x
		   where x.thread_id = @id and x.seq is null and x.status in ('withdrawn', 'failed') order by x.created_at desc limit 10) p
		  join agent_messages m on m.id = p.id
		 order by m.id desc`, freshPlan, postgres.Strict{"id": id})
	unsent, err := collectBubbles(rows, err)
	if err != nil {
		return nil, err
	}
	line, more := onPage(line, lineShown)
	return map[string]any{"Line": line, "More": more, "Unsent": unsent}, nil
}

// sayForm is the form in which the admin speaks. It does not follow what happens: somebody may be writing in it.
func (room *Room) sayForm(_ context.Context, v *visit) (any, error) {
	return v.About.(threadVisit), nil
}
