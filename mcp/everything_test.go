package mcp_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/npmtest"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/skills"
)

// The reference server covers all features of the protocol.
const (
	everything        = "@modelcontextprotocol/server-everything"
	everythingVersion = "2026.8.31"
)

func TestReferenceServer(t *testing.T) {
	t.Parallel()
	dir := npmtest.Install(t, everything+"@"+everythingVersion)
	program := filepath.Join(dir, "node_modules", everything, "dist", "index.js")
	f := newClientFixture(t, nil)
	f.put(mcp.Definition{Name: "test", Command: []string{"node", program, "stdio"}})
	report := f.sync()
	assert.Truef(t, report.Tools >= 5 && len(report.Refused) == 0 && len(report.Mounted) == report.Tools,
		"the sync found %+v", report)
	t.Logf("%s: %v", report.About, report.Mounted)
	assert.Contains(t, f.mustCall("echo", `{"message":"hello there"}`), "hello there")
	assert.Contains(t, f.mustCall("get-sum", `{"a":2,"b":40}`), "42")
	got := f.mustCall("get-tiny-image", `{}`)
	assert.Truef(t, strings.Contains(got, `"mime":"image/png"`) && len(got) <= 4000, "get-tiny-image answers %.300s", got)
	assert.Contains(t, f.mustCall("get-structured-content", `{"location":"Chicago"}`), "temperature")
	_, err := f.call("get-sum", `{"a":"x"}`)
	assert.Error(t, err, "wrong arguments were accepted")
	again := f.sync()
	assert.Truef(t, len(again.Mounted)+len(again.Quarantined) == 0, "a second sync changed %+v", again)
	assert.Equal(t, skills.TrustApprove, f.skill("echo").Trust)
}
