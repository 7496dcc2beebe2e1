package activity

import (
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/human"
)

// formatTokens groups thousands; empty for none.
func formatTokens(n int64) string {
	if n <= 0 {
		return ""
	}
	return human.Counted(n, "token")
}

// formatUSD formats dollars; empty for none.
func formatUSD(usd float64) string {
	if usd <= 0 {
		return ""
	}
	return human.Money(usd)
}

// count is a number with its noun.
func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.Itoa(n) + " " + many
}

// escapes are ANSI sequences. Without their first character they would stay as noise.
var escapes = regexp.MustCompile(`(?:\x1b\[|\x{9b})[0-9;?]*[a-zA-Z]`)

// plainText is text on one line without control and invisible characters and runs of space.
func plainText(s string) string {
	visible := strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return -1
		}
		return r
	}, escapes.ReplaceAllString(strings.ToValidUTF8(s, "�"), ""))
	return strings.Join(strings.Fields(visible), " ")
}

// truncate cuts text to n runes.
func truncate(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// wrap breaks text at spaces into at most noteLines lines of width runes, at least 24.
func wrap(text string, width int) []string {
	width = max(width, 24)
	var lines []string
	rest := []rune(text)
	for len(rest) > width {
		if len(lines) == noteLines-1 {
			return append(lines, truncate(string(rest), width))
		}
		at := width
		for at > width/2 && rest[at] != ' ' {
			at--
		}
		if rest[at] != ' ' {
			at = width
		}
		lines = append(lines, strings.TrimSpace(string(rest[:at])))
		rest = []rune(strings.TrimSpace(string(rest[at:])))
	}
	return append(lines, string(rest))
}
