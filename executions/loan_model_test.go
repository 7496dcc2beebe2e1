package executions_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

var (
	loanSeed   = flag.Uint64("loanseed", 0, "seed of the model test of loans; 0 takes one from the clock")
	loanRounds = flag.Int("loanrounds", 3, "rounds of the model test of loans")
)

const (
	loanClients = 8
	loanOps     = 60 // of each client in a round
)

// loanWatch checks every write: tokens only grow, also over deleted rows, and every grant has a new one. The sequence
// orders fenced writes.
const loanWatch = `
create table token_high (lane text primary key, token bigint not null);
create function watch_tokens() returns trigger language plpgsql as $$
declare
  high bigint;
begin
  select h.token into high from token_high h where h.lane = new.lane;
  if new.fencing_token < high or tg_op = 'INSERT' and new.fencing_token = high
     or tg_op = 'UPDATE' and new.fencing_token = old.fencing_token
        and (new.locked_by, new.parked) is distinct from (old.locked_by, old.parked) then
    raise exception 'lane % got token % after %: from % to %', new.lane, new.fencing_token, high, old, new using errcode = 'XX001';
  end if;
  insert into token_high values (new.lane, new.fencing_token)
  on conflict (lane) do update set token = excluded.token where token_high.token <> excluded.token;
  return null;
end $$;
create trigger watch_tokens after insert or update on agent_locks for each row execute function watch_tokens();
create sequence use_number;
create sequence loan_number;
create function watch_loans() returns trigger language plpgsql as $$ begin perform nextval('loan_number'); return null; end $$;
create trigger watch_loans after insert on agent_lock_loans for each row execute function watch_loans();
create table token_uses (lane text, token bigint, n bigint)`

// model is a crowd of clients that do with executions and lanes what workers, people and accidents do.
type model struct {
	pool    *pgxpool.Pool
	threads []string
	lanes   []string

	mu      sync.Mutex
	ids     []string
	claims  map[string]int64
	workers []string
	tokens  map[string]int64 // by lane: one that was live once
}

// client is one of them, with its own randomness.
type client struct {
	*model
	rand *rand.Rand
}

// TestLoansKeepTheirRulesWhateverHappens is a property test. Rerun one with go test -loanseed N.
func TestLoansKeepTheirRulesWhateverHappens(t *testing.T) {
	t.Parallel()
	seed := *loanSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("go test ./executions -run %s -loanseed %d", t.Name(), seed)
	pool := pgtest.Pool(t, pgtest.URL(t), postgres.Options{MaxConns: loanClients + 2})
	pgtest.Exec(t, pool, loanWatch)
	m := &model{pool: pool, claims: map[string]int64{}, tokens: map[string]int64{}}
	for n := range 3 {
		m.threads = append(m.threads, fmt.Sprint("t", n))
		pgtest.Exec(t, pool, `insert into agent_threads (id, channel) values ($1, 'chat')`, m.threads[n])
		m.lanes = append(m.lanes, fmt.Sprint("thread:t", n), fmt.Sprint("objective:o", n))
	}
	m.lanes = append(m.lanes, "pipeline:p")
	for range 12 {
		m.workers = append(m.workers, newWorker(t, pool))
	}
	for round := range *loanRounds {
		m.round(t, seed, round)
		if t.Failed() {
			return
		}
	}
	t.Logf("%d executions, %d loans, %d fenced writes", len(m.ids),
		pgtest.Value[int](t, pool, `select last_value from loan_number`), pgtest.Value[int](t, pool, `select count(*) from token_uses`))
	m.end(t)
}

func (m *model) round(t *testing.T, seed uint64, round int) {
	t.Helper()
	group, ctx := errgroup.WithContext(t.Context())
	for n := range loanClients {
		c := &client{model: m, rand: rand.New(rand.NewPCG(seed, uint64(round*loanClients+n)))} // not a secret
		group.Go(func() error { return c.play(ctx) })
	}
	if err := group.Wait(); err != nil {
		t.Fatalf("round %d: %v", round, err)
	}
	m.check(t, fmt.Sprintf("after round %d", round))
	for range 3 {
		m.quiet(t)
	}
	m.check(t, fmt.Sprintf("after the sweep of round %d", round))
	m.settled(t)
}

// quiet does what the engine's sweep does, without concurrent clients.
func (m *model) quiet(t *testing.T) {
	t.Helper()
	sweep(t, m.pool)
	prune(t, m.pool)
}

