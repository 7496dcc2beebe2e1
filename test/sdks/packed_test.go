//go:build unix

package sdks

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// packed says that the workers use the packages as people install them, as in scripts/prove.
var packed = os.Getenv("AGENT_SDKS") == "packed"

// tests removes what they have installed.
type tests struct{ *testing.M }

func (m tests) Run() int {
	code := m.M.Run()
	if packed {
		if folders, _ := install(); folders != nil {
			_ = os.RemoveAll(folders[""])
		}
	}
	return code
}

// install packs and installs both SDKs once: npm pack, tsc --noEmit on the types, and pip install. It returns the
// folders with the installed packages.
var install = sync.OnceValues(func() (folders map[string]string, err error) {
	dir, err := os.MkdirTemp("", "lanekeeper-sdks-")
	if err != nil {
		return nil, err
	}
	run := func(at, name string, args ...string) {
		if err != nil {
			return
		}
		cmd := exec.Command(name, args...)
		cmd.Dir = at
		if out, failed := cmd.CombinedOutput(); failed != nil {
			err = &installError{strings.Join(append([]string{name}, args...), " "), string(out), failed}
		}
	}
	typescript, python := filepath.Join(dir, "typescript"), filepath.Join(dir, "python")
	for _, folder := range []string{typescript, python} {
		if err := os.Mkdir(folder, 0o755); err != nil {
			return nil, err
		}
	}
	run("../../sdk/typescript", "npm", "pack", "--pack-destination", typescript)
	run(typescript, "sh", "-c",
		"npm install --no-audit --no-fund ./lanekeeper-*.tgz typescript@5.9.3 @types/node@20.19.25")
	for name, from := range map[string]string{
		"scenario.mjs": "../../sdk/typescript/index.js", "types_test.ts": "./index.js", "tsconfig.json": `"index.d.ts", `,
	} {
		source := name
		if name != "scenario.mjs" {
			source = filepath.Join("../../sdk/typescript", name)
		}
		text, read := os.ReadFile(source)
		if read != nil {
			return nil, read
		}
		to := "lanekeeper"
		if name == "tsconfig.json" {
			to = ""
		}
		changed := []byte(strings.ReplaceAll(string(text), from, to))
		if err := os.WriteFile(filepath.Join(typescript, name), changed, 0o600); err != nil {
			return nil, err
		}
	}
	run(typescript, "npx", "tsc", "--noEmit")
	run(".", "cp", "-r", "../../sdk/python", filepath.Join(dir, "source")) // pip builds in the folder
	run(dir, "python3", "-m", "pip", "install", "--no-deps", "--target", python, "./source")
	return map[string]string{"": dir, "typescript": typescript, "python": python}, err
})

type installError struct {
	command, out string
	err          error
}

func (e *installError) Error() string { return e.command + ": " + e.err.Error() + "\n" + e.out }

// installed returns the folder with an installed SDK.
func installed(t *testing.T, name string) string {
	t.Helper()
	folders, err := install()
	require.NoError(t, err)
	return folders[name]
}

// The document of the API is served to clients that generate code. Redocly reads it where the packages are tried.
func TestTheDocumentIsOpenAPI(t *testing.T) {
	t.Parallel()
	w := newWorld(t, language{name: "document"})
	got, err := testkit.Do(t.Context(), http.DefaultClient, "GET", w.base+"/openapi.json", "")
	require.NoError(t, err)
	var doc struct {
		OpenAPI       string
		Servers, Tags []any
		Paths         map[string]map[string]struct{ Summary, OperationID string }
	}
	require.NoError(t, json.Unmarshal(got.Body, &doc))
	assert.Truef(t, strings.HasPrefix(doc.OpenAPI, "3.1") && len(doc.Servers) > 0 && len(doc.Tags) > 0,
		"OpenAPI %s with %d servers and %d tags", doc.OpenAPI, len(doc.Servers), len(doc.Tags))
	for path, methods := range doc.Paths {
		for method, op := range methods {
			assert.Truef(t, op.Summary != "" && op.OperationID != "", "%s %s has no summary or no id", method, path)
		}
	}
	if !packed {
		return
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "openapi.json"), got.Body, 0o600))
	lint := exec.CommandContext(t.Context(), "npx", "--yes", "@redocly/cli@2.77.0", "lint", "openapi.json",
		"--skip-rule", "operation-4xx-response") // probes are answered by 200 and 503 alone
	lint.Dir = dir
	lint.Env = append(os.Environ(), "REDOCLY_TELEMETRY=off", "REDOCLY_SUPPRESS_UPDATE_NOTICE=true")
	out, err := lint.CombinedOutput()
	assert.Truef(t, err == nil && bytes.Contains(out, []byte("description is valid")) &&
		!bytes.Contains(out, []byte("Warning was generated")), "redocly: %v\n%s", err, out)
}
