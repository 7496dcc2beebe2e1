package slack

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/slack-go/slack/socketmode"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/channels/slack/slacktest"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// fakeInbox is an inbox without a database. Its first calls of Receive fail, as many as failures.
type fakeInbox struct {
	mu           sync.Mutex
	received     []channels.Incoming
	known        []string
	failures     int
	rejectedText string // Receive rejects messages with this text
	stored       func() // called after each store; may be nil
	connected    int
	calls        int // of Receive
}

func (m *fakeInbox) Receive(_ context.Context, _ string, all ...channels.Incoming) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls++
	if m.failures > 0 {
		m.failures--
		return errors.New("database unavailable")
	}
	rejects := func(one channels.Incoming) bool { return m.rejectedText != "" && one.Text == m.rejectedText }
	if slices.ContainsFunc(all, rejects) {
		return errors.New("a message cannot be stored")
	}
	for _, one := range all {
		same := func(other channels.Incoming) bool { return other.ExternalID == one.ExternalID }
		if !slices.ContainsFunc(m.received, same) {
			m.received = append(m.received, one)
		}
	}
	if m.stored != nil {
		m.stored()
	}
	return nil
}

func (m *fakeInbox) Cursor(context.Context) (string, time.Duration, error) { return "", 0, nil }

func (m *fakeInbox) Known(_ context.Context, conversation string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Contains(m.known, conversation), nil
}

func (m *fakeInbox) Failing(context.Context, error) {}

func (m *fakeInbox) Bounced(context.Context, string, string) error { return nil }

func (m *fakeInbox) Connected(context.Context) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.connected++
}

// texts returns the received messages as sender, conversation and text or click, sorted.
func (m *fakeInbox) texts() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []string
	for _, one := range m.received {
		all = append(all, one.Sender+" "+one.Conversation+" "+one.Text+one.Click)
	}
	slices.Sort(all)
	return all
}

func (m *fakeInbox) times() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.connected
}

// fixture is a transport connected to a fake Slack server.
type fixture struct {
	*testing.T
	fake  *slacktest.Server
	inbox *fakeInbox
	*Transport
}

// newFixture starts a transport in a mode: socket or events.
func newFixture(t *testing.T, mode string, prepare ...func(*Transport)) *fixture {
	t.Helper()
	w := &fixture{T: t, fake: slacktest.New(), inbox: &fakeInbox{}}
	w.fake.RetryAfter = time.Second
	t.Cleanup(w.fake.Close)
	config := channels.Config{
		Channel: channels.Channel{Settings: map[string]string{"mode": mode, "base_url": w.fake.URL}},
		Secrets: map[string]string{
			"token": slacktest.Token, "app_token": slacktest.AppToken, "signing_secret": slacktest.SigningSecret,
		},
		Client: &http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()},
		Logger: slog.New(slog.DiscardHandler),
	}
	open := func() *Transport {
		opened, err := Open(config)
		require.NoError(t, err)
		for _, f := range prepare {
			f(opened.(*Transport))
		}
		return opened.(*Transport)
	}
	w.Transport = open()
	if mode == "events" {
		hooked := open() // which nothing runs, as in the program
		hook := func(rw http.ResponseWriter, r *http.Request) { hooked.Hook(rw, r, w.inbox) }
		w.fake.EventsURL = testkit.Serve(t, http.HandlerFunc(hook))
	}
	testkit.Run(t, func(ctx context.Context) error { return w.Transport.Run(ctx, w.inbox) })
	w.eventually(func() bool { return w.inbox.times() > 0 && (mode == "events" || w.fake.Connected() == 1) })
	return w
}

func (w *fixture) eventually(ok func() bool) {
	w.Helper()
	for end := time.Now().Add(pgtest.Timeout); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			w.Fatalf("condition not met; received %q", w.inbox.texts())
		}
	}
}

