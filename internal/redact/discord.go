package redact

import "strings"

// scrubDiscord removes the tokens of Discord's bots. They have no prefix: the number of the bot in base64, six
// characters of time, and a signature, with dots between.
func scrubDiscord(s string) string {
	const middle, signature, least, most = 6, 27, 23, 28
	for i := 0; ; i++ {
		next := strings.IndexByte(s[i:], '.')
		if next < 0 {
			return s
		}
		i += next
		last := i + 1 + middle
		if last >= len(s) || s[last] != '.' || run(s[i+1:]) != middle || run(s[last+1:]) < signature {
			continue
		}
		from := i
		for from > 0 && i-from <= most && isToken(s[from-1]) {
			from--
		}
		if i-from < least || i-from > most || strings.IndexByte("MNO", s[from]) < 0 {
			continue
		}
		to := last + 1 + run(s[last+1:])
		s = s[:from] + Marker + s[to:]
		i = from + len(Marker)
	}
}

// run counts the characters of a token at the front of s.
func run(s string) int {
	for i := range len(s) {
		if !isToken(s[i]) {
			return i
		}
	}
	return len(s)
}
