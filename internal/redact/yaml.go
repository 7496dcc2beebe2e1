package redact

import (
	"strings"
	"unicode"
)

// A value in YAML may begin on the line after its name: as a block (name: |) of all lines with a larger indentation
// than the name, or as one word.

// yamlEnd returns the length of the end of a name's line at index i of s, if its value may begin on the next line: a
// block sign, or nothing. Otherwise it returns 0.
func yamlEnd(s string, i int) int {
	text := strings.TrimLeftFunc(s[i:], unicode.IsSpace)
	first := len(s) - len(text)
	if end := strings.IndexByte(s[i:first], '\n'); end >= 0 {
		return end + 1
	}
	if text == "" || text[0] != '|' && text[0] != '>' {
		return 0
	}
	const longest = 1000 // bytes of a line. Each name on a line looks for its end: without a bound, that is quadratic
	end := strings.IndexByte(text[:min(len(text), longest)], '\n')
	if end < 0 {
		return 0
	}
	sign, _, _ := strings.Cut(text[1:end], " #")
	if strings.Trim(strings.TrimRightFunc(sign, unicode.IsSpace), "+-0123456789") != "" {
		return 0
	}
	return first + end + 1 - i
}

// yamlScalar finds the value that begins on the line after the name, which ends at i+length.
func yamlScalar(s string, i, length int) (from, to int) {
	lineStart := strings.LastIndexByte(s[:i], '\n') + 1
	margin := indent(s[lineStart:])
	if strings.HasPrefix(s[lineStart+margin:], "- ") {
		margin += blanks(s[lineStart+margin+1:]) + 1
	}
	isBlock := strings.TrimSpace(s[i:i+length]) != ""
	from = i + length
	to = from
	for to < len(s) {
		end := len(s)
		if next := strings.IndexByte(s[to:], '\n'); next >= 0 {
			end = to + next + 1
		}
		line := s[to:end]
		if text := strings.TrimSpace(line); text != "" {
			if indent(line) <= margin {
				break
			}
			if !isBlock {
				return word(s, to, line)
			}
		} else if !isBlock {
			break
		}
		to = end
	}
	from, to = trimmedRange(s, from, to)
	if rest := strings.TrimPrefix(s[from:to], Marker); rest == "" || strings.HasPrefix(rest, cutPrefix) {
		return to, to
	}
	return from, to
}

// isEscapedBlock reports whether s begins with the sign of a block with escaped line breaks, as in a quoted text.
func isEscapedBlock(s string) bool {
	return s != "" && (s[0] == '|' || s[0] == '>') && strings.HasPrefix(strings.TrimLeft(s[1:], "+-0123456789 "), `\n`)
}

// word finds the value that is the one word of a line of s, which begins at index i. Several words are prose or names
// with values of their own.
func word(s string, i int, line string) (from, to int) {
	from, to = trimmedRange(s, i, i+len(line))
	text := s[from:to]
	isName := strings.HasSuffix(text, ":") || strings.HasPrefix(text, "-")
	if isName || strings.ContainsAny(text, " \t<>{}[]()") || spared(text, strong) {
		return i, i
	}
	return from, to
}

// indent counts the spaces and tabs at the front of a line.
func indent(line string) int { return blanks(line) }

// trimmedRange returns a range of s without the blanks at its ends.
func trimmedRange(s string, from, to int) (int, int) {
	text := s[from:to]
	from += len(text) - len(strings.TrimLeft(text, " \t\r\n"))
	return from, from + len(strings.TrimSpace(text))
}
