package redact

import (
	_ "embed"
	"strings"
)

// telegram finds the token of a Telegram bot.
var telegram = rule{name: "telegram", keywords: []string{":aa", "%3aaa"}, find: telegramToken}

// telegramToken finds the secret of a bot's token, after the bot's number and a colon.
func telegramToken(s string, at int) (from, to int) {
	const number, length = 6, 30
	digits := at
	for digits > 0 && at-digits < number && isDigit(s[digits-1]) {
		digits--
	}
	from = at + 1
	if s[at] == '%' {
		from = at + len("%3A")
	}
	to = from
	for to < len(s) && isToken(s[to]) {
		to++
	}
	if at-digits < number || to-from < length || s[from:from+2] != "AA" {
		return at, at
	}
	return from, to
}

// urlParameters finds parameters of a URL that carry a secret under a short name. queryKeywords has the same names.
var urlParameters = rule{
	name: "query", keywords: queryKeywords(),
	pattern: `(?i)(?:[?&]|0026|amp;)(?:key|sig|signature|code|x-(?:amz|goog)-signature)=([^&\s"'#]{8,})`,
}

// queryKeywords are the parameters with the preceding sign, also escaped for JSON and HTML.
func queryKeywords() []string {
	var all []string
	for _, sign := range []string{"?", "&", "0026", "amp;"} {
		for _, name := range []string{"key=", "sig=", "signature=", "code=", "x-amz-signature=", "x-goog-signature="} {
			all = append(all, sign+name)
		}
	}
	return all
}

// scrubDiscord redacts tokens of Discord bots. They have no prefix: the bot's number in base64, six characters of
// time, and a signature, joined by dots.
func scrubDiscord(s string) string {
	const middle, signature, least, most = 6, 27, 23, 28
	var out strings.Builder
	done := 0 // s up to here is written
	for i := 0; ; i++ {
		next := strings.IndexByte(s[i:], '.')
		if next < 0 {
			return out.String() + s[done:]
		}
		i += next
		last := i + 1 + middle
		if last >= len(s) || s[last] != '.' || tokenLength(s[i+1:]) != middle || tokenLength(s[last+1:]) < signature {
			continue
		}
		from := i
		for from > done && i-from <= most && isToken(s[from-1]) {
			from--
		}
		if i-from < least || i-from > most || strings.IndexByte("MNO", s[from]) < 0 {
			continue
		}
		to := last + 1 + tokenLength(s[last+1:])
		out.WriteString(s[done:from])
		out.WriteString(Marker)
		done, i = to, to-1 // the loop adds 1
	}
}

// tokenLength returns the number of token characters at the front of s.
func tokenLength(s string) int {
	for i := range len(s) {
		if !isToken(s[i]) {
			return i
		}
	}
	return len(s)
}
