package chat_test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// shown returns the text of all messages on the page.
const shown = `[...document.querySelectorAll("#messages .message")]` +
	`.map(e => e.innerText.replace(/\s+/g, " ").trim()).join(" | ")`

// site serves the page and the API of a process on one address. A proxy forwards requests to the API. transport sends
// them, and network changes the responses. Both may be nil.
func site(t *testing.T, p *process, transport http.RoundTripper, network func(*http.Response) error) string {
	t.Helper()
	target, err := url.Parse(p.url)
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.Transport, proxy.ModifyResponse = transport, network
	proxy.ErrorHandler = func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }
	mux := http.NewServeMux()
	mux.Handle("GET /chat", p.chat.PageHandler())
	mux.Handle("GET /chat/{file}", p.chat.PageHandler())
	mux.Handle("/v1/", proxy)
	return testkit.Serve(t, mux)
}

// openPage opens the page of a process with a chat key.
func openPage(t *testing.T, p *process, look browser.Look) *browser.Page {
	t.Helper()
	return openAt(t, site(t, p, nil, nil), look)
}

// openBehind is openPage with the transport and the network of site.
func openBehind(
	t *testing.T, p *process, transport http.RoundTripper, network func(*http.Response) error,
) *browser.Page {
	t.Helper()
	return openAt(t, site(t, p, transport, network), browser.Look{})
}

func openAt(t *testing.T, address string, look browser.Look) *browser.Page {
	t.Helper()
	page := browser.Open(t, look)
	page.Go(address + "/chat#key=site")
	page.Until("the page is open", `!document.querySelector("#conversation").hidden`)
	return page
}

// submit sends a message on the page.
func submit(page *browser.Page, text string) {
	page.Type("#message", text)
	page.Click("#send")
}

// noProblems reports each message of the browser's console and each finding of axe.
func noProblems(t *testing.T, page *browser.Page) {
	t.Helper()
	for _, finding := range page.Inaccessible() {
		t.Error(finding)
	}
	problems := page.Problems()
	assert.Truef(t, len(problems) == 0, "the browser reports:\n%s", strings.Join(problems, "\n"))
}

// held is a reply that pauses after start until the test closes release.
func held(start, rest string, release <-chan struct{}) modeltest.Reply {
	return modeltest.Custom(func(w http.ResponseWriter, r *http.Request) {
		s := chatwire.Open(w, "chatcmpl-held", "test", time.Now().Unix())
		s.Role()
		s.Text(start)
		select {
		case <-release:
		case <-r.Context().Done():
			return
		}
		s.Text(rest)
		s.Finish(openai.FinishReasonStop)
		s.Usage(openai.Usage{PromptTokens: 10, CompletionTokens: 10, TotalTokens: 20})
		s.Done()
	})
}

func TestThePageShowsTheGreetingInANewConversation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Yes.") })
	page := openPage(t, w.house(t), browser.Look{})
	page.Until("the greeting is shown", shown+` === "sales Hola, soy Nora."`)
	submit(page, "Are you there?")
	page.Until("the answer is shown", shown+` === "sales Hola, soy Nora. | You Are you there? | sales Yes."`)
	pgtest.Eventually(t, func() bool { // the answer is stored just after its stream ends
		transcript := pgtest.Value[string](t, w.pool, `select string_agg(role || ': ' || content, ', ' order by seq)
			from agent_messages`)
		return transcript == "assistant: Hola, soy Nora., user: Are you there?, assistant: Yes."
	}, "the thread has the greeting once")
	page.Click("#new")
	page.Until("a new conversation is greeted", shown+` === "sales Hola, soy Nora."`)
	noProblems(t, page)
}

func TestThePageSelectsAnAgent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(_ int, r openai.ChatCompletionRequest) modeltest.Reply {
		if strings.Contains(modeltest.Said(r.Messages[0]), "You are Bill.") {
			return modeltest.Text("Bill here.")
		}
		return modeltest.Text("Nora here.")
	})
	page := browser.Open(t, browser.Look{})
	page.Go(site(t, w.house(t), nil, nil) + "/chat#key=site-both")
	page.Until("the agents are listed",
		`document.querySelector("#agents").value === "sales" && !document.querySelector("#agents").hidden`)
	page.Eval(`(() => {
		const agents = document.querySelector("#agents");
		agents.value = "billing";
		agents.dispatchEvent(new Event("change"));
		return 1;
	})()`, new(int))
	page.Until("the page names the agent", `document.title === "billing"`)
	submit(page, "Who are you?")
	page.Until("the agent answers", shown+` === "You Who are you? | billing Bill here."`)
	noProblems(t, page)
}

