package redact

import (
	"strings"
)

// scrub returns s without secrets, NUL and invalid UTF-8. JSON inside s is searched as JSON.
func scrub(s string, depth int) string {
	s = scannable(s)
	start := strings.TrimLeft(s, " \t\r\n")
	if depth >= maxDepth || start == "" || !strings.Contains(`{["`, start[:1]) {
		return scrubPlain(s)
	}
	tree, ok := parse([]byte(s))
	if !ok {
		return scrubPlain(s)
	}
	before := string(encode(tree))
	after := string(encode(walk(tree, depth)))
	if before == after {
		return s
	}
	return after
}

// scannable returns s in valid UTF-8, without NUL, and bounded.
func scannable(s string) string {
	const slack = 4 << 10
	if len(s) > maxScan {
		kept := s[:maxScan-slack]
		if space := strings.LastIndexAny(kept, " \t\r\n"); space > len(kept)-slack {
			kept = kept[:space]
		}
		s = strings.ToValidUTF8(kept, "\uFFFD") + cutMark(len(s)-len(kept))
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "")
}

// scrubPlain removes the secrets of text that is not JSON, until there is nothing more to remove.
func scrubPlain(s string) string {
	const rounds = 4
	s = scannable(s)
	for range rounds {
		next := scrubOnce(s)
		if next == s {
			return s
		}
		s = next
	}
	return Marker
}

// scrubOnce removes the secrets that a text shows, or else those that it shows without its invisible characters.
func scrubOnce(s string) string {
	if shown := visible(s); shown != s {
		if next := scrubVisible(shown); next != shown {
			return next
		}
	}
	return scrubVisible(s)
}

// scrubVisible removes what looks like a secret, and what stands under the name of one.
func scrubVisible(s string) string {
	return scrubNamed(scrubMarkup(scrubURLs(scrubDiscord(scrubTokens(s)))))
}
