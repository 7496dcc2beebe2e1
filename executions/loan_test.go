package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// chainMember is an execution in a chain of parents and children: its id, and its claim while it runs.
type chainMember struct {
	id    string
	claim int64
}

func (m chainMember) owner() string { return fmt.Sprint(m.id, "#", m.claim) }

// startMember starts a running execution. A child inherits lanes.
func startMember(t *testing.T, pool *pgxpool.Pool, parent string) chainMember {
	t.Helper()
	id := pgtest.Value[string](t, pool, `
		insert into agent_executions (trace_id, surface, flow, parent_id, awaited, inherits)
		values ($1, 'flow', 'flow', nullif($2, '')::uuid, $2 <> '', $2 <> '')
		  returning id::text`, string(trace.New(trace.Flow)), parent)
	return chainMember{id, mustClaim(t, pool, id, newWorker(t, pool))}
}

const parkOnChild = `select lanekeeper.wait_agent_execution($1::uuid, $2, 'child ' || $3::text, 'agent', $3::text,
	'1 hour', null)`

// startChain creates a chain of executions. Each waits for the next, the last one runs, and the first holds the lane.
func startChain(t *testing.T, pool *pgxpool.Pool, lane string, depth int) []chainMember {
	t.Helper()
	all := []chainMember{startMember(t, pool, "")}
	mustAcquire(t, pool, lane, all[0])
	for n := range depth - 1 {
		all = append(all, startMember(t, pool, all[n].id))
		pgtest.Exec(t, pool, parkOnChild, all[n].id, all[n].claim, all[n+1].id)
	}
	return all
}

func tryAcquire(t *testing.T, db postgres.DB, lane string, who chainMember) (acquired bool, token int64) {
	t.Helper()
	err := db.QueryRow(t.Context(), `select acquired, coalesce(fencing_token, 0)
		from lanekeeper.acquire_agent_execution_lock($1, $2)`, lane, who.owner()).
		Scan(&acquired, &token)
	require.NoError(t, err)
	return acquired, token
}

func mustAcquire(t *testing.T, db postgres.DB, lane string, who chainMember) int64 {
	t.Helper()
	ok, token := tryAcquire(t, db, lane, who)
	require.Truef(t, ok, "%s does not get lane %s", who.id, lane)
	return token
}

// wantHolder checks the holder of a lane ("" for none), and whether it is parked.
func wantHolder(t *testing.T, db postgres.DB, lane, id string, parked bool) {
	t.Helper()
	got := pgtest.Value[string](t, db, `
		select coalesce((select coalesce(execution_id::text, locked_by) || ' ' || parked from agent_locks
		                  where lane = $1 and expires_at > clock_timestamp()), ' false')`, lane)
	assert.Equal(t, fmt.Sprint(id, " ", parked), got, lane)
}

func readToken(t *testing.T, db postgres.DB, lane string) int64 {
	t.Helper()
	return pgtest.Value[int64](t, db, `select fencing_token from agent_locks where lane = $1`, lane)
}

func wantLoans(t *testing.T, db postgres.DB, lane string, n int) {
	t.Helper()
	assert.Equal(t, n, pgtest.Value[int](t, db, `select count(*) from agent_lock_loans where lane = $1`, lane))
}

// wantStale checks that a write under a token is rejected.
func wantStale(t *testing.T, db postgres.DB, lane string, token int64) {
	t.Helper()
	_, err := db.Exec(t.Context(), `select fence_agent_lock($1, $2)`, lane, token)
	assert.Truef(t, postgres.IsCode(err, "LK001"), "a write under token %d passes the fence: %v", token, err)
}

func commit(t *testing.T, tx pgx.Tx) {
	t.Helper()
	require.NoError(t, tx.Commit(t.Context()))
}

const loanLane = "objective:o1"

