package redact

import (
	_ "embed"
	"encoding/json"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
)

// rule recognizes one kind of secret by its shape.
type rule struct {
	name string
	// keywords are in lower case, with at least three bytes. The rule runs only at a keyword, in any letter case.
	keywords []string
	// back is the number of bytes of the secret before the keyword.
	back int
	// bounded demands that no letter, digit or underscore precedes the match.
	bounded bool
	// pattern is the expression to match there. Its first group is the secret; without a group, the whole match is.
	pattern string
	// find replaces pattern with code. from equal to to means no secret.
	find func(s string, at int) (from, to int)
}

// rules are all rules. They are immutable.
var rules = func() []rule {
	var all []rule
	for _, some := range [][]rule{{telegram, query}, commands, readRules(ownJSON), readRules(gitleaksJSON)} {
		all = append(all, some...)
	}
	return all
}()

// ownJSON holds our rules: key files, headers, tokens and webhook addresses.
//
//go:embed rules.json
var ownJSON []byte

// gitleaksJSON holds the gitleaks rules that know the shape of a secret, and names the others with the reason. The
// context of a secret is widened from source code to any text. Entropy and allowlists are dropped, so examples are
// redacted too. To add a rule of a newer version, add its line: keywords in lower case where the secret begins.
//
//go:embed gitleaks/rules.json
var gitleaksJSON []byte

func readRules(text []byte) []rule {
	var file struct {
		Rules []struct {
			Name     string
			Keywords []string
			Back     int
			Bounded  bool
			Look     string
		}
	}
	if err := json.Unmarshal(text, &file); err != nil {
		panic("redact: read the rules: " + err.Error())
	}
	var list []rule
	for _, r := range file.Rules {
		list = append(list, rule{name: r.Name, keywords: r.Keywords, back: r.Back, bounded: r.Bounded, pattern: r.Look})
	}
	return list
}

// compiled caches the expressions of the rules, by their index in rules.
var compiled = make([]atomic.Pointer[regexp.Regexp], len(rules))

// expression returns the compiled expression of a rule.
func expression(number int) *regexp.Regexp {
	if done := compiled[number].Load(); done != nil {
		return done
	}
	done := regexp.MustCompile(`\A(?:` + rules[number].pattern + `)`)
	compiled[number].Store(done)
	return done
}

// secretAt finds the secret of a rule whose keyword is at index i of s. It must not begin before from.
func secretAt(s string, from, i, number int) (start, end int) {
	r := &rules[number]
	at := i - r.back
	if at < from || r.bounded && !boundary(s, at) {
		return i, i
	}
	if r.find != nil {
		return r.find(s, at)
	}
	found := expression(number).FindStringSubmatchIndex(s[at:])
	if found == nil {
		return i, i
	}
	start, end = at+found[0], at+found[1]
	if len(found) > 2 && found[2] >= 0 {
		start, end = at+found[2], at+found[3]
	}
	for end < len(s) && isWord(s[end-1]) && isWord(s[end]) {
		end++ // a secret longer than the rule expects
	}
	if insideBase64(s, at, end) {
		return i, i
	}
	return start, end
}

// boundary reports whether a word can begin at index i of s: after a byte other than a letter, digit or underscore,
// or after an escape of JSON or of a URL.
func boundary(s string, i int) bool {
	if i == 0 || !isWord(s[i-1]) {
		return true
	}
	return i >= 2 && s[i-2] == '\\' && strings.IndexByte("nrtbf", s[i-1]) >= 0 ||
		i >= 3 && s[i-3] == '%' && isHex(s[i-2:i]) ||
		i >= 6 && s[i-6:i-4] == `\u` && isHex(s[i-4:i])
}

// insideBase64 reports whether a match is inside a long base64 text, such as a picture, where prefixes occur by
// chance.
func insideBase64(s string, from, to int) bool {
	const long = 64
	if from < long || s[from-1] != '+' && s[from-1] != '/' {
		return false
	}
	for _, b := range []byte(s[from-long : to]) {
		if !isBase64(b) {
			return false
		}
	}
	return true
}

func isLetter(b byte) bool { return b|0x20 >= 'a' && b|0x20 <= 'z' }

func isDigit(b byte) bool { return b >= '0' && b <= '9' }

func isWord(b byte) bool { return isLetter(b) || isDigit(b) || b == '_' }

func isToken(b byte) bool { return isWord(b) || b == '-' }

func isBase64(b byte) bool { return isLetter(b) || isDigit(b) || b == '+' || b == '/' }

// isHex reports whether s consists of hexadecimal digits.
func isHex(s string) bool {
	for _, b := range []byte(s) {
		if !isDigit(b) && (b|0x20 < 'a' || b|0x20 > 'f') {
			return false
		}
	}
	return true
}

// A rule runs only at one of its keywords. One pass over the text finds all keywords: a table indexes them by their
// first three bytes.

// keyword is a keyword of a rule.
type keyword struct {
	text string
	rule int
}

// keywordTable holds the keywords in buckets by the hash of their first three bytes. Slot 0 is empty.
type keywordTable struct {
	slots   [1 << tableBits]uint16
	buckets [][]keyword
}

const tableBits = 13

// keywords is the table of all rules.
var keywords = sync.OnceValue(func() *keywordTable {
	t := &keywordTable{buckets: make([][]keyword, 1)}
	for number := range rules {
		for _, text := range rules[number].keywords {
			slot := &t.slots[trigram(text[0], text[1], text[2])]
			if *slot == 0 {
				*slot = uint16(len(t.buckets))
				t.buckets = append(t.buckets, nil)
			}
			t.buckets[*slot] = append(t.buckets[*slot], keyword{text, number})
		}
	}
	return t
})

// trigram hashes three bytes, ignoring letter case.
func trigram(a, b, c byte) uint32 {
	const spread = 0x9E3779B1
	return ((uint32(a) | uint32(b)<<8 | uint32(c)<<16 | 0x202020) * spread) >> (32 - tableBits)
}

// scrubTokens redacts the matches of all rules. Of several, the longest counts.
func scrubTokens(s string) string {
	table := keywords()
	var out strings.Builder
	done := 0 // s up to here is written
	for i := 0; i+2 < len(s); i++ {
		bucket := table.slots[trigram(s[i], s[i+1], s[i+2])]
		if bucket == 0 {
			continue
		}
		from, to := i, i
		for _, k := range table.buckets[bucket] {
			if len(s)-i < len(k.text) || !strings.EqualFold(s[i:i+len(k.text)], k.text) {
				continue
			}
			if start, end := secretAt(s, done, i, k.rule); start < end && end > to {
				from, to = start, end
			}
		}
		if from < to && s[from:to] != Marker {
			out.WriteString(s[done:from])
			out.WriteString(Marker)
			done = to
			i = to - 1
		}
	}
	if done == 0 {
		return s
	}
	return out.String() + s[done:]
}

// Known applies hide, which redacts known secrets, to every text of a decoded JSON value, including keys. It changes
// lists in place. If keys become equal, the value of one of them stays, at random.
func Known(value any, hide func(string) string) any {
	switch v := value.(type) {
	case string:
		return hide(v)
	case []any:
		for i := range v {
			v[i] = Known(v[i], hide)
		}
	case map[string]any:
		hidden := make(map[string]any, len(v))
		for key := range v {
			hidden[hide(key)] = Known(v[key], hide)
		}
		return hidden
	}
	return value
}
