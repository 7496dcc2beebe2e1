package chat_test

import (
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/threads"
)

// converse fills a thread with turns up to a number, as they would be after as many answers.
func converse(t *testing.T, db postgres.DB, thread string, upTo int) {
	t.Helper()
	if _, _, err := threads.Ensure(t.Context(), db, threads.Thread{ID: thread, Channel: "chat", Agent: chat.Agent, Owner: "site", Participant: "x"}); err != nil {
		t.Fatal(err)
	}
	pgtest.Exec(t, db, `
		insert into agent_messages (thread_id, seq, turn, role, content, status, tokens)
		select @thread, n, n - (n + 1) % 2, case n % 2 when 1 then 'user' else 'assistant' end,
		       'what was said at place ' || n || ' of this long conversation', 'sent', 16
		  from generate_series((select next_seq from agent_threads where id = @thread), 2 * @turns::int) n`,
		postgres.Strict{"thread": thread, "turns": upTo})
	pgtest.Exec(t, db, `update agent_threads set next_seq = 2 * @turns::int + 1 where id = @thread`, postgres.Strict{"thread": thread, "turns": upTo})
}

// TestALongThreadCostsTheSamePerTurn measures what the model is sent in turn 50, 500 and 1000 of a thread.
func TestALongThreadCostsTheSamePerTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		for _, m := range req.Messages {
			if strings.Contains(m.Content, "now") {
				return modeltest.Text("Now this.")
			}
		}
		return modeltest.Text("They spoke at length; the user's name is Ada.")
	})
	p := w.process(t, func(c *chat.Chat) { c.History = 1000 })
	sizes := map[int]int{}
	for _, turn := range []int{50, 500, 1000} {
		converse(t, w.pool, "long", turn-1)
		// Turns that came by themselves would each have moved the summary; here it catches up first.
		before := int64(-1)
		for {
			p.answerTo(t, "long", "say it now")
			pgtest.Eventually(t, patience, func() bool {
				return pgtest.Value[bool](t, w.pool, `select coalesce(bool_and(completed_at is not null), true) from agent_executions`)
			}, "the summary is made")
			through := pgtest.Value[int64](t, w.pool, `select summary_through from agent_threads where id = 'long'`)
			if through == before {
				break
			}
			before = through
		}
		p.answerTo(t, "long", "say it now, please")
		requests := w.model.Requests()
		for _, r := range requests {
			if strings.Contains(r.Body, "say it now, please") {
				sizes[turn] = len(r.Body)
				if !strings.Contains(r.Body, "name is Ada") {
					t.Errorf("turn %d: the summary is not in the request", turn)
				}
			}
		}
	}
	if sizes[50] == 0 || sizes[1000] > sizes[50]*3/2 || sizes[1000] > 4*1500+4000 {
		t.Errorf("bytes sent by turn: %v", sizes)
	}
	t.Logf("bytes sent by turn: %v", sizes)
	kept := pgtest.Value[int](t, w.pool, `select max(pg_column_size(output)) from agent_checkpoints where step like 'remember%'`)
	if kept > 3000 {
		t.Errorf("a turn keeps %d bytes of what was said before", kept)
	}
}

func TestASummaryThatFailsHarmsNobody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		if strings.Contains(req.Messages[len(req.Messages)-1].Content, "hello") {
			return modeltest.Text("Hi.")
		}
		return modeltest.Refusal(400, "invalid_request_error", "no", "no", 0)
	})
	p := w.process(t, func(c *chat.Chat) { c.History = 1000 })
	converse(t, w.pool, "sad", 100)
	for range 2 {
		if got := p.answerTo(t, "sad", "hello"); got != "Hi." {
			t.Errorf("answer %q", got)
		}
	}
}
