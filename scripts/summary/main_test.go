package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
)

// printed makes what go test -json prints from short lines: "run p A", "fail p A", "out p A text"; a package's own have
// "-" for the test.
func printed(t *testing.T, lines ...string) string {
	t.Helper()
	var b strings.Builder
	for _, line := range lines {
		f := strings.SplitN(line, " ", 4)
		e := map[string]string{"out": "output"}[f[0]]
		if e == "" {
			e = f[0]
		}
		fmt.Fprintf(&b, `{"Action":%q,"Package":%q`, e, f[1])
		if f[2] != "-" {
			fmt.Fprintf(&b, `,"Test":%q`, f[2])
		}
		if len(f) > 3 {
			fmt.Fprintf(&b, `,"Output":%q`, f[3]+"\n")
		}
		b.WriteString("}\n")
	}
	return b.String()
}

// play is a go test that answers each second run from a script, and fails when the script says so.
type play struct {
	t      *testing.T
	script map[string][]string // by its arguments; a script that begins with "exit" ends with an error
	asked  []string
}

func (p *play) run(read func(io.Reader) error, more ...string) error {
	p.t.Helper()
	asked := strings.Join(more, " ")
	p.asked = append(p.asked, asked)
	lines, known := p.script[asked]
	if !known {
		p.t.Errorf("run again with %q", asked)
		return errors.New("exit status 1")
	}
	var end error
	if len(lines) > 0 && lines[0] == "exit" {
		lines, end = lines[1:], errors.New("exit status 1")
	}
	if err := read(strings.NewReader(printed(p.t, lines...))); err != nil {
		return err
	}
	return end
}

// exited says that go test failed.
const exited = `{"Action":"exit"}` + "\n"

// six is a run of six failures.
func six() (lines []string) {
	for i := range 6 {
		lines = append(lines, fmt.Sprint("run p T", i), fmt.Sprint("fail p T", i))
	}
	return append(lines, "fail p -")
}

var failedOnce = []string{
	"run p A", "run p A/x", "run p A/y", "run p B", "pass p B", "out p A/x     a_test.go:7: not within 60s: it ends", "out p A/x more",
	"fail p A/x", "pass p A/y", "fail p A", "out p - FAIL", "fail p -",
}

