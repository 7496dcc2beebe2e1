package threads

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Open returns p's thread of the name t.Name, or t.ID without a name. If there is none, Open creates it with t's
// channel (default chat), target, agent, participant and idle time, and created is true. [ErrForeign]: another owner
// has the id.
func Open(ctx context.Context, db postgres.DB, p Principal, t Thread) (thread Thread, created bool, err error) {
	name := cmp.Or(t.Name, t.ID)
	if err := CheckID(name); err != nil {
		return Thread{}, false, fmt.Errorf("open thread: %w", err)
	}
	if (p.Kind == ByVisitor) != (p.Proof != "") {
		return Thread{}, false, errors.New("open thread: Principal.Proof is for visitors only, and required for them")
	}
	var id string
	b := &pgx.Batch{}
	queueOpen(b, p, name, t, &id, &created)
	err = db.SendBatch(ctx, b).Close()
	if err == nil && id == "" { // another transaction has created it
		var found bool
		if id, found, err = Resolve(ctx, db, p, name); err == nil && !found {
			err = ErrForeign
		}
	}
	if err != nil {
		return Thread{}, false, fmt.Errorf("open thread: %w", err)
	}
	thread, err = Get(ctx, db, id)
	return thread, created, err
}

// queueOpen queues the statement of Open. id is "" when another owner has the id, or another transaction created the
// thread.
func queueOpen(b *pgx.Batch, p Principal, name string, t Thread, id *string, created *bool) {
	b.Queue(`
		with own as (select lanekeeper.agent_thread_for(@kind, @owner, @proof, @name) as id),
		made as (
		  insert into agent_threads (id, channel, target, agent, owner, participant, idle_seconds, owner_kind, visitor, name)
		  select lanekeeper.agent_thread_id(@kind, @owner, @proof, @name), coalesce(nullif(@channel, ''), 'chat'), @target,
		         coalesce(nullif(@agent, ''), 'agent'), @owner, @participant, coalesce(nullif(@idle::int, 0), 600), @kind,
		         @proof, @name
		    from own where own.id is null on conflict (id) do nothing returning id)
		select id, false from own where id is not null union all select id, true from made`,
		postgres.Strict{
			"kind": string(p.Kind), "owner": postgres.Text(p.Owner), "proof": p.Proof, "name": name,
			"channel": t.Channel, "target": t.Target,
			"agent": postgres.Text(t.Agent), "participant": postgres.Text(t.Participant), "idle": t.IdleSeconds,
		}).QueryRow(func(row pgx.Row) error {
		if err := row.Scan(id, created); !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		return nil
	})
}

// OpenLocked is [Open] and [Lock] in one round trip. Statements that queue adds run under the row lock. [ErrForeign]:
// p has another thread of that name, or another owner has the id.
func OpenLocked(
	ctx context.Context, tx pgx.Tx, p Principal, t Thread, queue func(b *pgx.Batch),
) (thread Thread, err error) {
	var id string
	var created bool
	b := &pgx.Batch{}
	queueOpen(b, p, t.Name, t, &id, &created)
	b.Queue(lockThread, postgres.Strict{"id": postgres.Text(t.ID)}).Query(func(rows pgx.Rows) error {
		thread, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Thread])
		if errors.Is(err, pgx.ErrNoRows) {
			err = ErrForeign
		}
		return err
	})
	queue(b)
	found := true
	if err = tx.SendBatch(ctx, b).Close(); err == nil && id == "" { // created concurrently
		id, found, err = Resolve(ctx, tx, p, t.Name)
	}
	if err == nil && (!found || id != t.ID) {
		err = ErrForeign
	}
	if err != nil {
		return Thread{}, fmt.Errorf("open thread: %w", err)
	}
	return thread, nil
}

