package lanes_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
)

func TestLiveShowsWhoHoldsWhat(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	token := mustTry(t, db, "heartbeat", "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE/01JD3V7K8ZQ6W2M5T9X4C1B0AE", 300)
	mustTry(t, db, "objective:1", execution+"#2", 300)
	exec(t, db, `update agent_locks set parked = true, expires_at = '9000-01-01' where lane = 'objective:1'`)
	mustTry(t, db, "over", "a", 60)
	lapse(t, db, "over")

	live, err := lanes.Live(t.Context(), db)
	if err != nil {
		t.Fatal(err)
	}
	if len(live) != 2 {
		t.Fatalf("%d lanes live, want 2: %+v", len(live), live)
	}
	first := live[0]
	if first.Lane != "heartbeat" || first.FencingToken != token || first.ExpiresIn == nil || *first.ExpiresIn < 290 || *first.ExpiresIn > 300 ||
		first.HeldFor < 0 || first.HeldFor > 10 || first.ExecutionID != nil || first.TraceID == nil || *first.TraceID != "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE" {
		t.Errorf("heartbeat shows as %+v", first)
	}
	text, err := json.Marshal(live[1])
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	delete(got, "held_for")
	delete(got, "fencing_token")
	want := map[string]any{
		"lane": "objective:1", "locked_by": execution + "#2", "execution_id": execution, "trace_id": nil, "expires_in": nil, "parked": true,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestABreakIsAuditedUnderTheHoldersTrace(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustTry(t, db, "heartbeat", "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE/01JD3V7K8ZQ6W2M5T9X4C1B0AE", 300)
	if broken, err := lanes.Break(t.Context(), db, "heartbeat", "it hangs"); err != nil || !broken {
		t.Fatalf("Break: %v, %v", broken, err)
	}
	got := get[string](t, db, `select trace_id || ' ' || (input ->> 'reason') || ' ' || lane from agent_activity`)
	if want := "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE it hangs heartbeat"; got != want {
		t.Errorf("audit %q, want %q", got, want)
	}
	if held, err := lanes.Held(t.Context(), db, "heartbeat"); err != nil || held {
		t.Errorf("held %v, %v", held, err)
	}
}

// A lane whose holder let its lease end is cleared and logged, soon after; those that are held, parked, lent or a
// thread's are left.
func TestLanesThatEndedAreCleared(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	k, log := keeper(t, db)
	for _, lane := range []string{"ended", "just ended", "held", "thread:1", "lent"} {
		mustTry(t, db, lane, "gone", 60)
	}
	exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '1 minute' where lane in ('ended', 'thread:1', 'lent')`)
	exec(t, db, `update agent_locks set expires_at = clock_timestamp() where lane = 'just ended'`)
	exec(t, db, `insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds) values ('lent', 1, $1, $1, 60)`, execution)
	exec(t, db, `insert into agent_lock_waiters (lane, owner, expires_at) values ('ended', 'gone too', clock_timestamp() - interval '2 minutes')`)
	token := get[int64](t, db, `select fencing_token from agent_locks where lane = 'ended'`)
	if next, err := k.Expire(t.Context(), ""); err != nil || next != "" {
		t.Fatalf("Expire: %q, %v", next, err)
	}
	if got := get[string](t, db, `select string_agg(lane, ',' order by lane) from agent_locks where locked_by = 'gone'`); got != "held,just ended,lent,thread:1" {
		t.Errorf("left: %s", got)
	}
	if now := get[int64](t, db, `select fencing_token from agent_locks where lane = 'ended'`); now <= token {
		t.Errorf("its token is %d, before %d", now, token)
	}
	if n := get[int](t, db, `select count(*) from agent_lock_waiters`); n != 0 {
		t.Errorf("%d places of waiters that are gone", n)
	}
	log.want(t, 1, "level=WARN", `msg="lane stale, clearing"`, "lane=ended", "holder=gone", "age=1m0")
	mustTry(t, db, "ended", "next", 60)
}

// However many are held, each is looked at in its turn.
func TestLanesThatEndedAreClearedInParts(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	exec(t, db, `insert into agent_locks (lane, locked_by, fencing_token, expires_at)
		select 'lane ' || to_char(n, 'FM00000'), 'gone', 1, clock_timestamp() - interval '1 minute' from generate_series(1, 2500) n`)
	k, _ := keeper(t, db)
	after, looks := "", 0
	for ; looks == 0 || after != ""; looks++ {
		var err error
		if after, err = k.Expire(t.Context(), after); err != nil {
			t.Fatal(err)
		}
	}
	if left := get[int](t, db, `select count(*) from agent_locks where locked_by <> ''`); left != 0 || looks != 3 {
		t.Errorf("%d are left after %d looks, want none after 3", left, looks)
	}
}
