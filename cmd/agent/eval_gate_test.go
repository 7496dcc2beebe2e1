package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

const gatedAgent = `
kind: agent
name: nora
instructions: Be kind.
---
kind: eval
name: manners
trials: 2
gate: {margin: 0.05}
cases:
  - name: greets
    messages: [{user: "Hi, I am Ana."}]
    expect: [{answer: {contains: Ana}}]
`

// politeModel greets by name unless the instructions forbid it.
func politeModel(t *testing.T) *modeltest.Server {
	t.Helper()
	server := modeltest.New(t)
	server.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		if strings.Contains(req.Messages[0].Content, "Be rude.") {
			return modeltest.Text("What?")
		}
		return modeltest.Text("Hello Ana!")
	})
	return server
}

func newGatedProgram(t *testing.T) (p program, pool *pgxpool.Pool, dir string, write func(was, now string)) {
	t.Helper()
	url := pgtest.URL(t)
	pool = pgtest.Pool(t, url, postgres.Options{})
	p = newProgram(t, url, "OPENAI_BASE_URL="+politeModel(t).URL(), "OPENAI_API_KEY=k", "AGENT_MODEL=gpt-4o-mini",
		"AGENT_LOG_LEVEL=error")
	dir = t.TempDir()
	text := gatedAgent
	write = func(was, now string) {
		require.Truef(t, strings.Contains(text, was), "%q is not in the workspace", was)
		text = strings.Replace(text, was, now, 1)
		testkit.WriteFile(t, filepath.Join(dir, "a.yaml"), text)
	}
	write("", "")
	return p, pool, dir, write
}

// Apply rejects a change that a suite has not passed. It accepts the change after a passing run, or with a reason,
// which the audit log records.
func TestApplyRequiresGatingSuites(t *testing.T) {
	t.Parallel()
	p, pool, dir, write := newGatedProgram(t)
	p.must("apply", dir) // the first apply has nothing to compare
	assert.Contains(t, p.must("apply", dir), "no changes")

	write("Be kind.", "Be very kind.")
	p.mustFail(1, "manners: it has not run against this workspace; run agent eval run manners --candidate "+dir+
		`; agent apply with --without-evals --reason "…" goes on without`, "apply", dir)
	assert.Contains(t, p.run("apply", dir, "--dry-run").err, "warning: the gate of eval manners: it has not run")
	assert.Contains(t, p.must("eval", "run", "--candidate", dir), "agent nora version 2", ", not applied", "greets  2/2")
	assert.Contains(t, p.must("agents", "show", "nora"), "version 1") // the run applied nothing
	p.must("apply", dir)

	write("Be very kind.", "Be rude.")
	failed := p.run("eval", "run", "--candidate", dir)
	assert.Truef(t, failed.code == 1, "exit %d: %s%s", failed.code, failed.out, failed.err)
	p.mustFail(1, "evals refuse this apply: manners: a pass rate of 0.00, below 1.00, in run", "apply", dir)
	p.mustFail(1, "greets (0/2)", "apply", dir)
	p.mustFail(2, "--without-evals needs a --reason", "apply", dir, "--without-evals")
	p.mustFail(2, "--without-evals needs a --reason", "apply", dir, "--reason", "hurry")
	assert.Contains(t, p.must("apply", dir, "--without-evals", "--reason", "the shop is on fire"), "~ agent nora")
	pgtest.Equal(t, pool, `admin|without evals: the shop is on fire|["manners"]`, `
		select format('%s|%s|%s', u.actor, u.reason, a.input ->> 'without_evals')
		  from agent_audit u join agent_activity a using (id)
		 where u.act = 'apply_workspace' order by u.id desc limit 1`)

	write("Be rude.", "Be very kind.") // this version has a passing run
	p.must("apply", dir)
}

// A run of the offline model does not pass a suite if earlier runs had another model.
func TestOfflineModelDoesNotPassGate(t *testing.T) {
	t.Parallel()
	p, _, dir, write := newGatedProgram(t)
	write("{contains: Ana}", "{max_words: 500}")
	p.must("apply", dir)
	p.must("eval", "run")
	offline := program{t, []string{p.environ[0], "AGENT_LOG_LEVEL=error"}}
	write("Be kind.", "Be brief.")
	assert.Contains(t, offline.must("eval", "run", "--candidate", dir), "model offline", "greets  2/2")
	offline.mustFail(1, "manners: only the offline model passed it, and its runs before had gpt-4o-mini", "apply", dir)
	p.must("eval", "run", "--candidate", dir)
	p.must("apply", dir)
}

// agent dev rejects a workspace at its start by the same rule as apply.
func TestDevRejectsWorkspaceThatFailsItsEvals(t *testing.T) {
	t.Parallel()
	p, _, dir, write := newGatedProgram(t)
	p.environ = append(p.environ, "AGENT_LISTEN=127.0.0.1:0")
	p.must("apply", dir)
	write("Be kind.", "Be rude.")
	p.mustFail(1, "manners: it has not run against this workspace; run agent eval run manners --candidate "+dir,
		"dev", dir)
	assert.Contains(t, p.must("agents", "show", "nora"), "version 1")
}

// A server follows the same rule, also for --watch on the caller's machine.
func TestServerAppliesSameGate(t *testing.T) {
	t.Parallel()
	p, pool, dir, write := newGatedProgram(t)
	remote, _ := p.remote()
	remote.must("apply", dir)
	write("Be kind.", "Be brief.")
	remote.mustFail(1, "manners: it has not run against this workspace; run agent eval run manners --candidate "+dir,
		"apply", dir)
	assert.Contains(t, remote.must("eval", "run", "--candidate", dir), "greets  2/2")
	remote.must("apply", dir)
	write("Be brief.", "Be rude.")
	remote.must("apply", dir, "--without-evals", "--reason", "a test")
	pgtest.Equal(t, pool, "without evals: a test", `
		select reason from agent_audit where act = 'apply_workspace' order by id desc limit 1`)

	remote.mustFail(2, "--candidate needs the folder", "eval", "run", "--candidate", "")
	remote.mustFail(2, "--candidate needs the folder", "eval", "run", "--prune")
	remote.mustFail(1, `has no eval "maners"; did you mean "manners"?`, "eval", "run", "maners", "--candidate", dir)

	write("Be rude.", "Be slow.")
	watching := p.start("apply", dir, "--watch")
	watching.find(t, `(the gate of eval manners: it has not run)`)
	pgtest.Until(t, pool, "without evals: apply --watch", `
		select reason from agent_audit where act = 'apply_workspace' order by id desc limit 1`)
}

// The suites that agent init writes pass with the offline model.
func TestShippedSuitesPassOffline(t *testing.T) {
	t.Parallel()
	shop := pgtest.EmptyURL(t)
	sql, err := os.ReadFile("../../examples/orders/shop.sql")
	require.NoError(t, err)
	_, err = connect(t, shop).Exec(t.Context(), string(sql))
	require.NoError(t, err)
	for suite, flags := range map[string][]string{
		"questions": {"--yes", "--name", "nora"}, "orders": {"--example", "orders", "--database", shop},
	} {
		p := newProgram(t, pgtest.URL(t), "SHOP_DATABASE_URL="+shop, "AGENT_LOG_LEVEL=error")
		dir := t.TempDir()
		p.must(append([]string{"init", dir}, flags...)...)
		p.must("apply", filepath.Join(dir, "workspace"))
		assert.Contains(t, p.must("eval", "run"), suite+" version 1", "3/3", "passed, no price")
		p.mustFail(2, "the offline model answers for every model", "eval", "run", "--model", "gpt-5-mini")
	}
}
