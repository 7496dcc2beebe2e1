package email

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/smtp"
	"net/textproto"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/channels"
)

const (
	dialTimeout   = 10 * time.Second
	sendTimeout   = 45 * time.Second
	answerTimeout = 20 * time.Second // for the server's answer after the whole mail
)

// Send implements [channels.Transport].
func (t *transport) Send(ctx context.Context, m channels.Message) (string, error) {
	to, id, raw, err := t.compose(m, time.Now())
	if err != nil {
		return "", &channels.SendError{Err: err, Permanent: true}
	}
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	c, conn, err := t.dial(ctx)
	if err != nil {
		return "", channels.NotSent(err)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := startMail(c, t.bouncePath(m.ID), to); err != nil {
		return "", sendError(err)
	}
	body, err := c.Data()
	if err != nil {
		return "", sendError(err)
	}
	if _, err := body.Write(raw); err != nil { // the server accepts no mail before the line with the dot
		return "", channels.NotSent(fmt.Errorf("send mail: %w", err))
	}
	if !stop() {
		return "", channels.NotSent(ctx.Err())
	}
	// From here on the server may accept the mail, so ctx no longer interrupts the wait for its response.
	_ = conn.SetDeadline(time.Now().Add(answerTimeout))
	if err := body.Close(); err != nil {
		if _, responded := errors.AsType[*textproto.Error](err); !responded {
			return "", &channels.SendError{Err: fmt.Errorf("the answer to the mail was lost: %w", err), MaybeSent: true}
		}
		return "", sendError(err)
	}
	_ = c.Quit() // the server has accepted the mail
	return id, nil
}

// startMail sends the envelope of a mail.
func startMail(c *smtp.Client, from, to string) error {
	if err := mailFrom(c, from); err != nil {
		return err
	}
	return c.Rcpt(to)
}

// mailFrom sends MAIL FROM. [smtp.Client.Mail] requests SMTPUTF8 if the server supports it, but a later server may not.
// So mailFrom requests it only for an address that needs it.
func mailFrom(c *smtp.Client, from string) error {
	if !plainAddress(from) {
		return c.Mail(from)
	}
	id, err := c.Text.Cmd("MAIL FROM:<%s>", from)
	if err != nil {
		return err
	}
	c.Text.StartResponse(id)
	defer c.Text.EndResponse(id)
	_, _, err = c.Text.ReadResponse(250)
	return err
}

// sendError converts an error from before the mail was accepted. A response of 500 or more is permanent, unless it is
// about authentication (RFC 4954), which an admin can correct.
func sendError(err error) error {
	response, ok := errors.AsType[*textproto.Error](err)
	if !ok {
		return channels.NotSent(fmt.Errorf("send mail: %w", err))
	}
	authentication := slices.Contains([]int{530, 534, 535, 538}, response.Code)
	return &channels.SendError{
		Err: fmt.Errorf("the SMTP server refused the mail: %w", err), Permanent: response.Code >= 500 && !authentication,
	}
}

// dial connects to the SMTP server and logs in.
func (t *transport) dial(ctx context.Context) (_ *smtp.Client, _ net.Conn, err error) {
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", t.smtp.address)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to the SMTP server: %w", err)
	}
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if t.smtp.mode == "implicit" {
		conn = tls.Client(conn, t.smtp.tls)
	}
	c, err := smtp.NewClient(conn, t.smtp.tls.ServerName)
	if err != nil {
		_ = conn.Close()
		return nil, nil, fmt.Errorf("greet the SMTP server: %w", err)
	}
	defer func() {
		if err != nil {
			_ = c.Close()
		}
	}()
	if err := c.Hello(t.domain); err != nil {
		return nil, nil, fmt.Errorf("greet the SMTP server: %w", err)
	}
	if t.smtp.mode == "starttls" {
		if err := c.StartTLS(t.smtp.tls); err != nil {
			return nil, nil, fmt.Errorf("start TLS with the SMTP server: %w", err)
		}
	}
	if t.smtp.user != "" {
		auth := smtp.PlainAuth("", t.smtp.user, t.smtp.secret, t.smtp.tls.ServerName)
		if err := c.Auth(auth); err != nil {
			return nil, nil, fmt.Errorf("log in at the SMTP server: %w", err)
		}
	}
	return c, conn, nil
}

// probe logs in at the SMTP server and disconnects.
func (t *transport) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, _, err := t.dial(ctx)
	if err != nil {
		return err
	}
	_ = c.Quit() // the login succeeded
	return nil
}
