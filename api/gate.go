package api

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// gate knows who may enter. It keeps digests, so that neither content nor length of a key shows in the time
// that a comparison takes.
type gate struct {
	open  bool // there is an admin token
	admin [32]byte
	keys  []chatKey
	cross http.CrossOriginProtection

	sessions sessions
}

// chatKey is the digest of a key and what it is called.
type chatKey struct {
	name   string
	digest [32]byte
}

func newGate(token string, keys map[string]string) (*gate, error) {
	g := &gate{open: token != "", admin: digest(token)}
	var err error
	if g.sessions, err = newSessions(token); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(keys)) {
		key := chatKey{name, digest(keys[name])}
		switch {
		case strings.TrimSpace(keys[name]) == "":
			return nil, fmt.Errorf("chat key %q is empty; set it or leave it out (AGENT_CHAT_KEY)", name)
		case key.digest == g.admin:
			return nil, fmt.Errorf("chat key %q is the admin token; visitors need another one (AGENT_CHAT_KEY)", name)
		}
		for _, other := range g.keys {
			if other.digest == key.digest {
				return nil, fmt.Errorf("chat keys %q and %q are the same (AGENT_CHAT_KEY)", other.name, name)
			}
		}
		g.keys = append(g.keys, key)
	}
	return g, nil
}

func digest(token string) [32]byte { return sha256.Sum256([]byte(token)) }

// bearer is the digest of what a request presents.
func bearer(r *http.Request) (given [32]byte, has bool) {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	token = strings.TrimSpace(token)
	return digest(token), strings.EqualFold(scheme, "Bearer") && token != ""
}

// isToken reports whether a text is the admin token.
func (g *gate) isToken(token string) bool {
	given := digest(token)
	return subtle.ConstantTimeCompare(given[:], g.admin[:]) == 1 && g.open
}

// admit lets the admin in: with the token or, where no header is sent that says otherwise, with the cookie of a login.
func (g *gate) admit(w http.ResponseWriter, r *http.Request, rt route) (caller, error) {
	if r.Header.Get("Authorization") == "" {
		if until, valid := g.sessions.of(r); valid {
			return caller{admin: true, until: until}, sameOrigin(r, rt)
		}
	}
	given, has := bearer(r)
	same := subtle.ConstantTimeCompare(given[:], g.admin[:]) == 1
	if !has || !same || !g.open {
		return caller{}, refusedKey(w, r, "the admin token (AGENT_ADMIN_TOKEN)")
	}
	return caller{admin: true}, nil
}

// visitor is the name of the chat key that a request has. Every key is looked at, whichever it is.
func (g *gate) visitor(r *http.Request) (name string, is bool) {
	given, has := bearer(r)
	found := -1
	for i, key := range g.keys {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(given[:], key.digest[:]), i, found)
	}
	if !has || found < 0 {
		return "", false
	}
	return g.keys[found].name, true
}

// caller is who made a request that has passed the gate.
type caller struct {
	admin   bool
	visitor string    // name of the chat key
	until   time.Time // when the login ends; zero for who has no login but the token
}

type callerKey struct{}

// VisitorFrom tells which chat key the request was made with; ok is false outside Visitor routes.
func VisitorFrom(ctx context.Context) (name string, ok bool) {
	c, ok := ctx.Value(callerKey{}).(caller)
	return c.visitor, ok && !c.admin
}

// pass asks for what a route asks for, and returns the request of a caller who is known.
func (g *gate) pass(w http.ResponseWriter, r *http.Request, rt route) (*http.Request, error) {
	if rt.access != Public {
		w.Header().Add("Vary", "Authorization, Cookie")
	}
	switch rt.access {
	case Public:
	case Visitor:
		name, is := g.visitor(r)
		if !is {
			return r, refusedKey(w, r, "a chat key (AGENT_CHAT_KEY)")
		}
		r = r.WithContext(context.WithValue(r.Context(), callerKey{}, caller{visitor: name}))
	default:
		who, err := g.admit(w, r, rt)
		if err != nil {
			return r, err
		}
		r = r.WithContext(context.WithValue(r.Context(), callerKey{}, who))
	}
	if err := g.cross.Check(r); err != nil && !rt.foreign {
		return r, crossOrigin()
	}
	return r, nil
}

// refusedKey says what was asked for.
func refusedKey(w http.ResponseWriter, r *http.Request, what string) error {
	if r.Header.Get("Authorization") == "" {
		w.Header().Set("WWW-Authenticate", `Bearer realm="lanekeeper"`)
		return problem.New(http.StatusUnauthorized, "this needs the header Authorization: Bearer with %s", what)
	}
	w.Header().Set("WWW-Authenticate", `Bearer realm="lanekeeper", error="invalid_token"`)
	return problem.New(http.StatusUnauthorized, "what the header Authorization has is not %s", what)
}
