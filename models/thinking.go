package models

import (
	"strings"
)

// reasoningSplitter separates reasoning from text, for servers that send both as text: a leading block
// <think>…</think> is reasoning. Chunks may split tags. Its zero value is ready.
type reasoningSplitter struct {
	state thinkState
	held  string // a possible beginning of a tag, or blanks before it
}

const (
	thinkBegins = "<think>"
	thinkEnds   = "</think>"
)

type thinkState int

const (
	thinkOpen thinkState = iota // only blanks so far
	thinkInside
	thinkBehind // after the block, before the text
	thinkDone
)

// add splits a piece of text.
func (t *reasoningSplitter) add(piece string) (text, thought string) {
	if t.state == thinkDone {
		return piece, ""
	}
	t.held += piece
	if t.state == thinkOpen {
		trimmed := strings.TrimLeft(t.held, " \t\r\n")
		switch {
		case strings.HasPrefix(trimmed, thinkBegins):
			t.state, t.held = thinkInside, strings.TrimPrefix(trimmed, thinkBegins)
		case strings.HasPrefix(thinkBegins, trimmed):
			return "", "" // the rest may follow
		default:
			t.state = thinkDone
			return t.rest(), ""
		}
	}
	if t.state == thinkInside {
		before, after, ended := strings.Cut(t.held, thinkEnds)
		if !ended {
			keep := partialEnd(t.held)
			thought, t.held = t.held[:len(t.held)-keep], t.held[len(t.held)-keep:]
			return "", thought
		}
		t.state, t.held, thought = thinkBehind, after, before
	}
	t.held = strings.TrimLeft(t.held, " \t\r\n")
	if t.held == "" {
		return "", thought
	}
	t.state = thinkDone
	return t.rest(), thought
}

// end flushes the held text.
func (t *reasoningSplitter) end() (text, thought string) {
	if t.state == thinkInside {
		return "", t.rest()
	}
	return t.rest(), ""
}

func (t *reasoningSplitter) rest() string {
	held := t.held
	t.held = ""
	return held
}

// partialEnd returns how many final bytes of a text may begin the end tag.
func partialEnd(text string) int {
	for n := min(len(text), len(thinkEnds)-1); n > 0; n-- {
		if strings.HasSuffix(text, thinkEnds[:n]) {
			return n
		}
	}
	return 0
}