// The transport stores a message once, however often Slack sends it, and acknowledges it only after it is stored.
func TestMessagesAreReceivedOnce(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"socket", "events"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			w := newFixture(t, mode)
			w.fake.Twice = true
			w.inbox.failures = 2
			root := w.fake.Say("U1", "C1", "<@"+slacktest.BotUser+"> hello &amp; bye", "")
			w.fake.Wait()
			assert.True(t, w.fake.Retries() != 0, "an unstored message was acknowledged")
			w.fake.LoseAcks(2)
			w.fake.Say("U2", "D1", "direct", "")
			w.fake.Say("U1", "C1", "without a mention", "")
			w.fake.Say("U1", "C1", "reply in an unknown thread", "9.9")
			w.inbox.mu.Lock()
			w.inbox.known = []string{"C1:" + root}
			w.inbox.mu.Unlock()
			w.fake.Say("U3", "C1", "reply in a known thread", root)
			w.fake.Say("U3", "D1", "look", root, slacktest.File{ID: "F1", Name: "a.txt", Mimetype: "text/plain", Content: "abc"})
			w.fake.Wait()
			assert.NoDiff(t, []string{
				"U1 C1:" + root + " hello & bye", "U2 D1 direct", "U3 C1:" + root + " reply in a known thread",
				"U3 D1:" + root + " look",
			}, w.inbox.texts())
			withFile := func(m channels.Incoming) bool { return len(m.Files) > 0 }
			file := w.inbox.received[slices.IndexFunc(w.inbox.received, withFile)].Files[0]
			got, err := w.Fetch(t.Context(), file, 3)
			assert.Equal(t, "abc", string(got))
			require.NoError(t, err)
			_, err = w.Fetch(t.Context(), file, 2)
			assert.Error(t, err, "a file beyond the limit was read")
			issuer, err := w.Issuer(t.Context())
			require.NoError(t, err)
			assert.Equal(t, "slack:"+slacktest.Team, issuer)
		})
	}
}

// socketEvent is a Socket Mode event with a message of U1.
func socketEvent(id string, message map[string]any) socketmode.Event {
	event := map[string]any{"user": "U1", "text": "hello", "ts": id}
	maps.Copy(event, message)
	payload, _ := json.Marshal(map[string]any{"type": "event_callback", "team_id": slacktest.Team, "event": event})
	return socketmode.Event{
		Type: socketmode.EventTypeEventsAPI, Request: &socketmode.Request{EnvelopeID: id, Payload: payload},
	}
}

// The transport stores queued events together, even a mention and the reply to it. An event about the connection ends
// the batch.
func TestABurstIsStoredAtOnce(t *testing.T) {
	t.Parallel()
	w := newFixture(t, "socket")
	client := socketmode.New(w.api)
	event := func(kind, ts, thread string) socketmode.Event {
		return socketEvent(ts, map[string]any{
			"type": kind, "channel": "C1", "channel_type": "channel", "thread_ts": thread,
		})
	}
	client.Events <- event("message", "2", "1")
	client.Events <- socketmode.Event{Type: socketmode.EventTypeHello}
	client.Events <- event("app_mention", "3", "")
	connection := w.handleEvents(t.Context(), client, event("app_mention", "1", ""), w.inbox)
	assert.Equal(t, socketmode.EventTypeHello, connection.Type)
	assert.NoDiff(t, []string{"U1 C1:1 hello", "U1 C1:1 hello"}, w.inbox.texts())
	assert.Equal(t, 1, w.inbox.calls)
	assert.Equal(t, 1, len(client.Events))
}

// The transport stores the first hundred events of a burst together, and the next one after them. A message that cannot
// be stored does not affect others, and Slack sends it again.
func TestABurstIsBoundedAndSurvivesABadMessage(t *testing.T) {
	t.Parallel()
	w := newFixture(t, "socket")
	client := socketmode.New(w.api)
	client.Events = make(chan socketmode.Event, 200)
	event := func(n int, text string) socketmode.Event {
		return socketEvent(strconv.Itoa(n), map[string]any{
			"type": "message", "channel": "D1", "channel_type": "im", "text": text,
		})
	}
	for n := 2; n <= 101; n++ {
		client.Events <- event(n, "hello")
	}
	ctx, cancel := context.WithCancel(t.Context())
	w.inbox.stored = cancel // the client has no room for 100 acknowledgements
	w.handleEvents(ctx, client, event(1, "hello"), w.inbox)
	w.inbox.stored = nil
	assert.Equal(t, 1, w.inbox.calls)
	assert.Equal(t, 100, len(w.inbox.texts()))
	w.handleEvents(t.Context(), socketmode.New(w.api), <-client.Events, w.inbox)
	assert.Equal(t, 101, len(w.inbox.texts()))

	client, w.inbox.rejectedText = socketmode.New(w.api), "bad"
	for i, text := range []string{"good", "bad", "good"} {
		client.Events <- event(103+i, text)
	}
	w.handleEvents(t.Context(), client, event(102, "good"), w.inbox)
	assert.Equal(t, 104, len(w.inbox.texts()))
}

