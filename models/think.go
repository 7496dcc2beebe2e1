package models

import "strings"

const (
	thinkBegins = "<think>"
	thinkEnds   = "</think>"
)

// thinker tells what a model thinks from what it says, where its server sends both as text: a block
// <think>…</think> at the beginning is thought. Tags may be split over chunks. Its zero value is ready.
type thinker struct {
	state thinkState
	held  string // what may be the beginning of a tag, or blanks before one
}

type thinkState int

const (
	thinkOpen thinkState = iota // nothing but blanks so far
	thinkInside
	thinkBehind // the block has ended, and the text has not begun
	thinkDone
)

// add splits a piece of text.
func (t *thinker) add(piece string) (said, thought string) {
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
			return "", "" // more may come
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

// end gives up what was held back.
func (t *thinker) end() (said, thought string) {
	if t.state == thinkInside {
		return "", t.rest()
	}
	return t.rest(), ""
}

func (t *thinker) rest() string {
	held := t.held
	t.held = ""
	return held
}

// partialEnd is how much of the end of a text may begin the end tag.
func partialEnd(text string) int {
	for n := min(len(text), len(thinkEnds)-1); n > 0; n-- {
		if strings.HasSuffix(text, thinkEnds[:n]) {
			return n
		}
	}
	return 0
}
