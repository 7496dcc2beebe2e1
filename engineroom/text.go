package engineroom

import (
	"bytes"
	"fmt"
	"unicode"
	"unicode/utf8"
)

// plain makes characters visible that would otherwise change how the text around them reads: controls, and
// the marks that turn the direction of writing. The templates themselves have none.
func plain(text []byte) []byte {
	if !bytes.ContainsFunc(text, tricky) {
		return text
	}
	var b bytes.Buffer
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		if tricky(r) {
			fmt.Fprintf(&b, "⟨U+%04X⟩", r)
		} else {
			b.Write(text[:size])
		}
		text = text[size:]
	}
	return b.Bytes()
}

// tricky reports a character that is not shown as itself.
func tricky(r rune) bool {
	switch r {
	case '\n', '\t', utf8.RuneError:
		return false
	}
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u200b' || r == '\ufeff' || r == '\u2060'
}

// brief is at most n characters of a text, from both of its ends: names that are long often begin alike. What shows it has
// the whole text at hand, such as in a title.
func brief(n int, s string) string {
	if len(s) <= n {
		return s
	}
	runes := []rune(s)
	if len(runes) <= n {
		return s
	}
	tail := n / 2
	return string(runes[:n-tail-1]) + "…" + string(runes[len(runes)-tail:])
}

// cut is at most n characters of a text, and how many more there are.
func cut(n int, s string) string {
	if len(s) <= n {
		return s
	}
	count := 0
	for i := range s {
		if count == n {
			return fmt.Sprintf("%s… (%s more characters)", s[:i], thousands(int64(utf8.RuneCountInString(s[i:]))))
		}
		count++
	}
	return s
}
