package linearizability_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// fixture is a database for one test, with two plain SQL sessions.
type fixture struct {
	t       *testing.T
	pool    *pgxpool.Pool
	history *history
	a, b    *session
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	url := pgtest.URL(t)
	pool := pgtest.Pool(t, url, postgres.Options{MaxConns: 4})
	history, err := newHistory(historyPath(t.TempDir(), "fixture"), "fixture")
	require.NoError(t, err)
	g := &fixture{t: t, pool: pool, history: history}
	g.exec(writesTable)
	g.a, g.b = g.session(url, "a"), g.session(url, "b")
	return g
}

func (g *fixture) session(url, name string) *session {
	g.t.Helper()
	conn, err := pgx.Connect(g.t.Context(), url)
	require.NoError(g.t, err)
	// the test drops the database next
	g.t.Cleanup(func() { _ = conn.Close(g.t.Context()) })
	return &session{history: g.history, name: name, conn: conn, rand: rand.New(rand.NewPCG(1, 1))} // not a secret
}

func (g *fixture) exec(sql string, args ...any) {
	g.t.Helper()
	pgtest.Exec(g.t, g.pool, sql, args...)
}

func (g *fixture) count(sql string, args ...any) int {
	g.t.Helper()
	return pgtest.Value[int](g.t, g.pool, sql, args...)
}

// acquire acquires the lane for a session, and returns the grant.
func (g *fixture) acquire(s *session, seconds int64) grant {
	g.t.Helper()
	want := grant{lane: "x", owner: s.name, ttl: seconds * 1_000_000}
	s.callAcquire(g.t.Context(), kindAcquire, acquireSQL, want)
	if len(s.held) == 0 {
		return want
	}
	return s.held[len(s.held)-1]
}

// mustAcquire acquires a free lane.
func (g *fixture) mustAcquire(s *session, seconds int64) grant {
	g.t.Helper()
	got := g.acquire(s, seconds)
	if got.token == 0 {
		g.t.Fatalf("session %s failed to acquire a free lane", s.name)
	}
	return got
}

// gate is a lock between the read and the write of a planted acquire. Two acquires wait there, so that both read before
// either writes.
const gate = 4711

