package api

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/local"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// authenticator checks credentials through the guard.
type authenticator struct {
	guard *credentials.Guard
	admin credentials.Key   // rejects everything without an admin token
	chat  []credentials.Key // named
	cross http.CrossOriginProtection

	sessions *sessions
}

func newAuthenticator(o Options) (*authenticator, error) {
	g := &authenticator{guard: credentials.NewGuard(o.Logger), admin: credentials.NewKey("", o.AdminToken)}
	var err error
	if g.sessions, err = newSessions(o); err != nil {
		return nil, err
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

// bearer returns the bearer token of a request.
func bearer(r *http.Request) (secret string, has bool) {
	scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	secret = strings.TrimSpace(secret)
	return secret, strings.EqualFold(scheme, "Bearer") && secret != ""
}

func (g *authenticator) isAdminToken(r *http.Request, text string) (is bool, err error) {
	_, is, err = g.guard.Check(r, credentials.Admin, text, g.admin)
	return is, err
}

const whatToken = "a token lk_… or the admin token (AGENT_ADMIN_TOKEN)"

// authenticatePrincipal accepts AGENT_ADMIN_TOKEN, an API token or, without an Authorization header, the session
// cookie.
func (g *authenticator) authenticatePrincipal(
	w http.ResponseWriter, r *http.Request, rt route,
) (*principals.Caller, error) {
	if r.Header.Get("Authorization") == "" {
		who, err := g.sessions.current(r)
		if err != nil {
			return nil, err
		}
		if who != nil {
			return who, sameOrigin(r, rt)
		}
	}
	token, has := bearer(r)
	if !has {
		return nil, unauthorized(w, r, whatToken)
	}
	if strings.HasPrefix(token, principals.TokenPrefix) {
		return g.byToken(w, r, token)
	}
	is, err := g.isAdminToken(r, token)
	if err != nil {
		return nil, tooManyTries(w, err)
	}
	if !is {
		return nil, unauthorized(w, r, whatToken)
	}
	return principals.RootCaller(), nil
}

// byToken finds the caller of an API token. A revoked one is no guess.
func (g *authenticator) byToken(
	w http.ResponseWriter, r *http.Request, token string,
) (who *principals.Caller, err error) {
	err = postgres.Again(r.Context(), func() error {
		who, err = principals.ByToken(r.Context(), g.sessions.db, token)
		return err
	})
	switch {
	case errors.Is(err, principals.ErrRefused):
		w.Header().Set("WWW-Authenticate", `Bearer realm="lanekeeper", error="invalid_token"`)
		return nil, problem.New(http.StatusUnauthorized, "the token has expired or was revoked, or its principal is disabled").
			Kind("token-ended", "Token ended")
	case errors.Is(err, principals.ErrNotFound):
		if err := g.guard.Judge(r, credentials.Token, false, true); err != nil {
			return nil, tooManyTries(w, err)
		}
		return nil, unauthorized(w, r, whatToken)
	}
	return who, err
}

// forbidden names the scope that the caller lacks (RFC 6750).
func forbidden(w http.ResponseWriter, who *principals.Caller, scopes []principals.Scope) error {
	w.Header().Set("WWW-Authenticate",
		fmt.Sprintf(`Bearer realm="lanekeeper", error="insufficient_scope", scope=%q`, scopes[0]))
	return missingScope(who, string(scopes[0]))
}

func missingScope(who *principals.Caller, scope string) error {
	return problem.New(http.StatusForbidden, "this needs the scope %s, which %s (role %s) does not have here", scope, who.Name,
		who.Role).Kind("missing-scope", "Missing scope").WithScope(scope)
}

// authenticateVisitor returns the name of the request's chat key.
func (g *authenticator) authenticateVisitor(w http.ResponseWriter, r *http.Request) (name string, err error) {
	const what = "a chat key (AGENT_CHAT_KEY)"
	key, has := bearer(r)
	if !has {
		return "", unauthorized(w, r, what)
	}
	name, is, err := g.guard.Check(r, credentials.Chat, key, g.chat...)
	if err != nil {
		return "", tooManyTries(w, err)
	}
	if !is {
		return "", unauthorized(w, r, what)
	}
	return name, nil
}

type visitorKey struct{}

// VisitorFrom returns the name of the request's chat key; ok is false outside Visitor routes.
func VisitorFrom(ctx context.Context) (name string, ok bool) {
	name, ok = ctx.Value(visitorKey{}).(string)
	return name, ok
}

// by is the name of the principal behind a request, for the audit.
func by(ctx context.Context) string { return activity.ActorFrom(ctx).Name }

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
		who, err := g.authenticatePrincipal(w, r, rt)
		if err != nil {
			return r, err
		}
		if !slices.ContainsFunc(rt.scopes, who.May) {
			return r, forbidden(w, who, rt.scopes)
		}
		via := "http"
		if who.SessionID != "" {
			via = "page"
		}
		r = r.WithContext(principals.WithCaller(r.Context(), who, via))
	}
	if err := g.cross.Check(r); err != nil && !rt.foreign {
		return r, crossOrigin()
	}
	return r, nil
}

