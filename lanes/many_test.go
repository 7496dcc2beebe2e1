package lanes_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// walOf is how many records and bytes of WAL a query writes, itself and in the functions that it calls.
func walOf(t testing.TB, db postgres.DB, query string) (records, bytes int64) {
	t.Helper()
	var plans []struct {
		Plan struct {
			Records int64 `json:"WAL Records"`
			Bytes   int64 `json:"WAL Bytes"`
		}
	}
	text := get[string](t, db, `explain (analyze, wal, costs off, timing off, summary off, format json) `+query)
	if err := json.Unmarshal([]byte(text), &plans); err != nil || len(plans) != 1 {
		t.Fatalf("%v: %s", err, text)
	}
	return plans[0].Plan.Records, plans[0].Plan.Bytes
}

// A try that fails is a read: however often it is made, the server has nothing to write down.
func TestAFailedTryWritesNoWAL(t *testing.T) {
	t.Parallel()
	const tries = 2000
	db := pgtest.DB(t)
	mustTry(t, db, "held", "holder", 3600)
	mustTry(t, db, "promised", "holder", 3600)
	exec(t, db, `select await_agent_lock('promised', 'first', 300, 3600)`)
	exec(t, db, `select release_agent_lock('promised', 'holder')`)
	mustTry(t, db, "locked", "holder", 3600)
	exec(t, db, `select release_agent_lock('locked', 'holder')`)
	lock := begin(t, db)
	exec(t, lock, `select 1 from agent_locks where lane = 'locked' for key share`)

	for _, lane := range []string{"held", "promised", "locked"} {
		for name, query := range map[string]string{
			"try":     `select count(*) filter (where try_acquire_agent_lock('%[1]s', 'other ' || n, 300)) from generate_series(1, %[2]d) n`,
			"acquire": `select count(*) filter (where a.acquired) from generate_series(1, %[2]d) n, acquire_agent_lock('%[1]s', 'other ' || n, 300) a`,
			"many": `select count(*) filter (where a.acquired) from generate_series(1, %[2]d) n,
				lanekeeper.acquire_agent_locks(array['%[1]s', '%[1]s'], array['other ' || n, 'another'], array[300, 300]) a`,
		} {
			t.Run(lane+"/"+name, func(t *testing.T) {
				before, sql := row(t, db, lane), fmt.Sprintf(query, lane, tries)
				// Reading a page may tidy it up, once: what the tries themselves write they write again.
				if records, _ := walOf(t, db, sql); records != 0 {
					if records, bytes := walOf(t, db, sql); records != 0 {
						t.Errorf("%d tries wrote %d records of WAL, %d bytes", tries, records, bytes)
					}
				}
				if n := get[int](t, db, sql); n != 0 {
					t.Errorf("%d tries were granted", n)
				}
				if after := row(t, db, lane); after != before {
					t.Errorf("the row was\n%s and is\n%s", before, after)
				}
			})
		}
	}
	if records, _ := walOf(t, db, `select acquire_agent_lock('free', 'a', 300)`); records == 0 {
		t.Error("a grant writes no WAL: it is not measured here")
	}
}

// many asks for lanes as acquire_agent_locks answers: the owners of those that were granted, by lane.
func many(t testing.TB, db postgres.DB, lanes, owners []string) map[string]string {
	t.Helper()
	granted := map[string]string{}
	rows, err := db.Query(t.Context(), `
		select a.n, a.acquired, coalesce(a.locked_by, '') from lanekeeper.acquire_agent_locks($1, $2, array_fill(60, array[$3::int])) a`,
		lanes, owners, len(lanes))
	if err != nil {
		t.Fatal(err)
	}
	var n int64
	var acquired bool
	var holder string
	seen := map[int64]bool{}
	_, err = pgx.ForEachRow(rows, []any{&n, &acquired, &holder}, func() error {
		if seen[n] {
			t.Errorf("two answers to question %d", n)
		}
		seen[n] = true
		if acquired && holder != owners[n-1] {
			t.Errorf("%s was granted to %s, asked by %s", lanes[n-1], holder, owners[n-1])
		}
		if acquired {
			granted[lanes[n-1]] += holder
		}
		return nil
	})
	if err != nil || len(seen) != len(lanes) {
		t.Fatalf("%d answers to %d questions: %v", len(seen), len(lanes), err)
	}
	return granted
}

