package email

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/smtp"
	"net/textproto"
	"time"

	"github.com/lanekeeper/lanekeeper/channels"
)

const (
	dialTimeout   = 10 * time.Second
	sendTimeout   = 45 * time.Second
	answerTimeout = 20 * time.Second // for the answer to a mail that was sent whole
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
	if err := offer(c, t.bouncePath(m.ID), to); err != nil {
		return "", refused(err)
	}
	body, err := c.Data()
	if err != nil {
		return "", refused(err)
	}
	if _, err := body.Write(raw); err != nil { // the server takes nothing without the line that ends it
		return "", channels.NotSent(fmt.Errorf("send mail: %w", err))
	}
	if !stop() {
		return "", channels.NotSent(ctx.Err())
	}
	_ = conn.SetDeadline(time.Now().Add(answerTimeout))
	if err := body.Close(); err != nil {
		if _, answered := errors.AsType[*textproto.Error](err); !answered {
			return "", &channels.SendError{Err: fmt.Errorf("the answer to the mail was lost: %w", err), MaybeSent: true}
		}
		return "", refused(err)
	}
	_ = c.Quit() // the mail is sent
	return id, nil
}

func offer(c *smtp.Client, from, to string) error {
	if err := c.Mail(from); err != nil {
		return err
	}
	return c.Rcpt(to)
}

// refused says whether a refusal is final. Without an answer, or with one that blames the login, nothing was sent.
func refused(err error) error {
	answer, is := errors.AsType[*textproto.Error](err)
	if !is {
		return channels.NotSent(fmt.Errorf("send mail: %w", err))
	}
	login := answer.Code == 530 || answer.Code == 534 || answer.Code == 535 || answer.Code == 538
	return &channels.SendError{
		Err: fmt.Errorf("the SMTP server refused the mail: %w", err), Permanent: answer.Code >= 500 && !login,
	}
}

// dial connects to the SMTP server and logs in.
func (t *transport) dial(ctx context.Context) (_ *smtp.Client, _ net.Conn, err error) {
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", t.smtp.address)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to the SMTP server: %w", err)
	}
	if deadline, has := ctx.Deadline(); has {
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

// probe logs in at the SMTP server and leaves.
func (t *transport) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, _, err := t.dial(ctx)
	if err != nil {
		return err
	}
	_ = c.Quit() // the login is what was asked
	return nil
}
