// Package signature verifies that the sender of a webhook shares a secret with us, and signs our own webhooks.
//
// It knows five schemes. It reads Standard Webhooks, GitHub and Stripe exactly as their publishers define them. hmac is
// the pattern of most others, with its header, encoding and prefix as settings. bearer compares a token. The signature
// covers the raw body, byte for byte, so a caller reads the body before anything parses it.
//
// Promises:
//
//   - A comparison takes the same time for all signatures of the right length, and for all tokens, which are compared
//     by digest.
//   - Several secrets may be given at once, and each is valid: to rotate a sender's secret, give both until the sender
//     has changed. An empty secret is an error ([ErrSecret]), never a match.
//   - If the scheme signs a time, a time further from now than the tolerance, to either side, is refused. GitHub,
//     bearer, and hmac without a timestamp header sign no time. A copy of such a request verifies for ever: the
//     receiver must recognise it by its delivery id.
//
// [ErrSecret] is the receiver's mistake; every other error wraps [ErrRefused] and is the sender's. The messages name no
// secret and no signature. Nothing here keeps state or reads a clock.
package signature

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

var (
	// ErrRefused reports a request without proof of its sender.
	ErrRefused = errors.New("signature refused")
	// ErrSecret reports a secret that the scheme cannot use: the receiver's mistake.
	ErrSecret = errors.New("the secret is unusable") // not "secret:", whose value is redacted
)

// Scheme is a sender's way to sign.
type Scheme string

// The schemes.
const (
	Standard Scheme = "standard"
	GitHub   Scheme = "github"
	Stripe   Scheme = "stripe"
	HMAC     Scheme = "hmac"
	Bearer   Scheme = "bearer"
)

// Schemes lists them all.
func Schemes() []Scheme { return []Scheme{Standard, GitHub, Stripe, HMAC, Bearer} }

// DefaultTolerance bounds the distance of a signed time from now.
const DefaultTolerance = 5 * time.Minute

// Verifier checks requests of one sender. Tolerance 0 is [DefaultTolerance].
type Verifier struct {
	Scheme    Scheme
	Secrets   []string
	Tolerance time.Duration
	Layout    Layout // of HMAC
}

// Layout describes the place and form of a generic HMAC-SHA256 signature.
type Layout struct {
	Header   string // default X-Signature
	Encoding string // hex (default) or base64
	Prefix   string // before the signature, such as sha256=
	// TimestampHeader has the unix time, which is signed too; empty: no time is signed.
	TimestampHeader string
	// IDHeader has the message's id, which is signed too; empty: no id is signed.
	IDHeader string
	// Signed is the signed text, of {id}, {timestamp} and {body}; by default the present ones, joined by dots.
	Signed string
}

// claim is the sender's proof in the headers of a request.
type claim struct {
	id, at     string
	signatures map[string][][]byte // by version
}

// Before returns an error for a request that is refused with any body: without a signature, with a time too far from
// now, or with another token. So the caller can refuse it without reading the body.
func (v Verifier) Before(h http.Header, now time.Time) error {
	_, err := v.claim(h, now)
	if err == nil && v.Scheme == Bearer && len(v.Secrets) > 0 {
		err = v.bearer(h)
	}
	return err
}

func (v Verifier) claim(h http.Header, now time.Time) (claim, error) {
	switch v.Scheme {
	case Standard:
		return v.standardClaim(h, now)
	case GitHub, HMAC:
		return v.layoutClaim(h, now)
	case Stripe:
		return v.stripeClaim(h, now)
	case Bearer:
		_, err := Token(h)
		return claim{}, err
	}
	return claim{}, fmt.Errorf("%w: there is no scheme %q", ErrSecret, v.Scheme)
}

// Verify returns nil for a request that was signed with one of the secrets, at a time near now.
func (v Verifier) Verify(h http.Header, body []byte, now time.Time) error {
	if len(v.Secrets) == 0 || slices.Contains(v.Secrets, "") {
		return fmt.Errorf("%w: it is empty", ErrSecret)
	}
	c, err := v.claim(h, now)
	if err != nil {
		return err
	}
	valid := false
	switch v.Scheme {
	case Standard:
		return v.standard(c, body)
	case Bearer:
		return v.bearer(h)
	case Stripe:
		valid = anyMatches(c.signatures["v1"], v.sums([]byte(c.at), []byte("."), body))
	default:
		valid = anyMatches(c.signatures[""], v.sums(v.layout().parts(c, body)...))
	}
	if !valid {
		return refuse("the signature is not of this body")
	}
	return nil
}

func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, args...))
}

// checkTime rejects a time that is too far from now.
func (v Verifier) checkTime(unix string, now time.Time) error {
	seconds, err := strconv.ParseInt(unix, 10, 64)
	if err != nil || seconds < 0 || seconds > 1<<40 {
		return refuse("the timestamp is no unix time")
	}
	tolerance := v.Tolerance
	tolerance = cmp.Or(tolerance, DefaultTolerance)
	switch age := now.Sub(time.Unix(seconds, 0)); {
	case age > tolerance:
		return refuse("the timestamp is older than %s", tolerance)
	case age < -tolerance:
		return refuse("the timestamp is more than %s in the future", tolerance)
	}
	return nil
}

