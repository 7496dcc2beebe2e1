package threads

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/models"
)

// Status is the state of a message.
type Status string

// The states of a message. Received is that of incoming messages.
const (
	Queued    Status = "queued" // no place in the thread yet
	Sending   Status = "sending"
	Sent      Status = "sent"
	Delivered Status = "delivered"
	Received  Status = "received"
	Failed    Status = "failed"
	Withdrawn Status = "withdrawn"
)

// The roles of messages.
const (
	User      = models.RoleUser
	Assistant = models.RoleAssistant
)

// Message is a row of agent_messages.
type Message struct {
	ID           string     `json:"id"`
	ThreadID     string     `json:"thread_id"`
	Seq          *int64     `json:"seq"`  // nil while it is queued
	Turn         *int64     `json:"turn"` // the seq of the first message of its turn
	Role         string     `json:"role"`
	Content      string     `json:"content"`
	Channel      string     `json:"channel"`
	Target       string     `json:"target"` // of channel webhook
	ExecutionID  *string    `json:"execution_id"`
	TraceID      string     `json:"trace_id"`
	Status       Status     `json:"status"`
	Interrupted  bool       `json:"interrupted"` // only a part was said
	Tokens       int        `json:"tokens"`      // an estimate
	Attempts     int        `json:"attempts"`
	ErrorMessage *string    `json:"error_message"`
	CreatedAt    time.Time  `json:"created_at"`
	SentAt       *time.Time `json:"sent_at"`
	Images       int        `json:"images,omitempty"` // the number of its images; see Images
}

// NewMessage is a message to post.
type NewMessage struct {
	ThreadID    string // of an open thread
	Role        string
	Content     string // without NUL and invalid UTF-8, which PostgreSQL cannot store
	Channel     string
	Target      string // of Channel
	ExecutionID string // "" for none
	TraceID     string
	Status      Status
	Turn        int64 // its turn; 0: it starts one
	Follows     bool  // of PostAll: it belongs to the turn of the previous message
	Interrupted bool
	Images      []Image // not of a queued message; db must be a transaction
}

// Post adds a message to a thread and assigns its place, unless it is queued. The thread's row stays locked until the
// caller's transaction ends, so places become visible in order. ErrNotFound: there is no such thread.
func Post(ctx context.Context, db postgres.DB, d NewMessage) (Message, error) {
	posted, err := PostAll(ctx, db, d.ThreadID, []NewMessage{d})
	if err != nil {
		return Message{}, err
	}
	return posted[0], nil
}

// PostAll posts messages to one thread in order, with one statement. Either all or none of them are queued.
func PostAll(ctx context.Context, db postgres.DB, thread string, drafts []NewMessage) ([]Message, error) {
	if len(drafts) == 0 {
		return nil, nil
	}
	var columns messageColumns
	for i, d := range drafts {
		columns.add(i, d)
	}
	rows, err := db.Query(ctx, `
		with drafts as (
		  select * from unnest(@roles::text[], @contents::text[], @channels::text[], @targets::text[], @executions::text[],
		         @traces::text[], @statuses::text[],
		         @interrupted::boolean[], @tokens::int[], @turns::bigint[], @starts::int[])
		         with ordinality d (role, content, channel, target, execution_id, trace_id, status, interrupted, tokens, turn,
		                            start, n)),
		place as (
		  update agent_threads set next_seq = next_seq + @places::int, updated_at = clock_timestamp()
		   where id = @thread_id returning next_seq - @places::int - 1 as before)
		insert into agent_messages (thread_id, seq, turn, role, content, channel, target, execution_id, trace_id, status,
		       interrupted, tokens, sent_at)
		select @thread_id, s.seq, case when s.seq is not null then coalesce(nullif(d.turn, 0), p.before + d.start) end,
		       d.role, d.content, d.channel, d.target, nullif(d.execution_id, '')::uuid, d.trace_id, d.status, d.interrupted,
		       d.tokens, case when d.status in ('sent', 'sending', 'delivered', 'received') then clock_timestamp() end
		  from place p, drafts d, lateral (select case when d.status <> 'queued' then p.before + d.n end as seq) s
		    order by d.n
		returning `+ownColumns, columns.args(thread))
	if err != nil {
		return nil, fmt.Errorf("post message: %w", err)
	}
	posted, err := pgx.CollectRows(rows, pgx.RowToStructByNameLax[Message])
	if err == nil && len(posted) == 0 {
		err = ErrNotFound
	}
	if err == nil {
		err = saveImages(ctx, db, posted, drafts)
	}
	if err != nil {
		return nil, fmt.Errorf("post message: %w", err)
	}
	return posted, nil
}

// messageColumns has the columns of new messages, one element per message. seqCount is the number of messages that get
// a seq.
type messageColumns struct {
	roles, contents, channels, targets, executions, traces, statuses []string
	interrupted                                                      []bool
	tokens, starts                                                   []int
	turns                                                            []int64
	seqCount                                                         int
}