// The transport ignores messages of bots, edited messages, and events that it does not handle. It stores a message of a
// user of another workspace under that workspace.
func TestForeignEvents(t *testing.T) {
	t.Parallel()
	w := newFixture(t, "socket")
	w.fake.RetryAfter = time.Minute
	for _, extra := range []map[string]any{
		{"bot_id": "B2"},
		{"user": slacktest.BotUser},
		{"subtype": "message_changed"},
		{"user": ""},
		{"type": "reaction_added"},
		{"type": "an_event_of_next_year"},
		{"user_team": "T2"},
	} {
		event := map[string]any{
			"type": "message", "channel": "D1", "channel_type": "im", "user": "U1", "ts": "1.1", "text": "hi",
		}
		maps.Copy(event, extra)
		w.fake.Deliver("events_api", map[string]any{"type": "event_callback", "team_id": slacktest.Team, "event": event})
	}
	w.fake.Deliver("slash_commands", map[string]any{"command": "/x"})
	w.fake.Deliver("interactive", map[string]any{"type": "view_submission"})
	w.fake.Wait()
	assert.NoDiff(t, []string{"T2/U1 D1 hi"}, w.inbox.texts())
	assert.Equal(t, 0, w.fake.Retries())
}

// A request is authentic only with a valid signature and a recent timestamp.
func TestHookVerifiesSignatures(t *testing.T) {
	t.Parallel()
	w := newFixture(t, "events")
	body := []byte(`{"type":"event_callback","team_id":"T","event":{"type":"message","channel":"D1","channel_type":"im",` +
		`"user":"U1","ts":"1.1","text":"hi"}}`)
	for name, c := range map[string]struct {
		h    http.Header
		body []byte
		says string
	}{
		"another secret": {slacktest.Sign("other", time.Now(), body), body, "the signature is wrong"},
		"no signature":   {http.Header{}, body, "has no signature"},
		"expired timestamp": {
			slacktest.Sign(slacktest.SigningSecret, time.Now().Add(-time.Hour), body), body, "older than 5m0s",
		},
		"another body": {
			slacktest.Sign(slacktest.SigningSecret, time.Now(), body), append([]byte(" "), body...), "the signature is wrong",
		},
	} {
		t.Run(name, func(t *testing.T) {
			status, text := w.fake.Post(c.h, c.body)
			assert.Equal(t, 401, status, text)
			assert.Contains(t, text, c.says)
		})
	}
	assert.Equal(t, 0, len(w.inbox.texts()))
	check := []byte(`{"type":"url_verification","challenge":"3eZbrw1a"}`)
	status, text := w.fake.Post(slacktest.Sign(slacktest.SigningSecret, time.Now(), check), check)
	assert.Truef(t, status == 200 && text == `{"challenge":"3eZbrw1a"}`, "challenge: %d %s", status, text)
	status, _ = w.fake.Post(slacktest.Sign(slacktest.SigningSecret, time.Now(), body), body)
	assert.Equal(t, 200, status, "signed")
	assert.Equal(t, 1, len(w.inbox.texts()))
}

// The client reconnects after a disconnect, and when an open socket carries no data.
func TestSocketsReconnect(t *testing.T) {
	t.Parallel()
	w := newFixture(t, "socket", func(t *Transport) {
		t.socketPing, t.pingInterval = 400*time.Millisecond, 100*time.Millisecond
	})
	w.fake.Disconnect()
	w.eventually(func() bool { return w.fake.Calls("apps.connections.open") >= 2 && w.fake.Connected() == 1 })
	w.fake.DropFrames(true)
	w.fake.Say("U1", "D1", "during dropped frames", "")
	w.eventually(func() bool { return w.fake.Calls("apps.connections.open") >= 3 })
	w.fake.DropFrames(false)
	w.eventually(func() bool { return len(w.inbox.texts()) == 1 })
	assert.True(t, w.fake.Calls("auth.test") >= 3, "auth.test not called after reconnect")
}

