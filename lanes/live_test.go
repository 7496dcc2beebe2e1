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