// faults are possible faults of lanes. Each has a script that triggers the fault.
var faults = map[string]struct {
	fault  string
	script func(g *fixture)
	writes bool // the fenced writes also show the fault
}{
	"no row lock": {
		fault: `create or replace function acquire_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300)
			returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text)
			language plpgsql volatile as $$
			#variable_conflict use_column
			declare held agent_locks; now_ timestamptz := clock_timestamp();
			begin
			  select l.* into held from agent_locks l where l.lane = p_lane;
			  if held.expires_at > now_ and held.locked_by <> p_locked_by then
			    return query select false, held.fencing_token, held.expires_at, held.locked_by;
			    return;
			  end if;
			  perform pg_advisory_xact_lock_shared(4711);
			  return query update agent_locks l
			     set locked_by = p_locked_by, fencing_token = greatest(l.fencing_token + 1,
			       (extract(epoch from now_) * 1000000)::bigint), locked_at = now_,
			         expires_at = now_ + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds
			   where l.lane = p_lane returning true, l.fencing_token, l.expires_at, l.locked_by;
			end $$`,
		script: func(g *fixture) {
			tx, err := g.pool.Begin(g.t.Context())
			require.NoError(g.t, err)
			pgtest.Exec(g.t, tx, `select pg_advisory_xact_lock($1)`, gate)
			var group sync.WaitGroup
			var done [2]chan struct{}
			for i, s := range []*session{g.a, g.b} {
				done[i] = make(chan struct{})
				group.Go(func() { defer close(done[i]); g.acquire(s, 60) })
			}
			pgtest.Eventually(g.t, func() bool {
				n := g.count(`select count(*) from pg_locks where locktype = 'advisory' and not granted and objid = $1
					and database = (select oid from pg_database where datname = current_database())`, gate)
				for _, c := range done {
					select {
					case <-c:
						n++
					default:
					}
				}
				return n == 2
			}, "both sessions have read the lane")
			require.NoError(g.t, tx.Commit(g.t.Context()))
			group.Wait()
		},
	},
	"application clock": {
		fault: `create or replace function acquire_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300)
			returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text)
			language plpgsql volatile as $$
			#variable_conflict use_column
			declare held agent_locks; now_ timestamptz;
			begin
			  select l.* into held from agent_locks l where l.lane = p_lane for update;
			  now_ := clock_timestamp() + coalesce(nullif(current_setting('lanetest.ahead', true), ''), '0')::interval;
			  if held.expires_at > now_ and held.locked_by <> p_locked_by then
			    return query select false, held.fencing_token, held.expires_at, held.locked_by;
			    return;
			  end if;
			  return query update agent_locks l
			     set locked_by = p_locked_by, fencing_token = greatest(l.fencing_token + 1,
			       (extract(epoch from now_) * 1000000)::bigint), locked_at = now_,
			         expires_at = now_ + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds
			   where l.lane = p_lane returning true, l.fencing_token, l.expires_at, l.locked_by;
			end $$`,
		script: func(g *fixture) {
			_, err := g.b.conn.Exec(g.t.Context(), `set lanetest.ahead = '1 hour'`)
			require.NoError(g.t, err)
			g.mustAcquire(g.a, 600)
			g.acquire(g.b, 600)
		},
	},
	"token ignored": {
		fault: `create or replace function fence_agent_lock(p_lane text, p_fencing_token bigint) returns void
			language plpgsql volatile as $$
			begin
			  if not is_agent_lock_held(p_lane) then
			    raise exception 'token % of lane % is stale', p_fencing_token, p_lane using errcode = 'LK001';
			  end if;
			end $$`,
		script: func(g *fixture) {
			old := g.mustAcquire(g.a, 600)
			g.a.release(g.t.Context(), old)
			g.b.write(g.t.Context(), g.mustAcquire(g.b, 600))
			g.a.write(g.t.Context(), old)
		},
		writes: true,
	},
	"renewal after expiry": {
		fault: `create or replace function renew_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint,
			p_ttl_seconds int)
			returns boolean language plpgsql volatile as $$
			begin
			  update agent_locks l set expires_at = clock_timestamp() + make_interval(secs => p_ttl_seconds)
			   where l.lane = p_lane and l.locked_by = p_locked_by and l.fencing_token = p_fencing_token;
			  return found;
			end $$`,
		script: func(g *fixture) {
			got := g.mustAcquire(g.a, 1)
			pgtest.Eventually(g.t, func() bool {
				return g.count(`select count(*) from agent_locks where lane = 'x' and expires_at < clock_timestamp()`) == 1
			}, "the lease ends")
			g.a.renew(g.t.Context(), got)
		},
	},
	"stale park token": {
		fault: `create or replace function lanekeeper.claim_agent_locks(p_execution_id uuid,
			p_parked boolean default false) returns void
			language plpgsql volatile as $$
			begin
			  update agent_locks l set parked = p_parked, expires_at = '9000-01-01 00:00+00',
			         locked_by = (select x.id || '#' || x.claim from agent_executions x where x.id = p_execution_id)
			   where l.execution_id = p_execution_id;
			end $$`,
		script: func(g *fixture) {
			parent := g.newExecutionSession(g.a)
			got := parent.startParent(g)
			parent.waitForChild(g, got)
			parent.write(g.t.Context(), got)
		},
	},
	"stale loan token": {
		fault: `create or replace function lanekeeper.lend_agent_lock(p_lane text, p_borrower uuid, p_claim bigint,
			p_ttl_seconds int default 300)
			returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, lender uuid) language plpgsql volatile
			  as $$
			#variable_conflict use_column
			declare held agent_locks;
			begin
			  select l.* into held from agent_locks l where l.lane = p_lane;
			  return query update agent_locks l set locked_by = p_borrower || '#' || p_claim, execution_id = p_borrower,
			                                        parked = false,
			                                        expires_at = clock_timestamp() + make_interval(secs => p_ttl_seconds)
			   where l.lane = p_lane returning true, l.fencing_token, l.expires_at, held.execution_id;
			end $$`,
		script: func(g *fixture) {
			parent, child := g.newExecutionSession(g.a), g.newExecutionSession(g.b)
			id := parent.waitForChild(g, parent.startParent(g))
			// the answer has the token
			child.callAcquire(g.t.Context(), kindAcquire, acquireSQL, grant{lane: parent.lane, owner: "b", ttl: 600_000_000})
			child.acquireOrBorrow(g.t.Context(), grant{lane: parent.lane, owner: id + "#1", ttl: 600_000_000})
		},
	},
	"release without owner": {
		fault: `create or replace function release_agent_lock(p_lane text, p_locked_by text,
			p_fencing_token bigint default null)
			returns boolean language plpgsql volatile as $$
			begin
			  update agent_locks l set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp()
			   where l.lane = p_lane and l.expires_at > clock_timestamp();
			  return found;
			end $$`,
		script: func(g *fixture) {
			g.mustAcquire(g.a, 600)
			g.b.release(g.t.Context(), grant{lane: "x", owner: "b"})
			g.acquire(g.b, 600)
		},
	},
	"stale handover token": {
		fault: handingOver(`
			  update agent_locks l set locked_by = w.owner, expires_at = clock_timestamp() + interval '10 seconds'
			    from agent_lock_waiters w where w.lane = l.lane and l.lane = p_lane
			  returning concat_ws(E'\t', l.lane, l.locked_by, l.fencing_token,
			    (extract(epoch from l.expires_at) * 1000000)::bigint) into passed;`),
		script: func(g *fixture) { g.handOver() },
	},
	"unrecorded handover": {
		fault: handingOver(`
			  update agent_locks l set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp()
			    from agent_lock_waiters w where w.lane = l.lane and l.lane = p_lane
			  returning concat_ws(E'\t', l.lane, w.owner, l.fencing_token,
			                      (extract(epoch from clock_timestamp() + interval '10 seconds') * 1000000)::bigint) into passed;
			  delete from agent_lock_waiters;`),
		script: func(g *fixture) {
			g.handOver()
			g.acquire(g.a, 600)
		},
	},
	"handover bystander": {
		fault: handingOver(`
			  update agent_locks l set locked_by = 'c', fencing_token = l.fencing_token + 1,
			    expires_at = clock_timestamp() + interval '10 seconds'
			   where l.lane = p_lane
			  returning concat_ws(E'\t', l.lane, l.locked_by, l.fencing_token,
			    (extract(epoch from l.expires_at) * 1000000)::bigint) into passed;`),
		script: func(g *fixture) { g.handOver() },
	},
	"dequeue keeps grant": {
		fault: `alter function lanekeeper.release_agent_lock rename to away;
			create function lanekeeper.release_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint,
			p_hand_over boolean,
			p_wait boolean default true) returns text language sql volatile as $$
			  select case when p_fencing_token is not null then lanekeeper.away(p_lane, p_locked_by, p_fencing_token,
			    p_hand_over, p_wait) end
			$$`,
		script: func(g *fixture) {
			g.handOver()
			g.b.callRelease(g.t.Context(), &op{Lane: "x", Owner: "b"}, quitSQL, "x", "b")
			g.acquire(g.a, 600)
		},
	},
}

