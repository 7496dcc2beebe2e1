package api

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/local"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

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
			    select session_id from agent_logouts where expires_at < clock_timestamp() order by expires_at limit 100 for update skip locked)),
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