// tooManyTries adds Retry-After for throttled credentials. It returns other errors unchanged.
func tooManyTries(w http.ResponseWriter, err error) error {
	wait, is := errors.AsType[*credentials.Wait](err)
	if !is {
		return err
	}
	w.Header().Set("Retry-After", strconv.Itoa(wait.Seconds()))
	return problem.New(http.StatusTooManyRequests, "%v", wait).Kind("too-many-wrong-tries", "Too many wrong tries")
}

func unauthorized(w http.ResponseWriter, r *http.Request, what string) error {
	if r.Header.Get("Authorization") == "" {
		w.Header().Set("WWW-Authenticate", `Bearer realm="lanekeeper"`)
		return problem.New(http.StatusUnauthorized, "send the header Authorization: Bearer with %s", what)
	}
	w.Header().Set("WWW-Authenticate", `Bearer realm="lanekeeper", error="invalid_token"`)
	return problem.New(http.StatusUnauthorized, "the header Authorization does not hold %s", what)
}

const (
	sessionCookie = "lanekeeper_session"
	// accessPoll is the interval in which streams check their credential without notifications.
	accessPoll = 15 * time.Second
)

// sessions issues and verifies login cookies. A cookie holds the secret of a row of agent_sessions. A login with the
// admin token is stored under a key of it: such sessions end when the token changes.
type sessions struct {
	key      []byte // of the admin token; nil without one
	db       *pgxpool.Pool
	listener *postgres.Listener // may be nil
}

func newSessions(o Options) (*sessions, error) {
	s := &sessions{db: o.Pool, listener: o.Listener}
	if o.AdminToken == "" {
		return s, nil
	}
	var err error
	if s.key, err = hkdf.Key(sha256.New, []byte(o.AdminToken), nil, "lanekeeper session 3", sha256.Size); err != nil {
		return nil, fmt.Errorf("derive the key of sessions: %w", err)
	}
	return s, nil
}

// keyed is the digest of the secrets of logins with the admin token; nil without one.
func (s *sessions) keyed() func(secret string) []byte {
	if s.key == nil {
		return nil
	}
	return func(secret string) []byte {
		mac := hmac.New(sha256.New, s.key)
		mac.Write([]byte(secret))
		return mac.Sum(nil)
	}
}

// logIn starts a session and sets its cookie. The browser's session before it ends.
func (s *sessions) logIn(w http.ResponseWriter, r *http.Request, principal, method string) error {
	if err := s.revoke(r); err != nil {
		return err
	}
	n := principals.NewSession{
		Principal: principal, Method: method, Address: clientip.Key(r), Browser: r.UserAgent(),
	}
	if principal == principals.Root {
		n.Digest = s.keyed()
	}
	var secret string
	err := postgres.Again(r.Context(), func() (err error) {
		secret, err = principals.LogIn(r.Context(), s.db, n)
		return err
	})
	if err != nil {
		return err
	}
	http.SetCookie(w, s.cookie(r, secret, int(principals.SessionTTL.Seconds())))
	return nil
}

// logoutCookie deletes the cookie.
func (s *sessions) logoutCookie(r *http.Request) *http.Cookie { return s.cookie(r, "", -1) }

// clearCookie deletes an invalid cookie during a page navigation. A background request could delete the cookie of a
// newer login.
func (s *sessions) clearCookie(w http.ResponseWriter, r *http.Request) {
	if _, err := r.Cookie(local.CookieName(r, sessionCookie)); err == nil {
		http.SetCookie(w, s.logoutCookie(r))
	}
}

func (s *sessions) cookie(r *http.Request, value string, age int) *http.Cookie {
	return &http.Cookie{
		Name: local.CookieName(r, sessionCookie), Value: value, Path: "/", MaxAge: age, HttpOnly: true,
		SameSite: http.SameSiteStrictMode, Secure: viaTLS(r),
	}
}

