package workspace_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/workspace"
)

func TestApplyAgents(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	dir := fstest.MapFS{
		"agents/sales.yaml": {Data: []byte(
			"kind: agent\nname: sales\ninstructions_file: sales.md\nmemory: own\nkeys: [web]\n")},
		"agents/sales.md": {Data: []byte("You are Nora of {{Tienda}} Sol.\nBe brief.\n")},
	}
	apply := func() {
		t.Helper()
		w, err := workspace.Load(dir)
		require.NoError(t, err)
		_, err = workspace.Apply(t.Context(), pool, w, pruneAll)
		require.NoError(t, err)
	}
	apply()
	dir["agents/sales.md"].Data = []byte("\ufeffYou are Nora of {{Tienda}} Sol.\r\nBe brief.\r\n") // of Windows
	apply()
	d := &agents.Directory{Settings: agents.Settings{Name: "house", Timezone: "Europe/Madrid"}}
	a, err := d.Find(t.Context(), pool, "")
	require.NoError(t, err)
	assert.Truef(t, a.Name == "sales" && a.Version == 1 && a.Default &&
		a.Instructions == "You are Nora of {{Tienda}} Sol.\nBe brief." && a.Timezone == "Europe/Madrid",
		"the agent is %+v", a)
	dir["agents/sales.md"].Data = []byte("You are Nora.")
	apply()
	a, err = d.Find(t.Context(), pool, agents.Alias)
	assert.Truef(t, err == nil && a.Version == 2, "version %d, %v after a change of the file alone", a.Version, err)
	if old, err := d.Version(t.Context(), pool, "sales", 1); err != nil || !strings.Contains(old.Instructions, "Tienda") {
		t.Errorf("version 1 reads %q, %v", old.Instructions, err)
	}
}

// If the only agent is renamed, it stays the default, and the old name is removed.
func TestRenamedDefaultAgent(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	apply := func(name string) error {
		w, err := workspace.Load(fstest.MapFS{"a.yaml": {Data: []byte("kind: agent\nname: " + name + "\n")}})
		require.NoError(t, err)
		_, err = workspace.Apply(t.Context(), pool, w, pruneAll)
		return err
	}
	for _, name := range []string{"mine", "librarian"} {
		require.NoError(t, apply(name))
		if a, err := (&agents.Directory{}).Find(t.Context(), pool, ""); err != nil || a.Name != name || a.Version != 1 {
			t.Errorf("the default is %s, version %d, not %s: %v", a.Name, a.Version, name, err)
		}
	}
}

