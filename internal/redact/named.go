package redact

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// scrubNamed redacts values under the name of a secret in text: name=value, "name": "value", \"name\":\"value\", name:
// value, --name value.
func scrubNamed(s string) string {
	var out strings.Builder
	done := 0 // s up to here is written
	for at := 0; at < len(s); {
		next, width := signAt(s[at:])
		if next < 0 {
			break
		}
		at += next
		name, value := pairAt(s, done, at, width)
		how := classify(name)
		if how == ordinary {
			at += width
			continue
		}
		from, to := valueAt(s, value, name, how)
		if from < to {
			out.WriteString(s[done:from])
			out.WriteString(Marker)
			done = to
		}
		at = max(to, value)
	}
	if done == 0 {
		return s
	}
	return out.String() + s[done:]
}

// signAt returns the index and the width of the first sign in s that may join a name to a value: = : - and the wide
// signs of Chinese and Japanese. The index is -1 for none.
func signAt(s string) (i, width int) {
	const wideColon, wideEquals = "：", "＝"
	for i := range len(s) {
		switch s[i] {
		case '=', ':', '-':
			return i, 1
		case wideColon[0]:
			if strings.HasPrefix(s[i:], wideColon) || strings.HasPrefix(s[i:], wideEquals) {
				return i, len(wideColon)
			}
		}
	}
	return -1, 0
}

