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

// A browser that has logged in has a cookie in the place of the token: a random id, when the login ends, and the HMAC
// of both under a key that is derived from the admin token. So it holds over restarts and at every process that has the
// same token, and another token ends it. A logout writes the id down until the login would have ended (agent_logouts).
// Only a cookie with a valid signature is looked up there. No other cookie costs a query.

const (
	sessionCookie = "lanekeeper_session"
	sessionLasts  = 12 * time.Hour
	// logoutChannel has a notification for each logout, with the id of the login.
	logoutChannel = "agent_logouts"
	// logoutPoll is how often a stream looks for the logout where no notification comes.
	logoutPoll = 15 * time.Second
)

// sessions makes and reads the cookie.
type sessions struct {
	key      []byte // nil lets nobody in
	strong   bool   // the token's
	guard    *credentials.Guard
	db       postgres.DB
	listener *postgres.Listener // may be nil
	now      func() time.Time
}

// login is one that holds.
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

// begin is the cookie of a login.
func (s *sessions) begin(r *http.Request) *http.Cookie {
	text := rand.Text() + "." + strconv.FormatInt(s.now().Add(sessionLasts).Unix(), 10)
	return s.cookie(r, text+"."+base64.RawURLEncoding.EncodeToString(s.sum(text)), int(sessionLasts.Seconds()))
}

// end is the cookie that takes it away.
func (s *sessions) end(r *http.Request) *http.Cookie { return s.cookie(r, "", -1) }

// forget takes away a cookie that is no login any more. It is for answers to a person who goes to a page: one to a
// request in the background might take away the cookie of a login that came meanwhile.
func (s *sessions) forget(w http.ResponseWriter, r *http.Request) {
	if _, err := r.Cookie(local.CookieName(r, sessionCookie)); err == nil {
		http.SetCookie(w, s.end(r))
	}
}

func (s *sessions) cookie(r *http.Request, value string, age int) *http.Cookie {
	return &http.Cookie{
		Name: local.CookieName(r, sessionCookie), Value: value, Path: "/", MaxAge: age, HttpOnly: true, SameSite: http.SameSiteStrictMode,
		Secure: r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https"),
	}
}

// of returns the request's login; nil without a valid one. An expired cookie counts as none.
func (s *sessions) of(r *http.Request) (*login, error) {
	l, err := s.signed(r)
	if l == nil || err != nil {
		return nil, err
	}
	ended, err := s.ended(r.Context(), l.id)
	if err != nil || ended {
		return nil, err
	}
	return l, nil
}

// signed is the login that a cookie says, without whether it was ended.
func (s *sessions) signed(r *http.Request) (*login, error) {
	c, err := r.Cookie(local.CookieName(r, sessionCookie))
	if err != nil || s.key == nil {
		return nil, nil //nolint:nilerr // the one error is that there is no cookie
	}
	at := max(0, strings.LastIndexByte(c.Value, '.'))
	text := c.Value[:at]
	given, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(c.Value[at:], "."))
	right := err == nil && hmac.Equal(given, s.sum(text))
	if !s.strong { // a cookie can be made from a guess at the token; from a strong one it cannot
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
		return nil, nil //nolint:nilerr // nobody but us signs, so it is over
	}
	return &login{id, until}, nil
}

func (s *sessions) sum(text string) []byte {
	mac := hmac.New(sha256.New, s.key)
	mac.Write([]byte(text))
	return mac.Sum(nil)
}

// ended reports whether there was a logout.
func (s *sessions) ended(ctx context.Context, id string) (ended bool, err error) {
	err = postgres.Again(ctx, func() error {
		return s.db.QueryRow(ctx, `select exists (select from agent_logouts where session_id = @id)`, postgres.Strict{"id": id}).Scan(&ended)
	})
	if err != nil {
		return false, fmt.Errorf("read logouts: %w", err)
	}
	return ended, nil
}

// revoke ends the request's login, and forgets some of those that are over.
func (s *sessions) revoke(r *http.Request) error {
	l, err := s.signed(r)
	if l == nil || err != nil {
		return err
	}
	err = postgres.Again(r.Context(), func() error {
		_, err := s.db.Exec(r.Context(), `
			with forgotten as (
			  delete from agent_logouts where session_id in (
			    select session_id from agent_logouts where expires_at < statement_timestamp() order by expires_at limit 100 for update skip locked)),
			ended as (
			  insert into agent_logouts (session_id, expires_at) values (@id, @until) on conflict do nothing returning session_id)
			select pg_notify(@channel, session_id) from ended`, postgres.Strict{"id": l.id, "until": l.until, "channel": logoutChannel})
		return err
	})
	if err != nil {
		return fmt.Errorf("write logout: %w", err)
	}
	return nil
}

// hold is a context that ends with the login. leave frees what it needs, and has to be called.
func (s *sessions) hold(parent context.Context, l *login) (ctx context.Context, leave func()) {
	ctx, cancel := context.WithDeadline(parent, l.until)
	var heard <-chan string
	stop := func() {}
	if s.listener != nil {
		heard, stop = s.listener.SubscribeTo(logoutChannel, func(id string) bool { return id == l.id })
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
			case <-heard:
			case <-tick.C:
			}
			if ended, err := s.ended(ctx, l.id); err == nil && ended { // else it is asked again soon
				cancel()
			}
		}
	}()
	return ctx, func() {
		cancel()
		<-done
	}
}

