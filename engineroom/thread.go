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

// threadPage shows one conversation, with a form for the admin.
func (room *Room) threadPage() page {
	return page{
		path: "/threads/{id}", name: "thread", title: "Thread", open: room.openThread,
		parts: []part{
			{name: "about", interval: time.Second, load: room.threadFacts},
			{name: "conversation", interval: time.Second, load: room.conversation},
			{name: "queued", interval: time.Second, load: room.queuedMessages},
			{name: "say", load: room.sayForm},
		},
	}
}

const (
	threadMessagesShown = 50  // messages on a page
	queueShown          = 100 // queued messages
)

// threadSubject is the thread of a page.
type threadSubject struct {
	ID string
	// turn and seq are the cursor of the conversation; zero for the newest messages.
	turn, seq int64
}

// openThread finds the thread, sets the subject with the cursor of the conversation, and returns the page's title.
func (room *Room) openThread(ctx context.Context, req *pageRequest) (string, error) {
	id := req.path("id")
	if err := threads.CheckID(id); err != nil {
		return "", problem.New(http.StatusBadRequest, "%s", err).Kind("malformed-id", "Malformed id")
	}
	q, err := filtersOf(req.Query, "before")
	if err != nil {
		return "", err
	}
	subject := threadSubject{ID: id}
	if q["before"] != "" {
		turn, seq, _ := strings.Cut(q["before"], "-")
		var turnErr, seqErr error
		subject.turn, turnErr = strconv.ParseInt(turn, 10, 64)
		subject.seq, seqErr = strconv.ParseInt(seq, 10, 64)
		if turnErr != nil || seqErr != nil || subject.turn < 1 || subject.seq < 1 {
			return "", invalidCursor()
		}
	}
	var participant string
	err = room.Read.QueryRow(ctx, `select left(participant, 100) from agent_threads where id = @id`,
		postgres.Strict{"id": id}).Scan(&participant)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return "", problem.New(http.StatusNotFound, "there is no thread %.200q", id)
	case err != nil:
		return "", fmt.Errorf("read thread: %w", err)
	}
	req.Subject = subject
	if participant != "" {
		return "Thread with " + participant, nil
	}
	return "Thread " + cut(60, id), nil
}

// threadRecord is a thread with its holder.
type threadRecord struct {
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
	Turns                                          []threadTurn `db:"-"`
}

// Lane is the thread's lane.
func (t threadRecord) Lane() string { return threads.Lane(t.ID) }

// SummaryShown is the summary, cut.
func (t threadRecord) SummaryShown() string { return clip(t.Summary, t.SummaryBytes, maxShownText) }

// threadTurn is an open execution of a thread.
type threadTurn struct {
	ID, Flow, Status string
	Draft            string // the end of the text so far
	DraftBytes       int64
	CreatedAt        time.Time
	HaltedAt         *time.Time `db:"-"`
}

// maxNearTurns bounds the open executions that the search for those of a thread reads.
const maxNearTurns = 200

// threadFacts reads the thread with its lane and its open executions. The search for these walks the index of open
// executions from the thread's id downward, so the thread's own come first, and maxNearTurns bounds the walk if it has
// few. In another order, the planner may scan the table.
func (room *Room) threadFacts(ctx context.Context, req *pageRequest) (any, error) {
	id := req.Subject.(threadSubject).ID
	t, err := postgres.Row[threadRecord](ctx, room.Read, "read thread", `
		select t.id, left(t.channel, 100) as channel, left(t.target, 200) as target, left(t.agent, 100) as agent,
		       left(t.owner, 200) as owner, left(t.participant, 200) as participant, t.idle_seconds, t.next_seq - 1 as said,
		       left(t.summary, 8192) as summary, octet_length(t.summary) as summary_bytes, t.summary_through, t.created_at,
		       t.updated_at, left(coalesce(l.locked_by, ''), 255) as holder, l.execution_id::text as holder_id,
		       case when l.parked then l.locked_at else l.expires_at - make_interval(secs => l.ttl_seconds) end as held_since,
		       case when not l.parked then l.expires_at end as expires_at, coalesce(l.parked, false) as parked,
		       coalesce(l.expires_at <= clock_timestamp(), false) as stale,
		       (select count(*) from (select from agent_lock_waiters w where w.lane = l.lane limit 100) c) as waiters
		  from agent_threads t left join agent_locks l on l.lane = 'thread:' || @id and l.locked_by <> ''
		 where t.id = @id`, postgres.Strict{"id": id})
	if err != nil {
		return nil, err
	}
	t.Turns, err = postgres.Rows[threadTurn](ctx, room.Read, "read the turns of the thread", `
		select e.id::text, left(e.flow, 100) as flow, e.status, right(coalesce(d.content, ''), 2000) as draft,
		       octet_length(coalesce(d.content, '')) as draft_bytes, e.created_at
		  from (select x.id, x.flow, x.status, x.created_at, x.thread_id from agent_executions x
		         where x.thread_id <= @id and x.completed_at is null order by x.thread_id desc limit @near) e
		  left join agent_message_drafts d on d.execution_id = e.id
		 where e.thread_id = @id order by e.id desc limit 20`, customPlan, postgres.Strict{"id": id, "near": maxNearTurns})
	if err != nil {
		return nil, err
	}
	return t, haltRunning(ctx, room.Read, len(t.Turns), func(i int) string { return t.Turns[i].ID }, func(i int, h halt) {
		if !h.Unclaimed {
			t.Turns[i].Status, t.Turns[i].HaltedAt = h.State, &h.At
		}
	})
}

