package channels

import (
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Split divides a Markdown text into parts within the limits: at the borders of paragraphs, else of lines, else of
// words. It closes a divided code block and opens it again. It returns at least one part.
func Split(text string, l Limits) []string {
	length := l.Length
	if length == nil {
		length = utf8.RuneCountInString
	}
	text = strings.TrimSpace(text)
	var parts []string
	for l.Text > 0 && length(text) > l.Text {
		at := border(text, fitting(text, l.Text-fenceReserve, length))
		part, rest := strings.TrimRight(text[:at], " \n"), strings.TrimLeft(text[at:], "\n")
		if opening := openFence(part); opening != "" {
			ticks := opening[:len(opening)-len(strings.TrimLeft(opening, opening[:1]))]
			part, rest = part+"\n"+ticks, opening+"\n"+rest
		} else {
			rest = strings.TrimLeft(rest, " ")
		}
		parts, text = append(parts, part), rest
	}
	return append(parts, text)
}

const (
	fenceReserve = 40 // additional size of a part that ends within a code block
	maxFence     = 30 // bytes of a line that opens a code block in each part; a longer run of backticks is text
)

// fitting returns the number of bytes of text that have at most limit units. It is at least one character.
func fitting(text string, limit int, length func(string) int) int {
	used, end := 0, 0
	for i, r := range text {
		size := utf8.RuneLen(r)
		if used += length(string(r)); used > limit && i > 0 {
			break
		}
		end = i + max(size, 1)
	}
	return min(end, len(text))
}

// border returns the index, up to end, to divide text at. It uses no mark in the first third, because parts would
// become too short.
func border(text string, end int) int {
	for _, mark := range []string{"\n\n", "\n", " "} {
		if at := strings.LastIndex(text[:end], mark); at > end/3 {
			return at + len(mark)
		}
	}
	return end
}

// openFence returns the line that opens an unclosed code block of text, at most maxFence bytes; "" for none.
func openFence(text string) string {
	open := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		ticks := len(line) - len(strings.TrimLeft(line, "`"))
		switch {
		case open == "" && ticks >= 3 && ticks <= maxFence && !strings.Contains(line[ticks:], "`"):
			open = line
		case open != "" && line == strings.Repeat("`", ticks) && ticks >= 3 && strings.HasPrefix(line, fenceOf(open)):
			open = ""
		}
	}
	if len(open) > maxFence {
		return fenceOf(open)
	}
	return open
}

func fenceOf(line string) string { return line[:len(line)-len(strings.TrimLeft(line, "`"))] }

// Code writes foreign text as inline code, so nothing in it is markup.
func Code(text string) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case r == '`':
			return '\''
		case r < ' ' || r == 0x7f:
			return ' '
		}
		return r
	}, text)
	return "`" + text + "`"
}

// Fence writes foreign text as a code block, so nothing in it is markup.
func Fence(text, language string) string {
	ticks := "```"
	for strings.Contains(text, ticks) {
		ticks += "`"
	}
	return ticks + language + "\n" + text + "\n" + ticks
}

// UTF16 counts the units of UTF-16 of a text.
func UTF16(text string) int {
	n := 0
	for _, r := range text {
		n += utf16.RuneLen(r)
	}
	return n
}
