package api

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/local"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
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
	if g.sessions, err = newSessions(o, g.guard); err != nil {
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

// authenticateAdmin accepts the admin token or, without an Authorization header, the login cookie.
func (g *authenticator) authenticateAdmin(w http.ResponseWriter, r *http.Request, rt route) (caller, error) {
	if r.Header.Get("Authorization") == "" {
		login, err := g.sessions.current(r)
		if err != nil {
			return caller{}, tooManyTries(w, err)
		}
		if login != nil {
			return caller{admin: true, login: login}, sameOrigin(r, rt)
		}
	}
	token, has := bearer(r)
	if !has {
		return caller{}, unauthorized(w, r, "the admin token (AGENT_ADMIN_TOKEN)")
	}
	is, err := g.isAdminToken(r, token)
	if err != nil {
		return caller{}, tooManyTries(w, err)
	}
	if !is {
		return caller{}, unauthorized(w, r, "the admin token (AGENT_ADMIN_TOKEN)")
	}
	return caller{admin: true}, nil
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

// caller identifies the author of an authenticated request.
type caller struct {
	admin   bool
	visitor string // name of the chat key
	login   *login // nil with the token
}

type callerKey struct{}

// VisitorFrom returns the name of the request's chat key; ok is false outside Visitor routes.
func VisitorFrom(ctx context.Context) (name string, ok bool) {
	c, ok := ctx.Value(callerKey{}).(caller)
	return c.visitor, ok && !c.admin
}

// authenticate checks the route's access and stores the caller in the context.
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
		r = r.WithContext(context.WithValue(r.Context(), callerKey{}, caller{visitor: name}))
	default:
		who, err := g.authenticateAdmin(w, r, rt)
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

// A login cookie holds a random id, its expiry, and their HMAC under a key derived from the admin token. It survives
// restarts, works at every process with the same token, and ends when the token changes. A logout stores the id until
// the expiry (agent_logouts). Only a cookie with a valid signature costs a query.

const (
	sessionCookie = "lanekeeper_session"
	sessionTTL    = 12 * time.Hour
	// logoutChannel carries the id of each logged-out session.
	logoutChannel = "agent_logouts"
	// logoutPoll is the interval in which streams check for a logout without notifications.
	logoutPoll = 15 * time.Second
)

// sessions issues and verifies login cookies.
type sessions struct {
	key      []byte // nil rejects every cookie
	strong   bool   // of the token
	guard    *credentials.Guard
	db       postgres.DB
	listener *postgres.Listener // may be nil
	now      func() time.Time
}

type login struct {
	id    string
	until time.Time
}

func newSessions(o Options, guard *credentials.Guard) (*sessions, error) {
	s := &sessions{strong: credentials.Strong(o.AdminToken), guard: guard, db: o.Pool, listener: o.Listener, now: time.Now}
	if o.AdminToken == "" {
		return s, nil
	}
	var err error
	if s.key, err = hkdf.Key(sha256.New, []byte(o.AdminToken), nil, "lanekeeper session 2", sha256.Size); err != nil {
		return nil, fmt.Errorf("derive the key of sessions: %w", err)
	}
	return s, nil
}

func (s *sessions) loginCookie(r *http.Request) *http.Cookie {
	text := rand.Text() + "." + strconv.FormatInt(s.now().Add(sessionTTL).Unix(), 10)
	return s.cookie(r, text+"."+base64.RawURLEncoding.EncodeToString(s.sign(text)), int(sessionTTL.Seconds()))
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
		SameSite: http.SameSiteStrictMode,
		Secure:   r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https"),
	}
}

// current returns the request's login, or nil. An expired cookie counts as none.
func (s *sessions) current(r *http.Request) (*login, error) {
	l, err := s.verify(r)
	if l == nil || err != nil {
		return nil, err
	}
	ended, err := s.loggedOut(r.Context(), l.id)
	if err != nil || ended {
		return nil, err
	}
	return l, nil
}

// verify returns the login of a signed cookie, without a check for logout.
func (s *sessions) verify(r *http.Request) (*login, error) {
	c, err := r.Cookie(local.CookieName(r, sessionCookie))
	if err != nil || s.key == nil {
		return nil, nil //nolint:nilerr // the only error is a missing cookie
	}
	at := max(0, strings.LastIndexByte(c.Value, '.'))
	text := c.Value[:at]
	given, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(c.Value[at:], "."))
	right := err == nil && hmac.Equal(given, s.sign(text))
	if !s.strong { // with a weak token, a cookie is a guess at the token
		if err := s.guard.JudgeText(r, credentials.Login, c.Value, right); err != nil {
			return nil, err
		}
	}
	if !right {
		return nil, nil
	}
	id, seconds, _ := strings.Cut(text, ".")
	unix, err := strconv.ParseInt(seconds, 10, 64)
	until := time.Unix(unix, 0)
	if err != nil || !s.now().Before(until) {
		return nil, nil //nolint:nilerr // the signature is ours, so it has expired
	}
	return &login{id, until}, nil
}

