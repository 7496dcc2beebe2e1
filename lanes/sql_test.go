package lanes_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// These are the rules of DESIGN.md in plain SQL. They hold for every caller.

func TestTryAcquireMatchesAcquire(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for i, want := range []bool{true, true, false} {
		owner := []string{"a", "a", "b"}[i]
		assert.Equal(t, want, pgtest.Value[bool](t, db, `select try_acquire_agent_lock('heartbeat', $1)`, owner), i, owner)
	}
	assert.Equal(t, 300, pgtest.Value[int](t, db, `select ttl_seconds from agent_locks where lane = 'heartbeat'`))
}

func TestRefreshKeepsToken(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "x", "a", 10)
	before := pgtest.Value[time.Time](t, db, `select expires_at from agent_locks`)
	assert.Equal(t, token, mustAcquire(t, db, "x", "a", 60))
	after := pgtest.Value[time.Time](t, db, `select expires_at from agent_locks`)
	assert.Truef(t, after.After(before.Add(40*time.Second)), "refresh ends at %s, first hold at %s", after, before)
}

func TestTokensGrowAfterEveryEnd(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for i, end := range []string{ // in this order: the last one makes tokens of the future
		`select release_agent_lock('x', $1)`,
		`select break_agent_lock('x', 'breaking ' || $1)`,
		`with e as (update agent_locks set expires_at = clock_timestamp() where locked_by = $1 returning 1)
			select count(*) = 1 from e`,
		`with e as (update agent_locks set expires_at = 'epoch' where locked_by = $1 returning 1) select count(*) = 1 from e`,
		"prune", // the row is gone, only the clock is left
		`with e as (update agent_locks set expires_at = clock_timestamp(), fencing_token = fencing_token + 3600000000
		             where locked_by = $1 returning 1) select count(*) = 1 from e`, // the clock goes back by an hour
		`select release_agent_lock('x', $1)`,
	} {
		last := pgtest.Value[int64](t, db, `select coalesce(max(fencing_token), 0) from agent_locks`)
		if i == 4 { // prune after the step before
			err := lanes.Prune(t.Context(), db, 24*time.Hour)
			assert.Truef(t, err == nil && laneRow(t, db, "x") == "none", "nothing was pruned: %v", err)
			end = `select release_agent_lock('x', $1)`
		}
		owner := fmt.Sprint("owner ", i)
		token := mustAcquire(t, db, "x", owner, 60)
		assert.Truef(t, token > last && token < 1<<53, "%d: token %d after %d", i, token, last)
		assert.Truef(t, pgtest.Value[bool](t, db, end, owner), "%s: did nothing", end)
	}
}

func TestTryAcquireNeverWaits(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustAcquire(t, db, "released", "a", 60)
	pgtest.Value[bool](t, db, `select release_agent_lock('released', 'a')`)
	mustAcquire(t, db, "own", "c", 60)
	open := pgtest.Begin(t, db)
	tryAcquire(t, open, "first", "a", 60)                                         // inserted, not committed
	tryAcquire(t, open, "released", "a", 60)                                      // updated, not committed
	pgtest.Exec(t, open, `select from agent_locks where lane = 'own' for update`) // locked by a stranger
	pgtest.Exec(t, open, `select await_agent_lock('awaited', 'a', 60)`)           // through the queue
	for _, lane := range []string{"first", "released", "own", "awaited"} {
		tx := pgtest.Begin(t, db)
		pgtest.Exec(t, tx, `set local statement_timeout = '2s'`)
		assert.Truef(t, !tryAcquire(t, tx, lane, "c", 60).acquired, "%s: granted while another transaction changes it", lane)
		commit(t, tx)
	}
}

