package chat_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	gopenai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// yes is a message that a person may well send twice.
const yes = `{"model":"agent","messages":[{"role":"user","content":"yes"}]}`

const countHeader = "X-Stainless-Retry-Count"

// gaveUp sends a request, and disconnects as soon as the model works on it.
func (p *process) gaveUp(t *testing.T, g *gate, body string, headers ...string) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() {
		defer close(over)
		_, _ = p.sendIn(ctx, body, headers...)
	}()
	testkit.Receive(t, g.asked)
	stop()
	testkit.Receive(t, over)
	pgtest.Until(t, p.pool, 1, `select count(*) from agent_chat_requests where state = 'left'`)
}

// sendIn posts a chat request and returns the body of the response.
func (p *process) sendIn(ctx context.Context, body string, headers ...string) (string, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	r.Header.Set("Authorization", "Bearer site")
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	got, err := io.ReadAll(response.Body)
	if err == nil && strings.Contains(string(got), `"thread_locked"`) { // nothing is stored
		return p.sendIn(ctx, body, headers...)
	}
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d: %s", response.StatusCode, got)
	}
	return string(got), err
}

// turns returns the number of started turns.
func (w *world) turns(t *testing.T) int {
	t.Helper()
	return pgtest.Value[int](t, w.pool, `select count(*) from agent_executions where flow = 'chat'`)
}

// A request repeated after a broken connection gets the turn of the first one.
func TestRequestThatIsSentAgainIsAnsweredOnce(t *testing.T) {
	t.Parallel()
	stream := strings.Replace(yes, "{", `{"stream":true,`, 1)
	for name, c := range map[string]struct {
		body    string
		headers []string // of both
		again   []string
		turns   int
	}{
		"counted, thread":     {yes, inThread("t"), []string{countHeader, "1"}, 1},
		"counted, new":        {yes, nil, []string{countHeader, "1"}, 1},
		"counted, stream":     {stream, nil, []string{countHeader, "1"}, 1},
		"counted, key":        {yes, []string{"Idempotency-Key", "k"}, []string{countHeader, "2"}, 1},
		"uncounted, thread":   {yes, inThread("t"), nil, 1},
		"uncounted, new":      {yes, nil, nil, 1},
		"uncounted, stream":   {stream, inThread("t"), nil, 1},
		"uncounted, released": {stream, nil, nil, 2}, // the first client received the thread's name
		"another key":         {yes, inThread("t"), []string{countHeader, "1", "Authorization", "Bearer shop"}, 2},
		"another thread":      {yes, inThread("t"), []string{countHeader, "1", "X-Thread-Id", "u"}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g, reply := gated()
			w := newWorld(t, reply, modeltest.Text("Another."))
			p := w.process(t)
			p.gaveUp(t, g, c.body, c.headers...)
			var group errgroup.Group
			var got string
			group.Go(func() (err error) {
				got, err = p.sendIn(t.Context(), c.body, append(c.headers, c.again...)...)
				return err
			})
			pgtest.Until(t, w.pool, true, `
					select count(*) = $1 and count(*) filter (where state <> 'left') = 1
					  from agent_chat_requests`, c.turns)
			send(t, g.pieces, "The first.")
			close(g.pieces)
			require.NoError(t, group.Wait())
			if n := w.turns(t); n != c.turns || strings.Contains(got, "Another.") != (n == 2) {
				t.Errorf("%d turns, want %d; the second request got %s", n, c.turns, got)
			}
			if c.turns == 2 {
				pgtest.Until(t, w.pool, 0, `select count(*) from agent_executions where completed_at is null`)
			}
		})
	}
}

