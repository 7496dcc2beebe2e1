package crash_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// TestStopDuringStreamedAnswer stops a server during a long answer. The client learns that the server shuts down and
// where to read the answer. Another process finishes it. It repeats a model call that did not end within
// AGENT_SHUTDOWN_TIMEOUT.
func TestStopDuringStreamedAnswer(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string]bool{"the model goes on": false, "the model is cut off": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newChatTestEnv(t)
			limit, pause := "3s", 50*time.Millisecond
			if cut {
				limit, pause = "0s", 2*time.Second
			}
			s.delayModel(pause)
			m := message{"th", "weather", true}
			a := s.startServer("", "AGENT_SHUTDOWN_TIMEOUT="+limit)
			heard := make(chan struct{})
			once := sync.OnceFunc(func() { close(heard) })
			var got testkit.Answer
			var asking sync.WaitGroup
			asking.Go(func() {
				got = testkit.Chat(s.messageRequest(a, m), func(text string) {
					if text != "" {
						once()
					}
				})
			})
			<-heard
			a.Signal(syscall.SIGTERM)
			assert.Equal(t, 0, a.Exit())
			asking.Wait()
			assert.Truef(t, got.Code == "shutting_down" && !got.Complete && got.ID != "" && got.Text != "",
				"the client heard %+v, want the beginning of the answer and that the server goes down", got)
			before := s.takeSnapshot()
			open := s.runningCalls()
			assert.Truef(t, len(open) == 0 || cut, "left open: %+v", open)
			s.checkReleased(pgtest.Value[string](s.t, s.db, `select id::text from agent_executions`))
			s.model.Handle(s.chatModelReply)
			b := s.startServer("")
			answer := s.sendUntilAnswered(b, m)
			s.checkThread(b, "th", map[string]testkit.Answer{m.words: answer}, m.words)
			again := s.attachAnswer(b, got.ID, "?stream=true")
			assert.Truef(t, again.Text == answer.Text && again.Complete, "attached again: %+v, want %+v", again, answer)
			s.checkSettled(before)
		})
	}
}

// delayModel delays the first answer of the model.
func (s *testEnv) delayModel(pause time.Duration) {
	words := "Let me look. " + strings.Repeat("It takes a while. ", 10)
	begun := modeltest.Text(words).AndCall("look", `{}`).AndCall("tell", `{}`).Slowly(pause)
	s.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return begun })
}

// TestResumedChatWritesNothing stops a process in the middle of a visitor's turn, until its lease has ended and another
// process has answered. The writes of the woken process are rejected. The answer exists once, and its client gets it.
func TestResumedChatWritesNothing(t *testing.T) {
	t.Parallel()
	for name, stream := range map[string]bool{"streamed": true, "whole": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newChatTestEnv(t)
			held := s.blockSkill("look", 1)
			m := message{"th", "weather", stream}
			a := s.startServer("", "AGENT_WORKER_LEASE=6s")
			var got testkit.Answer
			var asking sync.WaitGroup
			asking.Go(func() { got = s.sendMessage(a, m) })
			held.waitBlocked()
			// The process stores the streamed text while the call runs.
			eventually(t, "the text so far is stored",
				func() bool { return pgtest.Value[int](s.t, s.db, `select count(*) from agent_message_drafts`) == 1 })
			a.Signal(syscall.SIGSTOP)
			before := s.takeSnapshot()
			b := s.startServer("")
			id := pgtest.Value[string](s.t, s.db, `select id::text from agent_executions`)
			s.waitStatus(id, "completed")
			s.checkSettled(before)
			record := s.executionRows(id)
			lines := s.threadLines(b, "th")
			held.release()
			a.Signal(syscall.SIGCONT)
			s.waitRejectedWrite(id, "look")
			asking.Wait()
			assert.Equal(t, record, s.executionRows(id))
			now := s.threadLines(b, "th")
			assert.Truef(t, slices.Equal(now, lines), "the thread is %q, was %q", now, lines)
			answer := s.sendUntilAnswered(b, m)
			s.checkThread(b, "th", map[string]testkit.Answer{m.words: answer}, m.words)
			assert.Truef(t, got.Complete && got.Text == answer.Text,
				"the client of the woken process heard %+v, the answer is %+v", got, answer)
			eventually(t, "the woken process serves", func() bool {
				return s.sendMessage(a, message{"other", "later", false}).Complete
			})
		})
	}
}

// TestKillServerDuringChats has two processes share the visitors. One dies while each of its turns is in the middle of
// a call and a thread has a queued message. The other process answers everyone once.
func TestKillServerDuringChats(t *testing.T) {
	t.Parallel()
	s := newChatTestEnv(t)
	held := s.blockSkill("look", 5)
	a, b := s.startServer("", "PGAPPNAME="+victim), s.startServer("")
	var asking sync.WaitGroup
	var mu sync.Mutex
	all := map[string][]string{}
	ask := func(to *agent, m message) {
		all[m.thread] = append(all[m.thread], m.words)
		asking.Go(func() {
			got := s.sendMessage(to, m)
			if to == a {
				<-a.Ended()
				got = s.sendUntilAnswered(b, m)
			}
			mu.Lock()
			defer mu.Unlock()
			assert.Truef(t, got.Complete && strings.HasSuffix(got.Text, finalReply(m.words)), "in %s: %+v", m.thread, got)
		})
	}
	for i := range 5 {
		ask([]*agent{a, b}[i%2], message{fmt.Sprint("th", i), fmt.Sprint("weather ", i), i < 3})
	}
	for range 5 {
		held.waitBlocked()
	}
	for _, words := range []string{"second", "third"} {
		before := pgtest.Value[int](s.t, s.db, `select count(*) from agent_messages`)
		ask(a, message{"th0", words, true})
		eventually(t, "the message is stored",
			func() bool { return pgtest.Value[int](s.t, s.db, `select count(*) from agent_messages`) > before })
	}
	a.Kill()
	s.waitSessionsEnd()
	before := s.takeSnapshot()
	s.expireLease(a)
	held.release()
	asking.Wait()
	for _, r := range before.rows { // the kill did not affect calls of the other server
		if r.Running > 0 && s.takeSnapshot().rows[r.Key].Unknown == 0 {
			delete(before.rows, r.Key)
			delete(before.skillCalls, r.Key)
		}
	}
	s.checkSettled(before)
	for thread, words := range all {
		s.checkThread(b, thread, nil, words...)
	}
	assert.Equal(t, http.StatusNotFound, s.attachAnswer(b, "chatcmpl-01a1fd1b-0000-7000-8000-000000000000", "").Status)
}

// expireLease ends the lease of one process.
func (s *testEnv) expireLease(a *agent) {
	s.t.Helper()
	pgtest.Exec(s.t, s.db, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'
		where name like '%pid ' || $1`,
		a.pid())
}
