package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// everyCommand lists the words of each command of the program.
func everyCommand(t *testing.T) map[string]*cobra.Command {
	t.Helper()
	all := map[string]*cobra.Command{}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		all[strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "agent"), " ")] = cmd
		for _, below := range cmd.Commands() {
			walk(below)
		}
	}
	c := &cli{out: io.Discard, err: io.Discard, environ: map[string]string{}}
	walk(c.root())
	return all
}

func TestContractCommandsExist(t *testing.T) {
	t.Parallel()
	all := everyCommand(t)
	for _, name := range []string{
		"dev", "serve", "migrate", "apply", "heartbeat", "trace", "trace last", "trace ls", "activity ls", "activity spend",
		"activity slowest", "activity failing", "activity audit", "lanes ls", "lanes release", "lanes run", "executions ls",
		"executions show", "executions cancel", "selfheal", "skills ls", "skills show", "skills enable", "skills disable",
		"skills call", "approvals ls", "approvals show", "approvals approve", "approvals reject", "doctor", "version",
	} {
		assert.Truef(t, all[name] != nil, "there is no command %q", name)
	}
}

func TestCommandHelp(t *testing.T) {
	t.Parallel()
	for name, cmd := range everyCommand(t) {
		if strings.HasPrefix(name, "completion") {
			continue
		}
		args := append(strings.Fields(name), "--help")
		got := newProgramWithoutDatabase(t).run(args...)
		assert.Equal(t, 0, got.code, strings.Join(args, " "))
		assert.Equal(t, "", got.err, strings.Join(args, " "))
		assert.Truef(t, cmd.Short != "" && strings.Contains(got.out, "Usage:\n  agent"),
			"agent %s says too little:\n%s", strings.Join(args, " "), got.out)
		for line := range strings.Lines(got.out) {
			assert.Truef(t, len([]rune(line)) <= 140 && !strings.Contains(line, "\t"),
				"agent %s has a line with a tab or of %d characters: %s", strings.Join(args, " "), len([]rune(line)), line)
		}
		short := newProgramWithoutDatabase(t).run(append([]string{"help"}, strings.Fields(name)...)...)
		assert.Truef(t, name == "help" || short.out == got.out,
			"agent help %s differs from agent %s --help:\n%s", name, name, short.out)
	}
}

