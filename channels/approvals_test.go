package channels_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/channels/telegram"
	"github.com/lanekeeper/lanekeeper/channels/telegram/telegramtest"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// linked maps accounts to principals.
type linked map[string]string

func (l linked) Approver(ctx context.Context, issuer, subject, _, _ string) (context.Context, string, error) {
	name, is := l[issuer+" "+subject]
	switch {
	case !is:
		return nil, "", channels.ErrNotLinked
	case strings.HasPrefix(name, "viewer"):
		return nil, "", channels.ErrMayNot
	}
	return ctx, name, nil
}

func (linked) Asking(ctx context.Context, _, _, _, _ string) (context.Context, error) {
	return ctx, nil
}

// stand is a channel with a worker in this process.
type stand struct {
	t    *testing.T
	pool *pgxpool.Pool
	bot  *telegramtest.Server
	exec string

	runner *channels.Runner
	env    sync.Map // the secrets
	log    testkit.Log
}

func newStand(
	t *testing.T, d channels.Definition, accept func(context.Context, channels.Visit) (channels.Accepted, error),
) *stand {
	t.Helper()
	s := &stand{t: t, pool: pgtest.DB(t), bot: telegramtest.New(t)}
	s.env.Store("TOKEN", telegramtest.Token)
	s.env.Store("WEBHOOK", "a secret")
	d.Name, d.Type = "support", channels.Telegram
	d.Secrets = map[string]string{"token": "${TOKEN}", "webhook": "${WEBHOOK}"}
	if d.Settings == nil {
		d.Settings = map[string]string{}
	}
	d.Settings["base_url"] = s.bot.URL()
	_, err := channels.Put(t.Context(), s.pool, d)
	require.NoError(t, err)
	keeper := lanes.NewKeeper(s.pool, lanes.Options{})
	listener := lanes.NewListener(s.pool, nil)
	r := &channels.Runner{
		Pool: s.pool, Keeper: keeper, Listener: listener, Logger: slog.New(slog.NewTextHandler(&s.log, nil)),
		Getenv: func(name string) string {
			value, _ := s.env.Load(name)
			return value.(string)
		},
		Open: map[string]channels.Open{channels.Telegram: telegram.Open}, Accept: accept,
		Principals: linked{"telegram:4711 1": "mara", "telegram:4711 2": "viewer-bob"},
	}
	s.runner = r
	testkit.Run(t, keeper.Run, listener.Run, r.Run)
	return s
}

// request requests an approval.
func (s *stand) request(arguments string) (id string) {
	s.t.Helper()
	if s.exec == "" {
		pgtest.Exec(s.t, s.pool, `insert into agent_skills (name, tool_definition, handler, trust)
			values ('refund', '{}', 'sql:', 'approve')`)
		engine, err := executions.New(s.pool, executions.Options{Keeper: lanes.NewKeeper(s.pool, lanes.Options{})})
		require.NoError(s.t, err)
		x, _, err := engine.Start(s.t.Context(), s.pool, executions.Spec{
			Flow: executions.External, Surface: trace.Flow, Agent: "shop", OnLost: "fail",
		})
		require.NoError(s.t, err)
		s.exec = x.ID
	}
	hash, err := approvals.Hash([]byte(arguments))
	require.NoError(s.t, err)
	return pgtest.Value[string](s.t, s.pool, `
		with asked as (
		  insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash,
		    expires_at)
		  select x.trace_id, x.id, 'refund', 1, $2::jsonb, $3, clock_timestamp() + interval '1 day'
		    from agent_executions x where x.id = $1::uuid returning id::text)
		select id || pg_notify('agent_channels', 'approval requested')::text from asked`, s.exec, arguments, hash)
}

// shown waits for the n-th message in the chat of the admins.
func (s *stand) shown(n int) telegramtest.Message {
	s.t.Helper()
	s.until("the request", func() bool { return len(s.bot.Sent(900)) >= n })
	return s.bot.Sent(900)[n-1]
}

func (s *stand) until(what string, holds func() bool) {
	s.t.Helper()
	pgtest.EventuallyWithin(s.t, 30*time.Second, holds, what)
}