// sameOrigin refuses what a page of another origin makes a browser send with our cookie, reading too: an answer that
// its page cannot read may still show in how long it takes. A link to a page is followed.
func sameOrigin(r *http.Request, rt route) error {
	site, origin := r.Header.Get("Sec-Fetch-Site"), r.Header.Get("Origin")
	ours := site == "same-origin" || site == "none"
	if site == "" { // a browser that does not say, or an address without TLS
		u, err := url.Parse(origin)
		ours = origin == "" || err == nil && u.Host == r.Host
	}
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	follows := rt.page && !rt.stream && reads && r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
	if ours || follows {
		return nil
	}
	return crossOrigin()
}

func crossOrigin() error {
	return problem.New(http.StatusForbidden, "a page of another origin may not send this").Kind("cross-origin", "Cross-origin request")
}

// Pages answer people, who come with a browser, where programs are answered with problems.
type Pages interface {
	// LogIn answers with the page that asks for the admin token. next is where to go then, a path of this server;
	// wrong says what was wrong with what was given, empty when nothing was.
	LogIn(w http.ResponseWriter, r *http.Request, status int, next, wrong string)
	// Refuse answers with an error.
	Refuse(w http.ResponseWriter, r *http.Request, err error)
}

// maxForm is how many bytes the form of the login has at most.
const maxForm = 16 << 10

// loginPath is the page with the form, and where it is sent to.
const loginPath = "/login"

// loggingIn is how a browser gets its cookie, and gives it back. The page with the form is an endpoint.
func (s *server) loggingIn() []route {
	if s.pages == nil {
		return nil
	}
	return []route{
		{method: "POST", path: loginPath, access: Public, page: true, maxBody: maxForm, handler: http.HandlerFunc(s.logIn), about: "Log in, with the form of GET /login."},
		{method: "POST", path: "/logout", access: Public, page: true, maxBody: maxForm, handler: http.HandlerFunc(s.logOut), about: "End the login."},
	}
}

// logIn gives a cookie for the token.
func (s *server) logIn(w http.ResponseWriter, r *http.Request) {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err == nil && kind == "application/x-www-form-urlencoded" {
		err = r.ParseForm()
	}
	if err != nil || kind != "application/x-www-form-urlencoded" {
		s.pages.Refuse(w, r, problem.New(http.StatusUnsupportedMediaType, "this is not the form of GET /login"))
		return
	}
	next := afterLogin(r.PostForm.Get("next"))
	right, err := s.gate.isToken(r, strings.TrimSpace(r.PostForm.Get("token")))
	wait, waits := errors.AsType[*credentials.Wait](err)
	switch {
	case waits:
		w.Header().Set("Retry-After", strconv.Itoa(wait.Seconds()))
		s.pages.LogIn(w, r, http.StatusTooManyRequests, next, fmt.Sprintf("Too many wrong tokens came from here. Try again in %d s.", wait.Seconds()))
	case !right:
		s.pages.LogIn(w, r, http.StatusUnauthorized, next, "This is not the admin token.")
	default:
		http.SetCookie(w, s.gate.sessions.begin(r))
		http.Redirect(w, r, next, http.StatusSeeOther)
	}
}

// unlessLoggedIn leads on who needs no login page.
func (s *server) unlessLoggedIn(page http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Add("Vary", "Cookie")
		login, err := s.gate.sessions.of(r)
		switch {
		case err != nil: // whether there is a login is not known
		case login != nil:
			http.Redirect(w, r, afterLogin(r.URL.Query().Get("next")), http.StatusSeeOther)
			return
		default:
			s.gate.sessions.forget(w, r)
		}
		page.ServeHTTP(w, r)
	})
}

// logOut ends the login, at every process, and takes the cookie away. A login that could not be ended keeps its cookie.
func (s *server) logOut(w http.ResponseWriter, r *http.Request) {
	if err := s.gate.sessions.revoke(r); err != nil {
		s.pages.Refuse(w, r, err)
		return
	}
	http.SetCookie(w, s.gate.sessions.end(r))
	http.Redirect(w, r, "/login", http.StatusSeeOther)
}

// afterLogin is where to go with a login: a path of this server that is none of the login's own.
func afterLogin(next string) string {
	next = local.Path(next)
	if path, _, _ := strings.Cut(next, "?"); path == "/login" || path == "/logout" {
		return "/"
	}
	return next
}

// refusePage answers a person: who has to log in first is shown how.
func (s *server) refusePage(w http.ResponseWriter, r *http.Request, err error) {
	told, _ := problem.Of(err)
	if told.Status != http.StatusUnauthorized {
		s.pages.Refuse(w, r, err)
		return
	}
	w.Header().Del("WWW-Authenticate")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		s.pages.Refuse(w, r, problem.New(http.StatusUnauthorized, "nobody is logged in here, or no longer; log in, and do it again"))
		return
	}
	s.gate.sessions.forget(w, r)
	to := "/login"
	if next := afterLogin(r.URL.RequestURI()); next != "/" {
		to += "?next=" + url.QueryEscape(next)
	}
	http.Redirect(w, r, to, http.StatusSeeOther)
}

// wantsPage reports a browser that shows what it gets.
func wantsPage(r *http.Request) bool { return strings.Contains(r.Header.Get("Accept"), "text/html") }