func TestThePageListsADefaultAgentWithTheNameOfTheAlias(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Yes."))
	for _, name := range []string{agents.Alias, "sales", "support"} {
		_, err := agents.Put(t.Context(), w.pool, agents.Definition{
			Name: name, Default: name == agents.Alias, Keys: []string{"site"},
		})
		require.NoError(t, err)
	}
	page := openPage(t, w.process(t, func(c *chat.Chat) { c.Loop.Agents = c.Agents }), browser.Look{})
	page.Until("all agents are listed, and the default is selected",
		`[...document.querySelectorAll("#agents option")].map(o => o.value).join() === "agent,sales,support" &&
			document.querySelector("#agents").value === "agent"`)
	submit(page, "Are you there?")
	page.Until("the default agent answers", shown+` === "You Are you there? | Agent Yes."`)
	noProblems(t, page)
}

func TestThePageSendsFiles(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One order."))
	page := openPage(t, w.process(t), browser.Look{})
	page.Eval(`(() => {
		const list = new DataTransfer();
		list.items.add(new File(["id,total\n7,9.50\n"], "orders.csv", { type: "text/csv" }));
		list.items.add(new File(["x"], "other.txt", { type: "text/plain" }));
		const files = document.querySelector("#files");
		files.files = list.files;
		files.dispatchEvent(new Event("change"));
		return 1;
	})()`, new(int))
	page.Click(`#attachments button[aria-label="Remove other.txt"]`)
	submit(page, "How many?")
	page.Until("the answer is shown", shown+` === "You How many? 📎 orders.csv | nora One order."`)
	var sent string
	if asked := w.model.Requests(); len(asked) == 1 {
		sent = modeltest.Said(asked[0].Messages[len(asked[0].Messages)-1])
	}
	assert.Contains(t, sent, "How many?", `"orders.csv"`, "7,9.50")
	page.Reload()
	page.Until("the file is in the history", shown+` === "You How many? 📎 orders.csv | nora One order."`)
	noProblems(t, page)
}

// busyOnce answers the first message with 429.
type busyOnce struct{ sent atomic.Bool }

func (b *busyOnce) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Path != "/v1/chat/completions" || b.sent.Swap(true) {
		return http.DefaultTransport.RoundTrip(r)
	}
	return &http.Response{
		StatusCode: http.StatusTooManyRequests, Header: http.Header{}, Body: http.NoBody, Request: r,
	}, nil
}

// The rate of messages does not limit the files of one message. A refused message is repeated without another upload.
func TestThePageUploadsTheFilesOfAMessageOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Ten."))
	page := openBehind(t, w.process(t, func(c *chat.Chat) { c.Rate = 3 }), &busyOnce{}, nil)
	page.Expect("429")
	page.Eval(`(setFiles([..."0123456789"].map((n) => new File(["id"], n + ".csv", { type: "text/csv" }))), 1)`, new(int))
	submit(page, "How many?")
	page.Shows("The server answers 429.")
	page.Click(".interrupted button")
	page.Until("the answer is shown", shown+`.endsWith("nora Ten.")`)
	pgtest.Equal(t, w.pool, "10 of 10",
		`select count(thread_id) || ' of ' || count(*) from agent_documents`)
	noProblems(t, page)
}

// The error of a refused file names the file. Long names do not widen the page.
func TestThePageNamesARefusedFile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	page := openPage(t, w.process(t), browser.Look{})
	page.Expect("400")
	page.Eval(`(setFiles([new File([], "a".repeat(200) + ".csv", { type: "text/csv" })]), 1)`, new(int))
	fits := `(e => e.scrollWidth <= e.clientWidth)(document.querySelector("%s"))`
	page.Until("the name is in the composer", fmt.Sprintf(fits, "#attachments li"))
	submit(page, "How many?")
	page.Shows(strings.Repeat("a", 200) + ".csv: the document is empty.")
	page.Until("the name is in the status", fmt.Sprintf(fits, "#status"))
	noProblems(t, page)
}