// Ensure returns the thread t.ID and creates it if it is missing; created reports that. In an execution its flow owns a
// new thread, and [ErrForeign] reports a thread that the execution cannot access. Otherwise the admin owns it. The
// chat key t.Owner, if set, gets access to a new thread.
func Ensure(ctx context.Context, db postgres.DB, t Thread) (thread Thread, created bool, err error) {
	p := Admin
	x, inExecution := executions.Current(ctx)
	switch {
	case inExecution:
		p = Principal{Kind: ByFlow, Owner: x.Flow}
	case t.Owner != "":
		p.Owner = t.Owner // read as the key with access by an earlier release
	}
	thread, created, err = Open(ctx, db, p, t)
	if inExecution && errors.Is(err, ErrForeign) {
		var may bool
		if may, err = mayJoin(ctx, db, t.ID, x.ID); err == nil && !may {
			err = ErrForeign
		}
		if err == nil {
			thread, err = Get(ctx, db, t.ID)
		}
	}
	if err == nil && created && t.Owner != "" {
		_, err = Grant(ctx, db, thread.ID, Key(t.Owner), thread.ID, string(p.Kind))
	}
	return thread, created, err
}

// OpenForFlow checks that a flow may start in a thread, and creates the thread if it is missing. [ErrNotFound]: a key,
// a visitor or an endpoint owns it, and neither the flow nor parent has access.
func OpenForFlow(ctx context.Context, db postgres.DB, id, flow, parent, agent string) error {
	if err := CheckID(id); err != nil {
		return fmt.Errorf("open thread: %w", err)
	}
	if flow == "" {
		return fmt.Errorf("open thread %q: the flow is required", id)
	}
	var err error
	if !IsGenerated(id) { // callers cannot choose generated ids
		_, err = db.Exec(ctx, `
			insert into agent_threads (id, channel, agent, owner, owner_kind)
			values (@id, 'chat', coalesce(nullif(@agent, ''), 'agent'), @flow, 'flow') on conflict (id) do nothing`,
			postgres.Strict{"id": id, "flow": flow, "agent": postgres.Text(agent)})
	}
	var allowed bool
	if err == nil { // starting in the thread of another flow grants access
		err = db.QueryRow(ctx, `
			select exists (select from agent_threads where id = @id and owner_kind = 'flow')
			    or lanekeeper.agent_flow_may_join(@id, @flow, nullif(@parent, '')::uuid)`,
			postgres.Strict{"id": id, "flow": flow, "parent": parent}).Scan(&allowed)
	}
	if err == nil && !allowed { // hide that it exists
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("open thread %q: %w", id, err)
	}
	return nil
}

// mayJoin reports whether an execution has access to a thread; true if no thread has the id.
func mayJoin(ctx context.Context, db postgres.DB, thread, execution string) (bool, error) {
	var allowed bool
	err := db.QueryRow(ctx, `
		select not exists (select from agent_threads where id = @thread)
		  or lanekeeper.agent_flow_may_join(@thread, null, @execution)`,
		postgres.Strict{"thread": postgres.Text(thread), "execution": execution}).Scan(&allowed)
	if err != nil {
		return false, fmt.Errorf("check access to thread: %w", err)
	}
	return allowed, nil
}

// Resolve returns the id of p's thread of a name. If there is none, found is false and id is the one that [Open] would
// assign. It ignores threads of other owners.
func Resolve(ctx context.Context, db postgres.DB, p Principal, name string) (id string, found bool, err error) {
	if err := CheckID(name); err != nil {
		return "", false, fmt.Errorf("find thread: %w", err)
	}
	b := &pgx.Batch{}
	QueueResolve(b, p, name, &id, &found)
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return "", false, fmt.Errorf("find thread: %w", err)
	}
	return id, found, nil
}

// QueueResolve queues the statement of [Resolve]. The name must pass [CheckID].
func QueueResolve(b *pgx.Batch, p Principal, name string, id *string, found *bool) {
	b.Queue(`
		select coalesce(own.id, lanekeeper.agent_thread_id(@kind, @owner, @proof, @name)), own.id is not null
		  from (select lanekeeper.agent_thread_for(@kind, @owner, @proof, @name) as id offset 0) own`,
		postgres.Strict{"kind": string(p.Kind), "owner": postgres.Text(p.Owner), "proof": p.Proof, "name": name}).
		QueryRow(func(row pgx.Row) error { return row.Scan(id, found) })
}

// generatedID matches the ids and names that the agent generates.
var generatedID = regexp.MustCompile(`^th_([0-9A-HJKMNP-TV-Z]{26}|[0-9a-f]{32})$`)

// IsGenerated reports whether a name has the form that only the agent generates.
func IsGenerated(name string) bool { return generatedID.MatchString(name) }