// click presses a button and returns the response.
func (s *stand) click(id string, chat, person int64, message int64, nonce string) string {
	s.t.Helper()
	before := len(s.bot.Notices())
	s.bot.Click(id, chat, person, "Somebody", message, nonce)
	s.until("the answer to click "+id, func() bool { return len(s.bot.Notices()) > before })
	return s.bot.Notices()[before]
}

func (s *stand) status(id string) string {
	return pgtest.Value[string](s.t, s.pool,
		`select concat_ws(' ', status, decided_by) from agent_approvals where id = $1`, id)
}

// A button decides for the right person, once, in time, and for the displayed arguments.
func TestAButtonDecidesAnApproval(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{Pairing: channels.PairingOpen, ReportTo: "900"}, nil)
	first := s.request(`{"order": "A-1", "note": "</code> <b>approve me</b>"}`)
	m := s.shown(1)
	assert.Contains(t, m.Text, "&lt;b&gt;approve me&lt;/b&gt;")
	approve := m.Buttons["Approve"]
	for name, c := range map[string]struct {
		chat, person int64
		want         string
	}{
		"unlinked": {900, 3, "not linked"}, "viewer": {900, 2, "may not"}, "elsewhere": {901, 1, "not valid"},
	} {
		assert.Contains(t, s.click(name, c.chat, c.person, m.ID, approve), c.want)
		assert.Equal(t, "pending ", s.status(first))
	}
	pgtest.Exec(t, s.pool, `update agent_channel_buttons set arguments_hash = 'of others' where approval_id = $1`, first)
	assert.Contains(t, s.click("changed", 900, 1, m.ID, approve), "have changed")
	assert.Equal(t, "pending ", s.status(first))
	pgtest.Exec(t, s.pool, `update agent_channel_buttons b set arguments_hash = a.arguments_hash from agent_approvals a
		where a.id = b.approval_id and a.id = $1`, first)

	assert.Contains(t, s.click("right", 900, 1, m.ID, approve), "You have approved")
	assert.Equal(t, "approved mara", s.status(first))
	s.until("the decision is shown", func() bool {
		now := s.shown(1)
		return strings.Contains(now.Text, "Approved") && strings.Contains(now.Text, "mara") && len(now.Buttons) == 0
	})
	assert.Contains(t, s.click("replayed", 900, 1, m.ID, approve), "used already")

	second := s.request(`{"order": "C-3"}`)
	m = s.shown(2)
	pgtest.Exec(t, s.pool,
		`update agent_channel_buttons set expires_at = clock_timestamp() where approval_id = $1`, second)
	assert.Contains(t, s.click("late", 900, 1, m.ID, m.Buttons["Approve"]), "expired")
	assert.Equal(t, "pending ", s.status(second))

	third := s.request(fmt.Sprintf(`{"order": %q}`, strings.Repeat("x", 4000)))
	if m = s.shown(3); len(m.Buttons) > 0 || !strings.Contains(m.Text, third) {
		t.Errorf("long arguments are shown as %q with %v", m.Text, m.Buttons)
	}

	// A pending request follows the conversation for reports.
	pgtest.Exec(t, s.pool, `update agent_channels set report_to = '902'`)
	pgtest.Exec(t, s.pool, `select pg_notify('agent_channels', '')`)
	s.until("the requests are shown there", func() bool { return len(s.bot.Sent(902)) == 2 })
	moved := s.bot.Sent(902)[0]
	assert.Contains(t, s.click("moved", 902, 1, moved.ID, moved.Buttons["Approve"]), "You have approved")
	assert.Equal(t, "approved mara", s.status(second))

	pgtest.Exec(t, s.pool, `update agent_channels set report_to = '@ops'`)
	pgtest.Exec(t, s.pool, `select pg_notify('agent_channels', '')`)
	named := s.request(`{"order": "N-1"}`)
	pgtest.Until(t, s.pool, 2, `
		select count(*) from agent_channel_buttons where approval_id = $1 and conversation = '@ops' and message_ref <> ''`, named)
	all := s.bot.Sent(0)
	m = all[len(all)-1]
	assert.Contains(t, s.click("in a named chat", 903, 1, m.ID, m.Buttons["Reject"]), "You have rejected")
	assert.Equal(t, "rejected mara", s.status(named))

	s.bot.Fail(func(string, map[string]any) telegramtest.Fault { return telegramtest.Broken })
	s.request(`{"order": "D-4"}`)
	s.until("the log says that a request is not shown", func() bool {
		return strings.Contains(s.log.String(), "request for approval not shown")
	})
}

