package signature

import (
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The headers of Standard Webhooks.
const (
	HeaderID        = "Webhook-Id"
	HeaderTimestamp = "Webhook-Timestamp"
	HeaderSignature = "Webhook-Signature"
)

// standardPrefixes are the names under which senders use the headers. Svix, the author of the scheme, kept its own.
var standardPrefixes = []string{"Webhook-", "Svix-"}

// StandardID is the name of the header with the id of a message: webhook-id, or svix-id in a request without the
// standard headers.
func StandardID(h http.Header) string { return standardPrefix(h) + "Id" }

func standardPrefix(h http.Header) string {
	for _, prefix := range standardPrefixes {
		if h.Get(prefix+"Id")+h.Get(prefix+"Timestamp")+h.Get(prefix+"Signature") != "" {
			return prefix
		}
	}
	return standardPrefixes[0]
}

// maxSignatures bounds the work for a header full of signatures.
const maxSignatures = 16

// standardClaim reads the three headers. It never mixes headers of two prefixes.
func (v Verifier) standardClaim(h http.Header, now time.Time) (claim, error) {
	prefix := standardPrefix(h)
	c := claim{id: h.Get(prefix + "Id"), at: h.Get(prefix + "Timestamp"), signatures: map[string][][]byte{}}
	list := strings.Fields(h.Get(prefix + "Signature"))
	if c.id == "" || c.at == "" || len(list) == 0 {
		return c, refuse("headers webhook-id, webhook-timestamp and webhook-signature are required")
	}
	if len(list) > maxSignatures {
		return c, refuse("header webhook-signature has more than %d signatures", maxSignatures)
	}
	for _, entry := range list {
		version, text, _ := strings.Cut(entry, ",")
		if raw, err := base64.StdEncoding.DecodeString(text); err == nil {
			c.signatures[version] = append(c.signatures[version], raw)
		}
	}
	return c, v.checkTime(c.at, now)
}

// standard checks v1 signatures with whsec_ secrets and v1a signatures with whpk_ public keys.
func (v Verifier) standard(c claim, body []byte) error {
	before := []byte(c.id + "." + c.at + ".")
	var expected [][]byte
	proved := false
	for _, secret := range v.Secrets {
		key, public, err := standardKey(secret, "whpk_")
		switch {
		case err != nil:
			return err
		case public && len(c.signatures["v1a"]) > 0:
			message := slices.Concat(before, body)
			for _, s := range c.signatures["v1a"] {
				proved = ed25519.Verify(key, message, s) || proved
			}
		case !public:
			expected = append(expected, sum(key, before, body))
		}
	}
	if !anyMatches(c.signatures["v1"], expected) && !proved {
		return refuse("no signature is of this id, timestamp and body")
	}
	return nil
}

// standardKey decodes a symmetric secret, or an ed25519 key under the given prefix.
func standardKey(secret, asymmetric string) (key []byte, ed bool, err error) {
	text, ed := strings.CutPrefix(secret, asymmetric)
	if !ed {
		text = strings.TrimPrefix(secret, "whsec_")
	}
	if strings.HasPrefix(text, "whsk_") || strings.HasPrefix(text, "whpk_") {
		return nil, false, fmt.Errorf("%w: whpk_ keys verify and whsk_ keys sign", ErrSecret)
	}
	if key, err = base64.StdEncoding.DecodeString(text); err != nil || len(key) == 0 {
		return nil, false, fmt.Errorf("%w: a Standard Webhooks secret is whsec_ and base64", ErrSecret)
	}
	if want := map[string]int{"whpk_": ed25519.PublicKeySize}[asymmetric]; ed && want > 0 && len(key) != want {
		return nil, false, fmt.Errorf("%w: an ed25519 public key has %d bytes, not %d", ErrSecret, want, len(key))
	}
	return key, ed, nil
}

// Sign returns the headers of a Standard Webhooks message that is sent at a given time: one signature for each secret.
// A whsec_ secret signs v1 (HMAC-SHA256); a whsk_ one, the seed of an ed25519 key or the whole key, signs v1a.
func Sign(secrets []string, id string, at time.Time, body []byte) (http.Header, error) {
	if id == "" || strings.ContainsAny(id, ". \t\r\n") {
		return nil, fmt.Errorf("sign webhook: an id has no dot and no space, unlike %q", id)
	}
	if len(secrets) == 0 {
		return nil, fmt.Errorf("sign webhook: %w: there is none", ErrSecret)
	}
	unix := strconv.FormatInt(at.Unix(), 10)
	message := slices.Concat([]byte(id), []byte("."), []byte(unix), []byte("."), body)
	signatures := make([]string, len(secrets))
	for i, secret := range secrets {
		var err error
		if signatures[i], err = signStandard(secret, message); err != nil {
			return nil, fmt.Errorf("sign webhook: %w", err)
		}
	}
	h := http.Header{}
	h.Set(HeaderID, id)
	h.Set(HeaderTimestamp, unix)
	h.Set(HeaderSignature, strings.Join(signatures, " "))
	return h, nil
}

func signStandard(secret string, message []byte) (string, error) {
	key, ed, err := standardKey(secret, "whsk_")
	switch {
	case err != nil:
		return "", err
	case !ed:
		return "v1," + base64.StdEncoding.EncodeToString(sum(key, message)), nil
	case len(key) == ed25519.SeedSize:
		key = ed25519.NewKeyFromSeed(key)
	case len(key) != ed25519.PrivateKeySize:
		return "", errors.Join(ErrSecret, errors.New("an ed25519 key has 32 or 64 bytes"))
	}
	return "v1a," + base64.StdEncoding.EncodeToString(ed25519.Sign(key, message)), nil
}