// threadMessage is a message.
type threadMessage struct {
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

// messageRowColumns are the columns of threadMessage, of agent_messages m. The text has one character more than
// maxShownText, so that clip sees that it is cut.
const messageRowColumns = ` m.id::text, m.role, left(m.content, 4001) as text, left(m.channel, 100) as channel,
	left(m.target, 200) as target, m.status, octet_length(m.content) as bytes, m.turn, m.seq,
	m.execution_id::text, left(m.trace_id, 200) as trace_id, m.interrupted, m.attempts,
	left(m.error_message, 1000) as error, m.created_at, m.delivered_at, m.next_attempt_at `

func collectThreadMessages(rows pgx.Rows, err error) ([]threadMessage, error) {
	list, err := postgres.Collect(rows, err, "read messages", pgx.RowToStructByNameLax[threadMessage])
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].Text = clip(list[i].Text, list[i].Bytes, maxShownText)
	}
	return list, nil
}

// conversation reads a page of messages by turn, oldest first.
func (room *Room) conversation(ctx context.Context, req *pageRequest) (any, error) {
	subject := req.Subject.(threadSubject)
	rows, err := room.Read.Query(ctx, `
		select `+messageRowColumns+` from (
		  select x.id from agent_messages x
		   where x.thread_id = @id and x.turn > 0 and (@turn::bigint = 0 or (x.turn, x.seq) < (@turn, @seq::bigint))
		   order by x.turn desc, x.seq desc limit @limit + 1) p
		  join agent_messages m on m.id = p.id
		 order by m.turn desc, m.seq desc`, customPlan,
		postgres.Strict{"id": subject.ID, "turn": subject.turn, "seq": subject.seq, "limit": threadMessagesShown})
	list, err := collectThreadMessages(rows, err)
	if err != nil {
		return nil, err
	}
	list, more := firstN(list, threadMessagesShown)
	slices.Reverse(list)
	result := map[string]any{"Messages": list, "Older": "", "Latest": ""}
	address := "/threads/" + url.PathEscape(subject.ID)
	if more {
		result["Older"] = fmt.Sprintf("%s?before=%d-%d#conversation", address, *list[0].Turn, *list[0].Seq)
	}
	if subject.turn != 0 {
		result["Latest"] = address + "#conversation"
	}
	return result, nil
}

// queuedMessages reads the queue in order, and the newest 10 withdrawn or undelivered messages.
func (room *Room) queuedMessages(ctx context.Context, req *pageRequest) (any, error) {
	id := req.Subject.(threadSubject).ID
	rows, err := room.Read.Query(ctx, `
		select `+messageRowColumns+`, row_number() over (order by m.id) as place from (
		  select x.id from agent_messages x where x.thread_id = @id and x.status = 'queued' order by x.id limit @limit + 1) p
		  join agent_messages m on m.id = p.id
		 order by m.id`, customPlan, postgres.Strict{"id": id, "limit": queueShown})
	queue, err := collectThreadMessages(rows, err)
	if err != nil {
		return nil, err
	}
	rows, err = room.Read.Query(ctx, `
		select `+messageRowColumns+` from (
		  select x.id from agent_messages x
		   where x.thread_id = @id and x.seq is null and x.status in ('withdrawn', 'failed')
		     order by x.created_at desc limit 10) p
		  join agent_messages m on m.id = p.id
		 order by m.id desc`, customPlan, postgres.Strict{"id": id})
	unsent, err := collectThreadMessages(rows, err)
	if err != nil {
		return nil, err
	}
	queue, more := firstN(queue, queueShown)
	return map[string]any{"Queue": queue, "More": more, "Unsent": unsent}, nil
}

// sayForm is the admin's form. It is not live, because an update would lose typed text.
func (room *Room) sayForm(_ context.Context, req *pageRequest) (any, error) {
	return req.Subject.(threadSubject), nil
}
