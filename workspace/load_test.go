package workspace_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/lanekeeper/lanekeeper/examples"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/workspace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// files returns a folder with the given files.
func files(pairs ...string) fstest.MapFS {
	fsys := fstest.MapFS{}
	for i := 0; i+1 < len(pairs); i += 2 {
		fsys[pairs[i]] = &fstest.MapFile{Data: []byte(pairs[i+1])}
	}
	return fsys
}

// load loads valid files.
func load(t testing.TB, pairs ...string) workspace.Workspace {
	t.Helper()
	w, err := workspace.Load(files(pairs...))
	require.NoError(t, err)
	return w
}

const goodSkill = "kind: skill\nname: a\nhandler: 'sql:select 1 as one'\n"

func TestLoadDocuments(t *testing.T) {
	t.Parallel()
	w := load(t,
		"a.yaml", goodSkill+"---\n# nothing\n---\nkind: skill\nname: b\nhandler: builtin:b\ntimeout: 5s\n",
		"deep/er/c.yml", "kind: objective\nname: c\ngoal: be good\nsteps: [one, two]\n",
		"notes.txt", "not: [read",
		".hidden.yaml", "not: [read",
		".git/config.yaml", "not: [read",
		"empty.yaml", "",
	)
	require.Truef(t, len(w.Skills) == 2 && len(w.Objectives) == 1,
		"read %d skills and %d objectives, not 2 and 1", len(w.Skills), len(w.Objectives))
	if got := w.Skills[1]; got.At.String() != "a.yaml:7:1" || got.Definition.Timeout != "5s" {
		t.Errorf("second skill is at %s with timeout %q", got.At, got.Definition.Timeout)
	}
	assert.NoDiff(t, []string{"one", "two"}, w.Objectives[0].Definition.Steps)
}

func TestLoadJSONSchema(t *testing.T) {
	t.Parallel()
	w := load(t, "a.yaml", `
kind: skill
name: a
parameters:
  type: object
  properties:
    day: {type: string, default: 2024-01-02}
    n: {type: integer, minimum: 1, maximum: 0x10, default: 12}
    ratio: {type: number, default: 0.5}
    on: {type: boolean, default: true}
    "1": {type: string, enum: ["1", two]}
handler: http:https://example.com/
`)
	want := map[string]any{
		"day":   map[string]any{"type": "string", "default": "2024-01-02"},
		"n":     map[string]any{"type": "integer", "minimum": 1, "maximum": 16, "default": 12},
		"ratio": map[string]any{"type": "number", "default": 0.5},
		"on":    map[string]any{"type": "boolean", "default": true},
		"1":     map[string]any{"type": "string", "enum": []any{"1", "two"}},
	}
	assert.NoDiff[any](t, want, w.Skills[0].Definition.Parameters["properties"])
}