// Two equal messages are two turns: one after the other, and at the same time.
func TestWhoSaysYesTwiceIsHeardTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Two."))
	p := w.process(t)
	for _, count := range []string{"", "0"} {
		_, err := p.sendIn(t.Context(), yes, append(inThread("t"), countHeader, count)...)
		require.NoError(t, err)
	}
	want := []string{"user: yes", "assistant: One.", "user: yes", "assistant: Two."}
	assert.NoDiff(t, want, w.transcript(t, "t"))
	// The first attempt of a third yes never arrived. The second answer is too old for the retry to repeat.
	pgtest.Exec(t, w.pool, `update agent_chat_requests set changed_at = changed_at - interval '31 seconds'`)
	w.model.Add(modeltest.Text("Three."))
	got, err := p.sendIn(t.Context(), yes, append(inThread("t"), countHeader, "1")...)
	assert.Truef(t, err == nil && strings.Contains(got, "Three."), "the third yes got %s, %v", got, err)
	// The response was lost. An immediate retry gets the same answer.
	got, err = p.sendIn(t.Context(), yes, append(inThread("t"), countHeader, "2")...)
	assert.Truef(t, err == nil && strings.Contains(got, "Three."), "the retry got %s, %v", got, err)
	// Another yes is refused while the first one is answered, or after it. Its retry does not get the first answer.
	refuse := func(body string) {
		tx, err := w.pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), `select from agent_threads for update`)
		require.NoError(t, err)
		refusal, _ := p.post(t, body, append(inThread("t"), countHeader, "0")...)
		assert.Equal(t, http.StatusServiceUnavailable, refusal.StatusCode)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	retry := func(want string) {
		got, err := p.sendIn(t.Context(), yes, append(inThread("t"), countHeader, "1")...)
		assert.Truef(t, err == nil && strings.Contains(got, want), "the retry got %s, %v", got, err)
	}
	slow, slowReply := gated()
	w.model.Add(slowReply, modeltest.Text("After the refusal."))
	var first errgroup.Group
	first.Go(func() error {
		_, err := p.sendIn(t.Context(), yes, append(inThread("t"), countHeader, "0")...)
		return err
	})
	testkit.Receive(t, slow.asked)
	refuse(yes)
	send(t, slow.pieces, "Slow.")
	close(slow.pieces)
	require.NoError(t, first.Wait())
	pgtest.Until(t, w.pool, 0, `select count(*) from agent_chat_requests where state = 'open'`)
	retry("After the refusal.")
	refuse(strings.Replace(yes, "yes", "no", 1))
	retry("After the refusal.") // the answer was lost, and the refused message was another
	w.model.Add(modeltest.Text("Again."))
	refuse(yes)
	retry("Again.")
	g, reply := gated()
	w.model.Add(reply, modeltest.Text("Five."))
	var group errgroup.Group
	for range 2 {
		group.Go(func() error {
			_, err := p.sendIn(t.Context(), yes, inThread("t")...)
			return err
		})
	}
	pgtest.Eventually(t, func() bool { return w.turns(t) == 8 }, "both are taken")
	send(t, g.pieces, "Four.")
	close(g.pieces)
	assert.NoError(t, group.Wait())
}

// Many concurrent retries, at two processes, are one message.
func TestRetriesAtOnceBeginOneTurn(t *testing.T) {
	t.Parallel()
	g, reply := gated()
	w := newWorld(t, reply)
	processes := []*process{w.process(t), w.process(t)}
	pgtest.Exec(t, w.pool, `
		create table connections (name text);
		create function note_connection() returns trigger language plpgsql as $$
		begin
		  insert into connections values (new.connection);
		  return null;
		end $$;
		create trigger note_connection after insert or update on agent_chat_requests
		  for each row execute function note_connection()`)
	const many = 8
	var group errgroup.Group
	answers := make([]string, many)
	for i := range many {
		group.Go(func() (err error) {
			answers[i], err = processes[i%2].sendIn(t.Context(), yes, append(inThread("t"), countHeader, "1")...)
			return err
		})
	}
	testkit.Receive(t, g.asked)
	pgtest.Until(t, w.pool, many, `select count(distinct name) from connections`)
	send(t, g.pieces, "Once.")
	close(g.pieces)
	require.NoError(t, group.Wait())
	for _, got := range answers {
		assert.Contains(t, got, "Once.")
	}
	diff := cmp.Diff([]string{"user: yes", "assistant: Once."}, w.transcript(t, "t"))
	if diff != "" || w.turns(t) != 1 {
		t.Errorf("%d turns; thread (-want +got):\n%s", w.turns(t), diff)
	}
}

