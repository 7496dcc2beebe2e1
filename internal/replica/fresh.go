package replica

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/origin"
)

// Header is the header with the lag in seconds of a response from the standby.
const Header = "X-Replica-Lag-Seconds"

// wroteCookie marks a browser that wrote a moment ago.
const wroteCookie = "lanekeeper_wrote"

// SetHeader sets Header on a response from the standby.
func (s *Source) SetHeader(h http.Header) {
	if s.Replica() {
		h.Set(Header, strconv.FormatFloat(s.Behind.Seconds(), 'f', 3, 64))
	}
}

// Wrote makes a browser read from the primary for a while. A forged cookie gains nothing.
func Wrote(w http.ResponseWriter, r *http.Request) {
	http.SetCookie(w, &http.Cookie{
		Name: origin.CookieName(r, wroteCookie), Value: "1", Path: "/", MaxAge: int(FreshFor.Seconds()),
		HttpOnly: true, SameSite: http.SameSiteStrictMode,
		Secure: origin.ViaTLS(r),
	})
}

// Fresh reports whether a request must read from the primary: its browser wrote a moment ago, or it has Cache-Control:
// no-cache.
func Fresh(r *http.Request) bool {
	if strings.Contains(strings.ToLower(r.Header.Get("Cache-Control")), "no-cache") {
		return true
	}
	return JustWrote(r)
}

// JustWrote reports whether a request's browser wrote a moment ago. It replaces Fresh for event streams, because
// browsers always send Cache-Control: no-cache for them.
func JustWrote(r *http.Request) bool {
	_, err := r.Cookie(origin.CookieName(r, wroteCookie))
	return err == nil
}
