package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

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

// A database is declared by name, its URL comes from the environment, and nothing that is printed has it. A call
// without the setting is refused, names it, and is no failure that self-heal counts.
func TestSkillsOnANamedDatabase(t *testing.T) {
	t.Parallel()
	url, there := pgtest.URL(t), pgtest.URL(t)
	dir := folder(t, map[string]string{"orders.yaml": orders})
	shop := connect(t, there)
	if _, err := shop.Exec(t.Context(), orderTable); err != nil {
		t.Fatal(err)
	}
	without, with := on(t, url), on(t, url, "SHOP_DATABASE_URL="+there)
	says := "/orders.yaml:3:10: url_env: set SHOP_DATABASE_URL"
	if got := without.run("apply", dir); got.code != 2 || !strings.Contains(got.err, says) {
		t.Errorf("without the setting: exit %d, %s", got.code, got.err)
	}
	wrong := folder(t, map[string]string{"orders.yaml": strings.Replace(orders, "closed + 1", "clsed + 1", 1)})
	says = `/orders.yaml:14:32: sql: column "clsed" does not exist`
	if got := with.run("apply", wrong); got.code != 2 || !strings.Contains(got.err, says) {
		t.Errorf("wrong SQL: exit %d, %s", got.code, got.err)
	}
	contains(t, with.must("apply", dir), "+ database shop", "+ skill close_order")
	contains(t, with.must("skills", "call", "close_order", "--args", `{"id": 1}`), `"row_count": 1`)
	contains(t, with.must("doctor"), "ok   database shop")
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
	contains(t, with.must("skills", "call", "close_order", "--args", `{"id": 1}`), `"row_count": 1`)
	var failed int
	err := connect(t, url).QueryRow(t.Context(), `
		select count(*) from agent_skill_calls where skill_name = 'close_order' and status = 'error'`).Scan(&failed)
	if err != nil || failed != 0 {
		t.Errorf("%d failures are counted, %v", failed, err)
	}
}

// The process is killed between the commit in the shop's database and the checkpoint in its own. Another process goes
// on, gets the recorded result, and the order was closed once.
func TestAnEffectInANamedDatabaseHappensOnceThroughACrash(t *testing.T) {
	t.Parallel()
	url, there := pgtest.URL(t), pgtest.URL(t)
	shop, own := connect(t, there), connect(t, url)
	if _, err := shop.Exec(t.Context(), orderTable); err != nil {
		t.Fatal(err)
	}
	p := on(t, url, "SHOP_DATABASE_URL="+there, "AGENT_WORKER_LEASE=2s", token, "AGENT_LISTEN=127.0.0.1:0",
		"AGENT_LOG_LEVEL=info")
	p.must("apply", folder(t, map[string]string{"orders.yaml": orders}))
	row, err := shop.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer row.Rollback(t.Context())
	if _, err := row.Exec(t.Context(), `select from orders where id = 1 for update`); err != nil {
		t.Fatal(err)
	}
	args := []string{"skills", "call", "close_order", "--args", `{"id": 1}`}
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...) //nolint:gosec // itself
	cmd.Env = append(append(os.Environ(), asAgent+"=1"), p.environ...)
	cmd.SysProcAttr = proctest.DieWithUs()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	until(t, shop, `select count(*) > 0 from pg_stat_activity
		where datname = current_database() and wait_event_type = 'Lock' and query like '%orders%'`)
	gate, err := own.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer gate.Rollback(t.Context())
	if _, err := gate.Exec(t.Context(), `lock table agent_checkpoints in share mode`); err != nil {
		t.Fatal(err)
	}
	if err := row.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	until(t, shop, `select count(*) = 1 from agent_effects where result is not null`)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	if err := gate.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.start("serve").find(t, `listen=http://(\S+)`)
	until(t, own, `select count(*) = 1 from agent_executions where flow = 'skill_call' and status = 'completed'
		and claim > 1 and result::text like '%row_count%'`)
	var closed int
	if err := shop.QueryRow(t.Context(), `select closed from orders`).Scan(&closed); err != nil || closed != 1 {
		t.Errorf("the order was closed %d times, %v", closed, err)
	}
}

// until waits for a query to answer true.
func until(t *testing.T, db *pgxpool.Pool, query string) {
	t.Helper()
	pgtest.Eventually(t, pgWait, func() bool {
		var yes bool
		return db.QueryRow(t.Context(), query).Scan(&yes) == nil && yes
	}, query)
}
