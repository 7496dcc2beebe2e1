package chat

import (
	"crypto/rand"
	"encoding/base64"
	"net/http"
	"regexp"

	"github.com/lanekeeper/lanekeeper/threads"
)

// The headers by which a client says who is at it, and which thread is meant.
const (
	threadHeader  = "X-Thread-Id"
	joinHeader    = "X-Thread-Join"
	visitorHeader = "X-Visitor-Token"
)

// newVisitor is what a client sends as its visitor token to get one.
const newVisitor = "new"

// secretForm is that of a visitor token.
var secretForm = regexp.MustCompile(`^vis_[A-Za-z0-9_-]{32,128}$`)

// secretOf is the visitor token that a request has, or one that is made for it: made says so. A key that browsers hold
// is nobody's proof, so its requests always have one. With any other key who holds it speaks for its users, unless the
// client sends a token.
func (c *Chat) secretOf(r *http.Request) (secret string, made bool, err error) {
	given := r.Header.Get(visitorHeader)
	switch {
	case given == "" && !c.Browser(c.Visitor(r)):
		return "", false, nil
	case given == "" || given == newVisitor:
		random := make([]byte, 32)
		_, _ = rand.Read(random) // never fails
		return "vis_" + base64.RawURLEncoding.EncodeToString(random), true, nil
	case !secretForm.MatchString(given):
		return "", false, bad(visitorHeader, "invalid_visitor_token",
			"%s has to be the token that an answer had, or %q to get one.", visitorHeader, newVisitor)
	}
	return given, false, nil
}

// principal is who a request is of.
func (c *Chat) principal(r *http.Request) (threads.Principal, error) {
	secret, _, err := c.secretOf(r)
	return Ask{Owner: c.Visitor(r), Secret: secret}.principal(), err
}
