package api

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// authenticator checks the credentials of requests: API tokens, the admin token, login cookies and chat keys.
type authenticator struct {
	guard    *credentials.Guard // throttles wrong credentials
	admin    credentials.Key    // matches no token if no admin token is set
	chat     []credentials.Key
	cross    http.CrossOriginProtection
	sessions *sessions
}

// newAuthenticator rejects an empty chat key and equal credentials.
func newAuthenticator(o Options) (*authenticator, error) {
	sessions, err := newSessions(o)
	if err != nil {
		return nil, err
	}
	g := &authenticator{
		guard: credentials.NewGuard(o.Logger), admin: credentials.NewKey("", o.AdminToken), sessions: sessions,
	}
	for _, name := range slices.Sorted(maps.Keys(o.ChatKeys)) {
		key := credentials.NewKey(name, o.ChatKeys[name])
		switch {
		case strings.TrimSpace(o.ChatKeys[name]) == "":
			return nil, fmt.Errorf("chat key %q is empty; set or remove it (AGENT_CHAT_KEY)", name)
		case key.Same(g.admin):
			return nil, fmt.Errorf("chat key %q equals the admin token; set a different one (AGENT_CHAT_KEY)", name)
		}
		for _, other := range g.chat {
			if key.Same(other) {
				return nil, fmt.Errorf("chat keys %q and %q are equal; set different ones (AGENT_CHAT_KEY)", other.Name, name)
			}
		}
		g.chat = append(g.chat, key)
	}
	return g, nil
}

// checkChatKey rejects the name of a chat key that this server does not have. A server without chat keys accepts each
// name.
func (g *authenticator) checkChatKey(name string) error {
	names := make([]string, 0, len(g.chat))
	for _, key := range g.chat {
		names = append(names, key.Name)
	}
	if name == "" || len(names) == 0 || slices.Contains(names, name) {
		return nil
	}
	return problem.BadBody("there is no chat key named %q; AGENT_CHAT_KEY has %s", name, strings.Join(names, ", "))
}

// authenticate checks the route's access and scope, and stores the caller in the context.
func (g *authenticator) authenticate(w http.ResponseWriter, r *http.Request, rt route) (*http.Request, error) {
	if rt.access != Public {
		w.Header().Add("Vary", "Authorization, Cookie")
	}
	switch rt.access {
	case Public:
	case Visitor:
		name, err := g.authenticateVisitor(w, r)
		if err != nil {
			return r, err
		}
		r = r.WithContext(context.WithValue(r.Context(), visitorKey{}, name))
	default:
		caller, err := g.authenticatePrincipal(w, r, rt)
		if err != nil {
			return r, err
		}
		if !slices.ContainsFunc(rt.scopes, caller.May) {
			return r, forbidden(w, caller, rt.scopes)
		}
		via := "http"
		if caller.SessionID != "" {
			via = "page"
		}
		r = r.WithContext(principals.WithCaller(r.Context(), caller, via))
	}
	if err := g.cross.Check(r); err != nil && !rt.crossOrigin {
		return r, crossOrigin()
	}
	return r, nil
}

const principalCredential = "a token lk_… or the admin token (AGENT_ADMIN_TOKEN)"

// authenticatePrincipal accepts an API token, the admin token or, without an Authorization header, the login cookie.
func (g *authenticator) authenticatePrincipal(
	w http.ResponseWriter, r *http.Request, rt route,
) (*principals.Caller, error) {
	if r.Header.Get("Authorization") == "" {
		caller, err := g.sessions.current(r)
		if err != nil {
			return nil, err
		}
		if caller != nil {
			return caller, sameOrigin(r, rt)
		}
	}
	token, has := bearer(r)
	if !has {
		return nil, unauthorized(w, r, principalCredential)
	}
	if strings.HasPrefix(token, principals.TokenPrefix) {
		return g.byToken(w, r, token)
	}
	ok, err := g.isAdminToken(r, token)
	if err != nil {
		return nil, tooManyTries(w, err)
	}
	if !ok {
		return nil, unauthorized(w, r, principalCredential)
	}
	return principals.RootCaller(), nil
}

// byToken finds the caller of an API token. Only an unknown token counts as a wrong try.
func (g *authenticator) byToken(w http.ResponseWriter, r *http.Request, token string) (*principals.Caller, error) {
	var caller *principals.Caller
	err := postgres.RetryOnDisconnect(r.Context(), func() (err error) {
		caller, err = principals.AuthenticateToken(r.Context(), g.sessions.db, token)
		return err
	})
	switch {
	case errors.Is(err, principals.ErrInactive):
		w.Header().Set("WWW-Authenticate", `Bearer realm="lanekeeper", error="invalid_token"`)
		return nil, problem.New(http.StatusUnauthorized,
			"the token has expired or was revoked, or its principal is disabled").Kind("token-ended", "Token ended")
	case errors.Is(err, principals.ErrNotFound):
		if err := g.guard.Judge(r, credentials.Token, false, true); err != nil {
			return nil, tooManyTries(w, err)
		}
		return nil, unauthorized(w, r, principalCredential)
	}
	return caller, err
}