// Every usage error exits with 2, names error and help, and prints nothing to stdout. The command opens no database
// before it.
func TestUsageErrors(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 40)
	tests := map[string]struct {
		args []string
		says string
	}{
		"no such command": {[]string{"nonsense"}, `there is no command "nonsense"; see agent --help`},
		"no such command below": {[]string{"lanes", "nonsense"}, "there is no command agent lanes nonsense; see agent " +
			"lanes --help"},
		"no such topic": {[]string{"help", "lanes", "nonsense"}, "there is no command lanes nonsense; see agent --help"},
		"no such flag":  {[]string{"lanes", "ls", "--nope"}, "unknown flag: --nope; see agent lanes ls --help"},
		"nearly a command": {
			[]string{"approvls"},
			`there is no command "approvls"; did you mean agent approvals?; see agent --help`,
		},
		"nearly a command below": {[]string{"requests", "anwser"}, "did you mean agent requests answer?; see agent " +
			"requests --help"},
		"nearly a topic": {[]string{"help", "excutions"}, "did you mean agent executions?; see agent --help"},
		"nearly a flag": {[]string{"lanes", "ls", "--jsn"}, "unknown flag: --jsn; did you mean --json?; see " +
			"agent lanes ls --help"},
		"yes and no": {[]string{
			"requests", "answer", "01890000-0000-7000-8000-000000000000", "--yes",
			"--no",
		}, "exclude each other"},
		"no such shell": {
			[]string{"completion", "fish2"},
			`unknown shell "fish2"; name one of bash, fish, powershell, zsh; see agent completion --help`,
		},
		"too many arguments": {[]string{"lanes", "ls", "x"}, "agent lanes ls takes no arguments"},
		"too few arguments":  {[]string{"executions", "show"}, "agent executions show takes an execution's id"},
		"nothing said to the agent": {
			[]string{"operate", " "},
			"the message is empty; pass a text; see agent operate --help",
		},
		"nothing said by a visitor": {[]string{"chat", ""}, "the message is empty; pass a text; see agent chat --help"},
		"trace without id":          {[]string{"trace"}, "agent trace takes a trace id, last, or ls"},
		"no name of a model": {[]string{"models", "check", ""}, "the model's name is empty; see agent models check " +
			"--help"},
		"two models":           {[]string{"models", "check", "a", "b"}, "agent models check takes at most one model's name"},
		"apply without folder": {[]string{"apply"}, "agent apply takes a folder"},
		"apply of a file":      {[]string{"apply", "main.go"}, "main.go is a file; name the folder it is in"},
		"watch of a dry run":   {[]string{"apply", ".", "--watch", "--dry-run"}, "--watch and --dry-run exclude each other"},
		"watch of no folder":   {[]string{"apply", "nowhere", "--watch"}, "there is no folder nowhere"},
		"run without dashes":   {[]string{"lanes", "run", "x", "echo"}, "takes one lane, --, and a command"},
		"run without command":  {[]string{"lanes", "run", "x", "--"}, "takes one lane, --, and a command"},
		"run without lane":     {[]string{"lanes", "run", "--", "echo"}, "takes one lane, --, and a command"},
		"run in two lanes":     {[]string{"lanes", "run", "x", "y", "--", "echo"}, "takes one lane, --, and a command"},
		"no time to live":      {[]string{"lanes", "run", "x", "--ttl", "0", "--", "echo"}, `"--ttl" flag: not more than 0`},
		"negative time to live": {
			[]string{"lanes", "run", "x", "--ttl", "-1s", "--", "echo"},
			`"--ttl" flag: not more than 0`,
		},
		"time to live below 1 s": {
			[]string{"lanes", "run", "x", "--ttl", "10ms", "--", "echo"},
			`"--ttl" flag: not from 1s to 30d`,
		},
		"time to live of 31 days": {
			[]string{"lanes", "run", "x", "--ttl", "31d", "--", "echo"},
			`"--ttl" flag: not from 1s to 30d`,
		},
		"time to live of no number": {
			[]string{"lanes", "run", "x", "--ttl", "abc", "--", "echo"},
			`"--ttl" flag: not a duration`,
		},
		"time to live out of bounds": {
			[]string{"lanes", "run", "x", "--ttl", "999999d", "--", "echo"},
			`"--ttl" flag: longer than 100 years`,
		},
		"no such state": {
			[]string{"executions", "ls", "--status", "done"}, "not one of pending, running, waiting",
		},
		"no such state of a trace":  {[]string{"trace", "ls", "--status", "done"}, "not one of pending, running, waiting"},
		"no such state of activity": {[]string{"activity", "ls", "--status", "completed"}, "not one of running, success"},
		"no such surface": {
			[]string{"activity", "ls", "--surface", "moon"}, `"moon": not one of heartbeat, operate`,
		},
		"no such surface of last": {
			[]string{"trace", "last", "--surface", "moon"}, `"moon": not one of heartbeat, operate`,
		},
		"no rows":           {[]string{"activity", "ls", "--limit", "0"}, "not a number from 1 to 500"},
		"too many rows":     {[]string{"trace", "ls", "--limit", "501"}, "not a number from 1 to 500"},
		"rows of no number": {[]string{"executions", "ls", "--limit", "many"}, "not a number from 1 to 500"},
		"no such wait": {
			[]string{"executions", "waiting", "--for", "godot"}, "not one of response, agent, document",
		},
		"no such request":          {[]string{"requests", "ls", "--kind", "favour"}, "not one of document, signature, test"},
		"requests of no execution": {[]string{"requests", "ls", "--execution", "zz"}, "not an execution id (uuid)"},
		"cursor of nothing":        {[]string{"executions", "ls", "--cursor", "zz"}, "not a cursor"},
		"cursor of no message":     {[]string{"channels", "sends", "--cursor", "zz"}, "not a cursor"},
		"show of no id": {
			[]string{"executions", "show", "zz"},
			`"zz" is not the id (uuid) of an execution; see agent executions ls`,
		},
		"cancel of no id": {[]string{"executions", "cancel", long}, "is not the id (uuid) of an execution; see " +
			"agent executions ls"},
		"approval of no id to show": {
			[]string{"approvals", "show", "zz"},
			`"zz" is not the id (uuid) of an approval; see agent approvals ls --all`,
		},
		"approval of no id": {
			[]string{"approvals", "approve", "zz"},
			`"zz" is not the id (uuid) of an approval; see agent approvals ls --all`,
		},
		"refusal of no id":      {[]string{"approvals", "reject", ""}, `"" is not the id (uuid) of an approval`},
		"approvals of no trace": {[]string{"approvals", "ls", "--trace", "zz"}, "not a trace id"},
		"redrive of no run": {
			[]string{"automations", "redrive", "zz"},
			`"zz" is not the id (uuid) of a run; see agent automations dead`,
		},
		"done of no step":   {[]string{"objectives", "done", "zz", "--reason", "x"}, `"zz" is not the id (uuid) of a step`},
		"no threads":        {[]string{"threads", "ls", "--limit", "0"}, "not a number from 1 to 500"},
		"too many messages": {[]string{"threads", "show", "x", "--limit", "501"}, "not a number from 1 to 500"},
		"trace of nothing":  {[]string{"executions", "ls", "--trace", long}, "not a trace id"},
		"span of nothing":   {[]string{"activity", "spend", "--since", "yesterday"}, "not a duration; write 90m, 24h or 7d"},
		"span until":        {[]string{"activity", "audit", "--until", "-2h"}, "not more than 0; write 90m, 24h or 7d"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := newProgramWithoutDatabase(t).run(test.args...)
			assert.Equal(t, 2, got.code)
			assert.Equal(t, "", got.out)
			assert.Truef(t, strings.HasPrefix(got.err, "agent: ") && strings.Count(got.err, "\n") == 1,
				"stderr is not one line of agent's: %q", got.err)
			assert.Contains(t, got.err, test.says)

			var fault struct {
				Error struct{ Code, Message, Hint string }
			}
			got = newProgramWithoutDatabase(t).run(append([]string{"--json"}, test.args...)...)
			err := decodeOne(got.err, &fault)
			require.Truef(t, err == nil && got.out == "", "with --json: %v; stdout %q, stderr %q", err, got.out, got.err)
			assert.Truef(t, fault.Error.Code == "usage" && fault.Error.Message != "", "with --json: %+v", fault)
			assert.Contains(t, fault.Error.Message+"; "+fault.Error.Hint, test.says)
		})
	}
}

