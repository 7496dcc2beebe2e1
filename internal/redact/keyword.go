package redact

import (
	"strings"
	"sync"
)

// The rules run only where one of their keywords stands. One pass over the text finds all of them: a table tells for
// each three bytes whether a keyword can begin with them, and most cannot.

// keyword is the beginning of what a rule matches.
type keyword struct {
	text string
	rule int
}

// keywordTable has the keywords in buckets by the hash of their first three bytes. A slot of 0 means no bucket.
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

// trigram hashes three bytes. Letter case does not matter.
func trigram(a, b, c byte) uint32 {
	const spread = 0x9E3779B1
	return ((uint32(a) | uint32(b)<<8 | uint32(c)<<16 | 0x202020) * spread) >> (32 - tableBits)
}

// scrubTokens removes what a rule matches. Where several match, the longest counts.
func scrubTokens(s string) string {
	table := keywords()
	var out strings.Builder
	done := 0 // what is before it is written
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
