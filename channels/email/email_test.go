package email

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/emersion/go-message/mail"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// inbox records the received messages.
type inbox struct {
	got     []channels.Incoming
	bounces []string
	err     error
	state   chan error
}

func (b *inbox) Receive(_ context.Context, _ string, messages ...channels.Incoming) error {
	if b.err == nil {
		b.got = append(b.got, messages...)
	}
	return b.err
}

func (b *inbox) Bounced(_ context.Context, id, why string) error {
	b.bounces = append(b.bounces, id+": "+why)
	return b.err
}

func (b *inbox) Cursor(context.Context) (string, time.Duration, error) { return "", 0, nil }

func (b *inbox) Known(context.Context, string) (bool, error) { return false, nil }

func (b *inbox) Connected(context.Context) { b.state <- nil }

func (b *inbox) Failing(_ context.Context, err error) { b.state <- err }

func open(t *testing.T, settings ...string) *transport {
	t.Helper()
	set := map[string]string{
		"address": "Shop Support <support@shop.example>", "smtp": "127.0.0.1:25", "smtp_tls": "none",
		"authserv_id": "mx.shop.example",
	}
	for i := 0; i < len(settings); i += 2 {
		set[settings[i]] = settings[i+1]
	}
	pairing := set["pairing"]
	delete(set, "pairing")
	got, err := Open(channels.Config{
		Channel: channels.Channel{
			Name: "mail", Type: channels.Email, Settings: set, Pairing: cmp.Or(pairing, channels.PairingOpen),
		},
		Secrets: map[string]string{"key": "a key of the test", "webhook": "hook secret"},
		Logger:  slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	return got.(*transport)
}

const bob = "bob@home.example"

// errAway is the error of an absent database.
var errAway = errors.New("the database is away")

// pass is the pinned server's header for mail from Bob.
const pass = "Authentication-Results: mx.shop.example; dmarc=pass header.from=home.example\r\n"

// mailOf returns a mail of Bob with further headers.
func mailOf(id, headers, text string) []byte {
	return fmt.Appendf(nil, "%sFrom: Bob <%s>\r\nTo: support@shop.example\r\nMessage-ID: <%s>\r\nSubject: Order 12\r\n"+
		"\r\n%s\r\n", headers, bob, id, text)
}

// receivedFrom delivers a mail from a relay.
func (t *transport) receivedFrom(tb testing.TB, raw []byte, to ...string) channels.Incoming {
	tb.Helper()
	in := &inbox{}
	require.NoError(tb, t.storeMail(tb.Context(), in, raw, envelope{from: bob, to: to, trusted: true}))
	require.Equal(tb, 1, len(in.got), "messages came of one mail")
	return in.got[0]
}

func TestASenderIsProvenOnlyByThePinnedServer(t *testing.T) {
	t.Parallel()
	const id = "mx.shop.example; "
	for name, test := range map[string]struct {
		headers []string
		proven  bool
	}{
		"dmarc":              {[]string{id + "dmarc=pass header.from=home.example"}, true},
		"dkim":               {[]string{id + "dkim=pass header.d=home.example"}, true},
		"dkim identity":      {[]string{id + "spf=fail; dkim=pass header.i=@Home.Example"}, true},
		"comment":            {[]string{id + "dmarc=pass (p=NONE sp=NONE dis=NONE) header.from=home.example"}, true},
		"none":               {nil, false},
		"failed":             {[]string{id + "dmarc=fail header.from=home.example"}, false},
		"failed with dkim":   {[]string{id + "dmarc=fail header.from=home.example; dkim=pass header.d=home.example"}, false},
		"spf alone":          {[]string{id + "spf=pass smtp.mailfrom=home.example"}, false},
		"other domain":       {[]string{id + "dmarc=pass header.from=evil.example; dkim=pass header.d=evil.example"}, false},
		"parent domain":      {[]string{id + "dkim=pass header.d=example"}, false},
		"other server":       {[]string{"mx.evil.example; dmarc=pass header.from=home.example"}, false},
		"foreign above":      {[]string{"mx.home.example; dmarc=fail", id + "dmarc=pass header.from=home.example"}, true},
		"dkim without dmarc": {[]string{id + "dmarc=none; dkim=pass header.d=home.example"}, true},
		"escaped quote":      {[]string{id + `spf=pass smtp.mailfrom="\"; dmarc=pass header.from=home.example; x=\""@e`}, false},
		"forged below":       {[]string{id + "dmarc=fail", id + "dmarc=pass header.from=home.example"}, false},
		"in a comment":       {[]string{id + "spf=pass (; dmarc=pass header.from=home.example ;) smtp.mailfrom=x"}, false},
		"in a string":        {[]string{id + `spf=pass smtp.mailfrom="; dmarc=pass header.from=home.example ;"@e`}, false},
		"open comment":       {[]string{id + "dmarc=pass header.from=home.example (; "}, false},
		"two words":          {[]string{"mx.shop.example 2; dmarc=pass header.from=home.example"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := proven(test.headers, "mx.shop.example", "home.example")
			assert.Truef(t, got == test.proven, "proven is %v for %q", got, test.headers)
		})
	}
	assert.True(t, !proven([]string{"; dmarc=pass header.from=home.example"}, "", "home.example"),
		"without a pinned server, a sender is proven")
}

func TestAReplyContinuesItsConversationForItsSenderOnly(t *testing.T) {
	t.Parallel()
	mb := open(t)
	first := mb.receivedFrom(t, mailOf("1@home", pass, "Where is it?"))
	require.Truef(t, first.Sender == bob && first.Ignored == "" && strings.HasPrefix(first.Conversation, bob+"#"),
		"the first mail is %+v", first)
	assert.Equal(t, "Subject: Order 12\n\nWhere is it?", first.Text)
	_, id, answer, err := mb.compose(channels.Message{
		ID: "0198c0de-0000-7000-8000-000000000001", Conversation: first.Conversation,
		ReplyTo: first.MessageRef, Markdown: "Soon.",
	}, time.Now())
	require.NoError(t, err)
	h := headers(t, answer)
	replyTo := list(t, h, "Reply-To")
	for name, test := range map[string]struct {
		raw   []byte
		to    string
		other bool
	}{
		"by the reply address": {mailOf("2@home", pass, "Thanks"), replyTo, false},
		"by its case":          {mailOf("2@home", pass, "Thanks"), strings.ToUpper(replyTo), false},
		"by the parent":        {mailOf("3@home", pass+"In-Reply-To: <"+id+">\r\n", "Thanks"), "", false},
		"by references":        {mailOf("4@home", pass+"References: <"+id+"> <x@home>\r\n", "Thanks"), "", false},
		"before the answer":    {mailOf("5@home", pass+"References: <1@home>\r\n", "Hello?"), "", false},
		"new mail":             {mailOf("6@home", pass, "Something else"), "", true},
		"not proven":           {mailOf("7@home", "", "Thanks"), replyTo, true},
		"changed token":        {mailOf("8@home", pass, "Thanks"), strings.Replace(replyTo, "+", "+a", 1), true},
		"somebody else": {
			[]byte(strings.ReplaceAll(string(mailOf("9@evil", pass+"In-Reply-To: <"+id+">\r\n", "x")), "home.example",
				"evil.example")),
			replyTo, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := mb.receivedFrom(t, test.raw, cmp.Or(test.to, "support@shop.example"))
			assert.Truef(t, (got.Conversation != first.Conversation) == test.other,
				"the conversation is %s, the first one %s", got.Conversation, first.Conversation)
		})
	}
	_, _, ok := strings.Cut(replyTo, "+")
	assert.Truef(t, ok && len(replyTo[:strings.Index(replyTo, "@")]) <= 64, "the reply address is %s", replyTo)
}

func TestAMailThatTheAgentBeganIsAnsweredInItsConversation(t *testing.T) {
	t.Parallel()
	mb := open(t)
	_, _, raw, err := mb.compose(channels.Message{
		ID: "report", Conversation: bob, Markdown: "# All *well*\n\nNothing failed.",
	}, time.Now())
	require.NoError(t, err)
	h := headers(t, raw)
	assert.Equal(t, "All *well", h.Get("Subject"))
	assert.Equal(t, "auto-generated", h.Get("Auto-Submitted"))
	got := mb.receivedFrom(t, mailOf("1@home", pass, "Good"), list(t, h, "Reply-To"))
	assert.Equal(t, bob, got.Conversation)
}

func headers(tb testing.TB, raw []byte) mail.Header {
	tb.Helper()
	r, err := mail.CreateReader(strings.NewReader(string(raw)))
	require.NoError(tb, err)
	return r.Header
}

func list(tb testing.TB, h mail.Header, name string) string {
	tb.Helper()
	all, err := h.AddressList(name)
	require.NoError(tb, err)
	require.Truef(tb, len(all) == 1, "%s is %v", name, all)
	return all[0].Address
}

func TestAutomaticMailIsStoredAndNotAnswered(t *testing.T) {
	t.Parallel()
	mb := open(t)
	for name, test := range map[string]struct {
		headers string
		from    string
	}{
		"auto-replied":   {"Auto-Submitted: auto-replied\r\n", bob},
		"auto-generated": {"Auto-Submitted: Auto-Generated (vacation)\r\n", bob},
		"list":           {"List-Id: <x>\r\n", bob},
		"newsletter":     {"list-unsubscribe: <x>\r\n", bob},
		"bulk":           {"Precedence: Bulk\r\n", bob},
		"return path":    {"Return-Path: <>\r\n", bob},
		"empty envelope": {"", ""},
		"suppressed":     {"X-Auto-Response-Suppress: All\r\n", bob},
		"two senders":    {"From: eve@evil.example\r\n", bob},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			in := &inbox{}
			raw := mailOf("1@home", pass+test.headers, "Hello")
			require.NoError(t, mb.storeMail(t.Context(), in, raw, envelope{from: test.from, trusted: true}))
			assert.Truef(t, len(in.got) == 1 && in.got[0].Ignored != "", "%+v", in.got)
		})
	}
	for _, from := range []string{"support@shop.example", "Support+abc@Shop.example", "MAILER-DAEMON@home.example"} {
		raw := strings.Replace(string(mailOf("1@home", pass, "Hello")), bob, from, 1)
		assert.Truef(t, mb.receivedFrom(t, []byte(raw)).Ignored != "", "mail from %s is answered", from)
	}
	got := mb.receivedFrom(t, mailOf("1@home", pass+"Auto-Submitted: no\r\n", "Hello"))
	assert.Equal(t, "", got.Ignored, "mail of a person is ignored")
}