// anyMatches reports whether one of the signatures is one of the expected ones. It always compares all.
func anyMatches(signatures, expected [][]byte) bool {
	equal := 0
	for _, g := range signatures {
		for _, r := range expected {
			equal |= subtle.ConstantTimeCompare(g, r)
		}
	}
	return equal == 1
}

// sum is the HMAC of consecutive parts: a large body is not copied.
func sum(secret []byte, parts ...[]byte) []byte {
	mac := hmac.New(sha256.New, secret)
	for _, p := range parts {
		mac.Write(p)
	}
	return mac.Sum(nil)
}

// sums are the HMACs of a message under each secret, with the secret's text as the key.
func (v Verifier) sums(parts ...[]byte) [][]byte {
	all := make([][]byte, len(v.Secrets))
	for i, secret := range v.Secrets {
		all[i] = sum([]byte(secret), parts...)
	}
	return all
}

func (l Layout) withDefaults() Layout {
	l.Header = cmp.Or(l.Header, "X-Signature")
	l.Encoding = cmp.Or(l.Encoding, "hex")
	if l.Signed == "" {
		if l.IDHeader != "" {
			l.Signed = "{id}."
		}
		if l.TimestampHeader != "" {
			l.Signed += "{timestamp}."
		}
		l.Signed += "{body}"
	}
	return l
}

// layout describes the place of the signature.
func (v Verifier) layout() Layout {
	if v.Scheme == GitHub {
		return Layout{Header: "X-Hub-Signature-256", Encoding: "hex", Prefix: "sha256="}
	}
	return v.Layout.withDefaults()
}

func (v Verifier) layoutClaim(h http.Header, now time.Time) (claim, error) {
	l := v.layout()
	text, ok := strings.CutPrefix(h.Get(l.Header), l.Prefix)
	if !ok || text == "" {
		return claim{}, refuse("header %s has no signature", l.Header)
	}
	signature, err := decode(l.Encoding, text)
	if err != nil {
		return claim{}, refuse("the signature in header %s is not %s", l.Header, l.Encoding)
	}
	c := claim{signatures: map[string][][]byte{"": {signature}}}
	if l.IDHeader != "" {
		if c.id = h.Get(l.IDHeader); c.id == "" {
			return claim{}, refuse("header %s has no id", l.IDHeader)
		}
	}
	if l.TimestampHeader != "" {
		c.at = h.Get(l.TimestampHeader)
		return c, v.checkTime(c.at, now)
	}
	return c, nil
}

// parts are the parts of the signed text. The pattern's words inside the id and the body stay as they are.
func (l Layout) parts(c claim, body []byte) (parts [][]byte) {
	if l.TimestampHeader == "" && l.IDHeader == "" {
		return [][]byte{body}
	}
	fill := strings.NewReplacer("{id}", c.id, "{timestamp}", c.at)
	for i, text := range strings.Split(l.Signed, "{body}") {
		if i > 0 {
			parts = append(parts, body)
		}
		parts = append(parts, []byte(fill.Replace(text)))
	}
	return parts
}

func decode(encoding, text string) ([]byte, error) {
	if encoding == "base64" {
		return base64.StdEncoding.DecodeString(text)
	}
	return hex.DecodeString(text)
}

// stripeClaim reads t=…,v1=…[,v1=…]; other keys are of other schemes.
func (v Verifier) stripeClaim(h http.Header, now time.Time) (claim, error) {
	c := claim{signatures: map[string][][]byte{}}
	for part := range strings.SplitSeq(h.Get("Stripe-Signature"), ",") {
		key, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		switch key {
		case "t":
			c.at = value
		case "v1":
			if raw, err := hex.DecodeString(value); err == nil {
				c.signatures[key] = append(c.signatures[key], raw)
			}
		}
	}
	if c.at == "" || len(c.signatures["v1"]) == 0 {
		return c, refuse("header Stripe-Signature has no time or no v1 signature")
	}
	return c, v.checkTime(c.at, now)
}

// Token is the bearer token of a request.
func Token(h http.Header) (string, error) {
	kind, token, _ := strings.Cut(h.Get("Authorization"), " ")
	if token = strings.TrimSpace(token); !strings.EqualFold(kind, "Bearer") || token == "" {
		return "", refuse("header Authorization has no bearer token")
	}
	return token, nil
}

// bearer compares hashes, so not even the length of a token shows.
func (v Verifier) bearer(h http.Header) error {
	token, err := Token(h)
	if err != nil {
		return err
	}
	digest := sha256.Sum256([]byte(token))
	var expected [][]byte
	for _, secret := range v.Secrets {
		hash := sha256.Sum256([]byte(secret))
		expected = append(expected, hash[:])
	}
	if !anyMatches([][]byte{digest[:]}, expected) {
		return refuse("the token is not one of this endpoint")
	}
	return nil
}
