package main

import (
	"strings"
	"testing"
	"testing/fstest"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

func TestRetiredWordsAreFound(t *testing.T) {
	t.Parallel()
	tree := fstest.MapFS{
		"list":        {Data: []byte("# a comment\ncrew worker pool\nputOff defer\n")},
		"a.go":        {Data: []byte("var workerCrew int\nfunc PutOff() {}\n// The crew rests.\nvar screw, putoff int\n")},
		"b/c.sql":     {Data: []byte("select crew_size")},
		"testdata/a":  {Data: []byte("crew")},
		"picture.png": {Data: []byte("\xff crew")},
	}
	var out strings.Builder
	found, err := check(tree, "list", &out)
	want := `a.go:1: Crew is retired: use worker pool
a.go:2: PutOff is retired: use defer
a.go:3: crew is retired: use worker pool
b/c.sql:1: crew is retired: use worker pool
`
	assert.Truef(t, err == nil && found == 4 && out.String() == want, "found %d, %v:\n%s", found, err, out.String())
}

func TestLineWidth(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 120)
	for text, want := range map[string]int{
		"package p // " + long:                              1,
		"package p\nvar a = `" + long + "\n" + long + "`\n": 0,
		"package p\nvar a = \"" + long + "\"\n":             0,
		"package p\nvar " + long + " = 1 //nolint:x // y\n": 0,
		"package p\nvar " + long + " = \"short\"\n":         1,
		"package p\nvar " + strings.Repeat("é", 114) + "\n": 0,
	} {
		var out strings.Builder
		assert.Equal(t, want, reportGo(fstest.MapFS{}, "p.go", text, &out), text, out.String())
	}
}

func TestMissingFilesInComments(t *testing.T) {
	t.Parallel()
	tree := fstest.MapFS{"a/b.go": {}, "c.go": {}}
	text := "// Files b.go, c.go and a/b.go.\nvar x = `// e.go` // See d.go and\n// (a/c.go), http://x.example/y.go, *.go.\n"
	var out strings.Builder
	found := reportGo(tree, "a/a.go", text, &out)
	want := "a/a.go:2: no file d.go\na/a.go:3: no file a/c.go\n"
	assert.Truef(t, found == 2 && out.String() == want, "found %d:\n%s", found, out.String())
}

func TestProseWidth(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("word ", 30)
	for text, want := range map[string]int{
		long + "\n":                       1,
		"- " + long + "\n":                1,
		"```\n" + long + "\n```\n" + long: 1,
		"| " + long + "|\n":               0,
		"# " + long + "\n":                0,
		strings.Repeat("é ", 60) + "\n":   0,
	} {
		var out strings.Builder
		assert.Equal(t, want, reportProse("p.md", text, &out), text, out.String())
	}
}
