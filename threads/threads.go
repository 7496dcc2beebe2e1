// Package threads keeps conversations: the tables agent_threads and agent_messages.
//
// A thread is a conversation with one participant, over any channel, for as long as it lasts. It belongs to the
// [Principal] that began it: a chat key, a visitor of a key, a flow, a webhook endpoint, a channel or an admin. Its
// public name is scoped by the owner, so two owners may use one name for two threads, and none finds out about the
// other's. The id is internal: admins and flows choose theirs, and for everybody else [Open] makes one. Who else may
// read and speak is in agent_thread_access: [Let] names a key, a flow or an endpoint, and [Invite] makes a join
// token, by which a visitor gets in with [Join]. An execution speaks in threads of admins, of its flow, in those that
// it or one above it was started in, and in those that were opened to it; the database refuses others.
//
// Messages have places that grow in the order of their commits; [Post] draws them under the thread's row lock. The
// exchange that a message belongs to is its turn, and conversations are read in the order of turns, so that an answer
// follows its question although the next question came before it was given.
//
// Reading a conversation for a model costs the same however long it is: [Window] returns the rolling summary and the
// latest turns that fit a number of tokens, by an index, and touches no more rows than a few hundred. [Backlog] names
// what has grown old enough to be summarised, and [SaveSummary] moves the summary forward by compare-and-set, so that
// two who summarise at once do not lose turns.
//
// The right to act in a thread is the lane thread:{id} (see [Lane]). Executions speak through [Send], which takes the
// lane or queues the message; what is queued leaves first-in-first-out when the lane frees, and the lane is the
// execution's whose message left. A lane without a send for ten minutes (settable per thread) is anybody's, unless
// its holder waits durably. What the other side says goes through [Receive] to who waits for it. [Post] is for those
// who hold the lane by other means, and does not check it. A [Dispatcher] sends the queues and delivers the messages
// of the channels webhook and log, at least once and under one id.
//
// Everything else takes a postgres.DB, so the caller decides what commits together.
package threads

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
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

// Kind is a kind of principal.
type Kind string

// What can begin a thread. Keys, visitors, flows and webhooks can also be let into one.
const (
	ByKey     Kind = "key"     // a chat key: the backend that holds it speaks for its users
	ByVisitor Kind = "visitor" // a visitor of a key that browsers hold, known by a secret
	ByFlow    Kind = "flow"
	ByWebhook Kind = "webhook" // an endpoint
	ByChannel Kind = "channel" // webhook or log: where the messages go
	ByAdmin   Kind = "admin"
)

// Principal is an owner of threads, or who is let into them. Each has names of its own for threads.
type Principal struct {
	Kind  Kind   `json:"kind"`
	Owner string `json:"owner"` // name of the key, flow, endpoint or channel; admin
	Proof string `json:"-"`     // of a visitor: the digest of its secret, see [Visitor]
}

// Admin is who begins threads in the name of the agent.
var Admin = Principal{Kind: ByAdmin, Owner: "admin"}

// Key is the holder of a chat key.
func Key(name string) Principal { return Principal{Kind: ByKey, Owner: name} }

// Visitor is who knows a secret, under a chat key.
func Visitor(key, secret string) Principal {
	sum := sha256.Sum256([]byte(secret))
	return Principal{Kind: ByVisitor, Owner: key, Proof: hex.EncodeToString(sum[:])}
}

// givenOut is the form of the ids and names that the agent makes.
var givenOut = regexp.MustCompile(`^th_([0-9A-HJKMNP-TV-Z]{26}|[0-9a-f]{32})$`)

// GivenOut reports a name that only the agent makes up: who uses it has got it from the agent.
func GivenOut(name string) bool { return givenOut.MatchString(name) }

// Resolve returns the id of the thread that p means by a name; known is false when p has none yet, and id is what it
// would be. Another owner's thread of that name is not told apart from none.
func Resolve(ctx context.Context, db postgres.DB, p Principal, name string) (id string, known bool, err error) {
	if err := CheckID(name); err != nil {
		return "", false, fmt.Errorf("find thread: %w", err)
	}
	b := &pgx.Batch{}
	QueueResolve(b, p, name, &id, &known)
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return "", false, fmt.Errorf("find thread: %w", err)
	}
	return id, known, nil
}

