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

// executionSession is a plain SQL session that runs a parent execution or its children.
type executionSession struct {
	session
	lane     string
	worker   string
	children chan string // from the parent to the session of the children
}

// runFamilies plays a parent and its children in a lane, from two sessions, until ctx ends.
func (p processConfig) runFamilies(ctx context.Context, history *history) {
	children := make(chan string, 1)
	side := func(n int) *executionSession {
		return &executionSession{
			session: session{history: history, url: p.URL, name: fmt.Sprintf("%s.%d", p.Name, n), rand: p.random(n)},
			lane:    p.Own, children: children,
		}
	}
	parent, child := side(0), side(1)
	var group sync.WaitGroup
	group.Go(func() { parent.runParent(ctx) })
	group.Go(func() { child.runChildren(ctx) })
	group.Wait()
}

// connected reports whether the session has a connection. It connects if necessary.
func (k *executionSession) connected(ctx context.Context) bool {
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

var errUnavailable = errors.New("database unavailable")

// text returns the text result of a statement, or "".
func (k *executionSession) text(ctx context.Context, sql string, args ...any) (text string, err error) {
	if !k.connected(ctx) {
		return "", errUnavailable
	}
	err = k.conn.QueryRow(ctx, sql, args...).Scan(&text)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	return text, err
}

// newExecution starts an execution; a child inherits.
func (k *executionSession) newExecution(ctx context.Context, parent string) (string, error) {
	return k.text(ctx, `
		insert into agent_executions (trace_id, surface, flow, parent_id, awaited, inherits)
		values ($1, 'flow', 'flow', nullif($2, '')::uuid, $2 <> '', $2 <> '')
		  returning id::text`, string(trace.New(trace.Flow)), parent)
}

// registerWorker registers a worker with a lease beyond the end of the test.
func (k *executionSession) registerWorker(ctx context.Context) (err error) {
	if k.worker == "" {
		k.worker, err = k.text(ctx, `
			insert into agent_workers (name, expires_at) values ('lanetest', clock_timestamp() + interval '1 hour')
			  returning id::text`)
	}
	return err
}

// claim claims a parent execution, and records that as an operation on its lane.
func (k *executionSession) claim(ctx context.Context, id string) error {
	o := k.history.call(&op{Kind: kindClaim, Lane: k.lane, Owner: id})
	err := k.conn.QueryRow(ctx, `select coalesce(max(claim), 0) from lanekeeper.claim_agent_execution($1, $2)`, id,
		k.worker).Scan(&o.Got)
	o.OK = o.Got > 0
	k.history.done(o, err)
	return err
}

// acquireOrBorrow acquires or borrows the lane under the claim of an execution.
func (k *executionSession) acquireOrBorrow(ctx context.Context, g grant) (grant, bool) {
	o := k.history.call(&op{Kind: kindTake, Lane: g.lane, Owner: g.owner, TTL: g.ttl})
	var ends time.Time
	var holder string
	err := k.conn.QueryRow(ctx, `select acquired, coalesce(fencing_token, 0), coalesce(expires_at, 'epoch'),
		coalesce(locked_by, ''),
		coalesce(lender::text, '') from lanekeeper.acquire_agent_execution_lock($1, $2,
		  $3)`, g.lane, g.owner, g.ttl/1_000_000).
		Scan(&o.OK, &o.Got, &ends, &holder, &o.Lender)
	o.setResult(ends, holder)
	k.history.done(o, err)
	g.token = o.Got
	return g, err == nil && o.OK
}

// runParent claims its execution, acquires the lane, writes, parks the lane while a child runs, and starts again.
// After an error it reads the state of the execution.
func (k *executionSession) runParent(ctx context.Context) {
	var id string
	for testkit.Wait(ctx, time.Duration(k.rand.IntN(15))*time.Millisecond) {
		work := context.WithoutCancel(ctx)
		if err := k.registerWorker(work); err != nil {
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
			o := k.history.call(&op{Kind: kindResume, Lane: k.lane, Owner: id, Token: wait})
			k.history.done(o, k.conn.QueryRow(work, `
				select count(*) = 1 from (
				  select x.id, case when x.waiting_for = 'agent' then lanekeeper.agent_uuid(x.waiting_key) end as child
				    from agent_executions x
				   where x.id = $1 and x.status = 'waiting' and x.wait_number = $2 for no key update) e,
				  lanekeeper.resume_agent_executions(array[e.id], array['{}'::jsonb], '{}', null,
				    e.child) r`, id, wait).Scan(&o.OK))
		case !claimed:
			_ = k.claim(work, id) // recorded
		default:
			k.runClaim(work, id, claim)
		}
	}
}

// runClaim runs a parent under one claim, up to the park.
func (k *executionSession) runClaim(ctx context.Context, id string, claim int64) {
	g := grant{lane: k.lane, owner: fmt.Sprint(id, "#", claim), ttl: parentTTL}
	for range 4 {
		got, ok := k.acquireOrBorrow(ctx, g)
		if ok {
			k.addGrant(got)
			k.write(ctx, got)
			break
		}
		if k.conn.IsClosed() {
			return
		}
		testkit.Wait(ctx, 10*time.Millisecond)
	}
	if _, err := k.parkUntilChildEnds(ctx, id, claim); err != nil {
		return
	}
	if len(k.held) > 0 {
		k.write(ctx, k.held[k.rand.IntN(len(k.held))]) // the park has voided the token
	}
}

// parkUntilChildEnds starts a child and parks its parent until it ends.
func (k *executionSession) parkUntilChildEnds(ctx context.Context, id string, claim int64) (child string, err error) {
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
	default: // the previous child still runs
	}
	if k.rand.IntN(3) == 0 {
		testkit.Wait(ctx, time.Duration(k.rand.IntN(10))*time.Millisecond)
	}
	o := k.history.call(&op{Kind: kindPark, Lane: k.lane, Owner: id, Token: claim, Child: child})
	var event *string
	err = k.conn.QueryRow(ctx, `select lanekeeper.wait_agent_execution($1, $2, $3, 'agent', $4, '1 hour', null)::text`,
		id, claim, "child "+child, child).Scan(&event)
	o.OK = err == nil && event == nil
	k.history.done(o, err)
	return child, err
}

