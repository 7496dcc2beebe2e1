package replica

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/local"
)

// Header says in an answer that was read from the standby how many seconds it may be behind.
const Header = "X-Replica-Lag-Seconds"

// wroteCookie marks a browser from which something was written a moment ago.
const wroteCookie = "lanekeeper_wrote"

// Tell says in an answer's header how far behind it is, if it is read from the standby.
func (s *Source) Tell(h http.Header) {
	if s.Replica() {
		h.Set(Header, strconv.FormatFloat(s.Behind.Seconds(), 'f', 3, 64))
	}
}

// Wrote has a browser read from the primary for a while. Nothing is kept from whom the cookie is made up.
func Wrote(w http.ResponseWriter, r *http.Request) {
	http.SetCookie(w, &http.Cookie{
		Name: local.CookieName(r, wroteCookie), Value: "1", Path: "/", MaxAge: int(FreshFor.Seconds()),
		HttpOnly: true, SameSite: http.SameSiteStrictMode,
		Secure: r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https"),
	})
}

// Fresh reports whether a request is to be answered from the primary: its browser wrote a moment ago, or it asks for
// that by Cache-Control: no-cache.
func Fresh(r *http.Request) bool {
	if strings.Contains(strings.ToLower(r.Header.Get("Cache-Control")), "no-cache") {
		return true
	}
	return JustWrote(r)
}

// JustWrote reports whether a request's browser wrote a moment ago. It is Fresh for an event stream, for which browsers
// always send Cache-Control: no-cache.
func JustWrote(r *http.Request) bool {
	_, err := r.Cookie(local.CookieName(r, wroteCookie))
	return err == nil
}