func TestLoanReturnsToLender(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	ends := map[string]func(t *testing.T, lane string, c chainMember){
		"finished": func(t *testing.T, _ string, c chainMember) {
			pgtest.Exec(t, pool, `select lanekeeper.complete_agent_execution($1::uuid, $2, 'completed', '', null, null, null)`,
				c.id, c.claim)
		},
		"failed": func(t *testing.T, _ string, c chainMember) {
			pgtest.Exec(t, pool, `select lanekeeper.complete_agent_execution($1::uuid, $2, 'failed', '', null, 'no', null)`,
				c.id, c.claim)
		},
		"cancelled": func(t *testing.T, _ string, c chainMember) {
			pgtest.Exec(t, pool, `select cancel_agent_execution($1::uuid, 'somebody', 'why not')`, c.id)
		},
		"released": func(t *testing.T, lane string, c chainMember) {
			assert.True(t, pgtest.Value[bool](t, pool, `select release_agent_lock($1, $2)`, lane, c.owner()),
				"the borrower cannot release")
		},
		"handed back": func(t *testing.T, _ string, c chainMember) {
			pgtest.Exec(t, pool, `select lanekeeper.release_agent_claim($1::uuid, $2)`, c.id, c.claim)
		},
		"expired, and wanted by an outsider": func(t *testing.T, lane string, _ chainMember) {
			pgtest.Exec(t, pool, `update agent_locks set expires_at = clock_timestamp() where lane = $1`, lane)
			assert.True(t, !pgtest.Value[bool](t, pool, `select try_acquire_agent_lock($1, 'outsider')`, lane),
				"another execution gets a lane that returns to its lender")
		},
		"expired, and swept": func(t *testing.T, lane string, _ chainMember) {
			pgtest.Exec(t, pool, `update agent_locks set expires_at = clock_timestamp() where lane = $1`, lane)
			prune(t, pool)
		},
		"waiting when its own parent's time is up": func(t *testing.T, lane string, c chainMember) {
			pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution($1::uuid, $2, 'x', 'event', 'x', '1 hour', null)`, c.id,
				c.claim)
			wantHolder(t, pool, lane, c.id, true)
			pgtest.Exec(t, pool, `update agent_executions set waiting_until = clock_timestamp() where waiting_key = $1`, c.id)
			sweep(t, pool)
		},
	}
	for name, end := range ends {
		for _, depth := range []int{2, 4} {
			t.Run(fmt.Sprint(name, " at depth ", depth), func(t *testing.T) {
				lane := fmt.Sprint("objective:", name, depth)
				all := startChain(t, pool, lane, depth)
				last, above := all[depth-1], all[depth-2]
				lent := mustAcquire(t, pool, lane, last)
				wantLoans(t, pool, lane, depth-1)
				end(t, lane, last)
				x := getExecution(t, pool, above.id)
				wantHolder(t, pool, lane, above.id, x.Status == executions.Waiting)
				wantLoans(t, pool, lane, depth-2)
				wantStale(t, pool, lane, lent)
				got := readToken(t, pool, lane)
				assert.Truef(t, got > lent, "token %d after %d", got, lent)
			})
		}
	}
}

// Any ancestor in a chain of four may stop waiting. The lane returns to the nearest live ancestor.
func TestLoanReturnsToNearestLiveAncestor(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, c := range map[string]struct {
		which  int
		stop   string
		holder int // -1: nobody
	}{
		"the first is cancelled":  {0, `select cancel_agent_execution($1::uuid, 'x', '')`, -1},
		"the second is cancelled": {1, `select cancel_agent_execution($1::uuid, 'x', '')`, 0},
		"the third is cancelled":  {2, `select cancel_agent_execution($1::uuid, 'x', '')`, 1},
		"the first fails": {0, `update agent_executions set status = 'failed', claim = claim + 1
			where id = $1::uuid`, -1},
		"the second fails": {1, `update agent_executions set status = 'failed', claim = claim + 1
			where id = $1::uuid`, 0},
		"the third ends in timeout": {2, `update agent_executions set status = 'timeout', claim = claim + 1
			where id = $1::uuid`, 1},
		"the first waits no longer":  {0, resumeSQL, 0},
		"the second waits no longer": {1, resumeSQL, 1},
		"the third waits no longer":  {2, resumeSQL, 2},
	} {
		t.Run(name, func(t *testing.T) {
			lane := "objective:" + name
			all := startChain(t, pool, lane, 4)
			lent := mustAcquire(t, pool, lane, all[3])
			pgtest.Exec(t, pool, c.stop, all[c.which].id)
			want := ""
			if c.holder >= 0 {
				want = all[c.holder].id
			}
			wantHolder(t, pool, lane, want, c.holder >= 0 && getExecution(t, pool, want).Status == executions.Waiting)
			wantStale(t, pool, lane, lent)
			ok, _ := tryAcquire(t, pool, lane, all[3])
			assert.True(t, !ok || c.holder < 0, "a child without a waiting parent borrows again")
		})
	}
}

func TestLentLaneBelongsToBorrower(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	all := startChain(t, pool, loanLane, 2)
	before := readToken(t, pool, loanLane)
	lenders := pgtest.Value[string](t, pool, `select locked_by from agent_locks where lane = $1`, loanLane)
	lent := mustAcquire(t, pool, loanLane, all[1])
	wantStale(t, pool, loanLane, before) // the lender's late write
	pgtest.Exec(t, pool, `select fence_agent_lock($1, $2)`, loanLane, lent)
	for _, owner := range []string{lenders, all[0].owner()} {
		assert.Truef(t, !pgtest.Value[bool](t, pool, `select release_agent_lock($1, $2)`, loanLane, owner),
			"%s releases a lent lane", owner)
	}
	if sibling := startMember(t, pool, all[0].id); true {
		ok, _ := tryAcquire(t, pool, loanLane, sibling)
		assert.True(t, !ok, "a sibling without a waiting parent borrows")
	}
	assert.True(t, pgtest.Value[bool](t, pool, `select break_agent_lock($1, 'test')`, loanLane),
		"a lent lane cannot be broken")
	wantLoans(t, pool, loanLane, 0)
	wantHolder(t, pool, loanLane, "", false)
	pgtest.Exec(t, pool, `select cancel_agent_execution($1::uuid, 'x', '')`, all[1].id)
	wantHolder(t, pool, loanLane, "", false) // a broken lane does not return
}

// After the borrower died, its next claim has the lane, or borrows it again if it expired.
func TestReclaimedBorrowerKeepsLane(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, expired := range map[string]bool{"in time": false, "after the lease": true} {
		t.Run(name, func(t *testing.T) {
			lane := "objective:" + name
			all := startChain(t, pool, lane, 3)
			last := all[2]
			old := mustAcquire(t, pool, lane, last)
			expireLease(t, pool, last.id)
			sweep(t, pool)
			if expired {
				pgtest.Exec(t, pool, `update agent_locks set expires_at = clock_timestamp() where lane = $1`, lane)
			}
			last.claim = mustClaim(t, pool, last.id, newWorker(t, pool))
			got := mustAcquire(t, pool, lane, last)
			assert.Truef(t, got > old, "token %d after %d", got, old)
			wantStale(t, pool, lane, old)
			wantHolder(t, pool, lane, last.id, false)
			pgtest.Exec(t, pool, `select lanekeeper.complete_agent_execution($1::uuid, $2, 'completed', '', null, null, null)`,
				last.id, last.claim)
			wantHolder(t, pool, lane, all[1].id, true)
		})
	}
}

// A thread is lent before its owner begins to wait. Then the child ends while the owner parks, is claimed or ends. In
// either order the thread is the owner's again: parked while it waits, free after its end.
func TestThreadReturnsToOwnerThatChangesState(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	changes := map[string]func(tx postgres.DB, p, c chainMember) error{
		"parks": func(tx postgres.DB, p, c chainMember) error {
			_, err := tx.Exec(context.Background(), parkOnChild, p.id, p.claim, c.id)
			return err
		},
		"is handed back": func(tx postgres.DB, p, _ chainMember) error {
			_, err := tx.Exec(context.Background(), `select lanekeeper.release_agent_claim($1::uuid, $2)`, p.id, p.claim)
			return err
		},
		"ends": func(tx postgres.DB, p, _ chainMember) error {
			_, err := tx.Exec(context.Background(), `select lanekeeper.complete_agent_execution($1::uuid, $2, 'failed', '', null,
				'x', null)`, p.id, p.claim)
			return err
		},
	}
	for name, change := range changes {
		for _, childFirst := range []bool{true, false} {
			t.Run(fmt.Sprint(name, ", child first: ", childFirst), func(t *testing.T) {
				lane := fmt.Sprint("thread:", name, childFirst)
				p := startMember(t, pool, "")
				mustAcquire(t, pool, lane, p)
				c := startMember(t, pool, p.id)
				mustAcquire(t, pool, lane, c)
				back := func(tx postgres.DB) error {
					_, err := tx.Exec(t.Context(), `select release_agent_lock($1, $2)`, lane, c.owner())
					return err
				}
				first, second, text := back, func(tx postgres.DB) error { return change(tx, p, c) }, "_agent_"
				if !childFirst {
					first, second = second, first
				}
				tx := pgtest.Begin(t, pool)
				require.NoError(t, first(tx))
				var group errgroup.Group
				group.Go(func() error { return second(pool) })
				pgtest.AwaitBlocked(t, pool, 1, text)
				commit(t, tx)
				require.NoError(t, group.Wait())
				x := getExecution(t, pool, p.id)
				if x.Status.Ended() {
					wantHolder(t, pool, lane, "", false)
					return
				}
				wantHolder(t, pool, lane, p.id, x.Status == executions.Waiting)
				if got, want := pgtest.Value[string](t, pool, `select locked_by from agent_locks where lane = $1`, lane),
					fmt.Sprint(p.id, "#", x.Claim); got != want {
					t.Errorf("held by %s, want %s", got, want)
				}
			})
		}
	}
}

// The owner is about to park: its row is locked, its lanes are not yet parked.
func TestThreadReturnsToLockedOwner(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	const lane = "thread:t1"
	p := startMember(t, pool, "")
	mustAcquire(t, pool, lane, p)
	c := startMember(t, pool, p.id)
	mustAcquire(t, pool, lane, c)
	tx := pgtest.Begin(t, pool)
	pgtest.Exec(t, tx, `select from agent_executions where id = $1::uuid for update`, p.id)
	pgtest.Exec(t, pool, `select lanekeeper.complete_agent_execution($1::uuid, $2, 'completed', '', null, null, null)`,
		c.id, c.claim)
	pgtest.Exec(t, tx, `select lanekeeper.wait_agent_execution($1::uuid, $2, 'x', 'event', 'x', '1 hour', null)`, p.id,
		p.claim)
	commit(t, tx)
	wantHolder(t, pool, lane, p.id, true)
}

// A child borrows at the moment when its parent stops waiting. The lane ends up with the parent.
func TestConcurrentBorrowAndResumeReturnLane(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, who := range []struct{ depth, stops int }{{2, 0}, {3, 0}, {3, 1}} { // the second of three never had the lane
		for _, borrowFirst := range []bool{true, false} {
			t.Run(fmt.Sprint(who, ", borrow first: ", borrowFirst), func(t *testing.T) {
				lane := fmt.Sprint("objective:", who, borrowFirst)
				all := startChain(t, pool, lane, who.depth)
				p, c := all[who.stops], all[who.depth-1]
				borrow := func(tx postgres.DB) error {
					_, err := tx.Exec(t.Context(), `select lanekeeper.lend_agent_lock($1, $2::uuid, $3)`, lane, c.id, c.claim)
					return err
				}
				resume := func(tx postgres.DB) error {
					_, err := tx.Exec(t.Context(), resumeSQL, p.id)
					return err
				}
				first, second, text := borrow, resume, "resume_agent"
				if !borrowFirst {
					first, second, text = resume, borrow, "lend_agent"
				}
				tx := pgtest.Begin(t, pool)
				require.NoError(t, first(tx))
				var group errgroup.Group
				group.Go(func() error { return second(pool) })
				pgtest.AwaitBlocked(t, pool, 1, text)
				commit(t, tx)
				require.NoError(t, group.Wait())
				if pgtest.Value[bool](t, pool, `select execution_id = $1::uuid from agent_locks where lane = $2`, c.id, lane) {
					t.Error("the child keeps a lane of a parent that does not wait for it")
				}
				assert.Equal(t, 0, pgtest.Value[int](t, pool, `
					select count(*) from agent_lock_loans n join agent_executions x on x.id = n.lender
					 where x.status <> 'waiting' and n.lane = $1`, lane))
			})
		}
	}
}

// A sending child locks its own row, then waits for the lane. A cancel of its parent must not lock the lane before that
// row.
func TestCancelOfParentDuringChildSend(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_threads (id, channel) values ('t1', 'chat')`)
	all := startChain(t, pool, "thread:t1", 2)
	p, c := all[0], all[1]
	tx := pgtest.Begin(t, pool)
	pgtest.Exec(t, tx, `select fence_agent_execution($1::uuid, $2)`, c.id, c.claim) // a step of the child
	var group errgroup.Group
	group.Go(func() error {
		_, err := cancelElsewhere(t.Context(), pool, p.id, "x", "")
		return err
	})
	pgtest.Until(t, pool, 2, `select count(*)
		from agent_cancel_requests`)
	pgtest.Exec(t, tx, `select lanekeeper.send_agent_message('t1', $1::uuid, $2, 'hola')`, c.id, c.claim)
	commit(t, tx)
	require.NoError(t, group.Wait())
	engine := newEngine(t, pool, nil)
	pgtest.Eventually(t, func() bool {
		done, err := engine.TryComplete(t.Context(), p.id)
		return done && err == nil
	}, "the cancel is completed")
	wantHolder(t, pool, "thread:t1", "", false)
	wantLoans(t, pool, "thread:t1", 0)
}

// A parent lends a thread to a child that it started. The loan continues while the parent waits for that child.
// During any other wait the thread is the parent's again, and the child's token is void.
func TestThreadIsLentOnlyToAwaitedChild(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for i, c := range []struct {
		kind string
		key  func(lent, other chainMember) string
		lent bool
	}{
		{"agent", func(lent, _ chainMember) string { return lent.id }, true},
		{"agent", func(_, other chainMember) string { return other.id }, false},
		{"event", func(chainMember, chainMember) string { return "paid" }, false},
	} {
		thread := fmt.Sprint("t", i)
		pgtest.Exec(t, pool, `insert into agent_threads (id, channel) values ($1, 'chat')`, thread)
		p := startMember(t, pool, "")
		mustAcquire(t, pool, "thread:"+thread, p)
		lent, other := startMember(t, pool, p.id), startMember(t, pool, p.id)
		token := mustAcquire(t, pool, "thread:"+thread, lent)
		wantLoans(t, pool, "thread:"+thread, 1)
		pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution($1::uuid, $2, 'wait', $3, $4, '1 hour', null)`, p.id,
			p.claim, c.kind, c.key(lent, other))
		if c.lent {
			wantHolder(t, pool, "thread:"+thread, lent.id, false)
			wantLoans(t, pool, "thread:"+thread, 1)
			continue
		}
		wantHolder(t, pool, "thread:"+thread, p.id, true)
		wantLoans(t, pool, "thread:"+thread, 0)
		wantStale(t, pool, "thread:"+thread, token)
	}
}

// A shutdown releases a run. Its threads stay with it, its other lanes become free.
func TestReleasedRunKeepsThreads(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_threads (id, channel) values ('t1', 'chat')`)
	p, other := startMember(t, pool, ""), startMember(t, pool, "")
	old := mustAcquire(t, pool, "thread:t1", p)
	mustAcquire(t, pool, loanLane, p)
	pgtest.Exec(t, pool, `select lanekeeper.release_agent_claim($1::uuid, $2)`, p.id, p.claim)
	wantHolder(t, pool, loanLane, "", false)
	wantStale(t, pool, "thread:t1", old)
	if !pgtest.Value[bool](t, pool, `select queued from lanekeeper.send_agent_message('t1', $1::uuid, $2, 'me first')`,
		other.id, other.claim) {
		t.Error("another conversation slips in")
	}
	p.claim = mustClaim(t, pool, p.id, newWorker(t, pool))
	mustAcquire(t, pool, "thread:t1", p)
}

// A lane expires while lent. Its loan must not return after another owner has the lane.
func TestPrunedLaneLeavesNoLoan(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	all := startChain(t, pool, "pipeline:p", 2)
	mustAcquire(t, pool, "pipeline:p", all[1])
	for range 2 { // the first prune returns it to the parent, the second ends the parent's lease
		pgtest.Exec(t, pool, `update agent_locks set expires_at = clock_timestamp() - interval '2 days'`)
		prune(t, pool)
	}
	wantLoans(t, pool, "pipeline:p", 0)
	assert.True(t, pgtest.Value[bool](t, pool, `select try_acquire_agent_lock('pipeline:p', 'outsider')
		and release_agent_lock('pipeline:p', 'outsider')`), "the lane is not free")
	wantHolder(t, pool, "pipeline:p", "", false)
}

// A loan ends during a sweep. The next sweep, or the next request, returns the lane. Here the sweep waits for the loan
// of another lane until then.
func TestPruneKeepsLoanThatExpiresMeanwhile(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	first, second := startChain(t, pool, "objective:1", 2), startChain(t, pool, "objective:2", 2)
	mustAcquire(t, pool, "objective:1", first[1])
	mustAcquire(t, pool, "objective:2", second[1])
	pgtest.Exec(t, pool, `update agent_locks set expires_at = clock_timestamp() where lane = 'objective:1'`)
	tx := pgtest.Begin(t, pool)
	pgtest.Exec(t, tx, `select from agent_lock_loans where lane = 'objective:1' for update`)
	swept := make(chan error, 1)
	go func() {
		swept <- lanes.Prune(context.WithoutCancel(t.Context()), pool, 0)
	}()
	pgtest.AwaitBlocked(t, pool, 1, "return_agent_lock")
	pgtest.Exec(t, pool, `update agent_locks set expires_at = clock_timestamp() where lane = 'objective:2'`)
	commit(t, tx)
	require.NoError(t, <-swept)
	wantLoans(t, pool, "objective:2", 1)
	assert.True(t, !pgtest.Value[bool](t, pool, `select try_acquire_agent_lock('objective:2', 'outsider')`),
		"another execution gets a lane whose lender waits")
	wantHolder(t, pool, "objective:2", second[0].id, true)
}

// A child takes the lane of its parent, or of its parent's parent, even if it tries first.
func TestChildBorrowsParentLane(t *testing.T) {
	t.Parallel()
	for name, enabled := range map[string]bool{"lanes on": true, "lanes off": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			tokens := make(chan int64, 3)
			lane := func(ctx context.Context) error {
				h, err := executions.Lane(ctx, loanLane)
				if err == nil {
					tokens <- h.Token()
				}
				return err
			}
			trigger := func(ctx context.Context, flow string) (executions.Result, error) {
				got, err := executions.Trigger(ctx, "child", executions.Child{Flow: flow, Wait: true})
				if err == nil && !got.Success {
					err = errors.New(got.Error)
				}
				return executions.Result{}, err
			}
			p := startEngine(t, pool, map[string]executions.Func{
				"top": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
					if _, err := executions.Step(ctx, "lane", func(context.Context) (int, error) { return 0, lane(ctx) }); err != nil {
						return executions.Result{}, err
					}
					return trigger(ctx, "middle")
				},
				"middle": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) { return trigger(ctx, "bottom") },
				"bottom": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
					return executions.Result{}, lane(ctx)
				},
			}, func(o *executions.Options) { o.Keeper = lanes.NewKeeper(pool, lanes.Options{Disabled: !enabled}) })
			enginetest.Await(t, pool, p.startFlow(t, "top"), executions.Completed)
			first, second := testkit.Receive(t, tokens), testkit.Receive(t, tokens)
			assert.Truef(t, (!enabled || second > first) && (enabled || first+second == 0), "tokens %d, then %d", first, second)
			held := pgtest.Column[string](t, pool, `select lane from agent_locks where locked_by <> ''`)
			assert.Truef(t, len(held) == 0, "lanes held at the end: %v", held)
			wantLoans(t, pool, loanLane, 0)
		})
	}
}