func TestPruneDeletesAllFreeLanes(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `insert into agent_locks (lane, fencing_token, expires_at)
		select 'webhook:' || n, n, clock_timestamp() - interval '2 days' from generate_series(1, 1001) n`)
	require.NoError(t, lanes.Prune(t.Context(), db, 24*time.Hour))
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_locks`))
}

// TestRenewalChangesLengthOfLease, from which agent_thread_locks computes the time of the last renewal.
func TestRenewalChangesLengthOfLease(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `insert into agent_threads (id, channel) values ('x', 'chat')`)
	got := mustAcquire(t, db, "thread:x", "me", 600)
	pgtest.Exec(t, db, `select renew_agent_lock('thread:x', 'me', $1, 3600)`, got)
	pgtest.Equal(t, db, true, `
		select execution_locked_at between clock_timestamp() - interval '5 minutes' and clock_timestamp()
		  from agent_thread_locks`)
}

func TestOtherOwnersAndOldTokensChangeNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	old := mustAcquire(t, db, "x", "a", 60)
	expire(t, db, "x")
	mustAcquire(t, db, "x", "a", 60) // the same name again: only the token differs
	want := laneRow(t, db, "x")
	for name, query := range map[string]string{
		"release by another":              `select release_agent_lock('x', 'b')`,
		"release by another, token known": `select release_agent_lock('x', 'b', (select fencing_token from agent_locks))`,
		"release with an old token":       `select release_agent_lock('x', 'a', $1)`,
		"renewal by another":              `select renew_agent_lock('x', 'b', (select fencing_token from agent_locks), 600)`,
		"renewal with an old token":       `select renew_agent_lock('x', 'a', $1, 600)`,
		"renewal of many with an old token": `select renewed
			from lanekeeper.renew_agent_locks(array['x'], array['a'], array[$1::bigint], array[600])`,
		"renewal of many by another": `select renewed from lanekeeper.renew_agent_locks(array['x'], array['b'],
			array[(select fencing_token from agent_locks)], array[600])`,
		"try by another": `select try_acquire_agent_lock('x', 'b', 600)`,
	} {
		args := []any{}
		if strings.Contains(query, "$1") {
			args = append(args, old)
		}
		assert.Truef(t, !pgtest.Value[bool](t, db, query, args...), "%s succeeded", name)
		assert.Equal(t, "", cmp.Diff(want, laneRow(t, db, "x")), name)
	}
}

func TestExpiredLeaseIsLost(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "x", "a", 60)
	expire(t, db, "x")
	want := laneRow(t, db, "x")
	for name, query := range map[string]string{
		"renewal": `select renew_agent_lock('x', 'a', $1, 60)`,
		"renewal of many": `select renewed or busy
			from lanekeeper.renew_agent_locks(array['x'], array['a'], array[$1::bigint], array[60])`,
		"release": `select release_agent_lock('x', 'a', $1)`,
	} {
		assert.Truef(t, !pgtest.Value[bool](t, db, query, token), "%s of an ended lease succeeded", name)
	}
	assert.NoDiff(t, want, laneRow(t, db, "x"))
	again := mustAcquire(t, db, "x", "a", 60)
	assert.Truef(t, again > token, "the same owner got token %d again after %d", again, token)
}

func TestFenceRejectsVoidToken(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for name, end := range map[string]string{
		"takeover": `with e as (update agent_locks set expires_at = clock_timestamp() returning 1) select count(*) from e`,
		"release":  `select release_agent_lock('x', 'a')`,
		"break":    `select break_agent_lock('x', 'test')`,
		"expiry":   `with e as (update agent_locks set expires_at = clock_timestamp() returning 1) select count(*) from e`,
	} {
		token := mustAcquire(t, db, "x", "a", 60)
		pgtest.Exec(t, db, `select fence_agent_lock('x', $1)`, token)
		pgtest.Exec(t, db, end)
		if name == "takeover" {
			mustAcquire(t, db, "x", "b", 60)
		}
		_, err := db.Exec(t.Context(), `select fence_agent_lock('x', $1)`, token)
		wantCode(t, err, "LK001")
		pgtest.Exec(t, db, `select release_agent_lock('x', 'b')`)
	}
}

// This fence must fail during a takeover. An insert … select that only reads the token would store a stale row.
func TestFenceFailsDuringTakeover(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "x", "a", 60)
	expire(t, db, "x")
	takeover := pgtest.Begin(t, db)
	mustAcquire(t, takeover, "x", "b", 60)
	fenced := make(chan error, 1)
	go func() {
		_, err := db.Exec(t.Context(), `select fence_agent_lock('x', $1)`, token)
		fenced <- err
	}()
	pgtest.AwaitBlocked(t, db, 1, "fence_agent_lock")
	commit(t, takeover)
	wantCode(t, <-fenced, "LK001")
}

func TestFencedWriteBlocksTakeoverNotRenewal(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustAcquire(t, db, "x", "a", 60)
	write := pgtest.Begin(t, db)
	pgtest.Exec(t, write, `select fence_agent_lock('x', $1)`, token)

	hurry := pgtest.Begin(t, db)
	pgtest.Exec(t, hurry, `set local lock_timeout = '1s'`)
	for name, query := range map[string]string{
		"renewal": `select renew_agent_lock('x', 'a', $1, 60)`,
		"renewal of many": `select renewed
			from lanekeeper.renew_agent_locks(array['x'], array['a'], array[$1::bigint], array[60])`,
		"refresh": `select acquired and fencing_token = $1 from acquire_agent_lock('x', 'a', 60)`,
	} {
		assert.Truef(t, pgtest.Value[bool](t, hurry, query, token), "%s was held up by a fenced write", name)
	}
	commit(t, hurry)
	for name, query := range map[string]string{
		"break":   `select break_agent_lock('x', 'test')`,
		"release": `select release_agent_lock('x', 'a')`,
	} {
		tx := pgtest.Begin(t, db)
		pgtest.Exec(t, tx, `set local lock_timeout = '100ms'`)
		_, err := tx.Exec(t.Context(), query)
		assert.Truef(t, postgres.IsCode(err, "55P03"), "%s passed through a fenced write: %v", name, err)
		_ = tx.Rollback(t.Context())
	}
	expire(t, db, "x")
	assert.True(t, !tryAcquire(t, db, "x", "b", 60).acquired, "a takeover passed through a fenced write")
	commit(t, write)
	mustAcquire(t, db, "x", "b", 60)
}

// A function that reads the clock before the row lock would revive a lease that ended in between.
func TestLockWaitDoesNotReviveExpiredLease(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for name, query := range map[string]string{
		"renewal": `select renew_agent_lock('x', 'a', $1, 60)`,
		"refresh": `select acquired and fencing_token = $1 from acquire_agent_lock('x', 'a', 60)`,
		"release": `select release_agent_lock('x', 'a', $1)`,
		"many":    `select renewed from lanekeeper.renew_agent_locks(array['x'], array['a'], array[$1::bigint], array[60])`,
	} {
		t.Run(name, func(t *testing.T) {
			token := mustAcquire(t, db, "x", "a", 4)
			stranger := pgtest.Begin(t, db)
			pgtest.Exec(t, stranger, `select from agent_locks where lane = 'x' for update`)
			revived := make(chan bool, 1)
			go func() {
				revived <- queryUnblocked[bool](t, db, query, token)
			}()
			if name == "renewal" || name == "release" {
				pgtest.AwaitBlocked(t, db, 1, "_agent_lock(")
			}
			pgtest.Until(t, db, false, `select is_agent_lock_held('x')`)
			commit(t, stranger)
			assert.Truef(t, !<-revived, "%s revived a lease that had ended", name)
			g := tryAcquire(t, db, "x", "b", 60)
			assert.Truef(t, g.acquired, "the lane of an ended lease is held by %s", g.holder)
			pgtest.Exec(t, db, `select release_agent_lock('x', 'b')`)
		})
	}
}

// The TTL counts from the grant, not from before a wait.
func TestGrantLastsWholeTTL(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	tx := pgtest.Begin(t, db)
	pgtest.Value[string](t, tx, `select pg_sleep(0.3)::text`) // the transaction's own time is old by then
	mustAcquire(t, tx, "x", "a", 60)
	more := pgtest.Value[float64](t, tx, `select extract(epoch from expires_at - now())::float8 from agent_locks`)
	assert.Truef(t, more >= 60.3, "granted until %.2f seconds after the transaction began, want 60.3 at least", more)
}

func TestRenewalBatchReportsEachLease(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	held := mustAcquire(t, db, "held", "a", 60)
	locked := mustAcquire(t, db, "locked", "a", 60)
	parked := mustAcquire(t, db, "parked", "a", 60)
	pgtest.Exec(t, db, `update agent_locks set parked = true, expires_at = '9000-01-01' where lane = 'parked'`)
	stranger := pgtest.Begin(t, db)
	pgtest.Exec(t, stranger, `select from agent_locks where lane = 'locked' for update`)
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, `set local statement_timeout = '2s'`)
	got := pgtest.Value[string](t, tx, `
		select string_agg(lane || ' ' || renewed || ' ' || busy || ' ' || coalesce(extract(year from expires_at) = 9000,
		  false), ', ' order by lane)
		  from lanekeeper.renew_agent_locks(array['parked', 'held', 'locked', 'none'], array['a', 'a', 'a', 'a'], array[$1,
		                                    $2, $3, 7]::bigint[], array[60, 60, 60, 60])`, parked, held, locked)
	want := "held true false false, locked false true false, none false false false, parked true false true"
	assert.Equal(t, want, got)
}

// One process may renew a lost lease together with a later one of the same lane.
func TestRenewalBatchDistinguishesTokens(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	old := mustAcquire(t, db, "x", "a", 60)
	pgtest.Value[bool](t, db, `select break_agent_lock('x', 'test')`)
	token := mustAcquire(t, db, "x", "b", 60)
	pgtest.Equal(t, db, "false false false, true true false", `
		select string_agg((fencing_token = $2) || ' ' || renewed || ' ' || busy, ', ' order by fencing_token)
		  from lanekeeper.renew_agent_locks(array['x', 'x'], array['a', 'b'], array[$1, $2]::bigint[], array[60, 60])`, old, token)
}

func TestRenewalBatchesDoNotDeadlock(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `select acquire_agent_lock('lane' || n, 'a', 60) from generate_series(1, 100) n`)
	ctx, cancel := context.WithTimeout(t.Context(), 2*pgtest.Timeout)
	defer cancel()
	var renewers sync.WaitGroup
	for range 6 {
		renewers.Go(func() {
			for range 15 {
				_, err := db.Exec(ctx, `select lanekeeper.renew_agent_locks(array_agg(lane), array_agg('a'::text),
					array_agg(fencing_token), array_agg(60))
					from (select lane, fencing_token from agent_locks order by random()) l`)
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	renewers.Wait()
}

func TestExecutionIDIsParsedFromOwner(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := pgtest.Value[string](t, db, `select lanekeeper.agent_uuid7()::text`)
	for owner, want := range map[string]string{id + "#3": id, id: "", "run/x#3": ""} {
		mustAcquire(t, db, "lane of "+owner, owner, 60)
		got := pgtest.Value[string](t, db, `select coalesce(execution_id::text, '') from agent_locks where lane = $1`,
			"lane of "+owner)
		assert.Equal(t, want, got, owner)
	}
}

func TestInvalidInputChangesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustAcquire(t, db, "held", "a", 60)
	bad := map[string]any{
		"null": nil, "empty": "", "blank": "   ", "too long": strings.Repeat("x", 256), "newline": "a\nb", "tab": "a\tb",
		"escape": "a\x1bb", "delete": "a\x7fb",
		"no-break space": "\u00a0", "zero width": "\u200b", "a hidden character": "oper\u200bate",
		"right to left": "prices\u202ecod.sh",
		"isolate":       "a\u2066b\u2069", "soft hyphen": "oper\u00adate", "ideographic blank": "\u3000",
		"tag": "a\U000e0041", "variation": "a\ufe0f",
		"decomposed": "cafe\u0301",
	}
	statements := map[string]string{
		"try lane":      `select try_acquire_agent_lock($1, 'a', 60)`,
		"try owner":     `select try_acquire_agent_lock('x', $1, 60)`,
		"acquire lane":  `select acquire_agent_lock($1, 'a', 60)`,
		"acquire owner": `select acquire_agent_lock('x', $1, 60)`,
		"await lane":    `select await_agent_lock($1, 'a', 60)`,
		"await owner":   `select await_agent_lock('x', $1, 60)`,
		"renew lane":    `select renew_agent_lock($1, 'a', 1, 60)`,
		"renew owner":   `select renew_agent_lock('x', $1, 1, 60)`,
		"release lane":  `select release_agent_lock($1, 'a')`,
		"release owner": `select release_agent_lock('x', $1)`,
		"held lane":     `select is_agent_lock_held($1)`,
		"break lane":    `select break_agent_lock($1, 'reason')`,
	}
	for what, value := range bad {
		for where, query := range statements {
			t.Run(where+" "+what, func(t *testing.T) {
				_, err := db.Exec(t.Context(), query, value)
				wantCode(t, err, "22023")
			})
		}
	}
	for what, ttl := range map[string]any{"null": nil, "zero": 0, "negative": -1, "over 30 days": 30*86400 + 1} {
		for where, query := range map[string]string{
			"try":     `select try_acquire_agent_lock('x', 'a', $1)`,
			"refresh": `select try_acquire_agent_lock('held', 'a', $1)`,
			"acquire": `select acquire_agent_lock('x', 'a', $1)`,
			"await":   `select await_agent_lock('x', 'a', $1)`,
			"renew":   `select renew_agent_lock('held', 'a', (select fencing_token from agent_locks), $1)`,
			"renew many": `select lanekeeper.renew_agent_locks(array['held'], array['a'],
				array[(select fencing_token from agent_locks)], array[$1::int])`,
		} {
			t.Run(where+" ttl "+what, func(t *testing.T) {
				_, err := db.Exec(t.Context(), query, ttl)
				wantCode(t, err, "22023")
			})
		}
	}
	for what, query := range map[string]string{
		"no place in the queue":    `select await_agent_lock('held', 'b', 60, null)`,
		"a place for 0 seconds":    `select await_agent_lock('held', 'b', 60, 0)`,
		"a place for over 30 days": `select await_agent_lock('held', 'b', 60, 2592001)`,
		"fewer ttls than lanes": `select lanekeeper.renew_agent_locks(array['held', 'x'], array['a', 'a'], array[1, 1],
			array[60])`,
		"no ttls": `select lanekeeper.renew_agent_locks(array['held'], array['a'],
			(select array_agg(fencing_token) from agent_locks), null)`,
		"fewer owners than lanes": `select lanekeeper.renew_agent_locks(array['held'], '{}', array[1], array[60])`,
	} {
		t.Run(what, func(t *testing.T) {
			_, err := db.Exec(t.Context(), query)
			wantCode(t, err, "22023")
		})
	}
	for query, says := range map[string]string{
		`select await_agent_lock('held', 'b', 60, -1)`: "give 1 to 60; up to 2592000 counts as 60",
		`select fence_agent_lock(null, null)`:          "token null of lane null is stale",
	} {
		_, err := db.Exec(t.Context(), query)
		assert.Contains(t, fmt.Sprint(err), says)
	}
	assert.ErrorIs(t, lanes.Prune(t.Context(), db, -30*24*time.Hour), lanes.ErrInvalid)
	for _, reason := range []any{nil, "", "  "} {
		_, err := db.Exec(t.Context(), `select break_agent_lock('held', $1)`, reason)
		wantCode(t, err, "22023")
	}
	pgtest.Equal(t, db, "held a true00", `select string_agg(lane || ' ' || locked_by || ' ' || (expires_at > clock_timestamp() + interval '30 seconds'),
			', ') ||
		(select count(*) from agent_lock_waiters) || (select count(*) from agent_activity) from agent_locks`)
}

func TestValidInput(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for _, lane := range []string{
		"x", strings.Repeat("ñ", 255), "consolidate:{dataset}:2024:11", "with space", "::", "línea · 車道", "caf\u00e9 🚚",
		"'; drop table agent_locks; --",
	} {
		mustAcquire(t, db, lane, lane, 1)
		mustAcquire(t, db, lane, lane, 30*86400)
	}
}

// The program and the database accept the same names.
func TestValidNameMatchesDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	names := []string{
		"", " ", "  ", "x", "with space", "cafe\u0301", "caf\u00e9", "\u1112\u1161\u11ab", "한", "🚚", strings.Repeat("ñ", 255),
		strings.Repeat("ñ", 256), "नमस्ते", "שלום",
	}
	for _, span := range [][2]rune{{1, 0x3200}, {0xfb00, 0xffff}, {0x1d100, 0x1d200}, {0xdfff0, 0xe1010}} {
		for r := span[0]; r < span[1]; r++ {
			names = append(names, "x"+string(r))
		}
	}
	pgtest.Exec(t, db, `
		create function fits(p_name text) returns boolean language plpgsql as $$
		begin
		  return lanekeeper.agent_lock_check(p_name, 'owner', 1);
		exception when invalid_parameter_value then
		  return false;
		end $$`)
	fits := pgtest.Column[bool](t, db, `select fits(n) from unnest($1::text[]) with ordinality u (n, i) order by i`, names)
	for i, name := range names {
		assert.Equal(t, fits[i], lanes.ValidName(name), name)
	}
}

const (
	numRacers = 32
	numGrants = 160
)

// largePool returns a pool with a connection for every racer.
func largePool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	db := pgtest.Pool(t, pgtest.URL(t), postgres.Options{MaxConns: numRacers + 4})
	return db
}

// mutualExclusion detects two concurrent holders, and tokens that do not grow.
type mutualExclusion struct {
	t       *testing.T
	holders atomic.Int32
	mu      sync.Mutex
	tokens  []int64
}

// enter notes a holder. The returned function notes its end. last is true after enough grants.
func (a *mutualExclusion) enter(token int64) (last bool, leave func()) {
	assert.Equal(a.t, 1, a.holders.Add(1), "holders at once")
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := len(a.tokens); n > 0 && a.tokens[n-1] >= token {
		a.t.Errorf("grant %d has token %d after %d", n, token, a.tokens[n-1])
	}
	a.tokens = append(a.tokens, token)
	return len(a.tokens) >= numGrants, func() { a.holders.Add(-1) }
}

// runRacers runs work in every racer until one of them returns last.
func runRacers(t *testing.T, work func(ctx context.Context, racer, round int) (last bool, err error)) {
	t.Helper()
	ctx, enough := context.WithCancel(t.Context())
	defer enough()
	var running sync.WaitGroup
	for racer := range numRacers {
		running.Go(func() {
			for round := 0; ctx.Err() == nil; round++ {
				last, err := work(ctx, racer, round)
				if err != nil && ctx.Err() == nil {
					t.Error(err)
					enough()
				}
				if last {
					enough()
				}
			}
		})
	}
	running.Wait()
}

// Every third holder dies: its lease ends without a release.
func TestConcurrentSQLSessionsExcludeEachOther(t *testing.T) {
	t.Parallel()
	db := largePool(t)
	a := &mutualExclusion{t: t}
	runRacers(t, func(ctx context.Context, racer, round int) (bool, error) {
		owner := fmt.Sprintf("racer %d.%d", racer, round)
		g, err := tryAcquireErr(ctx, db, "x", owner, 60)
		if err != nil || !g.acquired {
			return false, err
		}
		last, leave := a.enter(g.token)
		if _, err := db.Exec(ctx, `select fence_agent_lock('x', $1)`, g.token); err != nil {
			return last, err
		}
		leave()
		end := `select release_agent_lock('x', $1, $2)`
		if round%3 == 0 {
			end = `update agent_locks set expires_at = clock_timestamp() where lane = 'x' and locked_by = $1
				and fencing_token = $2`
		}
		_, err = db.Exec(ctx, end, owner, g.token)
		return last, err
	})
	assert.Truef(t, len(a.tokens) >= numGrants, "%d grants, want %d", len(a.tokens), numGrants)
}

func TestConcurrentKeeperCallsExcludeEachOther(t *testing.T) {
	t.Parallel()
	db := largePool(t)
	k := listeningKeeper(t, db)
	a := &mutualExclusion{t: t}
	runRacers(t, func(ctx context.Context, racer, round int) (bool, error) {
		acquire := k.Acquire
		if racer%4 == 0 {
			acquire = k.AcquireWait
		}
		lease, err := acquire(ctx, "x")
		if errors.Is(err, lanes.ErrBusy) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		last, leave := a.enter(lease.Token())
		cause := context.Cause(lease.Context())
		assert.Truef(t, cause == nil || ctx.Err() != nil, "a live lease is cancelled: %v", cause)
		leave()
		return last, lease.Release(ctx)
	})
	assert.Truef(t, len(a.tokens) >= numGrants, "%d grants, want %d", len(a.tokens), numGrants)
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_locks_live`))
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_lock_waiters`))
}

func TestConcurrentNestedHoldsShareOneLease(t *testing.T) {
	t.Parallel()
	db := largePool(t)
	k, log := newKeeper(t, db)
	owner := liveClaim(t, db)
	outer, err := k.AcquireAs(t.Context(), owner, "x")
	mustAcquired(t, outer, err)
	var running sync.WaitGroup
	for range 8 {
		running.Go(func() {
			for range 10 {
				inner, err := k.AcquireAs(t.Context(), owner, "x")
				if err != nil {
					t.Error(err)
					return
				}
				if inner.Token() != outer.Token() {
					t.Errorf("inner token %d, outer %d", inner.Token(), outer.Token())
				}
				assert.NoError(t, inner.Release(t.Context()))
			}
		})
	}
	running.Wait()
	assert.True(t, pgtest.Value[bool](t, db, `select is_agent_lock_held('x')`), "an inner release freed the outer hold")
	log.want(t, 1, "lane acquired")
	log.want(t, 0, "lane lost")
	assert.Equal(t, "", strings.Join(log.Lines("lane released"), ""))
}
