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

// stage is a database for one test. Two plain SQL sessions play a script in it.
type stage struct {
	t    *testing.T
	pool *pgxpool.Pool
	tape *tape
	a, b *session
}

func newStage(t *testing.T) *stage {
	t.Helper()
	url := pgtest.URL(t)
	pool := pgtest.Pool(t, url, postgres.Options{MaxConns: 4})
	tape, err := newTape(tapeIn(t.TempDir(), "stage"), "stage")
	require.NoError(t, err)
	g := &stage{t: t, pool: pool, tape: tape}
	g.exec(writesTable)
	g.a, g.b = g.session(url, "a"), g.session(url, "b")
	return g
}

func (g *stage) session(url, name string) *session {
	g.t.Helper()
	conn, err := pgx.Connect(g.t.Context(), url)
	require.NoError(g.t, err)
	// the test drops the database next
	g.t.Cleanup(func() { _ = conn.Close(g.t.Context()) })
	return &session{tape: g.tape, name: name, conn: conn, rand: rand.New(rand.NewPCG(1, 1))} // not a secret
}

func (g *stage) exec(sql string, args ...any) {
	g.t.Helper()
	pgtest.Exec(g.t, g.pool, sql, args...)
}

func (g *stage) count(sql string, args ...any) int {
	g.t.Helper()
	return pgtest.Value[int](g.t, g.pool, sql, args...)
}

// acquire acquires the lane for a session, and returns the grant.
func (g *stage) acquire(s *session, seconds int64) grant {
	g.t.Helper()
	want := grant{lane: "x", owner: s.name, ttl: seconds * 1_000_000}
	s.ask(g.t.Context(), kindAcquire, acquireSQL, want)
	if len(s.held) == 0 {
		return want
	}
	return s.held[len(s.held)-1]
}

// mustAcquire acquires a free lane.
func (g *stage) mustAcquire(s *session, seconds int64) grant {
	g.t.Helper()
	got := g.acquire(s, seconds)
	if got.token == 0 {
		g.t.Fatalf("session %s does not get a lane that is free", s.name)
	}
	return got
}

// gate is a lock between the read and the write of a planted acquire. Two acquires wait there, so that both read before
// either writes.
const gate = 4711

