package clientip_test

import (
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

var silent = slog.New(slog.DiscardHandler)

func parse(t *testing.T, items ...string) clientip.Trusted {
	t.Helper()
	trusted, err := clientip.Parse(items)
	require.NoError(t, err)
	return trusted
}

func TestClientIsRightmostUntrustedHop(t *testing.T) {
	t.Parallel()
	trusted := parse(t, "10.0.0.0/8", "127.0.0.1", "fd00::/8", "::ffff:192.168.0.0/112")
	for name, c := range map[string]struct {
		peer             string
		forFor, standard []string
		want             string
	}{
		"no proxy":               {"203.0.113.9:99", nil, nil, "203.0.113.9"},
		"a claim of a stranger":  {"203.0.113.9:99", []string{"198.51.100.1"}, []string{"for=198.51.100.1"}, "203.0.113.9"},
		"one proxy":              {"10.0.0.1:99", []string{"198.51.100.1"}, nil, "198.51.100.1"},
		"a claim before it":      {"10.0.0.1:99", []string{"1.2.3.4, 198.51.100.1"}, nil, "198.51.100.1"},
		"a trusted claim":        {"10.0.0.1:99", []string{"10.9.9.9, 198.51.100.1"}, nil, "198.51.100.1"},
		"two proxies":            {"127.0.0.1:99", []string{"1.2.3.4, 198.51.100.1, 10.0.0.2"}, nil, "198.51.100.1"},
		"two lines":              {"127.0.0.1:99", []string{"1.2.3.4", "198.51.100.1,10.0.0.2"}, nil, "198.51.100.1"},
		"all trusted":            {"127.0.0.1:99", []string{"10.0.0.3, 10.0.0.2"}, nil, "10.0.0.3"},
		"no header":              {"10.0.0.1:99", nil, nil, "10.0.0.1"},
		"an empty header":        {"10.0.0.1:99", []string{""}, nil, "10.0.0.1"},
		"nonsense":               {"10.0.0.1:99", []string{"198.51.100.1, unknown"}, nil, "10.0.0.1"},
		"nonsense further left":  {"10.0.0.1:99", []string{"unknown, 198.51.100.1"}, nil, "198.51.100.1"},
		"nonsense at the second": {"10.0.0.1:99", []string{"evil, 10.0.0.2"}, nil, "10.0.0.2"},
		"with a port":            {"10.0.0.1:99", []string{"198.51.100.1:4711"}, nil, "198.51.100.1"},
		"IPv6":                   {"[fd00::1]:99", []string{"2001:db8::1"}, nil, "2001:db8::1"},
		"IPv6 in brackets":       {"[fd00::1]:99", []string{"[2001:db8::1]"}, nil, "2001:db8::1"},
		"IPv6 with a port":       {"[fd00::1]:99", []string{"[2001:db8::1]:4711"}, nil, "2001:db8::1"},
		"IPv6 with a zone":       {"[fd00::1%eth0]:99", []string{"fe80::1%eth0"}, nil, "fe80::1"},
		"IPv4 in IPv6":           {"[::ffff:10.0.0.1]:99", []string{"::ffff:198.51.100.1"}, nil, "198.51.100.1"},
		"a network of both":      {"192.168.0.7:99", []string{"198.51.100.1"}, nil, "198.51.100.1"},
		"Forwarded": {
			"10.0.0.1:99", nil,
			[]string{`for=1.2.3.4, For="[2001:db8::1]:4711";proto=https;by=10.0.0.1`},
			"2001:db8::1",
		},
		"Forwarded, hidden":     {"10.0.0.1:99", nil, []string{`for=_secret`}, "10.0.0.1"},
		"Forwarded, no for":     {"10.0.0.1:99", nil, []string{`for=1.2.3.4, proto=http`}, "10.0.0.1"},
		"Forwarded, open quote": {"10.0.0.1:99", nil, []string{`by="x, for=1.2.3.4`, `for=198.51.100.1`}, "198.51.100.1"},
		"both agree":            {"10.0.0.1:99", []string{"198.51.100.1"}, []string{"for=198.51.100.1"}, "198.51.100.1"},
		"both disagree":         {"10.0.0.1:99", []string{"198.51.100.1"}, []string{"for=1.2.3.4"}, "10.0.0.1"},
		"no port":               {"10.0.0.1", []string{"198.51.100.1"}, nil, "198.51.100.1"},
		"no address":            {"@", []string{"198.51.100.1"}, nil, "invalid IP"},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequestWithContext(t.Context(), "GET", "/", nil)
			r.RemoteAddr, r.Header["X-Forwarded-For"], r.Header["Forwarded"] = c.peer, c.forFor, c.standard
			assert.Equal(t, c.want, trusted.Find(r).String())
		})
	}
}