// runChildren borrows the lane for each child, writes, and ends the loan in one of several ways.
func (k *executionSession) runChildren(ctx context.Context) {
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

func (k *executionSession) runChild(ctx context.Context, g grant, id string) {
	for range 12 {
		got, ok := k.acquireOrBorrow(ctx, g)
		if ok {
			g = got
			break
		}
		if k.conn.IsClosed() || !testkit.Wait(ctx, 5*time.Millisecond) {
			return
		}
	}
	if g.token != 0 {
		k.addGrant(g)
		k.write(ctx, g)
		if k.rand.IntN(3) == 0 {
			k.renew(ctx, g)
		}
	}
	switch k.rand.IntN(4) {
	case 0: // the loan expires or is recalled
		return
	case 1:
		k.release(ctx, g)
	}
	if k.conn.IsClosed() {
		return
	}
	o := k.history.call(&op{Kind: kindFinish, Lane: k.lane, Owner: id, Token: 1})
	_, err := k.conn.Exec(ctx,
		`select lanekeeper.complete_agent_execution($1::uuid, 1, 'completed', '', null, null, null)`, id)
	o.OK = err == nil
	k.history.done(o, err)
	if len(k.held) > 0 {
		k.write(ctx, k.held[k.rand.IntN(len(k.held))])
	}
}

// parkedAfter is a time in the year 8307, in microseconds. A lease that ends later is parked.
const parkedAfter = 200_000_000_000_000_000

// parentTTL is the TTL of a parent's lease in microseconds, longer than any test.
const parentTTL = 3600 * 1_000_000

// family is the model's state of a lane's executions: one parent, and its awaited child.
type family struct {
	parent  string
	claim   int64  // the parent's
	claimed bool   // a worker runs the parent
	waits   string // the awaited child
	depth   int    // 1 while the lane is lent to a child
}

// withoutLoan is the family after a break of the lane: the loan is gone.
func (f family) withoutLoan() family {
	f.depth = 0
	return f
}

// execution returns the id in an owner's name, or "" if the owner is no execution.
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

// returnToParent gives the lane to the parent under its present claim, parked while the parent waits.
func (s state) returnToParent(now, until int64) state {
	s.family.depth = 0
	s = s.grantTo(s.parentOwner(), 0, now, now+parentTTL, addTime(until, parentTTL))
	if s.family.waits != "" {
		s.from, s.to, s.parked = never, never, true
	}
	return s
}

// addTime returns a moment plus a duration.
func addTime(moment, later int64) int64 {
	if moment == never {
		return never
	}
	return moment + later
}

// expireLoan is the state after an expired loan returned to the parent. Any access to the lane, or a sweep, returns it.
// Histories have no sweeps, so the loan may have returned before the operation.
func (s state) expireLoan(o *op) (state, bool) {
	if s.family.depth == 0 {
		return s, false
	}
	_, at, ok := s.ifFree(s.clock, o.until())
	if !ok {
		return s, false
	}
	return s.returnToParent(at, o.until()), true
}

// lends reports whether the parent has the lane and waits for the owner.
func (s state) lends(owner string) bool {
	return s.parked && s.family.depth == 0 && s.owner != "" && execution(s.owner) == s.family.parent &&
		s.family.waits != "" && s.family.waits == execution(owner)
}

// applyBorrow is a take that got a loan.
func (s state) applyBorrow(o *op, lo, hi int64) (bool, state) {
	if !s.lends(o.Owner) || o.Lender != s.family.parent || o.Got <= s.token {
		return false, s
	}
	s = s.grantTo(o.Owner, o.Got, lo, lo+o.TTL, hi+o.TTL)
	s.family.depth = 1
	return true, s
}

func (s state) applyUnansweredBorrow(o *op, now int64) (state, bool) {
	if o.Kind != kindTake || !s.lends(o.Owner) {
		return s, false
	}
	s = s.grantTo(o.Owner, 0, now, now+o.TTL, never)
	s.family.depth = 1
	return s, true
}

// applyExecution applies an operation on an execution to its lane. The operation's owner is the execution, its token
// the claim.
func (s state) applyExecution(o *op, now int64) (bool, state) {
	if !o.OK && !o.Blind {
		return true, s // rejected: no change
	}
	_, live := s.ifLive(now)
	has := live && execution(s.owner) == o.Owner
	switch o.Kind {
	case kindClaim:
		return s.applyClaim(o, now, has)
	case kindPark:
		if s.family.parent != o.Owner || s.family.claim != o.Token || s.family.waits != "" {
			return false, s
		}
		s.family.waits, s.family.claimed = o.Child, false
		s.family.claim++
		if has {
			s = s.returnToParent(now, o.until())
		}
		return true, s
	case kindResume:
		if s.family.parent != o.Owner || s.family.waits == "" {
			return false, s
		}
		s.family.waits = ""
		if s.family.depth > 0 || has && s.parked {
			s = s.returnToParent(now, o.until())
		}
		return true, s
	case kindFinish: // of a child: the scenarios end no parent
		switch {
		case s.family.depth > 0 && execution(s.owner) == o.Owner:
			return true, s.returnToParent(now, o.until())
		case execution(s.owner) == o.Owner:
			return true, s.free(now)
		}
		return true, s
	default:
		return false, s
	}
}

// applyClaim gives the lane of the parent to its new claim.
func (s state) applyClaim(o *op, now int64, has bool) (bool, state) {
	next := s.family.claim + 1
	if s.family.parent == "" {
		s.family.parent = o.Owner
	}
	if s.family.parent != o.Owner || s.family.claimed || s.family.waits != "" || !o.Blind && o.Got != next {
		return false, s
	}
	s.family.claim, s.family.claimed = next, true
	if has {
		s = s.returnToParent(now, o.until())
	}
	return true, s
}
