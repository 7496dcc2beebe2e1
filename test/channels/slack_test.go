package channels_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/channels/slack/slacktest"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/principals"
)

// newSlack starts a fake Slack, and a database with an open channel of it.
func newSlack(t *testing.T, model *modeltest.Server, more string, settings ...string) (*slacktest.Server, *testEnv) {
	t.Helper()
	fake := slacktest.New()
	fake.RetryAfter = time.Second
	t.Cleanup(fake.Close)
	return fake, newTestEnv(t, model, fmt.Sprintf(`
kind: channel
name: support
type: slack
pairing: open
secrets: {token: "${SLACK_TOKEN}", app_token: "${SLACK_APP_TOKEN}"}
settings: {base_url: %q}
%s`, fake.URL, more), append(settings, "SLACK_TOKEN="+slacktest.Token, "SLACK_APP_TOKEN="+slacktest.AppToken)...)
}

// answers returns the agent's messages in a thread of a channel.
func answers(fake *slacktest.Server, channel, thread string) (all []slacktest.Message) {
	for _, m := range fake.Messages(channel) {
		if m.BotID != "" && m.ThreadTS == thread {
			all = append(all, m)
		}
	}
	return all
}

// A mention opens a thread, replies there need none, and a direct message is answered outside of threads. A message
// that Slack repeats is answered once.
func TestSlackThreadIsConversation(t *testing.T) {
	t.Parallel()
	fake, w := newSlack(t, echoModel(t), "")
	fake.Twice = true
	w.serve()
	w.waitUntil("the socket", func() bool { return fake.Connected() == 1 })
	root := fake.Say("U1", "C1", "<@"+slacktest.BotUser+"> is <!here> &amp; there on?", "")
	w.waitUntil("the answer", func() bool { return len(answers(fake, "C1", root)) == 1 })
	fake.Say("U1", "C1", "people among themselves", "")
	fake.LoseAcks(2)
	fake.Say("U2", "C1", "and more", root)
	fake.Say("U1", "D1", "hello", "")
	w.waitUntil("more answers", func() bool {
		return len(answers(fake, "C1", root)) == 2 && len(answers(fake, "D1", "")) == 1
	})
	fake.Wait()
	got := answers(fake, "C1", root)
	assert.Equal(t, "You said *is !here &amp; there on?*.", got[0].Text)
	assert.Equal(t, "You said *and more*.", got[1].Text)
	assert.Equal(t, 3, value[int](w, `select count(*) from agent_channel_messages`))
	assert.Equal(t, 2, value[int](w, `select count(*) from agent_threads where owner = 'channel:support'`))
	assert.Equal(t, 3, fake.Calls("chat.postMessage"))
}

// Over kills, lost answers and limits, each message is answered once and in order. The fake reports what arrived, at
// times only when asked again.
func TestSlackIsAnsweredOnceDespiteFaults(t *testing.T) {
	t.Parallel()
	people, each := bySize(4, 15), bySize(4, 20)
	fake, w := newSlack(t, echoModel(t), "", "AGENT_WORKER_LEASE="+lease(), "AGENT_WORKERS=20")
	fake.Twice = true
	if isLong() {
		fake.RetryAfter = 3 * time.Second // like Slack
	}
	fake.Faults(func(method string, call int) slacktest.Fault {
		switch {
		case method == "conversations.history" && call%3 == 1:
			return slacktest.Fault{Status: 503}
		case method != "chat.postMessage":
		case call%9 == 0:
			return slacktest.Fault{RetryAfter: 1}
		case call%9 == 3:
			return slacktest.Fault{LoseAnswer: true}
		case call%9 == 6:
			return slacktest.Fault{Status: 503}
		}
		return slacktest.Fault{}
	})
	p, kills := w.serve(), 0
	w.waitUntil("the socket", func() bool { return fake.Connected() == 1 })
	for i := range each {
		for person := range people {
			fake.Say(fmt.Sprintf("U%d", person), fmt.Sprintf("D%d", person), fmt.Sprint(i), "")
		}
		fake.Wait()
		if i%5 == 3 {
			p = w.kill(p)
			kills++
			w.waitUntil("the socket", func() bool { return fake.Connected() == 1 })
		}
	}
	if got := value[int](w, `select count(*) from agent_channel_messages`); got < people*each {
		t.Fatalf("%d of %d messages came; Slack gave up %d deliveries", got, people*each, fake.GivenUp())
	}
	maybe := w.waitSettled(people * each)
	assert.Truef(t, maybe == 0, "%d messages were maybe sent, though Slack tells", maybe)
	for person := range people {
		var got []string
		for _, m := range answers(fake, fmt.Sprintf("D%d", person), "") {
			got = append(got, m.Text)
		}
		for i := range each {
			if len(got) != each || got[i] != fmt.Sprintf("You said *%d*.", i) {
				t.Errorf("person %d got %q", person, got)
				break
			}
		}
	}
	t.Logf("%d messages, each twice, %d kills: each answered once", people*each, kills)
}

