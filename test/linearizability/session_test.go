package linearizability_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// session is a plain SQL session. It does everything with lanes that SQL can do, also what it should not.
type session struct {
	history *history
	url     string
	name    string
	lanes   []string
	rand    *rand.Rand
	leases  int
	conn    *pgx.Conn
	held    []grant // newest last, including ended ones
}

// grant is a token of the session.
type grant struct {
	lane, owner string
	token       int64 // 0 if unknown
	ttl         int64
}

// play acts until ctx ends. It reconnects after a lost connection.
func (s *session) play(ctx context.Context) {
	defer func() {
		if s.conn != nil {
			_ = s.conn.Close(context.WithoutCancel(ctx)) // no statement runs
		}
	}()
	for testkit.Wait(ctx, time.Duration(s.rand.IntN(12))*time.Millisecond) {
		if s.conn == nil || s.conn.IsClosed() {
			conn, err := pgx.Connect(ctx, s.url)
			if err != nil {
				testkit.Wait(ctx, 20*time.Millisecond)
				continue
			}
			s.conn = conn
		}
		s.act(ctx)
	}
}

// act does one operation. Its statement has its own context, so the end of the session interrupts none.
func (s *session) act(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), waitTimeout)
	defer cancel()
	n := s.rand.IntN(100)
	if len(s.held) == 0 || n < 30 {
		s.acquire(ctx)
		return
	}
	g := s.held[len(s.held)-1]
	if s.rand.IntN(6) == 0 {
		g = s.held[s.rand.IntN(len(s.held))] // an older one
	}
	switch {
	case n < 60 && g.token != 0:
		s.write(ctx, g)
	case n < 75 && g.token != 0:
		s.renew(ctx, g)
	case n < 84 && g.token != 0:
		s.releaseToWaiter(ctx, g)
	case n < 94:
		s.release(ctx, g)
	case n < 97:
		s.release(ctx, grant{lane: g.lane, owner: "nobody in particular"})
	case n < 98:
		s.breakLane(ctx, g.lane)
	default:
		s.sweep(ctx)
	}
}

// acquire acquires a lane for a new owner, or again for its present owner.
func (s *session) acquire(ctx context.Context) {
	s.leases++
	g := grant{
		lane: s.lanes[s.rand.IntN(len(s.lanes))], owner: fmt.Sprintf("%s/%d", s.name, s.leases),
		ttl: int64(1+s.rand.IntN(2)) * 1_000_000,
	}
	if len(s.held) > 0 && s.rand.IntN(4) == 0 {
		g = s.held[len(s.held)-1]
	}
	switch s.rand.IntN(5) {
	case 0:
		s.try(ctx, g)
	case 1:
		s.await(ctx, g)
	default:
		s.callAcquire(ctx, kindAcquire, acquireSQL, g)
	}
}

// await waits in the queue for a while. The lane may be handed to it.
func (s *session) await(ctx context.Context, g grant) {
	sql, handed := awaitSQL, s.rand.IntN(2) == 0
	if handed {
		sql = queueSQL
	}
	for range 1 + s.rand.IntN(4) {
		if s.callAcquire(ctx, kindAwait, sql, g) || !testkit.Wait(ctx, 10*time.Millisecond) {
			return
		}
	}
	if handed {
		s.callRelease(ctx, &op{Lane: g.lane, Owner: g.owner}, quitSQL, g.lane, g.owner)
		return
	}
	o := s.history.call(&op{Kind: kindLeave, Lane: g.lane, Owner: g.owner})
	_, err := s.conn.Exec(ctx, `select leave_agent_lock_queue($1, $2)`, g.lane, g.owner)
	s.history.done(o, err)
}

// callRelease runs a release that may hand the lane to a waiter.
func (s *session) callRelease(ctx context.Context, o *op, sql string, args ...any) {
	o.Kind, o.Passes = kindRelease, true
	s.history.call(o)
	var to *string
	err := s.conn.QueryRow(ctx, sql, args...).Scan(&to)
	if to != nil {
		o.OK = true
		o.setHeir(*to)
	}
	s.history.done(o, err)
}

// releaseToWaiter releases a lane to its first waiter, if one waits.
func (s *session) releaseToWaiter(ctx context.Context, g grant) {
	s.callRelease(ctx, &op{Lane: g.lane, Owner: g.owner, Token: g.token},
		`select lanekeeper.release_agent_lock($1, $2, $3, true)`, g.lane, g.owner, g.token)
}

const (
	awaitSQL = `select acquired, coalesce(fencing_token, 0), coalesce(expires_at, 'epoch'), coalesce(locked_by, '')
		from await_agent_lock($1, $2, $3, 5)`
	queueSQL = `select acquired, coalesce(fencing_token, 0), coalesce(expires_at, 'epoch'), coalesce(locked_by, '')
		from lanekeeper.acquire_or_enqueue_agent_lock($1, $2, $3, 5, true)`
	quitSQL = `select lanekeeper.release_agent_lock($1, $2, null, true) from leave_agent_lock_queue($1, $2)`
)

