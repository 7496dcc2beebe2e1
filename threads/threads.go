// Package threads stores conversations, in agent_threads and agent_messages.
//
// # Threads, owners and access
//
// A thread is a conversation with one participant, over any channel. The [Principal] that creates it owns it: a chat
// key, a visitor of a key, a flow, a webhook endpoint, a channel or an admin. A name is scoped by its owner: two
// owners may use one name for two threads, and neither can detect the other's. Ids are internal. Admins and flows
// choose the ids of their threads; [Open] generates all others.
//
// agent_thread_access lists the other participants that may read and write. [Grant] gives access to a key, a flow or an
// endpoint. [Invite] creates a join token, which a visitor uses in [Join]. An execution may write to threads of admins
// and channels, of its flow, where it or an ancestor started, and where it has a grant. The database rejects all other
// writes.
//
// # Messages and turns
//
// Message seqs grow in commit order: [Post] assigns them under the row lock of the thread. A message belongs to
// a turn, and conversations are read by turn. So an answer follows its question, even if the next question came
// first.
//
// [Window] returns the rolling summary and the latest turns within a number of tokens. It uses an index and reads at
// most 400 rows, so its cost does not grow with the thread. [Backlog] selects turns to summarise. [SaveSummary]
// replaces the summary by compare-and-set, so concurrent summaries lose no turn.
//
// # Sending
//
// The lane thread:{id} (see [Lane]) serialises senders. [Send] acquires it or queues the message. When it is free,
// queued messages are sent first in, first out, and their sender acquires it. Ten minutes after the last send
// (configurable per thread) another execution may acquire it, unless the holder waits
// durably. [Receive] delivers a message of the participant to the execution that waits for it. [Post] does not check
// the lane. A [Dispatcher] sends queued messages and delivers those of the channels webhook and log, at least once,
// under one id.
//
// Functions take a postgres.DB, so the caller chooses the transaction.
package threads

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

var (
	// ErrNotFound reports a thread that does not exist.
	ErrNotFound = errors.New("no such thread")
	// ErrForeign reports a thread of another owner. Report ErrNotFound to external callers.
	ErrForeign = errors.New("the thread belongs to another owner")
	// ErrInvalid reports an invalid thread id.
	ErrInvalid = errors.New("invalid thread id: must be 1 to 200 printable characters in Unicode NFC")
)

// MaxID bounds the id of a thread, in characters.
const MaxID = 200

// Thread is a row of agent_threads.
type Thread struct {
	ID             string    `json:"id"`
	Name           string    `json:"name"`       // unique per owner; "" means the id
	OwnerKind      Kind      `json:"owner_kind"` // kind of its creator; "" on rows of earlier releases
	Channel        string    `json:"channel"`
	Target         string    `json:"target"` // of channel webhook: the default target of its messages
	Agent          string    `json:"agent"`
	Owner          string    `json:"owner"`
	Participant    string    `json:"participant"`
	IdleSeconds    int       `json:"idle_seconds"` // lane lease after the last send; default 600
	NextSeq        int64     `json:"next_seq"`     // seq of the next message; 1 if the thread is empty
	Summary        string    `json:"summary"`
	SummaryThrough int64     `json:"summary_through"` // the last turn in the summary
	CreatedAt      time.Time `json:"created_at"`
	UpdatedAt      time.Time `json:"updated_at"`
	Title          string    `json:"title"` // that a person gave it; "" for none
}

// Lane returns the name of the lane of a thread.
func Lane(id string) string { return "thread:" + id }

// CheckID returns ErrInvalid for an id that is invalid for a thread or its lane.
func CheckID(id string) error {
	if utf8.RuneCountInString(id) > MaxID || !lanes.ValidName(id) {
		return ErrInvalid
	}
	return nil
}

// Get reads one thread; ErrNotFound when there is none.
func Get(ctx context.Context, db postgres.DB, id string) (Thread, error) {
	rows, err := db.Query(ctx, selectThread+` where id = @id`, postgres.Strict{"id": postgres.Text(id)})
	return collectThread(rows, err)
}

// Lock reads a thread and locks its row. Other transactions cannot post until tx ends.
func Lock(ctx context.Context, tx pgx.Tx, id string) (Thread, error) {
	rows, err := tx.Query(ctx, lockThread, postgres.Strict{"id": postgres.Text(id)})
	return collectThread(rows, err)
}

const selectThread = `
		select id, name, owner_kind, channel, target, agent, owner, participant, idle_seconds, next_seq, summary,
		       summary_through, created_at, updated_at, title
		  from agent_threads`