func TestLoadErrors(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ file, want string }{
		"cron": {"kind: automation\nname: a\ncron: often\nskill: b\n", `f.yaml:3:7: cron: parse schedule "often"`},
		"number for text": {
			"kind: automation\nname: a\ncron: '@daily'\nskill: b\nmax_attempts: 1.5\n",
			`f.yaml:5:15: max_attempts: is "1.5"; it must be a whole number`,
		},
		"no attempt": {
			"kind: automation\nname: a\ncron: '@daily'\nskill: b\nmax_attempts: 0\n",
			`f.yaml:5:15: max_attempts: is 0; write at least 1, or leave it out for the default`,
		},
		"no money": {
			"kind: agent\nname: a\nlimits:\n  iterations: 8\n  day_usd: 0\n",
			`f.yaml:5:12: limits.day_usd: is 0; leave it out for no limit`,
		},
		"no budget": {
			"kind: eval\nname: a\nbudget: {cost_usd: 0.0}\ncases: []\n",
			`f.yaml:3:20: budget.cost_usd: is 0; leave it out for no limit`,
		},
		"no call": {
			"kind: eval\nname: a\ncases:\n- {name: c, messages: [{user: hi}], expect: [{called: {skill: s, times: 0}}]}\n",
			`f.yaml:4:73: cases[0].expect[0].called.times: is 0; leave it out for at least one call; not_called forbids calls`,
		},
		"no words": {
			"kind: eval\nname: a\ncases:\n- {name: c, messages: [{user: hi}], expect: [{answer: {max_words: 0}}]}\n",
			`f.yaml:4:67: cases[0].expect[0].answer.max_words: is 0; leave it out for no limit`,
		},
		"unknown key": {goodSkill + "handlr: x\n", `f.yaml:4:1: unknown key "handlr"; did you mean "handler"?`},
		"far key":     {goodSkill + "zzzzzzzz: x\n", `f.yaml:4:1: unknown key "zzzzzzzz"; known are approvals, config, `},
		"endless key": {goodSkill + strings.Repeat("h", 1000) + ": x\n", `f.yaml:4:1: unknown key "` +
			strings.Repeat("h", 80) + `…"; known are approvals, config, `},
		"key twice": {goodSkill + "name: b\n", `f.yaml:4:1: name: is given twice, first in line 2`},
		"wrong type": {
			goodSkill + "idempotent: perhaps\n",
			`f.yaml:4:13: idempotent: is "perhaps"; it must be true or false`,
		},
		"yes for true": {goodSkill + "idempotent: yes\n", `f.yaml:4:13: idempotent: is "yes"; it must be true or false`},
		"large number": {
			"kind: objective\nname: a\ngoal: b\npriority: 99999999999999999999\n",
			`f.yaml:4:11: priority: is "9999`,
		},
		"list for text":    {goodSkill + "description: [a]\n", `f.yaml:4:14: description: is a list; it must be text`},
		"text for list":    {"kind: objective\nname: a\ngoal: b\nsteps: c\n", `f.yaml:4:8: steps: is "c"; it must be a list`},
		"text for mapping": {goodSkill + "config: c\n", `f.yaml:4:9: config: is "c"; it must be a mapping`},
		"text for number": {
			"kind: objective\nname: a\ngoal: b\npriority: high\n",
			`f.yaml:4:11: priority: is "high"; it must be a whole number`,
		},
		"no number": {
			"kind: eval\nname: a\nbudget: {cost_usd: .nan}\n",
			`f.yaml:3:20: budget.cost_usd: is ".nan"; it must be a number`,
		},
		"infinite number": {"kind: eval\nname: a\ngate: {margin: .inf}\n", `gate.margin: is ".inf"; it must be a number`},
		"item of list": {
			"kind: objective\nname: a\ngoal: b\nsteps:\n- a\n- [b]\n",
			`f.yaml:6:3: steps[1]: is a list; it must be text`,
		},
		"empty item":    {"kind: objective\nname: a\ngoal: b\nsteps:\n- a\n- ''\n", `f.yaml:6:3: steps[1]: must have`},
		"no kind":       {"name: a\n", `f.yaml:1:1: kind: is missing; write kind: agent, database, skill, `},
		"unknown kind":  {"kind: skil\nname: a\n", `f.yaml:1:7: unknown kind "skil"; did you mean "skill"?`},
		"kind a list":   {"kind: [skill]\n", `f.yaml:1:7: unknown kind `},
		"not a mapping": {"- a\n", `f.yaml:1:1: is a list; a document is a mapping`},
		"not YAML":      {"a: b\n  c: d\n", `f.yaml:2: is not YAML: mapping values are not allowed`},
		"tab":           {"kind: skill\nconfig:\n\tquery: x\n", `any token; indent with blanks and not with a tab`},
		"bare colon":    {"kind: skill\ndescription: Note: it counts\n", `not allowed in this context; quote a text that has a ":"`},
		"bare star":     {"kind: automation\ncron: * * * * *\n", `character; quote a text that begins with * or &`},
		"open list":     {"kind: agent\nskills: [a\nname: b\n", `f.yaml:`},
		"open quote":    {"kind: agent\nname: \"b\n", `f.yaml:`},
		"second document": {
			goodSkill + "---\n" + "kind: skill\nname: x y\nhandler: builtin:b\n",
			`f.yaml:6:7: name: "x y" must be`,
		},
		"no name":    {"kind: skill\nhandler: builtin:b\n", `f.yaml:1:1: name: "" must be`},
		"no handler": {"kind: skill\nname: a\n", `f.yaml:1:1: handler: "" must begin`},
		"nested field": {
			"kind: skill\nname: a\nhandler: 'sql:'\nconfig:\n  query: select @x\n",
			`f.yaml:5:10: config.query: @x is not declared`,
		},
		"schema": {
			goodSkill + "parameters: {type: object, properties: {x: {type: text}}}\n",
			`f.yaml:4:51: parameters.properties.x.type: `,
		},
		"alias":           {"kind: skill\nname: &n a\nhandler: *n\n", `f.yaml:3:10: handler: aliases are not supported`},
		"alias of itself": {goodSkill + "config: &c {query: *c}\n", `f.yaml:4:20: config.query: aliases are not supported`},
		"merge key":       {goodSkill + "config: {<<: {a: b}}\n", `f.yaml:4:10: config: aliases and merge keys are not supported`},
		"number not JSON's": {
			goodSkill + "config: {query: .nan}\n",
			`f.yaml:4:17: config.query: .nan is not a number in JSON`,
		},
		"own tag":      {goodSkill + "config: {query: !secret x}\n", `f.yaml:4:17: config.query: the tag !secret is not supported`},
		"binary":       {goodSkill + "description: !!binary aGk=\n", `f.yaml:4:14: description: is "aGk="; it must be text`},
		"key not text": {goodSkill + "config: {[a]: b}\n", `f.yaml:4:10: config: a key must be a text`},
		"too deep": {
			goodSkill + "config: {query: " + strings.Repeat("[", 60) + strings.Repeat("]", 60) + "}\n",
			`nested more than 50 deep`,
		},
		"far too deep": {goodSkill + "config: " + strings.Repeat("[", 20000) + "\n", `is not YAML: `},
		"too large":    {goodSkill + "# " + strings.Repeat("x", 1<<20), `f.yaml: is larger than 1048576 bytes`},
		"not text":     {"kind: \xff\xfe", `f.yaml: is not YAML: `},
	} {
		t.Run(name, func(t *testing.T) {
			w, err := workspace.Load(files("f.yaml", c.file))
			assert.ErrorContains(t, err, c.want)
			assert.NoDiff(t, 0, len(w.Skills)+len(w.Objectives)+len(w.Automations))
		})
	}
}

