// Command summary reads what `go test -json` prints and shows a person what matters: failures with their
// output, what was skipped and why, and one closing line. It exits with 1 when a test failed, when a
// package did not build, when no test ran, or when a test was skipped that may not be.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// mayBeSkipped lists what may be skipped, with the reason a skip must name.
var mayBeSkipped = []string{
	"needs root", "needs /proc", // of this user, of this system
	"npm is not installed", "node is not installed", "npm cannot install", // programs in other languages that talk with the agent
	"needs a server on a unix socket", "needs the server's URL", "this server does not offer", // of AGENT_TEST_DATABASE_URL
}

type event struct {
	Action, Package, Test, Output string
	ImportPath                    string
}

type result struct {
	passed, failed, skipped int
	bad                     bool
	output                  map[string]*strings.Builder
}

func main() {
	exit := flag.Int("exit", 0, "exit code of go test")
	flag.Parse()
	r := result{output: map[string]*strings.Builder{}}
	if err := r.read(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "summary:", err)
		os.Exit(1)
	}
	fmt.Fprintf(os.Stdout, "%d passed, %d failed, %d skipped\n", r.passed, r.failed, r.skipped)
	if *exit != 0 || r.failed > 0 || r.passed == 0 || r.bad {
		os.Exit(1)
	}
}

func (r *result) read(in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			fmt.Fprintln(out, lines.Text())
			continue
		}
		r.take(e, out)
	}
	return lines.Err()
}

// take counts one event; only tests count, packages are shown when they fail.
func (r *result) take(e event, out io.Writer) {
	key := e.Package + e.ImportPath + " " + e.Test
	switch e.Action {
	case "output", "build-output":
		if r.output[key] == nil {
			r.output[key] = &strings.Builder{}
		}
		r.output[key].WriteString(e.Output)
	case "pass":
		if e.Test != "" {
			r.passed++
		} else {
			fmt.Fprintln(out, "ok  ", e.Package)
		}
		delete(r.output, key)
	case "skip":
		if e.Test != "" {
			r.skip(e, out)
		}
	case "fail", "build-fail":
		if e.Test != "" {
			r.failed++
		}
		r.bad = true
		fmt.Fprintln(out, "FAIL", key)
		if r.output[key] != nil {
			fmt.Fprintln(out, r.output[key].String())
		}
	}
}

// skip counts a skipped test, and holds its reason against the list.
func (r *result) skip(e event, out io.Writer) {
	r.skipped++
	why := ""
	if text := r.output[e.Package+" "+e.Test]; text != nil {
		why = text.String()
	}
	allowed := slices.ContainsFunc(mayBeSkipped, func(reason string) bool { return strings.Contains(why, reason) })
	fmt.Fprintln(out, "SKIP", e.Package, e.Test, strings.TrimSpace(why))
	if !allowed {
		r.bad = true
		fmt.Fprintln(out, "     this test may not be skipped: install what it needs")
	}
}