// handOver has b wait for the lane, and its owner a release it.
func (g *fixture) handOver() {
	g.t.Helper()
	got := g.mustAcquire(g.a, 600)
	g.b.callAcquire(g.t.Context(), kindAwait, queueSQL, grant{lane: "x", owner: "b", ttl: 600_000_000})
	g.a.releaseToWaiter(g.t.Context(), got)
}

// TestPlantedFaultsAreCaught runs each script twice. The checker must accept the history without the fault, and reject
// it with the fault.
func TestPlantedFaultsAreCaught(t *testing.T) {
	t.Parallel()
	for name, fault := range faults {
		for _, planted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, planted=%v", name, planted), func(t *testing.T) {
				t.Parallel()
				g := newFixture(t)
				g.a.release(t.Context(), g.mustAcquire(g.a, 600)) // creates the lane's row
				g.a.held = nil
				if planted {
					g.exec(fault.fault)
				}
				fault.script(g)
				byLane, err := read([]string{g.history.file.Name()})
				require.NoError(t, err)
				for lane, ops := range byLane {
					err = errors.Join(err, check(lane, ops, state{}, checkLimit))
				}
				assert.Truef(t, errors.Is(err, errIllegal) == planted && (planted || err == nil),
					"fault planted: %v, checker: %v", planted, err)
				assert.Equal(t, planted && fault.writes, g.count(decreasingTokenWrites) > 0, planted)
			})
		}
	}
}

// An undecided check fails the test.
func TestCheckerTimeoutIsFailure(t *testing.T) {
	t.Parallel()
	var ops []*op
	for n := range 40 { // one was granted, all overlap, so the search space explodes
		ops = append(ops, &op{
			ID: fmt.Sprint(n), Kind: kindTry, Lane: "x", Owner: fmt.Sprint(n), TTL: 60_000_000, Call: int64(n + 1),
			Return: 1_000_000,
			OK:     n%2 == 0,
		})
	}
	markConcurrency(ops)
	err := check("x", ops, state{}, time.Millisecond)
	assert.ErrorIs(t, err, errUnchecked)
}

// newExecutionSession returns a session of the fixture that runs a parent or its children.
func (g *fixture) newExecutionSession(s *session) *executionSession {
	k := &executionSession{session: *s, lane: "objective:x"}
	require.NoError(g.t, k.registerWorker(g.t.Context()))
	return k
}

// startParent starts a parent and acquires its lane.
func (k *executionSession) startParent(g *fixture) grant {
	g.t.Helper()
	id, err := k.newExecution(g.t.Context(), "")
	if err == nil {
		err = k.claim(g.t.Context(), id)
	}
	require.NoError(g.t, err)
	got, ok := k.acquireOrBorrow(g.t.Context(), grant{lane: k.lane, owner: id + "#1", ttl: parentTTL})
	require.True(g.t, ok, "the parent failed to acquire its lane")
	return got
}

// waitForChild starts a child and parks the parent until the child completes. It returns the child.
func (k *executionSession) waitForChild(g *fixture, parent grant) (child string) {
	g.t.Helper()
	child, err := k.parkUntilChildEnds(g.t.Context(), execution(parent.owner), 1)
	require.Truef(g.t, err == nil && child != "", "the parent is not parked: %v", err)
	return child
}

// handingOver replaces the release function by one that runs a statement and returns the grants in passed.
func handingOver(statement string) string {
	return `create or replace function lanekeeper.release_agent_lock(p_lane text, p_locked_by text,
		p_fencing_token bigint, p_hand_over boolean, p_wait boolean default true) returns text
		language plpgsql volatile as $$
		declare passed text;
		begin ` + statement + ` return passed;
		end $$`
}