// A missing subcommand with --json is a JSON error, not the help.
func TestMissingSubcommandWithJSON(t *testing.T) {
	t.Parallel()
	for name, cmd := range everyCommand(t) {
		alone := []string{"trace", "why", "mcp", "selfheal", "eval shadow"} // these run without a subcommand
		if !cmd.HasSubCommands() || slices.Contains(alone, name) || strings.HasPrefix(name, "completion") {
			continue
		}
		got := newProgramWithoutDatabase(t).run(append(strings.Fields(name), "--json")...)
		assert.Truef(t, got.code == 2 && got.out == "" && strings.HasPrefix(got.err, `{"error":{`) &&
			strings.Contains(got.err, "takes a command"), "agent %s --json: exit %d, stdout %q, stderr %q", name, got.code,
			got.out, got.err)
	}
}

func TestJSONFlagErrors(t *testing.T) {
	t.Parallel()
	got := newProgramWithoutDatabase(t).run("lanes", "ls", "--nope", "--json")
	assert.Truef(t, got.code == 2 && strings.HasPrefix(got.err, `{"error":{`),
		"exit %d, stderr %q, want 2 and JSON", got.code, got.err)
}

func TestOutputFormByEnvironment(t *testing.T) {
	t.Parallel()
	got := newProgramWithoutDatabase(t, "AGENT_OUTPUT=json").must("version")
	assert.Truef(t, strings.HasPrefix(got, "{"), "AGENT_OUTPUT=json prints %q", got)
	got = newProgramWithoutDatabase(t, "AGENT_OUTPUT=json").must("version", "--json=false")
	assert.Truef(t, !strings.HasPrefix(got, "{"), "--json=false prints %q", got)
	assert.Equal(t, 2, newProgramWithoutDatabase(t, "AGENT_OUTPUT=yaml").run("version").code)
}

func TestAgentURLVariableIsKnown(t *testing.T) {
	t.Parallel()
	got := newProgramWithoutDatabase(t, "AGENT_URL=http://127.0.0.1:8080", "AGENT_LOG_LEVEL=warn").run("lanes", "ls")
	assert.Truef(t, !strings.Contains(got.err, "AGENT_URL"), "stderr %q", got.err)
}

func TestVersion(t *testing.T) {
	t.Parallel()
	assert.Contains(t, newProgramWithoutDatabase(t).must("version"), "agent ", "schema ", "go1.")
	var got struct {
		Version, Go string
		Schema      int
	}
	newProgramWithoutDatabase(t).mustJSON(&got, "version")
	assert.Truef(t, got.Version != "" && got.Go != "" && got.Schema != 0, "got %+v", got)
}

func TestColour(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		environ []string
		flag    bool
		want    bool
	}{
		"no terminal":              {nil, false, false},
		"forced":                   {[]string{"CLICOLOR_FORCE=1"}, false, true},
		"not forced":               {[]string{"CLICOLOR_FORCE=0"}, false, false},
		"NO_COLOR beats force":     {[]string{"CLICOLOR_FORCE=1", "NO_COLOR=1"}, false, false},
		"--no-color beats force":   {[]string{"CLICOLOR_FORCE=1"}, true, false},
		"no colour on a dumb term": {[]string{"CLICOLOR_FORCE=1", "TERM=dumb"}, false, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			c := &cli{environ: config.Environ(test.environ), out: io.Discard, noColor: test.flag}
			assert.Equal(t, test.want, c.colour())
		})
	}
}

