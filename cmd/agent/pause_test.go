package main

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestPauseAndResume(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	if got := p.run("pause"); got.code != 2 || !strings.Contains(got.err, "--reason") {
		t.Errorf("without a reason: %+v", got)
	}
	if got := p.run("pause", "--reason", " "); got.code != 2 || !strings.Contains(got.err, "--reason") {
		t.Errorf("with a blank reason: %+v", got)
	}
	contains(t, p.must("doctor"), "autonomy", "not paused")
	contains(t, p.must("resume"), "the agent is not paused")
	contains(t, p.must("pause", "--reason", "prices look wrong"), "autonomous work is paused since", "by admin: prices look wrong", "trace op_")
	contains(t, p.must("pause", "--reason", "again"), "it was so already", "prices look wrong")
	contains(t, p.must("doctor"), "prices look wrong", "agent resume")
	status := p.run("executions", "status")
	if status.code != 0 || !strings.Contains(status.err, "by admin: prices look wrong; `agent resume` ends it") {
		t.Errorf("status: %+v", status)
	}
	contains(t, p.must("pause", "--reason", "x", "--json"), `"changed": false`, `"paused_by": "admin"`)
	contains(t, p.must("resume", "--reason", "they were right"), "resumed; it was paused since", "trace op_")
	contains(t, p.must("activity", "ls"), "pause_agent", "resume_agent")
}

// A heartbeat that a pause keeps from beginning is recorded as skipped, and that is no failure.
func TestAHeartbeatWhilePausedIsSkipped(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	p.must("pause", "--reason", "prices look wrong")
	contains(t, p.must("heartbeat"), "skipped: autonomous work is paused since", "heartbeat", "prices look wrong")
	contains(t, p.must("heartbeat", "--json"), `"skipped": "autonomous work is paused since`, `"status": "skipped"`)
	contains(t, p.must("activity", "ls", "--surface", "heartbeat"), "skipped")
	contains(t, p.must("executions", "ls"), "no execution matches")
}