func TestInvalidAgents(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, c := range map[string]struct{ text, want string }{
		"two defaults": {
			"kind: agent\nname: a\ndefault: true\n---\nkind: agent\nname: b\ndefault: true\n",
			"the agents a, b all are the default",
		},
		"no default": {"kind: agent\nname: a\n---\nkind: agent\nname: b\n", "one of the 2 agents must have default: true"},
		"unknown delegate": {
			"kind: agent\nname: sales\ndefault: true\ndelegates: [biling]\n---\nkind: agent\nname: billing\n",
			`f.yaml:4:13: delegates[0]: unknown agent "biling"; did you mean "billing"?`,
		},
		"unknown skill": {"kind: agent\nname: a\nskills: [no_such]\n", `f.yaml:3:10: skills[0]: there is no skill "no_such"`},
		"unknown key":   {"kind: agent\nname: a\ninstruction: hi\n", `did you mean "instructions"?`},
		"outside file": {
			"kind: agent\nname: a\ninstructions_file: ../x.md\n",
			`f.yaml:3:20: instructions_file: "../x.md" is outside the workspace`,
		},
		"missing file": {"kind: agent\nname: a\ninstructions_file: x.md\n", "f.yaml:3:20: instructions_file: cannot be read"},
		"two texts": {"kind: agent\nname: a\ninstructions: x\ninstructions_file: x.md\n", "instructions_file: there " +
			"are instructions, too"},
		"unknown zone":   {"kind: agent\nname: a\ntimezone: Europe/Madird\n", "f.yaml:3:11: timezone:"},
		"wrong cron":     {"kind: agent\nname: a\nheartbeat: {cron: 99 * * * *}\n", "heartbeat.cron:"},
		"no language":    {"kind: agent\nname: a\nlanguages: [spanish!]\n", "languages[0]:"},
		"wrong pin":      {"kind: agent\nname: a\npinned: [returns]\n", `pinned[0]: "returns" is not category/key`},
		"negative limit": {"kind: agent\nname: a\nlimits: {cost_usd: -1}\n", "limits.cost_usd:"},
		"unknown in a flow": {
			"kind: agent\nname: billing\n---\nkind: flow\nname: x\nactions:\n  - {actionType: if, parameters: {condition: \"true\", then: [{actionType: reason, parameters: {prompt: hi, agent: biling}}]}}\n",
			`f.yaml:7:114: actions[0].parameters.then[0].parameters.agent: unknown agent "biling"; did you mean "billing"?`,
		},
		"name taken": {
			"kind: agent\nname: x\n---\nkind: flow\nname: x\nactions: [{actionType: end}]\n",
			"share one namespace",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, err := workspace.Load(fstest.MapFS{"f.yaml": {Data: []byte(c.text)}})
			if err == nil {
				_, err = workspace.Plan(t.Context(), pool, w, pruneAll)
			}
			assert.ErrorContains(t, err, c.want)
		})
	}
}

func TestAgentNamesDelegateAndSkillOfEarlierApply(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	keeping := workspace.Options{}
	_, err := workspace.Apply(t.Context(), pool, load(t, "a.yaml", goodSkill+"---\nkind: agent\nname: sales\n"), keeping)
	require.NoError(t, err)
	pgtest.Exec(t, pool, `
		insert into agent_skills (name, description, tool_definition, handler)
		select 'other_' || n, 'x', jsonb_build_object('name', 'other_' || n, 'description', 'x'), 'builtin:x'
		  from generate_series(1, 1000) n`) // more skills than a page of skills.List
	boss := "kind: agent\nname: boss\ndelegates: [sales]\nskills: [a]\n"
	_, err = workspace.Apply(t.Context(), pool, load(t, "b.yaml", boss), keeping)
	assert.NoError(t, err)
}

func TestFlowNameConflictsWithAgent(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	keeping := workspace.Options{}
	_, err := workspace.Apply(t.Context(), pool, load(t, "a.yaml", "kind: agent\nname: sales\n"), keeping)
	require.NoError(t, err)
	text := "kind: flow\nname: sales\nactions: [{actionType: reason, parameters: {prompt: hi, agent: sales}}]\n"
	_, err = workspace.Apply(t.Context(), pool, load(t, "b.yaml", text), keeping)
	assert.Truef(t, err != nil &&
		err.Error() == `b.yaml:2:7: name: "sales" is the name of an agent; agents and flows share one namespace`, "said %v",
		err)
	_, err = workspace.Apply(t.Context(), pool,
		load(t, "b.yaml", strings.Replace(text, "name: sales", "name: ask", 1)), keeping)
	assert.NoError(t, err, "a flow that names a kept agent")
}

