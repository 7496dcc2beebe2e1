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

// reportWidth prints the lines of a Go file over 120 columns and returns their number. A string literal may end behind
// the last column: SQL, JSON and messages stay whole.
func reportWidth(path, text string, out io.Writer) (found int) {
	files := token.NewFileSet()
	file := files.AddFile(path, -1, len(text))
	var tokens scanner.Scanner
	tokens.Init(file, []byte(text), nil, 0)
	literals := map[int]bool{}
	for {
		pos, kind, literal := tokens.Scan()
		if kind == token.EOF {
			break
		}
		if kind != token.STRING {
			continue
		}
		end := pos + token.Pos(len(literal))
		for line := file.Line(pos); line < file.Line(end); line++ {
			literals[line] = true
		}
		if file.Position(end).Column > maxWidth {
			literals[file.Line(end)] = true
		}
	}
	n := 0
	for line := range strings.Lines(text) {
		n++
		if width := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); width > maxWidth && !literals[n] {
			fmt.Fprintf(out, "%s:%d: %d columns are more than %d\n", path, n, width, maxWidth)
			found++
		}
	}
	return found
}
