package operate_test

import (
	"context"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

func TestAHeartbeatUnderWayYieldsToTheAdminAndResumes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, true)
	s := p.open(t, "")
	w.builtin(t, "look", "", func(context.Context, skills.Call) (any, error) {
		return "seen", s.Hold(t.Context(), false)
	})
	exec(t, w.pool, `
		insert into agent_automations (name, trigger, cron, skill_name, next_run_at, source)
		values ('looking', 'cron', '0 0 1 1 *', 'look', clock_timestamp() - interval '1 minute', 'workspace')`)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Nothing to report.") })
	beat, _, err := p.engine.Start(t.Context(), w.pool, heartbeat.Spec("agent"))
	if err != nil {
		t.Fatal(err)
	}
	x := w.becomes(t, beat.ID, executions.Waiting)
	if deref(x.WaitingFor) != "lane" || deref(x.WaitingKey) != operate.Lane {
		t.Fatalf("the heartbeat waits for %s %s", deref(x.WaitingFor), deref(x.WaitingKey))
	}
	if done, err := s.Turn(t.Context(), "Hello.", false, func(operate.Event) {}); err != nil || done.Ended != "answered" {
		t.Errorf("the admin's turn: %+v, %v", done, err)
	}
	tick, err := p.engine.RunNow(t.Context(), heartbeat.Spec("agent"))
	if err != nil || !strings.HasPrefix(tick.ResultSummary, "skipped") || w.rows(t, tick.TraceID) != "heartbeat skipped" {
		t.Errorf("the tick is %s: %q, %v; %s", tick.Status, tick.ResultSummary, err, w.rows(t, tick.TraceID))
	}
	if x := w.execution(t, beat.ID); x.Status != executions.Waiting {
		t.Errorf("the heartbeat is %s while the admin works", x.Status)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.becomes(t, beat.ID, executions.Completed)
	if n := strings.Count(w.rows(t, x.TraceID), "look success"); n != 1 {
		t.Errorf("the story is %s", w.rows(t, x.TraceID))
	}
}
