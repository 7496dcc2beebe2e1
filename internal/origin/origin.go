// Package origin relates a browser's request to this server's own origin: safe redirects, cookies per port, TLS.
//
// The target of a form or a link comes from the browser, and another site may have written it. Path accepts only a
// path that every browser resolves on this server: some read "//host", "/\host" or a path with a tab as another host.
package origin

import (
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// Path returns address without its fragment if it is a path of this server, else "/".
func Path(address string) string {
	odd := func(r rune) bool { return r <= ' ' || r == 0x7f || r == '\\' }
	if !strings.HasPrefix(address, "/") || strings.HasPrefix(address, "//") || strings.ContainsFunc(address, odd) ||
		len(address) > 4000 {
		return "/"
	}
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "" || u.Host != "" || u.User != nil {
		return "/"
	}
	u.Fragment, u.RawFragment = "", ""
	if strings.HasPrefix(u.EscapedPath(), "//") {
		return "/"
	}
	return u.RequestURI()
}

// Referer returns the path of the page that sent the request; "/" for a page of another site.
func Referer(r *http.Request) string {
	from, err := url.Parse(r.Referer())
	if err != nil || from.Host != r.Host {
		return "/"
	}
	return Path(from.RequestURI())
}

// CookieName appends the port that the browser sees to a cookie's name, because browsers send the cookies of a host to
// all of its ports.
func CookieName(r *http.Request, name string) string {
	_, port, err := net.SplitHostPort(r.Host)
	if _, bad := strconv.ParseUint(port, 10, 16); err != nil || bad != nil {
		return name
	}
	return name + "_" + port
}

// ViaTLS reports whether the browser uses TLS, to this process or to a proxy.
func ViaTLS(r *http.Request) bool {
	return r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https")
}