// A request that was decided elsewhere shows the decision, and has no buttons.
func TestADecisionFromElsewhereIsShown(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{ReportTo: "900"}, nil)
	id := s.request(`{"order": "A-1"}`)
	m := s.shown(1)
	_, err := approvals.Decide(t.Context(), s.pool, id, true, "boss", "")
	require.NoError(t, err)
	pgtest.Exec(t, s.pool, `select pg_notify('agent_channels', 'support')`)
	s.until("the decision is shown", func() bool {
		now := s.shown(1)
		return strings.Contains(now.Text, "<b>Approved</b> by <code>boss</code> at ") && len(now.Buttons) == 0
	})
	pgtest.Until(t, s.pool, true, `select bool_and(expires_at <= clock_timestamp()) from agent_channel_buttons`)
	s.click("late", 900, 1, m.ID, m.Buttons["Reject"])
	assert.Contains(t, s.shown(1).Text, "Approved")
	assert.Equal(t, 1, s.shown(1).Edits)
}

// Within an execution, an automation or an objective may act as another agent.
func TestRequestsOfTheActingAgentAreShown(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{Agent: "billing", ReportTo: "900"}, nil)
	s.request(`{"order": "of shop"}`)
	acting := s.request(`{"order": "of billing"}`)
	pgtest.Exec(t, s.pool, `
		with called as (
		  insert into agent_activity (trace_id, skill_name, kind, status, agent, execution_id)
		  select trace_id, skill_name, 'call', 'skipped', 'billing', execution_id from agent_approvals where id = $1
		  returning id)
		update agent_approvals set activity_id = called.id from called where agent_approvals.id = $1`, acting)
	pgtest.Exec(t, s.pool, `select pg_notify('agent_channels', 'approval requested')`)
	assert.Contains(t, s.shown(1).Text, "of billing")
	assert.Equal(t, 1, len(s.bot.Sent(900)))
	// The agent of the execution sees both.
	_, err := channels.Put(t.Context(), s.pool, channels.Definition{
		Name: "support", Type: channels.Telegram, Agent: "shop", ReportTo: "901",
		Secrets:  map[string]string{"token": "${TOKEN}", "webhook": "${WEBHOOK}"},
		Settings: map[string]string{"base_url": s.bot.URL()},
	})
	require.NoError(t, err)
	pgtest.Eventually(t, func() bool { return len(s.bot.Sent(901)) == 2 }, "both requests are shown to shop")
}

// A request whose message was not confirmed is shown again. The buttons of both messages work.
func TestUnconfirmedRequestForApprovalIsShownAgain(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{ReportTo: "900"}, nil)
	var lost atomic.Bool
	s.bot.Fail(func(method string, _ map[string]any) telegramtest.Fault {
		if method == "sendMessage" && !lost.Swap(true) {
			return telegramtest.Lost
		}
		return telegramtest.None
	})
	id := s.request(`{"order": "A-1"}`)
	s.until("the lost answer", func() bool { return strings.Contains(s.log.String(), "request for approval not shown") })
	pgtest.Exec(t, s.pool, `update agent_channel_buttons set created_at = created_at - interval '1 minute'`)
	pgtest.Exec(t, s.pool, `select pg_notify('agent_channels', 'support')`)
	s.shown(2)
	m := s.shown(1)
	assert.Contains(t, s.click("first", 900, 1, m.ID, m.Buttons["Approve"]), "You have approved")
	assert.Equal(t, "approved mara", s.status(id))
}

// newVisitedStand returns a stand that passes on its visits, and answers each.
func newVisitedStand(t *testing.T) (*stand, <-chan channels.Visit) {
	t.Helper()
	visits := make(chan channels.Visit, 1)
	return newStand(t, channels.Definition{Pairing: channels.PairingOpen},
		func(_ context.Context, v channels.Visit) (channels.Accepted, error) {
			visits <- v
			return channels.Accepted{}, &channels.RefusedError{Message: "thank you"}
		}), visits
}