// An edited message keeps its uploads. When they have expired, the page uploads the files again, in the same
// conversation.
func TestThePageUploadsAFileAgainWhenItHasExpired(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Yes.") })
	page := openPage(t, w.process(t), browser.Look{})
	page.Expect("400")
	page.Expect("404")
	submit(page, "Hi")
	page.Until("the answer is shown", shown+` === "You Hi | nora Yes."`)
	page.Eval(`(setFiles([new File(["id"], "orders.csv", { type: "text/csv" })]), 1)`, new(int))
	for range 2 {
		page.Eval(`document.querySelector("#message").value = "long ".repeat(7000).trim(); 1`, new(int))
		page.Click("#send")
		page.Shows("A message has at most 32768 bytes.")
		page.Click(".message .interrupted button")
	}
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_documents`)
	pgtest.Exec(t, w.pool, `delete from agent_documents`)
	page.Eval(`document.querySelector("#message").value = ""; 1`, new(int))
	submit(page, "How many?")
	page.Shows("There is no such file.")
	page.Click(".message .interrupted button")
	page.Until("the message is answered",
		shown+` === "You Hi | nora Yes. | You How many? 📎 orders.csv | nora Yes."`)
	pgtest.Equal(t, w.pool, "1 in 1", `
		select count(*) || ' in ' || (select count(*) from agent_threads) from agent_documents`)
	noProblems(t, page)
}

// markdown has typical output of models, and text that must never run.
const markdown = "# Hours\n\nWe open at **nine**, see [our site](https://example.com/hours).\n\n" +
	"<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>\n\n" +
	"![x](https://example.com/leak.png) [run](javascript:document.title='run') [data](data:text/html,x)\n\n" +
	"| day | hour |\n|---|---|\n| Monday | 9 |\n\n```go\nfmt.Println(\"hola\")\n```\n\n- مرحبا\n- 🎉\n"

func TestThePageRendersMarkdownAndRunsNoHTML(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text(markdown))
	page := openPage(t, w.process(t), browser.Look{})
	submit(page, "When? <b>now</b>")
	page.Until("the answer is rendered", `document.querySelector(".agent .body table td")?.textContent === "Monday"`)
	for what, script := range map[string]string{
		"bold text": `document.querySelector(".agent strong").textContent === "nine"`,
		"safe link": `(a => a.href === "https://example.com/hours" && a.target === "_blank" && a.rel.includes("noopener"))(
			document.querySelector(".agent a"))`,
		"HTML is text": `!document.querySelector(".agent .body :is(img, script, b)") &&
			document.querySelector(".agent .body").textContent.includes("<img src=x")`,
		"no other link": `![...document.querySelectorAll(".agent a")].some(a => !a.href.startsWith("https://example.com/"))`,
		"no script ran": `document.title !== "run"`,
		"user's text":   `document.querySelector(".user .body").textContent === "When? <b>now</b>"`,
		"right to left": `getComputedStyle(document.querySelector(".agent li p, .agent li")).direction === "rtl"`,
		"code, copyable": `document.querySelector(".agent .block button").textContent === "Copy" &&
			document.querySelector(".agent pre").textContent.includes("Println")`,
	} {
		var ok bool
		if page.Eval(script, &ok); !ok {
			t.Errorf("%s: this is false: %s", what, script)
		}
	}
	for _, look := range []browser.Look{{}, {Dark: true}, {Width: 320, Height: 640}} {
		page.As(look)
		var wide bool
		if page.Eval(`document.documentElement.scrollWidth > innerWidth`, &wide); wide {
			t.Errorf("%+v: the page scrolls sideways", look)
		}
		noProblems(t, page)
	}
}

func TestThePageKeepsTheComposerInView(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text(strings.Repeat("A long line of an answer.\n\n", 200)), modeltest.Text("Short."))
	page := openPage(t, w.process(t), browser.Look{Width: 390, Height: 700})
	submit(page, "Tell me all.")
	page.Until("the answer is shown",
		`document.querySelector(".agent .body")?.textContent.length > 4000 && document.querySelector("#send").offsetParent`)
	page.Until("the end of the answer and the composer are in view", `(() => {
		const within = e => { const r = e.getBoundingClientRect(); return r.bottom <= innerHeight && r.bottom > 0; };
		const end = document.querySelector(".agent:last-child .body > :last-child");
		return within(document.querySelector("#send")) && within(end);
	})()`)
	page.Eval(`(document.querySelector("#scroller").scrollTop = 0, 1)`, new(int))
	page.Until("a button leads to the end", `!document.querySelector("#latest").hidden`)
	submit(page, "And?")
	page.Until("the next answer is in view", shown+`.endsWith("nora Short.") && document.querySelector("#latest").hidden`)
	noProblems(t, page)
	page.As(browser.Look{Width: 390, Height: 700, Print: true})
	page.Until("paper has all messages and no composer", `
		document.body.scrollHeight > document.querySelector("#messages").scrollHeight &&
		document.querySelector("#messages").scrollHeight > 700 && !document.querySelector("#send").offsetParent`)
}

func TestThePageShowsTheConversationAfterAReload(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	w := newWorld(t, modeltest.Text("One."), held("Two is ", "done.", release))
	p := w.process(t)
	page := openPage(t, p, browser.Look{})
	submit(page, "First")
	page.Until("the first answer is shown", shown+`.endsWith("nora One.")`)
	submit(page, "Second")
	page.Until("the second answer has started", shown+`.endsWith("nora Two is")`) // the page shows no indicator either
	page.Reload()
	page.Until("the conversation and the answer in progress are shown",
		shown+`.startsWith("You First | nora One. | You Second | nora Two is") && !document.querySelector("#stop").hidden`)
	close(release)
	page.Until("the answer is complete", shown+
		` === "You First | nora One. | You Second | nora Two is done." && document.querySelector("#stop").hidden`)
	noProblems(t, page)
}