func (s *sessions) sign(text string) []byte {
	mac := hmac.New(sha256.New, s.key)
	mac.Write([]byte(text))
	return mac.Sum(nil)
}

func (s *sessions) loggedOut(ctx context.Context, id string) (ended bool, err error) {
	err = postgres.Again(ctx, func() error {
		return s.db.QueryRow(ctx, `select exists (select from agent_logouts where session_id = @id)`,
			postgres.Strict{"id": id}).Scan(&ended)
	})
	if err != nil {
		return false, fmt.Errorf("read logouts: %w", err)
	}
	return ended, nil
}

// revoke stores the logout and prunes expired ones.
func (s *sessions) revoke(r *http.Request) error {
	l, err := s.verify(r)
	if l == nil || err != nil {
		return err
	}
	err = postgres.Again(r.Context(), func() error {
		_, err := s.db.Exec(r.Context(), `
			with forgotten as (
			  delete from agent_logouts where session_id in (
			    select session_id from agent_logouts where expires_at < statement_timestamp()
			      order by expires_at limit 100 for update skip locked)),
			ended as (
			  insert into agent_logouts (session_id, expires_at) values (@id, @until) on conflict do nothing
			    returning session_id)
			select pg_notify(@channel, session_id) from ended`, postgres.Strict{"id": l.id, "until": l.until, "channel": logoutChannel})
		return err
	})
	if err != nil {
		return fmt.Errorf("write logout: %w", err)
	}
	return nil
}

// watchLogout returns a context that ends with the login. The caller must call release.
func (s *sessions) watchLogout(parent context.Context, l *login) (ctx context.Context, release func()) {
	ctx, cancel := context.WithDeadline(parent, l.until)
	var notified <-chan string
	stop := func() {}
	if s.listener != nil {
		notified, stop = s.listener.SubscribeTo(logoutChannel, func(id string) bool { return id == l.id })
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer stop()
		tick := time.NewTicker(logoutPoll)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-notified:
			case <-tick.C:
			}
			if ended, err := s.loggedOut(ctx, l.id); err == nil && ended { // on an error the next tick retries
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
	right, err := s.auth.isAdminToken(r, strings.TrimSpace(r.PostForm.Get("token")))
	wait, waits := errors.AsType[*credentials.Wait](err)
	switch {
	case waits:
		w.Header().Set("Retry-After", strconv.Itoa(wait.Seconds()))
		s.pages.LogIn(w, r, http.StatusTooManyRequests, next,
			fmt.Sprintf("Too many wrong tokens from this address. Try again in %d s.", wait.Seconds()))
	case !right:
		s.pages.LogIn(w, r, http.StatusUnauthorized, next, "This is not the admin token.")
	default:
		http.SetCookie(w, s.auth.sessions.loginCookie(r))
		http.Redirect(w, r, next, http.StatusSeeOther)
	}
}

// redirectLoggedIn skips the login page for a valid login.
func (s *server) redirectLoggedIn(page http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Add("Vary", "Cookie")
		login, err := s.auth.sessions.current(r)
		switch {
		case err != nil: // the login state is unknown
		case login != nil:
			http.Redirect(w, r, afterLogin(r.URL.Query().Get("next")), http.StatusSeeOther)
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

// writeErrorPage renders an error, or redirects to the login.
func (s *server) writeErrorPage(w http.ResponseWriter, r *http.Request, err error) {
	p, _ := problem.Of(err)
	if p.Status != http.StatusUnauthorized {
		s.pages.Refuse(w, r, err)
		return
	}
	w.Header().Del("WWW-Authenticate")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		s.pages.Refuse(w, r, problem.New(http.StatusUnauthorized, "no login; log in and try again"))
		return
	}
	s.auth.sessions.clearCookie(w, r)
	to := "/login"
	if next := afterLogin(r.URL.RequestURI()); next != "/" {
		to += "?next=" + url.QueryEscape(next)
	}
	http.Redirect(w, r, to, http.StatusSeeOther)
}

func wantsPage(r *http.Request) bool { return strings.Contains(r.Header.Get("Accept"), "text/html") }