// end cancels everything: no lane and no loan is left.
func (m *model) end(t *testing.T) {
	t.Helper()
	pgtest.Exec(t, m.pool, `select cancel_agent_execution(id, 'test', 'the end') from (
		select id from agent_executions where completed_at is null order by id) x`)
	m.quiet(t)
	wantNone(t, m.pool, "lanes of executions that have all ended", `select lane, locked_by from agent_locks where execution_id is not null and expires_at > clock_timestamp()`)
	wantNone(t, m.pool, "loans of executions that have all ended", `select lane, depth from agent_lock_loans`)
	m.check(t, "at the end")
}

// wantNone fails when a query returns a row.
func wantNone(t *testing.T, db postgres.DB, what, sql string, args ...any) {
	t.Helper()
	rows, err := db.Query(t.Context(), `select coalesce(string_agg(r::text, E'\n'), '') from (`+sql+`) r`, args...)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	if found, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string]); err != nil || found != "" {
		t.Errorf("%s: %v\n%s", what, err, found)
	}
}

// check is what holds whenever no statement is under way.
func (m *model) check(t *testing.T, when string) {
	t.Helper()
	for what, sql := range map[string]string{
		"a loan whose borrower is not the next one's lender": `
			select n.* from agent_lock_loans n left join agent_lock_loans m on m.lane = n.lane and m.depth = n.depth + 1
			 where m.lender <> n.borrower or n.depth > 1 and not exists (
			   select from agent_lock_loans k where k.lane = n.lane and k.depth = n.depth - 1)`,
		"a last borrower that does not have the lane": `
			select n.*, l.locked_by from agent_lock_loans n left join agent_locks l on l.lane = n.lane
			 where l.execution_id is distinct from n.borrower
			   and n.depth = (select max(k.depth) from agent_lock_loans k where k.lane = n.lane)`,
		"a lender that does not wait for its borrower": `
			select n.*, x.status, x.waiting_for, x.waiting_key from agent_lock_loans n left join agent_executions x on x.id = n.lender
			  join agent_executions c on c.id = n.borrower
			 where not coalesce(x.status = 'waiting' and x.waiting_for = 'agent' and x.waiting_key = n.borrower::text
			                    or x.status = 'running' and n.lane like 'thread:%' and c.inherits, false)`,
		"a lane of an execution that has ended": `
			select l.*, x.status, x.claim, x.error_message, x.cancelled_by, x.completed_at, w.waits
			  from agent_locks l join agent_executions x on x.id = l.execution_id
			  left join lateral (select string_agg(to_jsonb(c)::text, ', ') as waits from agent_claims_lost c where c.execution_id = x.id) w on true
			 where x.completed_at is not null and l.expires_at > clock_timestamp()`, // who took it may hear of the end when it has expired
		"a parked lane of an execution that does not wait": `
			select l.*, x.status from agent_locks l left join agent_executions x on x.id = l.execution_id
			 where l.parked and x.status is distinct from 'waiting'`,
		"a lane of a waiting execution that is not parked": `
			select l.*, x.waiting_for from agent_locks l join agent_executions x on x.id = l.execution_id
			 where x.status = 'waiting' and not l.parked and l.lane ~ '^(thread|automation|objective):' and l.expires_at > clock_timestamp()`,
		"a lane under a claim that is over": `
			select l.*, x.claim from agent_locks l join agent_executions x on x.id = l.execution_id
			 where x.status = 'waiting' and l.parked and l.locked_by <> x.id || '#' || x.claim`,
		"a write under a token after one under a larger token": `
			select a.*, b.token as later, b.n as earlier from token_uses a join token_uses b on b.lane = a.lane
			 where a.token < b.token and a.n > b.n`,
		"an end that was not emitted once": `
			select x.id, x.status, x.result_type from agent_executions x
			 where (x.completed_at is not null)::int <> (select count(*) from agent_events v
			        where v.event = 'AGENT_COMPLETED' and v.key = x.id::text)`,
	} {
		wantNone(t, m.pool, when+": "+what, sql)
	}
}

// settled is what holds after a sweep.
func (m *model) settled(t *testing.T) {
	t.Helper()
	wantNone(t, m.pool, "a lent lane that has expired and did not go back", `
		select l.* from agent_locks l where l.expires_at <= clock_timestamp()
		   and exists (select from agent_lock_loans n where n.lane = l.lane)`)
	wantNone(t, m.pool, "a parent that waits for a child which has ended", `
		select x.id, x.waiting_key from agent_executions x join agent_executions c on c.id::text = x.waiting_key
		 where x.status = 'waiting' and x.waiting_for = 'agent' and c.completed_at is not null`)
}

