//go:build unix

package guides_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// block is a fenced block of a page.
type block struct {
	line  int // of its first line
	info  []string
	lines []string
}

// is reports whether the fence says a word.
func (b block) is(word string) bool { return slices.Contains(b.info, word) }

// file is the name of the file that the block is; empty for none.
func (b block) file() string {
	for _, word := range b.info {
		if name, is := strings.CutPrefix(word, "file="); is {
			return name
		}
	}
	return ""
}

// command is one of a block, with the output that the page shows.
type command struct {
	line   int
	text   string
	output []string
}

// shownDatabases are the databases that pages name.
var shownDatabases = regexp.MustCompile(`postgres://agent:agent@localhost/\w+`)

// page is a guide.
type page struct {
	path      string
	database  bool // DATABASE_URL is set from its beginning
	model     bool // a scripted model answers
	databases []string
	blocks    []block
}

func readPage(t testing.TB, path string) page {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	p := page{path: path, database: strings.Contains(string(text), "<!-- database -->")}
	p.model = strings.Contains(string(text), "<!-- model -->")
	p.databases = shownDatabases.FindAllString(string(text), -1)
	if p.database {
		p.databases = append(p.databases, shownDatabase)
	}
	slices.Sort(p.databases)
	p.databases = slices.Compact(p.databases)
	var open *block
	for i, line := range strings.Split(string(text), "\n") {
		fence, is := strings.CutPrefix(line, "```")
		switch {
		case is && open == nil:
			open = &block{line: i + 2, info: strings.Fields(fence)}
		case is:
			p.blocks = append(p.blocks, *open)
			open = nil
		case open != nil:
			open.lines = append(open.lines, line)
		}
	}
	require.Truef(t, open == nil, "%s: its last block does not end", path)
	return p
}

// commands are those of a console.
func (b block) commands() (list []command) {
	for i, line := range b.lines {
		switch text, is := strings.CutPrefix(line, "$ "); {
		case is:
			list = append(list, command{line: b.line + i, text: text})
		case len(list) == 0:
		case strings.HasPrefix(line, "> ") && len(list[len(list)-1].output) == 0:
			list[len(list)-1].text += "\n" + line[2:]
		default:
			list[len(list)-1].output = append(list[len(list)-1].output, line)
		}
	}
	return list
}

// difference says where an output is not what the page shows; empty where it is.
func difference(want []string, got string) string {
	for len(want) > 0 && strings.TrimSpace(want[len(want)-1]) == "" {
		want = want[:len(want)-1]
	}
	lines := strings.Split(strings.TrimRight(got, "\n"), "\n")
	if len(want) == 0 || matches(want, lines) {
		return ""
	}
	return fmt.Sprintf("the page shows\n%s\nit says\n%s", strings.Join(want, "\n"), got)
}

// matches reports whether lines are as shown, where … alone is any number of lines.
func matches(want, got []string) bool {
	if len(want) == 0 {
		return len(got) == 0
	}
	if strings.TrimSpace(want[0]) == "…" {
		for i := range len(got) + 1 {
			if matches(want[1:], got[i:]) {
				return true
			}
		}
		return false
	}
	return len(got) > 0 && like(want[0], got[0]) && matches(want[1:], got[1:])
}

// spaces are where columns of a table are wider or narrower than those that the page shows.
var spaces = regexp.MustCompile(`  +`)

// like reports whether a line is as shown, where … is any text.
func like(want, got string) bool {
	squeeze := func(s string) string { return spaces.ReplaceAllString(strings.TrimSpace(s), "  ") }
	var parts []string
	for part := range strings.SplitSeq(squeeze(want), "…") {
		parts = append(parts, regexp.QuoteMeta(part))
	}
	return regexp.MustCompile("^" + strings.Join(parts, ".*") + "$").MatchString(squeeze(got))
}

func TestWhatIsShownIsCompared(t *testing.T) {
	for _, c := range []struct {
		want, got string
		same      bool
	}{
		{"a", "a\n", true},
		{"a", "b", false},
		{"a…c", "abc", true},
		{"a…c", "ab", false},
		{"…\nb", "a\na\nb", true},
		{"…\nb", "a\na", false},
		{"a\n…", "a", true},
		{"a\n…\nd", "a\nb\nc\nd", true},
		{"a", "a\nb", false},
		{"A  B", "A      B", true},
		{"a (b)", "a (b)", true},
		{"", "anything", true},
	} {
		got := difference(strings.Split(c.want, "\n"), c.got) == ""
		assert.Truef(t, got == c.same, "%q and %q are the same: %t", c.want, c.got, got)
	}
}
