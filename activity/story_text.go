package activity

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// ANSI colours of states.
const (
	green  = "\x1b[32m"
	red    = "\x1b[31m"
	yellow = "\x1b[33m"
	cyan   = "\x1b[36m"
	grey   = "\x1b[90m"
)

// mark is a state as a sign and a word, with its colour. It knows those of activities and executions.
func mark(status string) (word, tint string) {
	sign := "·"
	switch status {
	case "success", "completed":
		sign, tint = "✓", green
	case "error", "failed", "timeout":
		sign, tint = "✗", red
	case "unknown":
		sign, tint = "?", yellow
	case "pending_approval", "waiting":
		sign, tint = "‖", yellow
	case "running", "pending":
		sign, tint = "▸", cyan
	case "skipped", "cancelled":
		sign, tint = "–", grey
	}
	return sign + " " + plain(status), tint
}

// span is a duration to the precision that a person wants.
func span(d time.Duration) string {
	switch {
	case d < time.Second:
		return fmt.Sprintf("%d ms", max(0, d.Milliseconds()))
	case d < time.Minute-50*time.Millisecond:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Hour-500*time.Millisecond:
		d = d.Round(time.Second)
		return fmt.Sprintf("%d min %02d s", int(d.Minutes()), int(d.Seconds())%60)
	}
	d = d.Round(time.Minute)
	return fmt.Sprintf("%d h %02d min", int(d.Hours()), int(d.Minutes())%60)
}

// tokens is a number of tokens with its thousands apart; empty for none.
func tokens(n int64) string {
	if n <= 0 {
		return ""
	}
	digits := strconv.FormatInt(n, 10)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits + " tok"
}

// money is a sum in dollars, with more places where it is small; empty for none.
func money(usd float64) string {
	switch {
	case usd <= 0:
		return ""
	case usd < 0.001:
		return fmt.Sprintf("$%.6f", usd)
	case usd < 100:
		return fmt.Sprintf("$%.4f", usd)
	}
	return fmt.Sprintf("$%.2f", usd)
}

// count is a number with its noun.
func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.Itoa(n) + " " + many
}

// escapes are the sequences that colour and move; without their first character they would stay as noise.
var escapes = regexp.MustCompile(`(?:\x1b\[|\x{9b})[0-9;?]*[a-zA-Z]`)

// plain is text on one line without control characters, invisible ones and runs of space.
func plain(s string) string {
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

// cut shortens text to at most n runes.
func cut(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// wrap breaks text at spaces into at most noteLines lines of at most width runes, not under 24.
func wrap(text string, width int) []string {
	width = max(width, 24)
	var lines []string
	rest := []rune(text)
	for len(rest) > width {
		if len(lines) == noteLines-1 {
			return append(lines, cut(string(rest), width))
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
