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

// opened is the page in a browser, before a process.
func opened(t *testing.T, p *process) *browser.Page {
	t.Helper()
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
	return page
}

func TestThePageShowsTheGreetingInANewConversation(t *testing.T) {
	w := newWorld(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Yes.") })
	page := opened(t, w.house(t))
	const all = `[...document.querySelectorAll("#talk .said")].map(e => e.textContent).join(" | ")`
	page.Until("it is greeted", all+` === "AgentHola, soy Nora."`)
	page.Type("#message", "Are you there?")
	page.Click("#write button")
	page.Until("it is answered", all+` === "AgentHola, soy Nora. | YouAre you there? | AgentYes."`)
	pgtest.Eventually(t, patience, func() bool { // the answer is kept just after it was streamed
		said := pgtest.Value[string](t, w.pool, `select string_agg(role || ': ' || content, ', ' order by seq) from agent_messages`)
		return said == "assistant: Hola, soy Nora., user: Are you there?, assistant: Yes."
	}, "the thread has the greeting once")
	page.Click("#anew")
	page.Until("a new one is greeted", all+` === "AgentHola, soy Nora."`)
	if problems := page.Problems(); len(problems) > 0 {
		t.Errorf("the browser complains:\n%s", strings.Join(problems, "\n"))
	}
}

func TestThePageSendsFiles(t *testing.T) {
	w := newWorld(t, modeltest.Text("One order."))
	page := opened(t, w.process(t))
	page.Until("it is open", `!document.querySelector("#room").hidden`)
	var chosen int
	page.Eval(`(() => {
		const list = new DataTransfer();
		list.items.add(new File(["id,total\n7,9.50\n"], "orders.csv", { type: "text/csv" }));
		const files = document.querySelector("#files");
		files.files = list.files;
		return files.files.length;
	})()`, &chosen)
	page.Type("#message", "How many?")
	page.Click("#write button")
	page.Until("it is answered", `document.querySelector("#talk").textContent === "YouHow many?\n📎 orders.csvAgentOne order."`)
	var sent string
	if asked := w.model.Requests(); len(asked) == 1 {
		sent = modeltest.Said(asked[0].Messages[len(asked[0].Messages)-1])
	}
	for _, want := range []string{"How many?", `"orders.csv"`, "7,9.50"} {
		if !strings.Contains(sent, want) {
			t.Errorf("%q is not in what the model was sent: %s", want, sent)
		}
	}
	for _, fault := range page.Inaccessible() {
		t.Error(fault)
	}
	if problems := page.Problems(); len(problems) > 0 {
		t.Errorf("the browser complains:\n%s", strings.Join(problems, "\n"))
	}
}
