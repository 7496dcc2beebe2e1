package main

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
)

// mostAgain is how many failures of one run may have been bad luck.
const mostAgain = 5

// runner runs tests again: the arguments are added to the command that ran them before, and read gets the
// stream. It returns an error when the command does not succeed.
type runner func(read func(io.Reader) error, more ...string) error

// candidate is what is run again by itself: a top-level test, or a package when it has no name.
type candidate struct {
	test

	failures []test // the failures in it that have no failure below them
}

// secondTry runs what failed once more, each by itself, and takes those that pass now off the failures. It
// returns how many that were.
func (r *result) secondTry(again runner, out io.Writer) (unsteady int) {
	list, total := r.candidates()
	switch {
	case r.serious != "":
		fmt.Fprintf(out, "nothing is run again: %s\n", r.serious)
		return 0
	case total > mostAgain:
		fmt.Fprintf(out, "nothing is run again: %d failures are more than %d\n", total, mostAgain)
		return 0
	}
	for _, c := range list {
		fmt.Fprintln(out, "AGAIN", c)
		second := newResult()
		_, under, _ := strings.Cut(c.pkg, " ")
		err := again(func(in io.Reader) error { return second.read(stream{in, under}, out) }, c.arguments()...)
		if err != nil || !c.passes(second) {
			fmt.Fprintln(out, "failed on the second try as well:", c, reason(err))
			continue
		}
		for _, f := range c.failures {
			fmt.Fprintf(out, "passed on the second try: %s, first failure: %s\n", f, r.said(f))
		}
		unsteady += len(c.failures)
		r.settle(c, second)
	}
	return unsteady
}

func reason(err error) string {
	if err == nil {
		return ""
	}
	return "(" + err.Error() + ")"
}

// candidates lists what may be run again, and how many failures that is. A package in which a test was begun and did
// not end, or in which none failed, is one whole.
func (r *result) candidates() (list []candidate, total int) {
	whole := map[string]bool{}
	for _, pkg := range r.packages {
		failed := slices.ContainsFunc(r.failed, func(t test) bool { return t.pkg == pkg })
		for t := range r.open {
			failed = failed && t.pkg != pkg
		}
		if whole[pkg] = !failed; whole[pkg] {
			list = append(list, candidate{test{pkg, ""}, []test{{pkg, ""}}})
		}
	}
	total = len(list)
	for _, t := range r.failed {
		if slices.ContainsFunc(r.failed, func(other test) bool { return other.pkg == t.pkg && strings.HasPrefix(other.name, t.name+"/") }) {
			continue // its subtest says why
		}
		total++
		top := test{t.pkg, ""}
		if !whole[t.pkg] {
			top.name, _, _ = strings.Cut(t.name, "/")
		}
		i := slices.IndexFunc(list, func(c candidate) bool { return c.test == top })
		if i < 0 {
			i = len(list)
			list = append(list, candidate{test: top})
		}
		list[i].failures = append(list[i].failures, t)
	}
	return list, total
}

// arguments has the command run nothing but this.
func (c candidate) arguments() []string {
	if c.name == "" {
		return []string{c.pkg}
	}
	return []string{"-run", "^" + regexp.QuoteMeta(c.name) + "$", c.pkg}
}

// passes reports that all of it ran in a second stream, and well.
func (c candidate) passes(second *result) bool {
	for _, f := range c.failures {
		if f.name != "" && !second.passed[f] {
			return false
		}
	}
	return !second.fails() && !second.bad && second.serious == "" && len(second.open) == 0 && second.sum().passed > 0
}

// holds reports whether a test is part of it.
func (c candidate) holds(t test) bool {
	return t.pkg == c.pkg && (c.name == "" || t.name == c.name || strings.HasPrefix(t.name, c.name+"/"))
}

// settle counts what passed on the second try as passed.
func (r *result) settle(c candidate, second *result) {
	before := len(r.failed)
	r.failed = slices.DeleteFunc(r.failed, c.holds)
	if c.name == "" {
		r.tallies[c.pkg] = second.tallies[c.pkg]
	} else {
		n := before - len(r.failed)
		r.tallies[c.pkg].failed -= n
		r.tallies[c.pkg].passed += n
	}
	if !slices.ContainsFunc(r.failed, func(t test) bool { return t.pkg == c.pkg }) {
		r.packages = slices.DeleteFunc(r.packages, func(pkg string) bool { return pkg == c.pkg })
	}
}

var complaint = regexp.MustCompile(`^\s*[\w./-]+\.go:\d+: `)

// said is the first line of a failure that says something.
func (r *result) said(t test) string {
	text := r.output[t.pkg+" "+t.name]
	if text == nil {
		return "no output"
	}
	first := ""
	for line := range strings.Lines(text.String()) {
		trimmed := strings.TrimSpace(line)
		switch {
		case complaint.MatchString(line):
			return trimmed
		case first == "" && trimmed != "" && !strings.HasPrefix(trimmed, "=== ") && !strings.HasPrefix(trimmed, "--- ") && trimmed != "FAIL":
			first = trimmed
		}
	}
	return first
}
