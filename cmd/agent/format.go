package main

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"

	"github.com/lanekeeper/lanekeeper/internal/human"
)

func formatTime(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") }

func formatMillis(ms *int64) string {
	if ms == nil {
		return "…"
	}
	return human.Millis(*ms)
}

func timeOrDash(t *time.Time) string {
	if t == nil {
		return "–"
	}
	return formatTime(*t)
}

func textOrDash(text *string) string {
	if text == nil {
		return "-"
	}
	return printable(*text)
}

func optionalTime(t *time.Time) string {
	if t == nil {
		return ""
	}
	return formatTime(*t)
}

// truncate cuts a text to at most n characters.
func truncate(text string, n int) string {
	if r := []rune(text); len(r) > n {
		return string(r[:n]) + "…"
	}
	return text
}

func plural(noun string, n int) string { return human.Plural(int64(n), noun) }

// printable replaces unprintable characters and line breaks by spaces.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
}

// printableText removes unprintable characters, but keeps tabs and line breaks.
func printableText(text string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return -1
	}, text)
}

// escapeJSON escapes unprintable characters, because the admin must see the exact arguments.
func escapeJSON(text string) string {
	var b strings.Builder
	for _, r := range text {
		if r == '\n' || unicode.IsPrint(r) {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.Encode([]rune{r}) {
			fmt.Fprintf(&b, `\u%04x`, unit)
		}
	}
	return b.String()
}
