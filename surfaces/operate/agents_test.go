package operate_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

func TestASessionHasOneAgent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Two."), modeltest.Text("Three."))
	p := w.process(t, true)
	p.Loop.Agents = &agents.Directory{Settings: agents.Settings{Name: "house"}}
	for _, d := range []agents.Definition{
		{Name: "sales", Default: true, Instructions: "You sell."}, {Name: "billing", Instructions: "You bill."},
	} {
		if _, err := agents.Put(t.Context(), w.pool, d, "workspace"); err != nil {
			t.Fatal(err)
		}
	}
	s := p.open(t, "")
	if err := s.As(t.Context(), "nobody"); err == nil {
		t.Error("an agent that there is none of acts")
	}
	for _, c := range []struct{ session, agent, told string }{
		{"first", "", "You sell."}, {"second", "billing", "You bill."}, {"second", "", "You bill."}, {"first", "billing", ""},
	} {
		s := p.open(t, c.session)
		if err := s.As(t.Context(), c.agent); err != nil {
			t.Fatal(err)
		}
		b := p.say(t, s, "hello", true)
		<-b.over
		if c.told == "" {
			if told, _ := problem.Of(b.err); b.err == nil || told.Status != http.StatusConflict || !strings.Contains(told.Detail, "is one with sales") {
				t.Errorf("another agent in the session: %v", b.err)
			}
			continue
		}
		if b.err != nil {
			t.Fatal(b.err)
		}
		requests := w.model.Requests()
		if got := requests[len(requests)-1].Messages[0].Content; !strings.Contains(got, c.told) {
			t.Errorf("session %s as %q was told %s", c.session, c.agent, got)
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := value[string](t, w.pool, `select string_agg(agent, ' ' order by id) from agent_executions where flow = 'operate'`); got != "sales billing billing" {
		t.Errorf("the executions are of %s", got)
	}
}