func TestLoadRejectsEmptyValues(t *testing.T) {
	t.Parallel()
	const agent, channel = "kind: agent\nname: a\n", "kind: channel\nname: a\ntype: slack\n"
	for _, test := range []struct{ document, want string }{
		{
			agent + "skills:\n# - note\n",
			"a.yaml:3:8: skills: is empty; leave the key out for its default, or write [] for an empty list",
		},
		{agent + "skills: [note, ~]\n", "a.yaml:3:16: skills[1]: is empty; give it a value, or leave the key out"},
		{agent + "limits:\n", "a.yaml:3:8: limits: is empty; give it a value, or leave the key out"},
		{agent + "limits: {day_usd: }\n", "a.yaml:3:19: limits.day_usd: is empty; give it a value, or leave the key out"},
		{agent + "heartbeat: ~\n", "a.yaml:3:12: heartbeat: is empty; give it a value, or leave the key out"},
		{agent + "timezone:\n", "a.yaml:3:10: timezone: is empty; give it a value, or leave the key out"},
		{agent + "memory: ''\n", "a.yaml:3:9: memory: is empty; give it a value, or leave the key out"},
		{goodSkill + "trust: # approve\n", "a.yaml:4:7: trust: is empty; give it a value, or leave the key out"},
		{goodSkill + "trust: \"\"\n", "a.yaml:4:8: trust: is empty; give it a value, or leave the key out"},
		{goodSkill + "config:\n", "a.yaml:4:8: config: is empty; give it a value, or leave the key out"},
		{
			channel + "secrets: {bot_token: }\n",
			"a.yaml:4:22: secrets.bot_token: is empty; give it a value, or leave the key out",
		},
	} {
		_, err := workspace.Load(files("a.yaml", test.document))
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("Load(%q) = %v; want %s", test.document, err, test.want)
		}
	}
	load(t, "a.yaml", "kind: skill\nname: a\nhandler: 'builtin:a'\n"+
		"parameters: {type: object, properties: {x: {enum: [a, null], default: null}}}\n")
}

