package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

const evalWorkspace = `
kind: skill
name: check_order
description: Look an order up.
scope: both
parameters: {type: object, properties: {order: {type: integer}}, required: [order]}
handler: "sql:"
config: {query: "select @order::int as found"}
---
kind: eval
name: orders
trials: 2
budget: {cost_usd: 0.1}
cases:
  - name: not due
    messages: [{user: "order 7?"}]
    skills:
      check_order: [{when: {order: 7}, returns: {due: false}}]
    expect:
      - called: {skill: check_order, args: {order: 7}, times: 1}
      - answer: {contains: not due}
`

// The exit code means passed, failed or undecided. The report has the reason, and links to details.
func TestEvalCommands(t *testing.T) {
	t.Parallel()
	var due bool
	server := modeltest.New(t)
	server.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		switch last := req.Messages[len(req.Messages)-1]; {
		case last.Role != "tool":
			return modeltest.ToolCall("check_order", `{"order":7}`)
		case due:
			return modeltest.Text("It is paid.").WithUsage(100, 10, 0)
		}
		return modeltest.Text("It is not due.").WithUsage(1000, 10, 0)
	})
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), "OPENAI_API_KEY=k", "AGENT_MODEL=gpt-4o-mini",
		"AGENT_LOG_LEVEL=error")
	assert.Contains(t, p.must("eval", "ls"), "no eval; declare one")
	p.mustFail(2, "--trials must be 1 to 100", "eval", "run", "--trials", "0")
	p.mustFail(2, "x.xml", "eval", "run", "--junit", "/nowhere/x.xml")
	p.mustFail(1, "there is no eval; declare one as kind: eval", "eval", "run")
	dir := t.TempDir()
	path := filepath.Join(dir, "a.yaml")
	testkit.WriteFile(t, path, evalWorkspace)
	p.must("apply", dir)
	passed := p.must("eval", "run")
	assert.Contains(t, passed, "not due  2/2", "0.34–1.00", "1.00 (k=2)", "passed, $0.", "4, 2,4")
	assert.Contains(t, p.must("eval", "ls"), "orders", "passed")
	for _, command := range []string{"run", "ls", "labels"} {
		p.mustFail(1, `there is no eval "ordrs"; see agent eval ls`, "eval", command, "ordrs")
	}
	p.mustFail(2, "the model has no price", "eval", "run", "--model", "no-such-model")
	calls := len(server.Requests())
	p.mustFail(2, `"other" is not the id (uuid) of a run; see agent eval ls --runs`, "eval", "run", "--against", "other")
	assert.Equal(t, calls, len(server.Requests()))

	undecided := p.run("eval", "run", "orders", "orders", "--against", "last")
	assert.Truef(t, undecided.code == 3 && strings.Count(undecided.out, "orders version 1, agent ") == 2,
		"exit %d: %s%s", undecided.code, undecided.out, undecided.err)
	assert.Contains(t, undecided.out, "undecided: +0.00 (-1.00 to 1.00) against run ")
	assert.Contains(t, undecided.out, " of orders version 1, agent agent version 0, model gpt-4o-mini")
	due = true
	junit := filepath.Join(dir, "evals.xml")
	failed := p.run("eval", "run", "--junit", junit)
	assert.Truef(t, failed.code == 1 && strings.Contains(failed.out, `expect[1]: answer lacks "not due"`),
		"exit %d: %s%s", failed.code, failed.out, failed.err)
	text, err := os.ReadFile(junit)
	require.NoError(t, err)
	assert.Contains(t, string(text), `tests="2" failures="2" errors="0" skipped="0"`, `name="not due #2"`)
	id := regexp.MustCompile(`run ([0-9a-f-]{36})`).FindStringSubmatch(failed.out)[1]
	p.mustFail(1, "is no counterfactual; see agent eval show", "eval", "counterfactual", "--resume", id)
	p.mustFail(2, "leave out --model", "eval", "run", "--resume", id, "--model", "x")
	p.mustFail(2, "leave out the suites", "eval", "run", "--resume", id, "orders")
	p.mustFail(2, "--prune needs --candidate", "eval", "counterfactual", "--prune", "--model", "x")
	shown := p.must("eval", "show", id)
	assert.Contains(t, shown, "not due  2      fail", "ev_")
	assert.Contains(t, p.must("eval", "labels"), "no label; agent eval label")
	assert.Contains(t, p.must("eval", "label", id, "not due", "bad", "--trial", "2", "--note", "it is not"),
		`trial 2 of "not due": bad`)
	assert.Contains(t, p.must("eval", "labels", "orders"), "orders  not due  2      bad    root", "it is not")
	assert.Equal(t, `{"answer":"It is paid.","pass":false}`+"\n", p.must("eval", "labels", "--jsonl"))
	p.mustFail(1, `has no trial 3 of "not due"; see agent eval show`,
		"eval", "label", id, "not due", "good", "--trial", "3")
	p.mustFail(2, "a label is good, bad or none", "eval", "label", id, "not due", "fine")
	for _, trial := range []string{"-5", "0", "3000000000"} {
		p.mustFail(2, "a trial has a number from 1 to 100", "eval", "label", id, "not due", "good", "--trial", trial)
	}
	p.mustFail(2, "--agent-version must be 1 or more", "eval", "shadow", "--agent-version", "-1")
	p.mustFail(2, "--share must be more than 0", "eval", "shadow", "--model", "x", "--share", "NaN")
	for flag, value := range map[string]string{"--margin": "NaN", "--budget": "Inf"} {
		p.mustFail(2, "--margin must be from 0", "eval", "counterfactual", "--model", "x", flag, value)
	}
	p.must("eval", "label", id, "not due", "none", "--trial", "2")
	assert.Equal(t, "", p.must("eval", "labels", "--jsonl"))
	traceID := regexp.MustCompile(`ev_\w+`).FindString(shown)
	made := p.must("eval", "add", traceID, "--name", "again")
	assert.Contains(t, made, "  - name: again", "- user: order 7?", "check_order:", "due: false", "in_order:")
	assert.Contains(t, p.must("eval", "add", traceID, "--name", "again", "--to", path), `added "again"`)
	assert.Contains(t, p.must("apply", dir), "~ eval orders")
	p.mustFail(2, "there is no file nowhere.yaml", "eval", "add", traceID, "--to", "nowhere.yaml")
	p.mustFail(2, "--name must have 1 to 100 bytes", "eval", "add", traceID, "--name", strings.Repeat("x", 101))
	p.mustFail(1, `the suite has a case "again" already`, "eval", "add", traceID, "--name", "again", "--to", path)
}

