package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// A pause gives its reason everywhere, and needs one.
func TestPauseAndResume(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	pausing := pgtest.Begin(t, connect(t, url))
	pgtest.Exec(t, pausing, `select pause_agent('not committed')`)
	assert.Contains(t, p.must("doctor"), "autonomy", fmt.Sprintf("held back by the session with pid %d",
		pgtest.Value[int](t, pausing, `select pg_backend_pid()`)))
	require.NoError(t, pausing.Rollback(t.Context()))
	p.mustFail(2, "--reason", "pause")
	p.mustFail(2, "--reason", "pause", "--reason", " ")
	assert.Contains(t, p.must("doctor"), "autonomy", "not paused", "verdict", "stopped: no process is running")
	assert.Contains(t, p.must("resume"), "the agent is not paused")
	assert.Contains(t, p.must("pause", "--reason", "prices look wrong"), "autonomous work is paused since",
		"by admin: prices look wrong", "trace op_")
	assert.Contains(t, p.must("pause", "--reason", "again"), "already: ", "prices look wrong")
	assert.Contains(t, p.must("doctor"), "prices look wrong", "agent resume")
	status := p.run("executions", "status")
	assert.Truef(t, status.code == 0 &&
		strings.Contains(status.err, "by admin: prices look wrong; `agent resume` ends it"), "status: %+v", status)
	assert.Contains(t, p.must("pause", "--reason", "x", "--json"), `"changed": false`, `"paused_by": "admin"`)
	assert.Contains(t, p.must("resume", "--reason", "they were right"), "resumed; it was paused since", "trace op_")
	assert.Contains(t, p.must("activity", "ls"), "pause_agent", "resume_agent")
}

// A heartbeat during a pause is recorded as skipped. It is no failure.
