package executions_test

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

func (w *waiter) say(thread, text string) (queued bool) {
	w.t.Helper()
	return value[bool](w.t, w.pool, `select queued from lanekeeper.send_agent_message(@thread, @id, @claim, @text)`,
		postgres.Strict{"thread": thread, "id": w.id, "claim": w.n, "text": text})
}

func hears(t *testing.T, db postgres.DB, thread, text string) {
	t.Helper()
	exec(t, db, `select lanekeeper.receive_agent_message(@thread, @text)`, postgres.Strict{"thread": thread, "text": text})
}

func answer(out *executions.Outcome) string {
	if out == nil {
		return "nothing"
	}
	return string(out.Data)
}

// Only what comes after the question is an answer to it, also when it was said before the wait began.
func TestAnAnswerComesAfterItsQuestion(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	exec(t, pool, `insert into agent_threads (id, channel) values ('t', 'chat')`)
	w := newWaiter(t, pool)
	hears(t, pool, "t", "old")
	w.say("t", "how old are you?")
	if got := w.park("first", "response", "t"); got != nil {
		t.Fatalf("what came before the question answered it: %s", answer(got))
	}
	hears(t, pool, "t", "seven")
	if got := w.goOn("first"); !strings.Contains(answer(got), "seven") {
		t.Errorf("answered with %s", answer(got))
	}
	w.say("t", "and your name?")
	hears(t, pool, "t", "Ana")
	hears(t, pool, "t", "or Eva")
	if got := w.park("second", "response", "t"); !strings.Contains(answer(got), "Ana") {
		t.Errorf("answered with %s", answer(got))
	}
	if got := w.park("third", "response", "t"); !strings.Contains(answer(got), "Eva") { // it asked nothing new
		t.Errorf("answered with %s", answer(got))
	}
}

// A message and a question are written at the same moment: the order of the thread says which came first, whatever their clocks said.
func TestTheOrderOfTheThreadDecidesWhatAnswers(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	exec(t, pool, `insert into agent_threads (id, channel) values ('t', 'chat')`)
	w := newWaiter(t, pool)
	w.say("t", "question")
	hears(t, pool, "t", "answer")
	exec(t, pool, `update agent_events set created_at = created_at - interval '1 second' where key = 't'`)
	if got := w.park("first", "response", "t"); !strings.Contains(answer(got), "answer") {
		t.Errorf("answered with %s", answer(got))
	}
	hears(t, pool, "t", "early")
	exec(t, pool, `update agent_events set created_at = created_at + interval '1 minute' where key = 't'`)
	w.say("t", "question again")
	if got := w.park("second", "response", "t"); got != nil {
		t.Errorf("answered with %s", answer(got))
	}
}

// While a question stands in the queue nothing answers it, and its time does not run.
func TestAQuestionInTheQueueHasTime(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	exec(t, pool, `insert into agent_threads (id, channel) values ('t', 'chat')`)
	first, second := newWaiter(t, pool), newWaiter(t, pool)
	if first.say("t", "one") {
		t.Fatal("the first to speak was queued")
	}
	if !second.say("t", "two") || second.park("wait", "response", "t") != nil {
		t.Fatal("the second to speak was not queued, or answered")
	}
	first.park("wait", "response", "t")
	hears(t, pool, "t", "answer to one")
	if got := first.goOn("wait"); !strings.Contains(answer(got), "answer to one") || second.status() != executions.Waiting {
		t.Fatalf("the first got %s, the second is %s", answer(got), second.status())
	}
	days := func() int {
		return value[int](t, pool, `select round(extract(epoch from waiting_until - clock_timestamp()) / 86400)::int from agent_executions where id = @id`,
			postgres.Strict{"id": second.id})
	}
	if n := days(); n != 30 {
		t.Errorf("its time runs while it is queued: %d days", n)
	}
	exec(t, pool, `select lanekeeper.complete_agent_execution(@id, @claim, 'completed', '', null, null, null)`, postgres.Strict{"id": first.id, "claim": first.n})
	exec(t, pool, `select lanekeeper.flush_agent_thread('t')`)
	if n := days(); n != 1 {
		t.Errorf("it has %d days for the answer, want 1", n)
	}
	hears(t, pool, "t", "answer to two")
	if got := second.goOn("wait"); !strings.Contains(answer(got), "answer to two") {
		t.Errorf("the second got %s", answer(got))
	}
}