// The client of a killed process sends its request to another one, which finishes the turn.
func TestRetryAfterKilledProcessGetsTurn(t *testing.T) {
	t.Parallel()
	for name, headers := range map[string][]string{
		"uncounted":    inThread("t"),
		"counted":      append(inThread("t"), countHeader, "1"),
		"counted, new": {countHeader, "1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g, reply := gated()
			w := newWorld(t, reply, modeltest.Text("Done."))
			dead, _ := w.silent(t)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			over := make(chan struct{})
			go func() {
				defer close(over)
				first := headers
				if len(first) == 2 && first[0] == countHeader {
					first = nil
				}
				_, _ = dead.sendIn(ctx, yes, append(first[:min(len(first), 2):min(len(first), 2)], countHeader, "0")...)
			}()
			testkit.Receive(t, g.asked)
			pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
			p := w.process(t)
			got, err := p.sendIn(t.Context(), yes, headers...)
			if err != nil || !strings.Contains(got, "Done.") || w.turns(t) != 1 {
				t.Errorf("%d turns; the retry got %s, %v", w.turns(t), got, err)
			}
			stop()
			testkit.Receive(t, over)
		})
	}
}

// retriesTo sends retries to another host, like a load balancer after the end of a process.
type retriesTo string

func (host retriesTo) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Header.Get(countHeader) != "0" {
		r = r.Clone(r.Context())
		r.URL.Host = string(host)
	}
	return http.DefaultTransport.RoundTrip(r)
}

// A process shuts down before the model has answered. The official client sends its request again, and gets the turn
// from another process. The request of a new visitor is not recognised, so its client must not send it again.
func TestRetryAfterShutdownGetsTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g, reply := gated()
	var calls atomic.Int32
	w.model.Handle(func(int, gopenai.ChatCompletionRequest) modeltest.Reply {
		if calls.Add(1) <= 2 {
			return reply
		}
		return modeltest.Text("Done.")
	})
	first, keeper := w.silent(t)
	stop := testkit.Run(t, first.engine.Run, keeper.Run, first.chat.Run)
	second := w.process(t)
	client := first.official("site", option.WithMaxRetries(2), option.WithHeader("X-Thread-Id", "t"),
		option.WithHTTPClient(&http.Client{Transport: retriesTo(strings.TrimPrefix(second.url, "http://"))}))
	var group errgroup.Group
	group.Go(func() error {
		got, err := client.Chat.Completions.New(t.Context(), ask("yes"))
		if err == nil && got.Choices[0].Message.Content != "Done." {
			err = fmt.Errorf("the answer is %s", got.RawJSON())
		}
		return err
	})
	testkit.Receive(t, g.asked)
	group.Go(func() error {
		r, body := first.post(t, yes, "X-Visitor-Token", "new")
		if r.StatusCode != http.StatusServiceUnavailable || r.Header.Get("X-Should-Retry") != "false" {
			return fmt.Errorf("new visitor: %d %v %s", r.StatusCode, r.Header, body)
		}
		return nil
	})
	testkit.Receive(t, g.asked)
	stop()
	assert.NoError(t, group.Wait())
	assert.Equal(t, 2, w.turns(t))
	assert.NoDiff(t, []string{"user: yes", "assistant: Done."}, w.transcript(t, "t"))
	pgtest.Until(t, w.pool, 0, `select count(*) from agent_executions where completed_at is null`)
}

// limited gives a process a daily limit of tokens, in Madrid.
func limited(t *testing.T, tokens int64) func(*chat.Chat) {
	t.Helper()
	madrid, err := time.LoadLocation("Europe/Madrid")
	require.NoError(t, err)
	return func(c *chat.Chat) {
		c.Loop.Limits, c.Loop.Zone = budgets.Limits{Day: budgets.Limit{Tokens: tokens}}, madrid
	}
}

