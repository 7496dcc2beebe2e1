package chat_test

import (
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestThePageShowsTheGreetingInANewConversation(t *testing.T) {
	w := newWorld(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Yes.") })
	p := w.house(t)
	target, err := url.Parse(p.url)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /chat", p.chat.PageHandler())
	mux.Handle("GET /chat/{file}", p.chat.PageHandler())
	mux.Handle("/v1/", httputil.NewSingleHostReverseProxy(target))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	page := browser.Open(t, browser.Look{})
	page.Go(server.URL + "/chat#key=site")
	const all = `[...document.querySelectorAll("#talk .said")].map(e => e.textContent).join(" | ")`
	page.Until("it is greeted", all+` === "AgentHola, soy Nora."`)
	page.Type("#message", "Are you there?")
	page.Click("#write button")
	page.Until("it is answered", all+` === "AgentHola, soy Nora. | YouAre you there? | AgentYes."`)
	pgtest.Eventually(t, patience, func() bool { // the answer is kept just after it was streamed
		said := value[string](t, w.pool, `select string_agg(role || ': ' || content, ', ' order by seq) from agent_messages`)
		return said == "assistant: Hola, soy Nora., user: Are you there?, assistant: Yes."
	}, "the thread has the greeting once")
	page.Click("#anew")
	page.Until("a new one is greeted", all+` === "AgentHola, soy Nora."`)
	if problems := page.Problems(); len(problems) > 0 {
		t.Errorf("the browser complains:\n%s", strings.Join(problems, "\n"))
	}
}
