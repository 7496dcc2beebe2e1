package main

import (
	"encoding/json"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/threads"
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

// newGreeter returns a program whose database has the flow greet, and a process that runs it.
func newGreeter(t *testing.T) program {
	t.Helper()
	dir := t.TempDir()
	testkit.WriteFile(t, filepath.Join(dir, "greet.yaml"), greeting)
	p := newProgram(t, pgtest.URL(t), "AGENT_ADMIN_TOKEN=the-token-of-the-admin-0123456789", "AGENT_LISTEN=127.0.0.1:0",
		"AGENT_HEARTBEAT_CRON=0 0 1 1 *",
		"AGENT_LOG_LEVEL=info")
	p.must("apply", dir)
	served := p.start("serve")
	served.find(t, `(listening|serving|serve)`)
	p.environ = append(p.environ, "AGENT_LOG_LEVEL=error")
	return p
}

// waitWaiting waits until an execution waits.
func (p program) waitWaiting(id string) {
	p.t.Helper()
	pgtest.EventuallyWithin(p.t, 2*pgtest.Timeout, func() bool {
		var x struct{ Status string }
		p.mustJSON(&x, "executions", "show", id)
		return x.Status == "waiting"
	}, "execution waits")
}

func TestExecutionFromStartToReplay(t *testing.T) {
	t.Parallel()
	p := newGreeter(t)
	var started struct {
		ID, Status string
		TraceID    string `json:"trace_id"`
		Created    bool
	}
	p.mustJSON(&started, "executions", "start", "greet", "--input", `{"name": "Ana"}`, "--key", "ana",
		"--label", "order=A-1001")
	p.mustFail(2, "order is there twice", "executions", "start", "greet", "--label", "order=A-1", "--label", "order=A-2")
	p.mustFail(2, "order is there twice", "executions", "start", "greet", "--label", "order=A-1,order=A-2")
	assert.Truef(t, started.Created && strings.HasPrefix(started.TraceID, "fl_"), "started %+v", started)
	assert.Contains(t, p.must("executions", "start", "greet", "--input", `{"name": "Ana"}`, "--key", "ana"),
		"was already started", started.ID)
	p.mustFail(1, `idempotency key "ana" already started execution `+started.ID+" with other input; use another key",
		"executions", "start", "greet", "--input", `{"name": "Eve"}`, "--key", "ana")
	p.mustFail(1, `idempotency key "ana" already started execution `+started.ID+" of flow greet: use another key",
		"executions", "start", "external:greet", "--key", "ana")
	p.waitWaiting(started.ID)
	assert.Contains(t, p.must("executions", "ls", "--label", "A-1001"), started.ID)
	assert.Contains(t, p.must("executions", "ls", "--label", "shop=A-1001"), "no matching executions")
	assert.Contains(t, p.must("executions", "waiting"), started.ID, "news-Ana")
	assert.Contains(t, p.must("executions", "status"), "waiting  1")
	assert.Equal(t, "no stuck executions\n", p.must("executions", "stuck"))
	assert.Contains(t, p.must("executions", "show", started.ID), "waits for     event",
		"key           news-Ana", "version       1", "label         order=A-1001")
	assert.Contains(t, p.must("executions", "replay", started.ID), "the record ends at", "equal")
	var event struct {
		EventID string `json:"event_id"`
		Resumed []string
	}
	p.mustJSON(&event, "executions", "event", "EVENT_COMPLETED", "news-Ana", "--id", "n1")
	assert.Truef(t, len(event.Resumed) == 1 && event.Resumed[0] == started.ID, "event %+v", event)
	p.mustFail(2, "give each event its own id", "executions", "event", "EVENT_COMPLETED", "news-Eve", "--id", "n1")
	pgtest.EventuallyWithin(t, 2*pgtest.Timeout, func() bool {
		return strings.Contains(p.must("executions", "show", started.ID), "hello Ana and goodbye")
	}, "it ends")
	var replayed struct {
		Equal        bool
		Digest       string
		ReplayDigest string `json:"replay_digest"`
	}
	p.mustJSON(&replayed, "executions", "replay", started.ID)
	assert.Truef(t, replayed.Equal && replayed.Digest != "" && replayed.Digest == replayed.ReplayDigest,
		"replayed %+v", replayed)
	// A fork from the wait step waits again.
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
	p.waitWaiting(forked.ID)
	p.mustJSON(&shown, "executions", "show", started.ID)
	assert.Truef(t, len(shown.Forks) == 1 && shown.Forks[0].ID == forked.ID && forked.ForkedFrom == started.ID,
		"forks %+v, forked %+v", shown.Forks, forked)
	p.environ = append(p.environ, "AGENT_LOG_LEVEL=info")
	cancelled := p.run("executions", "cancel", forked.ID, "--reason", "enough")
	assert.Equal(t, "cancelled "+forked.ID+"\n", cancelled.out)
	assert.Contains(t, cancelled.err, "execution completed", "event emitted", "locks released")
	assert.Equal(t, forked.ID+" had already been cancelled by admin: enough\n",
		p.must("executions", "cancel", forked.ID, "--reason", "another"))
	assert.Contains(t, p.must("executions", "show", forked.ID), "cancelled", "admin", "enough")
	assert.Contains(t, p.must("executions", "retry", forked.ID), "after the last checkpoint")
}

// Steps of a loop show their round, in the trace and on its page.
func TestLoopStepsShowTheirRound(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	testkit.WriteFile(t, filepath.Join(dir, "climb.yaml"), `kind: flow
name: climb
variables: {n: 0}
actions:
  - {id: before, actionType: set, parameters: {variables: {text: x}}}
  - id: loop
    actionType: while
    parameters:
      condition: n < 3
      actions:
        - {id: up, actionType: set, parameters: {expressions: {n: n + 1}}}
        - {id: pause, actionType: delay, when: n == 3, parameters: {duration: 1ms}}
        - id: items
          actionType: for_each
          when: n == 3
          parameters: {items: [a, b], actions: [{id: end, actionType: end, when: index == 1}]}
`)
	p := newProgram(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=0 0 1 1 *")
	p.must("apply", dir)
	server := program{t, append(slices.Clone(p.environ), "AGENT_LOG_LEVEL=info")}.start("serve")
	base := server.find(t, `msg=serving listen=(\S+)`)
	var started struct {
		TraceID string `json:"trace_id"`
	}
	p.mustJSON(&started, "executions", "start", "climb", "--wait")
	shown := p.must("trace", started.TraceID)
	rounds := regexp.MustCompile(`(set|delay|end|while|for_each)(, round [0-9.]+)? `).FindAllString(shown, -1)
	assert.NoDiff(t, []string{
		"set ", "while ", "set, round 1 ", "delay, round 1 ", "for_each, round 1 ", "set, round 2 ", "delay, round 2 ",
		"for_each, round 2 ", "set, round 3 ", "delay, round 3 ", "for_each, round 3 ", "end, round 3.1 ", "end, round 3.2 ",
	}, rounds)
	for _, view := range []string{"", "?view=table"} {
		page := send(t.Context(), "GET", base+"/traces/"+started.TraceID+view,
			strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="), "")
		assert.Contains(t, page.body,
			`kind-phase">phase, round 1<`, `kind-phase">phase, round 3<`, `kind-phase">phase, round 3.2<`)
	}
}

func TestStartWait(t *testing.T) {
	t.Parallel()
	p := newGreeter(t)
	waiter := p.start("executions", "start", "greet", "--input", `{"name": "Eva"}`, "--wait")
	id := waiter.find(t, `started ([0-9a-f-]{36}), trace fl_`)
	waiter.find(t, `waits for event news-Eva`)
	p.must("executions", "event", "EVENT_COMPLETED", "news-Eva")
	assert.Equal(t, 0, <-waiter.ended, waiter.err.String())
	assert.Contains(t, waiter.out.String(), "completed hello Eva and goodbye")
	assert.Contains(t, p.must("executions", "show", id), "completed")
	failing := p.start("executions", "start", "greet", "--input", `{"name": "Uwe"}`, "--wait", "--json")
	pgtest.EventuallyWithin(t, 2*pgtest.Timeout, func() bool {
		return strings.Contains(p.must("executions", "waiting"), "news-Uwe")
	},
		"it waits")
	var page struct{ Items []struct{ ID string } }
	p.mustJSON(&page, "executions", "ls", "--status", "waiting")
	p.must("executions", "cancel", page.Items[0].ID, "--reason", "not today")
	assert.Equal(t, 1, <-failing.ended)
	var fault struct {
		Error struct{ Code, Message, Hint string }
	}
	err := json.Unmarshal([]byte(failing.err.String()), &fault)
	assert.Truef(t, err == nil && strings.Contains(fault.Error.Message, "not today") &&
		strings.Contains(fault.Error.Hint, "agent executions retry"), "stderr %q", failing.err.String())
}

// With --json, nothing else names the execution.
func TestBrokenWaitNamesExecution(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "postgres://127.0.0.1:1/nowhere")
	require.NoError(t, err)
	defer pool.Close()
	c := &cli{out: io.Discard, err: io.Discard, json: true}
	s := &session{Database: app.Database{Pool: pool}}
	err = c.waitForEnd(t.Context(), s, executions.Execution{ID: "the-id"}, "started")
	assert.ErrorContains(t, err, "wait for execution the-id: ")
}

// A flow that sends messages cannot start without a thread: not by the command, here or on a server, nor over HTTP.
func TestConversationFlowNeedsThread(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	dir := t.TempDir()
	testkit.WriteFile(t, filepath.Join(dir, "talks.yaml"), `kind: flow
name: talks
actions:
  - {actionType: delay, parameters: {duration: 1ms}}
  - {actionType: send_message, parameters: {message: hello}}
`)
	p.must("apply", dir)
	remote, _ := p.remote()
	for _, one := range []program{p, remote} {
		one.mustFail(2, "the flow needs a thread, and none is named; name one with --thread ID",
			"executions", "start", "talks")
	}
	base, admin := strings.TrimPrefix(remote.environ[0], "AGENT_SERVER="), strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN=")
	got := send(t.Context(), "POST", base+"/v1/executions", admin, `{"flow": "talks"}`)
	assert.Equal(t, 422, got.status, got.body)
	assert.Contains(t, got.body, "thread_id is missing", "the flow needs a thread")
	assert.Contains(t, p.must("executions", "ls"), "no executions")
	assert.Contains(t, p.must("executions", "start", "talks", "--thread", "ana", "--wait"), "completed")
	got = send(t.Context(), "POST", base+"/v1/executions", admin, `{"flow": "talks", "thread_id": "eva"}`)
	assert.Equal(t, 201, got.status, got.body)
}

// A replay of a turn reads its messages and the version of its agent, which do not change, and nothing else.
func TestTurnsReplay(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url, token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info", "AGENT_CHAT_KEY="+chatKey)
	p.must("apply", writeFolder(t, map[string]string{"a.yaml": "kind: agent\nname: a\ndefault: true\ninstructions: Be brief.\n"}))
	base := p.start("serve").find(t, `msg=serving listen=(\S+)`)
	p.must("operate", "Which skills are there?")
	p.must("operate", "And which objectives?")
	for _, text := range []string{"Hello.", "What can you do?"} {
		got := send(t.Context(), "POST", base+"/v1/chat/completions", chatKey,
			`{"model": "agent", "user": "eva", "messages": [{"role": "user", "content": "`+text+`"}]}`)
		require.Equal(t, 200, got.status, got.body)
	}
	turns := pgtest.Value[[]string](t, connect(t, url), `
		select array_agg(id::text) from agent_executions where flow in ('operate', 'chat') and status = 'completed'`)
	require.Equal(t, 4, len(turns))
	for _, id := range turns {
		assert.Contains(t, p.must("executions", "replay", id), "\nequal\n")
	}
}

// A person's rejection ends a run. It does not count as a failure of its flow or skill.
func TestRejectedRunDoesNotDegradeVerdict(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p, pool := newProgram(t, url), connect(t, url)
	dir := t.TempDir()
	testkit.WriteFile(t, filepath.Join(dir, "flows.yaml"), `kind: skill
name: wipe
description: wipes
handler: "sql:select 1 as n"
trust: approve
---
kind: flow
name: asks
actions:
  - {actionType: for_each, parameters: {items: [1], actions: [{id: w, actionType: skill, parameters: {name: wipe}}]}}
---
kind: flow
name: delegates
actions:
  - {id: child, actionType: trigger_agent, parameters: {flow: asks, onFailure: fail}}
---
kind: flow
name: errs
actions:
  - {id: w, actionType: skill, parameters: {name: wipe, onRejection: continue}}
  - {actionType: fail, parameters: {message: no route}}
`)
	p.must("apply", dir)
	remote, _ := p.remote()
	verdict := func() string {
		return send(t.Context(), "GET", strings.TrimPrefix(remote.environ[0], "AGENT_SERVER=")+"/v1/monitor/verdict",
			strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="), "").body
	}
	reject := func(flow string) {
		t.Helper()
		for range 3 {
			run := p.start("executions", "start", flow, "--wait")
			waitQuery(t, pool, `select count(*) = 1 from agent_approvals where status = 'pending'`)
			p.must("approvals", "reject", pgtest.Value[string](t, pool,
				`select id::text from agent_approvals where status = 'pending'`), "--reason", "not today")
			require.Equal(t, 1, <-run.ended, run.err.String())
		}
	}
	reject("delegates") // and asks
	pgtest.Equal(t, pool, 6, `select count(*) from agent_executions where status = 'failed'`)
	assert.Contains(t, verdict(), `"state":"working"`, `"why":[]`)
	pgtest.Equal(t, pool, 0, `select calls + streak from agent_skill_health where skill = 'wipe'`)
	reject("errs") // continues after the rejection, and fails
	got := verdict()
	assert.Contains(t, got, `"state":"degraded"`, "flow errs failing")
	assert.Truef(t, !strings.Contains(got, "asks") && !strings.Contains(got, "delegates"), "the verdict: %s", got)
	assert.Contains(t, p.run("doctor").out, "WARN verdict        degraded: flow errs failing\n", "flow errs: ", "no route")
}

// A wait may name a conversation in another system. The message for a thread is stored there, as over HTTP.
func TestMessageEventsWithAndWithoutThread(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p, db := newProgram(t, url), connect(t, url)
	p.must("executions", "start", "external:import", "--thread", "ana")
	for key, data := range map[string]string{
		"ana": `{"text": "yes"}`, "crm-77": `{"content": "yes"}`, "crm-78": `{}`,
	} {
		assert.Contains(t, p.must("executions", "event", "MESSAGE_RECEIVED", key, "--data", data), "no waiter")
	}
	p.mustFail(2, "is longer than", "executions", "event", "MESSAGE_RECEIVED", "ana",
		"--data", `{"content": "`+strings.Repeat("x", threads.MaxContent+1)+`"}`)
	pgtest.Equal(t, db, 3, `select count(*) from agent_events`)
	pgtest.Equal(t, db, "ana user received yes", `
		select string_agg(concat_ws(' ', thread_id, role, status, content), '; ') from agent_messages`)
}

func TestInvalidExecutionCommands(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	for _, c := range []struct {
		code int
		says string
		args []string
	}{
		{2, "agent heartbeat", []string{"start", "heartbeat"}},
		{1, "agent flows ls", []string{"start", "greeet"}},
		{1, "agent flows ls", []string{"start", "external:"}},
		{1, "agent flows ls", []string{"start", "external:my job"}},
		{2, "is not JSON", []string{"start", "external", "--input", "{"}},
		{2, "cannot be found", []string{"start", "external", "--input", "@nothing.json"}},
		{2, "external executions accept", []string{"start", "external", "--on-lost", "resume"}},
		{2, "use resume or fail", []string{"start", "report", "--on-lost", "hand_on"}},
		{2, "1 (first)", []string{"start", "external", "--priority", "9"}},
		{2, "printable", []string{"start", "external", "--thread", "a\nb"}},
		{2, "is no external event", []string{"event", "AGENT_COMPLETED", "x"}},
		{2, "is an object such as", []string{"event", "MESSAGE_RECEIVED", "x", "--data", `"hi"`}},
		{1, "agent executions ls", []string{"fork", "0198c0de-0000-7000-8000-000000000000"}},
		{1, "agent executions ls", []string{"retry", "0198c0de-0000-7000-8000-000000000000"}},
		{1, "agent executions ls", []string{"replay", "0198c0de-0000-7000-8000-000000000000"}},
	} {
		got := p.run(append([]string{"executions"}, c.args...)...)
		if c.says == "cannot be found" {
			c.says = "no such file"
		}
		assert.Truef(t, got.code == c.code && strings.Contains(got.err, c.says) && got.out == "",
			"agent executions %v: exit %d, stderr %q, want %d with %q", c.args, got.code, got.err, c.code, c.says)
	}
	var x struct{ ID string }
	p.mustJSON(&x, "executions", "start", "external:import", "--priority", "1", "--thread", "begun")
	for _, args := range [][]string{
		{"memory", "set", "k", "1", "--category", "a\xff"},
		{"executions", "start", "external:import", "--key", "\xff"},
	} {
		p.mustFail(2, "UTF-8", args...)
	}
	p.mustFail(2, `remove \u0000`, "executions", "start", "external:import", "--input", `{"name": "a\u0000b"}`)
	assert.Contains(t, p.must("threads", "show", "begun"), "begun  chat")
	assert.Contains(t, p.must("executions", "show", x.ID), "external:import", "pending")
	p.mustFail(1, "the program that ran it has the code", "executions", "replay", x.ID)
	p.mustFail(1, "fork "+x.ID, "executions", "retry", x.ID)
}

// The replay of a heartbeat with all kinds of work needs no model.
func TestReplayHeartbeat(t *testing.T) {
	t.Parallel()
	p := newUsedAgent(t)
	for range 2 {
		p.must("heartbeat")
	}
	var page struct{ Items []struct{ ID string } }
	p.mustJSON(&page, "executions", "ls", "--flow", "heartbeat")
	require.Equal(t, 3, len(page.Items))
	for _, x := range page.Items {
		assert.Contains(t, p.must("executions", "replay", x.ID), "completed of heartbeat", "equal")
	}
}
