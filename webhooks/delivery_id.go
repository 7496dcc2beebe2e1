package webhooks

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/signature"
)

// DeliveryID returns the sender's id of a delivery. It reads the endpoint's path, or the field or header of the scheme.
// Otherwise it returns the SHA-256 of the body, preceded by the signed time if there is one. A long or unprintable id
// is hashed. A path that does not resolve is an error.
func (e Endpoint) DeliveryID(in Incoming) (string, error) {
	path := cmp.Or(e.Settings.ID, e.schemeID(in.Header))
	if path == Digest {
		return digest("sha256:", in.Body), nil
	}
	if path == "" {
		return digest("sha256:", slices.Concat([]byte(in.Header.Get(e.Settings.TimestampHeader)), in.Body)), nil
	}
	c := Content{Header: in.Header, Body: in.Value}
	id, err := c.Text("{" + path + "}")
	if err != nil {
		return "", err
	}
	const maxLength = 200
	switch {
	case strings.TrimSpace(id) == "":
		return "", fmt.Errorf("%s: the delivery id is empty", path)
	case len(id) > maxLength || !printableIDRegexp.MatchString(id):
		return digest("id-sha256:", []byte(id)), nil
	}
	return id, nil
}

// schemeID returns the path of a scheme's delivery id, or "". For hmac it returns a header only if the endpoint signs
// it: an attacker could replay a request with another value of an unsigned header. With a bearer token, nothing is
// signed.
func (e Endpoint) schemeID(h http.Header) string {
	switch e.Scheme {
	case signature.Standard:
		return "header." + signature.StandardID(h)
	case signature.GitHub:
		return "header.x-github-delivery"
	case signature.Stripe:
		return "body.id"
	case signature.Bearer:
		for _, name := range []string{"webhook-id", "idempotency-key"} {
			if h.Get(name) != "" {
				return "header." + name
			}
		}
	case signature.HMAC:
		if e.Settings.IDHeader != "" {
			return "header." + e.Settings.IDHeader
		}
	}
	return ""
}

func digest(prefix string, data []byte) string {
	sum := sha256.Sum256(data)
	return prefix + hex.EncodeToString(sum[:])
}
