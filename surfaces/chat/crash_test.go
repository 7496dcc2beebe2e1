package chat_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// loseAt ends the lease of the turn's worker in the transaction of the k-th durable write to the table, after the fence
// of that write.
func loseAt(t *testing.T, db postgres.DB, table string, k int) {
	t.Helper()
	pgtest.Exec(t, db, `create sequence test_writes`) // it also counts writes that roll back
	pgtest.Exec(t, db, fmt.Sprintf(`
		create function test_lose() returns trigger language plpgsql as $$
		begin
		  if nextval('test_writes') = %d then
		    update agent_workers set expires_at = clock_timestamp() - interval '1 second'
		     where id in (select claimed_by from agent_executions);
		  end if;
		  return null;
		end $$`, k))
	pgtest.Exec(t, db, fmt.Sprintf(`create trigger test_lose after insert
		on %s for each statement execute function test_lose()`, table))
}

// TestTurnSurvivesLossOfItsProcessAnywhere loses the first process right after the message is stored, and after its
// k-th checkpoint or row of activity, for every k. Another process finishes the turn. The connected client gets the
// answer, and nothing is repeated or lost.
func TestTurnSurvivesLossOfItsProcessAnywhere(t *testing.T) {
	t.Parallel()
	for table, most := range map[string]int{"agent_messages": 1, "agent_checkpoints": 100, "agent_activity": 100} {
		t.Run(table, func(t *testing.T) {
			for k := 1; k <= most; k++ {
				lost := false
				t.Run(fmt.Sprint(k), func(t *testing.T) { lost = surviveLoss(t, table, k) })
				if t.Failed() || !lost {
					assert.True(t, k >= 2, "nothing was lost")
					return
				}
			}
		})
	}
}

// surviveLoss loses the process at the k-th write, and reports whether there was one.
func surviveLoss(t *testing.T, table string, k int) bool {
	t.Helper()
	w := newWorld(t)
	script := []modeltest.Reply{
		modeltest.Text("Let me look.").AndCall("opening", `{}`), modeltest.ToolCall("weather", `{}`),
		modeltest.Text("Nine, and it is sunny."),
	}
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		_, answers := modeltest.Turn(req)
		return script[answers]
	})
	first, _ := w.silent(t)
	loseAt(t, w.pool, table, k)
	var group errgroup.Group
	var answer string
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Timeout)
	defer cancel()
	group.Go(func() error {
		got, err := first.client(inThread("s")...).CreateChatCompletion(ctx, says("When?"))
		if err == nil {
			answer = got.Choices[0].Message.Content
		}
		return err
	})
	pgtest.Until(t, w.pool, 1, `select count(*) from agent_executions`)
	w.process(t)
	pgtest.Until(t, w.pool, 1, `select count(*) from agent_executions where status = 'completed'`)
	require.NoError(t, group.Wait())
	lines := w.transcript(t, "s")
	// If the process dies before a tool call is made, the text of the same message may be lost.
	assert.Truef(t, strings.HasSuffix(answer, "Nine, and it is sunny.") &&
		cmp.Equal(lines, []string{"user: When?", "assistant: " + answer}), "answer %q, thread %q", answer, lines)
	keys := map[string]bool{}
	for _, r := range w.model.Requests() {
		keys[r.IdempotencyKey()] = true
	}
	if len(keys) != len(script) || w.called("weather") > 1 {
		t.Errorf("%d different model calls, want %d; weather was called %d times, want at most once", len(keys),
			len(script), w.called("weather"))
	}
	for what, sql := range map[string]string{
		"completed":            `select bool_and(status = 'completed') and count(*) = 1 from agent_executions`,
		"no lane held":         `select count(*) = 0 from agent_locks_live`,
		"nothing left running": `select count(*) = 0 from agent_activity where status = 'running'`,
		"no draft left behind": `select count(*) = 0 from agent_message_drafts`,
	} {
		assert.Truef(t, pgtest.Value[bool](t, w.pool, sql), "not so: %s", what)
	}
	return pgtest.Value[bool](t, w.pool, `select is_called and last_value >= $1 from test_writes`, k)
}

// TestQueuedTurnsKeepTheirOrderThroughLoss loses a process that has three messages of one thread.
func TestQueuedTurnsKeepTheirOrderThroughLoss(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g, held := gated()
	var n atomic.Int32
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		if n.Add(1) == 1 {
			return held // the loss interrupts the first process here
		}
		return modeltest.Text("re " + req.Messages[len(req.Messages)-1].Content)
	})
	first, _ := w.silent(t)
	var group errgroup.Group
	for i := range 3 {
		group.Go(func() error {
			_, err := first.client(inThread("q")...).CreateChatCompletion(t.Context(), says(fmt.Sprintf("m%d", i)))
			return err
		})
		pgtest.Until(t, w.pool, i+1, `select count(*) from agent_messages where role = 'user'`)
	}
	testkit.Receive(t, g.asked)
	pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
	w.process(t)
	pgtest.Until(t, w.pool, 3, `select count(*) from agent_executions where status = 'completed'`)
	close(g.pieces)
	require.NoError(t, group.Wait())
	want := []string{"user: m0", "assistant: re m0", "user: m1", "assistant: re m1", "user: m2", "assistant: re m2"}
	assert.NoDiff(t, want, w.transcript(t, "q"))
}

// The answer, its message and the end of the turn are one transaction. If it fails at the end, it leaves nothing, and
// the next run stores the answer once.
func TestAnswerAndEndOfTurnAreOneTransaction(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Nine."))
	p := w.process(t)
	pgtest.Exec(t, w.pool, `create sequence test_ends`)
	pgtest.Exec(t, w.pool, `create table test_seen (recorded bigint, said bigint)`)
	pgtest.Exec(t, w.pool, `
		create function test_refuse() returns trigger language plpgsql as $$
		begin
		  if nextval('test_ends') = 1 then
		    raise exception 'the first try does not get this far' using errcode = 'serialization_failure';
		  end if;
		  insert into test_seen select (select count(*) from agent_checkpoints where step = 'answer'),
		                               (select count(*) from agent_messages where role = 'assistant');
		  return new;
		end $$`)
	pgtest.Exec(t, w.pool, `create trigger test_refuse before update on agent_executions for each row
	  when (new.status = 'completed') execute function test_refuse()`)
	got, err := p.client(inThread("s")...).CreateChatCompletion(t.Context(), says("When?"))
	require.Truef(t, err == nil && got.Choices[0].Message.Content == "Nine.", "answer %+v, %v", got, err)
	lines := w.transcript(t, "s")
	assert.Truef(t, cmp.Equal(lines, []string{"user: When?", "assistant: Nine."}), "thread %q", lines)
	assert.Equal(t, 1, len(w.model.Requests()))
	if !pgtest.Value[bool](t, w.pool, `select count(*) = 1 and bool_and(recorded = 1 and said = 1) from test_seen`) {
		t.Error("the record and the message of the first try are still there, or those of the second are not")
	}
}