// KeepLanes keeps the child out, and so does a parent that does not wait.
func TestChildWithoutInheritanceIsRefused(t *testing.T) {
	t.Parallel()
	for name, child := range map[string]executions.Child{
		"keeps its lanes": {Flow: "child", Wait: true, KeepLanes: true},
		"does not wait":   {Flow: "child"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			answer := make(chan error, 1)
			p := startEngine(t, pool, map[string]executions.Func{
				"parent": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
					if _, err := executions.Lane(ctx, loanLane); err != nil {
						return executions.Result{}, err
					}
					if _, err := executions.Trigger(ctx, "child", child); err != nil {
						return executions.Result{}, err
					}
					return resultOf(executions.Wait(ctx, "hold", executions.Event("done", time.Hour)))
				},
				"child": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
					_, err := executions.Lane(ctx, loanLane)
					answer <- err
					return executions.Result{}, nil
				},
			})
			p.startFlow(t, "parent")
			assert.ErrorIs(t, testkit.Receive(t, answer), lanes.ErrBusy)
		})
	}
}

// prune returns expired loans, like housekeeping.
func prune(t testing.TB, db postgres.DB) {
	t.Helper()
	require.NoError(t, lanes.Prune(t.Context(), db, 24*time.Hour))
}

// After a run lost a lane, none of its steps starts, whatever its context. Steps start again after the run acquires the
// lane again or releases it.
func TestNoStepStartsAfterLaneIsLost(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, c := range map[string]struct {
		after func(ctx context.Context, hold *executions.Hold) error
		goOn  bool
	}{
		"a step": {func(context.Context, *executions.Hold) error { return nil }, false},
		"taken again": {func(ctx context.Context, _ *executions.Hold) error {
			_, err := executions.Lane(ctx, "objective:1")
			return err
		}, true},
		"given back": {func(ctx context.Context, hold *executions.Hold) error {
			if err := hold.Release(ctx); !errors.Is(err, lanes.ErrLost) {
				return errors.Join(errors.New("the release of a lost lane says nothing"), err)
			}
			return nil
		}, true},
	} {
		called := false
		var stopped error
		p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
			hold, err := executions.Lane(ctx, "objective:1", lanes.WithTTL(9*time.Second))
			if err != nil {
				return executions.Result{}, err
			}
			if broken, err := lanes.Break(ctx, pool, "objective:1", "stuck"); err != nil || !broken {
				return executions.Result{}, errors.Join(errors.New("not broken"), err)
			}
			<-hold.Context().Done()
			if err := c.after(ctx, hold); err != nil {
				return executions.Result{}, err
			}
			_, stopped = executions.Step(ctx, "act", func(context.Context) (int, error) { called = true; return 1, nil })
			return resultOf(nil, stopped)
		}), func(o *executions.Options) { testkit.Run(t, o.Keeper.Run) })
		x, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
		assert.Truef(t, err == nil && called == c.goOn && errors.Is(stopped, lanes.ErrLost) != c.goOn &&
			(x.Status == executions.Completed) == c.goOn, "%s: the step was called %t, with %v; the run is %s, %v", name, called,
			stopped, x.Status, err)
		p.stop()
	}
}

// A run holds a lane twice and loses it. The lane stays lost after the run has released the inner hold.
func TestNoStepStartsAfterOuterHoldIsLost(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	called := false
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		outer, err := executions.Lane(ctx, "objective:1", lanes.WithTTL(9*time.Second))
		if err != nil {
			return executions.Result{}, err
		}
		inner, err := executions.Lane(ctx, "objective:1", lanes.WithTTL(9*time.Second))
		if err != nil {
			return executions.Result{}, err
		}
		if broken, err := lanes.Break(ctx, pool, "objective:1", "stuck"); err != nil || !broken {
			return executions.Result{}, errors.Join(errors.New("not broken"), err)
		}
		<-outer.Context().Done()
		_ = inner.Release(ctx) // its error is that the lane was lost
		_, err = executions.Step(ctx, "act", func(context.Context) (int, error) { called = true; return 1, nil })
		return resultOf(nil, err)
	}), func(o *executions.Options) { testkit.Run(t, o.Keeper.Run) })
	x, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
	assert.Truef(t, err == nil && !called, "the step was called %t; the run is %s, %v", called, x.Status, err)
	p.stop()
}
