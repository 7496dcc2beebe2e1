// Command style reports retired words, lines of Go and prose over 120 columns, and missing Go files that comments name.
// It reads the files below the working directory. Its argument is the list of words: each line has a retired word and
// its replacement. A word is also a part of a name, as in workerCrew or crew_size.
package main

import (
	"bufio"
	"fmt"
	"go/scanner"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// skipped lists directories with third-party files, or with files that nobody edits again.
var skipped = []string{".git", ".bin", "bin", ".agent", "testdata", "changes", "node_modules", "axe", "gitleaks"}

// generated lists pages that tests write.
var generated = []string{"docs/schema.md", "docs/settings.md"}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "style: name the list of words: go run ./scripts/style scripts/retired-words.txt")
		os.Exit(2)
	}
	found, err := check(os.DirFS("."), os.Args[1], os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "style:", err)
	}
	if err != nil || found > 0 {
		os.Exit(1)
	}
}

// check prints each violation and returns their number.
func check(tree fs.FS, list string, out io.Writer) (found int, err error) {
	text, err := fs.ReadFile(tree, list)
	if err != nil {
		return 0, err
	}
	replacements := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if word, replacement, ok := strings.Cut(strings.TrimSpace(line), " "); ok && word != "#" {
			replacements[word] = replacement
		}
	}
	err = fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && slices.Contains(skipped, filepath.Base(path)):
			return fs.SkipDir
		case entry.IsDir(), path == list:
			return nil
		}
		text, err := fs.ReadFile(tree, path)
		if err != nil || !utf8.Valid(text) {
			return err
		}
		found += reportWords(path, string(text), replacements, out)
		switch {
		case strings.HasSuffix(path, ".go"):
			found += reportGo(tree, path, string(text), out)
		case strings.HasSuffix(path, ".md") && !slices.Contains(generated, path):
			found += reportProse(path, string(text), out)
		}
		return nil
	})
	return found, err
}

// name matches a letter run, and its parts are the words of a camelCase name.
var (
	name = regexp.MustCompile(`[A-Za-z]+`)
	part = regexp.MustCompile(`[A-Z]+[a-z]*|[a-z]+`)
)

// reportWords prints the lines of a file with a retired word and returns their number.
func reportWords(path, text string, replacements map[string]string, out io.Writer) (found int) {
	lines := bufio.NewScanner(strings.NewReader(text))
	lines.Buffer(nil, len(text)+1)
	for n := 1; lines.Scan(); n++ {
		for _, whole := range name.FindAllString(lines.Text(), -1) {
			for _, word := range append(part.FindAllString(whole, -1), whole) {
				if replacement, ok := replacements[lower(word)]; ok {
					fmt.Fprintf(out, "%s:%d: %s is retired: use %s\n", path, n, word, replacement)
					found++
					break
				}
			}
		}
	}
	return found
}

// lower makes the first letter small, so an exported name equals the word in the list.
func lower(word string) string { return strings.ToLower(word[:1]) + word[1:] }

const maxWidth = 120

// longLiteral is the length from which a string literal permits a wide line. SQL, JSON and messages stay whole.
const longLiteral = 60

// goFile matches the name of a Go file in a comment.
var goFile = regexp.MustCompile(`[\s(]([\w/.-]+\.go)\b`)

// reportGo prints the lines of a Go file over 120 columns, and the missing Go files that its comments name, relative to
// its directory or to the root. It returns the number of both. It leaves out lines of a raw string and lines with a
// long literal.
func reportGo(tree fs.FS, path, text string, out io.Writer) (found int) {
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
		if kind == token.COMMENT {
			for _, name := range goFile.FindAllStringSubmatch(literal, -1) {
				_, beside := fs.Stat(tree, filepath.Join(filepath.Dir(path), name[1]))
				if _, err := fs.Stat(tree, name[1]); beside != nil && err != nil {
					fmt.Fprintf(out, "%s:%d: no file %s\n", path, file.Line(pos), name[1])
					found++
				}
			}
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

// reportProse prints the lines of a Markdown page over 120 columns and returns their number. It leaves out code,
// tables, headings, pictures and HTML.
func reportProse(path, text string, out io.Writer) (found int) {
	n, code := 0, false
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimRight(line, "\n")
		begin := strings.TrimLeft(line, " ")
		if strings.HasPrefix(begin, "```") {
			code = !code
		}
		width := utf8.RuneCountInString(line)
		if !code && width > maxWidth && strings.IndexAny(begin, "|#<!") != 0 {
			fmt.Fprintf(out, "%s:%d: %d columns are more than %d\n", path, n, width, maxWidth)
			found++
		}
	}
	return found
}