func TestInvalidNetworksAreRejected(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{
		"proxy.local", "10.0.0.0/33", "0.0.0.0/0", "::/0", "::ffff:0.0.0.0/96", "fe80::1%eth0",
		"10.0.0.1:80",
	} {
		got, err := clientip.Parse([]string{bad})
		assert.Truef(t, err != nil && strings.Contains(err.Error(), bad), "%s: %v, %v", bad, got, err)
	}
	got := parse(t, "10.0.0.1", "[::1]")
	assert.Truef(t, len(got) == 2 && got.Has(netip.MustParseAddr("::1")), "got %v", got)
}

func TestKeyOfNetwork(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string]string{
		"198.51.100.1": "198.51.100.1", "2001:db8:1:2:3::4": "2001:db8:1:2::/64", "2001:db8:1:2:ffff::": "2001:db8:1:2::/64",
	} {
		assert.Equal(t, want, clientip.Group(netip.MustParseAddr(addr)), addr)
	}
	assert.Equal(t, "unknown", clientip.Group(netip.Addr{}))
}

func TestDerivedRequestKeepsAddress(t *testing.T) {
	t.Parallel()
	trusted := parse(t, "127.0.0.1")
	var outer, inner string
	last := trusted.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { inner = clientip.Key(r) }),
		silent)
	first := trusted.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		outer = clientip.Key(r)
		again := httptest.NewRequestWithContext(r.Context(), "POST", "/", nil)
		again.RemoteAddr = r.RemoteAddr
		last.ServeHTTP(w, again)
	}), silent)
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/", nil)
	r.RemoteAddr = "127.0.0.1:99"
	r.Header.Set("X-Forwarded-For", "198.51.100.1")
	first.ServeHTTP(httptest.NewRecorder(), r)
	assert.Equal(t, "198.51.100.1", outer)
	assert.Equal(t, outer, inner)
}

func TestUnlistedProxyIsLoggedOnce(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	trusted := parse(t, "127.0.0.1")
	nothing := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	h := trusted.Handler(nothing, slog.New(slog.NewTextHandler(&out, nil)))
	for _, c := range []struct {
		peer, header string
		lines        int
	}{
		{"127.0.0.1:9", "X-Forwarded-For", 0},
		{"10.0.0.1:9", "X-Other", 0},
		{"10.0.0.1:9", "X-Forwarded-For", 1},
		{"10.0.0.2:9", "Forwarded", 1},
	} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/", nil)
		r.RemoteAddr = c.peer
		r.Header.Set(c.header, "for=198.51.100.1")
		h.ServeHTTP(httptest.NewRecorder(), r)
		assert.Equal(t, c.lines, strings.Count(out.String(), "\n"), c.header, c.peer, out.String())
	}
	if line := out.String(); !strings.Contains(line, "peer=10.0.0.1") || !strings.Contains(line, "AGENT_TRUSTED_PROXIES") {
		t.Errorf("the line is %s", line)
	}
}

func FuzzHeaders(f *testing.F) {
	f.Add("10.0.0.1:1", "1.2.3.4, [::1]:9", `for="[::1]:9"`)
	f.Add("", ",,,", `;;=",`)
	f.Fuzz(func(t *testing.T, peer, forFor, standard string) {
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/", nil)
		r.RemoteAddr, r.Header["X-Forwarded-For"], r.Header["Forwarded"] = peer, []string{forFor}, []string{standard}
		trusted := clientip.Trusted{netip.MustParsePrefix("10.0.0.0/8")}
		got := trusted.Find(r)
		assert.Truef(t, got.IsValid() == clientip.Peer(r).IsValid(), "got %s for the peer %q", got, peer)
	})
}
