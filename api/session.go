package api

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// A browser that has logged in has a cookie in the place of the token: when the login ends, and the HMAC of that under
// a key that is derived from the admin token. Nothing is kept here, so it holds over restarts and at every process that
// has the same token, and another token ends it.

const (
	sessionCookie = "lanekeeper_session"
	sessionLasts  = 12 * time.Hour
)

// sessions makes and reads the cookie. The zero value lets nobody in.
type sessions struct {
	key []byte
	now func() time.Time
}

func newSessions(token string) (sessions, error) {
	if token == "" {
		return sessions{now: time.Now}, nil
	}
	key, err := hkdf.Key(sha256.New, []byte(token), nil, "lanekeeper session 1", sha256.Size)
	if err != nil {
		return sessions{}, fmt.Errorf("derive the key of sessions: %w", err)
	}
	return sessions{key, time.Now}, nil
}

// begin is the cookie of a login.
func (s sessions) begin(r *http.Request) *http.Cookie {
	until := strconv.FormatInt(s.now().Add(sessionLasts).Unix(), 10)
	return s.cookie(r, until+"."+base64.RawURLEncoding.EncodeToString(s.sum(until)), int(sessionLasts.Seconds()))
}

// end is the cookie that takes it away.
func (s sessions) end(r *http.Request) *http.Cookie { return s.cookie(r, "", -1) }

func (s sessions) cookie(r *http.Request, value string, age int) *http.Cookie {
	return &http.Cookie{
		Name: sessionCookie, Value: value, Path: "/", MaxAge: age, HttpOnly: true, SameSite: http.SameSiteStrictMode,
		Secure: r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https"),
	}
}

// of tells until when the request's login holds.
func (s sessions) of(r *http.Request) (until time.Time, valid bool) {
	c, err := r.Cookie(sessionCookie)
	if err != nil || s.key == nil {
		return time.Time{}, false
	}
	text, signature, _ := strings.Cut(c.Value, ".")
	given, err := base64.RawURLEncoding.DecodeString(signature)
	if err != nil || !hmac.Equal(given, s.sum(text)) {
		return time.Time{}, false
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	until = time.Unix(seconds, 0)
	return until, err == nil && s.now().Before(until)
}

func (s sessions) sum(text string) []byte {
	mac := hmac.New(sha256.New, s.key)
	mac.Write([]byte(text))
	return mac.Sum(nil)
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
