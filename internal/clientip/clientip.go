// Package clientip finds the client's address of a request.
//
// The client's address is the address of the connection, unless that is a trusted proxy (AGENT_TRUSTED_PROXIES). Then
// the address is the right-most one of X-Forwarded-For, or else of Forwarded, that is not a trusted proxy: a client can
// write anything further left. After an unreadable header the address is the last proxy that was read. If two headers
// disagree, it is the address of the connection. So clients that send invalid headers share the limits of a proxy, not
// those of another client.
//
// The handler logs an untrusted peer that sends such a header, at most once in logEvery, with the remedy.
//
// Rate limits count by [Key]: an IPv4 address, or the /64 network of an IPv6 address, which one host can choose from
// freely.
package clientip

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"
)

// logEvery is the minimum time between two log lines about untrusted forwarded addresses.
const logEvery = time.Hour

// maxHops bounds the addresses that are read from a header.
const maxHops = 32

// Trusted are the networks of the proxies whose headers are trusted. The zero value trusts no proxy.
type Trusted []netip.Prefix

// Parse reads addresses and networks (CIDR). Empty items are skipped.
func Parse(items []string) (Trusted, error) {
	var trusted Trusted
	for _, item := range items {
		network, err := netip.ParsePrefix(item)
		if err != nil {
			addr, addrErr := netip.ParseAddr(strings.Trim(item, "[]"))
			if addrErr != nil || addr.Zone() != "" {
				return nil, fmt.Errorf("%q is not an address or a network", item)
			}
			network = netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen())
		}
		if network.Addr().Is4In6() && network.Bits() >= 96 {
			network = netip.PrefixFrom(network.Addr().Unmap(), network.Bits()-96)
		}
		if network.Bits() == 0 {
			return nil, fmt.Errorf("%q is every address, so any client could claim any address", item)
		}
		trusted = append(trusted, network.Masked())
	}
	return trusted, nil
}

// Has reports whether an address is a trusted proxy.
func (t Trusted) Has(addr netip.Addr) bool {
	for _, network := range t {
		if network.Contains(addr) {
			return true
		}
	}
	return false
}

// Find returns the address of the client; the zero value if the connection has no address.
func (t Trusted) Find(r *http.Request) netip.Addr {
	peer := Peer(r)
	if !t.Has(peer) {
		return peer
	}
	addrs, forwarded := hops(r.Header)
	client := t.followHops(peer, addrs)
	if forwarded != nil && t.followHops(peer, forwarded) != client {
		return peer
	}
	return client
}

// followHops follows the hops from the right while the previous hop is trusted.
func (t Trusted) followHops(peer netip.Addr, addrs []string) netip.Addr {
	client := peer
	for i := len(addrs) - 1; i >= 0 && t.Has(client); i-- {
		next, ok := parseHost(addrs[i])
		if !ok {
			break
		}
		client = next
	}
	return client
}

// Handler serves requests whose context has the address that [Of] and [Key] return. A request that a handler derives
// from another one keeps its address. An untrusted forwarded address is logged, at most once in [logEvery]: the peer
// may be a proxy that is missing from the settings.
func (t Trusted) Handler(next http.Handler, log *slog.Logger) http.Handler {
	var logged atomic.Int64
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, found := r.Context().Value(contextKey{}).(netip.Addr); !found {
			t.report(r, log, &logged)
			r = r.WithContext(context.WithValue(r.Context(), contextKey{}, t.Find(r)))
		}
		next.ServeHTTP(w, r)
	})
}

// report logs that an untrusted peer names another address.
func (t Trusted) report(r *http.Request, log *slog.Logger, logged *atomic.Int64) {
	if r.Header.Get("X-Forwarded-For") == "" && r.Header.Get("Forwarded") == "" {
		return
	}
	peer := Peer(r)
	last, now := logged.Load(), time.Now().UnixNano()
	if t.Has(peer) || last != 0 && now-last < int64(logEvery) || !logged.CompareAndSwap(last, now) {
		return
	}
	log.WarnContext(r.Context(), "forwarded address ignored", "peer", peer.String(), "todo",
		"if this is your proxy, list it in "+
			"AGENT_TRUSTED_PROXIES; until then all who come through it share the limits of one address")
}

type contextKey struct{}

// Of returns the client's address as [Trusted.Handler] found it, or else the address of the connection.
func Of(r *http.Request) netip.Addr {
	if addr, ok := r.Context().Value(contextKey{}).(netip.Addr); ok {
		return addr
	}
	return Peer(r)
}

// Key is the key of rate limits: the client's IPv4 address or IPv6 /64 network. All connections without an address
// share one.
func Key(r *http.Request) string { return Group(Of(r)) }

// Group is the key of an address.
func Group(addr netip.Addr) string {
	switch {
	case !addr.IsValid():
		return "unknown"
	case addr.Is4():
		return addr.String()
	}
	return netip.PrefixFrom(addr, 64).Masked().String()
}

// Peer is the address of the connection.
func Peer(r *http.Request) netip.Addr {
	addr, _ := parseHost(r.RemoteAddr)
	return addr
}

// parseHost reads an address with or without port, brackets and zone.
func parseHost(text string) (netip.Addr, bool) {
	text = strings.TrimSpace(text)
	addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(text, "["), "]"))
	if err != nil {
		withPort, portErr := netip.ParseAddrPort(text)
		if portErr != nil {
			return netip.Addr{}, false
		}
		addr = withPort.Addr()
	}
	return addr.WithZone("").Unmap(), true
}
