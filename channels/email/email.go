// Package email is the channel by e-mail: a listener for SMTP and an HTTP hook receive mail, and an SMTP server sends
// answers.
//
// # Conversations
//
// A conversation is the address of a person and the root of a mail thread, such as bob@example.com#k5x. Answers carry
// a signed token of both: in the reply address (support+TOKEN@example.com) and in the Message-ID. A reply with either
// of them continues its conversation, if it comes from the same address: a forwarded mail gives nobody else access.
// Without a token the first id of References names the root, so a second mail that refers to the first is in the same
// conversation. Any other mail begins a new one.
//
// # Senders
//
// From is no proof. A sender is proven if the pinned server (the setting authserv_id) reports a pass of DMARC, or of
// DKIM, for exactly the domain in From. The package trusts that report only in mail from the hook or from a configured
// relay, because anybody can write that header. If pairing is required, mail of unproven senders is stored and not
// answered. If pairing is open, an unproven sender and a proven one with the same address have separate conversations.
//
// # Loops
//
// Some mail is stored and not answered: mail without a return path or from the channel itself, automatic replies, mail
// of lists and bulk mail. A bounce marks the message as failed; its return path names the message and is signed.
//
// # Approvals
//
// E-mail decides no approval. A request is announced with a link to the Engine Room.
package email

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/mail"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/internal/signature"
)

const (
	minKey       = 16
	defaultBytes = 10 << 20
	maxAnswer    = 200_000 // characters of a mail
)

// transport implements [channels.Transport] for a channel.
type transport struct {
	channels.Config
	address  string // in lower case
	name     string // shown beside the address
	local    string
	domain   string
	key      []byte
	maxBytes int64
	relays   []netip.Prefix
	hook     signature.Verifier
	smtp     server
}

// server is the SMTP server for answers.
type server struct {
	address string // host:port
	mode    string // starttls, implicit or none
	tls     *tls.Config
	user    string
	secret  string
}

// Open implements [channels.Open].
func Open(c channels.Config) (channels.Transport, error) {
	t := &transport{Config: c, key: []byte(c.Secrets["key"]), maxBytes: defaultBytes}
	if len(t.key) < minKey {
		return nil, misconfigured("secrets.key has fewer than %d bytes", minKey)
	}
	set := c.Channel.Settings
	own, err := mail.ParseAddress(set["address"])
	if err != nil {
		return nil, misconfigured("settings.address: %v", err)
	}
	t.name, t.address = own.Name, strings.ToLower(own.Address)
	t.local, t.domain, _ = strings.Cut(t.address, "@")
	if set["max_bytes"] != "" {
		if t.maxBytes, err = strconv.ParseInt(set["max_bytes"], 10, 64); err != nil {
			return nil, misconfigured("settings.max_bytes: %v", err)
		}
	}
	if t.relays, err = prefixes(cmp.Or(set["relays"], "127.0.0.0/8 ::1")); err != nil {
		return nil, misconfigured("settings.relays: %v", err)
	}
	t.hook = signature.Verifier{Scheme: signature.Scheme(cmp.Or(set["webhook_scheme"], string(signature.Bearer)))}
	if secret := c.Secrets["webhook"]; secret != "" {
		t.hook.Secrets = []string{secret}
	}
	return t, t.openServer(set)
}

// openServer reads the settings of the SMTP server that sends the answers. The default is STARTTLS.
func (t *transport) openServer(set map[string]string) error {
	t.smtp = server{
		address: set["smtp"], mode: cmp.Or(set["smtp_tls"], "starttls"), user: set["username"], secret: t.Secrets["password"],
	}
	host, _, err := net.SplitHostPort(t.smtp.address)
	if err != nil {
		return misconfigured("settings.smtp: %v", err)
	}
	t.smtp.tls = &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}
	if set["smtp_ca"] == "" {
		return nil
	}
	pem, err := os.ReadFile(set["smtp_ca"])
	if err != nil {
		return misconfigured("settings.smtp_ca: %v", err)
	}
	t.smtp.tls.RootCAs = x509.NewCertPool()
	if !t.smtp.tls.RootCAs.AppendCertsFromPEM(pem) {
		return misconfigured("settings.smtp_ca has no certificate")
	}
	return nil
}

func misconfigured(format string, args ...any) error {
	return fmt.Errorf("%w: %w", channels.ErrMisconfigured, fmt.Errorf(format, args...))
}

// prefixes reads addresses and networks that are separated by blanks.
func prefixes(text string) (all []netip.Prefix, err error) {
	for field := range strings.FieldsSeq(text) {
		if !strings.Contains(field, "/") {
			address, err := netip.ParseAddr(field)
			if err != nil {
				return nil, err
			}
			all = append(all, netip.PrefixFrom(address, address.BitLen()))
			continue
		}
		prefix, err := netip.ParsePrefix(field)
		if err != nil {
			return nil, err
		}
		all = append(all, prefix)
	}
	if len(all) == 0 {
		return nil, errors.New("has no address")
	}
	return all, nil
}

// Limits implements [channels.Transport]. A mail is sent whole, without buttons.
func (t *transport) Limits() channels.Limits { return channels.Limits{Text: maxAnswer} }

// Issuer implements [channels.Transport]. The subject is the address.
func (t *transport) Issuer(context.Context) (string, error) { return "email:" + t.Channel.Name, nil }
