package chat_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

func TestDoubleTextingRejected(t *testing.T) {
	t.Parallel()
	g, reply := gated()
	w := newWorld(t, reply, modeltest.Text("Second."))
	p := w.process(t, func(c *chat.Chat) { c.DoubleTexting = chat.Reject })
	var group errgroup.Group
	group.Go(func() error {
		_, err := p.client(inThread("d")...).CreateChatCompletion(t.Context(), says("one"))
		return err
	})
	testkit.Receive(t, g.asked)
	r, body := p.post(t, `{"model":"agent","messages":[{"role":"user","content":"two"}]}`, inThread("d")...)
	got := failureOf(t, body)
	assert.Truef(t, r.StatusCode == http.StatusConflict && got.Code == "thread_busy" &&
		r.Header.Get("X-Should-Retry") == "false", "answer %d %s", r.StatusCode, body)
	send(t, g.pieces, "First.")
	close(g.pieces)
	require.NoError(t, group.Wait())
	// No turn is in progress after the answer.
	assert.Equal(t, "Second.", p.answerTo(t, "d", "three"))
	want := []string{"user: one", "assistant: First.", "user: three", "assistant: Second."}
	assert.NoDiff(t, want, w.transcript(t, "d"))
}

func TestDoubleTextingInterrupts(t *testing.T) {
	t.Parallel()
	for name, elsewhere := range map[string]bool{"in one process": false, "by another process": true} {
		t.Run(name, func(t *testing.T) {
			g, reply := gated()
			w := newWorld(t, reply, modeltest.Text("Then tea."))
			interrupt := func(c *chat.Chat) { c.DoubleTexting = chat.Interrupt }
			p := w.process(t, interrupt)
			other := p
			if elsewhere {
				other = w.process(t, interrupt)
			}
			stream, err := p.client(inThread("i")...).CreateChatCompletionStream(t.Context(), says("coffee"))
			require.NoError(t, err)
			testkit.Receive(t, g.asked)
			send(t, g.pieces, "Coffee is")
			for text := ""; text == ""; {
				chunk, err := stream.Recv()
				require.NoError(t, err)
				text = chunk.Choices[0].Delta.Content
			}
			kept := "Coffee is"
			if elsewhere { // the text in another process may be a second old
				send(t, g.pieces, " a drink")
				pgtest.Eventually(t, func() bool {
					select {
					case g.pieces <- ".":
					case <-time.After(100 * time.Millisecond):
					}
					return pgtest.Value[int](t, w.pool, `select count(*) from agent_message_drafts`) == 1
				}, "the text so far is stored")
				kept = pgtest.Value[string](t, w.pool, `select content from agent_message_drafts`)
			}
			assert.Equal(t, "Then tea.", other.answerTo(t, "i", "tea, rather"))
			_, err = streamed(t, stream)
			var failure *openai.APIError
			assert.Truef(t, errors.As(err, &failure) && failure.Code == "interrupted",
				"the interrupted stream ends with %v", err)
			messages := heard(w.model.Requests()[1])
			assert.Truef(t, len(messages) == 3 && strings.HasPrefix(messages[1], "assistant: "+kept) &&
				strings.HasSuffix(messages[1], "\n[interrupted]") && messages[2] == "user: tea, rather",
				"the model heard %q, want the partial answer %q", messages, kept)
			for _, line := range []string{"execution completed", "event emitted", "lane released", "locks released"} {
				id := pgtest.Value[string](t, w.pool, `select id::text from agent_executions where status = 'cancelled'`)
				assert.Equal(t, 1, len(other.log.Lines(`msg="`+line+`"`, "execution_id="+id)), line)
			}
			pgtest.Equal(t, w.pool, "cancelled completed", `select string_agg(status, ' ' order by created_at) from agent_executions`)
		})
	}
}

