package main

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/trace"
)

// A stopped process's open transaction blocks others no longer than its lease.
func TestIdleTransactionTimeout(t *testing.T) {
	t.Parallel()
	log, err := logging.New(io.Discard, "text", "error")
	require.NoError(t, err)
	url := pgtest.EmptyURL(t)
	for lease, want := range map[time.Duration]string{
		time.Second: "5s", 6 * time.Second: "6s", 30 * time.Second: "30s", 10 * time.Minute: "1min",
	} {
		s := &session{config: config.Config{Workers: 1, WorkerLease: lease}, log: log, url: url}
		require.NoError(t, s.connect(t.Context()))
		var got string
		err := s.Pool.QueryRow(t.Context(), `show idle_in_transaction_session_timeout`).Scan(&got)
		s.close(t.Context())
		assert.NoError(t, err, lease)
		assert.Equal(t, want, got, lease)
	}
}

// JSON errors have their advice in one field, also for database errors.
func TestDatabaseErrorAdvice(t *testing.T) {
	t.Parallel()
	const gone = "postgres://user@127.0.0.1:1/none"
	var got struct {
		Error struct{ Message, Hint string }
	}
	require.NoError(t, decodeOne(newProgramWithoutDatabase(t, "DATABASE_URL="+gone).run("executions", "ls", "--json").err,
		&got))
	hint := got.Error.Hint
	assert.Truef(t, strings.HasPrefix(hint, "check host and port") && !strings.Contains(got.Error.Message, hint) &&
		strings.HasSuffix(got.Error.Message, "cannot reach the server (connection refused)"), "got %+v", got.Error)
	text := newProgramWithoutDatabase(t, "DATABASE_URL="+gone).run("executions", "ls").err
	assert.Equal(t, "agent: "+got.Error.Message+": "+got.Error.Hint+"\n", text)
}

// If a server has no free connection, the error has its advice once.
func TestTooManyConnectionsAdvice(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := connect(t, url)
	role := "crowd_" + strings.ToLower(trace.New(trace.Flow).Suffix())
	pgtest.Exec(t, db, `create role `+role+` login connection limit 0`)
	t.Cleanup(func() {
		_, err := db.Exec(context.Background(), `drop role `+role)
		assert.NoError(t, err)
	})
	at := db.Config().ConnConfig
	full := fmt.Sprintf("postgres://%s@/%s?host=%s&port=%d", role, at.Database, at.Host, at.Port)
	got := newProgramWithoutDatabase(t, "DATABASE_URL="+full).run("executions", "ls")
	assert.Truef(t, strings.Count(got.err, "max_connections") == 1, "got %+v", got)
}

// orders is a workspace with a skill that writes to a shop's database.
const orders = `kind: database
name: shop
url_env: SHOP_DATABASE_URL
access: write
---
kind: skill
name: close_order
parameters: {type: object, properties: {id: {type: integer}}}
handler: "sql:"
config:
  database: shop
  writes: true
  query: |
    update orders set closed = closed + 1
    where id = @id returning id
`

const orderTable = `create table orders (id int, closed int); insert into orders values (1, 0)`

