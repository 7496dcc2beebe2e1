package chat

import (
	"crypto/rand"
	"encoding/base64"
	"net/http"
	"regexp"

	"github.com/lanekeeper/lanekeeper/threads"
)

// soleOwner is the owner of a key without a name. Its users' names are thread names without a prefix.
const soleOwner = "visitor"

// threadOf returns the thread name of a client's user. It has the owner's name, because owners may use equal user
// names.
func threadOf(owner, user string) string {
	if user == "" || owner == soleOwner {
		return user
	}
	return owner + ":" + user
}

// The headers that name the visitor and the thread.
const (
	threadHeader  = "X-Thread-Id"
	joinHeader    = "X-Thread-Join"
	visitorHeader = "X-Visitor-Token"
)

// newVisitor as the visitor token requests a new token.
const newVisitor = "new"

// secretForm matches a visitor token.
var secretForm = regexp.MustCompile(`^vis_[A-Za-z0-9_-]{32,128}$`)

// visitorToken returns the visitor token of a request, or generates one. A key that browsers hold requires a token.
// Any other key speaks for its users unless the client sends one.
func (c *Chat) visitorToken(r *http.Request) (secret string, isNew bool, err error) {
	token := r.Header.Get(visitorHeader)
	switch {
	case token == "" && !c.Browser(c.Visitor(r)):
		return "", false, nil
	case token == "" || token == newVisitor:
		random := make([]byte, 32)
		_, _ = rand.Read(random) // never fails
		return "vis_" + base64.RawURLEncoding.EncodeToString(random), true, nil
	case !secretForm.MatchString(token):
		return "", false, badRequest(visitorHeader, "invalid_visitor_token",
			"%s must be the token of an earlier answer, or %q for a new one.", visitorHeader, newVisitor)
	}
	return token, false, nil
}

// principal returns the sender of a request.
func (c *Chat) principal(r *http.Request) (threads.Principal, error) {
	secret, _, err := c.visitorToken(r)
	return (&UserMessage{Owner: c.Visitor(r), Secret: secret}).principal(), err
}