const acquireSQL = `select acquired, coalesce(fencing_token, 0), coalesce(expires_at, 'epoch'), coalesce(locked_by, '')
	from acquire_agent_lock($1, $2, $3)`

func (s *session) callAcquire(ctx context.Context, kind kind, sql string, g grant) (stop bool) {
	o := s.history.call(&op{Kind: kind, Lane: g.lane, Owner: g.owner, TTL: g.ttl})
	var ends time.Time
	var holder string
	err := s.conn.QueryRow(ctx, sql, g.lane, g.owner, g.ttl/1_000_000).Scan(&o.OK, &o.Got, &ends, &holder)
	o.setResult(ends, holder)
	s.history.done(o, err)
	if err == nil && o.OK {
		g.token = o.Got
		s.addGrant(g)
	}
	return err != nil || o.OK
}

// setResult notes the end of the lease and its holder.
func (o *op) setResult(ends time.Time, holder string) {
	if ends.Unix() > 0 {
		o.Ends = ends.UnixMicro()
	}
	if !o.OK {
		o.Holder = holder
	}
}

func (s *session) addGrant(g grant) {
	s.held = append(s.held, g)
	if len(s.held) > 6 {
		s.held = s.held[1:]
	}
}

func (s *session) try(ctx context.Context, g grant) {
	g.token = 0
	o := s.history.call(&op{Kind: kindTry, Lane: g.lane, Owner: g.owner, TTL: g.ttl})
	err := s.conn.QueryRow(ctx, `select try_acquire_agent_lock($1, $2, $3)`, g.lane, g.owner, g.ttl/1_000_000).Scan(&o.OK)
	s.history.done(o, err)
	if err == nil && o.OK {
		s.addGrant(g)
	}
}

func (s *session) renew(ctx context.Context, g grant) {
	o := s.history.call(&op{Kind: kindRenew, Lane: g.lane, Owner: g.owner, Token: g.token, TTL: g.ttl})
	s.history.done(o, s.conn.QueryRow(ctx, `select renew_agent_lock($1, $2, $3, $4)`, g.lane, g.owner, g.token,
		g.ttl/1_000_000).Scan(&o.OK))
}

func (s *session) release(ctx context.Context, g grant) {
	o := &op{Kind: kindRelease, Lane: g.lane, Owner: g.owner}
	var token *int64
	if g.token != 0 && s.rand.IntN(3) > 0 {
		token, o.Token = &g.token, g.token
	}
	s.history.call(o)
	s.history.done(o, s.conn.QueryRow(ctx, `select release_agent_lock($1, $2, $3)`, g.lane, g.owner, token).Scan(&o.OK))
}

func (s *session) breakLane(ctx context.Context, lane string) {
	o := s.history.call(&op{Kind: kindBreak, Lane: lane})
	s.history.done(o, s.conn.QueryRow(ctx, `select break_agent_lock($1, 'for the sake of it')`, lane).Scan(&o.OK))
}

func (s *session) sweep(ctx context.Context) {
	ops := make([]*op, 0, len(s.lanes))
	for _, lane := range s.lanes {
		ops = append(ops, s.history.call(&op{Kind: kindSweep, Lane: lane}))
	}
	err := lanes.Prune(ctx, s.conn, 0)
	for _, o := range ops {
		s.history.done(o, err)
	}
}

func (s *session) write(ctx context.Context, g grant) { writeFenced(ctx, s.history, s.conn, g, nil) }

// writeFenced makes a protected write. Its transaction starts with the fence, then records the token.
func writeFenced(ctx context.Context, history *history, db postgres.Beginner, g grant,
	fence func(ctx context.Context, tx postgres.DB) error,
) {
	o := history.call(&op{Kind: kindWrite, Lane: g.lane, Owner: g.owner, Token: g.token})
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		var err error
		if fence != nil {
			err = fence(ctx, tx)
		} else {
			_, err = tx.Exec(ctx, `select fence_agent_lock($1, $2)`, g.lane, g.token)
		}
		if err != nil {
			return err
		}
		return insertWrite(ctx, tx, g)
	})
	o.OK = err == nil
	history.done(o, err)
}

// insertWrite inserts the protected write.
func insertWrite(ctx context.Context, tx postgres.DB, g grant) error {
	_, err := tx.Exec(ctx, `insert into lanetest_writes (lane, token, owner) values ($1, $2, $3)`, g.lane, g.token,
		g.owner)
	return err
}

// writesTable stores the fenced writes. The number is drawn after the fence.
const writesTable = `create table if not exists lanetest_writes (n bigint generated always as identity, 
	lane text not null, token bigint not null, owner text not null)`

// decreasingTokenWrites counts the writes under a smaller token after one under a larger.
const decreasingTokenWrites = `
	select count(*) from (
	  select w.token, max(w.token) over (partition by w.lane order by w.n) as high from lanetest_writes w) t
	 where t.token < t.high`

// sharedTokens counts the tokens under which more than one owner wrote.
const sharedTokens = `
	select count(*) from (select from lanetest_writes w group by w.lane, w.token having count(distinct w.owner) > 1) t`
