package email

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/smtp"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// answers serves SMTP with a fixed answer for each command; "" closes the connection. It returns the address.
func answers(t *testing.T, fixed map[string]string) string {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	serve := func(c net.Conn) {
		defer c.Close()
		say := func(command, usual string) bool {
			if text, has := fixed[command]; has {
				usual = text
			}
			_, _ = fmt.Fprint(c, usual)
			return usual != ""
		}
		if !say("", "220 hello\r\n") {
			return
		}
		for lines, body := bufio.NewScanner(c), false; lines.Scan(); {
			command, _, _ := strings.Cut(lines.Text(), " ")
			switch {
			case body && lines.Text() != ".":
				continue
			case body:
				body, command = false, "."
			case command == "DATA":
				body = true
			case strings.HasSuffix(lines.Text(), " SMTPUTF8"):
				command = "SMTPUTF8"
			}
			usual := "250 ok\r\n"
			if body {
				usual = "354 go on\r\n"
			}
			if !say(command, usual) {
				return
			}
		}
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
	return l.Addr().String()
}

func TestTheAnswerOfTheServerDecidesWhatBecomesOfAMail(t *testing.T) {
	t.Parallel()
	const sent, again, failed, maybe = "sent", "again", "failed", "maybe"
	for name, test := range map[string]struct {
		fixed map[string]string
		want  string
	}{
		"taken":                 {nil, sent},
		"busy":                  {map[string]string{"": "421 busy\r\n"}, again},
		"greylisted":            {map[string]string{"RCPT": "450 later\r\n"}, again},
		"no mailbox":            {map[string]string{"RCPT": "550 no such user\r\n"}, failed},
		"login needed":          {map[string]string{"MAIL": "530 log in\r\n"}, again},
		"closed before data":    {map[string]string{"DATA": ""}, again},
		"refused text":          {map[string]string{".": "554 spam\r\n"}, failed},
		"full disk":             {map[string]string{".": "452 full\r\n"}, again},
		"answer lost":           {map[string]string{".": ""}, maybe},
		"no sense in answer":    {map[string]string{".": "what\r\n"}, maybe},
		"closed when it leaves": {map[string]string{"QUIT": ""}, sent},
		"needless SMTPUTF8":     {map[string]string{"EHLO": "250-hi\r\n250 SMTPUTF8\r\n", "SMTPUTF8": "550 no\r\n"}, sent},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mb := open(t, "smtp", answers(t, test.fixed))
			id, err := mb.Send(t.Context(), channels.Message{ID: "x", Conversation: bob, Markdown: "Hello\n.\nx"})
			got := sent
			failure, known := errors.AsType[*channels.SendError](err)
			switch {
			case err == nil:
			case !known || failure.MaybeSent:
				got = maybe
			case failure.Permanent:
				got = failed
			default:
				got = again
			}
			assert.Truef(t, got == test.want && (id == "") == (err != nil),
				"it is %s (%q, %v), want %s", got, id, err, test.want)
		})
	}
	down := open(t, "smtp", "127.0.0.1:1")
	_, err := down.Send(t.Context(), channels.Message{ID: "x", Conversation: bob, Markdown: "Hello"})
	failure, known := errors.AsType[*channels.SendError](err)
	assert.Truef(t, known && !failure.MaybeSent && !failure.Permanent, "a mail that no server took: %v", err)
}

func TestAPasswordNeverLeavesWithoutTLS(t *testing.T) {
	t.Parallel()
	address := answers(t, map[string]string{"EHLO": "250-hello\r\n250 AUTH PLAIN\r\n"})
	mb := open(t, "smtp", address, "smtp_tls", "starttls")
	assert.Error(t, mb.probe(t.Context()), "a server without STARTTLS is accepted")
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	mb = open(t, "smtp", "127.0.0.1.nip.io:"+port, "username", "shop")
	mb.smtp.secret, mb.smtp.address = "the password", address // under a foreign name
	if err := mb.probe(t.Context()); err == nil || strings.Contains(err.Error(), "the password") {
		t.Errorf("the password was sent, or is in the error: %v", err)
	}
}

// certificate writes a certificate for localhost and its key.
func certificate(t *testing.T) (cert, key string) {
	t.Helper()
	secret, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	raw, err := x509.CreateCertificate(rand.Reader, &template, &template, &secret.PublicKey, secret)
	require.NoError(t, err)
	der, err := x509.MarshalPKCS8PrivateKey(secret)
	require.NoError(t, err)
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	testkit.WriteFile(t, cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw})))
	testkit.WriteFile(t, key, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})))
	return cert, key
}

