package mcp_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/skills"
)

// The reference server of the protocol covers all its features.
const (
	everything        = "@modelcontextprotocol/server-everything"
	everythingVersion = "2026.8.31"
)

// installEverything installs the reference server once per user and returns its program.
func installEverything(t *testing.T) (node, program string) {
	t.Helper()
	npm, err := exec.LookPath("npm")
	if err != nil {
		t.Skip("npm is not installed: the reference MCP server cannot be tried")
	}
	if node, err = exec.LookPath("node"); err != nil {
		t.Skip("npm is not installed: the reference MCP server cannot be tried (node is missing)")
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	dir := filepath.Join(cache, "lanekeeper-test", "server-everything-"+everythingVersion)
	program = filepath.Join(dir, "node_modules", everything, "dist", "index.js")
	if _, err := os.Stat(program); err == nil {
		return node, program
	}
	require.NoError(t, os.MkdirAll(filepath.Dir(dir), 0o755))
	fresh, err := os.MkdirTemp(filepath.Dir(dir), "installing-") //nolint:usetesting // renamed later, within one file system
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(fresh) })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, npm, "install", "--no-audit", "--no-fund", "--prefix", fresh,
		everything+"@"+everythingVersion).CombinedOutput()
	if err != nil {
		t.Skipf("npm cannot install %s (offline?): the reference MCP server cannot be tried: %v\n%s", everything, err, out)
	}
	if err := os.Rename(fresh, dir); err != nil && !errors.Is(err, fs.ErrExist) { // another test may have won
		t.Fatal(err)
	}
	return node, program
}

func TestTheReferenceServerIsMountedAndCalled(t *testing.T) {
	t.Parallel()
	node, program := installEverything(t)
	w := newWorld(t, nil)
	w.put(mcp.Definition{Name: "test", Command: []string{node, program, "stdio"}})
	report := w.sync()
	assert.Truef(t, report.Tools >= 5 && len(report.Refused) == 0 && len(report.Mounted) == report.Tools,
		"the sync found %+v", report)
	t.Logf("%s: %v", report.About, report.Mounted)
	assert.Contains(t, w.must("echo", `{"message":"hello there"}`), "hello there")
	assert.Contains(t, w.must("get-sum", `{"a":2,"b":40}`), "42")
	got := w.must("get-tiny-image", `{}`)
	assert.Truef(t, strings.Contains(got, `"mime":"image/png"`) && len(got) <= 4000, "get-tiny-image answers %.300s", got)
	assert.Contains(t, w.must("get-structured-content", `{"location":"Chicago"}`), "temperature")
	_, err := w.call("get-sum", `{"a":"x"}`)
	assert.Error(t, err, "wrong arguments were taken")
	again := w.sync()
	assert.Truef(t, len(again.Mounted)+len(again.Quarantined) == 0, "a second sync changed %+v", again)
	assert.Equal(t, skills.TrustApprove, w.skill("echo").Trust)
}
