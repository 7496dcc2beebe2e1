package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// A session idle in its transaction must not make an admin's command hang.
func TestChangesDoNotWaitForLock(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	p.must("apply", caretaker)
	p.must("objectives", "add", "tidy", "--goal", "less")
	p.must("memory", "set", "contact", "Ana")
	p.must("principals", "add", "anna")
	tx, err := connect(t, url).Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `set local idle_in_transaction_session_timeout = '30s'`) // a waiting command succeeds then
	pgtest.Exec(t, tx, `lock agent_skills, agent_automations, agent_objectives, agent_memory, agent_principals,
		agent_retention, agent_pauses, agent_threads in exclusive mode`)
	for _, command := range [][]string{
		{"skills", "disable", "table_sizes", "--reason", "it hurts"},
		{"skills", "call", "table_sizes"},
		{"automations", "disable", "broken on purpose"},
		{"automations", "run", "broken on purpose"},
		{"heartbeat"},
		{"apply", caretaker},
		{"objectives", "pause", "tidy"},
		{"memory", "set", "contact", "Bea"},
		{"selfheal"},
		{"principals", "role", "anna", "viewer"},
		{"retention", "set", "activity=90d"},
		{"pause", "--reason", "it hurts"},
		{"executions", "start", "external", "--thread", "reception"},
	} {
		p.mustFail(1, "another transaction of the database has locked the rows to write", command...)
		pgtest.Exec(t, tx, `select`) // restarts the idle time
	}
	require.NoError(t, tx.Rollback(t.Context()))
	p.must("skills", "disable", "table_sizes")
}

func TestSkillsDisableAndEnable(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	p.must("apply", caretaker)
	var changed struct {
		Skill, State string
		Changed      bool
		Restored     []string `json:"automations_restored"`
	}
	p.mustJSON(&changed, "skills", "disable", "connections", "--reason", "too slow")
	assert.Truef(t, changed.Skill == "connections" && changed.State == "disabled" && changed.Changed &&
		changed.Restored != nil, "got %+v", changed)
	assert.Equal(t, "connections was out of service already\n", p.must("skills", "disable", "connections"))
	assert.Contains(t, p.must("skills", "show", "connections"), "disabled by admin: too slow")
	assert.Contains(t, p.must("activity", "ls", "--skill", "disable_skill"), "op_", "success")
	p.must("apply", caretaker)
	assert.Contains(t, p.must("skills", "show", "connections"), "disabled by admin: too slow")
	assert.Equal(t, "connections is in service\n", p.must("skills", "enable", "connections"))
	for _, args := range [][]string{{"enable", "nope"}, {"disable", "nope"}, {"show", "nope"}, {"call", "nope"}} {
		got := p.run(append([]string{"skills"}, args...)...)
		assert.Truef(t, got.code == 1 && strings.HasSuffix(got.err, "see agent skills ls\n"),
			"agent skills %v: exit %d, stderr %q", args, got.code, got.err)
	}
}

func TestSkillsCall(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	p.must("apply", caretaker)
	assert.Contains(t, p.must("skills", "call", "table_sizes", "--args", `{"limit": 1}`), `"row_count": 1`)
	var called struct {
		Skill       string
		ExecutionID string `json:"execution_id"`
		TraceID     string `json:"trace_id"`
		Result      struct{ Rows []any }
	}
	p.mustJSON(&called, "skills", "call", "database_size")
	assert.Truef(t, len(called.Result.Rows) == 1 && strings.HasPrefix(called.TraceID, "op_"), "got %+v", called)
	assert.Contains(t, p.must("trace", called.TraceID), "database_size")
	assert.Contains(t, p.must("executions", "show", called.ExecutionID), "skill_call", "completed")
	for args, says := range map[string]string{
		`{"limit": 0}`: "/limit", `{"nope": 1}`: "nope", `[1]`: "object",
		`{`: "is not JSON",
	} {
		got := p.run("skills", "call", "table_sizes", "--args", args)
		assert.Truef(t, got.code == 2 && got.out == "" && strings.Contains(got.err, says),
			"--args %s: exit %d, stderr %q", args, got.code, got.err)
	}
	var runs struct{ Items []any }
	p.mustJSON(&runs, "executions", "ls")
	assert.Equal(t, 2, len(runs.Items))
}

