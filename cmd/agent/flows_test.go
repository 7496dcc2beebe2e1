package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// What is shown of a flow names its versions; what is not there is named for what it is, with what to do next.
func TestShowingAFlowAndItsVersions(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	dir := t.TempDir()
	apply := func(text string) {
		if err := os.WriteFile(filepath.Join(dir, "flow.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		p.must("apply", "--prune", dir)
	}
	const document = "kind: flow\nname: greet\nactions: [{actionType: set, parameters: {variables: {word: hola}}}]\n"
	apply(document)
	apply(strings.Replace(document, "hola", "adios", 1))
	contains(t, p.must("flows", "show", "greet"), "# version 2 of", "#   version 1 of", ", current", "word: adios")
	contains(t, p.must("flows", "show", "greet", "--version", "1"), "# version 1 of", "word: hola")
	if got := p.run("flows", "show", "greet", "--version", "7"); got.code != 1 ||
		!strings.Contains(got.err, "flow greet has no version 7: the latest is 2; see agent flows show greet") {
		t.Errorf("no such version: %d %q", got.code, got.err)
	}
	apply("")
	if got := p.run("flows", "show", "greet"); got.code != 1 ||
		!strings.Contains(got.err, "flow greet was removed; agent flows show greet --version 2 shows what it was") {
		t.Errorf("removed: %d %q", got.code, got.err)
	}
	contains(t, p.must("flows", "show", "greet", "--version", "2"), "word: adios")
	if got := p.run("flows", "show", "heartbeat"); got.code != 1 || !strings.Contains(got.err, "flow heartbeat is Go code") {
		t.Errorf("Go: %d %q", got.code, got.err)
	}
}