// panicking is an output that makes the program panic.
type panicking struct{}

func (panicking) Write([]byte) (int, error) { panic("index out of range") }

func TestPanicOutput(t *testing.T) {
	t.Parallel()
	var errs testkit.Log
	code := run(t.Context(), []string{"version"}, nil, strings.NewReader(""), panicking{}, &errs)
	assert.Truef(t, code == 1 && strings.Count(errs.String(), "\n") == 1 && !strings.Contains(errs.String(), "goroutine"),
		"exit %d, stderr %q, want 1 and one line", code, errs.String())
	assert.Contains(t, errs.String(), "index out of range", "AGENT_LOG_LEVEL=debug")

	var debug testkit.Log
	run(t.Context(), []string{"version"}, []string{"AGENT_LOG_LEVEL=debug"}, strings.NewReader(""), panicking{}, &debug)
	assert.Contains(t, debug.String(), "usage_test.go")
}

// fullDisk is an output that fails every write.
type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }

func TestLostOutput(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"version"}, {"version", "--json"}} {
		var errs testkit.Log
		code := run(t.Context(), args, nil, strings.NewReader(""), fullDisk{}, &errs)
		assert.Truef(t, code == 1 && strings.Contains(errs.String(), "no space left"),
			"agent %v: exit %d, stderr %q", args, code, errs.String())
	}
}

func TestInterruptExitCode(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	got := newProgram(t, "postgres://localhost:1/none").runWith(ctx, nil, "lanes", "ls")
	assert.Equal(t, 130, got.code)
	assert.Equal(t, "agent: interrupted\n", got.err)
}

// revisions is the response of show, for any kind.
type revisions struct {
	Revision      int
	StateRevision int `json:"state_revision"`
}

func TestConditionalChanges(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	p.must("objectives", "add", "tidy", "--goal", "be tidy")
	for _, name := range []string{"accepted", "rejected"} {
		p.must("skills", "call", "objective_propose", "--args", fmt.Sprintf(`{"name":%q,"goal":"g"}`, name))
		p.must("skills", "call", "automation_propose", "--args",
			fmt.Sprintf(`{"name":%q,"cron":"0 9 * * 1-5","skill":"recent_activity"}`, name))
	}
	for _, change := range [][]string{
		{"objectives", "pause", "tidy"},
		{"objectives", "resume", "tidy"},
		{"objectives", "accept", "accepted"},
		{"objectives", "reject", "rejected"},
		{"skills", "disable", "recall"},
		{"skills", "enable", "recall"},
		{"automations", "accept", "accepted"},
		{"automations", "disable", "accepted"},
		{"automations", "enable", "accepted"},
		{"automations", "disable", "rejected"},
		{"objectives", "add", "tidy", "--goal", "be very tidy"},
	} {
		name := strings.Join(change, " ")
		var before, after revisions
		p.mustJSON(&before, change[0], "show", change[2])
		read := before.Revision
		if change[0] == "skills" {
			read = before.StateRevision
		}
		for _, other := range []int{read + 1, max(1, read-1)} {
			if other == read {
				continue
			}
			bad := p.run(append(change, "--if-revision", fmt.Sprint(other))...)
			assert.Truef(t, bad.code == exitFailed && strings.Contains(bad.err, "nothing was done") &&
				strings.Contains(bad.err, change[0]+" show NAME"), "%s at %d, not %d: %+v", name, other, read, bad)
		}
		if change[1] != "add" {
			bad := p.run(append(change, "--if-revision", "0")...)
			assert.Truef(t, bad.code == exitUsage, "%s at 0: %+v", name, bad)
		}
		p.mustJSON(&after, change[0], "show", change[2])
		assert.Equal(t, before, after, name)
		assert.Contains(t, p.must(change[0], "show", change[2]), "revision", fmt.Sprint(read))
		p.must(append(change, "--if-revision", fmt.Sprint(read))...)
		if p.mustJSON(&after, change[0], "show", change[2]); after == before {
			t.Errorf("%s has changed nothing", name)
		}
		again := p.run(append(change, "--if-revision", fmt.Sprint(read))...)
		assert.Truef(t, again.code == exitFailed, "%s by two admins with the same revision: %+v", name, again)
	}
	bad := p.run("objectives", "add", "tidy", "--goal", "other", "--if-revision", "0")
	assert.Truef(t, bad.code == exitFailed && strings.Contains(bad.err, "nothing was done"),
		"an objective that must be new replaced one: %+v", bad)
	p.must("objectives", "add", "new", "--goal", "other", "--if-revision", "0")
}