// A run is stored when its trials begin, so no run of the command waits as interrupted. An error of a later suite
// starts none. Suites run in the given order.
func TestEvalRunStoresEachRunWhenItBegins(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := pgtest.Pool(t, url, postgres.Options{})
	server := modeltest.New(t)
	server.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("It is not due.") })
	p := newProgram(t, url, "OPENAI_BASE_URL="+server.URL(), "OPENAI_API_KEY=k", "AGENT_MODEL=unpriced")
	first := strings.Replace(evalWorkspace, "budget: {cost_usd: 0.1}\n", "", 1)
	_, suite, _ := strings.Cut(evalWorkspace, "---\n")
	second := strings.Replace(suite, "name: orders", "name: second", 1)
	p.must("apply", writeFolder(t, map[string]string{"a.yaml": first, "b.yaml": second}))
	p.mustFail(2, "the model has no price", "eval", "run")
	pgtest.Equal(t, pool, 0, `select count(*)::int from agent_eval_runs`)
	p.must("apply", writeFolder(t, map[string]string{
		"a.yaml": first, "b.yaml": strings.Replace(second, "budget: {cost_usd: 0.1}\n", "", 1),
	}))
	p.run("eval", "run", "second", "orders", "second")
	pgtest.Equal(t, pool, true, `
		select max(created_at) > min(finished_at) and count(*) = 2 from agent_eval_runs where finished_at is not null`)
	pgtest.Equal(t, pool, "second orders", `select string_agg(suite, ' ' order by created_at) from agent_eval_runs`)
}