func TestSummary(t *testing.T) {
	aAgain := "-run ^A$ p"
	cases := map[string]struct {
		first  []string
		also   []string
		exit   int
		again  map[string][]string
		asked  []string
		code   int
		last   string
		says   []string
		silent []string
	}{
		"all pass": {first: []string{"run p A", "pass p A", "pass p -"}, last: "1 passed, 0 failed, 0 skipped"},
		"no test":  {first: []string{"pass p -"}, code: 1, last: "0 passed, 0 failed, 0 skipped"},
		"a failure nobody explains": {
			first: []string{"run p A", "pass p A", "pass p -"}, exit: 1, code: 1, last: "1 passed, 0 failed, 0 skipped",
		},
		"a skip that may be": {
			first: []string{"run p A", "pass p A", "run p B", "out p B it needs root", "skip p B", "pass p -"},
			last:  "1 passed, 0 failed, 1 skipped",
		},
		"a skip that may not be": {
			first: []string{"run p A", "pass p A", "run p B", "out p B not today", "skip p B", "pass p -"}, code: 1,
			last: "1 passed, 0 failed, 1 skipped", says: []string{"this test may not be skipped"},
		},
		"unsteady": {
			first: failedOnce, exit: 1, asked: []string{aAgain},
			again: map[string][]string{aAgain: {"run p A", "run p A/x", "pass p A/x", "run p A/y", "pass p A/y", "pass p A", "pass p -"}},
			last:  "4 passed, 0 failed, 0 skipped, 1 unsteady",
			says:  []string{"passed on the second try: p A/x, first failure: a_test.go:7: not within 60s: it ends\n", "FAIL p A/x\n", "\nmore\n"},
		},
		"fails again": {
			first: failedOnce, exit: 1, asked: []string{aAgain}, code: 1,
			again: map[string][]string{aAgain: {"exit", "run p A", "run p A/x", "out p A/x the second output", "fail p A/x", "fail p A", "fail p -"}},
			last:  "2 passed, 2 failed, 0 skipped", says: []string{"failed on the second try as well: p A", "the second output"}, silent: []string{"passed on"},
		},
		"another of its subtests fails in the second run": {
			first: failedOnce, exit: 1, asked: []string{aAgain}, code: 1,
			again: map[string][]string{aAgain: {"exit", "run p A", "run p A/x", "pass p A/x", "run p A/y", "fail p A/y", "fail p A", "fail p -"}},
			last:  "2 passed, 2 failed, 0 skipped",
		},
		"what failed does not run in the second run": {
			first: failedOnce, exit: 1, asked: []string{aAgain}, code: 1,
			again: map[string][]string{aAgain: {"run p A", "pass p A", "pass p -"}}, last: "2 passed, 2 failed, 0 skipped",
		},
		"what failed is skipped in the second run": {
			first: failedOnce, exit: 1, asked: []string{aAgain}, code: 1,
			again: map[string][]string{aAgain: {"run p A", "run p A/x", "out p A/x it needs root", "skip p A/x", "pass p A", "pass p -"}},
			last:  "2 passed, 2 failed, 0 skipped",
		},
		"the second run does not succeed": {
			first: failedOnce, exit: 1, asked: []string{aAgain}, code: 1,
			again: map[string][]string{aAgain: {"exit", "run p A", "run p A/x", "pass p A/x", "pass p A", "pass p -"}}, last: "2 passed, 2 failed, 0 skipped",
		},
		"one of two": {
			first: []string{"run p A", "fail p A", "run p B", "fail p B", "fail p -", "run q C", "fail q C", "fail q -"}, exit: 1, code: 1,
			asked: []string{aAgain, "-run ^B$ p", "-run ^C$ q"},
			again: map[string][]string{
				aAgain: {"run p A", "pass p A", "pass p -"}, "-run ^B$ p": {"exit", "run p B", "fail p B", "fail p -"},
				"-run ^C$ q": {"run q C", "pass q C", "pass q -"},
			},
			last: "2 passed, 1 failed, 0 skipped, 2 unsteady",
		},
		"too many": {first: six(), exit: 1, code: 1, last: "0 passed, 6 failed, 0 skipped", says: []string{"6 failures are more than 5"}},
		"a data race": {
			first: []string{"run p A", "out p A WARNING: DATA RACE", "pass p A", "run p B", "fail p B", "fail p -"}, exit: 1, code: 1,
			last: "1 passed, 1 failed, 0 skipped", says: []string{"nothing is run again: a data race was reported"},
		},
		"a data race in the second run": {
			first: failedOnce, exit: 1, asked: []string{aAgain}, code: 1,
			again: map[string][]string{aAgain: {"run p A", "run p A/x", "out p A/x WARNING: DATA RACE", "pass p A/x", "pass p A", "pass p -"}},
			last:  "2 passed, 2 failed, 0 skipped",
		},
		"a package that does not build": {
			first: []string{"run p A", "fail p A", "fail p -", "out q - q.go:1: nonsense", "build-fail q -"}, exit: 1, code: 1,
			last: "0 passed, 1 failed, 0 skipped", says: []string{"nothing is run again: a package did not build"},
		},
		"a panic": {
			first: []string{"run p A", "out p A panic: boom [recovered]", "fail p A", "fail p -"}, exit: 1, code: 1,
			last: "0 passed, 1 failed, 0 skipped", says: []string{"nothing is run again: something panicked"},
		},
		"a panic that is shown with a test that passed": {
			first: []string{"run p A", "run p B", "out p A panic: boom", "pass p A", "fail p -"}, exit: 1, code: 1,
			last: "1 passed, 0 failed, 0 skipped", says: []string{"nothing is run again: something panicked"},
		},
		"a package that ran out of time": {
			first: []string{"run p A", "pass p A", "run p B", "fail p B", "run p C", "out p C panic: test timed out after 20m0s", "fail p -"}, exit: 1,
			asked: []string{"p"},
			again: map[string][]string{"p": {"run p A", "pass p A", "run p B", "pass p B", "run p C", "pass p C", "pass p -"}},
			last:  "3 passed, 0 failed, 0 skipped, 2 unsteady",
			says:  []string{"passed on the second try: p, first failure: panic: test timed out after 20m0s\n", "passed on the second try: p B, first failure: no output"},
		},
		"a package whose TestMain failed": {
			first: []string{"run p A", "pass p A", "out p - pgtest: no server", "fail p -"}, exit: 1, asked: []string{"p"},
			again: map[string][]string{"p": {"run p A", "pass p A", "pass p -"}}, last: "1 passed, 0 failed, 0 skipped, 1 unsteady",
			says: []string{"passed on the second try: p, first failure: pgtest: no server\n"},
		},
		"a package that fails again as a whole": {
			first: []string{"run p A", "pass p A", "out p - pgtest: no server", "fail p -"}, exit: 1, asked: []string{"p"}, code: 1,
			again: map[string][]string{"p": {"exit", "run p A", "pass p A", "fail p -"}}, last: "1 passed, 0 failed, 0 skipped",
		},
		"the same package under another environment": {
			first: []string{"run p A", "pass p A", "pass p -"}, also: []string{"run p A", "pass p A", "pass p -"},
			last: "2 passed, 0 failed, 0 skipped", says: []string{"ok   p X=1 0s\n"},
		},
		"a failure under another environment only": {
			first: []string{"run p A", "pass p A", "pass p -"}, also: []string{"run p A", "fail p A", "run p B", "pass p B", "fail p -"}, exit: 1, code: 1,
			asked: []string{"-run ^A$ p X=1"}, again: map[string][]string{"-run ^A$ p X=1": {"exit", "run p A", "fail p A", "fail p -"}},
			last: "2 passed, 1 failed, 0 skipped", says: []string{"FAIL p X=1 A\n"},
		},
		"unsteady under another environment": {
			first: []string{"run p A", "pass p A", "pass p -"}, also: []string{"run p A", "fail p A", "run p B", "pass p B", "fail p -"}, exit: 1,
			asked: []string{"-run ^A$ p X=1"}, again: map[string][]string{"-run ^A$ p X=1": {"run p A", "pass p A", "pass p -"}},
			last: "3 passed, 0 failed, 0 skipped, 1 unsteady",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := &play{t: t, script: c.again}
			var out strings.Builder
			in := printed(t, c.first...)
			if c.also != nil {
				in += `{"Action":"under","Output":"X=1"}` + "\n" + printed(t, c.also...)
			}
			if c.exit != 0 {
				in += exited
			}
			code := summarise(strings.NewReader(in), &out, p.run)
			printed := out.String()
			if lines := strings.Split(strings.TrimSpace(printed), "\n"); code != c.code || lines[len(lines)-1] != c.last {
				t.Errorf("exit code %d, want %d, and %q, want %q", code, c.code, lines[len(lines)-1], c.last)
			}
			if !slices.Equal(p.asked, c.asked) {
				t.Errorf("run again: %q, want %q", p.asked, c.asked)
			}
			for _, words := range c.says {
				if !strings.Contains(printed, words) {
					t.Errorf("it does not say %q", words)
				}
			}
			for _, words := range c.silent {
				if strings.Contains(printed, words) {
					t.Errorf("it says %q", words)
				}
			}
			if t.Failed() {
				t.Log(strings.ReplaceAll(printed, "\n", "\n | "))
			}
		})
	}
}