const lockThread = selectThread + ` where id = @id for no key update`

// MaxTitle bounds a title, in characters.
const MaxTitle = 200

// SetTitle names a thread; an empty title takes the name away. It returns the title before, and ErrNotFound when there
// is no thread.
func SetTitle(ctx context.Context, tx pgx.Tx, id, title string) (before string, err error) {
	t, err := Lock(ctx, tx, id)
	if err != nil || t.Title == title {
		return t.Title, err
	}
	_, err = tx.Exec(ctx, `update agent_threads set title = @title where id = @id`,
		postgres.Strict{"id": t.ID, "title": postgres.Text(title)})
	if err != nil {
		err = fmt.Errorf("name thread: %w", err)
	}
	return t.Title, err
}

// SetAgent gives a thread to another agent.
func SetAgent(ctx context.Context, tx pgx.Tx, id, agent string) error {
	_, err := tx.Exec(ctx, `update agent_threads set agent = @agent where id = @id`,
		postgres.Strict{"id": id, "agent": agent})
	if err != nil {
		return fmt.Errorf("change agent of thread: %w", err)
	}
	return nil
}

func collectThread(rows pgx.Rows, err error) (Thread, error) {
	return postgres.CollectOne(rows, err, ErrNotFound, "read thread", pgx.RowToStructByName[Thread])
}

// Filter narrows a listing of threads. A zero field matches every thread. Limit defaults to 50 and is at most 500.
// BeforeTime and BeforeID come from the last thread of the previous page.
type Filter struct {
	Channel, Owner, Agent string
	BeforeTime            time.Time
	BeforeID              string
	Limit                 int
}

// List reads threads, the latest activity first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Thread, error) {
	var before any
	if !f.BeforeTime.IsZero() {
		before = f.BeforeTime
	}
	return postgres.Rows[Thread](ctx, db, "list threads", selectThread+`
		 where (@channel = '' or channel = @channel) and (@owner = '' or owner = @owner) and (@agent = '' or agent = @agent)
		   and (@before::timestamptz is null or (updated_at, id) < (@before, @before_id))
		 order by updated_at desc, id desc limit @limit`,
		postgres.Strict{
			"channel": f.Channel, "owner": f.Owner, "agent": f.Agent, "before": before, "before_id": f.BeforeID,
			"limit": clampLimit(f.Limit),
		})
}

// clampLimit applies the default and the maximum of a listing.
func clampLimit(limit int) int {
	if limit <= 0 {
		return 50
	}
	return min(limit, 500)
}

// HeldThread is a row of the view agent_thread_locks: a thread with a held lane.
type HeldThread struct {
	ThreadID          string    `json:"thread_id"`
	ActiveExecutionID *string   `json:"active_execution_id"` // nil if the holder is not an execution
	ExecutionLockedAt time.Time `json:"execution_locked_at"` // the last send or renewal
	LockMinutes       int       `json:"lock_minutes"`
	ParticipantName   string    `json:"participant_name"`
	Parked            bool      `json:"parked"` // its holder waits durably
	Stale             bool      `json:"stale"`  // its lease has ended
	Holder            string    `json:"holder"` // execution and claim, or another owner
	Queued            int64     `json:"queued"` // queued messages
}

// Locks lists the held threads, the longest held first; with stale only those whose lease has ended.
func Locks(ctx context.Context, db postgres.DB, stale bool) ([]HeldThread, error) {
	return postgres.Rows[HeldThread](ctx, db, "list held threads", `
		select thread_id, active_execution_id::text, execution_locked_at, lock_minutes, participant_name, parked, stale,
		       holder, queued
		  from agent_thread_locks where stale or not @stale order by execution_locked_at`, postgres.Strict{"stale": stale})
}

// Find reads a thread by its id, or by a name that is unique among all owners; [ErrNotFound] otherwise.
func Find(ctx context.Context, db postgres.DB, idOrName string) (Thread, error) {
	thread, err := Get(ctx, db, idOrName)
	if !errors.Is(err, ErrNotFound) {
		return thread, err
	}
	ids, err := postgres.Values[string](ctx, db, "find thread",
		`select id from agent_threads where name = @name and name <> '' order by id limit 2`,
		postgres.Strict{"name": postgres.Text(idOrName)})
	switch {
	case err != nil:
		return Thread{}, err
	case len(ids) != 1:
		return Thread{}, ErrNotFound
	}
	return Get(ctx, db, ids[0])
}