func TestReferencedAgentIsNotPruned(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	put := func(options workspace.Options, text string) error {
		w, err := workspace.Load(fstest.MapFS{"f.yaml": {Data: []byte(text)}})
		if err == nil {
			_, err = workspace.Apply(t.Context(), pool, w, options)
		}
		return err
	}
	const one = "kind: agent\nname: one\ndefault: true\n"
	const both = one + "---\nkind: agent\nname: two\n---\nkind: skill\nname: look\ndescription: x\nhandler: builtin:x\n" +
		"---\nkind: flow\nname: tidy\nactions: [{actionType: reason, parameters: {prompt: hi}}]\n"
	keepFlows := workspace.Options{Prune: func(i workspace.Item) bool { return i.Kind == "agent" }}
	for name, c := range map[string]struct {
		use, free, want string
		options         workspace.Options
	}{
		"an automation": {
			`insert into agent_automations (name, agent, prompt, source) values ('nightly', 'two', 'look', 'admin')`,
			`update agent_automations set enabled = false, disabled_by = 'admin'`,
			"agent two cannot be removed: automation \"nightly\" names it; run `agent automations disable \"nightly\"`, " +
				"or keep the agent",
			pruneAll,
		},
		"an automation of a skill": {
			`insert into agent_automations (name, skill_name, source) values ('hourly', 'look', 'agent')`,
			`update agent_automations set enabled = false, disabled_by = 'ana' where name = 'hourly'`,
			"skill look cannot be removed: automation \"hourly\" names it; run `agent automations disable \"hourly\"`, " +
				"or keep the skill",
			pruneAll,
		},
		"an automation of a flow": {
			`insert into agent_automations (name, flow, source) values ('daily', 'tidy', 'agent')`,
			`update agent_automations set enabled = false, disabled_by = 'admin' where name = 'daily'`,
			"flow tidy cannot be removed: automation \"daily\" names it; run `agent automations disable \"daily\"`, " +
				"or keep the flow",
			workspace.Options{Prune: func(i workspace.Item) bool { return i.Kind == "flow" }},
		},
		"an objective": {
			`insert into agent_objectives (name, agent, goal, source) values ('grow', 'two', 'Grow.', 'admin')`,
			`update agent_objectives set status = 'paused'`,
			"agent two cannot be removed: objective \"grow\" names it; run `agent objectives pause \"grow\"`, " +
				"or keep the agent",
			pruneAll,
		},
		"a flow": {
			`insert into agent_flows (name, version, digest, definition) values ('ask', 1, 'd',
			   '{"name": "ask", "actions": [{"actionType": "reason", "parameters": {"prompt": "hi", "agent": "two"}}]}')`,
			`update agent_flows set current = false`,
			`agent two cannot be removed: flow "ask" names it in actions[0].parameters.agent; apply the flow with another agent`,
			keepFlows,
		},
		"a delegate": {
			`insert into agent_agents (name, version, digest, definition, source) values
			   ('boss', 1, 'd', '{"name": "boss", "delegates": ["two"]}', 'admin')`,
			`update agent_agents set current = false where name = 'boss'`,
			`agent two cannot be removed: agent "boss" names it in delegates[0]; apply that agent without it`, pruneAll,
		},
	} {
		require.NoError(t, put(pruneAll, both))
		pgtest.Exec(t, pool, c.use)
		used := new(workspace.InUseError)
		if err := put(c.options, one); !errors.As(err, &used) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: said %v, want %q", name, err, c.want)
		}
		pgtest.Equal(t, pool, 3, `
			select (select count(*) from agent_agents where name = 'two' and current)::int
			     + (select count(*) from agent_skills where name = 'look')::int
			     + (select count(*) from agent_flows where name = 'tidy' and current)::int`)
		pgtest.Exec(t, pool, c.free)
		assert.NoError(t, put(c.options, one), name, "freed, but")
	}
}

func TestLastDefaultAgentIsNotPruned(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w, err := workspace.Load(
		fstest.MapFS{"f.yaml": {Data: []byte("kind: agent\nname: one\ndefault: true\n---\nkind: agent\nname: two\n")}})
	if err == nil {
		_, err = workspace.Apply(t.Context(), pool, w, pruneAll)
	}
	require.NoError(t, err)
	onlyOne := workspace.Options{Prune: func(i workspace.Item) bool { return i.Name == "one" }}
	_, err = workspace.Apply(t.Context(), pool, workspace.Workspace{}, onlyOne)
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "no other agent is the default"), "said %v", err)
	_, err = workspace.Apply(t.Context(), pool, workspace.Workspace{}, pruneAll)
	assert.NoError(t, err, "all agents")
}

