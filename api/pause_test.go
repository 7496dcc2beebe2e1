package api_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
)

func TestPausingAndResumingIsAuditedAndDoneOnce(t *testing.T) {
	t.Parallel()
	a := start(t)
	var state executions.Pause
	if a.get("/v1/pause", &state); state.Paused || state.PausedAt != nil {
		t.Errorf("state: %+v", state)
	}
	var first, again, over executions.PauseChange
	header := a.post("/v1/pause", `{"reason":"prices look wrong"}`, &first)
	if !first.Changed || !first.Paused || first.PausedBy != "admin" || header.Get("X-Trace-Id") != first.TraceID {
		t.Errorf("pause: %+v, %v", first, header)
	}
	a.audited(first.TraceID, first.ActivityID, "pause_agent", "prices look wrong")
	if a.post("/v1/pause", `{"reason":"really"}`, &again); again.Changed || again.TraceID != first.TraceID || again.Reason != "prices look wrong" {
		t.Errorf("again: %+v", again)
	}
	if a.get("/v1/pause", &state); !state.Paused || state.TraceID != first.TraceID || state.Reason != first.Reason {
		t.Errorf("state: %+v", state)
	}
	a.refused(a.raw("POST", "/v1/pause", `{}`, asAdmin()), 400, "reason")
	a.refused(a.raw("POST", "/v1/resume", `{"reason":" "}`, asAdmin()), 400, "reason")
	a.post("/v1/resume", `{"reason":"they were right"}`, &over)
	if !over.Changed || over.Paused || over.Reason != "prices look wrong" || over.ResumedAt == nil {
		t.Errorf("resume: %+v", over)
	}
	a.audited(over.TraceID, over.ActivityID, "resume_agent", "they were right")
	var none executions.PauseChange
	if a.post("/v1/resume", `{"reason":"again"}`, &none); none.Changed || none.PausedAt != nil {
		t.Errorf("resumed twice: %+v", none)
	}
}

func TestALockIsRefusedWhilePaused(t *testing.T) {
	t.Parallel()
	a := start(t)
	var x struct{ ID string }
	a.expect(a.raw("POST", "/v1/executions", `{"flow":"external"}`, asAdmin()), "POST", "/v1/executions", 201, &x)
	a.post("/v1/pause", `{"reason":"prices look wrong"}`, &struct{}{})
	p := a.refused(a.raw("POST", "/v1/executions/"+x.ID+"/lock", `{"owner":"worker 1"}`, asAdmin()), 409, "by admin: prices look wrong")
	if p.Type != "urn:lanekeeper:problem:paused" {
		t.Errorf("problem: %+v", p)
	}
	a.post("/v1/resume", `{"reason":"they were right"}`, &struct{}{})
	a.post("/v1/executions/"+x.ID+"/lock", `{"owner":"worker 1"}`, &struct{}{})
}
