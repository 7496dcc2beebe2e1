package redact

import (
	"regexp"
	"strings"
)

// pattern is the look of one kind of secret. The expression runs only on text that has one of
// the hints, because most text has none.
type pattern struct {
	hints   []string
	find    *regexp.Regexp
	replace string
}

// patterns are applied in this order. They are never written to.
var patterns = [...]pattern{
	{
		[]string{"PRIVATE KEY"},
		regexp.MustCompile(`(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\z)`),
		Marker,
	},
	{
		[]string{"?key=", "&key=", "sig=", "signature=", "code=", "Signature="},
		regexp.MustCompile(`([?&](?:key|sig|signature|code|X-Amz-Signature)=)[^&\s"'#]{8,}`),
		"${1}" + Marker,
	},
	{[]string{"eyJ"}, regexp.MustCompile(`\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*)*`), Marker},
	{[]string{"sk-"}, regexp.MustCompile(`\bsk-[A-Za-z0-9_-]{10,}`), Marker},
	{[]string{"k_live_", "k_test_"}, regexp.MustCompile(`\b[srp]k_(?:live|test)_[A-Za-z0-9]{8,}`), Marker},
	{[]string{"ghp_", "gho_", "ghu_", "ghs_", "ghr_"}, regexp.MustCompile(`\bgh[pousr]_[A-Za-z0-9]{10,}`), Marker},
	{[]string{"github_pat_", "glpat-"}, regexp.MustCompile(`\b(?:github_pat_|glpat-)[A-Za-z0-9_-]{10,}`), Marker},
	{[]string{"xox", "xapp-"}, regexp.MustCompile(`\b(?:xox[a-z]|xapp)-[A-Za-z0-9-]{8,}`), Marker},
	{[]string{"hooks.slack.com/"}, regexp.MustCompile(`(hooks\.slack\.com/[a-z]+/)[A-Za-z0-9/]+`), "${1}" + Marker},
	{[]string{"AKIA", "ASIA"}, regexp.MustCompile(`\b(?:AKIA|ASIA)[A-Z0-9]{16}\b`), Marker},
	{[]string{"AIza", "ya29."}, regexp.MustCompile(`\b(?:AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{10,})`), Marker},
	{[]string{"whsec_", "whsk_"}, regexp.MustCompile(`\bwhs(?:ec|k)_[A-Za-z0-9+/=_-]{6,}`), Marker},
	{[]string{"hf_", "npm_", "dop_v1_"}, regexp.MustCompile(`\b(?:hf_|npm_|dop_v1_)[A-Za-z0-9]{20,}`), Marker},
	{[]string{"AGE-SECRET-KEY-1"}, regexp.MustCompile(`\bAGE-SECRET-KEY-1[A-Z0-9]{20,}`), Marker},
	{[]string{"SG."}, regexp.MustCompile(`\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}`), Marker},
	{[]string{"earer", "EARER"}, regexp.MustCompile(`(?i)\b(bearer[ \t]+)[A-Za-z0-9._~+/=-]{6,}`), "${1}" + Marker},
	{ // the letters that base64 gives a "user:password" are never all of one case
		[]string{"asic ", "ASIC "},
		regexp.MustCompile(`\b([Bb]asic[ \t]+|BASIC[ \t]+)[A-Za-z0-9+/]*(?:[a-z][A-Z]|[A-Z][A-Z]|[0-9])[A-Za-z0-9+/]*=*`),
		"${1}" + Marker,
	},
}

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
		next := scrubNamed(scrubURLs(scrubPatterns(s)))
		if next == s {
			return s
		}
		s = next
	}
	return Marker
}

// scrubPatterns removes what looks like a secret.
func scrubPatterns(s string) string {
	for _, p := range patterns {
		for _, hint := range p.hints {
			if strings.Contains(s, hint) {
				s = p.find.ReplaceAllString(s, p.replace)
				break
			}
		}
	}
	return s
}
