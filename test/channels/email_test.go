package channels_test

import (
	"bufio"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	netmail "net/mail"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/npmtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// mailProcess is one process of Node with an SMTP server, which receives answers, and a client, which sends mail.
type mailProcess struct {
	*testing.T
	env   *testEnv
	input io.Writer
	// agentAddr is the address of the agent's listener.
	agentAddr string

	mu      sync.Mutex
	lines   []mailLine // received mails
	refused string     // the last refusal of a mail by the agent
}

// mailLine is a line of the process: its port at first, then received mails and refusals.
type mailLine struct {
	Received, To, From, Raw, Refused string
	Port                             int
}

//go:embed testdata/mail.mjs
var mailScript string

// startMailProcess starts the process, and creates a database with a channel to it. With faults, the server rejects the
// first try of every third mail with status 451, and receives every tenth mail without a response.
func startMailProcess(
	t *testing.T, model *modeltest.Server, faults bool, extraYAML string, settings ...string,
) *mailProcess {
	t.Helper()
	cmd := npmtest.Command(t, mailScript, "smtp-server@3.21.6", "nodemailer@10.6.0")
	cmd.SysProcAttr = proctest.DieWithUs()
	if faults {
		cmd.Env = append(cmd.Env, "FAULTS=yes")
	}
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	p := &mailProcess{T: t, input: in}
	ready := make(chan int, 1)
	go func() {
		defer close(ready)
		lines := bufio.NewScanner(out)
		for lines.Buffer(nil, 1<<20); lines.Scan(); {
			var l mailLine
			_ = json.Unmarshal(lines.Bytes(), &l)
			p.mu.Lock()
			switch {
			case l.Port > 0:
				ready <- l.Port
			case l.Received != "":
				p.lines = append(p.lines, l)
			case l.Refused != "":
				p.refused = l.Refused
			}
			p.mu.Unlock()
		}
	}()
	port, listens := <-ready
	require.True(t, listens, "the mail process ended before it listened")
	p.agentAddr = testkit.FreeAddress(t)
	p.env = newTestEnv(t, model, fmt.Sprintf(`
kind: channel
name: mail
type: email
pairing: open
secrets: {key: "${MAIL_KEY}"}
settings:
  address: Shop <support@shop.example>
  smtp: 127.0.0.1:%d
  smtp_tls: none
  listen: %s
  authserv_id: mx.shop.example
%s`, port, p.agentAddr, extraYAML), append(settings, "MAIL_KEY=0123456789abcdef0123456789abcdef")...)
	return p
}

// send queues a mail of a person. The process sends it again until the agent accepts or refuses it. The header claims a
// DMARC pass by the configured authserv_id.
func (p *mailProcess) send(from, id, to, text string, headers map[string]string) {
	p.Helper()
	merged := map[string]string{"Authentication-Results": "mx.shop.example; dmarc=pass header.from=home.example"}
	maps.Copy(merged, headers)
	line, err := json.Marshal(map[string]any{"through": p.agentAddr, "message": map[string]any{
		"from": from + "@home.example", "to": to, "subject": "Order 12", "messageId": "<" + id + "@home.example>",
		"text": text, "headers": merged,
	}})
	require.NoError(p, err)
	_, err = fmt.Fprintf(p.input, "%s\n", line)
	require.NoError(p, err)
}

// answers returns the answers to a mail. With id "", it returns the mails that answer nothing: approval requests. A
// refusal of a mail ends the test.
func (p *mailProcess) answers(id string) (all []*netmail.Message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	require.Equal(p, "", p.refused, "a mail was refused")
	for _, l := range p.lines {
		m, err := netmail.ReadMessage(strings.NewReader(l.Raw))
		require.NoError(p, err)
		if m.Header.Get("In-Reply-To") == "<"+id+"@home.example>" || id == "" && m.Header.Get("In-Reply-To") == "" {
			all = append(all, m)
		}
	}
	return all
}

func (p *mailProcess) waitAnswer(id string) *netmail.Message {
	p.Helper()
	p.env.waitUntil("the answer to "+id, func() bool { return len(p.answers(id)) > 0 })
	return p.answers(id)[0]
}

const shopAddress = "support@shop.example"

// A mail opens a thread, and a reply to its answer continues it. A repeated mail is answered once, an automatic one
// never.
func TestMailThreadIsConversation(t *testing.T) {
	t.Parallel()
	p := startMailProcess(t, echoModel(t), false, "")
	p.env.serve()
	p.send("bob", "1", shopAddress, "Where is it?", nil)
	first := p.waitAnswer("1")
	assert.Equal(t, "Re: Order 12", first.Header.Get("Subject"))
	assert.Equal(t, "auto-replied", first.Header.Get("Auto-Submitted"))
	p.send("bob", "1", shopAddress, "Where is it?", nil)
	p.send("bob", "away", shopAddress, "I am away", map[string]string{"Auto-Submitted": "auto-replied"})
	replyTo, err := first.Header.AddressList("Reply-To")
	require.NoError(t, err)
	p.send("bob", "2", replyTo[0].Address, "Thanks\n\nOn 3 Nov 2026, Shop wrote:\n> You said", nil)
	second := p.waitAnswer("2")
	text, err := io.ReadAll(second.Body)
	require.NoError(t, err)
	assert.Contains(t, string(text), "You said **Thanks**.", "<strong>Thanks</strong>")
	p.send("eve", "3", replyTo[0].Address, "Mine now?", nil)
	p.waitAnswer("3")
	p.env.waitUntil("all messages", func() bool {
		return value[int](p.env, `select count(*) from agent_channel_messages where status in ('done', 'ignored')`) == 4
	})
	assert.Equal(t, 1, len(p.answers("1")))
	assert.Equal(t, 0, len(p.answers("away")))
	assert.Equal(t, 2, value[int](p.env, `
		select count(distinct thread_id) from agent_channel_messages where status = 'done'`))
	assert.Equal(t, 1, value[int](p.env, `
		select count(distinct thread_id) from agent_channel_messages where sender = 'bob@home.example' and status = 'done'`))
}

// Over a kill, temporary rejections and lost answers, each mail is answered once. A mail whose delivery is
// uncertain has status maybe_sent, and is delivered at most once.
func TestMailIsAnsweredOnceDespiteFaults(t *testing.T) {
	t.Parallel()
	mails, people, killEvery := bySize(24, 300), bySize(4, 20), bySize(12, 75)
	p := startMailProcess(t, echoModel(t), true, "", "AGENT_WORKER_LEASE="+lease(), "AGENT_WORKERS=20")
	server, kills := p.env.serve(), 0
	for i := range mails {
		for range 1 + i%2 { // every second mail is sent twice
			p.send(fmt.Sprint("person", i%people), fmt.Sprint("m", i), shopAddress, fmt.Sprint(i), nil)
		}
		if i%killEvery == killEvery-1 && i < mails-1 {
			p.env.waitAnswered(i / 4)
			server = p.env.kill(server)
			kills++
		}
	}
	uncertain := p.env.waitSettled(mails)
	for i := range mails {
		status := value[string](p.env, `
			select s.status from agent_channel_sends s join agent_messages m on m.id = s.message_id
			  join agent_channel_messages i on i.execution_id = m.execution_id
			 where i.external_id like $1`, fmt.Sprintf("m%d@%%", i))
		if status == "sent" {
			p.waitAnswer(fmt.Sprint("m", i)) // the server's line may come after its reply to the agent
		}
		got := len(p.answers(fmt.Sprint("m", i)))
		assert.Truef(t, got <= 1 && (got != 0 || status == "maybe_sent"), "mail %d has %d answers and is %s", i, got, status)
	}
	assert.True(t, uncertain != 0, "no mail was maybe sent")
	t.Logf("%d mails, %d kills: %d maybe sent", mails, kills, uncertain)
}

// A mail with a link announces a request for approval. A reply to it decides nothing.
func TestMailCannotApprove(t *testing.T) {
	t.Parallel()
	var paid atomic.Int32
	shop := testkit.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		paid.Add(1)
		_, _ = w.Write([]byte(`{"ok": true}`))
	}))
	model := modeltest.New(t)
	model.Handle(func(_ int, r openai.ChatCompletionRequest) modeltest.Reply {
		text := modeltest.Said(r.Messages[len(r.Messages)-1])
		if strings.Contains(text, "money") {
			return modeltest.ToolCall("refund", `{"order": 7}`)
		}
		return modeltest.Text("I cannot approve that.")
	})
	p := startMailProcess(t, model, false, fmt.Sprintf(`report_to: boss@home.example
---
kind: skill
name: refund
description: Pay an order back.
scope: external
trust: approve
parameters: {type: object, required: [order], properties: {order: {type: integer}}}
handler: http:POST %s/refunds
`, shop), "AGENT_PUBLIC_URL=https://agent.shop.example")
	p.env.serve()
	p.send("bob", "1", shopAddress, "My money back, please", nil)
	p.env.waitUntil("the request", func() bool { return len(p.answers("")) == 1 })
	request := p.answers("")[0]
	replyTo, err := request.Header.AddressList("Reply-To")
	require.NoError(t, err)
	text, err := io.ReadAll(request.Body)
	require.NoError(t, err)
	id := value[string](p.env, `select id::text from agent_approvals`)
	assert.Contains(t, strings.ReplaceAll(string(text), "=\r\n", ""), "https://agent.shop.example/approvals/"+id)
	p.send("boss", "2", replyTo[0].Address, "Approve", nil)
	p.waitAnswer("2")
	assert.Equal(t, "pending", value[string](p.env, `select status from agent_approvals`))
	assert.Equal(t, 0, int(paid.Load()))
}