// play makes random operations. It accepts expected refusals.
func (c *client) play(ctx context.Context) error {
	for range loanOps {
		moves := c.actions()
		move := moves[c.rand.IntN(len(moves))]
		err := move(ctx)
		var refused *pgconn.PgError
		switch {
		case errors.As(err, &refused) && slices.Contains([]string{"LK001", "LK002"}, refused.Code):
		case errors.As(err, &refused):
			return fmt.Errorf("%s: %s\n%s\n%s", refused.Code, refused.Message, refused.Detail, refused.Where)
		case err != nil:
			return err
		}
	}
	return nil
}

func pick[T any](c *client, from []T) T {
	c.mu.Lock()
	defer c.mu.Unlock()
	return from[c.rand.IntN(len(from))]
}

// one picks a running execution with its claim, or a young one with its last known claim. A waiting execution has no
// claim.
func (c *client) one(ctx context.Context) (id string, claim int64) {
	if c.rand.IntN(3) > 0 {
		err := c.pool.QueryRow(ctx, `
			select id::text, claim from agent_executions where status = 'running' and claimed_by is not null
			 order by random() limit 1`).Scan(&id, &claim)
		if err == nil {
			return id, claim
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.ids) == 0 {
		return "00000000-0000-0000-0000-000000000000", 1
	}
	back := min(c.rand.IntN(len(c.ids)), c.rand.IntN(12))
	id = c.ids[len(c.ids)-1-back]
	return id, c.claims[id]
}

func (c *client) setClaim(id string, claim int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.claims[id]; !known {
		c.ids = append(c.ids, id)
	}
	c.claims[id] = max(claim, c.claims[id])
}

func (c *client) do(ctx context.Context, sql string, args ...any) error {
	_, err := c.pool.Exec(ctx, sql, args...)
	return err
}

// actions is what may happen, each as often as it stands here.
func (c *client) actions() []func(ctx context.Context) error {
	often := []func(ctx context.Context) error{c.claim, c.family, c.child, c.parkOnChild, c.acquire, c.send, c.takeOver, c.takeOver, c.takeOver, c.fenced, c.sweep}
	all := slices.Concat(often, often, often)
	return append(all, c.begin, c.claim, c.claim, c.claim, c.park, c.release, c.plainLane, c.plainLane, c.finish, c.cancel,
		c.releaseClaim, c.loseWorker, c.expireLane, c.timeOut, c.timeOut, c.breakLane, c.renew, c.wake)
}

func (c *client) begin(ctx context.Context) error {
	_, err := c.beginOne(ctx)
	return err
}

func (c *client) beginOne(ctx context.Context) (string, error) {
	var id string
	err := c.pool.QueryRow(ctx, `insert into agent_executions (trace_id, surface, flow) values ($1, 'flow', 'model') returning id::text`,
		string(trace.New(trace.Flow))).Scan(&id)
	if err == nil {
		c.setClaim(id, 0)
		err = c.claimOne(ctx, id)
	}
	return id, err
}

// family starts a chain of two to four executions that wait for each other; the first has a lane.
func (c *client) family(ctx context.Context) error {
	id, err := c.beginOne(ctx)
	if err != nil {
		return err
	}
	for deep := range 2 + c.rand.IntN(3) {
		if deep == 0 || c.rand.IntN(2) > 0 {
			if err := c.acquireAs(ctx, id, c.claimOf(id), pick(c, c.lanes)); err != nil {
				return err
			}
		}
		child, err := c.childOf(ctx, id, c.claimOf(id))
		if err != nil {
			return err
		}
		if err := c.claimOne(ctx, child); err != nil {
			return err
		}
		if err := c.parkOn(ctx, id, c.claimOf(id), "agent", child); err != nil {
			return err
		}
		id = child
	}
	return nil
}

func (c *client) claimOf(id string) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.claims[id]
}

func (c *client) claim(ctx context.Context) error {
	var id string
	err := c.pool.QueryRow(ctx, `
		select id::text from agent_executions where status in ('pending', 'running') and claimed_by is null
		 order by (parent_id is null), random() limit 1`).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	} else if err != nil {
		return err
	}
	return c.claimOne(ctx, id)
}

