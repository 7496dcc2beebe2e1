//go:build unix

package linearizability_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
)

// kin is one execution's side of a family: a plain SQL session that runs a parent or its children.
type kin struct {
	session
	lane     string
	worker   string
	children chan string // from the parent to who runs its children
}

// families plays a parent and its children in the lane, from two sessions, until ctx ends.
func (p part) families(ctx context.Context, tape *tape) {
	children := make(chan string, 1)
	side := func(n int) *kin {
		return &kin{
			session: session{tape: tape, url: p.URL, name: fmt.Sprintf("%s.%d", p.Name, n), rand: p.random(n)},
			lane:    p.Own, children: children,
		}
	}
	parent, child := side(0), side(1)
	var group sync.WaitGroup
	group.Go(func() { parent.runParent(ctx) })
	group.Go(func() { child.runChildren(ctx) })
	group.Wait()
}

// connected makes a connection if there is none.
func (k *kin) connected(ctx context.Context) bool {
	if k.conn != nil && !k.conn.IsClosed() {
		return true
	}
	conn, err := pgx.Connect(ctx, k.url)
	if err != nil {
		return false
	}
	k.conn = conn
	return true
}

var errAway = errors.New("the database is away")

// text is a text that a statement answers, "" when it answers nothing.
func (k *kin) text(ctx context.Context, sql string, args ...any) (text string, err error) {
	if !k.connected(ctx) {
		return "", errAway
	}
	err = k.conn.QueryRow(ctx, sql, args...).Scan(&text)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	return text, err
}

// newExecution starts an execution; a child inherits.
func (k *kin) newExecution(ctx context.Context, parent string) (string, error) {
	return k.text(ctx, `
		insert into agent_executions (trace_id, surface, flow, parent_id, awaited, inherits)
		values ($1, 'flow', 'flow', nullif($2, '')::uuid, $2 <> '', $2 <> '')
		  returning id::text`, string(trace.New(trace.Flow)), parent)
}

// hired registers a worker that outlives the test.
func (k *kin) hired(ctx context.Context) (err error) {
	if k.worker == "" {
		k.worker, err = k.text(ctx, `
			insert into agent_workers (name, expires_at) values ('lanetest', clock_timestamp() + interval '1 hour')
			  returning id::text`)
	}
	return err
}

// claimIt claims an execution; only that of a parent concerns its lane.
func (k *kin) claimIt(ctx context.Context, id string) error {
	o := k.tape.call(&op{Kind: kindClaim, Lane: k.lane, Owner: id})
	err := k.conn.QueryRow(ctx, `select coalesce(max(claim), 0) from lanekeeper.claim_agent_execution($1, $2)`, id,
		k.worker).Scan(&o.Got)
	o.OK = o.Got > 0
	k.tape.done(o, err)
	return err
}

// take takes the lane for the claim of an execution, which may borrow.
func (k *kin) take(ctx context.Context, g grant) (grant, bool) {
	o := k.tape.call(&op{Kind: kindTake, Lane: g.lane, Owner: g.owner, TTL: g.ttl})
	var ends time.Time
	var holder string
	err := k.conn.QueryRow(ctx, `select acquired, coalesce(fencing_token, 0), coalesce(expires_at, 'epoch'),
		coalesce(locked_by, ''),
		coalesce(lender::text, '') from lanekeeper.acquire_agent_execution_lock($1, $2,
		  $3)`, g.lane, g.owner, g.ttl/1_000_000).
		Scan(&o.OK, &o.Got, &ends, &holder, &o.Lender)
	o.told(ends, holder)
	k.tape.done(o, err)
	g.token = o.Got
	return g, err == nil && o.OK
}