// add adds message i. Its start is the number of the message that starts its turn, unless it names a turn.
func (b *messageColumns) add(i int, d NewMessage) {
	content := postgres.Text(d.Content)
	start, turn := i+1, d.Turn
	if d.Follows && i > 0 {
		start, turn = b.starts[i-1], b.turns[i-1]
	}
	if d.Status != Queued {
		b.seqCount++
	}
	b.targets = append(b.targets, d.Target)
	b.roles, b.contents, b.channels = append(b.roles, d.Role), append(b.contents, content), append(b.channels, d.Channel)
	b.executions, b.traces, b.statuses = append(b.executions, d.ExecutionID), append(b.traces, d.TraceID),
		append(b.statuses, string(d.Status))
	b.interrupted, b.tokens = append(b.interrupted, d.Interrupted), append(b.tokens, tokens(d.Role, content, d.Images...))
	b.turns, b.starts = append(b.turns, turn), append(b.starts, start)
}

func (b *messageColumns) args(thread string) postgres.Strict {
	return postgres.Strict{
		"thread_id": postgres.Text(thread), "roles": b.roles, "contents": b.contents, "channels": b.channels,
		"targets": b.targets, "executions": b.executions,
		"traces": b.traces, "statuses": b.statuses, "interrupted": b.interrupted, "tokens": b.tokens,
		"turns": b.turns, "starts": b.starts,
		"places": b.seqCount,
	}
}

// tokens estimates the tokens of a message in a prompt.
func tokens(role, content string, images ...Image) int {
	m := models.Message{Role: role, Content: content}
	for range images {
		m.Parts = append(m.Parts, models.Part{Image: &models.Image{}})
	}
	return models.EstimateTokens([]models.Message{m})
}

// MessageFilter narrows a listing of messages. Zero values do not narrow; Limit defaults to 50 and is at most 500.
// Before is the seq of the last message of the previous page. UnsentBefore is the id of its last message if that has
// no seq; then only messages without a seq follow.
type MessageFilter struct {
	ThreadID, ExecutionID string
	Role                  string
	Before                int64
	UnsentBefore          string
	Limit                 int
}

// Messages reads the messages of a thread, or of an execution, newest first. Queued messages precede all others.
func Messages(ctx context.Context, db postgres.DB, f MessageFilter) ([]Message, error) {
	if f.ThreadID == "" && f.ExecutionID == "" {
		return nil, errors.New("list messages: name a thread or an execution")
	}
	return postgres.Rows[Message](ctx, db, "list messages", `
		select `+allColumns+` from agent_messages m
		 where (@thread_id = '' or thread_id = @thread_id)
		   and (@execution_id = '' or execution_id = nullif(@execution_id, '')::uuid)
		   and (@role = '' or role = @role) and (@before::bigint = 0 or seq < @before)
		   and (@unsent = '' or seq is null and id < nullif(@unsent, '')::uuid)
		 order by seq desc nulls first, id desc limit @limit`,
		postgres.Strict{
			"thread_id": postgres.Text(f.ThreadID), "execution_id": f.ExecutionID, "role": f.Role, "before": f.Before,
			"unsent": f.UnsentBefore, "limit": clampLimit(f.Limit),
		})
}

// ErrNoMessage reports a message that a thread does not have.
var ErrNoMessage = errors.New("the thread has no such message")

// Visible reads the messages of a thread that its participant may read, at most limit: newest first, or oldest first.
// after, where set, is the id of the message that they follow; [ErrNoMessage]: the thread does not have it.
func Visible(ctx context.Context, db postgres.DB, thread, after string, ascending bool, limit int) ([]Message, error) {
	afterSeq := int64(0)
	if after != "" {
		err := db.QueryRow(ctx, `
			select seq from agent_messages where id = lanekeeper.agent_uuid(@id) and thread_id = @thread and seq is not null`,
			postgres.Strict{"id": after, "thread": thread}).Scan(&afterSeq)
		if errors.Is(err, pgx.ErrNoRows) {
			err = ErrNoMessage
		}
		if err != nil {
			return nil, fmt.Errorf("find message: %w", err)
		}
	}
	args := postgres.Strict{"thread": thread, "from": afterSeq, "limit": limit}
	if ascending {
		return postgres.Rows[Message](ctx, db, "read messages",
			selectVisible+` and seq > @from::bigint order by seq limit @limit`, args)
	}
	return postgres.Rows[Message](ctx, db, "read messages",
		selectVisible+` and (@from::bigint = 0 or seq < @from) order by seq desc limit @limit`,
		args)
}

// ownColumns are the columns of a [Message] that its row has.
const ownColumns = `id::text, thread_id, seq, turn, role, content, channel, target, execution_id::text, trace_id, status,
	interrupted, tokens, attempts, error_message, created_at, sent_at`

// allColumns are the columns of a [Message] m.
const allColumns = ownColumns + `, (select count(*) from agent_message_images i where i.message_id = m.id) as images`

const selectVisible = `
		select ` + allColumns + ` from agent_messages m
		 where thread_id = @thread and (role = 'user' or channel = 'chat')
		   and status not in ('failed', 'withdrawn', 'queued')`
