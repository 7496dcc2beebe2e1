package webhook_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func TestADeliveryStartsAFlowOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.fail.Store(1) // so that the delivery has a second attempt
	w.endpoint(t, webhooks.EndpointDefinition{Name: "hire", Actions: []webhooks.Action{
		{Flow: "onboarding", Data: map[string]any{"name": "body.candidate.name"}, Thread: "candidate {body.candidate.name}"},
		{Flow: "archive"},
		{Automation: "work"},
	}})
	w.endpoint(t, webhooks.EndpointDefinition{Name: "lost", MaxAttempts: 1, Actions: []webhooks.Action{{Flow: "nothing"}}})
	got := w.accepted(t, "hire", "msg_1", `{"candidate": {"name": "Ana"}}`)
	w.accepted(t, "lost", "msg_2", `{}`)
	w.work(t, func(e *executions.Engine) {
		for _, flow := range []string{"onboarding", "archive"} {
			if err := e.Register(flow, func(_ context.Context, in json.RawMessage) (executions.Result, error) {
				return executions.Result{Summary: string(in)}, nil
			}); err != nil {
				t.Error(err)
			}
		}
	})
	d := w.until(t, "msg_1", webhooks.Done)
	if d.Attempts != 2 {
		t.Errorf("%d attempts", d.Attempts)
	}
	if repeated := w.send(t, "hire", "msg_1", `{"candidate": {"name": "Ana"}}`); repeated.status != 200 {
		t.Errorf("repeated: %d", repeated.status)
	}
	for flow, input := range map[string]string{"onboarding": `{"name": "Ana"}`, "archive": `{"candidate": {"name": "Ana"}}`} {
		pgtest.Eventually(t, patience, func() bool {
			return value[int](t, w.pool, `select count(*) from agent_executions where flow = $1 and status = 'completed'`, flow) == 1
		}, flow+" ends")
		same := value[bool](t, w.pool, `
			select bool_and(x.input = $2::jsonb and x.trace_id = $3 and x.surface = 'webhook' and x.parent_id::text = $4)
			  from agent_executions x where x.flow = $1`, flow, input, got.TraceID, *d.ExecutionID)
		if !same {
			t.Errorf("%s was not started as it should be", flow)
		}
	}
	if n := value[int](t, w.pool, `
		select count(*) from agent_executions x join agent_threads t on t.id = x.thread_id
		 where x.flow = 'onboarding' and t.name = 'candidate Ana' and t.owner_kind = 'webhook' and t.owner = 'hire' and t.channel = 'chat'`); n != 1 {
		t.Errorf("%d runs of onboarding in the thread that was begun for it", n)
	}
	if n := value[int](t, w.pool, `select count(*) from agent_executions where flow = 'archive' and thread_id is not null`); n != 0 {
		t.Error("archive has a thread that nobody gave it")
	}
	if d := w.until(t, "msg_2", webhooks.Dead); !strings.Contains(deref(d.ErrorMessage), `there is no flow "nothing"`) {
		t.Errorf("error %q", deref(d.ErrorMessage))
	}
	if _, err := w.surface.Engine.Fork(t.Context(), w.pool, executions.ForkSpec{ID: *d.ExecutionID}); err == nil ||
		!strings.Contains(err.Error(), "agent webhooks replay") {
		t.Errorf("fork of a delivery's handling: %v", err)
	}
}
