package linearizability_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
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
	o.setResult(ends, holder)
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

// parkedEnd is a moment in the year 8307, microseconds: leases that last longer are parked.
const parkedEnd = 200_000_000_000_000_000

// parentTTL is for how long a parent takes its lane, microseconds: longer than any test.
const parentTTL = 3600 * 1_000_000

// family is what the model knows of the executions of a lane: one parent, and the child that it waits for.
type family struct {
	parent  string
	claim   int64  // of the parent
	claimed bool   // somebody runs it
	waits   string // the child that it waits for
	depth   int    // 1 while the lane is lent to a child
}

// without is the family when the lane was broken: nobody has lent it.
func (f family) without() family {
	f.depth = 0
	return f
}

// execution is the id in the name of an owner, empty for one that is none.
func execution(owner string) string {
	id, _, ok := strings.Cut(owner, "#")
	if !ok {
		return ""
	}
	return id
}

func (s state) parentOwner() string {
	return s.family.parent + "#" + strconv.FormatInt(s.family.claim, 10)
}

// toParent hands the lane to the parent under its present claim: parked while it waits.
func (s state) toParent(now, until int64) state {
	s.family.depth = 0
	s = s.give(s.parentOwner(), 0, now, now+parentTTL, add(until, parentTTL))
	if s.family.waits != "" {
		s.from, s.to, s.parked = never, never, true
	}
	return s
}

// add is a moment some time later.
func add(moment, later int64) int64 {
	if moment == never {
		return never
	}
	return moment + later
}

// lapsed is the lane after a loan that expired went back, as it does when somebody looks at the lane or sweeps:
// sweeps are not in the histories, so it may have been before the operation that finds it so.
func (s state) lapsed(o *op) (state, bool) {
	if s.family.depth == 0 {
		return s, false
	}
	_, at, ok := s.gone(s.clock, o.until())
	if !ok {
		return s, false
	}
	return s.toParent(at, o.until()), true
}

// lends reports whether the parent has the lane, and waits for the owner.
func (s state) lends(owner string) bool {
	return s.parked && s.family.depth == 0 && s.owner != "" && execution(s.owner) == s.family.parent &&
		s.family.waits != "" && s.family.waits == execution(owner)
}

// borrowed is a take that was answered with a loan.
func (s state) borrowed(o *op, lo, hi int64) (bool, state) {
	if !s.lends(o.Owner) || o.Lender != s.family.parent || o.Got <= s.token {
		return false, s
	}
	s = s.give(o.Owner, o.Got, lo, lo+o.TTL, hi+o.TTL)
	s.family.depth = 1
	return true, s
}

func (s state) borrowedUnheard(o *op, now int64) (state, bool) {
	if o.Kind != kindTake || !s.lends(o.Owner) {
		return s, false
	}
	s = s.give(o.Owner, 0, now, now+o.TTL, never)
	s.family.depth = 1
	return s, true
}

// turned is what happens to an execution, and to the lane with it. The token of such an operation is the claim that it
// was made under, its owner the execution.
func (s state) turned(o *op, now int64) (bool, state) {
	if !o.OK && !o.Blind {
		return true, s // refused: it changes nothing
	}
	_, live := s.live(now)
	has := live && execution(s.owner) == o.Owner
	switch o.Kind {
	case kindClaim:
		return s.claimedAgain(o, now, has)
	case kindPark:
		if s.family.parent != o.Owner || s.family.claim != o.Token || s.family.waits != "" {
			return false, s
		}
		s.family.waits, s.family.claimed = o.Child, false
		s.family.claim++
		if has {
			s = s.toParent(now, o.until())
		}
		return true, s
	case kindResume:
		if s.family.parent != o.Owner || s.family.waits == "" {
			return false, s
		}
		s.family.waits = ""
		if s.family.depth > 0 || has && s.parked {
			s = s.toParent(now, o.until())
		}
		return true, s
	case kindFinish: // of a child: the parents of the scenes do not end
		switch {
		case s.family.depth > 0 && execution(s.owner) == o.Owner:
			return true, s.toParent(now, o.until())
		case execution(s.owner) == o.Owner:
			return true, s.free(now)
		}
		return true, s
	default:
		return false, s
	}
}

// claimedAgain gives the lane of the parent to its new claim.
func (s state) claimedAgain(o *op, now int64, has bool) (bool, state) {
	next := s.family.claim + 1
	if s.family.parent == "" {
		s.family.parent = o.Owner
	}
	if s.family.parent != o.Owner || s.family.claimed || s.family.waits != "" || !o.Blind && o.Got != next {
		return false, s
	}
	s.family.claim, s.family.claimed = next, true
	if has {
		s = s.toParent(now, o.until())
	}
	return true, s
}
