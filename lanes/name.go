package lanes

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// ValidName reports whether a name is valid for a lane or an owner. It must have 1 to 255 characters, not only spaces,
// and must not look like another name. So it may not contain invisible characters, characters that change the text
// direction, or blanks other than the space. Accents must be composed (Unicode normal form C). The database rejects
// invalid names with 22023.
func ValidName(name string) bool {
	if n := utf8.RuneCountInString(name); n < 1 || n > maxNameLength || !utf8.ValidString(name) ||
		strings.Trim(name, " ") == "" {
		return false
	}
	for _, r := range name {
		if unicode.IsControl(r) || unicode.Is(invisible, r) {
			return false
		}
	}
	return norm.NFC.IsNormalString(name)
}

// maxNameLength is the maximum number of characters in a name.
const maxNameLength = 255

// invisible are characters that a reader does not see, or that change how others look. agent_lock_check has the same
// table.
var invisible = &unicode.RangeTable{
	R16: []unicode.Range16{
		{0x80, 0xa0, 1},
		{0xad, 0xad, 1},
		{0x34f, 0x34f, 1},
		{0x61c, 0x61c, 1},
		{0x115f, 0x1160, 1},
		{0x1680, 0x1680, 1},
		{0x17b4, 0x17b5, 1},
		{0x180b, 0x180f, 1},
		{0x2000, 0x200f, 1},
		{0x2028, 0x202f, 1},
		{0x205f, 0x206f, 1},
		{0x2800, 0x2800, 1},
		{0x3000, 0x3000, 1},
		{0x3164, 0x3164, 1},
		{0xfe00, 0xfe0f, 1},
		{0xfeff, 0xfeff, 1},
		{0xffa0, 0xffa0, 1},
		{0xfff0, 0xfffb, 1},
	},
	R32:         []unicode.Range32{{0x1d173, 0x1d17a, 1}, {0xe0000, 0xe0fff, 1}},
	LatinOffset: 2,
}
