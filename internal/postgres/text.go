package postgres

import "strings"

// Text is s as a column of text can hold it: NUL is left out, and what is not UTF-8 becomes U+FFFD.
func Text(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\ufffd"), "\x00", "")
}