func (c *client) claimOne(ctx context.Context, id string) error {
	n, err := claim(ctx, c.pool, id, pick(c, c.workers))
	if err == nil && n > 0 {
		c.setClaim(id, n)
	}
	return err
}

// child starts a child; most parents wait for it then.
func (c *client) child(ctx context.Context) error {
	parent, n := c.one(ctx)
	id, err := c.childOf(ctx, parent, n)
	if err != nil {
		return err
	}
	if c.rand.IntN(3) > 0 {
		if err := c.claimOne(ctx, id); err != nil {
			return err
		}
	}
	if c.rand.IntN(4) > 0 {
		return c.parkOn(ctx, parent, n, "agent", id)
	}
	return nil
}

// childOf starts one in a transaction of its parent, as a step does.
func (c *client) childOf(ctx context.Context, parent string, n int64) (id string, err error) {
	err = postgres.InTx(ctx, c.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `select fence_agent_execution($1::uuid, $2)`, parent, n); err != nil {
			return err
		}
		return tx.QueryRow(ctx, `
			insert into agent_executions (trace_id, surface, flow, parent_id, awaited, inherits) values ($1, 'flow', 'model', $2, true, $3)
			returning id::text`, string(trace.New(trace.Flow)), parent, c.rand.IntN(8) > 0).Scan(&id)
	})
	if err == nil {
		c.setClaim(id, 0)
	}
	return id, err
}

func (c *client) parkOn(ctx context.Context, id string, n int64, kind, key string) error {
	return c.do(ctx, `select lanekeeper.wait_agent_execution($1::uuid, $2, $3, $4, $5, make_interval(secs => $6), null)`,
		id, n, fmt.Sprint(kind, c.rand.Uint64()), kind, key, 1+c.rand.Float64()*9)
}

func (c *client) park(ctx context.Context) error {
	id, n := c.one(ctx)
	switch c.rand.IntN(3) {
	case 0:
		return c.parkOn(ctx, id, n, "response", pick(c, c.threads))
	case 1:
		return c.parkOn(ctx, id, n, "delay", id)
	default:
		return c.parkOn(ctx, id, n, "lane", pick(c, c.lanes))
	}
}

func (c *client) parkOnChild(ctx context.Context) error {
	var id, child string
	err := c.pool.QueryRow(ctx, `
		select x.id::text, c.id::text from agent_executions x join agent_executions c on c.parent_id = x.id
		 where x.status = 'running' and c.completed_at is null order by random() limit 1`).Scan(&id, &child)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	} else if err != nil {
		return err
	}
	return c.parkOn(ctx, id, c.claimOf(id), "agent", child)
}

// send says something, sometimes in two threads in one step.
func (c *client) send(ctx context.Context) error {
	id, n := c.one(ctx)
	return postgres.InTx(ctx, c.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `select fence_agent_execution($1::uuid, $2)`, id, n); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `select lanekeeper.send_agent_message($1, $2::uuid, $3, 'something')`, pick(c, c.threads), id, n)
		return err
	})
}

// acquire does what executions.Lane does: take, then look whether the claim still counts.
func (c *client) acquire(ctx context.Context) error {
	id, n := c.one(ctx)
	return c.acquireAs(ctx, id, n, pick(c, c.lanes))
}

// takeOver takes, or speaks in, a lane that an execution may borrow now or soon.
func (c *client) takeOver(ctx context.Context) error {
	var id, lane string
	var n int64
	err := c.pool.QueryRow(ctx, `
		select c.id::text, c.claim, l.lane from agent_executions c
		  join agent_locks l on l.expires_at > clock_timestamp() and lanekeeper.agent_lenders(c.id, l.execution_id, true) is not null
		 where c.status = 'running' and c.claimed_by is not null and c.inherits order by random() limit 1`).Scan(&id, &n, &lane)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	} else if err != nil {
		return err
	}
	if thread, ok := strings.CutPrefix(lane, "thread:"); ok && c.rand.IntN(2) > 0 {
		return c.do(ctx, `select lanekeeper.send_agent_message($1, $2::uuid, $3, 'from a child')`, thread, id, n)
	}
	return c.acquireAs(ctx, id, n, lane)
}