// A call of a skill on trial decides the trial.
func TestSkillsCallOnTrial(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	p.must("apply", caretaker)
	db := connect(t, url)
	trial := func(name, sql string) {
		t.Helper()
		pgtest.Exec(t, db, `
			update agent_skills set enabled = false, disabled_by = 'self_heal', disabled_reason = 'it failed 3 times in a row',
			                        disabled_at = now(), trial_at = now(), config = case $2 when '' then config
			         else config || jsonb_build_object('query', $2::text) end where name = $1`, name, sql)
	}
	trial("database_size", "")
	got := p.run("skills", "call", "database_size")
	assert.Equal(t, 0, got.code)
	assert.Contains(t, got.err, "is on trial", "its next call decides", "it failed 3 times in a row",
		"skill database_size is back in service")
	trial("database_size", "select 1 / 0")
	got = p.run("skills", "call", "database_size")
	assert.Equal(t, exitFailed, got.code)
	assert.Contains(t, got.err, "is on trial", "failed its trial", "its cool-down restarts")
	assert.Contains(t, p.run("skills", "call", "database_size").err, "is disabled by self_heal: failed its trial")
}

func TestBuiltinsWithoutDeclaration(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	assert.Contains(t, p.must("skills", "call", "recall", "--args", `{"query": "sizes"}`), `"memories": []`)
	assert.Contains(t, p.must("skills", "call", "objectives_list"), `"objectives": []`)
	assert.Contains(t, p.must("skills", "call", "recent_activity", "--args", `{"skill": "recall"}`), `"status": "success"`)
	assert.Contains(t, p.must("skills", "ls"), "objectives_list", "recall", "recent_activity")
}

func TestApplyAcceptsBuiltins(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	dir := writeFolder(t, map[string]string{"x.yaml": "kind: skill\nname: mine\nhandler: builtin:recal\n"})
	got := p.run("apply", dir)
	assert.Equal(t, 2, got.code)
	assert.Contains(t, got.err, `/x.yaml:3:10: handler: unknown builtin "recal"; did you mean "recall"?`)
	dir = writeFolder(t, map[string]string{
		"x.yaml": "kind: automation\nname: z\ncron: \"0 * * * *\"\nskill: recall\narguments: {limit: 3}\n",
	})
	p.must("apply", dir)
}

func TestBuiltinReturnsAfterPrune(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	p.must("apply", writeFolder(t,
		map[string]string{"x.yaml": strings.Replace(goodSkill, "name: one", "name: recall", 1)}))
	assert.Contains(t, p.must("skills", "show", "recall"), "sql:")
	p.must("heartbeat")
	assert.Contains(t, p.must("skills", "show", "recall"), "sql:")
	p.must("apply", "--prune", writeFolder(t, map[string]string{"x.yaml": goodSkill}))
	assert.Contains(t, p.must("skills", "show", "recall"), "builtin:recall")
}

