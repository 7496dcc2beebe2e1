package email

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/channels"
)

// envelope is the SMTP envelope of a mail.
type envelope struct {
	from    string // "" for an empty return path
	to      []string
	trusted bool // a relay or the hook vouches for Authentication-Results
}

// storeMail stores a mail, or records the bounce that it reports. An error that wraps [errUnreadable] is final.
func (t *transport) storeMail(ctx context.Context, in channels.Inbox, raw []byte, e envelope) error {
	m, err := read(raw)
	if err != nil {
		return err
	}
	recipients := slices.Concat(e.to, m.recipients)
	if id, ok := t.bouncedMessage(recipients); ok {
		switch {
		case m.failure != "":
			return in.Bounced(ctx, id, m.failure)
		case !m.report && e.from == "" && strings.HasPrefix(m.from, "mailer-daemon@"):
			return in.Bounced(ctx, id, "the mail came back: "+line(m.subject, 200))
		}
	}
	return in.Receive(ctx, "", t.incoming(m, raw, recipients, e))
}

// bouncedMessage returns the message whose return path is among the recipients.
func (t *transport) bouncedMessage(recipients []string) (id string, ok bool) {
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
	isProven := e.trusted && proven(m.results, t.Channel.Settings["authserv_id"], domain)
	if !isProven {
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
		Text: strings.TrimSpace(content), Files: m.files, Raw: raw, Ignored: t.ignored(m, e, isProven),
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

// ignored returns the reason not to answer a mail; "" for none.
func (t *transport) ignored(m received, e envelope, isProven bool) string {
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
	case !isProven && t.Channel.Pairing != channels.PairingOpen:
		by := cmp.Or(t.Channel.Settings["authserv_id"], "any server: settings.authserv_id is empty")
		return "its sender is not proven by " + by
	}
	return ""
}

// Hook implements [channels.Hook]. The body is a mail, or JSON with a mail in raw or RawEmail.
func (t *transport) Hook(w http.ResponseWriter, r *http.Request, in channels.Inbox) {
	if len(t.hook.Secrets) == 0 {
		http.Error(w, "this channel accepts no requests: it has no secret webhook", http.StatusNotFound)
		return
	}
	now := time.Now()
	if err := t.hook.Before(r.Header, now); err != nil {
		http.Error(w, err.Error(), http.StatusUnauthorized)
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
		// The hook does not report the return path; "" would mean an empty one.
		err = t.storeMail(r.Context(), in, raw, envelope{from: "unknown", trusted: true})
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

// rawMail returns the mail in the body of a request.
func rawMail(contentType string, body []byte) ([]byte, error) {
	if kind, _, _ := mime.ParseMediaType(contentType); kind != "application/json" {
		return body, nil
	}
	var request struct {
		Raw      string `json:"raw"`
		RawEmail string // of Postmark
	}
	if err := json.Unmarshal(body, &request); err != nil || cmp.Or(request.Raw, request.RawEmail) == "" {
		return nil, errUnreadable
	}
	return []byte(cmp.Or(request.Raw, request.RawEmail)), nil
}
