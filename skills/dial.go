package skills

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	dialTimeout    = 10 * time.Second
	redialInterval = 50 * time.Millisecond // while no file descriptor is free
	maxHeaderBytes = 64 << 10
	maxRedirects   = 5
)

// newTransport returns a transport for public addresses and those in allow. It uses no proxy, because a proxy resolves
// names without the guard's check. It reuses no connection, because net/http silently repeats a request with an
// idempotency key if a reused connection breaks.
func newTransport(allow []string, tlsConfig *tls.Config) (*http.Transport, error) {
	g, err := newGuard(allow)
	if err != nil {
		return nil, err
	}
	return &http.Transport{
		DialContext:            g.dial,
		TLSClientConfig:        tlsConfig,
		ForceAttemptHTTP2:      true,
		DisableKeepAlives:      true,
		TLSHandshakeTimeout:    dialTimeout,
		MaxResponseHeaderBytes: maxHeaderBytes,
	}, nil
}

// NewGuardedClient returns an HTTP client that reaches the addresses of http: skills: public addresses and allow (see
// [Options]). It uses no proxy and follows redirects only within a host. tlsConfig may be nil.
func NewGuardedClient(allow []string, tlsConfig *tls.Config) (*http.Client, error) {
	transport, err := newTransport(allow, tlsConfig)
	if err != nil {
		return nil, err
	}
	return &http.Client{Transport: transport, CheckRedirect: checkRedirect}, nil
}

// guard decides which addresses the transport may dial.
type guard struct {
	ranges []netip.Prefix
	names  []string // host or host:port, lower case
}

func newGuard(allow []string) (*guard, error) {
	g := &guard{}
	for _, entry := range allow {
		entry = strings.ToLower(strings.TrimSpace(entry))
		if ip, err := netip.ParseAddr(strings.Trim(entry, "[]")); err == nil {
			g.ranges = append(g.ranges, netip.PrefixFrom(ip.Unmap(), ip.Unmap().BitLen()))
			continue
		}
		if strings.Contains(entry, "/") {
			prefix, err := netip.ParsePrefix(entry)
			if err != nil {
				return nil, fmt.Errorf("allow private addresses: %q is not a range such as 10.0.0.0/8", entry)
			}
			g.ranges = append(g.ranges, prefix.Masked())
			continue
		}
		if entry == "" || strings.ContainsAny(entry, " *@") {
			return nil, fmt.Errorf("allow private addresses: %q is no address, range, host or host:port", entry)
		}
		g.names = append(g.names, entry)
	}
	return g, nil
}

// dial connects to address. The dialer's Control checks the numeric address of each connection.
func (g *guard) dial(ctx context.Context, network, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if !slices.Contains(g.names, strings.ToLower(host)) && !slices.Contains(g.names, strings.ToLower(address)) {
		d.Control = g.control
	}
	return retryDial(ctx, func() (net.Conn, error) { return d.DialContext(ctx, network, address) })
}

// retryDial dials again while the process or the machine has no free file descriptor. That is no failure of the
// service, and the client has sent nothing. When ctx ends, retryDial returns the last error.
func retryDial(ctx context.Context, dial func() (net.Conn, error)) (net.Conn, error) {
	ticker := time.NewTicker(redialInterval)
	defer ticker.Stop()
	for {
		conn, err := dial()
		if !errors.Is(err, syscall.EMFILE) && !errors.Is(err, syscall.ENFILE) {
			return conn, err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (g *guard) control(_, address string, _ syscall.RawConn) error {
	ap, err := netip.ParseAddrPort(address)
	if err != nil {
		return newCallError(ClassRefused, "%s is not a numeric address, so it may be private", address)
	}
	ip := ap.Addr().Unmap().WithZone("")
	if isPublic(ip) || slices.ContainsFunc(g.ranges, func(p netip.Prefix) bool { return p.Contains(ip) }) {
		return nil
	}
	return newCallError(ClassRefused, "%s is not a public address; if the skill may reach it, add it to "+
		"AGENT_ALLOW_PRIVATE_HTTP", ip)
}

// nonPublicRanges lists the unicast ranges without public hosts, and those with an embedded IPv4 address.
var nonPublicRanges = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("100.64.0.0/10"), // carrier-grade NAT
	netip.MustParsePrefix("192.0.0.0/24"),
	netip.MustParsePrefix("192.0.2.0/24"),
	netip.MustParsePrefix("192.88.99.0/24"),
	netip.MustParsePrefix("198.18.0.0/15"),
	netip.MustParsePrefix("198.51.100.0/24"),
	netip.MustParsePrefix("203.0.113.0/24"),
	netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("2001::/23"), // Teredo and other protocols
	netip.MustParsePrefix("2001:db8::/32"),
	netip.MustParsePrefix("2002::/16"), // 6to4
	netip.MustParsePrefix("3fff::/20"),
}

var globalUnicast6 = netip.MustParsePrefix("2000::/3")

// isPublic reports whether ip, unmapped, is an address of the public internet.
func isPublic(ip netip.Addr) bool {
	if !ip.IsGlobalUnicast() || ip.IsPrivate() || ip.Is6() && !globalUnicast6.Contains(ip) {
		return false
	}
	return !slices.ContainsFunc(nonPublicRanges, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// checkRedirect allows a redirect within the host, but not from https to http, because headers may contain secrets. It
// refuses a redirect that net/http follows with a GET after a write: the service may have acted, and the GET does not.
func checkRedirect(next *http.Request, via []*http.Request) error {
	method, last := via[len(via)-1].Method, via[len(via)-1].URL
	switch {
	case next.Method != method:
		return newCallError(ClassNoAnswer, "the answer %s would turn %s into %s, so it is not followed",
			next.Response.Status, method, next.Method)
	case len(via) > maxRedirects:
		return newCallError(ClassRefused, "more than %d redirects", maxRedirects)
	case !strings.EqualFold(next.URL.Host, last.Host), last.Scheme == "https" && next.URL.Scheme != "https":
		return newCallError(ClassRefused, "a redirect to %s://%s is not followed", next.URL.Scheme, next.URL.Host)
	}
	return nil
}
