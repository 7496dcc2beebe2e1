// Command skips reads the events of go test -json from a file, prints each skipped test with its reason, and exits with
// 1 when a reason is not in the list.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// allowed lists texts that a reason may contain.
var allowed = []string{
	"needs root", "needs /proc", // of the user, of the system
	"npm is not installed", "node is not installed", "npm cannot install", // clients in other languages
	"make prove ONLY=",                                                                        // the long form runs it
	"needs a server on a unix socket", "needs the server's URL", "this server does not offer", // AGENT_TEST_DATABASE_URL
}

type event struct{ Action, Package, Test, Output string }

func main() {
	events, err := os.ReadFile(os.Args[1])
	if err == nil {
		err = check(bytes.NewReader(events), os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "skips:", err)
		os.Exit(1)
	}
}

// check prints the skipped tests. It returns an error for a test without an allowed reason.
func check(events io.Reader, out io.Writer) error {
	reasons := map[string]string{}
	var refused []error
	for decoder := json.NewDecoder(events); ; {
		var e event
		if err := decoder.Decode(&e); errors.Is(err, io.EOF) {
			return errors.Join(refused...)
		} else if err != nil {
			return err
		}
		test := e.Package + " " + e.Test
		switch {
		case e.Test == "":
		case e.Action == "output" && !strings.HasPrefix(e.Output, "=== ") && !strings.HasPrefix(e.Output, "--- "):
			reasons[test] += e.Output
		case e.Action == "skip":
			reason := strings.TrimSpace(reasons[test])
			fmt.Fprintf(out, "skipped: %s: %s\n", test, reason)
			if !slices.ContainsFunc(allowed, func(words string) bool { return strings.Contains(reason, words) }) {
				refused = append(refused, fmt.Errorf("%s may not be skipped: install what it needs", test))
			}
		case e.Action == "pass" || e.Action == "fail":
			delete(reasons, test)
		}
	}
}
