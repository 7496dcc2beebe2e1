package redact

import (
	"strings"
)

// scrub returns s without secrets, NUL and invalid UTF-8. It searches JSON inside s as JSON.
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

// scannable returns s in valid UTF-8, without NUL, and cut to maxScan bytes, at a space if there is one near.
func scannable(s string) string {
	const slack = 4 << 10 // room for the mark, and the distance to search for a space
	if len(s) > maxScan {
		kept := s[:maxScan-slack]
		if space := strings.LastIndexAny(kept, " \t\r\n"); space > len(kept)-slack {
			kept = kept[:space]
		}
		s = strings.ToValidUTF8(kept, "\uFFFD") + cutMark(len(s)-len(kept))
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "")
}

// scrubPlain redacts text that is not JSON, repeatedly until nothing changes: a removal may join the text around it
// into another secret. A text that still changes after maxRounds becomes [Marker].
func scrubPlain(s string) string {
	const maxRounds = 4
	s = scannable(s)
	for range maxRounds {
		next := scrubOnce(s)
		if next == s {
			return s
		}
		s = next
	}
	return Marker
}

// scrubOnce redacts the visible secrets of a text, or else those that its invisible characters hide.
func scrubOnce(s string) string {
	if shown := visible(s); shown != s {
		if next := scrubVisible(shown); next != shown {
			return next
		}
	}
	return scrubVisible(s)
}

// scrubVisible redacts by shape and by name.
func scrubVisible(s string) string {
	return scrubNamed(scrubMarkup(scrubURLs(scrubDiscord(scrubTokens(s)))))
}