func TestMailOfAnUnprovenSenderIsHeldWherePairingIsRequired(t *testing.T) {
	t.Parallel()
	raw := mailOf("1@home", "", "Hello")
	held := open(t, "pairing", channels.PairingRequired).receivedFrom(t, raw)
	assert.Contains(t, held.Ignored, "not proven by mx.shop.example")
	free := open(t).receivedFrom(t, raw)
	assert.Truef(t, free.Ignored == "" && free.Sender == "?"+bob && strings.HasPrefix(free.Conversation, "?"+bob+"#"),
		"an open channel takes it as %+v", free)
	in := &inbox{} // any client can write the header
	require.NoError(t, open(t).storeMail(t.Context(), in, mailOf("1@home", pass, "Hello"), envelope{from: bob}))
	assert.Equal(t, "?"+bob, in.got[0].Sender)
}

func TestABounceMarksTheMessageThatItsReturnPathNames(t *testing.T) {
	t.Parallel()
	mb := open(t)
	const id = "0198c0de-0000-7000-8000-000000000001"
	bounce := func(action string) []byte {
		return fmt.Appendf(nil, "From: MAILER-DAEMON@home.example\r\nTo: %s\r\nAuto-Submitted: auto-replied\r\n"+
			"Content-Type: multipart/report; report-type=delivery-status; boundary=b\r\n\r\n--b\r\n\r\nSorry.\r\n--b\r\n"+
			"Content-Type: message/delivery-status\r\n\r\nReporting-MTA: dns; home.example\r\n\r\n"+
			"Final-Recipient: rfc822; %s\r\nAction: %s\r\nStatus: 5.1.1\r\nDiagnostic-Code: smtp; 550 no\r\n such user\r\n--b--\r\n",
			mb.bouncePath(id), bob, action)
	}
	take := func(raw []byte, to string) *inbox {
		t.Helper()
		in := &inbox{}
		require.NoError(t, mb.storeMail(t.Context(), in, raw, envelope{to: []string{to}}))
		return in
	}
	failed := take(bounce("failed"), mb.bouncePath(id))
	assert.Equal(t, id+": the mail came back: smtp; 550 no such user", strings.Join(failed.bounces, "|"))
	assert.True(t, len(failed.got) == 0, "a bounce is a message of a person")
	if late := take(bounce("delayed"), mb.bouncePath(id)); len(late.bounces) > 0 || late.got[0].Ignored == "" {
		t.Errorf("a delayed mail counts as failed, or its report is answered: %+v", late)
	}
	forged := strings.Replace(mb.bouncePath(id), "@", "a@", 1)
	raw := []byte(strings.ReplaceAll(string(bounce("failed")), mb.bouncePath(id), forged))
	got := take(raw, forged)
	assert.Truef(t, len(got.bounces) == 0, "an unsigned return path marks a message: %v", got.bounces)
}