func TestUnknownBuiltins(t *testing.T) {
	t.Parallel()
	w := load(t, "a.yaml", goodSkill+"---\nkind: skill\nname: b\nhandler: builtin:recal\n---\nkind: skill\nname: "+
		"c\nhandler: 'builtin: recall'\n",
		"b.yaml", "kind: skill\nname: d\nhandler: builtin:weather_of_the_week\n")
	want := `a.yaml:7:10: handler: unknown builtin "recal"; did you mean "recall"?` + "\n" +
		`b.yaml:3:10: handler: unknown builtin "weather_of_the_week"; known are objectives_list, recall`
	err := w.CheckBuiltins([]string{"recall", "objectives_list"})
	assert.Truef(t, err != nil && err.Error() == want, "got\n%v\nnot\n%s", err, want)
	assert.NoError(t, w.CheckBuiltins([]string{"recall", "recal", "weather_of_the_week"}))
}

func TestApplyMCPServer(t *testing.T) {
	t.Parallel()
	read := func(token string) (workspace.Workspace, error) {
		return workspace.Load(fstest.MapFS{"mcp.yaml": {Data: []byte(`kind: mcp_server
name: weather
url: https://weather.example.com/mcp
headers:
  Authorization: ` + token + "\nauto: [read_*]\n")}})
	}
	_, err := read("Bearer abcdef123456")
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "mcp.yaml:5:") &&
		strings.Contains(err.Error(), "do not write a secret here"), "a literal secret: %v", err)
	w, err := read("Bearer ${WEATHER_TOKEN}")
	require.NoError(t, err)
	pool := pgtest.DB(t)
	for _, want := range []workspace.Action{workspace.Create, workspace.Unchanged} {
		diff, err := workspace.Apply(t.Context(), pool, w, pruneAll)
		assert.Truef(t, err == nil && len(diff.Items) == 1 && diff.Items[0].Action == want &&
			diff.Items[0].Kind == "mcp_server", "the diff is %+v, %v; want %s", diff, err, want)
	}
	got, err := mcp.Get(t.Context(), pool, "weather")
	assert.Truef(t, err == nil && got.Headers["Authorization"] == "Bearer ${WEATHER_TOKEN}" && got.Trust == "approve" &&
		got.Source == workspace.Source, "the server is %+v, %v", got, err)
	diff, err := workspace.Apply(t.Context(), pool, workspace.Workspace{}, pruneAll)
	assert.Truef(t, err == nil && len(diff.Items) == 1 && diff.Items[0].Action == workspace.Remove,
		"an empty workspace: %+v, %v", diff, err)
}

func TestDiffOfKeyLeftOut(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "a.yaml", goodSkill+"---\nkind: agent\nname: sales\nskills: [a]\n"))
	diff := apply(t, pool, load(t, "a.yaml", goodSkill+"---\nkind: agent\nname: sales\n"))
	var text bytes.Buffer
	require.NoError(t, diff.WriteText(&text))
	assert.Contains(t, text.String(), "    skills: [\"a\"] → (left out)\n")
}

func TestApplyWarnsOfKeyThatNoAgentNames(t *testing.T) {
	t.Parallel()
	const sales, billing = "kind: agent\nname: sales\ndefault: true\n", "---\nkind: agent\nname: billing\n"
	const keys = "keys: [bill, web]\n"
	want := []string{
		"no agent names the chat key bill any more; its visitors now reach sales",
		"no agent names the chat key web any more; its visitors now reach sales",
	}
	for name, next := range map[string]string{"removed": sales, "no keys": sales + billing + "keys: []\n"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			assert.NoDiff(t, nil, apply(t, pool, load(t, "a.yaml", sales+billing+keys)).Warnings)
			assert.NoDiff(t, want, apply(t, pool, load(t, "a.yaml", next)).Warnings)
		})
	}
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "a.yaml", sales+billing+keys))
	moved := apply(t, pool, load(t, "a.yaml", sales+keys+billing))
	assert.NoDiff(t, nil, moved.Warnings)
}

