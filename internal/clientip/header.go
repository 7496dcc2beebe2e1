package clientip

import (
	"net/http"
	"slices"
	"strings"
)

// hops returns the last addresses that proxies added, the nearest proxy's last. If the request has both headers,
// forwarded has the addresses of Forwarded, and addrs those of X-Forwarded-For.
func hops(h http.Header) (addrs, forwarded []string) {
	xForwardedFor, forwardedHeader := h.Values("X-Forwarded-For"), h.Values("Forwarded")
	switch {
	case len(forwardedHeader) == 0:
		return lastItems(xForwardedFor), nil
	case len(xForwardedFor) == 0:
		return forwardedNodes(forwardedHeader), nil
	}
	return lastItems(xForwardedFor), forwardedNodes(forwardedHeader)
}

// lastItems splits a header at commas from the right, into at most maxHops items in the header's order.
func lastItems(values []string) []string {
	var list []string
	for _, rest := range slices.Backward(values) {
		left := true
		for left && len(list) < maxHops {
			at := strings.LastIndexByte(rest, ',')
			list = append(list, rest[at+1:])
			if left = at >= 0; left {
				rest = rest[:at]
			}
		}
	}
	slices.Reverse(list)
	return list
}

// forwardedNodes are the for= parameters of Forwarded (RFC 7239); an element without one is an empty text, which is not
// an address. An address has no comma and no semicolon, quoted or not, so quotes need no parser. An element cut inside
// a quoted text has no readable address.
func forwardedNodes(values []string) []string {
	list := lastItems(values)
	for i, element := range list {
		list[i] = ""
		for parameter := range strings.SplitSeq(element, ";") {
			name, value, _ := strings.Cut(strings.TrimSpace(parameter), "=")
			if strings.EqualFold(name, "for") {
				list[i] = unquote(value)
			}
		}
	}
	return list
}

// unquote removes the quotes of a quoted text.
func unquote(text string) string {
	if len(text) >= 2 && text[0] == '"' && text[len(text)-1] == '"' {
		return text[1 : len(text)-1]
	}
	return text
}
