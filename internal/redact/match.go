package redact

import (
	"strings"
	"sync"
)

// scrubTokens redacts the matches of all rules. Of several matches at one position, the one that ends last counts.
// One pass over s finds all keywords, by their first three bytes.
func scrubTokens(s string) string {
	table := keywords()
	var out strings.Builder
	written := 0 // s up to here is in out
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
			if start, end := secretAt(s, written, i, k.rule); start < end && end > to {
				from, to = start, end
			}
		}
		if from < to && s[from:to] != Marker {
			out.WriteString(s[written:from])
			out.WriteString(Marker)
			written = to
			i = to - 1
		}
	}
	if written == 0 {
		return s
	}
	return out.String() + s[written:]
}

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

// secretAt matches a rule, given by its index, at the keyword at s[i]. It ignores a match that begins before s[least].
// start equal to end means no match.
func secretAt(s string, least, i, index int) (start, end int) {
	r := &rules[index]
	at := i - r.back
	if at < least || r.bounded && !boundary(s, at) {
		return i, i
	}
	if r.find != nil {
		return r.find(s, at)
	}
	found := expression(index).FindStringSubmatchIndex(s[at:])
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

// insideBase64 reports whether s[from:to] is inside a long base64 text, such as a picture, where prefixes of secrets
// occur by chance. It looks for this only behind a + or /: a secret may follow a letter of ordinary text.
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
