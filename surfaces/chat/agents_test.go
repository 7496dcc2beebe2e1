package chat_test

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// house is a process with the agents sales, which is the default, and billing. The key shop reaches billing, site-both
// reaches both, and any other key sales.
func (w *world) house(t *testing.T) *process {
	t.Helper()
	for _, d := range []agents.Definition{
		{Name: "sales", Default: true, Instructions: "You are Nora of Tienda Sol.", Greeting: "Hola, soy Nora.", Keys: []string{"site-both"}},
		{Name: "billing", Instructions: "You are Bill.", Keys: []string{"shop", "site-both"}},
	} {
		if _, err := agents.Put(t.Context(), w.pool, d, "workspace"); err != nil {
			t.Fatal(err)
		}
	}
	return w.process(t, func(c *chat.Chat) { c.Loop.Agents = c.Agents })
}

// to is a message to a model.
func to(model, text string) openai.ChatCompletionRequest {
	r := says(text)
	r.Model = model
	return r
}

func TestAKeyReachesTheAgentsThatNameItElseTheDefault(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Yes.") })
	p := w.house(t)
	for key, c := range map[string]struct {
		models []string
		answer map[string]string // by model, which agent answers; "" is a 404
	}{
		"site":      {[]string{"sales", "agent"}, map[string]string{"sales": "Nora", "agent": "Nora", "billing": "", "nora": "", "flowpilot": ""}},
		"shop":      {[]string{"billing", "agent"}, map[string]string{"billing": "Bill", "agent": "Bill", "sales": ""}},
		"site-both": {[]string{"sales", "billing", "agent"}, map[string]string{"billing": "Bill", "agent": "Nora", "sales": "Nora"}},
	} {
		list, err := p.clientOf(key).ListModels(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		for _, m := range list.Models {
			ids = append(ids, m.ID)
		}
		if !slices.Equal(ids, c.models) {
			t.Errorf("%s is shown %v", key, ids)
		}
		for model, who := range c.answer {
			before := len(w.model.Requests())
			_, err := p.clientOf(key).CreateChatCompletion(t.Context(), to(model, "Who are you?"))
			var failure *openai.APIError
			switch {
			case who == "" && (!errors.As(err, &failure) || failure.HTTPStatusCode != http.StatusNotFound || failure.Code != "model_not_found"):
				t.Errorf("%s asked %s: %v", key, model, err)
			case who != "" && err != nil:
				t.Errorf("%s asked %s: %v", key, model, err)
			case who != "" && !strings.Contains(w.model.Requests()[before].Messages[0].Content, "You are "+who):
				t.Errorf("%s asked %s, and another than %s answered", key, model, who)
			}
		}
	}
}

func TestAThreadKeepsItsAgent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Yes.") })
	p := w.house(t)
	both := p.clientOf("site-both", inThread("hall")...)
	if _, err := both.CreateChatCompletion(t.Context(), to("billing", "My order?")); err != nil {
		t.Fatal(err)
	}
	_, err := both.CreateChatCompletion(t.Context(), to("sales", "And you?"))
	var failure *openai.APIError
	if !errors.As(err, &failure) || failure.HTTPStatusCode != http.StatusConflict || failure.Code != "thread_agent" {
		t.Fatalf("another agent in the thread: %v", err)
	}
	// What it said is billing's alone: neither another key nor another agent sees it.
	for _, key := range []string{"site", "shop"} {
		model := map[string]string{"site": "sales", "shop": "billing"}[key]
		before := len(w.model.Requests())
		if _, err := p.clientOf(key, inThread("hall")...).CreateChatCompletion(t.Context(), to(model, "What was said?")); err != nil {
			t.Fatal(err)
		}
		for _, m := range w.model.Requests()[before].Messages {
			if strings.Contains(m.Content, "My order?") {
				t.Errorf("%s sees what another key's visitor said", key)
			}
		}
	}
	rows := pgtest.Value[string](t, w.pool, `
		select string_agg(distinct x.agent || ' ' || a.agent || ' ' || th.agent, ', ' order by x.agent || ' ' || a.agent || ' ' || th.agent)
		  from agent_executions x join agent_activity a on a.execution_id = x.id join agent_threads th on th.id = x.thread_id`)
	if rows != "billing billing billing, sales sales sales" {
		t.Errorf("executions, activity and threads name %s", rows)
	}
}

func TestAGreetingBeginsANewThread(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Yes."), modeltest.Text("Still."))
	p := w.house(t)
	for range 2 {
		if _, err := p.clientOf("site", inThread("hall")...).CreateChatCompletion(t.Context(), to("sales", "Are you there?")); err != nil {
			t.Fatal(err)
		}
	}
	said := pgtest.Value[string](t, w.pool, `select string_agg(role || ': ' || content, ', ' order by seq) from agent_messages`)
	if want := "assistant: Hola, soy Nora., user: Are you there?, assistant: Yes., user: Are you there?, assistant: Still."; said != want {
		t.Errorf("the thread is %s", said)
	}
	var roles []string
	for _, m := range w.model.Requests()[1].Messages {
		roles = append(roles, m.Role)
	}
	if !slices.Equal(roles, []string{"system", "user", "assistant", "user", "assistant", "user"}) {
		t.Errorf("the second request has %v", roles)
	}
	first, second := w.model.Requests()[0].Messages, w.model.Requests()[1].Messages
	for i, m := range first[:len(first)-1] {
		if m.Content != second[i].Content {
			t.Errorf("the two requests differ in message %d: %q, %q", i, m.Content, second[i].Content)
		}
	}
}
