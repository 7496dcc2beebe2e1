package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

const greeting = `kind: flow
name: greet
description: Says hello and waits.
input: {type: object, required: [name], properties: {name: {type: string}}}
actions:
  - {id: hello, actionType: set, parameters: {variables: {said: "hello {{input.name}}"}}}
  - {id: news, actionType: wait_for_event, parameters: {key: "news-{{input.name}}"}, timeout: 1h}
  - {id: end, actionType: end, parameters: {summary: "{{said}} and goodbye"}}
---
kind: skill
name: greet
handler: flow:greet
parameters: {type: object, required: [name], properties: {name: {type: string}}}
`

// greeter is a database with the flow greet, and a process that works on it.
func greeter(t *testing.T) program {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "greet.yaml"), []byte(greeting), 0o600); err != nil {
		t.Fatal(err)
	}
	p := on(t, pgtest.URL(t), "AGENT_ADMIN_TOKEN=the-token-of-the-admin-0123456789", "AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=0 0 1 1 *",
		"AGENT_LOG_LEVEL=info")
	p.must("apply", dir)
	served := p.start("serve")
	served.find(t, `(listening|serving|serve)`)
	p.environ = append(p.environ, "AGENT_LOG_LEVEL=error")
	return p
}

// waits waits until an execution waits.
func (p program) waits(id string) {
	p.t.Helper()
	pgtest.Eventually(p.t, 2*pgWait, func() bool {
		var x struct{ Status string }
		p.mustJSON(&x, "executions", "show", id)
		return x.Status == "waiting"
	}, "execution waits")
}

func TestAFlowFromStartToReplay(t *testing.T) {
	t.Parallel()
	p := greeter(t)
	var started struct {
		ID, Status string
		TraceID    string `json:"trace_id"`
		Created    bool
	}
	p.mustJSON(&started, "executions", "start", "greet", "--input", `{"name": "Ana"}`, "--key", "ana")
	if !started.Created || !strings.HasPrefix(started.TraceID, "fl_") {
		t.Errorf("started %+v", started)
	}
	contains(t, p.must("executions", "start", "greet", "--input", `{"name": "Ana"}`, "--key", "ana"), "had been started already", started.ID)
	p.waits(started.ID)
	contains(t, p.must("executions", "waiting"), started.ID, "news-Ana")
	contains(t, p.must("executions", "status"), "waiting  1")
	if got := p.must("executions", "stuck"); got != "nothing is stuck\n" {
		t.Errorf("stuck: %q", got)
	}
	contains(t, p.must("executions", "show", started.ID), "waits for     event", "key           news-Ana", "version       1")
	contains(t, p.must("executions", "replay", started.ID), "the record ends at", "equal")
	var event struct {
		EventID string `json:"event_id"`
		Resumed []string
	}
	p.mustJSON(&event, "executions", "event", "EVENT_COMPLETED", "news-Ana", "--id", "n1")
	if len(event.Resumed) != 1 || event.Resumed[0] != started.ID {
		t.Errorf("event %+v", event)
	}
	pgtest.Eventually(t, 2*pgWait, func() bool {
		return strings.Contains(p.must("executions", "show", started.ID), "hello Ana and goodbye")
	}, "it ends")
	var replayed struct {
		Equal        bool
		Digest       string
		ReplayDigest string `json:"replay_digest"`
	}
	p.mustJSON(&replayed, "executions", "replay", started.ID)
	if !replayed.Equal || replayed.Digest == "" || replayed.Digest != replayed.ReplayDigest {
		t.Errorf("replayed %+v", replayed)
	}
	// A fork from the wait waits anew.
	shown := struct {
		Checkpoints []struct{ Step string }
		Forks       []struct{ ID string }
	}{}
	p.mustJSON(&shown, "executions", "show", started.ID)
	step := ""
	for _, c := range shown.Checkpoints {
		if strings.Contains(c.Step, "news") && step == "" {
			step = c.Step
		}
	}
	var forked struct {
		ID         string
		ForkedFrom string `json:"forked_from"`
	}
	p.mustJSON(&forked, "executions", "fork", started.ID, "--from", step)
	p.waits(forked.ID)
	p.mustJSON(&shown, "executions", "show", started.ID)
	if len(shown.Forks) != 1 || shown.Forks[0].ID != forked.ID || forked.ForkedFrom != started.ID {
		t.Errorf("forks %+v, forked %+v", shown.Forks, forked)
	}
	contains(t, p.must("executions", "cancel", forked.ID, "--reason", "enough"), "cancelled")
	contains(t, p.must("executions", "retry", forked.ID), "after all that was recorded")
}

func TestWaitingForTheEndOfAnExecution(t *testing.T) {
	t.Parallel()
	p := greeter(t)
	waiter := p.start("executions", "start", "greet", "--input", `{"name": "Eva"}`, "--wait")
	id := waiter.find(t, `started ([0-9a-f-]{36}), trace fl_`)
	waiter.find(t, `waits for event news-Eva`)
	p.must("executions", "event", "EVENT_COMPLETED", "news-Eva")
	if code := <-waiter.ended; code != 0 {
		t.Errorf("exit %d: %s", code, waiter.err.String())
	}
	contains(t, waiter.out.String(), "completed hello Eva and goodbye")
	contains(t, p.must("executions", "show", id), "completed")
	failing := p.start("executions", "start", "greet", "--input", `{"name": "Uwe"}`, "--wait", "--json")
	pgtest.Eventually(t, 2*pgWait, func() bool { return strings.Contains(p.must("executions", "waiting"), "news-Uwe") }, "it waits")
	var page struct{ Items []struct{ ID string } }
	p.mustJSON(&page, "executions", "ls", "--status", "waiting")
	p.must("executions", "cancel", page.Items[0].ID, "--reason", "not today")
	if code := <-failing.ended; code != 1 {
		t.Errorf("exit %d", code)
	}
	var fault struct {
		Error struct{ Code, Message, Hint string }
	}
	if err := json.Unmarshal([]byte(failing.err.String()), &fault); err != nil || !strings.Contains(fault.Error.Message, "not today") ||
		!strings.Contains(fault.Error.Hint, "agent executions retry") {
		t.Errorf("stderr %q", failing.err.String())
	}
}