// A call requested in Slack waits for a button. An approver presses it in the channel for reports. No decision comes
// from an account without a principal, a principal without the right, or the requester. Used buttons, expired ones, and
// those with other arguments do not decide either. A pending request follows the conversation for reports.
func TestSlackButtonApprovesCall(t *testing.T) {
	t.Parallel()
	var paid atomic.Int32
	shop := testkit.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		paid.Add(1)
		_, _ = w.Write([]byte(`{"ok": true}`))
	}))
	model := modeltest.New(t)
	model.Handle(func(_ int, r openai.ChatCompletionRequest) modeltest.Reply {
		last := r.Messages[len(r.Messages)-1]
		if last.Role == openai.ChatMessageRoleTool {
			return modeltest.Text("It is paid back.")
		}
		text := modeltest.Said(last)
		return modeltest.ToolCall("refund", `{"order": `+text[strings.LastIndex(text, " ")+1:]+`, "note": "<!channel>"}`)
	})
	fake, w := newSlack(t, model, fmt.Sprintf(`report_to: C0OPS
---
kind: skill
name: refund
description: Pay an order back.
scope: external
trust: approve
approvals: {four_eyes: true}
parameters: {type: object, required: [order], properties: {order: {type: integer}, note: {type: string}}}
handler: http:POST %s/refunds
`, shop))
	for account, p := range map[string]principals.CreateParams{
		"U0ANA": {Name: "ana", Role: principals.Approver}, "U1": {Name: "olga", Role: principals.Approver},
		"U0BEN": {Name: "ben", Role: principals.Viewer},
	} {
		p.Kind = principals.User
		_, err := principals.Create(t.Context(), w.pool, p)
		require.NoError(t, err)
		require.NoError(t, principals.LinkIdentity(t.Context(), w.pool, p.Name, "slack:"+slacktest.Team, account, ""))
	}
	w.serve()
	w.waitUntil("the socket", func() bool { return fake.Connected() == 1 })
	at := "C0OPS"
	awaitRequest := func(order int) (shown slacktest.Message) {
		t.Helper()
		w.waitUntil("the request", func() bool {
			for _, m := range answers(fake, at, "") {
				if strings.Contains(string(m.Blocks), fmt.Sprintf(`\"order\": %d`, order)) {
					shown = m
				}
			}
			return shown.TS != ""
		})
		return shown
	}
	ask := func(user, conversation string, order int) slacktest.Message {
		t.Helper()
		fake.Say(user, conversation, fmt.Sprint("money back for order ", order), "")
		return awaitRequest(order)
	}
	expect := func(want string) {
		t.Helper()
		w.waitUntil(want, func() bool {
			all := answers(fake, at, "")
			return strings.Contains(all[len(all)-1].Text, want)
		})
	}
	shown := ask("U1", "D1", 7)
	assert.Contains(t, string(shown.Blocks), "lt;!channel") // escaped
	click := func(user, label, want string) {
		t.Helper()
		require.NoError(t, fake.Click(user, at, shown.TS, label))
		expect(want)
	}
	click("U9", "Approve", "not linked")
	click("U0BEN", "Approve", "may not decide")
	click("U1", "Approve", "You requested this call")
	assert.Equal(t, 0, int(paid.Load()))
	click("U0ANA", "Approve", "You have approved")
	w.waitUntil("the answer", func() bool {
		all := answers(fake, "D1", "")
		return len(all) > 0 && all[len(all)-1].Text == "It is paid back."
	})
	checkDecision(w, shown)
	fake.ClickAgain(false) // repeats the event
	fake.ClickAgain(true)
	expect("used already")
	w.waitUntil("no buttons", func() bool { return fake.Click("U0ANA", at, shown.TS, "Approve") != nil })
	shown = ask("U2", "D2", 8)
	pgtest.Exec(t, w.pool, `update agent_channel_buttons set arguments_hash = 'of others' where used_at is null`)
	click("U0ANA", "Approve", "arguments have changed")
	shown = ask("U3", "D3", 9)
	pgtest.Exec(t, w.pool, `update agent_channel_buttons set expires_at = now() where used_at is null`)
	click("U0ANA", "Approve", "expired")
	pgtest.Exec(t, w.pool, `update agent_channels set report_to = 'U0ANA'`)
	pgtest.Exec(t, w.pool, `select pg_notify('agent_channels', '')`)
	pgtest.Until(t, w.pool, 4, `
		select count(*) from agent_channel_buttons where conversation = 'U0ANA' and message_ref <> ''`)
	at = "D0ANA" // a message to a user's id is in a conversation with another id
	shown = awaitRequest(8)
	click("U0ANA", "Reject", "You have rejected")
	assert.Equal(t, 1, int(paid.Load()))
	assert.Equal(t, "approved rejected pending", value[string](w, `
		select string_agg(case status when 'consumed' then 'approved' else status end, ' ' order by id) from agent_approvals`))
}

// checkDecision checks that the decision names requester, approver, interface and the message with the button.
func checkDecision(w *testEnv, shown slacktest.Message) {
	w.t.Helper()
	message := value[string](w, `select decided_message from agent_approvals`)
	assert.Truef(w.t, strings.Contains(message, shown.TS),
		"the message with the button is %s, and the decision names %q", shown.TS, message)
	assert.Equal(w.t, "{olga} ana slack ana slack "+message, value[string](w, `
		select concat_ws(' ', p.requested_by, p.decided_by, p.decided_via, a.actor, a.via, a.message)
		  from agent_approvals p, agent_audit a where a.act = 'decide_approval'`))
	assert.Contains(w.t, w.run("why", value[string](w, `select trace_id from agent_approvals`)),
		"by ana via slack, message "+message)
}
