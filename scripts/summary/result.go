package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// mayBeSkipped lists what may be skipped, with the reason a skip must name.
var mayBeSkipped = []string{
	"needs root", "needs /proc", // of this user, of this system
	"npm is not installed", "node is not installed", "npm cannot install", // programs in other languages that talk with the agent
	"make prove ONLY=",                                                                        // takes long, and is in the long form
	"needs a server on a unix socket", "needs the server's URL", "this server does not offer", // of AGENT_TEST_DATABASE_URL
}

type event struct {
	Action, Package, Test, Output string
	ImportPath, FailedBuild       string
	Elapsed                       float64
}

// result is what one stream says.
type result struct {
	tallies  map[string]*tally // by package
	output   map[string]*strings.Builder
	open     map[test]bool   // begun and not ended
	panics   map[string]bool // packages in whose output something panicked; the test it is shown with may have passed
	passed   map[test]bool
	failed   []test   // in the order in which they ended
	packages []string // that failed, in order
	bad      bool     // a package did not build, or a test was skipped that may not be
	serious  string   // why nothing is run again
	exited   bool     // a go test said that something failed
}

type tally struct{ passed, failed, skipped int }

// test is one test or subtest of a package; a package when it has no name.
type test struct{ pkg, name string }

func (t test) String() string { return strings.TrimSpace(t.pkg + " " + t.name) }

func newResult() *result {
	return &result{
		tallies: map[string]*tally{}, output: map[string]*strings.Builder{},
		open: map[test]bool{}, passed: map[test]bool{}, panics: map[string]bool{},
	}
}

// fails reports that something failed and has not passed on a second try.
func (r *result) fails() bool { return len(r.failed) > 0 || len(r.packages) > 0 }

// sum adds up the packages.
func (r *result) sum() (all tally) {
	for _, t := range r.tallies {
		all.passed, all.failed, all.skipped = all.passed+t.passed, all.failed+t.failed, all.skipped+t.skipped
	}
	return all
}

func (r *result) read(s stream, out io.Writer) error {
	lines := bufio.NewScanner(s.in)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			fmt.Fprintln(out, lines.Text())
			continue
		}
		switch e.Action {
		case "under":
			s.under = e.Output
			continue
		case "exit":
			r.exited = true
			continue
		}
		if s.under != "" && e.Package != "" {
			e.Package += " " + s.under
		}
		r.take(e, out)
	}
	return lines.Err()
}

// take counts one event; only tests count, packages are shown when they fail.
func (r *result) take(e event, out io.Writer) {
	key := e.Package + e.ImportPath + " " + e.Test
	counts := r.tallies[e.Package]
	if counts == nil {
		counts = &tally{}
		r.tallies[e.Package] = counts
	}
	t := test{e.Package, e.Test}
	switch e.Action {
	case "run":
		r.open[t] = true
	case "output", "build-output":
		r.keep(key, e.Output)
		if e.Test != "" && strings.HasPrefix(e.Output, outOfTime) {
			r.keep(e.Package+" ", e.Output) // the test that it is shown with may have passed
		}
		if strings.HasPrefix(e.Output, "WARNING: DATA RACE") {
			r.serious = "a data race was reported"
		}
		r.panics[e.Package] = r.panics[e.Package] || panicked(e.Output)
	case "pass":
		if e.Test != "" {
			counts.passed++
			r.passed[t] = true
		} else {
			fmt.Fprintf(out, "ok   %s %.0fs\n", e.Package, e.Elapsed)
		}
		delete(r.output, key)
		delete(r.open, t)
	case "skip":
		if e.Test != "" {
			counts.skipped++
			r.skip(e, out)
		}
		delete(r.open, t)
	case "fail", "build-fail":
		r.fail(e, key, out)
		delete(r.open, t)
	}
}

// keep keeps an output until it is known how its test ends.
func (r *result) keep(key, line string) {
	if r.output[key] == nil {
		r.output[key] = &strings.Builder{}
	}
	r.output[key].WriteString(line)
}

// fail counts a failure and shows its output.
func (r *result) fail(e event, key string, out io.Writer) {
	said := ""
	if r.output[key] != nil {
		said = r.output[key].String()
	}
	switch {
	case e.Action == "build-fail" || e.FailedBuild != "":
		r.bad, r.serious = true, "a package did not build"
	case e.Test != "":
		r.tallies[e.Package].failed++
		r.failed = append(r.failed, test{e.Package, e.Test})
	default:
		r.packages = append(r.packages, e.Package)
	}
	if r.panics[e.Package] {
		r.serious = "something panicked"
	}
	fmt.Fprintln(out, "FAIL", key)
	if said != "" {
		fmt.Fprintln(out, said)
	}
}

// outOfTime begins the line with which a package ends that took longer than it may. It looks like a panic and is none.
const outOfTime = "panic: test timed out"

// panicked reports a line of a panic.
func panicked(line string) bool {
	return strings.HasPrefix(line, "fatal error: ") || strings.HasPrefix(line, "panic: ") && !strings.HasPrefix(line, outOfTime)
}

// skip holds the reason of a skipped test against the list.
func (r *result) skip(e event, out io.Writer) {
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
