package email

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/emersion/go-smtp"
	"golang.org/x/net/netutil"

	"github.com/lanekeeper/lanekeeper/channels"
)

const (
	maxConnections = 20
	maxRecipients  = 20
	maxLine        = 64 << 10 // bytes; many mailers exceed the 998 of the standard
	idleTimeout    = time.Minute
	busyTimeout    = 5 * time.Second // instead of idleTimeout while there are maxConnections
	storeTimeout   = 30 * time.Second
	probePeriod    = time.Minute
)

// envelope has SMTP's data about a mail beside its content.
type envelope struct {
	from string // "" for an empty return path
	to   []string
	sure bool // a relay or the hook vouches for Authentication-Results
}

// take stores a mail. An error that wraps [errUnreadable] is final.
func (t *transport) take(ctx context.Context, in channels.Inbox, raw []byte, e envelope) error {
	m, err := read(raw)
	if err != nil {
		return err
	}
	recipients := slices.Concat(e.to, m.recipients)
	if id, is := t.bouncedTo(recipients); is {
		switch {
		case m.failure != "":
			return in.Bounced(ctx, id, m.failure)
		case !m.report && e.from == "" && strings.HasPrefix(m.from, "mailer-daemon@"):
			return in.Bounced(ctx, id, "the mail came back: "+line(m.subject, 200))
		}
	}
	return in.Receive(ctx, "", t.incoming(m, raw, recipients, e))
}

func (t *transport) bouncedTo(recipients []string) (id string, ok bool) {
	for _, r := range recipients {
		if suffix, ours := t.suffix(r); ours {
			if id, ok = t.bounced(suffix); ok {
				return id, true
			}
		}
	}
	return "", false
}

// incoming returns a mail as a message of its conversation.
func (t *transport) incoming(m received, raw []byte, recipients []string, e envelope) channels.Incoming {
	who := m.from
	_, domain, _ := strings.Cut(m.from, "@")
	sure := e.sure && proven(m.results, t.Channel.Settings["authserv_id"], domain)
	if !sure {
		who = unproven + m.from
	}
	conversation, reply := t.conversation(m, who, recipients)
	content := m.text
	switch {
	case reply:
		content = withoutQuote(content, t.address)
	case m.subject != "":
		content = "Subject: " + m.subject + "\n\n" + content
	}
	root := m.id
	if len(m.references) > 0 {
		root = m.references[0]
	}
	return channels.Incoming{
		ExternalID: externalID(m, who, raw), Conversation: conversation, Sender: who, SenderName: m.name,
		Text: strings.TrimSpace(content), Files: m.files, Raw: raw, Ignored: t.ignored(m, e, sure),
		MessageRef: reference{id: m.id, root: root, subject: m.subject}.String(),
	}
}

// conversation returns the conversation of a mail. reply is true if it answers a mail of ours.
func (t *transport) conversation(m received, who string, recipients []string) (name string, reply bool) {
	var tokens []string
	for _, r := range recipients {
		if suffix, ours := t.suffix(r); ours {
			tokens = append(tokens, suffix)
		}
	}
	for _, id := range slices.Backward(m.references) {
		tokens = append(tokens, t.tokenOf(id))
	}
	for _, token := range tokens {
		if root, ok := t.verify(token, who); ok {
			return conversation(who, root), true
		}
	}
	first := m.id
	if len(m.references) > 0 {
		first = m.references[0]
	}
	return conversation(who, t.rootOf(who, first)), false
}

// externalID identifies a mail: a repeated copy has the same id. The sender is part of it, so nobody can claim the id
// of another sender's mail.
func externalID(m received, who string, raw []byte) string {
	if m.id != "" {
		return m.id + " " + who
	}
	h := sha256.New()
	_, body, _ := strings.Cut(string(raw), "\r\n\r\n") // headers change on the way
	for _, part := range []string{who, m.subject, body} {
		h.Write([]byte(part + "\x00"))
	}
	return hex.EncodeToString(h.Sum(nil))
}

// ignored returns the reason not to answer a mail.
func (t *transport) ignored(m received, e envelope, sure bool) string {
	local, _, _ := strings.Cut(m.from, "@")
	_, own := t.suffix(m.from)
	switch {
	case m.automatic != "":
		return m.automatic
	case e.from == "":
		return "it has no return path"
	case m.report, local == "mailer-daemon", local == "postmaster":
		return "it is a mail of a mail server"
	case m.from == "":
		return "it has no sender, several senders, or an unreadable sender"
	case own:
		return "the channel itself sent it"
	case !sure && t.Channel.Pairing != channels.PairingOpen:
		by := cmp.Or(t.Channel.Settings["authserv_id"], "any server: settings.authserv_id is empty")
		return "its sender is not proven by " + by
	}
	return ""
}

// Run implements [channels.Transport]. It listens if the channel has an address for that, and watches the SMTP server.
func (t *transport) Run(ctx context.Context, in channels.Inbox) error {
	failed := make(chan error, 1)
	if address := t.Channel.Settings["listen"]; address != "" {
		server, err := t.listen(ctx, address, in, failed)
		if err != nil {
			return err
		}
		defer server.Close()
	}
	tick := time.NewTicker(probePeriod)
	defer tick.Stop()
	for {
		if err := t.probe(ctx); err == nil {
			in.Connected(ctx)
		} else if ctx.Err() == nil {
			in.Failing(ctx, err)
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return err
		case <-tick.C:
		}
	}
}