// pairAt returns the name before the sign at index i, and where the value begins. It searches back to from. The name
// is empty if the sign joins nothing.
func pairAt(s string, from, i, width int) (name string, value int) {
	if s[i] == '-' {
		return flagAt(s, i)
	}
	value = i + width
	if value < len(s) && (s[i] == '=' && s[value] == '>' || s[i] == ':' && s[value] == '=') {
		value++
	}
	value += blanks(s[value:])

	end := from + len(strings.TrimRight(s[from:i], wideBlanks))
	end = from + len(strings.TrimSuffix(s[from:end], "]"))
	if end > from && strings.IndexByte("\"'`", s[end-1]) >= 0 {
		end--
	}
	end = from + len(strings.TrimRight(s[from:end], `\`))
	end = from + len(strings.TrimSuffix(s[from:end], "]"))
	start := end
	for start > from && end-start < longestName && isLongName(s[start-1]) {
		start--
	}
	start += afterPunctuation(s[start:end])
	return qualified(s[from:start], s[start:end]), value
}

// flagAt returns the name of the command-line flag at index i, and the index of its value after blanks. The name is
// empty if there is no such flag.
func flagAt(s string, i int) (name string, value int) {
	if i > 0 && !isSpace(s[i-1]) {
		return "", i
	}
	start := i + 1
	if start < len(s) && s[start] == '-' {
		start++
	}
	end := start
	for end < len(s) && end-start < longestName && isLongName(s[end]) {
		end++
	}
	gap := blanks(s[end:])
	if gap == 0 {
		return "", i
	}
	return s[start:end], end + gap
}

// blanks counts the spaces and tabs at the front of s.
func blanks(s string) int { return len(s) - len(strings.TrimLeft(s, " \t")) }

// wideBlanks are the blanks between a name and its sign, with those of French.
const wideBlanks = " \t\u00a0\u202f"

// isName reports whether b can stand in a name.
func isName(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || b == '_' || b == '.' || b == '-'
}

// afterPunctuation returns the index of the last name in s. Scripts without blanks have punctuation before it.
func afterPunctuation(s string) int {
	if isASCII(s) {
		return 0
	}
	for i := len(s); i > 0; {
		r, size := utf8.DecodeLastRuneInString(s[:i])
		if r > unicode.MaxASCII && unicode.In(r, unicode.P, unicode.Z) && i < len(s) {
			return i
		}
		i -= size
	}
	return 0
}

// isLongName reports whether b can stand in a name of any language.
func isLongName(b byte) bool { return isName(b) || b >= 0x80 }

// qualified extends the last word of a name by the preceding words of that name, since prose writes "API key: …".
func qualified(before, name string) string {
	const longest = 64
	before = before[max(0, len(before)-longest):]
	for range phraseEnds[strings.ToLower(name)] {
		before = strings.TrimRight(before, " ")
		start := strings.LastIndexAny(before, " \t\r\n\"'(,;") + 1
		before, name = before[:start], before[start:]+name
	}
	return name
}

// valueAt returns the range of the value that begins at index i of s, under the name of a secret. The range is empty if
// the value is no secret.
func valueAt(s string, i int, name string, how nameStrength) (from, to int) {
	rest := s[i:]
	slashes := len(rest) - len(strings.TrimLeft(rest, `\`))
	if length := yamlEnd(s, i); length > 0 {
		return yamlScalar(s, i, length)
	}
	switch {
	case rest == "" || strings.HasPrefix(rest, cutPrefix):
		return i, i
	case slashes < len(rest) && strings.IndexByte("\"'`", rest[slashes]) >= 0:
		open := rest[:slashes+1]
		from, to = i+len(open), i+len(open)+closing(rest[len(open):], open)
	case strings.HasPrefix(rest, Marker):
		tail := rest[len(Marker):]
		if strings.Trim(tail[:bareEnd(tail)], ",.}])") == "" {
			return i, i + len(Marker)
		}
		from, to = i, i+len(Marker)+bareEnd(tail)
	case isHeader(name), isEscapedBlock(rest):
		from, to = i, i+lineEnd(rest)
	case rest[0] == '{' || rest[0] == '[':
		if how == weak {
			return i, i
		}
		from, to = i, i+bracketEnd(rest)
	default:
		from, to = i, i+bareEnd(rest)
	}
	if spared(s[from:to], how) {
		return i, i
	}
	return from, to
}

// cutPrefix starts every [cutMark].
const cutPrefix = "…[cut "

// spared reports whether a value in text is no secret despite its name.
func spared(value string, how nameStrength) bool {
	trimmed := strings.TrimRight(value, ",.}])")
	switch strings.ToLower(trimmed) {
	case "", "true", "false", "null", "nil", "none", "{", "[":
		return true
	}
	if value == Marker || strings.HasPrefix(value, cutPrefix) {
		return true
	}
	_, err := strconv.ParseFloat(trimmed, 64)
	return how == weak && err == nil
}

// isHeader reports whether a name's value extends to the end of its line.
func isHeader(name string) bool {
	name = strings.ToLower(name)
	return strings.HasSuffix(name, "authorization") || strings.HasSuffix(name, "cookie")
}

// closing returns the index in s of the quote that closes open, or the length of s.
func closing(s, open string) int {
	quote := open[len(open)-1]
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\\':
			run := i
			for i < len(s) && s[i] == '\\' {
				i++
			}
			if i < len(s) && s[i] == quote && i-run < len(open) && len(open) > 1 {
				return run
			}
			if (i-run)%2 == 0 && len(open) == 1 {
				i-- // paired backslashes escape each other
			}
		case quote:
			return i
		}
	}
	return len(s)
}

// bareEnd returns the length of the unquoted value at the front of s.
func bareEnd(s string) int {
	if end := strings.IndexAny(s, " \t\r\n&;\"'`<>"); end >= 0 {
		return end
	}
	return len(s)
}

// lineEnd returns the length of a header's value at the front of s.
func lineEnd(s string) int {
	if end := strings.IndexAny(s, "\r\n\"'`"); end >= 0 {
		return end
	}
	return len(s)
}

// bracketEnd returns the length of the bracketed value at the front of s; all of s if it is unclosed.
func bracketEnd(s string) int {
	open := 0
	for i := range len(s) {
		switch s[i] {
		case '{', '[':
			open++
		case '}', ']':
			open--
		}
		if open == 0 {
			return i + 1
		}
	}
	return len(s)
}

// isSpace reports whether b separates words on a command line.
func isSpace(b byte) bool { return b == ' ' || b == '\t' || b == '\n' || b == '"' || b == '\'' }
