package chat_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// loseAt ends the lease of the worker that runs the turn in the very transaction of the k-th durable write of a run to the table,
// after the fence of that write.
func loseAt(t *testing.T, db postgres.DB, table string, k int) {
	t.Helper()
	exec(t, db, `create table test_writes (n int)`)
	exec(t, db, fmt.Sprintf(`
		create function test_lose() returns trigger language plpgsql as $$
		begin
		  insert into test_writes values (1);
		  if (select count(*) from test_writes) = %d then
		    update agent_workers set expires_at = clock_timestamp() - interval '1 second'
		     where id in (select claimed_by from agent_executions);
		  end if;
		  return null;
		end $$`, k))
	exec(t, db, fmt.Sprintf(`create trigger test_lose after insert on %s for each statement execute function test_lose()`, table))
}

// TestATurnSurvivesTheLossOfItsProcessAnywhere loses the first process right after the message is stored, and after its
// k-th checkpoint or row of activity, for every k. Another finishes the turn; the client, which is still there, gets
// the answer, and nothing is repeated or lost.
func TestATurnSurvivesTheLossOfItsProcessAnywhere(t *testing.T) {
	t.Parallel()
	for table, most := range map[string]int{"agent_messages": 1, "agent_checkpoints": 100, "agent_activity": 100} {
		t.Run(table, func(t *testing.T) {
			for k := 1; k <= most; k++ {
				lost := false
				t.Run(fmt.Sprint(k), func(t *testing.T) { lost = surviveLoss(t, table, k) })
				if t.Failed() || !lost {
					if k < 2 {
						t.Error("nothing was lost")
					}
					return
				}
			}
		})
	}
}

// surviveLoss reports whether there was a k-th write to lose the process at.
func surviveLoss(t *testing.T, table string, k int) bool {
	t.Helper()
	w := newWorld(t)
	script := []modeltest.Reply{
		modeltest.Text("Let me look.").AndCall("opening", `{}`), modeltest.ToolCall("weather", `{}`), modeltest.Text("Nine, and it is sunny."),
	}
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		answers := 0
		for _, m := range req.Messages {
			if m.Role == openai.ChatMessageRoleAssistant {
				answers++
			}
		}
		return script[answers]
	})
	first, _ := w.silent(t)
	loseAt(t, w.pool, table, k)
	var group errgroup.Group
	var answer string
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	group.Go(func() error {
		got, err := first.client(inThread("s")...).CreateChatCompletion(ctx, says("When?"))
		if err == nil {
			answer = got.Choices[0].Message.Content
		}
		return err
	})
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, w.pool, `select count(*) from agent_executions`) == 1
	}, "the turn begins")
	w.process(t)
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, w.pool, `select count(*) from agent_executions where status = 'completed'`) == 1
	}, "another process ends the turn")
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	lines := w.transcript(t, "s")
	// Words beside a tool call may be gone when the process dies before anybody has made the call.
	if !strings.HasSuffix(answer, "Nine, and it is sunny.") || !cmp.Equal(lines, []string{"user: When?", "assistant: " + answer}) {
		t.Errorf("answer %q, thread %q", answer, lines)
	}
	keys := map[string]bool{}
	for _, r := range w.model.Requests() {
		keys[r.IdempotencyKey()] = true
	}
	if len(keys) != len(script) || w.called("weather") > 1 {
		t.Errorf("%d different model calls, want %d; weather was called %d times, want at most once", len(keys), len(script), w.called("weather"))
	}
	for what, sql := range map[string]string{
		"completed":             `select bool_and(status = 'completed') and count(*) = 1 from agent_executions`,
		"no lane held":          `select count(*) = 0 from agent_locks_live`,
		"nothing left running":  `select count(*) = 0 from agent_activity where status = 'running'`,
		"no sketch left behind": `select count(*) = 0 from agent_message_drafts`,
	} {
		if !value[bool](t, w.pool, sql) {
			t.Errorf("not so: %s", what)
		}
	}
	return value[bool](t, w.pool, `select count(*) >= $1 from test_writes`, k)
}

