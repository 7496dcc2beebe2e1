// Package threads keeps conversations: the tables agent_threads and agent_messages.
//
// A thread is a conversation with one participant, over any channel, for as long as it lasts. It belongs to the
// [Principal] that began it: a chat key, a visitor of a key, a flow, a webhook endpoint, a channel or an admin. Its
// public name is scoped by the owner, so two owners may use one name for two threads, and none finds out about the
// other's. The id is internal: admins and flows choose theirs, and for everybody else [Open] makes one. Who else may read
// and speak is in agent_thread_access: [Let] names a key, a flow or an endpoint, and [Invite] makes a join token, by which
// a visitor gets in with [Join]. An execution speaks in threads of admins, of its flow, in those that it or one above it was
// started in, and in those that were opened to it; the database refuses others.
//
// Messages have places that grow in the order of their commits; [Post] draws
// them under the thread's row lock. The exchange that a message belongs to is its turn, and conversations
// are read in the order of turns, so that an answer follows its question although the next question came
// before it was given.
//
// Reading a conversation for a model costs the same however long it is: [Window] returns the rolling
// summary and the latest turns that fit a number of tokens, by an index, and touches no more rows than a
// few hundred. [Backlog] names what has grown old enough to be summarised, and [SaveSummary] moves the
// summary forward by compare-and-set, so that two who summarise at once do not lose turns.
//
// The right to act in a thread is the lane thread:{id} (see [Lane]). Executions speak through [Send], which takes the lane
// or queues the message; what is queued leaves first-in-first-out when the lane frees, and the lane is the execution's whose message left.
// A lane without a send for ten minutes (settable per thread) is anybody's, unless its holder waits durably. What the other side says
// goes through [Receive] to who waits for it. [Post] is for those who hold the lane by other means, and does not check it. A
// [Dispatcher] sends the queues and delivers the messages of the channels webhook and log, at least once and under one id.
//
// Everything else takes a postgres.DB, so the caller decides what commits together.
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
	// ErrForeign reports a thread that somebody else opened. Tell a caller from outside ErrNotFound.
	ErrForeign = errors.New("the thread belongs to somebody else")
	// ErrInvalid reports an id that no thread can have.
	ErrInvalid = errors.New("a thread id is 1 to 200 printable characters, none invisible, with composed accents (NFC)")
)

// MaxID is how many characters a thread's id may have.
const MaxID = 200

// Thread is a row of agent_threads.
type Thread struct {
	ID             string    `json:"id"`
	Name           string    `json:"name"`       // the public name, scoped by the owner; "": the id
	OwnerKind      Kind      `json:"owner_kind"` // what began it; "": an earlier release
	Channel        string    `json:"channel"`
	Target         string    `json:"target"` // of channel webhook: where its messages go by default
	Agent          string    `json:"agent"`
	Owner          string    `json:"owner"`
	Participant    string    `json:"participant"`
	IdleSeconds    int       `json:"idle_seconds"` // how long its lane lasts without a send; 0 in what is to be made: 600
	NextSeq        int64     `json:"next_seq"`     // 1: nothing was said yet
	Summary        string    `json:"summary"`
	SummaryThrough int64     `json:"summary_through"` // the last turn in the summary
	CreatedAt      time.Time `json:"created_at"`
	UpdatedAt      time.Time `json:"updated_at"`
}

// Lane is the name of the lane in which a thread is spoken.
func Lane(id string) string { return "thread:" + id }

// CheckID reports ErrInvalid for an id that no thread can have, nor its lane.
func CheckID(id string) error {
	if utf8.RuneCountInString(id) > MaxID || !lanes.ValidName(id) {
		return ErrInvalid
	}
	return nil
}

