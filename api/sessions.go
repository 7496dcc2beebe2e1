package api

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/origin"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/principals"
)

// sessions issues and verifies login cookies. A cookie has the secret of a row of agent_sessions. For a login with the
// admin token, that token is the key of the row's digest. So the login ends when the token changes.
type sessions struct {
	key      []byte // derived from the admin token; nil without a token
	db       *pgxpool.Pool
	listener *postgres.Listener // may be nil
}

const (
	sessionCookie = "lanekeeper_session"
	// accessPoll is how often a stream checks its credential without a notification.
	accessPoll = 15 * time.Second
)

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

// keyedDigest returns the digest for logins with the admin token; nil if there is no admin token.
func (s *sessions) keyedDigest() func(secret string) []byte {
	if s.key == nil {
		return nil
	}
	return func(secret string) []byte {
		mac := hmac.New(sha256.New, s.key)
		mac.Write([]byte(secret))
		return mac.Sum(nil)
	}
}

// start starts a session and sets its cookie. Then it ends the browser's previous session.
func (s *sessions) start(w http.ResponseWriter, r *http.Request, n principals.SessionParams) error {
	n.Address, n.Browser = clientip.Key(r), r.UserAgent()
	if n.Principal == principals.Root {
		n.Digest = s.keyedDigest()
	}
	secret, err := principals.LogIn(r.Context(), s.db, n)
	if err != nil {
		return err
	}
	http.SetCookie(w, s.cookie(r, secret, int(principals.SessionTTL.Seconds())))
	return s.revoke(r)
}

// logoutCookie deletes the cookie.
func (s *sessions) logoutCookie(r *http.Request) *http.Cookie { return s.cookie(r, "", -1) }

// clearCookie deletes an invalid cookie. Call it only for a page: a background request could delete the cookie of a
// newer login.
func (s *sessions) clearCookie(w http.ResponseWriter, r *http.Request) {
	if _, err := r.Cookie(origin.CookieName(r, sessionCookie)); err == nil {
		http.SetCookie(w, s.logoutCookie(r))
	}
}

func (s *sessions) cookie(r *http.Request, value string, age int) *http.Cookie {
	return &http.Cookie{
		Name: origin.CookieName(r, sessionCookie), Value: value, Path: "/", MaxAge: age, HttpOnly: true,
		SameSite: http.SameSiteStrictMode, Secure: origin.ViaTLS(r),
	}
}

// secretForm matches the secrets of cookies, so other values cost no query.
var secretForm = regexp.MustCompile(`^[A-Z2-7]{26,40}$`)

// current returns the caller of the request's session, or nil. An expired cookie counts as no cookie.
func (s *sessions) current(r *http.Request) (caller *principals.Caller, err error) {
	c, err := r.Cookie(origin.CookieName(r, sessionCookie))
	if err != nil || !secretForm.MatchString(c.Value) {
		return nil, nil //nolint:nilerr // the only error is a missing cookie
	}
	err = postgres.RetryOnDisconnect(r.Context(), func() (err error) {
		caller, err = principals.AuthenticateSession(r.Context(), s.db, c.Value, s.keyedDigest())
		return err
	})
	if errors.Is(err, principals.ErrNotFound) {
		return nil, nil
	}
	return caller, err
}

// revoke ends the session of the request, if any.
func (s *sessions) revoke(r *http.Request) error {
	caller, err := s.current(r)
	if caller == nil || err != nil {
		return err
	}
	return postgres.RetryOnDisconnect(r.Context(), func() error { return principals.LogOut(r.Context(), s.db, caller) })
}

// watch returns a context that ends with the caller's session or token. Its cause then is a *principals.AccessEnded.
// The caller must call release.
func (s *sessions) watch(parent context.Context, caller *principals.Caller) (ctx context.Context, release func()) {
	if caller == nil || caller.SessionID == "" && caller.TokenID == "" {
		return parent, func() {}
	}
	ctx, cancel := context.WithCancelCause(parent)
	stopTimer := func() {}
	if !caller.ExpiresAt.IsZero() {
		ctx, stopTimer = context.WithDeadlineCause(ctx, caller.ExpiresAt, caller.Expired())
	}
	var notified <-chan string
	stop := func() {}
	if s.listener != nil {
		notified, stop = s.listener.SubscribeTo(principals.Channel, caller.Matches)
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
			if ended, err := principals.Ended(ctx, s.db, caller); err == nil && ended != nil { // the next tick retries
				cancel(ended)
			}
		}
	}()
	return ctx, func() {
		cancel(nil)
		stopTimer()
		<-done
	}
}
