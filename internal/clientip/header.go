package clientip

import (
	"net/http"
	"slices"
	"strings"
)

// hops returns the last addresses that proxies added, the nearest proxy's last. both has those of Forwarded if both
// headers are sent.
func hops(h http.Header) (list, both []string) {
	forwardedFor, forwarded := h.Values("X-Forwarded-For"), h.Values("Forwarded")
	switch {
	case len(forwarded) == 0:
		return lastItems(forwardedFor), nil
	case len(forwardedFor) == 0:
		return nodes(forwarded), nil
	}
	return lastItems(forwardedFor), nodes(forwarded)
}

// lastItems splits a header at commas from the right, into at most maxHops items in the header's order.
func lastItems(values []string) []string {
	var list []string
	for _, rest := range slices.Backward(values) {
		more := true
		for more && len(list) < maxHops {
			at := strings.LastIndexByte(rest, ',')
			list = append(list, rest[at+1:])
			if more = at >= 0; more {
				rest = rest[:at]
			}
		}
	}
	slices.Reverse(list)
	return list
}

// nodes are the for= parameters of Forwarded (RFC 7239); an element without one is an empty text, which is not an
// address. An address has no comma and no semicolon, quoted or not, so quotes need no parser. An element cut inside a
// quoted text has no readable address.
func nodes(values []string) []string {
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
