// Package local tells addresses of this server from those that lead away.
//
// What a form or a link says about where to go next comes from the browser, and may have been put there by somebody
// else. Path lets through what is a path of this server to every browser, which read "//host", "/\host" and a
// path with a tab in it as another host.
package local

import (
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// Path is address when it is a path of this server, with its query and without a fragment, and else "/".
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

// Referer is the path of the page that a request came from; "/" for that of another site.
func Referer(r *http.Request) string {
	from, err := url.Parse(r.Referer())
	if err != nil || from.Host != r.Host {
		return "/"
	}
	return Path(from.RequestURI())
}

// CookieName is the name of a cookie with the port that the browser sees: it sends the cookies of a host to all of
// its ports.
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
