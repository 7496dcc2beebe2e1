package email

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
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

// Run implements [channels.Transport]. It receives mail if the channel has the setting listen. Once in probePeriod it
// checks the SMTP server that sends the answers.
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

// listen starts the SMTP server. An error that ends the server later goes to failed.
func (t *transport) listen(
	ctx context.Context, address string, in channels.Inbox, failed chan<- error,
) (*smtp.Server, error) {
	s := smtp.NewServer(smtp.BackendFunc(func(c *smtp.Conn) (smtp.Session, error) {
		return &session{transport: t, ctx: ctx, in: in, relay: t.isRelay(c.Conn().RemoteAddr())}, nil
	}))
	s.Domain, s.MaxMessageBytes, s.MaxRecipients = t.domain, t.maxBytes, maxRecipients
	s.MaxLineLength = maxLine
	s.ReadTimeout, s.WriteTimeout = idleTimeout, idleTimeout
	s.ErrorLog = slog.NewLogLogger(t.Logger.Handler(), slog.LevelDebug)
	settings := t.Channel.Settings
	if settings["tls_cert"] != "" {
		load := func(*tls.ClientHelloInfo) (*tls.Certificate, error) { // for each connection: the files may be renewed
			pair, err := tls.LoadX509KeyPair(settings["tls_cert"], settings["tls_key"])
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

// isRelay reports whether an address is one of the setting relays.
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

// Data responds after the mail is stored.
func (s *session) Data(r io.Reader) error {
	raw, err := io.ReadAll(r)
	if err != nil {
		return err // the error has the reason, such as the size
	}
	ctx, cancel := context.WithTimeout(s.ctx, storeTimeout)
	defer cancel()
	err = s.storeMail(ctx, s.in, raw, envelope{from: s.from, to: s.to, trusted: s.relay})
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errUnreadable):
		return &smtp.SMTPError{Code: 554, EnhancedCode: smtp.EnhancedCode{5, 6, 0}, Message: "The mail cannot be read"}
	}
	s.Logger.WarnContext(ctx, "mail not stored, its server will try again", "channel", s.Channel.Name, "error", err)
	return &smtp.SMTPError{Code: 451, EnhancedCode: smtp.EnhancedCode{4, 3, 0}, Message: "The mail cannot be stored now"}
}
