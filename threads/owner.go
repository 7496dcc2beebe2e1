package threads

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

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