// A workspace declares a database by name. Its URL comes from the environment and is never printed. A call without the
// setting fails with the name and does not count for self-heal.
func TestSkillsOnNamedDatabase(t *testing.T) {
	t.Parallel()
	url, remoteTest := pgtest.URL(t), pgtest.URL(t)
	dir := writeFolder(t, map[string]string{"orders.yaml": orders})
	shop := connect(t, remoteTest)
	pgtest.Exec(t, shop, orderTable)
	without, with := newProgram(t, url), newProgram(t, url, "SHOP_DATABASE_URL="+remoteTest)
	says := "/orders.yaml:3:10: url_env: set SHOP_DATABASE_URL"
	without.mustFail(2, says, "apply", dir)
	wrong := writeFolder(t, map[string]string{"orders.yaml": strings.Replace(orders, "closed + 1", "clsed + 1", 1)})
	says = `/orders.yaml:14:32: sql: column "clsed" does not exist`
	with.mustFail(2, says, "apply", wrong)
	assert.Contains(t, with.must("apply", dir), "+ database shop", "+ skill close_order")
	assert.Contains(t, with.must("skills", "call", "close_order", "--args", `{"id": 1}`), `"row_count": 1`)
	assert.Contains(t, with.must("doctor"), "ok   database shop")
	if got := without.run("doctor"); got.code != 1 || !strings.Contains(got.out, "set SHOP_DATABASE_URL") {
		t.Errorf("doctor: exit %d, %s", got.code, got.out)
	}
	for range 4 {
		got := without.run("skills", "call", "close_order", "--args", `{"id": 1}`)
		if got.code != 1 || !strings.Contains(got.err, "set SHOP_DATABASE_URL, which has the URL of database shop") {
			t.Errorf("a call without the setting: exit %d, %s", got.code, got.err)
		}
	}
	without.must("heartbeat")
	assert.Contains(t, with.must("skills", "call", "close_order", "--args", `{"id": 1}`), `"row_count": 1`)
	pgtest.Equal(t, connect(t, url), 0, `
		select count(*) from agent_skill_calls where skill_name = 'close_order' and status = 'error'`)
}

// A kill hits the process between the commit in the shop's database and its own checkpoint. Another process resumes
// with the recorded result, and the order is closed once.
func TestNamedDatabaseEffectOnceAfterCrash(t *testing.T) {
	t.Parallel()
	url, remoteTest := pgtest.URL(t), pgtest.URL(t)
	shop, own := connect(t, remoteTest), connect(t, url)
	pgtest.Exec(t, shop, orderTable)
	p := newProgram(t, url, "SHOP_DATABASE_URL="+remoteTest, "AGENT_WORKER_LEASE=10s", token, "AGENT_LISTEN=127.0.0.1:0",
		"AGENT_LOG_LEVEL=info")
	p.must("apply", writeFolder(t, map[string]string{"orders.yaml": orders}))
	row, err := shop.Begin(t.Context())
	require.NoError(t, err)
	defer row.Rollback(t.Context())
	pgtest.Exec(t, row, `select from orders where id = 1 for update`)
	args := []string{"skills", "call", "close_order", "--args", `{"id": 1}`}
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...) //nolint:gosec // itself
	cmd.Env = append(append(os.Environ(), asAgent+"=1"), p.environ...)
	cmd.SysProcAttr = proctest.DieWithUs()
	require.NoError(t, cmd.Start())
	pgtest.AwaitBlocked(t, shop, 1, "orders")
	gate, err := own.Begin(t.Context())
	require.NoError(t, err)
	defer gate.Rollback(t.Context())
	pgtest.Exec(t, gate, `lock table agent_checkpoints in share mode`)
	require.NoError(t, row.Rollback(t.Context()))
	waitQuery(t, shop, `select count(*) = 1 from agent_effects where result is not null`)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait() // its error is the kill
	require.NoError(t, gate.Rollback(t.Context()))
	p.start("serve").find(t, `listen=http://(\S+)`)
	waitQuery(t, own, `select count(*) = 1 from agent_executions where flow = 'skill_call' and status = 'completed'
		and claim > 1 and result::text like '%row_count%'`)
	pgtest.Equal(t, shop, 1, `select closed from orders`)
}

// waitQuery waits until a query returns true.
func waitQuery(t *testing.T, db *pgxpool.Pool, query string) {
	t.Helper()
	pgtest.Eventually(t, func() bool {
		var yes bool
		return db.QueryRow(t.Context(), query).Scan(&yes) == nil && yes
	}, query)
}

// withoutDatabase lists the commands that open no database.
var withoutDatabase = map[string]bool{
	"version": true, "help": true, "healthcheck": true, "flows schema": true,
	"demo": true, "init": true, "login": true, "logout": true, "selfheal report": true,
}