func (c *client) acquireAs(ctx context.Context, id string, n int64, lane string) error {
	owner := fmt.Sprint(id, "#", n)
	if n == 0 {
		return nil
	}
	var acquired bool
	var token *int64
	err := c.pool.QueryRow(ctx, `select acquired, fencing_token from lanekeeper.acquire_agent_execution_lock($1, $2, $3)`, lane, owner, 1+c.rand.IntN(300)).
		Scan(&acquired, &token)
	if err != nil || !acquired {
		return err
	}
	c.mu.Lock()
	c.tokens[lane] = *token
	c.mu.Unlock()
	if err := c.do(ctx, `select fence_agent_execution($1::uuid, $2)`, id, n); err != nil {
		return errors.Join(err, c.do(context.WithoutCancel(ctx), `select release_agent_lock($1, $2)`, lane, owner))
	}
	return nil
}

func (c *client) release(ctx context.Context) error {
	return c.do(ctx, `select release_agent_lock(l.lane, l.locked_by) from (
		select lane, locked_by from agent_locks where locked_by <> '' order by random() limit 1) l`)
}

func (c *client) plainLane(ctx context.Context) error {
	lane := pick(c, c.lanes)
	switch c.rand.IntN(4) {
	case 0:
		return c.do(ctx, `select await_agent_lock($1, $2, 1, 1)`, lane, fmt.Sprint("run/", c.rand.IntN(3)))
	case 1:
		return c.do(ctx, `select lanekeeper.send_agent_message($1, null, null, 'from outside')`, pick(c, c.threads))
	case 2:
		return c.do(ctx, `select lanekeeper.receive_agent_message($1, 'hola')`, pick(c, c.threads))
	default:
		return c.do(ctx, `select acquire_agent_lock($1, $2, 1)`, lane, fmt.Sprint("run/", c.rand.Uint64()))
	}
}

// fenced writes under a token that was live once.
func (c *client) fenced(ctx context.Context) error {
	lane := pick(c, c.lanes)
	c.mu.Lock()
	token := c.tokens[lane]
	c.mu.Unlock()
	return c.do(ctx, `
		with f as materialized (select fence_agent_lock($1, $2))
		insert into token_uses select $1, $2, nextval('use_number') from f`, lane, token)
}

func (c *client) finish(ctx context.Context) error {
	id, n := c.one(ctx)
	return c.do(ctx, `select lanekeeper.complete_agent_execution($1::uuid, $2, $3, '', null, null, null)`, id, n,
		[]string{"completed", "failed", "timeout"}[c.rand.IntN(3)])
}

func (c *client) cancel(ctx context.Context) error {
	return c.do(ctx, `select cancel_agent_execution(x.id, 'test', 'why not') from (
		select id from agent_executions where completed_at is null order by random() limit 1) x`)
}

func (c *client) releaseClaim(ctx context.Context) error {
	id, n := c.one(ctx)
	return c.do(ctx, `select lanekeeper.release_agent_claim($1::uuid, $2)`, id, n)
}

func (c *client) loseWorker(ctx context.Context) error {
	var id string
	err := c.pool.QueryRow(ctx, `insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 hour') returning id::text`).
		Scan(&id)
	if err != nil {
		return err
	}
	c.mu.Lock()
	n := c.rand.IntN(len(c.workers))
	lost := c.workers[n]
	c.workers[n] = id
	c.mu.Unlock()
	return c.do(ctx, `update agent_workers set expires_at = clock_timestamp() where id = $1`, lost)
}

func (c *client) expireLane(ctx context.Context) error {
	return c.do(ctx, `update agent_locks set expires_at = clock_timestamp() where lane = $1 and not parked`, pick(c, c.lanes))
}

func (c *client) timeOut(ctx context.Context) error {
	return c.do(ctx, `update agent_executions set waiting_until = clock_timestamp() where id in (
		select id from agent_executions where status = 'waiting' order by random() limit 1) and status = 'waiting'`)
}

func (c *client) breakLane(ctx context.Context) error {
	if c.rand.IntN(3) > 0 {
		return nil
	}
	return c.do(ctx, `select break_agent_lock($1, 'test')`, pick(c, c.lanes))
}

func (c *client) renew(ctx context.Context) error {
	return c.do(ctx, `select lanekeeper.renew_agent_locks(array_agg(lane), array_agg(locked_by), array_agg(fencing_token), array_agg(300))
		from agent_locks where locked_by <> '' and not parked`)
}

func (c *client) wake(ctx context.Context) error {
	return c.do(ctx, `select count(w.id) from (
		select id from agent_executions where completed_at is not null order by completed_at desc limit 1) t, lanekeeper.resume_agent_waiters('agent', t.id::text) w`)
}

func (c *client) sweep(ctx context.Context) error {
	return sweepOnce(ctx, c.pool)
}