func TestTheListenerTakesMailForTheChannelOnly(t *testing.T) {
	t.Parallel()
	cert, key := certificate(t)
	address := testkit.FreeAddress(t)
	mb := open(t, "listen", address, "tls_cert", cert, "tls_key", key, "smtp", address, "smtp_tls", "starttls",
		"smtp_ca", cert, "max_bytes", "20000")
	in := &inbox{state: make(chan error, 10)}
	stop := testkit.Run(t, func(ctx context.Context) error { return mb.Run(ctx, in) })
	require.NoError(t, testkit.Receive(t, in.state), "the channel does not reach itself by STARTTLS")
	send := func(to, text string) error {
		c, _, err := mb.dial(t.Context())
		require.NoError(t, err)
		defer c.Close()
		if err := startMail(c, bob, to); err != nil {
			return err
		}
		return data(c, text)
	}
	require.NoError(t, send("Support+abc@Shop.Example", string(mailOf("1@home", pass, "Hello"))))
	if err := send("support@elsewhere.example", "x"); err == nil || !strings.Contains(err.Error(), "550") {
		t.Errorf("mail for others is relayed: %v", err)
	}
	err := send("support@shop.example", strings.Repeat("x", 30_000))
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "552"), "a large mail: %v", err)
	err = send("support@shop.example", strings.Repeat("X-A: "+strings.Repeat("x", 70)+"\r\n", 200)+"nothing")
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "554"), "an invalid mail: %v", err)
	in.err = errAway
	err = send("support@shop.example", string(mailOf("2@home", pass, "Hello")))
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "451"), "a mail that is not stored: %v", err)
	stop()
	assert.Truef(t, len(in.got) == 1 && in.got[0].Sender == bob && in.got[0].Text == "Subject: Order 12\n\nHello",
		"it received %+v", in.got)
}

func TestIdleConnectionsDoNotBlockMail(t *testing.T) {
	t.Parallel()
	address := testkit.FreeAddress(t)
	mb := open(t, "listen", address, "smtp", answers(t, nil))
	in := &inbox{state: make(chan error, 10)}
	testkit.Run(t, func(ctx context.Context) error { return mb.Run(ctx, in) })
	require.NoError(t, testkit.Receive(t, in.state))
	for i := range maxConnections + 1 {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		require.NoError(t, err)
		defer c.Close()
		require.NoError(t, c.SetReadDeadline(time.Now().Add(idleTimeout/2)))
		greeting, err := bufio.NewReader(c).ReadString('\n')
		require.Truef(t, err == nil && strings.HasPrefix(greeting, "220 "), "connection %d: %q, %v", i, greeting, err)
	}
}

func data(c *smtp.Client, text string) error {
	w, err := c.Data()
	if err != nil {
		return err
	}
	if _, err := w.Write([]byte(text)); err != nil {
		return err
	}
	return w.Close()
}

func TestASilentSMTPServerIsTheStateOfTheChannel(t *testing.T) {
	t.Parallel()
	mb := open(t, "smtp", answers(t, map[string]string{"": "554 no\r\n"}))
	in := &inbox{state: make(chan error, 10)}
	testkit.Run(t, func(ctx context.Context) error { return mb.Run(ctx, in) })
	err := testkit.Receive(t, in.state)
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "554"), "the state is %v", err)
}

func TestASettingThatCannotWorkIsRefused(t *testing.T) {
	t.Parallel()
	good := channels.Definition{
		Name: "mail", Type: channels.Email, Secrets: map[string]string{"key": "${MAIL_KEY}"},
		Settings: map[string]string{"address": "support@shop.example", "smtp": "localhost:25"},
	}
	require.NoError(t, channels.Validate(good))
	for _, c := range [][2]string{
		{"address", "a-name-of-many-letters@shop.example"},
		{"address", `"a@b"@shop.example`},
		{"address", ""},
		{"smtp", "localhost"},
		{"smtp", ":587"},
		{"listen", "2525"},
		{"max_bytes", "1"},
		{"tls_cert", "cert.pem"},
		{"tls_cert", "/etc/cert.pem"},
		{"relays", "example.com"},
		{"webhook_scheme", "none"},
		{"smtp_tls", "maybe"},
	} {
		name, value := c[0], c[1]
		settings := map[string]string{"address": "support@shop.example", "smtp": "localhost:25"}
		settings[name] = value
		d := good
		d.Settings = settings
		err := channels.Validate(d)
		assert.Truef(t, err != nil && strings.Contains(err.Error(), "settings: "+name), "%s %q: %v", name, value, err)
	}
	d := good
	d.Settings = map[string]string{"address": "support@shop.example"}
	assert.Error(t, channels.Validate(d), "a channel without an SMTP server is accepted")
	_, err := Open(channels.Config{
		Channel: channels.Channel{Settings: good.Settings}, Secrets: map[string]string{"key": "short"},
	})
	assert.ErrorIs(t, err, channels.ErrMisconfigured, "a short key")
}