func TestAMailIsTheSameWhenItComesAgain(t *testing.T) {
	t.Parallel()
	mb := open(t)
	one := mb.receivedFrom(t, mailOf("1@home", pass, "Hello"))
	again := mb.receivedFrom(t, mailOf("1@home", pass+"Received: from elsewhere\r\n", "Hello"))
	assert.Equal(t, one.ExternalID, again.ExternalID)
	eve := []byte(strings.ReplaceAll(string(mailOf("1@home", pass, "Hello")), "home.example", "evil.example"))
	assert.True(t, mb.receivedFrom(t, eve).ExternalID != one.ExternalID, "another sender takes the id of a mail")
	without := func(received, text string) string {
		raw := strings.Replace(string(mailOf("1@home", pass+received, text)), "Message-ID: <1@home>\r\n", "", 1)
		return mb.receivedFrom(t, []byte(raw)).ExternalID
	}
	if a, b, c := without("", "x"), without("Received: y\r\n", "x"), without("", "z"); a != b || a == c {
		t.Errorf("without a Message-ID: %s, %s, %s", a, b, c)
	}
}

func TestTheHookTakesOnlyWhatItsSecretSigned(t *testing.T) {
	t.Parallel()
	mb := open(t)
	for name, test := range map[string]struct {
		token, kind, body string
		err               error
		status            int
	}{
		"raw":          {"hook secret", "message/rfc822", string(mailOf("1@home", pass, "Hi")), nil, 204},
		"json":         {"hook secret", "application/json", `{"RawEmail":"From: bob@home.example\r\n\r\nHi"}`, nil, 204},
		"no secret":    {"", "message/rfc822", string(mailOf("1@home", pass, "Hi")), nil, 401},
		"wrong secret": {"x", "message/rfc822", string(mailOf("1@home", pass, "Hi")), nil, 401},
		"no mail":      {"hook secret", "application/json", `{}`, nil, 400},
		"large mail":   {"hook secret", "message/rfc822", strings.Repeat("x", 15_000), nil, 413}, // above max_bytes
		"large body":   {"hook secret", "message/rfc822", strings.Repeat("x", 21_000), nil, 413}, // above twice max_bytes
		"no database":  {"hook secret", "message/rfc822", string(mailOf("1@home", pass, "Hi")), errAway, 503},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			small := open(t, "max_bytes", "10000")
			in, w := &inbox{err: test.err}, httptest.NewRecorder()
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/channels/mail", strings.NewReader(test.body))
			r.Header.Set("Content-Type", test.kind)
			if test.token != "" {
				r.Header.Set("Authorization", "Bearer "+test.token)
			}
			small.Hook(w, r, in)
			assert.Truef(t, w.Code == test.status && (len(in.got) == 1) == (test.status == 204) &&
				!strings.Contains(w.Body.String(), "hook secret"), "%d %s, %d messages", w.Code, w.Body, len(in.got))
		})
	}
	mb.hook.Secrets = nil
	w := httptest.NewRecorder()
	mb.Hook(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/channels/mail", nil), &inbox{})
	assert.Equal(t, http.StatusNotFound, w.Code)
}
