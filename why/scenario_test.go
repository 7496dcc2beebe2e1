package why_test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/trace"
)

// operations are what may happen, each as often as it is listed.
func (s *scenario) operations() map[string]func() bool {
	return map[string]func() bool{
		"start": s.startOutside, "child": s.startChild, "another child": s.startChild, "tick": s.tick, "webhook": s.deliverWebhook, "fork": s.fork, "listen": s.listen,
		"order": s.order, "carry out": s.carryOut, "claim": s.claim, "claim again": s.claim, "claim once more": s.claim, "claim yet again": s.claim, "claim what is ready": s.claim, "go on": s.claim, "step": s.step, "call": s.call, "think": s.think,
		"late": s.late, "lose": s.lose, "lose again": s.lose, "hand back": s.handBack, "end": s.end, "cancel": s.cancel, "tell": s.tell, "say": s.say,
		"take lane": s.takeLane, "take a lane": s.takeLane, "take another lane": s.takeLane, "take one more lane": s.takeLane, "borrow lane": s.takeLane, "lend": s.lend, "lend on": s.lend, "release lane": s.releaseLane, "expire lane": s.expireLane,
		"break lane": s.breakLane, "wait for event": s.waitForEvent, "wait for an event": s.waitForEvent, "wait for agent": s.waitForAgent, "wait for a child": s.waitForAgent,
		"wait for time": s.waitForTime, "wait for lane": s.waitForLane, "wait for a lane": s.waitForLane, "wait for the lane": s.waitForLane, "timer": s.timer, "raise": s.raise, "raise again": s.raise,
		"ask": s.ask, "decide": s.decide, "use": s.use, "request": s.request, "sign": s.sign, "crowd": s.crowd,
	}
}

// play does some of them.
func (s *scenario) play(n int) {
	all := s.operations()
	names := make([]string, 0, len(all))
	for name := range all {
		names = append(names, name)
	}
	slices.Sort(names)
	s.startOutside()
	for tries := 0; n > 0 && tries < 1000; tries++ {
		name := pick(s, names)
		if all[name]() {
			s.log = append(s.log, name)
			n--
		}
	}
}

// scenarios is how many are played.
func scenarios(t *testing.T) int {
	text := os.Getenv("AGENT_WHY_SCENARIOS")
	if text == "" {
		return 40
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("AGENT_WHY_SCENARIOS is %q: give a number of 1 or more", text)
	}
	return n
}

// Each scenario is a random piece of history, made by the functions and packages of the product; the test keeps what caused what by itself. Of
// every trace in it why has these rows, and no others.
func TestEveryEdgeIsToldAndNoOther(t *testing.T) {
	t.Parallel()
	n := scenarios(t)
	const atOnce = 2
	for shard := range atOnce {
		t.Run(fmt.Sprint(shard), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			edges := map[string]int{}
			for seed := shard; seed < n; seed += atOnce {
				s := w.newScenario(uint64(seed))
				s.play(15 + s.rng.IntN(45))
				for _, id := range s.traceIDs() {
					s.compare(id, seed, edges)
				}
				s.clear()
				for _, e := range s.events {
					if len(e.woken) > 1 {
						edges["(an event that woke several)"]++
					}
				}
				if t.Failed() {
					return
				}
			}
			t.Logf("edges: %v", edges)
		})
	}
}

// compare asks why, by any form of the id.
func (s *scenario) compare(traceID string, seed int, count map[string]int) {
	s.t.Helper()
	said := pick(s, []string{traceID, strings.ToLower(traceID), trace.ID(traceID).OTel()})
	rows, err := s.pool.Query(s.ctx(), `select part, kind, from_ref, to_ref, detail from why($1, 1000)`, said)
	if err != nil {
		s.t.Fatal(err)
	}
	var got []edge
	spent := map[[2]string]model{}
	var e edge
	var detail json.RawMessage
	_, err = pgx.ForEachRow(rows, []any{&e.part, &e.kind, &e.from, &e.to, &detail}, func() error {
		got = append(got, e)
		var d struct {
			Calls, Tokens int64
			CostUSD       json.Number `json:"cost_usd"`
			Ended, For    string
		}
		err := json.Unmarshal(detail, &d)
		count[strings.TrimRight(strings.Join([]string{e.part, e.kind, d.Ended, d.For}, " "), " ")]++
		if e.part != "spend" {
			return err
		}
		usd, _ := d.CostUSD.Float64()
		spent[[2]string{traceID, strings.TrimPrefix(e.to, "model ")}] = model{d.Calls, d.Tokens, int64(usd*1e6 + 0.5)}
		return err
	})
	if err != nil {
		s.t.Fatal(err)
	}
	if diff := cmp.Diff(s.expected(traceID), sorted(got), cmp.AllowUnexported(edge{})); diff != "" {
		s.t.Errorf("scenario %d, why(%s), after %v (-truth +told):\n%s", seed, said, s.log, diff)
	}
	want := map[[2]string]model{}
	for key, m := range s.spend {
		if key[0] == traceID {
			want[key] = *m
		}
	}
	if diff := cmp.Diff(want, spent, cmp.AllowUnexported(model{})); diff != "" {
		s.t.Errorf("scenario %d: spend of %s (-truth +told):\n%s", seed, traceID, diff)
	}
}