// An error of a run is not a failed trial. The command prints how to continue the run, and writes the known results.
func TestEvalRunAfterError(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := pgtest.Pool(t, url, postgres.Options{})
	server := modeltest.New(t)
	server.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("It is not due.") })
	p := newProgram(t, url, "OPENAI_BASE_URL="+server.URL(), "OPENAI_API_KEY=k", "AGENT_MODEL=gpt-4o-mini",
		"AGENT_LOG_LEVEL=error")
	_, suite, _ := strings.Cut(evalWorkspace, "---\n")
	dir := writeFolder(t, map[string]string{
		"a.yaml": evalWorkspace, "b.yaml": strings.Replace(suite, "name: orders", "name: second", 1),
	})
	p.must("apply", dir)
	pgtest.Exec(t, pool, `
		create function refuse() returns trigger language plpgsql as $$ begin raise 'out of order'; end $$`)
	pgtest.Exec(t, pool, `
		create trigger refuse before insert on agent_executions for each row when (new.flow like 'eval:%')
		execute function refuse()`)
	file := filepath.Join(dir, "evals.xml")
	stopped := p.run("eval", "run", "--junit", file)
	assert.Truef(t, stopped.code == 3 && stopped.out == "", "exit %d: %s%s", stopped.code, stopped.out, stopped.err)
	assert.Contains(t, stopped.err, "has not ended; agent eval run --resume ", "not begun: 1 suite", "out of order")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Contains(t, string(text), `<testsuite name="orders" tests="2" failures="0" errors="0" skipped="2">`)
	p.mustFail(1, "there is no eval", "eval", "run", "none", "--junit", file)
	text, err = os.ReadFile(file)
	require.NoError(t, err)
	assert.Contains(t, string(text), "<testsuites></testsuites>")
	pgtest.Exec(t, pool, `drop trigger refuse on agent_executions`)
	ended := p.run("eval", "run", "second", "--against", "last")
	assert.Truef(t, ended.code == 1 && strings.Contains(ended.err, "no earlier run to compare with") &&
		!strings.Contains(ended.err, "has not ended"), "exit %d: %s", ended.code, ended.err)
}

// During a pause no trial begins, so the command stores no run.
func TestEvalRunWhilePaused(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := pgtest.Pool(t, url, postgres.Options{})
	p := newProgram(t, url, "AGENT_LOG_LEVEL=error")
	p.must("apply", writeFolder(t, map[string]string{
		"a.yaml": strings.Replace(evalWorkspace, "{cost_usd: 0.1}", "{timeout: 1s}", 1),
	}))
	p.must("pause", "--reason", "prices look wrong")
	p.mustFail(3, "prices look wrong; run agent resume to end the pause", "eval", "run")
	p.mustFail(3, "run agent resume to end the pause", "eval", "counterfactual", "--model", "offline")
	pgtest.Equal(t, pool, 0, `select count(*)::int from agent_eval_runs`)
	p.must("resume")
	assert.Contains(t, p.run("eval", "run").out, "orders version 1")
}

// An outage becomes its own suite, here and through a server. Apply takes its file unchanged.
func TestEvalAddFromOutage(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url, "AGENT_LOG_LEVEL=error")
	dir := t.TempDir()
	testkit.WriteFile(t, filepath.Join(dir, "a.yaml"), evalWorkspace)
	p.must("apply", dir)
	add := []string{"eval", "add", "--outage", "check_order", "--to", filepath.Join(dir, "outages.yaml"), "--name"}
	p.mustFail(1, "self-heal has not taken check_order out of service", append(add, "first")...)
	pgtest.Exec(t, pgtest.Pool(t, url, postgres.Options{}), `
		insert into agent_activity (trace_id, surface, kind, skill_name, skill_id, status, input, error_class, error_message)
		select 'op_01JD3V7K8ZQ6W2M5T9X4C1B0A' || n, 'operate', 'call', 'check_order', s.id, 'error', '{"order": 7}',
		       'timeout', 'too slow'
		  from generate_series(1, 3) n, agent_skills s where s.name = 'check_order'`)
	assert.Contains(t, p.must("selfheal"), "check_order: 3 consecutive failures", "agent eval add --outage check_order")
	assert.Contains(t, p.must(append(add, "first")...), `added "first"`)
	remote, _ := p.remote()
	assert.Contains(t, remote.must(append(add, "second")...), `added "second"`)
	p.mustFail(1, `the suite has a case "second" already`, append(add, "second")...)
	remote.mustFail(2, "there is no file none.jsonl", "selfheal", "report", "--set", "none.jsonl")
	p.must("apply", dir)
	assert.Contains(t, p.must("eval", "ls"), "selfheal", "2")
}