// Find finds a message whose send got no response by its metadata, in a thread and outside.
func TestFindFindsLostSends(t *testing.T) {
	t.Parallel()
	w := newFixture(t, "events")
	for _, conversation := range []string{"C1:1.1", "D1"} {
		m := channels.Message{ID: "m-" + conversation, Part: 1, Conversation: conversation, Markdown: "**hi** <!channel>"}
		w.fake.Faults(func(method string, _ int) slacktest.Fault {
			return slacktest.Fault{LoseAnswer: method == "chat.postMessage"}
		})
		if _, found, err := w.Find(t.Context(), m); found || err != nil {
			t.Errorf("%s: found before the send, %v", conversation, err)
		}
		_, err := w.Send(t.Context(), m)
		failure, is := errors.AsType[*channels.SendError](err)
		require.Truef(t, is && failure.MaybeSent, "%s: %v", conversation, err)
		sent := w.fake.Messages(parseAddress(conversation).channel)[0]
		id, found, err := w.Find(t.Context(), m)
		assert.Truef(t, found && err == nil && id == sent.Channel+":"+sent.TS &&
			sent.ThreadTS == parseAddress(conversation).thread, "%s: %q %v %v", conversation, id, found, err)
		m.Part = 2
		_, found, _ = w.Find(t.Context(), m)
		assert.Truef(t, !found, "%s: another part was found", conversation)
		assert.Truef(t, strings.Contains(string(sent.Blocks), "*hi* &lt;!channel&gt;") ||
			strings.Contains(string(sent.Blocks), `\u0026lt;`), "blocks %s", sent.Blocks)
	}
}

// A draft is edited in place, and each rejection of Slack has its own error.
func TestSendsAndEdits(t *testing.T) {
	t.Parallel()
	w := newFixture(t, "events")
	m := channels.Message{
		ID: "1", Conversation: "C1:1.1", Markdown: "Allow?",
		Buttons: []channels.Button{{Label: "Approve", Nonce: "yes-nonce"}, {Label: "Reject", Nonce: "no-nonce"}},
	}
	id, err := w.Send(t.Context(), m)
	require.NoError(t, err)
	_, ts, _ := strings.Cut(id, ":")
	require.NoError(t, w.fake.Click("U7", "C1", ts, "Approve"))
	w.fake.ClickAgain(false)
	w.fake.Wait()
	assert.NoDiff(t, []string{"U7 C1:1.1 yes-nonce"}, w.inbox.texts())
	require.NoError(t, w.Acknowledge(t.Context(), w.inbox.received[0], "You may <not>."))
	only := w.fake.Messages("C1")[1]
	assert.Truef(t, only.Only == "U7" && only.Text == "You may &lt;not&gt;." && only.ThreadTS == "1.1", "answer %+v", only)
	m.Buttons, m.Markdown = nil, "Approved."
	require.NoError(t, w.Edit(t.Context(), id, m))
	assert.Error(t, w.fake.Click("U7", "C1", ts, "Approve"), "the button is still there")
	require.NoError(t, w.Typing(t.Context(), "C1:1.1"))
	for name, c := range map[string]struct {
		fault slacktest.Fault
		want  channels.SendError
	}{
		"rate limit":       {slacktest.Fault{RetryAfter: 7}, channels.SendError{RetryAfter: 7 * time.Second}},
		"cut connection":   {slacktest.Fault{Cut: true}, channels.SendError{MaybeSent: true}},
		"server error":     {slacktest.Fault{Status: 503}, channels.SendError{MaybeSent: true}},
		"archived channel": {slacktest.Fault{Error: "is_archived"}, channels.SendError{Permanent: true}},
		"unknown outcome":  {slacktest.Fault{Error: "internal_error"}, channels.SendError{MaybeSent: true}},
		"revoked token":    {slacktest.Fault{Error: "token_revoked"}, channels.SendError{}},
	} {
		t.Run(name, func(t *testing.T) {
			w.fake.Faults(func(string, int) slacktest.Fault { return c.fault })
			_, err := w.Send(t.Context(), m)
			got, is := errors.AsType[*channels.SendError](err)
			assert.Truef(t, is && got.RetryAfter == c.want.RetryAfter && got.Permanent == c.want.Permanent &&
				got.MaybeSent == c.want.MaybeSent, "error %+v", err)
			assert.Truef(t, err == nil || !strings.Contains(err.Error(), slacktest.Token), "the error has the token")
		})
	}
}