func TestApplyWarnsOfThreadsOutOfReach(t *testing.T) {
	t.Parallel()
	const sales, full, isDefault = "kind: agent\nname: sales\n", "---\nkind: agent\nname: full\n", "default: true\n"
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "a.yaml", sales+isDefault+full))
	for _, thread := range []string{
		"'1', 'chat', 'sales', 'web', 'key'", "'2', 'chat', 'sales', 'web', 'visitor'", "'3', 'chat', 'full', 'web', 'key'",
		"'4', 'slack', 'sales', 'channel desk', 'channel'", "'5', 'chat', 'sales', 'shop', 'key'",
	} {
		pgtest.Exec(t, pool, `insert into agent_threads (id, channel, agent, owner, owner_kind) values (`+thread+`)`)
	}
	diff := apply(t, pool, load(t, "a.yaml", sales+"keys: [shop]\n"+full+isDefault))
	want := []string{"2 recent threads of the chat key web belong to agent sales, which the key no longer reaches; their " +
		"visitors get thread_agent until they start another thread"}
	assert.NoDiff(t, want, diff.Warnings)
	assert.NoDiff(t, nil, apply(t, pool, load(t, "a.yaml", sales+"keys: [shop]\n"+full+isDefault)).Warnings)
}

func TestApplyWarnsOfOwnMemoryLeftBehind(t *testing.T) {
	t.Parallel()
	const agent = "kind: agent\nname: billing\n"
	pool := pgtest.DB(t)
	apply(t, pool, load(t, "a.yaml", agent+"memory: own\n"))
	pgtest.Exec(t, pool, `insert into agent_memory (owner, key, value, expires_at) values ('billing', 'a', '1', null),
		('billing', 'b', '1', null), ('', 'c', '1', null), ('billing', 'old', '1', clock_timestamp())`)
	assert.NoDiff(t, nil, apply(t, pool, load(t, "a.yaml", agent+"memory: own\ntimezone: Europe/Madrid\n")).Warnings)
	diff := apply(t, pool, load(t, "a.yaml", agent+"memory: shared\n"))
	assert.NoDiff(t, []string{"agent billing no longer reads its own memory (entries: 2); it would with memory: own"},
		diff.Warnings)
}

func TestApplyWarnsOfOpenApprovals(t *testing.T) {
	t.Parallel()
	const sales = goodSkill + "---\nkind: agent\nname: sales\ndefault: true\n"
	const billing = "---\nkind: agent\nname: billing\n"
	for name, next := range map[string]string{"removed": sales, "no skill": sales + billing + "skills: []\n"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			apply(t, pool, load(t, "a.yaml", sales+billing))
			pgtest.Exec(t, pool, `
				with asked as (
				  insert into agent_activity (trace_id, agent, skill_name, status)
				  select 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', v, 'a', 'pending_approval'
				    from unnest('{billing,sales}'::text[]) v returning id, agent),
				x as (insert into agent_executions (flow, surface, agent, trace_id)
				      select 'heartbeat', 'heartbeat', agent, 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE' from asked returning id, agent)
				insert into agent_approvals (trace_id, execution_id, activity_id, skill_name, skill_revision, arguments,
				  arguments_hash, status, expires_at)
				select 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', x.id, asked.id, 'a', 1, '{}', x.agent, 'pending',
				       clock_timestamp() + interval '1 day'
				  from asked join x using (agent)`)
			diff := apply(t, pool, load(t, "a.yaml", next))
			assert.NoDiff(t, []string{"1 open approval of agent billing for skill a stays open; see agent approvals ls"},
				diff.Warnings)
			assert.NoDiff(t, nil, apply(t, pool, load(t, "a.yaml", next+"timezone: Europe/Madrid\n")).Warnings)
		})
	}
}