// Get reads one thread; ErrNotFound when there is none.
func Get(ctx context.Context, db postgres.DB, id string) (Thread, error) {
	rows, err := db.Query(ctx, `
		select id, name, owner_kind, channel, target, agent, owner, participant, idle_seconds, next_seq, summary, summary_through, created_at, updated_at
		  from agent_threads where id = @id`, postgres.Strict{"id": postgres.Text(id)})
	return one(rows, err)
}

// Lock reads a thread and keeps others from posting in it until tx ends.
func Lock(ctx context.Context, tx pgx.Tx, id string) (Thread, error) {
	rows, err := tx.Query(ctx, lockThread, postgres.Strict{"id": postgres.Text(id)})
	return one(rows, err)
}

const lockThread = `
		select id, name, owner_kind, channel, target, agent, owner, participant, idle_seconds, next_seq, summary, summary_through, created_at, updated_at
		  from agent_threads where id = @id for no key update`

func one(rows pgx.Rows, err error) (Thread, error) {
	if err != nil {
		return Thread{}, fmt.Errorf("read thread: %w", err)
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Thread])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return Thread{}, fmt.Errorf("read thread: %w", err)
	}
	return got, nil
}

// Filter narrows a listing of threads. Zero values do not narrow; Limit defaults to 50 and is at most 500.
// The listing goes on after the thread with the time and id of Before.
type Filter struct {
	Channel, Owner, Agent string
	BeforeTime            time.Time
	BeforeID              string
	Limit                 int
}

// List reads threads, the one that was spoken in last first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Thread, error) {
	var before any
	if !f.BeforeTime.IsZero() {
		before = f.BeforeTime
	}
	rows, err := db.Query(ctx, `
		select id, name, owner_kind, channel, target, agent, owner, participant, idle_seconds, next_seq, summary, summary_through, created_at, updated_at
		  from agent_threads
		 where (@channel = '' or channel = @channel) and (@owner = '' or owner = @owner) and (@agent = '' or agent = @agent)
		   and (@before::timestamptz is null or (updated_at, id) < (@before, @before_id))
		 order by updated_at desc, id desc limit @limit`,
		postgres.Strict{
			"channel": f.Channel, "owner": f.Owner, "agent": f.Agent, "before": before, "before_id": f.BeforeID,
			"limit": bounded(f.Limit),
		})
	if err != nil {
		return nil, fmt.Errorf("list threads: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[Thread])
	if err != nil {
		return nil, fmt.Errorf("list threads: %w", err)
	}
	return got, nil
}

// bounded is a listing's limit.
func bounded(limit int) int {
	if limit <= 0 {
		return 50
	}
	return min(limit, 500)
}

// HeldThread is a row of the view agent_thread_locks: a thread that an execution holds.
type HeldThread struct {
	ThreadID          string    `json:"thread_id"`
	ActiveExecutionID *string   `json:"active_execution_id"` // nil: something outside executions
	ExecutionLockedAt time.Time `json:"execution_locked_at"` // of the last sign of life
	LockMinutes       int       `json:"lock_minutes"`
	ParticipantName   string    `json:"participant_name"`
	Parked            bool      `json:"parked"` // its holder waits durably
	Stale             bool      `json:"stale"`  // its lease has ended
	Holder            string    `json:"holder"` // execution and claim, or what else holds it
	Queued            int64     `json:"queued"` // messages that wait for it
}

// Locks lists the threads that are held, the longest held first; with stale only those whose lease has ended.
func Locks(ctx context.Context, db postgres.DB, stale bool) ([]HeldThread, error) {
	rows, err := db.Query(ctx, `
		select thread_id, active_execution_id::text, execution_locked_at, lock_minutes, participant_name, parked, stale,
		       holder, queued
		  from agent_thread_locks where stale or not @stale order by execution_locked_at`, postgres.Strict{"stale": stale})
	if err != nil {
		return nil, fmt.Errorf("list held threads: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[HeldThread])
	if err != nil {
		return nil, fmt.Errorf("list held threads: %w", err)
	}
	return got, nil
}
