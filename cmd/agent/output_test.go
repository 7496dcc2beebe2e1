package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/creack/pty"
)

// TestATableFitsTheTerminal wants prose to be cut on a narrow terminal, ids never, and nothing where no terminal is.
func TestATableFitsTheTerminal(t *testing.T) {
	t.Parallel()
	id, about := strings.Repeat("i", 36), strings.Repeat("text ", 20)+"end"
	heading, rows := []string{"THREAD", "ABOUT", "STATE"}, [][]string{{id, about, "open"}, {"short", "é", "open"}}
	for name, test := range map[string]struct {
		columns uint16
		want    string
	}{
		"wide terminal":   {200, id + "  " + about + "  open"},
		"narrow terminal": {80, id + "  " + about[:34] + "…  open"},
		"tiny terminal":   {20, id + "  " + about[:15] + "…  open"},
		"no terminal":     {0, id + "  " + about + "  open"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tableOn(t, test.columns, heading, rows); !strings.Contains(got, test.want+"\n") {
				t.Errorf("the table is\n%s, want %q in it", got, test.want)
			}
		})
	}
}

// tableOn prints a table on a terminal of some columns, or into a buffer with none.
func tableOn(t *testing.T, columns uint16, heading []string, rows [][]string) string {
	t.Helper()
	var text bytes.Buffer
	if columns == 0 {
		if err := table(&printer{to: &text}, "", heading, rows); err != nil {
			t.Fatal(err)
		}
		return text.String()
	}
	screen, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer screen.Close()
	if err := pty.Setsize(tty, &pty.Winsize{Rows: 40, Cols: columns}); err != nil {
		t.Fatal(err)
	}
	if err := table(&printer{to: tty}, "", heading, rows); err != nil {
		t.Fatal(err)
	}
	if err := tty.Close(); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(&text, screen) // a terminal ends with EIO
	return strings.ReplaceAll(text.String(), "\r\n", "\n")
}