func TestWhatCannotBeStarted(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	for _, c := range []struct {
		code int
		says string
		args []string
	}{
		{2, "agent heartbeat", []string{"start", "heartbeat"}},
		{2, "agent flows ls", []string{"start", "greeet"}},
		{2, "is not JSON", []string{"start", "external", "--input", "{"}},
		{2, "cannot be found", []string{"start", "external", "--input", "@nothing.json"}},
		{2, "worker outside", []string{"start", "external", "--on-lost", "resume"}},
		{2, "1 (first)", []string{"start", "external", "--priority", "9"}},
		{2, "printable", []string{"start", "external", "--thread", "a\nb"}},
		{2, "comes from outside", []string{"event", "AGENT_COMPLETED", "x"}},
		{2, "the content is needed", []string{"event", "MESSAGE_RECEIVED", "x"}},
		{1, "agent threads ls", []string{"event", "MESSAGE_RECEIVED", "x", "--data", `{"content": "hi"}`}},
		{1, "agent executions ls", []string{"fork", "0198c0de-0000-7000-8000-000000000000"}},
		{1, "agent executions ls", []string{"retry", "0198c0de-0000-7000-8000-000000000000"}},
		{1, "agent executions ls", []string{"replay", "0198c0de-0000-7000-8000-000000000000"}},
	} {
		got := p.run(append([]string{"executions"}, c.args...)...)
		if c.says == "cannot be found" {
			c.says = "no such file"
		}
		if got.code != c.code || !strings.Contains(got.err, c.says) || got.out != "" {
			t.Errorf("agent executions %v: exit %d, stderr %q, want %d with %q", c.args, got.code, got.err, c.code, c.says)
		}
	}
	var x struct{ ID string }
	p.mustJSON(&x, "executions", "start", "external:import", "--priority", "1", "--thread", "begun")
	for _, args := range [][]string{{"memory", "set", "k", "1", "--category", "a\xff"}, {"executions", "start", "external:import", "--key", "\xff"}} {
		if got := p.run(args...); got.code != 2 || !strings.Contains(got.err, "UTF-8") {
			t.Errorf("%q: exit %d, %s", args, got.code, got.err)
		}
	}
	if got := p.run("executions", "start", "external:import", "--input", `{"name": "a\u0000b"}`); got.code != 2 ||
		!strings.Contains(got.err, `leave \u0000 out`) {
		t.Errorf("a NUL in the input: %d %s", got.code, got.err)
	}
	contains(t, p.must("threads", "show", "begun"), "begun  chat")
	contains(t, p.must("executions", "show", x.ID), "external:import", "pending")
	if got := p.run("executions", "replay", x.ID); got.code != 1 || !strings.Contains(got.err, "worker outside") {
		t.Errorf("replay of a worker's run: %d %q", got.code, got.err)
	}
	if got := p.run("executions", "retry", x.ID); got.code != 1 || !strings.Contains(got.err, "fork "+x.ID) {
		t.Errorf("retry of what has not failed: %d %q", got.code, got.err)
	}
}

// A heartbeat that did all kinds of work is replayed, without a model.
func TestAHeartbeatIsReplayed(t *testing.T) {
	t.Parallel()
	p := used(t)
	for range 2 {
		p.must("heartbeat")
	}
	var page struct{ Items []struct{ ID string } }
	p.mustJSON(&page, "executions", "ls", "--flow", "heartbeat")
	if len(page.Items) != 3 {
		t.Fatalf("%d heartbeats", len(page.Items))
	}
	for _, x := range page.Items {
		contains(t, p.must("executions", "replay", x.ID), "completed of heartbeat", "equal")
	}
}

func TestFlowsAndRequestsAreListed(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	if got := p.must("flows", "ls"); got != "no flows; `agent apply DIR` brings some\n" {
		t.Errorf("flows: %q", got)
	}
	if got := p.must("requests", "ls"); got != "nothing was asked of anybody\n" {
		t.Errorf("requests: %q", got)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "greet.yaml")
	if err := os.WriteFile(path, []byte(strings.Replace(greeting, "flow:greet", "flow:gret", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := p.run("apply", dir); got.code != 2 || !strings.Contains(got.err, `unknown flow "gret"; did you mean "greet"?`) {
		t.Errorf("apply: %d %q", got.code, got.err)
	}
	if err := os.WriteFile(path, []byte(greeting), 0o600); err != nil {
		t.Fatal(err)
	}
	p.must("apply", dir)
	contains(t, p.must("flows", "ls"), "greet", "data", "Says hello")
	shown := p.must("flows", "show", "greet")
	contains(t, shown, "kind: flow", "name: greet", "actionType: wait_for_event")
	if err := os.WriteFile(path, []byte(shown), 0o600); err != nil {
		t.Fatal(err)
	}
	contains(t, p.must("apply", dir), "skill", "remove")
	if got := p.run("flows", "show", "nothing"); got.code != 1 || !strings.Contains(got.err, "agent flows ls") {
		t.Errorf("show: %d %q", got.code, got.err)
	}
	var schema map[string]any
	if err := json.Unmarshal([]byte(p.must("flows", "schema")), &schema); err != nil || schema["$schema"] == nil {
		t.Errorf("schema: %v", err)
	}
}
