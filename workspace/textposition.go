package workspace

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// offsetPosition returns the position of the byte at offset in a text value. YAML folds and indents texts, so it counts
// the characters that are not spaces: their order is the same in the file and in the value. If the file does not match
// the value, it returns the start of the text.
func (s source) offsetPosition(path string, offset int) Position {
	node := s.find(path)
	start := position(s.file, node)
	value := node.Value[:min(offset, len(node.Value))]
	lines := strings.SplitAfter(string(s.raw), "\n")
	if node.Line < 1 || node.Line > len(lines) {
		return start
	}
	text, begin := lines[node.Line-1:], start
	if node.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0 && len(text) > 1 { // the text begins below the | or >
		text = text[1:]
		begin = Position{File: s.file, Line: node.Line + 1, Column: 1}
	} else {
		text[0] = dropRunes(text[0], node.Column-1)
	}
	scan := scanner{rest: strings.Join(text, ""), at: begin, style: node.Style}
	scan.skipQuote()
	for _, r := range value {
		if !unicode.IsSpace(r) && !scan.readRune(r) {
			return start
		}
	}
	scan.skipSpaces()
	return scan.at
}

// dropRunes drops the first n characters of a line.
func dropRunes(line string, n int) string {
	for ; n > 0 && line != ""; n-- {
		_, wide := utf8.DecodeRuneInString(line)
		line = line[wide:]
	}
	return line
}

// scanner reads the source of a text value.
type scanner struct {
	rest  string
	at    Position
	style yaml.Style
}

// read reads one character and advances the position.
func (w *scanner) read() rune {
	r, wide := utf8.DecodeRuneInString(w.rest)
	w.rest = w.rest[wide:]
	if r == '\n' {
		w.at.Line, w.at.Column = w.at.Line+1, 1
	} else if wide > 0 {
		w.at.Column++
	}
	return r
}

// skipQuote skips an opening quote.
func (w *scanner) skipQuote() {
	if w.style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) != 0 {
		w.read()
	}
}

// skipSpaces skips spaces, which may differ between source and value.
func (w *scanner) skipSpaces() {
	for w.rest != "" {
		r, _ := utf8.DecodeRuneInString(w.rest)
		escaped := w.style&yaml.DoubleQuotedStyle != 0 && r == '\\' && len(w.rest) > 1
		switch {
		case unicode.IsSpace(r):
			w.read()
		case escaped && strings.ContainsRune("ntr \n", rune(w.rest[1])):
			w.read()
			w.read()
		default:
			return
		}
	}
}

// readRune skips the source of one non-space character. It returns false if the source has another one, or an escape by
// number.
func (w *scanner) readRune(want rune) bool {
	w.skipSpaces()
	r := w.read()
	switch {
	case r == '\'' && w.style&yaml.SingleQuotedStyle != 0:
		w.read()
	case r == '\\' && w.style&yaml.DoubleQuotedStyle != 0:
		r = w.read()
	}
	return r == want
}