// A file that could not be read at first still comes with its message.
func TestFileIsReadAgainAfterAFailure(t *testing.T) {
	t.Parallel()
	s, visits := newVisitedStand(t)
	var failed atomic.Bool
	s.bot.Fail(func(method string, _ map[string]any) telegramtest.Fault {
		if method == "getFile" && !failed.Swap(true) {
			return telegramtest.Broken
		}
		return telegramtest.None
	})
	s.bot.Attach(9, 9, "Mara", "see this", "a.txt", "text/plain", []byte("content"))
	v := testkit.Receive(t, visits)
	assert.Truef(t, v.Text == "see this" && len(v.Files) == 1, "got %+v", v)
}

// A message enters without its empty file.
func TestEmptyFileIsMissing(t *testing.T) {
	t.Parallel()
	s, visits := newVisitedStand(t)
	s.bot.Attach(9, 9, "Mara", "see this", "a.txt", "text/plain", nil)
	v := testkit.Receive(t, visits)
	assert.Equal(t, "see this\n[The file \"a.txt\" is missing: it is empty.]", v.Text)
	assert.Equal(t, 0, len(v.Files))
}

// A sender learns that a message was given up.
func TestSenderLearnsThatItsMessageFailed(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{Pairing: channels.PairingOpen},
		func(context.Context, channels.Visit) (channels.Accepted, error) {
			return channels.Accepted{}, errors.New("there is no such agent")
		})
	s.bot.Say(1, 1, "Somebody", "hello")
	pgtest.Until(t, s.pool, true, `
		select coalesce(bool_and(attempts > 0 and claim is null), false) from agent_channel_messages`)
	pgtest.Exec(t, s.pool, `update agent_channel_messages set attempts = 19, next_attempt_at = clock_timestamp()`)
	pgtest.Exec(t, s.pool, `select pg_notify('agent_channels', 'support')`)
	pgtest.Until(t, s.pool, "failed", `select status from agent_channel_messages`)
	assert.Equal(t, channels.FailedNotice, s.bot.Sent(1)[0].Text)
}

// At most three senders wait for pairing. Each one's code works once.
func TestPairingIsBounded(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{}, nil)
	for person := int64(1); person <= 5; person++ {
		s.bot.Say(person, person, "Somebody", "hello")
		s.bot.Say(person, person, "Somebody", "hello again")
	}
	pgtest.Until(t, s.pool, 10, `select count(*)::int from agent_channel_messages where status = 'ignored'`)
	sent := s.bot.Sent(0)
	assert.Truef(t, len(sent) == 3, "%d codes were sent: %v", len(sent), sent)
	assert.True(t, !strings.Contains(fmt.Sprint(pgtest.Column[string](t, s.pool,
		`select to_jsonb(i)::text from agent_channel_identities i`)), code(s.bot.Sent(0)[0].Text)), "the database has a code")
	tx := pgtest.Begin(t, s.pool)
	got, err := channels.Pair(t.Context(), tx, code(s.bot.Sent(0)[0].Text), "admin")
	require.NoError(t, err)
	assert.Equal(t, "paired", got.Status)
	_, err = channels.Pair(t.Context(), tx, code(s.bot.Sent(0)[0].Text), "admin")
	assert.Error(t, err, "a code works twice")
}

// A sender whose code was not sent gets another one with the next message.
func TestPairingCodeThatWasNotSentIsIssuedAgain(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{}, nil)
	var refused atomic.Bool
	s.bot.Fail(func(method string, _ map[string]any) telegramtest.Fault {
		if method == "sendMessage" && !refused.Swap(true) {
			return telegramtest.Slow
		}
		return telegramtest.None
	})
	s.bot.Say(1, 1, "Somebody", "hello")
	pgtest.Until(t, s.pool, 1, `select count(*)::int from agent_channel_messages where status = 'ignored'`)
	s.bot.Say(1, 1, "Somebody", "hello again")
	s.until("a code", func() bool { return len(s.bot.Sent(1)) == 1 })
}

// Anybody may send a request, and a provider expects a fast response. So a request reads no messages.
func TestARequestReadsNoMessages(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := channels.Put(t.Context(), pool, channels.Definition{
		Name: "support", Type: channels.Telegram, Secrets: map[string]string{"token": "${TOKEN}"},
	})
	require.NoError(t, err)
	pgtest.Exec(t, pgtest.Begin(t, pool), `lock table agent_channel_messages, agent_channel_sends`)
	runner := &channels.Runner{
		Pool: pool, Logger: slog.New(slog.DiscardHandler), Getenv: func(string) string { return telegramtest.Token },
		Open: map[string]channels.Open{channels.Telegram: telegram.Open},
	}
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Timeout)
	defer cancel()
	r, w := httptest.NewRequestWithContext(ctx, "POST", "/channels/support", nil), httptest.NewRecorder()
	r.SetPathValue("name", "support")
	runner.ServeHTTP(w, r)
	assert.Equal(t, 401, w.Code, w.Body)
}