// QueueResolve queues the statement of [Resolve], for a name that [CheckID] takes.
func QueueResolve(b *pgx.Batch, p Principal, name string, id *string, known *bool) {
	b.Queue(`
		select coalesce(own.id, lanekeeper.agent_thread_id(@kind, @owner, @proof, @name)), own.id is not null
		  from (select lanekeeper.agent_thread_for(@kind, @owner, @proof, @name) as id offset 0) own`,
		postgres.Strict{"kind": string(p.Kind), "owner": postgres.Text(p.Owner), "proof": p.Proof, "name": name}).
		QueryRow(func(row pgx.Row) error { return row.Scan(id, known) })
}

// Open returns the thread that p means by t's name, or by its id where it has no name; made is true when it begins
// with this: then t's channel (default chat), target, agent, participant and idle time are its own. [ErrForeign]: the
// id is another owner's.
func Open(ctx context.Context, db postgres.DB, p Principal, t Thread) (got Thread, made bool, err error) {
	name := t.Name
	if name == "" {
		name = t.ID
	}
	if err := CheckID(name); err != nil {
		return Thread{}, false, fmt.Errorf("open thread: %w", err)
	}
	if (p.Kind == ByVisitor) != (p.Proof != "") {
		return Thread{}, false, errors.New("open thread: a visitor has a secret, and nobody else has")
	}
	var id string
	b := &pgx.Batch{}
	queueOpen(b, p, name, t, &id, &made)
	err = db.SendBatch(ctx, b).Close()
	if err == nil && id == "" { // somebody else has begun it meanwhile, or long ago
		var known bool
		if id, known, err = Resolve(ctx, db, p, name); err == nil && !known {
			err = ErrForeign
		}
	}
	if err != nil {
		return Thread{}, false, fmt.Errorf("open thread: %w", err)
	}
	got, err = Get(ctx, db, id)
	return got, made, err
}

// queueOpen queues the statement of Open. id is "" when another owner has the thread's id, or another transaction
// began the thread.
func queueOpen(b *pgx.Batch, p Principal, name string, t Thread, id *string, made *bool) {
	b.Queue(`
		with own as (select lanekeeper.agent_thread_for(@kind, @owner, @proof, @name) as id),
		made as (
		  insert into agent_threads (id, channel, target, agent, owner, participant, idle_seconds, owner_kind, visitor, name)
		  select lanekeeper.agent_thread_id(@kind, @owner, @proof, @name), coalesce(nullif(@channel, ''), 'chat'), @target,
		         coalesce(nullif(@agent, ''), 'agent'), @owner, @participant, coalesce(nullif(@idle::int, 0), 600), @kind, @proof, @name
		    from own where own.id is null on conflict (id) do nothing returning id)
		select id, false from own where id is not null union all select id, true from made`,
		postgres.Strict{
			"kind": string(p.Kind), "owner": postgres.Text(p.Owner), "proof": p.Proof, "name": name, "channel": t.Channel, "target": t.Target,
			"agent": postgres.Text(t.Agent), "participant": postgres.Text(t.Participant), "idle": t.IdleSeconds,
		}).QueryRow(func(row pgx.Row) error {
		if err := row.Scan(id, made); !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		return nil
	})
}

// OpenLocked is [Open] and [Lock] of the thread with an id, which p means by t's name, in one round trip. queue adds
// statements to it, which run under the lock. [ErrForeign]: p means no thread by that name any more, or another one.
func OpenLocked(ctx context.Context, tx pgx.Tx, p Principal, t Thread, queue func(b *pgx.Batch)) (got Thread, err error) {
	var id string
	var made bool
	b := &pgx.Batch{}
	queueOpen(b, p, t.Name, t, &id, &made)
	b.Queue(lockThread, postgres.Strict{"id": postgres.Text(t.ID)}).Query(func(rows pgx.Rows) error {
		got, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Thread])
		if errors.Is(err, pgx.ErrNoRows) {
			err = ErrForeign
		}
		return err
	})
	queue(b)
	known := true
	if err = tx.SendBatch(ctx, b).Close(); err == nil && id == "" { // another transaction began it, after this statement began
		id, known, err = Resolve(ctx, tx, p, t.Name)
	}
	if err == nil && (!known || id != t.ID) {
		err = ErrForeign
	}
	if err != nil {
		return Thread{}, fmt.Errorf("open thread: %w", err)
	}
	return got, nil
}

