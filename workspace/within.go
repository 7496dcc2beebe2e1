package workspace

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// within is where a byte of a text value stands in its file. YAML folds and indents texts, so it counts what is no
// space: that is in the file in the same order as in the value.
func (s source) within(path string, offset int) Position {
	node := s.find(path)
	start := position(s.file, node)
	value := node.Value[:min(offset, len(node.Value))]
	lines := strings.SplitAfter(string(s.raw), "\n")
	if node.Line < 1 || node.Line > len(lines) {
		return start
	}
	text, at := lines[node.Line-1:], start
	if node.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0 && len(text) > 1 {
		text = text[1:]
		at = Position{File: s.file, Line: node.Line + 1, Column: 1}
	} else {
		text[0] = afterRunes(text[0], node.Column-1)
	}
	walk := walker{rest: strings.Join(text, ""), at: at, style: node.Style}
	walk.quote()
	for _, r := range value {
		if !unicode.IsSpace(r) && !walk.next() {
			return start
		}
	}
	walk.spaces()
	return walk.at
}

// afterRunes is a line without its first n characters.
func afterRunes(line string, n int) string {
	for ; n > 0 && line != ""; n-- {
		_, wide := utf8.DecodeRuneInString(line)
		line = line[wide:]
	}
	return line
}

// walker goes through the source of a text value.
type walker struct {
	rest  string
	at    Position
	style yaml.Style
}

// step passes one character.
func (w *walker) step() rune {
	r, wide := utf8.DecodeRuneInString(w.rest)
	w.rest = w.rest[wide:]
	if r == '\n' {
		w.at.Line, w.at.Column = w.at.Line+1, 1
	} else if wide > 0 {
		w.at.Column++
	}
	return r
}

// quote passes the quote that opens a quoted text.
func (w *walker) quote() {
	if w.style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) != 0 {
		w.step()
	}
}

// spaces passes what the value may have less or more of than the source.
func (w *walker) spaces() {
	for w.rest != "" {
		r, _ := utf8.DecodeRuneInString(w.rest)
		escaped := w.style&yaml.DoubleQuotedStyle != 0 && r == '\\' && len(w.rest) > 1
		switch {
		case unicode.IsSpace(r):
			w.step()
		case escaped && strings.ContainsRune("ntr \n", rune(w.rest[1])):
			w.step()
			w.step()
		default:
			return
		}
	}
}

// next passes the source of one character that is no space; false at the end of the file.
func (w *walker) next() bool {
	w.spaces()
	if w.rest == "" {
		return false
	}
	r := w.step()
	doubled := r == '\'' && w.style&yaml.SingleQuotedStyle != 0
	escaped := r == '\\' && w.style&yaml.DoubleQuotedStyle != 0
	if doubled || escaped {
		w.step()
	}
	return true
}
