package main

import (
	"fmt"
	"go/scanner"
	"go/token"
	"io"
	"strings"
	"unicode/utf8"
)

const maxWidth = 120

// longLiteral is the length from which a string literal excuses the width of its line. SQL, JSON and messages stay
// whole.
const longLiteral = 60

// reportWidth prints the lines of a Go file over 120 columns and returns their number. Lines of a raw string and lines
// with a long literal are left out.
func reportWidth(path, text string, out io.Writer) (found int) {
	files := token.NewFileSet()
	file := files.AddFile(path, -1, len(text))
	var tokens scanner.Scanner
	tokens.Init(file, []byte(text), nil, scanner.ScanComments)
	excused := map[int]bool{}
	for {
		pos, kind, literal := tokens.Scan()
		if kind == token.EOF {
			break
		}
		directive := kind == token.COMMENT && strings.HasPrefix(literal, "//nolint:")
		if directive || kind == token.STRING && (literal[0] == '`' || len(literal) > longLiteral) {
			for line := file.Line(pos); line <= file.Line(pos+token.Pos(len(literal)-1)); line++ {
				excused[line] = true
			}
		}
	}
	n := 0
	for line := range strings.Lines(text) {
		n++
		if width := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); width > maxWidth && !excused[n] {
			fmt.Fprintf(out, "%s:%d: %d columns are more than %d\n", path, n, width, maxWidth)
			found++
		}
	}
	return found
}