func TestWithoutACommandNothingIsRunAgain(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	code := summarise(strings.NewReader(printed(t, failedOnce...)+exited), &out, repeat(t.Context(), nil))
	if code != 1 || !strings.HasSuffix(out.String(), "\n2 passed, 2 failed, 0 skipped\n") {
		t.Errorf("exit code %d and %q", code, out.String())
	}
}

func TestRepeatRunsTheCommandWithMoreArguments(t *testing.T) {
	t.Parallel()
	var got string
	read := func(in io.Reader) error {
		b, err := io.ReadAll(in)
		got = string(b)
		return err
	}
	if err := repeat(t.Context(), []string{"echo", "-run", "x"})(read, "-run", "^A$", "p"); err != nil || got != "-run x -run ^A$ p\n" {
		t.Errorf("%q, %v", got, err)
	}
	if err := repeat(t.Context(), []string{"false"})(read); err == nil {
		t.Error("a command that fails is taken for one that succeeds")
	}
	if err := repeat(t.Context(), []string{"sh", "-c", `echo "$SUMMARY_TEST $*"`, "sh"})(read, "-run", "^A$", "p SUMMARY_TEST=1"); err != nil || got != "1 -run ^A$ p\n" {
		t.Errorf("under another environment: %q, %v", got, err)
	}
}