func code(text string) string {
	_, rest, _ := strings.Cut(text, "<code>")
	found, _, _ := strings.Cut(rest, "</code>")
	return found
}

// A failing channel reports the reason, and does not delay other channels.
func TestTheStateSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{}, nil)
	pgtest.Until(t, s.pool, "connected", `select state from agent_channels`)
	s.bot.Fail(func(method string, _ map[string]any) telegramtest.Fault {
		if method == "getUpdates" {
			return telegramtest.Taken
		}
		return telegramtest.None
	})
	s.bot.Say(1, 1, "Somebody", "hello") // ends the running poll
	pgtest.Until(t, s.pool, "failing", `select state from agent_channels`)
	c, err := channels.Get(t.Context(), s.pool, "support")
	require.NoError(t, err)
	assert.Contains(t, c.Error, "another program polls this bot")
	assert.Truef(t, !strings.Contains(c.Error, "secret-of-the-bot"), "the error shows the token: %s", c.Error)
}

// A channel uses a rotated secret without a restart.
func TestARotatedSecretIsUsed(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{}, nil)
	pgtest.Until(t, s.pool, "connected", `select state from agent_channels`)
	s.env.Store("TOKEN", "4711:of-before")
	pgtest.Exec(t, s.pool, `select pg_notify('agent_channels', '')`)
	pgtest.Until(t, s.pool, "failing", `select state from agent_channels`)
	pgtest.Equal(t, s.pool, "the channel is misconfigured: Telegram does not know this token (telegram answered 404: "+
		"Not Found)", `select error from agent_channels`)
	s.env.Store("TOKEN", telegramtest.Token)
	pgtest.Exec(t, s.pool, `select pg_notify('agent_channels', '')`)
	pgtest.Until(t, s.pool, "connected", `select state from agent_channels`)
}

// Telegram's requests need the secret token. An update counts once, and enters its thread with its file.
func TestTelegramPostsToTheWebhook(t *testing.T) {
	t.Parallel()
	visits := make(chan channels.Visit, 10)
	s := newStand(t, channels.Definition{
		Pairing: channels.PairingOpen, Settings: map[string]string{"mode": "webhook"},
	}, func(_ context.Context, v channels.Visit) (channels.Accepted, error) {
		visits <- v
		return channels.Accepted{}, &channels.RefusedError{Message: "not <b>today</b>"}
	})
	mux := http.NewServeMux()
	mux.Handle("POST /channels/{name}", s.runner)
	s.bot.Attach(9, 9, "Mara", "see this", "a.txt", "text/plain", []byte("content"))
	post := func(secret, body string) int {
		r := httptest.NewRequestWithContext(t.Context(), "POST", "/channels/support", strings.NewReader(body))
		r.Header.Set("X-Telegram-Bot-Api-Secret-Token", secret)
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		return w.Code
	}
	const update = `{"update_id": 1, "message": {"message_id": 5, "caption": "see this", "chat": {"id": 9},
		"from": {"id": 9, "first_name": "Mara"}, "document": {"file_id": "file0", "file_name": "a\u0000.txt", "file_size": 7}}}`
	assert.Equal(t, 401, post("", update))
	assert.Equal(t, 401, post("wrong", update))
	assert.Equal(t, 1, strings.Count(s.log.String(), "request for a channel refused"), "for two requests")
	assert.Contains(t, s.log.String(), "the secret token is wrong")
	away, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/away")
	require.NoError(t, err)
	defer away.Close()
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(t.Context(), "POST", "/channels/support", strings.NewReader(update))
	r.SetPathValue("name", "support")
	(&channels.Runner{Pool: away, Logger: slog.New(slog.DiscardHandler)}).ServeHTTP(w, r)
	assert.Equal(t, 503, w.Code, "without the database the answer is", w.Body)
	s.env.Store("WEBHOOK", "") // without a secret for a while
	pgtest.Exec(t, s.pool, `update agent_channels set agent = 'another'`)
	assert.Equal(t, 503, post("a secret", update))
	s.env.Store("WEBHOOK", "a rotated secret")
	assert.Equal(t, 401, post("a secret", update))
	assert.Equal(t, 400, post("a rotated secret", "no JSON"))
	for range 9 {
		assert.Equal(t, 200, post("a rotated secret", update))
	}
	connects := strings.Count(s.log.String(), "channel connected") // the worker logs it as well
	assert.Truef(t, connects < 9, "%d lines for 9 requests say that the channel is connected", connects)
	s.env.Store("WEBHOOK", "a third secret")
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `select from agent_channels for no key update`)
	answers := make(chan int, 2)
	for range 2 {
		go func() { answers <- post("a third secret", update) }()
	}
	assert.Equal(t, 200, testkit.Receive(t, answers), "while another request records the state")
	require.NoError(t, tx.Rollback(t.Context()))
	assert.Equal(t, 200, testkit.Receive(t, answers))
	v := testkit.Receive(t, visits)
	assert.Truef(t, v.Text == "see this" && len(v.Files) == 1 && string(v.Files[0].Content) == "content" &&
		v.Sender == "9", "got %+v", v)
	pgtest.Until(t, s.pool, "failed", `select string_agg(status, ' ') from agent_channel_messages`)
	assert.Equal(t, "<code>not &lt;b&gt;today&lt;/b&gt;</code>", s.bot.Sent(9)[0].Text)
	s.env.Store("TOKEN", "4712:of-another-bot")
	assert.Equal(t, 200, post("a third secret", update))
	pgtest.Equal(t, s.pool, 2, `select count(*)::int from agent_channel_messages`)
}

