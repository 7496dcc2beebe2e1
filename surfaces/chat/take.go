package chat

import (
	"net/http"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// incoming is a request that was decoded.
type incoming struct {
	trace  trace.ID
	user   string // whom the client names
	hash   string // of the body
	stream bool
	read   func(secret string) (Ask, error) // what the visitor wants to say
}

// take admits a message and begins its turn, or finds the one of a request that is sent again. The caller leaves
// what it gets.
func (c *Chat) take(w http.ResponseWriter, r *http.Request, in incoming) (a Ask, b begun, err error) {
	if utf8.RuneCountInString(in.user) > threads.MaxID {
		return a, b, bad("user", "invalid_value", "The parameter user may have at most %d characters.", threads.MaxID)
	}
	secret, made, err := c.secretOf(r)
	if err != nil {
		return a, b, err
	}
	token := secret
	if made {
		token = "" // nobody has proved to be this visitor before
	}
	if err := c.allow(r, c.Visitor(r), in.user, token); err != nil {
		return a, b, err
	}
	if made {
		w.Header().Set(visitorHeader, secret)
	}
	if a, err = in.read(secret); err != nil {
		return a, b, err
	}
	if a.place, err = c.enter(r, a); err != nil {
		return a, b, err
	}
	a.TraceID, a.own = in.trace, true
	if a.Key != "" {
		a.Hash = in.hash
	}
	if a.retry, err = c.retryOf(r, a, in.hash, made, in.stream); err == nil {
		b, err = c.begin(r.Context(), a)
	}
	if err != nil {
		a.place.Release()
		return a, b, err
	}
	leave := b.leave
	b.leave = func() {
		leave()
		a.place.Release()
	}
	return a, b, nil
}