func TestLoadReportsAllErrors(t *testing.T) {
	t.Parallel()
	_, err := workspace.Load(files(
		"b.yaml", goodSkill+"scope: everyone\ntrust: maybe\nidempotnt: true\n---\nkind: thing\n",
		"a.yaml", goodSkill+"---\nkind: objective\nname: a\ngoal: g\nreview_every: often\n---\nkind: objective\nname: "+
			"a\ngoal: g\n",
		"c.yaml", "x: [",
	))
	want := []string{
		`a.yaml:8:15: review_every: "often" is not a duration: write 30m, 12h or 7d`,
		`a.yaml:11:7: name: there is another objective "a" at a.yaml:6:7`,
		`b.yaml:2:7: name: there is another skill "a" at a.yaml:2:7`,
		`b.yaml:4:8: scope: "everyone" is not one of internal, external, both`,
		`b.yaml:5:8: trust: "maybe" is not one of auto, notify, approve`,
		`b.yaml:6:1: unknown key "idempotnt"; did you mean "idempotent"?`,
		`b.yaml:8:7: unknown kind "thing"; known are `,
		`c.yaml:1: is not YAML: `,
	}
	got := strings.Split(err.Error(), "\n")
	require.Equal(t, len(want), len(got), err)
	for i := range want {
		assert.Truef(t, strings.HasPrefix(got[i], want[i]), "problem %d is %s\nwant %s", i, got[i], want[i])
	}
}

func TestLoadReportsCauseOnly(t *testing.T) {
	t.Parallel()
	_, err := workspace.Load(files("f.yaml", "kind: skill\nname: a\nhandlr: builtin:x\n"))
	want := `f.yaml:3:1: unknown key "handlr"; did you mean "handler"?`
	assert.Truef(t, err != nil && err.Error() == want, "error is %v\nwant %s", err, want)
}

func TestLoadEmptyFolder(t *testing.T) {
	t.Parallel()
	_, err := workspace.Load(files("README.md", "x"))
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "has no .yaml file"), "error is %v", err)
}

func TestLoadDir(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "a.yaml")
	require.NoError(t, os.WriteFile(file, []byte(goodSkill+"x: y\n"), 0o600))
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "folder.yaml"), 0o700))
	require.NoError(t, os.Symlink(file, filepath.Join(dir, "b.yaml")))
	for name, c := range map[string]struct{ dir, want string }{
		"position has the folder": {dir, file + ":4:1: unknown key"},
		"links to files are read": {dir, "b.yaml:2:7: name: there is another skill"},
		"not there":               {filepath.Join(dir, "none"), "there is no folder " + filepath.Join(dir, "none")},
		"a file":                  {file, "is a file; name the folder it is in"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := workspace.LoadDir(c.dir)
			assert.Truef(t, err != nil && strings.Contains(err.Error(), c.want), "error is %v\nwant %s", err, c.want)
		})
	}
}

func TestLoadExample(t *testing.T) {
	t.Parallel()
	fsys, err := examples.Caretaker()
	require.NoError(t, err)
	_, err = workspace.Load(fsys)
	assert.NoError(t, err)
}

func FuzzLoad(f *testing.F) {
	f.Add(goodSkill)
	f.Add("kind: objective\nname: a\ngoal: b\nsteps: [a, {b: c}]\n---\n- x")
	f.Add("kind: skill\nparameters: {<<: *a, 1: .inf, ? [a] : !!binary x}")
	f.Fuzz(func(t *testing.T, text string) {
		w, err := workspace.Load(files("f.yaml", text))
		assert.Truef(t, err == nil || len(w.Skills)+len(w.Objectives)+len(w.Automations) == 0, "half read: %v", err)
	})
}