// plants are possible faults of lanes. Each has a script in which the fault does harm.
var plants = map[string]struct {
	fault  string
	script func(g *stage)
	writes bool // the fenced writes show the fault too
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
		script: func(g *stage) {
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
		script: func(g *stage) {
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
		script: func(g *stage) {
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
		script: func(g *stage) {
			got := g.mustAcquire(g.a, 1)
			pgtest.Eventually(g.t, func() bool {
				return g.count(`select count(*) from agent_locks where lane = 'x' and expires_at < clock_timestamp()`) == 1
			}, "the lease ends")
			g.a.renew(g.t.Context(), got)
		},
	},
	"a park leaves the token valid": {
		fault: `create or replace function lanekeeper.claim_agent_locks(p_execution_id uuid,
			p_parked boolean default false) returns void
			language plpgsql volatile as $$
			begin
			  update agent_locks l set parked = p_parked, expires_at = '9000-01-01 00:00+00',
			         locked_by = (select x.id || '#' || x.claim from agent_executions x where x.id = p_execution_id)
			   where l.execution_id = p_execution_id;
			end $$`,
		script: func(g *stage) {
			parent := g.kin(g.a)
			got := parent.begin(g)
			parent.park(g, got)
			parent.write(g.t.Context(), got)
		},
	},
	"a loan leaves the token valid": {
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
		script: func(g *stage) {
			parent, child := g.kin(g.a), g.kin(g.b)
			id := parent.park(g, parent.begin(g))
			// the answer has the token
			child.ask(g.t.Context(), kindAcquire, acquireSQL, grant{lane: parent.lane, owner: "b", ttl: 600_000_000})
			child.take(g.t.Context(), grant{lane: parent.lane, owner: id + "#1", ttl: 600_000_000})
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
		script: func(g *stage) {
			g.mustAcquire(g.a, 600)
			g.b.release(g.t.Context(), grant{lane: "x", owner: "b"})
			g.acquire(g.b, 600)
		},
	},
	"a hand-over leaves the token valid": {
		fault: handingOver(`
			  update agent_locks l set locked_by = w.owner, expires_at = clock_timestamp() + interval '10 seconds'
			    from agent_lock_waiters w where w.lane = l.lane and l.lane = p_lane
			  returning concat_ws(E'\t', l.lane, l.locked_by, l.fencing_token,
			    (extract(epoch from l.expires_at) * 1000000)::bigint) into passed;`),
		script: func(g *stage) { g.handOver() },
	},
	"a hand-over that is only told": {
		fault: handingOver(`
			  update agent_locks l set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp()
			    from agent_lock_waiters w where w.lane = l.lane and l.lane = p_lane
			  returning concat_ws(E'\t', l.lane, w.owner, l.fencing_token,
			                      (extract(epoch from clock_timestamp() + interval '10 seconds') * 1000000)::bigint) into passed;
			  delete from agent_lock_waiters;`),
		script: func(g *stage) {
			g.handOver()
			g.acquire(g.a, 600)
		},
	},
	"a hand-over to who does not wait": {
		fault: handingOver(`
			  update agent_locks l set locked_by = 'c', fencing_token = l.fencing_token + 1,
			    expires_at = clock_timestamp() + interval '10 seconds'
			   where l.lane = p_lane
			  returning concat_ws(E'\t', l.lane, l.locked_by, l.fencing_token,
			    (extract(epoch from l.expires_at) * 1000000)::bigint) into passed;`),
		script: func(g *stage) { g.handOver() },
	},
	"who leaves the queue keeps what was handed over": {
		fault: `alter function lanekeeper.release_agent_lock rename to away;
			create function lanekeeper.release_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint,
			p_hand_over boolean,
			p_wait boolean default true) returns text language sql volatile as $$
			  select case when p_fencing_token is not null then lanekeeper.away(p_lane, p_locked_by, p_fencing_token,
			    p_hand_over, p_wait) end
			$$`,
		script: func(g *stage) {
			g.handOver()
			g.b.pass(g.t.Context(), &op{Lane: "x", Owner: "b"}, quitSQL, "x", "b")
			g.acquire(g.a, 600)
		},
	},
}

// handOver has b wait for the lane, and its owner a release it.
func (g *stage) handOver() {
	g.t.Helper()
	got := g.mustAcquire(g.a, 600)
	g.b.ask(g.t.Context(), kindAwait, queueSQL, grant{lane: "x", owner: "b", ttl: 600_000_000})
	g.a.free(g.t.Context(), got)
}

// TestPlantedFaultsAreCaught plays each script twice. Without the fault the checker must find nothing, with it an
// error.
func TestPlantedFaultsAreCaught(t *testing.T) {
	t.Parallel()
	for name, plant := range plants {
		for _, planted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, planted %v", name, planted), func(t *testing.T) {
				t.Parallel()
				g := newStage(t)
				g.a.release(t.Context(), g.mustAcquire(g.a, 600)) // creates the lane's row
				g.a.held = nil
				if planted {
					g.exec(plant.fault)
				}
				plant.script(g)
				byLane, err := read([]string{g.tape.file.Name()})
				require.NoError(t, err)
				for lane, ops := range byLane {
					err = errors.Join(err, check(lane, ops, state{}, checkLimit))
				}
				assert.Truef(t, errors.Is(err, errIllegal) == planted && (planted || err == nil),
					"fault planted: %v, the checker says: %v", planted, err)
				assert.Equal(t, planted && plant.writes, g.count(backwards) > 0, planted)
			})
		}
	}
}

// TestATimeoutOfTheCheckerIsAFailure: a history that the checker did not finish proves nothing.
func TestATimeoutOfTheCheckerIsAFailure(t *testing.T) {
	t.Parallel()
	var ops []*op
	for n := range 40 { // one was granted, and the history does not show which
		ops = append(ops, &op{
			ID: fmt.Sprint(n), Kind: kindTry, Lane: "x", Owner: fmt.Sprint(n), TTL: 60_000_000, Call: int64(n + 1),
			Return: 1_000_000,
			OK:     n%2 == 0,
		})
	}
	mark(ops)
	err := check("x", ops, state{}, time.Millisecond)
	assert.ErrorIs(t, err, errUnchecked)
}

// kin returns a session of the stage that runs executions of a family.
func (g *stage) kin(s *session) *kin {
	k := &kin{session: *s, lane: "objective:x"}
	require.NoError(g.t, k.hired(g.t.Context()))
	return k
}

// begin starts a parent and acquires its lane.
func (k *kin) begin(g *stage) grant {
	g.t.Helper()
	id, err := k.newExecution(g.t.Context(), "")
	if err == nil {
		err = k.claimIt(g.t.Context(), id)
	}
	require.NoError(g.t, err)
	got, ok := k.take(g.t.Context(), grant{lane: k.lane, owner: id + "#1", ttl: parentTTL})
	require.True(g.t, ok, "the parent does not get its lane")
	return got
}

// park starts a child and parks the parent until the child ends. It returns the child.
func (k *kin) park(g *stage, parent grant) (child string) {
	g.t.Helper()
	child, err := k.parkOn(g.t.Context(), execution(parent.owner), 1)
	require.Truef(g.t, err == nil && child != "", "the parent is not parked: %v", err)
	return child
}

// handingOver returns a release function that runs a statement and returns what the statement passed on.
func handingOver(statement string) string {
	return `create or replace function lanekeeper.release_agent_lock(p_lane text, p_locked_by text,
		p_fencing_token bigint, p_hand_over boolean, p_wait boolean default true) returns text
		language plpgsql volatile as $$
		declare passed text;
		begin ` + statement + ` return passed;
		end $$`
}