func (t *transport) listen(ctx context.Context, address string, in channels.Inbox, failed chan<- error) (*smtp.Server,
	error,
) {
	s := smtp.NewServer(smtp.BackendFunc(func(c *smtp.Conn) (smtp.Session, error) {
		return &session{transport: t, ctx: ctx, in: in, relay: t.isRelay(c.Conn().RemoteAddr())}, nil
	}))
	s.Domain, s.MaxMessageBytes, s.MaxRecipients = t.domain, t.maxBytes, maxRecipients
	s.MaxLineLength = maxLine
	s.ReadTimeout, s.WriteTimeout = idleTimeout, idleTimeout
	s.ErrorLog = slog.NewLogLogger(t.Logger.Handler(), slog.LevelDebug)
	set := t.Channel.Settings
	if set["tls_cert"] != "" {
		load := func(*tls.ClientHelloInfo) (*tls.Certificate, error) { // the certificate may be renewed meanwhile
			pair, err := tls.LoadX509KeyPair(set["tls_cert"], set["tls_key"])
			return &pair, err
		}
		if _, err := load(nil); err != nil {
			return nil, misconfigured("settings.tls_cert: %v", err)
		}
		s.TLSConfig = &tls.Config{GetCertificate: load, MinVersion: tls.VersionTLS12}
	}
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	t.Logger.InfoContext(ctx, "channel listens for mail", "channel", t.Channel.Name, "address", l.Addr().String())
	bounded := netutil.LimitListener(&listener{Listener: l, open: map[*connection]struct{}{}}, maxConnections)
	go func() {
		if err := s.Serve(bounded); !errors.Is(err, smtp.ErrServerClosed) {
			failed <- err
		}
	}()
	return s, nil
}

func (t *transport) isRelay(from net.Addr) bool {
	address, err := netip.ParseAddrPort(from.String())
	return err == nil && slices.ContainsFunc(t.relays, func(p netip.Prefix) bool {
		return p.Contains(address.Addr().Unmap())
	})
}

// session is one incoming SMTP connection.
type session struct {
	*transport
	ctx   context.Context
	in    channels.Inbox
	relay bool
	from  string
	to    []string
}

func (s *session) Reset() { s.from, s.to = "", nil }

func (s *session) Logout() error { return nil }

func (s *session) Mail(from string, _ *smtp.MailOptions) error {
	s.from = from
	return nil
}

// Rcpt accepts mail for the channel only.
func (s *session) Rcpt(to string, _ *smtp.RcptOptions) error {
	if _, ours := s.suffix(to); !ours {
		return &smtp.SMTPError{Code: 550, EnhancedCode: smtp.EnhancedCode{5, 1, 1}, Message: "There is no such mailbox here"}
	}
	s.to = append(s.to, to)
	return nil
}

// Data answers after the mail is stored.
func (s *session) Data(r io.Reader) error {
	raw, err := io.ReadAll(r)
	if err != nil {
		return err // the error has the reason, such as the size
	}
	ctx, cancel := context.WithTimeout(s.ctx, storeTimeout)
	defer cancel()
	err = s.take(ctx, s.in, raw, envelope{from: s.from, to: s.to, sure: s.relay})
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errUnreadable):
		return &smtp.SMTPError{Code: 554, EnhancedCode: smtp.EnhancedCode{5, 6, 0}, Message: "The mail cannot be read"}
	}
	s.Logger.WarnContext(ctx, "mail not stored, its server will try again", "channel", s.Channel.Name, "error", err)
	return &smtp.SMTPError{Code: 451, EnhancedCode: smtp.EnhancedCode{4, 3, 0}, Message: "The mail cannot be stored now"}
}

// Hook implements [channels.Hook]. The body is a mail, or JSON with a mail in raw or RawEmail.
func (t *transport) Hook(w http.ResponseWriter, r *http.Request, in channels.Inbox) {
	if len(t.hook.Secrets) == 0 {
		http.Error(w, "this channel accepts no requests: it has no secret webhook", http.StatusNotFound)
		return
	}
	now := time.Now()
	if err := t.hook.Before(r.Header, now); err != nil {
		http.Error(w, "the signature is wrong or missing", http.StatusUnauthorized)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 2*t.maxBytes))
	if err != nil {
		http.Error(w, "the mail is too large", http.StatusRequestEntityTooLarge)
		return
	}
	if err := t.hook.Verify(r.Header, body, now); err != nil {
		http.Error(w, "the signature is wrong or missing", http.StatusUnauthorized)
		return
	}
	raw, err := rawMail(r.Header.Get("Content-Type"), body)
	if err == nil && int64(len(raw)) > t.maxBytes {
		http.Error(w, "the mail is too large", http.StatusRequestEntityTooLarge)
		return
	}
	if err == nil {
		err = t.take(r.Context(), in, raw, envelope{from: "?", sure: true})
	}
	switch {
	case err == nil:
		w.WriteHeader(http.StatusNoContent)
	case errors.Is(err, errUnreadable):
		http.Error(w, "the mail cannot be read", http.StatusBadRequest)
	default:
		t.Logger.WarnContext(r.Context(), "mail not stored, its sender should try again", "channel", t.Channel.Name,
			"error", err)
		http.Error(w, "the mail cannot be stored now", http.StatusServiceUnavailable)
	}
}

func rawMail(contentType string, body []byte) ([]byte, error) {
	if kind, _, _ := mime.ParseMediaType(contentType); kind != "application/json" {
		return body, nil
	}
	var of struct {
		Raw      string `json:"raw"`
		RawEmail string // of Postmark
	}
	if err := json.Unmarshal(body, &of); err != nil || cmp.Or(of.Raw, of.RawEmail) == "" {
		return nil, errUnreadable
	}
	return []byte(cmp.Or(of.Raw, of.RawEmail)), nil
}