// The link to the message box changes the hash of the address, as a new key does.
func TestTheSkipLinkKeepsTheConversation(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."))
	release := make(chan struct{})
	page := openBehind(t, w.process(t), nil, func(r *http.Response) error {
		if r.Request.Method == http.MethodPost {
			<-release // until then the page does not know its thread
		}
		return nil
	})
	submit(page, "First")
	page.Eval(`new Promise((done) => {
		addEventListener("hashchange", () => done(1), { once: true });
		document.querySelector("a.skip").click();
	})`, new(int))
	close(release)
	page.Until("the answer is shown", shown+` === "You First | nora One."`)
	noProblems(t, page)
}

func TestThePageKeepsTheTextOfAnInputMethod(t *testing.T) {
	t.Parallel()
	page := openPage(t, newWorld(t).process(t), browser.Look{})
	page.Type("#message", "ni")
	page.Eval(`(document.querySelector("#message").dispatchEvent( // as Safari confirms a word
		new KeyboardEvent("keydown", { key: "Enter", keyCode: 229, bubbles: true, cancelable: true })), 1)`, new(int))
	page.Until("the text is not sent", shown+` === "" && document.querySelector("#message").value === "ni"`)
}

// lostBody is a response that ends early, with an error or silently.
type lostBody struct {
	io.ReadCloser
	ctx    context.Context
	after  string
	silent bool
	read   string
}

func (b *lostBody) Read(p []byte) (int, error) {
	if strings.Contains(b.read, b.after) {
		if b.silent {
			<-b.ctx.Done()
		}
		return 0, io.ErrUnexpectedEOF
	}
	n, err := b.ReadCloser.Read(p)
	b.read += string(p[:n])
	return n, err
}

// endPatience lets a test fire the page's timeout for silence.
const endPatience = `(() => {
	const real = setTimeout;
	window.patience = null;
	window.setTimeout = (f, ms) => ms === maxSilence ? (window.patience = f, 0) : real(f, ms);
	return 1;
})()`

// noPause lets the page try again at once.
const noPause = `(() => {
	const real = setTimeout;
	window.setTimeout = (f, ms) => real(f, ms === maxSilence ? ms : 0);
	return 1;
})()`

// A proxy cuts each stream after a piece of text, and refuses two attempts to attach.
func TestThePageReadsAnAnswerThroughABadProxy(t *testing.T) {
	t.Parallel()
	const pieces = 12
	g, reply := gated()
	w := newWorld(t, reply)
	var streams, refusals atomic.Int64
	page := openBehind(t, w.process(t), nil, func(r *http.Response) error {
		if !strings.HasPrefix(r.Request.URL.Path, "/v1/chat/completions") {
			return nil
		}
		if n := refusals.Load(); r.Request.Method == http.MethodGet && n < 2 {
			refusals.Add(1)
			err := r.Body.Close()
			r.StatusCode = []int{http.StatusBadGateway, http.StatusTooManyRequests}[n]
			r.Header, r.Body = http.Header{}, http.NoBody
			return err
		}
		if n := streams.Add(1); n < pieces {
			r.Body = &lostBody{ReadCloser: r.Body, after: fmt.Sprintf("(%d)", n)}
		}
		return nil
	})
	page.Eval(noPause, new(int))
	for _, problem := range []string{"502", "429", "ERR_INCOMPLETE_CHUNKED_ENCODING"} {
		page.Expect(problem)
	}
	submit(page, "First")
	want := "You First | nora"
	for n := range pieces {
		send(t, g.pieces, fmt.Sprintf("(%d) ", n+1))
		want += fmt.Sprintf(" (%d)", n+1)
		page.Until("the piece is shown", shown+fmt.Sprintf(`.startsWith(%q)`, want))
	}
	close(g.pieces)
	page.Until("the answer is complete", shown+fmt.Sprintf(` === %q && document.querySelector("#stop").hidden`, want))
	assert.Equal(t, 1, len(w.model.Requests()))
	noProblems(t, page)
}

func TestThePageLeavesASilentConnection(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	w := newWorld(t, held("One is ", "done.", release))
	page := openBehind(t, w.process(t), nil, func(r *http.Response) error {
		if r.Request.Method == http.MethodPost {
			r.Body = &lostBody{ReadCloser: r.Body, ctx: r.Request.Context(), after: "One is", silent: true}
		}
		return nil
	})
	page.Eval(endPatience, new(int))
	submit(page, "First")
	page.Until("the answer has started", shown+`.includes("nora One is")`)
	close(release)
	page.Eval(`(patience(), 1)`, new(int))
	page.Until("the answer is complete",
		shown+` === "You First | nora One is done." && document.querySelector("#stop").hidden`)
	noProblems(t, page)
}

