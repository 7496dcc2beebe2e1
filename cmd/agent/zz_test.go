package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
)

func TestZZ(t *testing.T) {
	drop := func(list []string) []string {
		return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return strings.HasPrefix(s, "AGENT_LOG_LEVEL=") })
	}
	for _, where := range []string{"local", "remote"} {
		d := newOperateTest(t, modeltest.ToolCall("look", `{}`), modeltest.Text("It is 42."), modeltest.ToolCall("wipe", `{}`), modeltest.Text("Over."), modeltest.ToolCall("wipe", `{}`), modeltest.Text("Over again."))
		there := *d
		there.environ = drop(d.environ)
		if where == "remote" {
			far, server := d.remote()
			there.environ = append(drop(far.environ), "TERM=xterm")
			_ = server
		}
		s := there.startTerminal()
		s.waitFor(`(>) `)
		for _, line := range []string{"How many?\n", "Wipe.\n", "y\n", "Wipe.\n", "\n", "/approvals\n", "/lanes\n", "/trace\n", "/objectives\n", "/memory\n", "/help\n", "/nope\n", "/approve\n", "/approve APPROVAL\n"} {
			if line == "/approve APPROVAL\n" {
				var ids string
				_ = d.pool.QueryRow(t.Context(), `select id::text from agent_approvals order by id desc limit 1`).Scan(&ids)
				line = "/approve " + ids + "\n"
			}
			s.typeKeys(line)
			if strings.HasPrefix(line, "Wipe") {
				s.waitFor(`(approve\?)`)
				continue
			}
			s.waitFor(`\n(>) `)
		}
		s.typeKeys("\x04")
		s.waitExit()
		fmt.Println("=====", where)
		fmt.Println(escapes.ReplaceAllString(s.shown.String(), ""))
		// a pipe
		got := there.runWith(t.Context(), strings.NewReader("Again?\n/lanes\n"), "operate")
		fmt.Printf("----- pipe %d\nout:\n%s\nerr:\n%s\n", got.code, got.out, got.err)
	}
}