// Ensure returns the thread with an id, and makes it when there is none; made is true then. It is for those who act
// for the agent. In an execution the flow begins the thread, and gets nobody else's: [ErrForeign]. Anywhere else the
// thread is the admin's, who gets any. t.Owner, where set, is a chat key that may speak in the new thread, and calls
// it by its id; everybody else needs [Invite] or [Let].
func Ensure(ctx context.Context, db postgres.DB, t Thread) (got Thread, made bool, err error) {
	p := Admin
	x, inside := executions.Current(ctx)
	switch {
	case inside:
		p = Principal{Kind: ByFlow, Owner: x.Flow}
	case t.Owner != "":
		p.Owner = t.Owner // which a process of an earlier release reads as the key that may speak
	}
	key := t.Owner
	got, made, err = Open(ctx, db, p, t)
	if inside && errors.Is(err, ErrForeign) {
		var may bool
		if may, err = MayJoin(ctx, db, t.ID, x.ID); err == nil && !may {
			err = ErrForeign
		}
		if err == nil {
			got, err = Get(ctx, db, t.ID)
		}
	}
	if err == nil && made && key != "" {
		_, err = Let(ctx, db, got.ID, Key(key), got.ID, string(p.Kind))
	}
	return got, made, err
}

// OpenForFlow makes sure that an admin may start a flow in a thread, and lets the flow begin it when there is none.
// [ErrNotFound]: it belongs to a key, a visitor or an endpoint, which has not opened it to the flow, nor is parent,
// where given, at work in it.
func OpenForFlow(ctx context.Context, db postgres.DB, id, flow, parent, agent string) error {
	if err := CheckID(id); err != nil {
		return fmt.Errorf("open thread: %w", err)
	}
	if flow == "" {
		return fmt.Errorf("open thread %q: name the flow that begins it", id)
	}
	var err error
	if !GivenOut(id) { // such an id is given out, not chosen
		_, err = db.Exec(ctx, `
			insert into agent_threads (id, channel, agent, owner, owner_kind)
			values (@id, 'chat', coalesce(nullif(@agent, ''), 'agent'), @flow, 'flow') on conflict (id) do nothing`,
			postgres.Strict{"id": id, "flow": flow, "agent": postgres.Text(agent)})
	}
	var may bool
	if err == nil { // who starts a flow in a thread that another flow began opens the thread to it
		err = db.QueryRow(ctx, `
			select exists (select from agent_threads where id = @id and owner_kind = 'flow')
			    or lanekeeper.agent_flow_may_join(@id, @flow, nullif(@parent, '')::uuid)`,
			postgres.Strict{"id": id, "flow": flow, "parent": parent}).Scan(&may)
	}
	if err == nil && !may { // another owner's is not told apart
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("open thread %q: %w", id, err)
	}
	return nil
}

// MayJoin reports whether an execution may read and speak in a thread; true of an id that no thread has.
func MayJoin(ctx context.Context, db postgres.DB, thread, execution string) (bool, error) {
	var may bool
	err := db.QueryRow(ctx, `
		select not exists (select from agent_threads where id = @thread) or lanekeeper.agent_flow_may_join(@thread, null, @execution)`,
		postgres.Strict{"thread": postgres.Text(thread), "execution": execution}).Scan(&may)
	if err != nil {
		return false, fmt.Errorf("look who may speak in the thread: %w", err)
	}
	return may, nil
}

// Find reads a thread for an admin, by its id or by a public name that is unique; [ErrNotFound] when there is none,
// or several.
func Find(ctx context.Context, db postgres.DB, idOrName string) (Thread, error) {
	got, err := Get(ctx, db, idOrName)
	if !errors.Is(err, ErrNotFound) {
		return got, err
	}
	rows, err := db.Query(ctx, `select id from agent_threads where name = @name and name <> '' order by id limit 2`,
		postgres.Strict{"name": postgres.Text(idOrName)})
	if err != nil {
		return Thread{}, fmt.Errorf("find thread: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	switch {
	case err != nil:
		return Thread{}, fmt.Errorf("find thread: %w", err)
	case len(ids) != 1:
		return Thread{}, ErrNotFound
	}
	return Get(ctx, db, ids[0])
}