func (g *authenticator) isAdminToken(r *http.Request, text string) (ok bool, err error) {
	_, ok, err = g.guard.Check(r, credentials.Admin, text, g.admin)
	return ok, err
}

// authenticateVisitor returns the name of the request's chat key.
func (g *authenticator) authenticateVisitor(w http.ResponseWriter, r *http.Request) (name string, err error) {
	const credential = "a chat key (AGENT_CHAT_KEY)"
	key, has := bearer(r)
	if !has {
		return "", unauthorized(w, r, credential)
	}
	name, ok, err := g.guard.Check(r, credentials.Chat, key, g.chat...)
	if err != nil {
		return "", tooManyTries(w, err)
	}
	if !ok {
		return "", unauthorized(w, r, credential)
	}
	return name, nil
}

// bearer returns the bearer token of a request.
func bearer(r *http.Request) (secret string, has bool) {
	scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	secret = strings.TrimSpace(secret)
	return secret, strings.EqualFold(scheme, "Bearer") && secret != ""
}

// unauthorized challenges for a bearer token (RFC 6750, which has no error code for another scheme). credential names
// the accepted credentials.
func unauthorized(w http.ResponseWriter, r *http.Request, credential string) error {
	challenge := `Bearer realm="lanekeeper"`
	if _, has := bearer(r); has {
		challenge += `, error="invalid_token"`
	}
	w.Header().Set("WWW-Authenticate", challenge)
	if r.Header.Get("Authorization") == "" {
		return problem.New(http.StatusUnauthorized, "send the header Authorization: Bearer with %s", credential)
	}
	return problem.New(http.StatusUnauthorized, "the header Authorization does not hold %s", credential)
}

// tooManyTries adds Retry-After for throttled credentials. It returns other errors unchanged.
func tooManyTries(w http.ResponseWriter, err error) error {
	wait, ok := errors.AsType[*credentials.Wait](err)
	if !ok {
		return err
	}
	w.Header().Set("Retry-After", strconv.Itoa(wait.Seconds()))
	return problem.New(http.StatusTooManyRequests, "%v", wait).Kind("too-many-wrong-tries", "Too many wrong tries")
}

// forbidden names the scope that the caller lacks (RFC 6750).
func forbidden(w http.ResponseWriter, caller *principals.Caller, scopes []principals.Scope) error {
	w.Header().Set("WWW-Authenticate",
		fmt.Sprintf(`Bearer realm="lanekeeper", error="insufficient_scope", scope=%q`, scopes[0]))
	return missingScope(caller, string(scopes[0]))
}

func missingScope(caller *principals.Caller, scope string) error {
	return problem.New(http.StatusForbidden, "this needs the scope %s, which %s (role %s) does not have here", scope,
		caller.Name, caller.Role).Kind("missing-scope", "Missing scope").WithScope(scope)
}

// sameOrigin rejects cross-origin requests with the login cookie, even reads, because response times leak information.
// It allows links to pages.
func sameOrigin(r *http.Request, rt route) error {
	site, origin := r.Header.Get("Sec-Fetch-Site"), r.Header.Get("Origin")
	same := site == "same-origin" || site == "none"
	if site == "" { // an old browser, or plain HTTP
		u, err := url.Parse(origin)
		same = origin == "" || err == nil && u.Host == r.Host
	}
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	follows := rt.page && !rt.stream && reads && r.Header.Get("Sec-Fetch-Mode") == "navigate" &&
		r.Header.Get("Sec-Fetch-Dest") == "document"
	if same || follows {
		return nil
	}
	return crossOrigin()
}

func crossOrigin() error {
	return problem.New(http.StatusForbidden, "cross-origin requests are not allowed").Kind("cross-origin",
		"Cross-origin request")
}

type visitorKey struct{}

// VisitorFrom returns the name of the request's chat key; ok is false outside Visitor routes.
func VisitorFrom(ctx context.Context) (name string, ok bool) {
	name, ok = ctx.Value(visitorKey{}).(string)
	return name, ok
}

// actorName is the name of the principal behind a request, for the audit.
func actorName(ctx context.Context) string { return activity.ActorFrom(ctx).Name }
