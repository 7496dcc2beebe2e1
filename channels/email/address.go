package email

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"fmt"
	"net/mail"
	"strings"
)

const (
	rootBytes  = 8   // of the hash that identifies a mail thread
	macBytes   = 10  // of a signature, as much as fits into a local part of 64 bytes
	unproven   = "?" // before the address of a sender that is not proven
	maxAddress = 120 // bytes of an address; a conversation combines it with its root
)

var letters = base32.StdEncoding.WithPadding(base32.NoPadding)

func encode(raw []byte) string { return strings.ToLower(letters.EncodeToString(raw)) }

func decode(text string) []byte {
	raw, err := letters.DecodeString(strings.ToUpper(text))
	if err != nil {
		return nil
	}
	return raw
}

// mac signs the parts for one use, with the key of the channel.
func (t *transport) mac(use string, parts ...string) []byte {
	h := hmac.New(sha256.New, t.key)
	fmt.Fprintf(h, "%s\x00%s", use, t.Channel.Name)
	for _, p := range parts {
		fmt.Fprintf(h, "\x00%s", p)
	}
	return h.Sum(nil)[:macBytes]
}

// conversation names the conversation of a person. The zero root is that of mail that the agent began.
func conversation(who string, root []byte) string {
	if bytes.Equal(root, make([]byte, rootBytes)) {
		return who
	}
	return who + "#" + encode(root)
}

// parseConversation returns the person and the root of a conversation. The person may have the prefix [unproven].
func parseConversation(text string) (who string, root []byte, err error) {
	who, rest, has := strings.Cut(text, "#")
	if root = make([]byte, rootBytes); has {
		root = decode(rest)
	}
	at, err := mail.ParseAddress(strings.TrimPrefix(who, unproven))
	if err != nil || len(root) != rootBytes || at.Name != "" || !plainAddress(at.Address) {
		return "", nil, fmt.Errorf("%q is no address of a conversation by e-mail", text)
	}
	return who, root, nil
}

// plainAddress reports whether an address of ASCII may appear unchanged in an SMTP command and in a header.
func plainAddress(address string) bool {
	local, domain, ok := strings.Cut(address, "@")
	if !ok || local == "" || domain == "" || len(address) > maxAddress {
		return false
	}
	for _, c := range []byte(address) {
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`"(),:;<>[\]#`, c) >= 0 {
			return false
		}
	}
	return !strings.Contains(domain, "@")
}

// rootOf returns the root of the mail thread that begins with a message.
func (t *transport) rootOf(who, messageID string) []byte {
	sum := sha256.Sum256([]byte(t.Channel.Name + "\x00" + who + "\x00" + messageID))
	return sum[:rootBytes]
}

// token signs the root of a conversation for the person in it.
func (t *transport) token(who string, root []byte) string {
	return encode(root) + encode(t.mac("reply", who, string(root)))
}

// verify returns the root in a token of that person.
func (t *transport) verify(token, who string) (root []byte, ok bool) {
	n := letters.EncodedLen(rootBytes)
	if len(token) != n+letters.EncodedLen(macBytes) {
		return nil, false
	}
	root = decode(token[:n])
	return root, len(root) == rootBytes && hmac.Equal(decode(token[n:]), t.mac("reply", who, string(root)))
}

// bouncePath returns the return path of a message: it names the message and is signed. An id that is no UUID has none
// of its own.
func (t *transport) bouncePath(id string) string {
	raw, err := hex.DecodeString(strings.ReplaceAll(id, "-", ""))
	if err != nil || len(raw) != 16 {
		return t.address
	}
	return t.local + "+b" + encode(raw) + encode(t.mac("bounce", string(raw))) + "@" + t.domain
}

// bounced returns the id of the message in the suffix of a return path.
func (t *transport) bounced(suffix string) (id string, ok bool) {
	n := letters.EncodedLen(16)
	if len(suffix) != 1+n+letters.EncodedLen(macBytes) || suffix[0] != 'b' {
		return "", false
	}
	raw := decode(suffix[1 : 1+n])
	if len(raw) != 16 || !hmac.Equal(decode(suffix[1+n:]), t.mac("bounce", string(raw))) {
		return "", false
	}
	return fmt.Sprintf("%x-%x-%x-%x-%x", raw[:4], raw[4:6], raw[6:8], raw[8:10], raw[10:]), true
}

// suffix returns the text after the + in an address of the channel; ok is false for another address.
func (t *transport) suffix(address string) (suffix string, ok bool) {
	local, domain, _ := strings.Cut(strings.ToLower(address), "@")
	if domain != t.domain {
		return "", false
	}
	local, suffix, _ = strings.Cut(local, "+")
	return suffix, local == t.local
}

// messageID returns the Message-ID of a part, without brackets. A repeated attempt has the same id.
func (t *transport) messageID(id string, part int, token string) string {
	clean := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' {
			return r
		}
		return '-'
	}, strings.ToLower(id))
	return fmt.Sprintf("%s.%d.%s@%s", clean, part, token, t.domain)
}

// tokenOf returns the token in a Message-ID of the channel; "" for another one.
func (t *transport) tokenOf(messageID string) string {
	local, domain, _ := strings.Cut(messageID, "@")
	parts := strings.Split(local, ".")
	if !strings.EqualFold(domain, t.domain) || len(parts) != 3 {
		return ""
	}
	return parts[2]
}
