// Command summary reads what `go test -json` prints and shows a person what matters: failures with their
// output, what was skipped and why, and one closing line. It exits with 1 when a test failed, when a
// package did not build, when no test ran, or when a test was skipped that may not be.
//
// The arguments after -- are the command that made the stream. With them, up to five tests that failed are
// run once more, each by itself on the then quiet machine: its whole top-level test, with all its subtests.
// One that passes then does not fail the run. It is reported as unsteady, by name and with its first
// failure; the output of that failure stays above. A package that failed without a failed test of its own,
// because its TestMain failed, a test ended the process or time ran out, is run again whole and passes only
// as a whole. Nothing is run again when there are more than five, when a data race was reported, when a
// package did not build, or when something panicked: none of that is bad luck.
//
// scripts/test runs go test several times and puts two events of its own between the streams. {"Action":"under","Output":
// "NAME=value"} says that what follows was tested with that variable: those packages are shown, counted and run again as
// packages of their own, called by their name and the variable; it holds until the next such event. {"Action":"exit"} says
// that a go test failed.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	command := os.Args[1:]
	if len(command) > 0 && command[0] == "--" {
		command = command[1:]
	}
	code := summarise(os.Stdin, os.Stdout, repeat(ctx, command))
	stop()
	os.Exit(code)
}

// stream is what a run printed, and the variable that its environment had besides.
type stream struct {
	in    io.Reader
	under string
}

// repeat is how tests are run again: with further arguments to the command that ran them; nil without one. The last is the
// package, with the variable that it was tested under.
func repeat(ctx context.Context, command []string) runner {
	if len(command) == 0 {
		return nil
	}
	return func(read func(io.Reader) error, more ...string) error {
		var variable string
		if n := len(more); n > 0 {
			more = slices.Clone(more)
			more[n-1], variable, _ = strings.Cut(more[n-1], " ")
		}
		again := exec.CommandContext(ctx, command[0], append(command[1:len(command):len(command)], more...)...)
		if variable != "" {
			again.Env = append(os.Environ(), variable)
		}
		again.Stderr = os.Stderr
		stream, err := again.StdoutPipe()
		if err != nil {
			return err
		}
		if err := again.Start(); err != nil {
			return err
		}
		err = read(stream)
		if ended := again.Wait(); ended != nil {
			return ended
		}
		return err
	}
}

// summarise reads the streams, gives what failed its second try, prints the closing line and returns the exit code.
func summarise(in io.Reader, out io.Writer, again runner) int {
	r := newResult()
	if err := r.read(stream{in: in}, out); err != nil {
		fmt.Fprintln(out, "summary:", err)
		return 1
	}
	explained := !r.exited || r.fails()
	unsteady := 0
	if again != nil && r.fails() {
		unsteady = r.secondTry(again, out)
	}
	sum := r.sum()
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped", sum.passed, sum.failed, sum.skipped)
	if unsteady > 0 {
		fmt.Fprintf(out, ", %d unsteady", unsteady)
	}
	fmt.Fprintln(out)
	if !explained || r.fails() || r.bad || sum.passed == 0 {
		return 1
	}
	return 0
}
