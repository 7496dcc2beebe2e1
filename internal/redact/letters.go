package redact

import (
	"strings"
	"unicode"

	"golang.org/x/text/unicode/norm"
)

// Invisible characters and look-alike letters hide a name or a token from a search. Texts keep them, since emoji and
// many scripts need them. Only the search ignores them.

// visible returns s without its invisible characters.
func visible(s string) string {
	if isASCII(s) {
		return s
	}
	return strings.Map(func(r rune) rune {
		if invisible(r) {
			return -1
		}
		return r
	}, s)
}

// invisible reports whether a character has no width or shows nothing.
func invisible(r rune) bool {
	return r > unicode.MaxASCII &&
		(unicode.In(r, unicode.Cf, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector) || r == '\u2800')
}

// isASCII reports whether s has no other character.
func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}

// plain returns a name without invisible characters and accents, and wide or styled letters as the ordinary ones.
func plain(name string) string {
	if isASCII(name) {
		return name
	}
	return strings.Map(func(r rune) rune {
		if unicode.Is(unicode.Mn, r) {
			return -1
		}
		if base, ok := unaccented[unicode.ToLower(r)]; ok {
			return base
		}
		return r
	}, norm.NFKD.String(visible(name)))
}

// unaccented are Latin letters whose mark Unicode does not treat as an accent.
var unaccented = map[rune]rune{'ł': 'l', 'ø': 'o', 'đ': 'd', 'ı': 'i', 'ħ': 'h', 'ŧ': 't'}

// lookalikes are the letters of other scripts that look like a Latin one, in lower case.
var lookalikes = func() map[rune]rune {
	all := map[rune]rune{}
	for latin, others := range map[rune]string{
		'a': "аɑαᴀ", 'b': "ьвβɓʙ", 'c': "сϲᴄ", 'd': "ԁɗᴅ", 'e': "еҽεᴇ", 'f': "ғϝ", 'g': "ɡցɢ", 'h': "һнհʜ", 'i': "іιɩɪ",
		'j': "јϳᴊ", 'k': "кκᴋ", 'l': "ӏɭⅼʟ", 'm': "мμᴍ", 'n': "пոηɴ", 'o': "оοօσᴏ", 'p': "рρᴘ", 'q': "ԛգ",
		'r': "гɾʀ", 's': "ѕꜱ",
		't': "тτᴛ", 'u': "υսᴜ", 'v': "ѵνᴠ", 'w': "ԝωᴡ", 'x': "хχ", 'y': "уүγʏ", 'z': "ζᴢȥ",
	} {
		for _, r := range others {
			all[r] = latin
		}
	}
	return all
}()

// latin returns a name with the Latin letters that its letters look like.
func latin(name string) string {
	return strings.Map(func(r rune) rune {
		if looks, ok := lookalikes[unicode.ToLower(r)]; ok {
			return looks
		}
		return r
	}, name)
}