// The page repeats a message whose answer the server has sent, but the page has not received. The message is answered
// once.
func TestThePageLeavesASilentRequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."))
	var sent atomic.Int64
	page := openBehind(t, w.process(t), nil, func(r *http.Response) error {
		if r.Request.Method == http.MethodPost && sent.Add(1) == 1 {
			<-r.Request.Context().Done()
			return r.Request.Context().Err()
		}
		return nil
	})
	page.Eval(endPatience, new(int))
	submit(page, "First")
	pgtest.Until(t, w.pool, 1, `select count(*) from agent_chat_requests where state = 'delivered'`)
	page.Eval(`(patience(), 1)`, new(int))
	page.Shows("The connection broke.")
	page.Click(".interrupted button")
	page.Until("the answer is complete", shown+` === "You First | nora One." && document.querySelector("#stop").hidden`)
	assert.Equal(t, 1, len(w.model.Requests()))
	noProblems(t, page)
}

// detached keeps a request open after its client has gone, like a proxy that does not abort it.
type detached struct{}

func (detached) RoundTrip(r *http.Request) (*http.Response, error) {
	return http.DefaultTransport.RoundTrip(r.WithContext(context.WithoutCancel(r.Context())))
}

// For the server the first connection is still open, so it refuses the repeated message. The refusal names the answer.
func TestThePageAttachesToTheAnswerOfItsFirstRequest(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	w := newWorld(t, held("One is ", "done.", release))
	p := w.process(t)
	var sent atomic.Int64
	var refused atomic.Bool
	page := openBehind(t, p, detached{}, func(r *http.Response) error {
		switch {
		case r.Request.Method == http.MethodPost && sent.Add(1) == 1:
			body := r.Body
			t.Cleanup(func() { body.Close() })
			r.Body = io.NopCloser(io.MultiReader(io.LimitReader(body, 5), iotest.ErrReader(io.ErrUnexpectedEOF)))
		case r.StatusCode == http.StatusConflict:
			refused.Store(true)
		}
		return nil
	})
	page.Expect("ERR_INCOMPLETE_CHUNKED_ENCODING")
	page.Expect("409")
	submit(page, "First")
	page.Until("the page offers another attempt", `document.querySelector(".interrupted button")`)
	page.Click(".interrupted button")
	page.Until("the answer has started", shown+`.includes("nora One is")`)
	close(release)
	page.Until("the answer is complete", shown+` === "You First | nora One is done." && document.querySelector("#stop").hidden`)
	assert.True(t, refused.Load(), "the server did not refuse the repeated message")
	assert.Equal(t, 1, len(w.model.Requests()))
	noProblems(t, page)
}

// A proxy reports an error for a message that the server has accepted.
func TestThePageRepeatsAMessageAfterAProxyErrorOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Two."))
	var sent atomic.Int64
	page := openBehind(t, w.process(t), nil, func(r *http.Response) error {
		if r.Request.Method == http.MethodPost && sent.Add(1) == 1 {
			err := r.Body.Close()
			r.StatusCode, r.Header, r.Body = http.StatusBadGateway, http.Header{}, http.NoBody
			return err
		}
		return nil
	})
	page.Expect("502")
	page.Expect("409") // if the first answer is not complete yet
	submit(page, "First")
	page.Shows("The server answers 502.")
	page.Click(".interrupted button")
	page.Until("the answer is complete", shown+` === "You First | nora One." && document.querySelector("#stop").hidden`)
	assert.Equal(t, 1, pgtest.Value[int](t, w.pool, `select count(*)::int from agent_executions where flow = 'chat'`))
	noProblems(t, page)
}

func TestThePageAsksForAnotherKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Yes."))
	p := w.process(t)
	page := browser.Open(t, browser.Look{})
	page.Expect("401")
	page.Go(site(t, p, nil, nil) + "/chat#key=old")
	page.Shows("This key is not valid, or no longer.")
	page.Type("#key", "site")
	page.Click("#login button")
	page.Until("the page is open", `!document.querySelector("#conversation").hidden`)
	page.Eval(`(sessionStorage.setItem("key", "old"), 1)`, new(int)) // its access was revoked
	submit(page, "Are you there?")
	page.Until("the key is asked for", `!document.querySelector("#login").hidden`)
	page.Type("#key", "site")
	page.Click("#login button")
	page.Until("the message waits", `document.querySelector("#message").value === "Are you there?"`)
	page.Click("#send")
	page.Until("it is answered", shown+` === "You Are you there? | nora Yes."`)
	noProblems(t, page)
}