// The stock clients retry a 429 unless a header forbids it.
func TestSpentLimitIsErrorThatSaysWhenItEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, limited(t, 10))
	client := p.official("site", option.WithMaxRetries(2))
	ends := time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 0, 1)
	spent := func(err error) *openai.Error {
		t.Helper()
		var refused *openai.Error
		require.Truef(t, errors.As(err, &refused) && refused.Code == "insufficient_quota" &&
			refused.Type == "insufficient_quota" && strings.Contains(refused.Message, "I can answer again from 20") &&
			strings.Contains(refused.Message, ":00 CE"), "the error is %v", err)
		return refused
	}
	_, err := client.Chat.Completions.New(t.Context(), ask("Hello."))
	refused := spent(err)
	assert.Truef(t, refused.StatusCode == http.StatusTooManyRequests &&
		refused.Response.Header.Get("X-Should-Retry") == "false" && refused.Response.Header.Get("Retry-After") != "",
		"status %d, header %v", refused.StatusCode, refused.Response.Header)
	day := ends.Format("2006-01-02")
	assert.Truef(t, !time.Now().UTC().Before(ends) || strings.Contains(refused.Message, "from "+day+" 0"),
		"%q does not say that the limit ends on %s", refused.Message, day)
	stream := client.Chat.Completions.NewStreaming(t.Context(), ask("Hello?"))
	text := ""
	for stream.Next() {
		if c := stream.Current(); len(c.Choices) > 0 {
			text += c.Choices[0].Delta.Content
		}
	}
	assert.Truef(t, text == "" && stream.Err() != nil && strings.Contains(stream.Err().Error(), "insufficient_quota"),
		"the stream says %q and ends with %v", text, stream.Err())
	assert.Equal(t, 2, pgtest.Value[int](t, w.pool, `select count(*) from agent_messages where role = 'user'`))
	assert.Equal(t, 0, len(w.model.Requests()))
}

// The sentence about the limit is longer than the client's token limit, and is no JSON: neither replaces the error.
func TestSpentLimitIsNotFormatError(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, limited(t, 10))
	r, body := p.post(t, cityAsked+`,"max_tokens":2}`)
	f := failureOf(t, body)
	assert.Equal(t, http.StatusTooManyRequests, r.StatusCode)
	assert.Equal(t, "insufficient_quota", f.Code)
	assert.Contains(t, f.Message, "I can answer again from")
}

// If only calls in progress use up the limit, it has room again soon. The error does not say tomorrow.
func TestLimitThatOthersReserveIsNotSpent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("At nine.").WithUsage(100, 10, 0))
	p := w.process(t, limited(t, 30_000), func(c *chat.Chat) { c.Loop.Limits.MaxWait = 100 * time.Millisecond })
	other := enginetest.ReserveDay(t, w.pool, 30_000, 29_000, 990)
	client := p.official("site")
	_, err := client.Chat.Completions.New(t.Context(), ask("When do you open?"))
	var refused *openai.Error
	require.Truef(t, errors.As(err, &refused) && refused.StatusCode == http.StatusTooManyRequests &&
		strings.Contains(refused.Message, "in a moment") && !strings.Contains(refused.Message, "today"), "%v", err)
	pgtest.Exec(t, w.pool, `select lanekeeper.settle_agent_budget($1, 'model',
		'{"tokens": 100, "usd": 0, "unknown_tokens": 0, "unknown_usd": 0}')`, other)
	_, err = client.Chat.Completions.New(t.Context(), ask("And now?"))
	assert.NoError(t, err)
}

func TestLimitThatIsSpentInMiddleOfAnswerIsSaidInIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Let me see.").AndCall("opening", `{}`).WithUsage(1900, 90, 0))
	p := w.process(t, limited(t, 2000))
	client := p.official("site")
	got, err := client.Chat.Completions.New(t.Context(), ask("When do you open?"))
	require.NoError(t, err)
	text := got.Choices[0].Message.Content
	if !strings.HasPrefix(text, "Let me see.\n\nI have reached my limit for today. I can answer again from 20") {
		t.Errorf("the answer is %q", text)
	}
}

// Limits of tokens and of money have the same message for a visitor.
func TestLimitOfRunIsSaid(t *testing.T) {
	t.Parallel()
	for name, budget := range map[string]reason.Budget{"tokens": {Tokens: 2000}, "money": {CostUSD: 0.0001, Tokens: 1e7}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, modeltest.ToolCall("opening", `{}`).WithUsage(1900, 90, 0))
			p := w.process(t, func(c *chat.Chat) { c.Loop.Budget = budget })
			client := p.official("site")
			got, err := client.Chat.Completions.New(t.Context(), ask("When do you open?"))
			require.NoError(t, err)
			answer := got.Choices[0]
			assert.Equal(t, "I had to stop here: this took more than I may use for one answer.", answer.Message.Content)
			assert.Equal(t, "length", answer.FinishReason)
		})
	}
}
