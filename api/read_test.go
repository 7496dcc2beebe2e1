package api_test

import (
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestATraceIsFoundByEveryFormOfItsID(t *testing.T) {
	t.Parallel()
	a := start(t)
	id := trace.New(trace.Webhook)
	a.begin("deliver", id)
	for _, skill := range []string{"first", "second"} {
		a.note(activity.Entry{TraceID: string(id), Surface: "webhook", Skill: skill}, activity.Success)
	}
	for name, form := range map[string]string{"prefixed": string(id), "hex": id.OTel(), "ulid": id.Suffix()} {
		t.Run(name, func(t *testing.T) {
			a.t = t
			var got activity.Trace
			header := a.get("/v1/traces/"+form, &got)
			if got.TraceID != string(id) || got.OTelTraceID != id.OTel() || got.Surface != "webhook" || got.Status != "pending" {
				t.Errorf("trace is %+v", got)
			}
			if len(got.Activities) != 2 || got.Activities[0].SkillName != "first" || got.Activities[1].ConversationID != string(id) {
				t.Errorf("activities are %+v", got.Activities)
			}
			if header.Get("X-Trace-Id") != string(id) {
				t.Errorf("X-Trace-Id is %q", header.Get("X-Trace-Id"))
			}
		})
	}
}

func TestATraceWithoutActivitiesHasAnEmptyList(t *testing.T) {
	t.Parallel()
	a := start(t)
	id := trace.New(trace.Flow)
	a.begin("beat", id)
	var got map[string]any
	a.get("/v1/traces/"+string(id), &got)
	if list, ok := got["activities"].([]any); !ok || len(list) != 0 {
		t.Errorf("activities are %v", got["activities"])
	}
}

// detail is what the contract says of one execution.
type detail struct {
	ID         string
	TraceID    string `json:"trace_id"`
	Status     string
	Flow       string
	Input      map[string]string
	CreatedAt  string `json:"created_at"`
	Checkpoint *struct {
		Step   string
		Output any
	}
	Waits []struct {
		For   string `json:"waiting_for"`
		Key   string `json:"waiting_key"`
		Until string `json:"waiting_until"`
		Data  any    `json:"waiting_data"`
	}
}

func TestAnExecutionHasItsLatestCheckpointAndItsWaits(t *testing.T) {
	t.Parallel()
	a := start(t)
	x := a.begin("ask", trace.New(trace.Flow))
	var got detail
	header := a.get("/v1/executions/"+x.ID, &got)
	if got.ID != x.ID || got.Status != "pending" || got.Flow != "ask" || got.Input["for"] != "ask" || got.Checkpoint != nil {
		t.Errorf("execution is %+v", got)
	}
	if got.Waits == nil || len(got.Waits) != 0 {
		t.Errorf("waits are %v", got.Waits)
	}
	if header.Get("X-Trace-Id") != x.TraceID {
		t.Errorf("X-Trace-Id is %q", header.Get("X-Trace-Id"))
	}
	if at, err := time.Parse(time.RFC3339, got.CreatedAt); err != nil || got.CreatedAt[len(got.CreatedAt)-1] != 'Z' || !at.Equal(x.CreatedAt) {
		t.Errorf("created at %q, want %s", got.CreatedAt, x.CreatedAt)
	}
	a.claim(x)
	exec(t, a.pool, `
		insert into agent_checkpoints (execution_id, step, claim, output, created_at) values
		       (@id, 'second', 1, '{"n": 2}', clock_timestamp()),
		       (@id, 'zeroth', 1, '{"n": 1}', clock_timestamp() - interval '1 minute')`, postgres.Strict{"id": x.ID})
	exec(t, a.pool, `
		update agent_executions set status = 'waiting', claim = claim + 1, waiting_for = 'response', waiting_key = 'thread-7',
		       waiting_until = '2999-01-01', waiting_data = '{"asked": "when?"}' where id = @id`, postgres.Strict{"id": x.ID})
	a.get("/v1/executions/"+x.ID, &got)
	if got.Checkpoint == nil || got.Checkpoint.Step != "second" {
		t.Errorf("checkpoint is %+v", got.Checkpoint)
	}
	if len(got.Waits) != 1 || got.Waits[0].For != "response" || got.Waits[0].Key != "thread-7" || got.Waits[0].Data == nil {
		t.Errorf("waits are %+v", got.Waits)
	}
}

// The row keeps what a replay needs; the API shows neither its secrets nor values without end.
func TestExecutionsAreShownWithoutSecrets(t *testing.T) {
	t.Parallel()
	a := start(t)
	x := a.begin("ask", trace.New(trace.Flow))
	a.claim(x)
	exec(t, a.pool, `
		insert into agent_checkpoints (execution_id, step, claim, output)
		values (@id, 'login', 1, '{"password": "Zq81xLm0Kk77"}')`, postgres.Strict{"id": x.ID})
	exec(t, a.pool, `
		update agent_executions set status = 'waiting', claim = claim + 1, waiting_for = 'event', waiting_key = 'token=Zq81xLm0Kk77',
		       waiting_until = '2999-01-01', waiting_data = '{"secret": "Zq81xLm0Kk77"}', variables = '{"api_key": "Zq81xLm0Kk77"}',
		       result_summary = 'Bearer Zq81xLm0Kk77', input = jsonb_build_object('long', repeat('long ', 40000))
		 where id = @id`, postgres.Strict{"id": x.ID})
	for _, path := range []string{"/v1/executions", "/v1/executions/" + x.ID} {
		a.get(path, &struct{}{})
		got := a.raw("GET", path, "", asAdmin()).Body.String()
		if strings.Contains(got, "Zq81xLm0Kk77") || !strings.Contains(got, "[redacted]") || len(got) > 128<<10 {
			t.Errorf("%s: %d bytes: %.2000s", path, len(got), got)
		}
	}
	kept, err := executions.Get(t.Context(), a.pool, x.ID)
	if err != nil || !strings.Contains(string(kept.Variables), "Zq81xLm0Kk77") {
		t.Errorf("the row keeps %s, %v", kept.Variables, err)
	}
}

func TestACancelEndsAnExecutionAndIsNotRepeated(t *testing.T) {
	t.Parallel()
	a := start(t)
	x := a.begin("beat", trace.New(trace.Flow))
	var got struct {
		Status  string
		TraceID string `json:"trace_id"`
	}
	for range 2 {
		header := a.post("/v1/executions/"+x.ID+"/cancel", `{"reason":"not needed"}`, &got)
		if got.Status != "cancelled" || header.Get("X-Trace-Id") != x.TraceID {
			t.Errorf("answer is %+v, %v", got, header)
		}
	}
	row, err := executions.Get(t.Context(), a.pool, x.ID)
	if err != nil || *row.CancelledBy != "admin" || *row.CancelReason != "not needed" {
		t.Errorf("row is %+v, %v", row, err)
	}
	done := a.begin("beat", trace.New(trace.Flow))
	a.fails(done)
	a.post("/v1/executions/"+done.ID+"/cancel", `{"reason":"too late"}`, &got)
	if got.Status != "failed" {
		t.Errorf("an execution that has ended is now %s", got.Status)
	}
}

func TestSkillsAreListedWithTheirHealth(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.skill("idle")
	a.skill("busy")
	for _, status := range []activity.Status{activity.Success, activity.Success, activity.Error, activity.Error} {
		a.note(activity.Entry{TraceID: string(trace.New(trace.Flow)), Kind: activity.KindCall, Skill: "busy"}, status)
	}
	var got struct {
		Items []struct {
			Name   string
			Health struct {
				Calls, Streak int
				Rate          *float64 `json:"success_rate"`
				P50           *float64 `json:"p50_ms"`
				P95           *float64 `json:"p95_ms"`
				State         string
			}
		}
	}
	a.get("/v1/skills", &got)
	busy, idle := got.Items[0], got.Items[1]
	if busy.Name != "busy" || busy.Health.Calls != 4 || busy.Health.Streak != 2 || *busy.Health.Rate != 0.5 || busy.Health.P95 == nil {
		t.Errorf("busy is %+v", busy)
	}
	if idle.Name != "idle" || idle.Health.Calls != 0 || idle.Health.Rate != nil || idle.Health.State != "enabled" {
		t.Errorf("idle is %+v", idle)
	}
}