// A lost turn gets a notice. A relay gets none, because the flow has its message. A deleted thread does not block other
// turns.
func TestOnlyLostTurnsOfLiveThreadsGetANotice(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{Pairing: channels.PairingOpen}, nil)
	pgtest.Exec(t, s.pool, `insert into agent_threads (id, channel) values ('lost', 'telegram'), ('relayed', 'telegram')`)
	pgtest.Exec(t, s.pool, `
		with x as (
		  insert into agent_executions (trace_id, surface, flow, status, claim, claimed_by, thread_id)
		  select 'ch_' || v.thread, 'chat', v.flow, 'running', 1, lanekeeper.agent_uuid7(), v.thread
		    from (values ('pruned', 'chat'), ('relayed', 'chat_relay'), ('lost', 'chat')) v (thread, flow)
		  returning id, thread_id)
		insert into agent_channel_messages (channel, external_id, conversation, sender, status, thread_id, execution_id)
		select 'support', x.thread_id, x.thread_id, '7', 'running', x.thread_id, x.id from x`)
	s.bot.Fail(func(method string, _ map[string]any) telegramtest.Fault {
		return map[bool]telegramtest.Fault{true: telegramtest.Broken}[method == "sendMessage"]
	})
	pgtest.Exec(t, s.pool, `select pg_notify('agent_channels', 'support')`)
	pgtest.Exec(t, s.pool, `update agent_executions set status = 'failed', claim = claim + 1, error_message = 'given up'`)
	s.until("all messages are done", func() bool {
		return pgtest.Value[bool](t, s.pool, `select bool_and(status = 'done') from agent_channel_messages`)
	})
	pgtest.Equal(t, s.pool, "lost "+channels.FailedNotice,
		`select string_agg(thread_id || ' ' || content, ', ') from agent_messages`)
	s.until("the lost answer of Telegram is logged with its trace", func() bool {
		return strings.Contains(s.log.String(), "trace_id=ch_lost")
	})
}