// Many at once keep every rule that one keeps: one owner, the order of the queue, growing tokens.
func TestManyAreAskedForAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustTry(t, db, "held", "holder", 600)
	old := mustTry(t, db, "free", "before", 600)
	exec(t, db, `select release_agent_lock('free', 'before')`)
	mustTry(t, db, "expired", "dead", 600)
	lapse(t, db, "expired")
	mustTry(t, db, "mine", "m", 600)
	mustTry(t, db, "promised", "holder", 600)
	exec(t, db, `select await_agent_lock('promised', 'first', 300, 3600)`)
	exec(t, db, `select release_agent_lock('promised', 'holder')`)
	mustTry(t, db, "locked", "holder", 600)
	exec(t, db, `select release_agent_lock('locked', 'holder')`)
	lock := begin(t, db)
	exec(t, lock, `select 1 from agent_locks where lane = 'locked' for key share`)

	got := many(t, db, []string{"held", "free", "free", "expired", "mine", "new", "new", "promised", "locked"},
		[]string{"a", "b", "c", "d", "m", "e", "f", "g", "h"})
	want := map[string]string{"free": "b", "expired": "d", "mine": "m", "new": "e"}
	if len(got) != len(want) {
		t.Errorf("granted %v, want %v", got, want)
	}
	for lane, owner := range want {
		if got[lane] != owner || get[string](t, db, `select locked_by from agent_locks where lane = $1`, lane) != owner {
			t.Errorf("%s was granted to %q, want %q", lane, got[lane], owner)
		}
	}
	if token := get[int64](t, db, `select fencing_token from agent_locks where lane = 'free'`); token <= old {
		t.Errorf("token %d after %d", token, old)
	}
	before := row(t, db, "free")
	_, err := db.Exec(t.Context(), `select lanekeeper.acquire_agent_locks(array['another', ''], array['a', 'b'], array[60, 60])`)
	wantCode(t, err, "22023")
	_, err = db.Exec(t.Context(), `select lanekeeper.acquire_agent_locks(array['another', 'free'], array['a'], array[60, 60])`)
	wantCode(t, err, "22023")
	if row(t, db, "another") != "none" || row(t, db, "free") != before {
		t.Error("a call that failed changed something")
	}
}

// Many are released without a wait and without a mistake: what is not the owner's to give back now stays as it is.
func TestManyAreReleasedAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	names := []string{"mine", "stale", "theirs", "expired", "parked", "thread:1", "fenced", "also mine"}
	var tokens []int64
	var owners []string
	for _, name := range names {
		tokens, owners = append(tokens, mustTry(t, db, name, "a", 600)), append(owners, "a")
	}
	tokens[1]--
	owners[2] = "b"
	lapse(t, db, "expired")
	exec(t, db, `update agent_locks set parked = true, expires_at = '9000-01-01' where lane = 'parked'`)
	write := begin(t, db)
	exec(t, write, `select fence_agent_lock('fenced', $1)`, tokens[6])
	before := map[string]string{}
	for _, name := range names {
		before[name] = row(t, db, name)
	}
	rows, err := db.Query(t.Context(), `select n from unnest($1::text[], $2::text[], $3::bigint[]) with ordinality w (lane, owner, token, n)
		 where lanekeeper.release_agent_lock(w.lane, w.owner, w.token, true, false) is not null order by n`, names, owners, tokens)
	if err != nil {
		t.Fatal(err)
	}
	freed, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil || !slices.Equal(freed, []int64{1, 6, 8}) {
		t.Errorf("released %v, want 1, 6 and 8: %v", freed, err)
	}
	for i, name := range names {
		gone := i == 0 || i == 5 || i == 7
		if changed := row(t, db, name) != before[name]; changed != gone {
			t.Errorf("%s changed: %v, want %v", name, changed, gone)
		}
	}
	if get[bool](t, db, `select exists (select from agent_locks where lane in ('mine', 'also mine') and (locked_by <> '' or expires_at > clock_timestamp()
		or fencing_token = any ($1)))`, tokens) {
		t.Error("a released lane is held still, or its token is not void")
	}
}

// Callers at the same time share statements, and each gets the answer to its own question.
func TestCallersShareStatements(t *testing.T) {
	t.Parallel()
	db := wide(t)
	w := &wire{DB: db}
	k, _ := keeper(t, w)
	mustTry(t, db, "busy", "holder", 3600)
	round := func() {
		var running sync.WaitGroup
		for i := range racers {
			running.Go(func() {
				lane := fmt.Sprint("lane", i)
				if i%8 == 7 {
					lane = strings.Repeat("x", 256)
				} else if i%4 == 3 {
					lane = "busy"
				}
				lease, err := k.Acquire(t.Context(), lane)
				switch {
				case i%8 == 7:
					if !errors.Is(err, lanes.ErrInvalid) {
						t.Errorf("a lane that is too long: %v", err)
					}
				case i%4 == 3:
					if b, ok := errors.AsType[*lanes.BusyError](err); !ok || b.Lane != "busy" || b.Holder != "holder" && b.Holder != "" {
						t.Errorf("a lane that is held: %v", err)
					}
				case err != nil || lease.Lane() != lane:
					t.Errorf("acquire %s: %v, %v", lane, lease, err)
				default:
					if holder := get[string](t, db, `select locked_by from agent_locks where lane = $1`, lane); holder != lease.Owner().String() {
						t.Errorf("%s is held by %q, want %s", lane, holder, lease.Owner())
					}
					if err := lease.Release(t.Context()); err != nil {
						t.Errorf("release %s: %v", lane, err)
					}
				}
			})
		}
		running.Wait()
	}
	pgtest.Eventually(t, soon, func() bool {
		round()
		return t.Failed() || w.count("acquire_agent_locks") > 0 && w.count("release_agent_lock(w.") > 0
	}, "a statement for several")
	if n := get[int](t, db, `select count(*) from agent_locks where locked_by <> '' and lane <> 'busy'`); n != 0 {
		t.Errorf("%d lanes are held after all were released", n)
	}
}

// A release does not change how the next transaction of its connection commits.
func TestOnlyTheReleaseIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	db, err := postgres.Open(t.Context(), pgtest.URL(t), postgres.Options{MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	exec(t, db, `set synchronous_commit = on`)
	k, _ := keeper(t, db)
	lease, err := k.Acquire(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := get[string](t, db, `select current_setting('synchronous_commit')`); got != "on" {
		t.Errorf("synchronous_commit is %s afterwards", got)
	}
}