func TestAgentCommands(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	assert.Contains(t, p.must("agents", "ls"), "default", "0")
	assert.Contains(t, p.must("agents", "show", "agent"), "AGENT_TIMEZONE", "limits.tokens", "AGENT_MAX_TOKENS")
	p.mustFail(1, "agent agent has no document", "agents", "show", "agent", "--yaml")
	const sales = "kind: agent\nname: sales\ndefault: true\ndescription: Orders.\ninstructions: You are " +
		"Nora.\ntimezone: Europe/Madrid\n" +
		"limits: {tokens: 60000, day_usd: 0.00001}\n"
	const billing = "---\nkind: agent\nname: billing\nkeys: [shop]\nmemory: own\n" +
		"---\nkind: automation\nname: look\ncron: 0 9 1 1 *\nskill: objectives_list\n"
	dir := writeFolder(t, map[string]string{"a.yaml": sales + billing})
	p.must("apply", dir)
	p.must("apply", writeFolder(t, map[string]string{"a.yaml": sales + "effort: low\n" + billing}))
	assert.Contains(t, p.must("agents", "ls"), "sales", "default", "Orders.", "billing", "shop", "own")
	assert.Contains(t, p.must("agents", "show", "sales"), "version 2 of", "2 in all", "Europe/Madrid", "document",
		"60000", "0.00001", "You are Nora.")
	assert.Contains(t, p.must("agents", "diff", "sales"), "--- sales version 1", "+++ sales version 2", "+effort: low")
	assert.Contains(t, p.must("agents", "diff", "sales", "2", "2"), "no difference")
	p.must("apply", writeFolder(t, map[string]string{
		"a.yaml": p.must("agents", "show", "sales", "--version", "1", "--yaml") + billing,
	}))
	assert.Contains(t, p.must("agents", "diff", "sales", "1", "3"), "no difference")
	p.must("apply", writeFolder(t, map[string]string{"a.yaml": sales + "effort: low\n" + billing}))
	p.mustFail(2, "use a number from 1", "agents", "show", "sales", "--version", "0")
	assert.Contains(t, p.must("agents", "diff", "billing"), "+name: billing")
	var shown struct {
		Values []agents.Value
		Model  string
	}
	err := json.Unmarshal([]byte(p.must("agents", "show", "sales", "--json")), &shown)
	assert.Truef(t, err == nil && len(shown.Values) >= 15, "%d values, %v", len(shown.Values), err)
	p.must("heartbeat", "--agent", "billing")
	for _, list := range [][]string{{"executions", "ls"}, {"trace", "ls"}} {
		assert.Contains(t, p.must(append(list, "--agent", "billing")...), "hb_")
		assert.Contains(t, p.must(append(list, "--agent", "sales")...), "no matching ")
	}
	p.must("pause", "--reason", "x")
	assert.Contains(t, p.must("heartbeat", "--agent", "billing", "--json"), `"agent": "billing"`)
	p.must("resume")
	p.must("executions", "start", "external:sum")
	p.must("skills", "call", "objectives_list")
	p.must("automations", "run", "look")
	assert.Contains(t, p.must("executions", "ls", "--agent", "sales"), "external:sum", "skill_call", "automation")
	assert.Contains(t, p.must("threads", "ls", "--agent", "billing"), "no threads")
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"agents", "show", "nobody"}, 1, `there is no agent "nobody"; see agent agents ls`},
		{[]string{"agents", "diff", "agent"}, 1, `there is no document of an agent "agent"; see agent agents ls`},
		{[]string{"chat", "--agent", "nobody", "hello"}, 1, `find agent "nobody": no such agent; see agent agents ls`},
		{[]string{"agents", "show", "sales", "--version", "9"}, 1, "agent sales has no version 9: the latest is 4"},
		{[]string{"agents", "diff", "sales", "one"}, 2, `invalid version "one"`},
	} {
		got := p.run(c.args...)
		assert.Equal(t, c.code, got.code, c.args, got.err)
		assert.Contains(t, got.err, c.want)
	}
	p.must("apply", "--prune", writeFolder(t, map[string]string{"a.yaml": sales}))
	assert.Contains(t, p.run("agents", "show", "billing").err, "agent billing was removed; agent agents show billing "+
		"--version 1 shows its last version")
}

// A message that could not be stored leaves its files to the next one.
func TestChatKeepsFilesOfFailedMessage(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p, pool := newProgram(t, url), pgtest.Pool(t, url, postgres.Options{})
	pgtest.Exec(t, pool, `create sequence tries`)
	pgtest.Exec(t, pool, `create function refuse() returns trigger language plpgsql as $$ begin
		if new.role = 'user' and nextval('tries') = 1 then raise exception 'not now'; end if; return new; end $$`)
	pgtest.Exec(t, pool, `create trigger refuse before insert on agent_messages for each row execute function refuse()`)
	file := filepath.Join(t.TempDir(), "list.txt")
	require.NoError(t, os.WriteFile(file, []byte("tea"), 0o600))
	assert.Contains(t, p.onTerminal(t, "first\nsecond\n\x04", "chat", "--file", file), "not now")
	pgtest.Equal(t, pool, 1, `select count(*) from agent_documents where thread_id is not null`)
}

// The greeting precedes the first prompt of a new conversation only.
func TestChatGreeting(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	p.must("apply", writeFolder(t, map[string]string{"a.yaml": "kind: agent\nname: nora\ngreeting: Hola, soy Nora.\n"}))
	remote, _ := p.remote()
	for thread, p := range map[string]program{"here": p, "there": remote} {
		assert.Contains(t, p.onTerminal(t, "hello\n\x04", "chat", "--thread", thread), "Hola, soy Nora.\r\n> ")
		screen := p.onTerminal(t, "\x04", "chat", "--thread", thread)
		assert.Truef(t, !strings.Contains(screen, "Hola"), "greeted again:\n%s", screen)
	}
}