// The page does not repeat a message whose answer was lost: the turn continued without the page.
func TestThePageFindsAnAnswerAgainAfterALongOutage(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	w := newWorld(t, held("One is ", "done.", release))
	var connected atomic.Bool
	page := openBehind(t, w.process(t), nil, func(r *http.Response) error {
		switch {
		case r.Request.Method == http.MethodPost:
			r.Body = &lostBody{ReadCloser: r.Body, after: "One is"}
		case !connected.Load() && strings.HasPrefix(r.Request.URL.Path, "/v1/chat/completions/"):
			return io.ErrUnexpectedEOF
		}
		return nil
	})
	page.Eval(noPause, new(int))
	page.Expect("ERR_")
	submit(page, "First")
	page.Until("the page gives up", `document.querySelector("#stop").hidden &&
		document.querySelector("#status").textContent === "The connection broke."`)
	connected.Store(true)
	close(release)
	page.Click(".interrupted button")
	page.Until("the answer is complete", shown+` === "You First | nora One is done." &&
		document.querySelector("#stop").hidden && document.querySelector("#status").textContent === ""`)
	assert.Equal(t, 1, len(w.model.Requests()))
	noProblems(t, page)
}

func TestThePageLeavesNoEmptyAnswerWhenItTriesAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."))
	page := openPage(t, w.process(t), browser.Look{})
	page.Expect("ERR_INTERNET_DISCONNECTED")
	page.Offline(true)
	submit(page, "First")
	page.Shows("The server cannot be reached.")
	page.Offline(false)
	page.Until("the error is gone", `document.querySelector("#status").textContent === ""`)
	page.Click(".interrupted button")
	page.Until("the answer is complete", shown+` === "You First | nora One." && document.querySelector("#stop").hidden`)
	noProblems(t, page)
}

func TestThePageNamesAnAnswerThatCameBeforeTheAgents(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."))
	release := make(chan struct{})
	page := openBehind(t, w.process(t), nil, func(r *http.Response) error {
		if r.Request.URL.Path == "/v1/models" {
			<-release
		}
		return nil
	})
	list := sync.OnceFunc(func() { close(release) })
	t.Cleanup(list)
	submit(page, "First")
	page.Until("the answer has no name yet", shown+` === "You First | Agent One."`)
	list()
	page.Until("the answer has its name", shown+` === "You First | nora One."`)
	noProblems(t, page)
}

