package redact

import (
	"slices"
	"strings"
)

// scrubURLs redacts passwords in URLs, and user names long enough to be a token.
func scrubURLs(s string) string {
	const sign = "://"
	var out strings.Builder
	done := 0               // s up to here is written
	urlEnd, lastAt := 0, -1 // of the last URL; another URL may begin inside
	for at := 0; ; {
		next := strings.Index(s[at:], sign)
		if next < 0 {
			break
		}
		end := at + next
		at = end + len(sign)
		if at >= urlEnd {
			urlEnd = at + lengthOfURL(s[at:])
			lastAt = at + strings.LastIndexByte(s[at:urlEnd], '@')
		}
		if at > lastAt {
			continue
		}
		if from, to := passwordAt(s[:lastAt+1], schemeBefore(s[done:end]), at); from < to {
			out.WriteString(s[done:from])
			out.WriteString(Marker)
			done, at = to, to
		}
	}
	if done == 0 {
		return s
	}
	return out.String() + s[done:]
}

// databases are the schemes whose passwords often contain / ? or #, unescaped.
var databases = [...]string{
	"postgres", "postgresql", "mysql", "mariadb", "redis", "rediss", "amqp", "amqps", "mongodb",
	"mongodb+srv", "nats", "sqlserver",
}

// lengthOfURL returns the length of the rest of a URL at the front of s.
func lengthOfURL(s string) int {
	if end := strings.IndexAny(s, " \t\r\n\"'`<>"); end >= 0 {
		return end
	}
	return len(s)
}

// passwordAt finds the secret part of the user information that begins at index i of s and ends with the last @ of the
// URL. If from equals to, there is none.
func passwordAt(s, scheme string, i int) (from, to int) {
	word := s[i:]
	if !slices.Contains(databases[:], scheme) {
		if end := strings.IndexAny(word, "/?#"); end >= 0 {
			word = word[:end]
		}
	}
	at := strings.LastIndexByte(word, '@')
	if scheme == "" || at < 0 {
		return i, i
	}
	if colon := strings.IndexByte(word[:at], ':'); colon >= 0 {
		return i + colon + 1, i + at
	}
	const tokenLength = 20
	if at >= tokenLength {
		return i, i + at
	}
	return i, i
}

// schemeBefore returns the URL scheme at the end of s, in lower case.
func schemeBefore(s string) string {
	const longest = 20
	start := len(s)
	for start > 0 && len(s)-start < longest && (isName(s[start-1]) && s[start-1] != '_' || s[start-1] == '+') {
		start--
	}
	return strings.ToLower(s[start:])
}