// viaTLS reports whether the browser used TLS, directly or to a proxy.
func viaTLS(r *http.Request) bool {
	return r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https")
}

// secretForm matches the secrets of cookies. Other values cost no query.
var secretForm = regexp.MustCompile(`^[A-Z2-7]{26,40}$`)

// current returns the caller of the request's session, or nil. An expired cookie counts as none.
func (s *sessions) current(r *http.Request) (who *principals.Caller, err error) {
	c, err := r.Cookie(local.CookieName(r, sessionCookie))
	if err != nil || !secretForm.MatchString(c.Value) {
		return nil, nil //nolint:nilerr // the only error is a missing cookie
	}
	err = postgres.Again(r.Context(), func() (err error) {
		who, err = principals.BySession(r.Context(), s.db, c.Value, s.keyed())
		return err
	})
	if errors.Is(err, principals.ErrNotFound) {
		return nil, nil
	}
	return who, err
}

// revoke ends the session of the request, if there is one.
func (s *sessions) revoke(r *http.Request) error {
	who, err := s.current(r)
	if who == nil || err != nil {
		return err
	}
	return postgres.Again(r.Context(), func() error { return principals.LogOut(r.Context(), s.db, who) })
}

// watch returns a context that ends with the caller's session or token. The caller must call release.
func (s *sessions) watch(parent context.Context, who *principals.Caller) (ctx context.Context, release func()) {
	if who == nil || who.SessionID == "" && who.TokenID == "" {
		return parent, func() {}
	}
	ctx, cancel := context.WithCancel(parent)
	if !who.Until.IsZero() {
		ctx, cancel = context.WithDeadline(parent, who.Until)
	}
	var notified <-chan string
	stop := func() {}
	if s.listener != nil {
		notified, stop = s.listener.SubscribeTo(principals.Channel, who.Concerns)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer stop()
		tick := time.NewTicker(accessPoll)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-notified:
			case <-tick.C:
			}
			if valid, err := principals.Valid(ctx, s.db, who); err == nil && !valid { // on an error the next tick retries
				cancel()
			}
		}
	}()
	return ctx, func() {
		cancel()
		<-done
	}
}

// sameOrigin rejects cross-origin requests with our cookie, reads too, because response times leak information.
// Navigation by a link is allowed.
func sameOrigin(r *http.Request, rt route) error {
	site, origin := r.Header.Get("Sec-Fetch-Site"), r.Header.Get("Origin")
	ours := site == "same-origin" || site == "none"
	if site == "" { // an old browser, or plain HTTP
		u, err := url.Parse(origin)
		ours = origin == "" || err == nil && u.Host == r.Host
	}
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	follows := rt.page && !rt.stream && reads && r.Header.Get("Sec-Fetch-Mode") == "navigate" &&
		r.Header.Get("Sec-Fetch-Dest") == "document"
	if ours || follows {
		return nil
	}
	return crossOrigin()
}

func crossOrigin() error {
	return problem.New(http.StatusForbidden, "cross-origin requests are not allowed").Kind("cross-origin",
		"Cross-origin request")
}

// Pages render responses for browsers.
type Pages interface {
	// LogIn renders the login form. next is the local path to open afterwards; wrong is the error message, or empty.
	LogIn(w http.ResponseWriter, r *http.Request, status int, next, wrong string)
	// Refuse renders an error page.
	Refuse(w http.ResponseWriter, r *http.Request, err error)
}

// maxForm bounds the login form in bytes.
const maxForm = 16 << 10

const loginPath = "/login"

// loginRoutes issue and delete the cookie. The form itself is an endpoint.
func (s *server) loginRoutes() []route {
	if s.pages == nil {
		return nil
	}
	return []route{
		{
			method: "POST", path: loginPath, access: Public, page: true, maxBody: maxForm, handler: http.HandlerFunc(s.logIn),
			about: "Log in with the form of GET /login.",
		},
		{
			method: "POST", path: "/logout", access: Public, page: true, maxBody: maxForm, handler: http.HandlerFunc(s.logOut),
			about: "End the login.",
		},
	}
}

