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
// Packages can have been tested a second time under another environment: -also names the file with the stream of that
// run, -under its variable as NAME=value. They are shown, counted and run again as packages of their own, called by
// their name and the variable.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
)

func main() {
	exit := flag.Int("exit", 0, "exit code of go test")
	also := flag.String("also", "", "a file with the stream of another run")
	under := flag.String("under", "", "NAME=value, in the environment of that run")
	flag.Parse()
	streams := []stream{{in: os.Stdin}}
	if *also != "" {
		file, err := os.Open(*also)
		if err != nil {
			fmt.Fprintln(os.Stderr, "summary:", err)
			os.Exit(1)
		}
		streams = append(streams, stream{file, *under})
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	code := summarise(streams, os.Stdout, *exit, repeat(ctx, flag.Args()))
	stop()
	os.Exit(code)
}

// stream is what one run printed, and the variable that its environment had besides.
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

// summarise reads streams, gives what failed its second try, prints the closing line and returns the exit code.
func summarise(streams []stream, out io.Writer, exit int, again runner) int {
	r := newResult()
	for _, s := range streams {
		if err := r.read(s, out); err != nil {
			fmt.Fprintln(out, "summary:", err)
			return 1
		}
	}
	explained := exit == 0 || r.fails()
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
