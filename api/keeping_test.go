package api_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/memory"
)

func TestMemoryIsForgottenAndAudited(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.remember("a/../b", "facts")
	a.remember("kept", "facts")
	id := value[string](t, a.pool, `select id::text from agent_memory where key = 'a/../b'`)
	a.refused(a.raw("POST", "/v1/memory/"+id+"/forget", `{"reason":" "}`, asAdmin()), 400, "reason")
	var got change
	a.post("/v1/memory/"+id+"/forget", `{"reason":"it is wrong"}`, &got)
	if got.Name != "a/../b" || !got.Changed {
		t.Errorf("answer is %+v", got)
	}
	a.audited(got.TraceID, got.ActivityID, "forget_memory", "it is wrong")
	entries, err := memory.List(t.Context(), a.pool, memory.Filter{})
	if err != nil || len(entries) != 1 || entries[0].Key != "kept" {
		t.Errorf("left are %+v, %v", entries, err)
	}
	if text := value[string](t, a.pool, `select input::text from agent_activity where skill_name = 'forget_memory'`); text == "" || len(text) > 300 {
		t.Errorf("the record is %s", text)
	}
	for _, none := range []string{id, "kept", "%00", "%ff", "018f0000-0000-7000-8000-000000000000"} {
		a.refused(a.raw("POST", "/v1/memory/"+none+"/forget", `{"reason":"x"}`, asAdmin()), 404, "not found")
	}
	if n := value[int](t, a.pool, `select count(*) from agent_activity where skill_name = 'forget_memory'`); n != 1 {
		t.Errorf("%d audits", n)
	}
}

func TestAnObjectiveIsPausedAndResumed(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.objective("grow")
	var got change
	for _, step := range []struct{ action, status string }{{"pause", "paused"}, {"resume", "active"}} {
		a.post("/v1/objectives/grow/"+step.action, `{"reason":"as agreed"}`, &got)
		a.audited(got.TraceID, got.ActivityID, step.action+"_objective", "as agreed")
		var o struct{ Status string }
		a.get("/v1/objectives/grow", &o)
		if o.Status != step.status || !got.Changed {
			t.Errorf("after %s: %+v, %+v", step.action, o, got)
		}
		a.refused(a.raw("POST", "/v1/objectives/grow/"+step.action, `{"reason":"x"}`, asAdmin()), 409, "not ")
	}
	a.refused(a.raw("POST", "/v1/objectives/none/pause", `{"reason":"x"}`, asAdmin()), 404, "not found")
	if n := value[int](t, a.pool, `select count(*) from agent_activity where skill_name like '%_objective'`); n != 2 {
		t.Errorf("%d audits", n)
	}
}
