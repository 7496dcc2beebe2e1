package api

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// gate knows who may enter. Whatever a request presents is checked by the guard.
type gate struct {
	guard *credentials.Guard
	admin credentials.Key   // accepts nothing without an admin token
	chat  []credentials.Key // named
	cross http.CrossOriginProtection

	sessions *sessions
}

func newGate(o Options) (*gate, error) {
	g := &gate{guard: credentials.NewGuard(o.Logger), admin: credentials.NewKey("", o.AdminToken)}
	var err error
	if g.sessions, err = newSessions(o, g.guard); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(o.ChatKeys)) {
		key := credentials.NewKey(name, o.ChatKeys[name])
		switch {
		case strings.TrimSpace(o.ChatKeys[name]) == "":
			return nil, fmt.Errorf("chat key %q is empty; set it or leave it out (AGENT_CHAT_KEY)", name)
		case key.Same(g.admin):
			return nil, fmt.Errorf("chat key %q is the admin token; visitors need another one (AGENT_CHAT_KEY)", name)
		}
		for _, other := range g.chat {
			if key.Same(other) {
				return nil, fmt.Errorf("chat keys %q and %q are the same (AGENT_CHAT_KEY)", other.Name, name)
			}
		}
		g.chat = append(g.chat, key)
	}
	return g, nil
}

// bearer is what a request presents.
func bearer(r *http.Request) (secret string, has bool) {
	scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	secret = strings.TrimSpace(secret)
	return secret, strings.EqualFold(scheme, "Bearer") && secret != ""
}

// isToken reports whether a text is the admin token.
func (g *gate) isToken(r *http.Request, text string) (is bool, err error) {
	_, is, err = g.guard.Check(r, credentials.Admin, text, g.admin)
	return is, err
}

// admit lets the admin in: with the token or, where no header is sent that says otherwise, with the cookie of a login.
func (g *gate) admit(w http.ResponseWriter, r *http.Request, rt route) (caller, error) {
	if r.Header.Get("Authorization") == "" {
		login, err := g.sessions.of(r)
		if err != nil {
			return caller{}, refusedTry(w, err)
		}
		if login != nil {
			return caller{admin: true, login: login}, sameOrigin(r, rt)
		}
	}
	token, has := bearer(r)
	if !has {
		return caller{}, refusedKey(w, r, "the admin token (AGENT_ADMIN_TOKEN)")
	}
	is, err := g.isToken(r, token)
	if err != nil {
		return caller{}, refusedTry(w, err)
	}
	if !is {
		return caller{}, refusedKey(w, r, "the admin token (AGENT_ADMIN_TOKEN)")
	}
	return caller{admin: true}, nil
}

// visitor is the name of the chat key that a request has.
func (g *gate) visitor(w http.ResponseWriter, r *http.Request) (name string, err error) {
	const what = "a chat key (AGENT_CHAT_KEY)"
	key, has := bearer(r)
	if !has {
		return "", refusedKey(w, r, what)
	}
	name, is, err := g.guard.Check(r, credentials.Chat, key, g.chat...)
	if err != nil {
		return "", refusedTry(w, err)
	}
	if !is {
		return "", refusedKey(w, r, what)
	}
	return name, nil
}

// caller is who made a request that has passed the gate.
type caller struct {
	admin   bool
	visitor string // name of the chat key
	login   *login // nil for who has the token
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
		name, err := g.visitor(w, r)
		if err != nil {
			return r, err
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

// refusedTry tells how long to wait after wrong tries; another error it returns.
func refusedTry(w http.ResponseWriter, err error) error {
	wait, is := errors.AsType[*credentials.Wait](err)
	if !is {
		return err
	}
	w.Header().Set("Retry-After", strconv.Itoa(wait.Seconds()))
	return problem.New(http.StatusTooManyRequests, "%v", wait).Kind("too-many-wrong-tries", "Too many wrong tries")
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