// Every command that opens the database rejects a newer schema with advice and changes nothing. New commands are
// included automatically.
func TestNewerSchemaIsRejected(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := connect(t, url)
	pgtest.Exec(t, pool, `insert into agent_migrations (version, name, hash) values (9999, '9999_later.sql', 'x')`)
	p := newProgram(t, url, "AGENT_ADMIN_TOKEN=a-long-random-text-for-tests", "AGENT_LISTEN=127.0.0.1:0")
	before := rowCounts(t, pool)
	for name, cmd := range everyCommand(t) {
		if !cmd.Runnable() || withoutDatabase[name] || strings.HasPrefix(name, "completion") || name == "" {
			continue
		}
		checkRejected(t, p, name, cmd)
	}
	assert.Equal(t, before, rowCounts(t, pool))
}

// checkRejected tries arguments until the command opens the database.
func checkRejected(t *testing.T, p program, name string, cmd *cobra.Command) {
	t.Helper()
	const id = "01890000-0000-7000-8000-000000000000"
	words := strings.Fields(name)
	for flag, value := range map[string]string{"reason": "why", "as": "me", "model": "m", "without-evals": "true"} {
		if cmd.Flags().Lookup(flag) != nil {
			words = append(words, "--"+flag+"="+value)
		}
	}
	dir := t.TempDir()
	testkit.WriteFile(t, filepath.Join(dir, "all.yaml"), "kind: objective\nname: a\ngoal: b\nsteps: [c]\n")
	var last commandResult
	for _, args := range [][]string{
		nil,
		{dir},
		{id},
		{id, "x"},
		{"fl_01JQZ8W3T5N7R9V1X3Z5B7D9F1"},
		{"x", "--", "true"},
		{"EVENT_COMPLETED", "x"},
		{"x", "y", "z"},
		{"activity=90d"},
	} {
		last = p.run(append(slices.Clip(words), args...)...)
		if args == nil && cmd.HasSubCommands() && strings.Contains(last.out, "Usage:") {
			return // only a parent of other commands
		}
		if strings.Contains(last.err+last.out, "migrated by a newer version of agent; use that version or newer") {
			assert.Truef(t, last.code == exitUsage || name == "doctor", "agent %s: exit %d, want %d", name, last.code, exitUsage)
			return
		}
	}
	t.Errorf("agent %s does not refuse a newer schema: exit %d, %s%s", name, last.code, last.out, last.err)
}

// rowCounts counts the rows that commands could have written.
func rowCounts(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return pgtest.Value[string](t, pool, `
		select concat_ws(' ', (select count(*) from agent_activity), (select count(*) from agent_skills),
		                 (select count(*) from agent_executions), (select count(*) from agent_workers),
		                 (select count(*) from agent_locks), (select count(*) from agent_memory))`)
}

// Without CREATEROLE, migrate prints the statement for a superuser. After it, the next migration grants the contract.
// Roles belong to the cluster, so the test uses its own.
func TestMigrateWithoutCreateRole(t *testing.T) {
	t.Parallel()
	server, err := pgserver.Start(t.Context(), pgserver.Config{Ephemeral: true, Database: "agent", Owner: "owner"})
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, server.Stop(context.WithoutCancel(t.Context())))
	})
	p := newProgram(t, server.URL())
	statement := regexp.MustCompile(`run this as a superuser, then agent migrate again:\n  (create role .*;)\n`)
	var found []string
	for range 2 { // printed until the superuser has run it
		got := p.run("migrate")
		if found = statement.FindStringSubmatch(got.err); got.code != 0 || found == nil {
			t.Fatalf("agent migrate as a user without CREATEROLE: exit %d, stderr: %s", got.code, got.err)
		}
	}
	superuser, err := url.Parse(server.URL())
	require.NoError(t, err)
	superuser.User = url.User("postgres")
	db := connect(t, superuser.String())
	pgtest.Exec(t, db, found[1])
	got := p.run("migrate")
	require.Truef(t, got.code == 0 && got.err == "", "agent migrate with the role: exit %d, stderr: %s", got.code, got.err)
	pgtest.Exec(t, db, `create role importer login; grant `+migrations.ClientRole+` to importer`)
	superuser.User = url.User("importer")
	importer := connect(t, superuser.String())
	pgtest.Exec(t, importer, `select try_acquire_agent_lock('shelf', 'importer', 30); select * from agent_locks_live`)
	_, err = importer.Exec(t.Context(), `select from agent_locks`)
	assert.Error(t, err, "the role reads a table")
}
