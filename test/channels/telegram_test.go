package channels_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/channels/telegram/telegramtest"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// echoModel answers each message with its last line.
func echoModel(t *testing.T) *modeltest.Server {
	t.Helper()
	model := modeltest.New(t)
	model.Handle(func(_ int, r openai.ChatCompletionRequest) modeltest.Reply {
		text := modeltest.Said(r.Messages[len(r.Messages)-1])
		return modeltest.Text("You said **" + text[strings.LastIndex(text, "\n")+1:] + "**.")
	})
	return model
}

// A stranger gets a pairing code. An admin confirms it. Then the conversation is a thread with answers.
func TestTelegramSenderIsPaired(t *testing.T) {
	t.Parallel()
	bot := telegramtest.New(t)
	w := newTestEnv(t, echoModel(t), joinYAML(bot.URL(), ""))
	w.serve()
	bot.Say(77, 7, "Mara", "hello?")
	w.waitUntil("the code", func() bool { return len(bot.Sent(77)) == 1 })
	text := bot.Sent(77)[0].Text
	_, rest, _ := strings.Cut(text, "<code>")
	code, _, _ := strings.Cut(rest, "</code>")
	require.Equal(t, 8, len(code), text)
	assert.Contains(t, w.run("channels", "pairings"), "Mara")
	assert.Contains(t, w.run("channels", "pair", strings.ToLower(code)), "Mara")
	bot.Say(77, 7, "Mara", "is <b>this</b> & that on?")
	w.waitUntil("the answer", func() bool { return len(bot.Sent(77)) == 2 })
	assert.Equal(t, "You said <b>is &lt;b&gt;this&lt;/b&gt; &amp; that on?</b>.", bot.Sent(77)[1].Text)
	w.waitUntil("the state", func() bool {
		return value[string](w, `select string_agg(status, ' ' order by id) from agent_channel_messages`) == "ignored done"
	})
	listed := w.run("channels", "ls")
	assert.Contains(t, listed, "connected")
	t.Log("\n" + listed)
	assert.True(t, !strings.Contains(w.run("channels", "show", "support"), "secret-of-the-bot"), "the token is shown")
}

// An open channel answers in the order of each conversation, splits long answers and shows them while they are written.
func TestTelegramAnswerIsStreamedAndSplit(t *testing.T) {
	t.Parallel()
	bot := telegramtest.New(t)
	model := modeltest.New(t)
	long := strings.Repeat("A sentence of some length that fills the message. ", 30)
	answer := long + "\n\n```go\n" + strings.Repeat("fmt.Println(`<&>`)\n", 200) + "```\n\n" + long + "\n\nThe end."
	model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.Text(answer).Slowly(20 * time.Millisecond)
	})
	w := newTestEnv(t, model, joinYAML(bot.URL(), "pairing: open"))
	w.serve()
	bot.Say(5, 5, "Ada", "tell me a lot")
	w.waitUntil("a draft", func() bool { return len(bot.Sent(5)) == 1 })
	w.waitUntil("the answer", func() bool {
		sent := bot.Sent(5)
		return strings.Contains(sent[len(sent)-1].Text, "The end.")
	})
	sent := bot.Sent(5)
	if len(sent) < 2 || sent[0].Edits == 0 || bot.Typed() == 0 {
		t.Errorf("%d messages, the first edited %d times, typed %d times", len(sent), sent[0].Edits, bot.Typed())
	}
	n := 0
	for _, m := range sent {
		n += strings.Count(m.Text, "fmt.Println(`&lt;&amp;&gt;`)")
	}
	assert.Equal(t, 200, n)
}

// Messages come many times, in any order, over kills of the process, with a third of the sends failing. Each is
// answered once, in the order of its conversation. Uncertain sends are counted.
func TestTelegramIsAnsweredOnceDespiteFaults(t *testing.T) {
	t.Parallel()
	people, each := bySize(20, 50), bySize(10, 20) // and nearly as many duplicates as people
	bot := telegramtest.New(t)
	bot.Shuffle()
	n := 0
	bot.Fail(func(method string, _ map[string]any) telegramtest.Fault {
		if method != "sendMessage" {
			return telegramtest.None
		}
		n++
		switch { // a third
		case n%3 > 0:
			return telegramtest.None
		case n%45 == 0: // the channel pauses for a second
			return telegramtest.Slow
		case n%2 == 0:
			return telegramtest.Lost
		}
		return telegramtest.Broken
	})
	w := newTestEnv(t, echoModel(t), joinYAML(bot.URL(), "pairing: open"),
		"AGENT_WORKER_LEASE="+lease(), "AGENT_WORKERS=30")
	p, kills := w.serve(), 0
	for i := range each {
		for person := range people {
			bot.Say(int64(1000+person), int64(1000+person), "P", fmt.Sprintf("%d", i))
		}
		bot.Repeat(people * 2 / 3)
		if i%3 == 0 && i > 0 && i < each-1 {
			w.waitAnswered(i * people * 2 / 3) // after 5 kills the engine gives up a turn in a queue
			p = w.kill(p)
			kills++
		}
	}
	lost := w.waitSettled(people * each)
	answered := 0
	for person := range people {
		last := -1
		for _, m := range bot.Sent(int64(1000 + person)) {
			var i int
			_, err := fmt.Sscanf(m.Text, "You said <b>%d</b>.", &i)
			require.NoError(t, err, m.Text)
			assert.Truef(t, i > last, "person %d got %d after %d", person, i, last)
			last = i
			answered++
		}
	}
	assert.Truef(t, answered+lost >= people*each && answered <= people*each && lost != 0,
		"%d answered, %d maybe sent", answered, lost)
	assert.Equal(t, people*each, value[int](w, `select count(*) from agent_messages where role = 'user'`))
	t.Logf("%d messages, %d kills: %d answered, %d maybe sent", people*each, kills, answered, lost)
}

// A turn that has lost too many workers sends no answer. The person gets one notice, and the conversation continues.
func TestLostTurnIsAnsweredByNotice(t *testing.T) {
	t.Parallel()
	bot := telegramtest.New(t)
	model := modeltest.New(t)
	model.Handle(func(_ int, r openai.ChatCompletionRequest) modeltest.Reply {
		if text := modeltest.Said(r.Messages[len(r.Messages)-1]); !strings.HasSuffix(text, "again") {
			return modeltest.Text("too late").Slowly(time.Minute)
		}
		return modeltest.Text("Here I am.")
	})
	w := newTestEnv(t, model, joinYAML(bot.URL(), "pairing: open"))
	w.serve()
	bot.Say(5, 5, "Ada", "hello?")
	w.waitUntil("the turn", func() bool {
		return value[int](w, `select count(*) from agent_executions where status = 'running' and thread_id is not null`) == 1
	})
	_, err := w.pool.Exec(t.Context(), `
		update agent_executions set status = 'failed', claim = claim + 1, error_message = 'given up after 5 workers'
		 where status = 'running' and thread_id is not null`) // what the sweep writes
	require.NoError(t, err)
	w.waitUntil("the notice", func() bool { return len(bot.Sent(5)) == 1 })
	bot.Say(5, 5, "Ada", "again")
	w.waitUntil("the answer", func() bool { return len(bot.Sent(5)) == 2 })
	assert.Equal(t, channels.FailedNotice, bot.Sent(5)[0].Text)
	assert.Equal(t, "Here I am.", bot.Sent(5)[1].Text)
}