// logIn exchanges the token for a cookie.
func (s *server) logIn(w http.ResponseWriter, r *http.Request) {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err == nil && kind == "application/x-www-form-urlencoded" {
		err = r.ParseForm()
	}
	if err != nil || kind != "application/x-www-form-urlencoded" {
		s.pages.Refuse(w, r, problem.New(http.StatusUnsupportedMediaType, "send the form of GET /login"))
		return
	}
	next := afterLogin(r.PostForm.Get("next"))
	if link := strings.TrimSpace(r.PostForm.Get("link")); link != "" {
		s.logInByLink(w, r, next, link)
		return
	}
	right, err := s.auth.isAdminToken(r, strings.TrimSpace(r.PostForm.Get("token")))
	switch {
	case err != nil:
		s.refuseLogin(w, r, next, "tokens", err)
	case !right:
		s.pages.LogIn(w, r, http.StatusUnauthorized, next, "This is not the admin token.")
	default:
		s.startSession(w, r, principals.Root, principals.WithToken, next)
	}
}

// logInByLink exchanges a one-use link for a cookie.
func (s *server) logInByLink(w http.ResponseWriter, r *http.Request, next, link string) {
	var id string
	err := postgres.Again(r.Context(), func() (err error) {
		id, err = principals.UseLink(r.Context(), s.pool, link)
		return err
	})
	if errors.Is(err, principals.ErrNotFound) {
		if err = s.auth.guard.Judge(r, credentials.Token, false, true); err == nil {
			s.pages.LogIn(w, r, http.StatusUnauthorized, next, "This link was used, has expired, or never was one. Ask for another.")
			return
		}
	}
	if err != nil {
		s.refuseLogin(w, r, next, "links", err)
		return
	}
	s.startSession(w, r, id, principals.WithLink, next)
}

// refuseLogin answers a login that has to wait or that failed.
func (s *server) refuseLogin(w http.ResponseWriter, r *http.Request, next, what string, err error) {
	wait, waits := errors.AsType[*credentials.Wait](err)
	if !waits {
		s.pages.Refuse(w, r, err)
		return
	}
	w.Header().Set("Retry-After", strconv.Itoa(wait.Seconds()))
	s.pages.LogIn(w, r, http.StatusTooManyRequests, next,
		fmt.Sprintf("Too many wrong %s from this address. Try again in %d s.", what, wait.Seconds()))
}

// startSession logs in and opens the next page.
func (s *server) startSession(w http.ResponseWriter, r *http.Request, principal, method, next string) {
	err := s.auth.sessions.logIn(w, r, principal, method)
	if errors.Is(err, principals.ErrRefused) {
		s.pages.LogIn(w, r, http.StatusForbidden, next, "This principal is disabled.")
		return
	}
	if err != nil {
		s.pages.Refuse(w, r, err)
		return
	}
	http.Redirect(w, r, next, http.StatusSeeOther)
}

// redirectLoggedIn skips the login page for a valid login.
func (s *server) redirectLoggedIn(page http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Add("Vary", "Cookie")
		who, err := s.auth.sessions.current(r)
		switch {
		case err != nil: // the login state is unknown
		case who != nil:
			// A link's fragment has the token. A browser keeps it through a redirect that has none of its own.
			http.Redirect(w, r, afterLogin(r.URL.Query().Get("next"))+"#", http.StatusSeeOther)
			return
		default:
			s.auth.sessions.clearCookie(w, r)
		}
		page.ServeHTTP(w, r)
	})
}

// logOut ends the login at every process and deletes the cookie. If that fails, the cookie stays.
func (s *server) logOut(w http.ResponseWriter, r *http.Request) {
	if err := s.auth.sessions.revoke(r); err != nil {
		s.pages.Refuse(w, r, err)
		return
	}
	http.SetCookie(w, s.auth.sessions.logoutCookie(r))
	http.Redirect(w, r, "/login", http.StatusSeeOther)
}

// afterLogin returns the local path to open after the login, never a login page.
func afterLogin(next string) string {
	next = local.Path(next)
	if path, _, _ := strings.Cut(next, "?"); path == "/login" || path == "/logout" {
		return "/"
	}
	return next
}

// writeErrorPage renders an error, or redirects to the login and from there to the page: that of a form is its referer.
func (s *server) writeErrorPage(w http.ResponseWriter, r *http.Request, err error) {
	p, _ := problem.Of(err)
	if p.Status != http.StatusUnauthorized {
		s.pages.Refuse(w, r, err)
		return
	}
	w.Header().Del("WWW-Authenticate")
	s.auth.sessions.clearCookie(w, r)
	to, page := "/login", r.URL.RequestURI()
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		page = local.Referer(r)
	}
	if next := afterLogin(page); next != "/" {
		to += "?next=" + url.QueryEscape(next)
	}
	http.Redirect(w, r, to, http.StatusSeeOther)
}

func wantsPage(r *http.Request) bool { return strings.Contains(r.Header.Get("Accept"), "text/html") }