func TestThePageLoadsEarlierMessages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t)
	page := openPage(t, p, browser.Look{})
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Hello.") })
	submit(page, "Hi")
	page.Until("the answer is shown", shown+`.endsWith("nora Hello.")`)
	pgtest.Until(t, w.pool, 1, `select count(*) from agent_executions where status = 'completed'`) // and stored
	thread := pgtest.Value[string](t, w.pool, `select id from agent_threads`)
	pgtest.Exec(t, w.pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, channel, trace_id, status)
		select $1, n, n, case n % 2 when 1 then 'user' else 'assistant' end, 'message ' || n, 'chat', '', case n % 2
		  when 1 then 'received' else 'sent' end
		  from generate_series(3, 60) n`, thread)
	pgtest.Exec(t, w.pool, `update agent_threads set next_seq = 61 where id = $1`, thread)
	page.Reload()
	page.Until("the latest messages are shown", `document.querySelectorAll(".message").length === 30 && `+shown+
		`.endsWith("nora message 60")`)
	page.Eval(`(window.first = document.querySelector(".message"), 1)`, new(int))
	page.Click("#earlier")
	page.Until("all messages are shown",
		`document.querySelectorAll(".message").length === 60 && document.querySelector("#earlier").hidden && `+
			shown+`.startsWith("You Hi | nora Hello. | You message 3")`)
	page.Until("the message that was the first is in view", `(() => {
		const at = first.getBoundingClientRect(), view = document.querySelector("#scroller").getBoundingClientRect();
		return at.top > view.top - 2 && at.bottom < view.bottom;
	})()`)
	noProblems(t, page)
}

func TestThePageStopsAnAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, held("It goes on", " and on.", make(chan struct{})), modeltest.Text("Fine."))
	page := openPage(t, w.process(t), browser.Look{})
	submit(page, "Talk")
	page.Until("the answer has started", shown+`.includes("nora It goes on")`)
	page.Click("#stop")
	page.Until("the answer is stopped", shown+
		`.endsWith("nora It goes on Stopped.") && !document.querySelector("#send").hidden`)
	assert.Equal(t, "cancelled", pgtest.Value[string](t, w.pool,
		`select status from agent_executions where flow = 'chat'`))
	submit(page, "Enough?")
	page.Until("the next message is answered", shown+`.endsWith("nora Fine.")`)
	page.Reload()
	page.Until("the history has the stopped answer", shown+
		` === "You Talk | nora It goes on Stopped. | You Enough? | nora Fine."`)
	noProblems(t, page)
}

func TestThePageStopsAStalledUpload(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stalled := make(chan struct{})
	page := openBehind(t, w.process(t), nil, func(r *http.Response) error {
		if r.Request.URL.Path == "/v1/files" {
			close(stalled)
			<-r.Request.Context().Done()
			return r.Request.Context().Err()
		}
		return nil
	})
	page.Eval(`(setFiles([new File(["id"], "orders.csv", { type: "text/csv" })]), 1)`, new(int))
	submit(page, "How many?")
	<-stalled
	page.Click("#stop")
	page.Until("the message is in the composer", shown+` === "" && !document.querySelector("#send").hidden &&
		document.querySelector("#message").value === "How many?" &&
		document.querySelector("#attachments").textContent.includes("orders.csv")`)
	noProblems(t, page)
}

// The first message is refused after the page has begun another conversation.
func TestThePageForgetsAnAnswerOfAnEarlierConversation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Yes.") })
	var sent atomic.Int64
	started, refuse, refused := make(chan struct{}), make(chan struct{}), make(chan struct{})
	page := openBehind(t, w.process(t), nil, func(r *http.Response) error {
		if r.Request.Method == http.MethodPost && sent.Add(1) == 1 {
			close(started)
			<-refuse
			defer close(refused)
			r.StatusCode, r.Header, r.Body = http.StatusNotFound, http.Header{}, http.NoBody
		}
		return nil
	})
	submit(page, "First")
	<-started
	page.Click("#new")
	submit(page, "Second")
	page.Until("the second message is answered", shown+` === "You Second | nora Yes."`)
	close(refuse)
	<-refused
	page.Until("the first request has ended", `performance.getEntriesByType("resource")
		.filter((e) => e.name.endsWith("/v1/chat/completions")).length === 2`)
	submit(page, "Third")
	page.Until("the third message is answered", shown+` === "You Second | nora Yes. | You Third | nora Yes."`)
	assert.Equal(t, 2, pgtest.Value[int](t, w.pool, `select count(*)::int from agent_threads`))
	noProblems(t, page)
}

func TestThePageOffersToTryAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	failing := true
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		if failing {
			return modeltest.Status(http.StatusBadRequest, 0)
		}
		return modeltest.Text("Now it works.")
	})
	page := openPage(t, w.process(t), browser.Look{})
	submit(page, "Hello")
	page.Until("the failure is shown", shown+`.includes("Try again")`)
	failing = false
	page.Click(".message .interrupted button")
	page.Until("the answer is shown", shown+`.endsWith("nora Now it works.")`)
}

// A rejected message returns to the input, where the visitor can change it.
func TestThePageGivesBackWhatItMayNotSend(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Fine."))
	page := openPage(t, w.process(t), browser.Look{})
	page.Eval(`document.querySelector("#message").value = "long ".repeat(7000).trim(); 1`, new(int))
	page.Click("#send")
	page.Shows("A message has at most 32768 bytes.")
	page.Click(".message .interrupted button")
	page.Until("the message is in the composer", shown+
		` === "" && document.querySelector("#message").value === "long ".repeat(7000).trim()`)
	page.Eval(`document.querySelector("#message").value = ""; 1`, new(int))
	submit(page, "Short")
	page.Until("the shorter one is answered", shown+` === "You Short | nora Fine."`)
	page.Expect("400")
	noProblems(t, page)
}

func TestThePageShowsToolsAndApprovals(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("look_up", `{}`), modeltest.Text("It is sunny."),
		modeltest.ToolCall("refund", `{}`), modeltest.Text("Refunded."))
	called, release := make(chan struct{}, 1), make(chan struct{})
	w.put(t, skills.Definition{Name: "look_up", Scope: skills.ScopeExternal, Idempotent: true})
	w.builtins["look_up"] = func(ctx context.Context, _ skills.Call) (any, error) {
		called <- struct{}{}
		select {
		case <-release:
		case <-ctx.Done():
		}
		return "sunny", nil
	}
	page := openPage(t, w.process(t), browser.Look{Still: true})
	submit(page, "Weather?")
	<-called
	page.Until("the tool is shown", shown+`.endsWith("Using look up …")`)
	noProblems(t, page)
	close(release)
	page.Until("the answer is shown", shown+`.endsWith("nora It is sunny.")`)
	submit(page, "Refund me")
	page.Until("the approval is shown", shown+`.endsWith("Waiting for an approval …")`)
}

// The server ends a stream that waits too long for an approval.
func TestThePageShowsAnAnswerAfterALateApproval(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("refund", `{}`), modeltest.Text("Refunded."))
	p := w.process(t, func(c *chat.Chat) { c.ApprovalWait = 50 * time.Millisecond })
	page := openPage(t, p, browser.Look{})
	submit(page, "Refund me")
	page.Shows("The answer will come into this conversation when that is done.")
	page.Until("one can write meanwhile, or stop it",
		`!document.querySelector("#stop").hidden && !document.querySelector("#send").hidden`)
	asked, err := approvals.Pending(t.Context(), w.pool, 10)
	require.Truef(t, err == nil && len(asked) == 1, "%v, %v", asked, err)
	_, err = approvals.Decide(t.Context(), w.pool, asked[0].ID, true, "admin", "")
	require.NoError(t, err)
	page.Until("the answer is shown", shown+` === "You Refund me | nora Refunded." && document.querySelector("#stop").hidden`)
	noProblems(t, page)
}

// The script runs before the site has sent the element.
func TestASiteEmbedsThePageInAnElementThatComesLater(t *testing.T) {
	t.Parallel()
	embedded, ran := "", make(chan struct{})
	hasRun := sync.OnceFunc(func() { close(ran) })
	host := testkit.Serve(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/ran" {
			hasRun()
			return
		}
		rw.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(rw, `<!doctype html><html lang="en"><title>Shop</title><main><h1>Shop</h1>
			<script src="%s/chat/embed.js" data-key="site" data-target="#help" async onload="fetch('/ran')"></script>`, embedded)
		rw.(http.Flusher).Flush()
		select {
		case <-ran:
		case <-r.Context().Done():
		}
		fmt.Fprint(rw, `<div id="help"></div></main>`)
	}))
	embedded = site(t, newWorld(t).process(t, func(c *chat.Chat) { c.EmbedOrigins = []string{host} }), nil, nil)
	page := browser.Open(t, browser.Look{})
	page.Go(host)
	page.Until("the frame is in its place", `document.querySelector("#help > div")?.shadowRoot.querySelector(".inline iframe")`)
}

func TestASiteEmbedsThePage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Hello, visitor."))
	host := testkit.Serve(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(rw, `<!doctype html><html lang="en"><title>Shop</title><main><h1>Shop</h1><div id="help"></div></main>
			<script src="%s/chat/embed.js" data-key="site" data-accent="%s" %s></script>`,
			r.URL.Query().Get("at"), cmp.Or(r.URL.Query().Get("accent"), "#0a7d3c"), r.URL.Query().Get("with"))
	}))
	embedded := site(t, w.process(t, func(c *chat.Chat) { c.EmbedOrigins = []string{host} }), nil, nil)
	page := browser.Open(t, browser.Look{})
	page.Go(host + "?at=" + embedded)
	const inRoot = `[...document.querySelectorAll("div")].find(e => e.shadowRoot)?.shadowRoot`
	page.Until("the button is there", inRoot+`?.querySelector("button")?.textContent === "Chat"`)
	page.Until("its text is light", `getComputedStyle(`+inRoot+`.querySelector("button")).color === "rgb(255, 255, 255)"`)
	page.Eval(`(`+inRoot+`.querySelector("button").click(), 1)`, new(int))
	page.Until("the page in the frame reports its height", `parseInt(`+inRoot+
		`.querySelector("div").style.getPropertyValue("--height")) > 100`)
	page.Go(host + "?at=" + embedded + "&with=" + url.QueryEscape(`data-target="#help"`))
	page.Until("the frame is in its place",
		`document.querySelector("#help > div")?.shadowRoot.querySelector(".inline iframe").clientHeight >= 300`)
	page.Go(host + "?at=" + embedded + "&accent=yellow")
	page.Until("the text of a light button is dark",
		inRoot+`?.querySelector("button") &&
			getComputedStyle(`+inRoot+`.querySelector("button")).color === "rgb(0, 0, 0)"`)
	for origins, want := range map[string]string{host: "frame-ancestors " + host, "": "frame-ancestors 'none'"} {
		c := &chat.Chat{}
		if origins != "" {
			c.EmbedOrigins = []string{origins}
		}
		rec := httptest.NewRecorder()
		c.PageHandler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/chat", nil))
		got := rec.Header().Get("Content-Security-Policy")
		assert.Truef(t, strings.HasSuffix(got, want), "policy %q, want %q", got, want)
	}
}

func TestThePageIsCompressedAndCached(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	mux.Handle("GET /chat", (&chat.Chat{}).PageHandler())
	mux.Handle("GET /chat/{file}", (&chat.Chat{}).PageHandler())
	get := func(path string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodGet, path, nil)
		r.Header.Set("Accept-Encoding", "gzip")
		rec := httptest.NewRecorder()
		mux.ServeHTTP(rec, r)
		return rec
	}
	index := httptest.NewRecorder()
	mux.ServeHTTP(index, httptest.NewRequest(http.MethodGet, "/chat", nil))
	total := get("/chat").Body.Len()
	for ref := range strings.SplitSeq(index.Body.String(), `"`) {
		if !strings.HasPrefix(ref, "/chat/") {
			continue
		}
		got := get(ref)
		assert.Truef(t, got.Code == http.StatusOK &&
			(strings.HasSuffix(path.Ext(strings.Split(ref, "?")[0]), "svg") || got.Header().Get("Content-Encoding") == "gzip") &&
			strings.Contains(got.Header().Get("Cache-Control"), "immutable"), "%s: %d %v", ref, got.Code, got.Header())
		total += got.Body.Len()
	}
	assert.Truef(t, total >= 20_000 && total <= 80_000, "the page transfers %d bytes", total)
	assert.Equal(t, "no-cache", get("/chat/chat.js?v=old").Header().Get("Cache-Control"))
}