// runParent claims its execution, takes the lane, writes, parks it until a child has had its time, and begins again.
// After a break it finds out how things are.
func (k *kin) runParent(ctx context.Context) {
	var id string
	for testkit.Wait(ctx, time.Duration(k.rand.IntN(15))*time.Millisecond) {
		work := context.WithoutCancel(ctx)
		if err := k.hired(work); err != nil {
			continue
		}
		if id == "" {
			var err error
			if id, err = k.newExecution(work, ""); err != nil {
				id = ""
				continue
			}
		}
		var status string
		var claim, wait int64
		var claimed bool
		if !k.connected(work) || k.conn.QueryRow(work, `
			select status, claim, claimed_by is not null, wait_number from agent_executions where id = $1`, id).
			Scan(&status, &claim, &claimed, &wait) != nil {
			continue
		}
		switch {
		case status == "waiting":
			testkit.Wait(ctx, time.Duration(k.rand.IntN(60))*time.Millisecond)
			o := k.tape.call(&op{Kind: kindResume, Lane: k.lane, Owner: id, Token: wait})
			k.tape.done(o, k.conn.QueryRow(work, `
				select count(*) = 1 from (
				  select x.id, case when x.waiting_for = 'agent' then lanekeeper.agent_uuid(x.waiting_key) end as child
				    from agent_executions x
				   where x.id = $1 and x.status = 'waiting' and x.wait_number = $2 for no key update) e,
				  lanekeeper.resume_agent_executions(array[e.id], array['{}'::jsonb], '{}', null,
				    e.child) r`, id, wait).Scan(&o.OK))
		case !claimed:
			_ = k.claimIt(work, id) // recorded
		default:
			k.runClaim(work, id, claim)
		}
	}
}

// runClaim is what a parent does under one claim, up to the park.
func (k *kin) runClaim(ctx context.Context, id string, claim int64) {
	g := grant{lane: k.lane, owner: fmt.Sprint(id, "#", claim), ttl: parentTTL}
	for range 4 {
		got, ok := k.take(ctx, g)
		if ok {
			k.keep(got)
			k.write(ctx, got)
			break
		}
		if k.conn.IsClosed() {
			return
		}
		testkit.Wait(ctx, 10*time.Millisecond)
	}
	if _, err := k.parkOn(ctx, id, claim); err != nil {
		return
	}
	if len(k.held) > 0 {
		k.write(ctx, k.held[k.rand.IntN(len(k.held))]) // too late: the park made the token void
	}
}

// parkOn starts a child and parks its parent until it ends.
func (k *kin) parkOn(ctx context.Context, id string, claim int64) (child string, err error) {
	child, err = k.newExecution(ctx, id)
	if err != nil {
		return "", err
	}
	if _, err := k.text(ctx, `select claim::text from lanekeeper.claim_agent_execution($1, $2)`, child,
		k.worker); err != nil {
		return "", err
	}
	select {
	case k.children <- child:
	default: // the one before is still at work
	}
	if k.rand.IntN(3) == 0 {
		testkit.Wait(ctx, time.Duration(k.rand.IntN(10))*time.Millisecond)
	}
	o := k.tape.call(&op{Kind: kindPark, Lane: k.lane, Owner: id, Token: claim, Child: child})
	var came *string
	err = k.conn.QueryRow(ctx, `select lanekeeper.wait_agent_execution($1, $2, $3, 'agent', $4, '1 hour', null)::text`,
		id, claim, "child "+child, child).Scan(&came)
	o.OK = err == nil && came == nil
	k.tape.done(o, err)
	return child, err
}

// runChildren borrows the lane for each child, writes, and gives it back in one of the ways that there are.
func (k *kin) runChildren(ctx context.Context) {
	for ctx.Err() == nil {
		var id string
		select {
		case <-ctx.Done():
			return
		case id = <-k.children:
		}
		work := context.WithoutCancel(ctx)
		if !k.connected(work) {
			continue
		}
		k.runChild(work, grant{lane: k.lane, owner: id + "#1", ttl: 1_000_000}, id)
	}
}

func (k *kin) runChild(ctx context.Context, g grant, id string) {
	for range 12 {
		got, ok := k.take(ctx, g)
		if ok {
			g = got
			break
		}
		if k.conn.IsClosed() || !testkit.Wait(ctx, 5*time.Millisecond) {
			return
		}
	}
	if g.token != 0 {
		k.keep(g)
		k.write(ctx, g)
		if k.rand.IntN(3) == 0 {
			k.renew(ctx, g)
		}
	}
	switch k.rand.IntN(4) {
	case 0: // it expires, or is recalled
		return
	case 1:
		k.release(ctx, g)
	}
	if k.conn.IsClosed() {
		return
	}
	o := k.tape.call(&op{Kind: kindFinish, Lane: k.lane, Owner: id, Token: 1})
	_, err := k.conn.Exec(ctx,
		`select lanekeeper.complete_agent_execution($1::uuid, 1, 'completed', '', null, null, null)`, id)
	o.OK = err == nil
	k.tape.done(o, err)
	if len(k.held) > 0 {
		k.write(ctx, k.held[k.rand.IntN(len(k.held))])
	}
}