// turn adds a turn of chat 5, running or waiting for an approval, and returns its execution. post sends its answer.
func (s *stand) turn(name string, waits bool) (id string) {
	s.t.Helper()
	pgtest.Exec(s.t, s.pool, `insert into agent_threads (id, name, channel, target, owner)
		values ('asked', '5', 'telegram', 'support', 'channel:support') on conflict do nothing`)
	id = pgtest.Value[string](s.t, s.pool, `
		insert into agent_executions (trace_id, surface, flow, status, claim, claimed_by, thread_id)
		values ('ch_asked', 'chat', 'chat', 'running', 1, lanekeeper.agent_uuid7(), 'asked') returning id::text`)
	if waits {
		pgtest.Exec(s.t, s.pool, `
			update agent_executions set status = 'waiting', waiting_for = 'approval', waiting_key = 'a', waiting_step = 's'
			 where id = $1`, id)
		pgtest.Exec(s.t, s.pool, `
			insert into agent_approvals (trace_id, execution_id, step, parked, skill_name, skill_revision, arguments,
			  arguments_hash, expires_at)
			values ('ch_asked', $1::uuid, 's', true, 'refund', 1, '{}', 'h', clock_timestamp() + interval '1 day')`, id)
	}
	pgtest.Exec(s.t, s.pool, `
		insert into agent_channel_messages (channel, external_id, conversation, sender, status, thread_id, execution_id,
		  received_at)
		values ('support', $1, '5', '5', 'running', 'asked', $2::uuid, clock_timestamp() - interval '1 minute')`, name, id)
	pgtest.Exec(s.t, s.pool, `select pg_notify('agent_channels', 'support')`)
	return id
}

func (s *stand) post(id, text string) {
	s.t.Helper()
	pgtest.Exec(s.t, s.pool, `update agent_executions set status = 'completed' where id = $1`, id)
	require.NoError(s.t, postgres.InTx(s.t.Context(), s.pool, func(tx pgx.Tx) error {
		m, err := threads.Post(s.t.Context(), tx, threads.NewMessage{
			ThreadID: "asked", Role: threads.Assistant, Content: text, Channel: channels.Telegram, Target: "support",
			Status: threads.Sending, ExecutionID: id, TraceID: "ch_asked",
		})
		if err != nil {
			return err
		}
		return channels.Enqueue(s.t.Context(), tx, m.ID)
	}))
}

// A provider notifies nobody of an edit. So the answer after an approval is a new message.
func TestTheAnswerAfterAnApprovalIsANewMessage(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{Pairing: channels.PairingOpen}, nil)
	id := s.turn("first", true)
	s.until("the notice", func() bool { return len(s.bot.Sent(5)) == 1 })
	assert.Contains(t, s.bot.Sent(5)[0].Text, "An admin has to approve a step")
	pgtest.Exec(t, s.pool, `update agent_executions set status = 'running', claim = claim + 1 where id = $1`, id)
	s.post(id, "I have refunded it.")
	s.until("the answer", func() bool { return len(s.bot.Sent(5)) == 2 })
	assert.Equal(t, "I have refunded it.", s.bot.Sent(5)[1].Text)
	assert.Equal(t, "<i>The answer is below.</i>", s.bot.Sent(5)[0].Text)
}

// A sender learns that a message queues behind an approval. The channel does not show that the agent types.
func TestAMessageBehindAnApprovalIsAcknowledged(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{Pairing: channels.PairingOpen}, nil)
	s.turn("first", true)
	second := s.turn("second", false)
	s.until("the notices", func() bool { return len(s.bot.Sent(5)) == 2 })
	notice := s.bot.Sent(5)[1].Text
	assert.Contains(t, notice, "a step of an earlier message")
	s.post(second, "Yes, I am here.")
	s.until("the answer", func() bool { return len(s.bot.Sent(5)) == 3 })
	assert.Equal(t, "Yes, I am here.", s.bot.Sent(5)[2].Text)
	assert.Equal(t, notice, s.bot.Sent(5)[1].Text)
	assert.Equal(t, 0, s.bot.Typed())
}

// A queued turn may need an approval of its own, later.
func TestAQueuedTurnTellsOfItsOwnApproval(t *testing.T) {
	t.Parallel()
	s := newStand(t, channels.Definition{Pairing: channels.PairingOpen}, nil)
	first, second := s.turn("first", true), s.turn("second", false)
	s.until("the notices", func() bool { return len(s.bot.Sent(5)) == 2 })
	pgtest.Exec(t, s.pool, `update agent_executions set status = 'waiting', waiting_for = 'approval', waiting_key = 'b',
		waiting_step = 's' where id = $1`, second)
	pgtest.Exec(t, s.pool, `update agent_executions set status = 'cancelled' where id = $1`, first)
	s.until("the notice of the second turn", func() bool { return len(s.bot.Sent(5)) == 3 })
	assert.Contains(t, s.bot.Sent(5)[2].Text, "a step before I can go on")
}
