// Package textcut bounds texts.
package textcut

import "strings"

// Text returns a text of at most limit bytes, or its beginning and an ellipsis.
func Text(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + "…"
}

// Stored is [Text] with U+FFFD in place of what PostgreSQL cannot store: broken characters and NUL.
func Stored(text string, limit int) string {
	return Text(strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD"), limit)
}

// LastLines returns the last n lines of a text.
func LastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