// Slack shows the text of a message if it refuses the blocks.
func TestRefusedBlocksLeaveTheText(t *testing.T) {
	t.Parallel()
	w := newFixture(t, "events")
	for _, code := range []string{"invalid_blocks", "msg_too_long"} {
		sent := w.fake.Calls("chat.postMessage")
		w.fake.Faults(func(method string, call int) slacktest.Fault {
			if method == "chat.postMessage" && call == sent+1 || method == "chat.update" && call%2 == 1 {
				return slacktest.Fault{Error: code}
			}
			return slacktest.Fault{}
		})
		m := channels.Message{ID: "1", Conversation: "C1", Markdown: "**first**"}
		id, err := w.Send(t.Context(), m)
		require.NoError(t, err)
		all := w.fake.Messages("C1")
		got := all[len(all)-1]
		assert.Truef(t, got.Text == "*first*" && string(got.Blocks) == "[]", "%s: %+v", code, got)
		m.Markdown = "second"
		require.NoError(t, w.Edit(t.Context(), id, m))
		got = w.fake.Messages("C1")[len(all)-1]
		assert.Truef(t, got.Text == "second" && string(got.Blocks) == "[]", "%s: %+v", code, got)
	}
}

// A wrong token is the admin's mistake. No log line contains it.
func TestWrongTokensAreMisconfigured(t *testing.T) {
	t.Parallel()
	fake := slacktest.New()
	t.Cleanup(fake.Close)
	opened, err := Open(channels.Config{
		Channel: channels.Channel{Settings: map[string]string{"base_url": fake.URL}},
		Secrets: map[string]string{"token": "xoxb-wrong", "app_token": slacktest.AppToken},
		Logger:  slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	err = opened.Run(t.Context(), &fakeInbox{})
	assert.Truef(t, errors.Is(err, channels.ErrMisconfigured) && !strings.Contains(err.Error(), "xoxb"), "error %v", err)
	assert.Equal(t, err.Error(), redact.Text(err.Error(), 0), "redacted")
	_, err = Open(channels.Config{Secrets: map[string]string{"token": "x"}})
	assert.ErrorIs(t, err, channels.ErrMisconfigured, "without app_token")
}

// A declaration names the secrets of its mode as references.
func TestDeclarationsNeedTheSecretsOfTheirMode(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		secrets, settings map[string]string
		want              string
	}{
		"socket": {map[string]string{"token": "${A}", "app_token": "${B}"}, nil, ""},
		"events": {
			map[string]string{"token": "${A}", "signing_secret": "${B}"}, map[string]string{"mode": "events"}, "",
		},
		"no app token": {map[string]string{"token": "${A}", "signing_secret": "${B}"}, nil, "needs app_token"},
		"no signature": {
			map[string]string{"token": "${A}", "app_token": "${B}"}, map[string]string{"mode": "events"}, "needs signing_secret",
		},
		"a literal":    {map[string]string{"token": "xoxb-1", "app_token": "${B}"}, nil, "is no reference"},
		"another mode": {map[string]string{"token": "${A}"}, map[string]string{"mode": "rtm"}, "must be socket or events"},
	} {
		t.Run(name, func(t *testing.T) {
			err := channels.Validate(channels.Definition{
				Name: "s", Type: channels.Slack, Secrets: c.secrets, Settings: c.settings,
			})
			assert.Truef(t, (err == nil) == (c.want == "") && (err == nil || strings.Contains(err.Error(), c.want)),
				"error %v, want %q", err, c.want)
			assert.Truef(t, err == nil || !strings.Contains(err.Error(), "xoxb-1"), "the error has the secret")
		})
	}
}

// An answer certainly did not leave if the TLS handshake failed.
func TestAFailedHandshakeSendsNothing(t *testing.T) {
	t.Parallel()
	server := httptest.NewTLSServer(http.NotFoundHandler()) // the client does not trust its certificate
	t.Cleanup(server.Close)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	transport, err := Open(channels.Config{
		Channel: channels.Channel{Settings: map[string]string{"base_url": server.URL}},
		Secrets: map[string]string{"app_token": "xapp-1"}, Client: &http.Client{},
	})
	require.NoError(t, err)
	_, err = transport.Send(t.Context(), channels.Message{Conversation: "C1", Markdown: "hello"})
	failure, is := errors.AsType[*channels.SendError](err)
	assert.Truef(t, is && !failure.MaybeSent && !failure.Permanent, "%+v", err)
	assert.True(t, !strings.Contains(err.Error(), "chat.postMessage"), err)
}

// silence is a server that never answers.
type silence struct{}

func (silence) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, context.Cause(r.Context())
}

func TestCallWithoutAnswerEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		transport, err := Open(channels.Config{
			Secrets: map[string]string{"app_token": "xapp-1"}, Client: &http.Client{Transport: silence{}},
		})
		require.NoError(t, err)
		_, err = transport.Issuer(t.Context())
		assert.Error(t, err)
	})
}