// TestQueuedTurnsKeepTheirOrderThroughALoss loses a process with three messages of one thread in it.
func TestQueuedTurnsKeepTheirOrderThroughALoss(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g, held := gated()
	var n atomic.Int32
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		if n.Add(1) == 1 {
			return held // the first process is in the middle of this when it is lost
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
		pgtest.Eventually(t, patience, func() bool {
			return value[int](t, w.pool, `select count(*) from agent_messages where role = 'user'`) == i+1
		}, "the message is stored")
	}
	receive(t, g.asked)
	exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
	w.process(t)
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, w.pool, `select count(*) from agent_executions where status = 'completed'`) == 3
	}, "another process answers all")
	close(g.pieces)
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	want := []string{"user: m0", "assistant: re m0", "user: m1", "assistant: re m1", "user: m2", "assistant: re m2"}
	if diff := cmp.Diff(want, w.transcript(t, "q")); diff != "" {
		t.Errorf("thread (-want +got):\n%s", diff)
	}
}

// TestAStreamOfAnAnswerThatIsRecordedIsNotRestarted loses the first process between the answer and the end of the turn.
// What the second one has to say is then all recorded, also the words beside the tool call, and a client that streams
// meanwhile gets it whole.
func TestAStreamOfAnAnswerThatIsRecordedIsNotRestarted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Let me look.").AndCall("weather", `{}`), modeltest.Text("Nine, and it is sunny."))
	first, _ := w.silent(t)
	exec(t, w.pool, `
		create function test_lose() returns trigger language plpgsql as $$
		begin
		  update agent_workers set expires_at = clock_timestamp() - interval '1 second'
		   where exists (select from written where step = 'answer') and id in (select claimed_by from agent_executions);
		  return null;
		end $$`)
	exec(t, w.pool, `create trigger test_lose after insert on agent_checkpoints referencing new table as written
	  for each statement execute function test_lose()`)
	exec(t, w.pool, `
		create function test_wait() returns trigger language plpgsql as $$
		begin
		  if new.claim = 1 then
		    raise exception 'the first process does not get this far' using errcode = 'admin_shutdown';
		  end if;
		  perform pg_advisory_xact_lock(42);
		  return new;
		end $$`)
	exec(t, w.pool, `create trigger test_wait before update on agent_executions for each row
	  when (new.status = 'completed') execute function test_wait()`)
	gate, err := w.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	exec(t, gate, `select pg_advisory_xact_lock(42)`)
	var group errgroup.Group
	group.Go(func() error {
		_, err := first.client(inThread("s")...).CreateChatCompletion(t.Context(), says("When?"))
		return err
	})
	pgtest.Eventually(t, patience, func() bool {
		return value[bool](t, w.pool, `select exists (select from agent_checkpoints where step = 'answer')`)
	}, "the answer is recorded")
	second, keeper := w.silent(t)
	stream := second.attach(t, value[string](t, w.pool, `select id::text from agent_executions`))
	second.run(t, keeper)
	pgtest.Eventually(t, patience, func() bool {
		return value[bool](t, w.pool, `select exists (select from pg_locks where locktype = 'advisory' and objid = 42 and not granted)`)
	}, "the second process is about to end the turn")
	if err := gate.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(stream)
	if text := contentOf(t, string(body)); err != nil || text != "Let me look.\n\nNine, and it is sunny." {
		t.Errorf("streamed: %s, %v", body, err)
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
}

// attach streams a turn: its head has arrived.
func (p *process) attach(t *testing.T, id string) io.Reader {
	t.Helper()
	url := p.url + "/v1/chat/completions/" + chat.CompletionID(id) + "?stream=true"
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer site")
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = response.Body.Close() })
	return response.Body
}