// A locked turn is cancelled when the locking transaction ends. The next message keeps the text that it had streamed.
func TestInterruptingKeepsWhatLockedTurnHasSaid(t *testing.T) {
	t.Parallel()
	g, reply := gated()
	w := newWorld(t, reply, modeltest.Text("Then tea."))
	p := w.process(t, func(c *chat.Chat) { c.DoubleTexting = chat.Interrupt })
	stream, err := p.client(inThread("i")...).CreateChatCompletionStream(t.Context(), says("coffee"))
	require.NoError(t, err)
	testkit.Receive(t, g.asked)
	send(t, g.pieces, "Coffee is")
	for text := ""; text == ""; {
		chunk, err := stream.Recv()
		require.NoError(t, err)
		text = chunk.Choices[0].Delta.Content
	}
	tx, err := w.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(), `select from agent_executions for no key update`)
	require.NoError(t, err)
	answer := make(chan string, 1)
	go func() { answer <- p.answerTo(t, "i", "tea, rather") }()
	pgtest.Until(t, w.pool, 1, `select count(*) from agent_messages where interrupted and content like 'Coffee is%'`)
	require.NoError(t, tx.Rollback(t.Context()))
	assert.Equal(t, "Then tea.", testkit.Receive(t, answer))
	assert.Equal(t, "cancelled completed", pgtest.Value[string](t, w.pool,
		`select string_agg(status, ' ' order by created_at) from agent_executions`))
	_ = stream.Close()
}

// A cancel and the end of its turn may compete for the thread's lock. The text is stored once, whichever comes first.
func TestLateCancelStoresNoSecondAnswer(t *testing.T) {
	t.Parallel()
	for name, lock := range map[string]string{
		"answer first": `select from agent_threads for no key update`,
		"cancel first": `select pg_advisory_xact_lock(hashtextextended('step ' || id || 'answer', 0)) from agent_executions`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g, reply := gated()
			w := newWorld(t, reply)
			p, _ := w.silent(t) // it does not notice the cancel
			front, recorder := pgtest.Recorded(t, w.pool)
			other, _ := w.silent(t, func(c *chat.Chat) { c.Front = front })
			stream, err := p.client(inThread("i")...).CreateChatCompletionStream(t.Context(), says("coffee"))
			require.NoError(t, err)
			testkit.Receive(t, g.asked)
			pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() + interval '1 hour'`)
			send(t, g.pieces, "Coffee is")
			pgtest.Exec(t, w.pool, `
				insert into agent_message_drafts (execution_id, claim, content, settled)
				select id, claim, 'Coffee is', 0 from agent_executions`)
			tx := pgtest.Begin(t, w.pool)
			pgtest.Exec(t, tx, lock)
			close(g.pieces)
			waiters := `
				select count(*)::int from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`
			pgtest.Until(t, w.pool, 1, waiters)
			id := pgtest.Value[string](t, w.pool, `select id::text from agent_executions`)
			cancelled := make(chan struct{})
			go func() {
				defer close(cancelled)
				other.respond(t, "POST", "/resp_"+id+"/cancel", "{}")
			}()
			pgtest.Eventually(t, func() bool {
				select {
				case <-cancelled:
					return true
				default:
				}
				return pgtest.Value[int](t, w.pool, waiters) == 2 &&
					slices.ContainsFunc(recorder.Queries(), func(q pgx.TraceQueryStartData) bool {
						return strings.Contains(q.SQL, "lock_timeout = 400") // the longest that it waits
					})
			}, "the cancel waits for the thread, or has returned")
			require.NoError(t, tx.Rollback(t.Context()))
			text, err := streamed(t, stream)
			assert.Truef(t, err == nil && text == "Coffee is", "%q, %v", text, err)
			testkit.Receive(t, cancelled)
			lines := w.transcript(t, "i")
			assert.Truef(t, len(lines) == 2 && strings.HasPrefix(lines[1], "assistant: Coffee is"), "%q", lines)
		})
	}
}
