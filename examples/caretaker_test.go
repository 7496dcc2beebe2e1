package examples_test

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/examples"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/workspace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func caretaker(t *testing.T) workspace.Workspace {
	t.Helper()
	files, err := examples.Caretaker()
	require.NoError(t, err)
	w, err := workspace.Load(files)
	require.NoError(t, err)
	return w
}

// result is the result of a sql: skill.
type result struct {
	Rows     []map[string]any `json:"rows"`
	RowCount int              `json:"row_count"`
}

// caller calls the caretaker's skills on a database.
type caller struct {
	t        *testing.T
	pool     *pgxpool.Pool
	registry *skills.Registry
}

func newCaller(t *testing.T, pool *pgxpool.Pool) caller {
	t.Helper()
	registry, err := skills.New(skills.Options{Pool: pool})
	require.NoError(t, err)
	return caller{t: t, pool: pool, registry: registry}
}

func (c caller) try(name, args string) (result, error) {
	c.t.Helper()
	skill, err := skills.Get(c.t.Context(), c.pool, name)
	require.NoError(c.t, err)
	raw, err := c.registry.Invoke(c.t.Context(), skills.Call{Skill: skill, Args: json.RawMessage(args)})
	var r result
	if err == nil {
		require.NoError(c.t, json.Unmarshal(raw, &r))
	}
	return r, err
}

func (c caller) call(name, args string) result {
	c.t.Helper()
	r, err := c.try(name, args)
	require.NoError(c.t, err, "call", name)
	return r
}

func (c caller) exec(statements ...string) {
	c.t.Helper()
	for _, sql := range statements {
		_, err := c.pool.Exec(c.t.Context(), sql)
		require.NoError(c.t, err, sql)
	}
}

// flush has the pool's session publish its statistics at once, if the server can (PostgreSQL 15).
func (c caller) flush() {
	c.t.Helper()
	c.exec(`do $$ begin perform pg_stat_force_next_flush(); exception when undefined_function then null; end $$`)
}

// find returns the row with this value.
func (r result) find(t *testing.T, column string, value any) map[string]any {
	t.Helper()
	for _, row := range r.Rows {
		if row[column] == value {
			return row
		}
	}
	t.Fatalf("no row has %v as %s: %v", value, column, r.Rows)
	return nil
}

// asRole returns a pool of the same database. The role of its sessions may only read the agent's own tables.
func asRole(t *testing.T, pool *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	const role = "caretaker_test_reader"
	newCaller(t, pool).exec(`do $$ begin create role `+role+
		`; exception when duplicate_object or unique_violation then null; end $$`,
		`grant select on agent_skills, agent_memory, agent_automations, agent_automation_runs to `+role)
	config := pool.Config()
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "set role "+pgx.Identifier{role}.Sanitize())
		return err
	}
	limited, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(limited.Close)
	return limited
}

// applied returns a new database with the caretaker applied.
func applied(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.DB(t)
	_, err := workspace.Apply(t.Context(), pool, caretaker(t), workspace.Options{})
	require.NoError(t, err)
	return pool
}

const broken = "broken_on_purpose"

// TestEverySkillRuns calls each skill without arguments, like its model at first.
func TestEverySkillRuns(t *testing.T) {
	for name, prepare := range map[string]func(*testing.T, *pgxpool.Pool) *pgxpool.Pool{
		"as the owner": func(_ *testing.T, pool *pgxpool.Pool) *pgxpool.Pool { return pool },
		"as a role without privileges": func(t *testing.T, pool *pgxpool.Pool) *pgxpool.Pool {
			return asRole(t, pool)
		},
		"with tables, rows and indexes": func(t *testing.T, pool *pgxpool.Pool) *pgxpool.Pool {
			newCaller(t, pool).exec(`create table busy (n int, note text)`, `create index busy_note on busy (note)`,
				`insert into busy select n, n from generate_series(1, 5000) n`, `delete from busy where n % 2 = 0`,
				`create materialized view busy_view as select * from busy`)
			return pool
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCaller(t, prepare(t, applied(t)))
			for _, d := range caretaker(t).Skills {
				if d.Definition.Name != broken {
					c.call(d.Definition.Name, `{}`)
				}
			}
		})
	}
}

func TestBrokenSkillFails(t *testing.T) {
	_, err := newCaller(t, applied(t)).try(broken, `{}`)
	failure, ok := errors.AsType[*skills.CallError](err)
	assert.Truef(t, ok && failure.Class == skills.ClassSQL, "error is %v", err)
}

func TestNoSkillCanWrite(t *testing.T) {
	for _, d := range caretaker(t).Skills {
		assert.Truef(t, d.Definition.Handler == "sql:" && d.Definition.Idempotent,
			"%s is not a query that may be repeated", d.Definition.Name)
	}
}

func TestTableSizesOrder(t *testing.T) {
	c := newCaller(t, applied(t))
	c.exec(`create table many (n int)`, `insert into many select generate_series(1, 20000)`,
		`create table wide (t text)`, `alter table wide alter t set storage external`,
		`insert into wide select repeat('x', 1000000) from generate_series(1, 3)`)
	pgtest.Eventually(t, func() bool {
		c.flush()
		return c.call("table_sizes", `{"order_by": "rows_added", "limit": 1}`).Rows[0]["table"] == "public.many"
	}, "the table with most rows comes first")
	first := c.call("table_sizes", `{"limit": 1}`).Rows[0]
	assert.Truef(t, first["table"] == "public.wide" && first["bytes"].(float64) >= 3_000_000,
		"the largest table is %v", first)
	_, err := c.try("table_sizes", `{"order_by": "name"}`)
	assert.Truef(t, errors.As(err, new(*skills.InvalidParams)), "error is %v", err)
}

func TestCompareSizesInputs(t *testing.T) {
	day := func(hours int) string {
		return "clock_timestamp() - make_interval(hours => " + strconv.Itoa(hours) + ")"
	}
	remember := func(value string, hours int) string {
		return `insert into agent_memory (category, key, value, updated_at)
			values ('sizes', 'at ` + strconv.Itoa(hours) + `', '` + value + `', ` + day(hours) + `)`
	}
	measure := func(bytes string, hours int) string {
		return `insert into agent_automation_runs (automation_id, scheduled_for, status, output, finished_at)
			select id, ` + day(hours) + `, 'success', '{"rows": [{"table": "public.t", "bytes": ` + bytes + `}]}', ` + day(hours) + `
			  from agent_automations where name = 'daily sizes'`
	}
	pool := applied(t)
	newCaller(t, pool).exec(`create table t (n int)`, `insert into t values (1)`)
	for name, c := range map[string]struct {
		statements []string
		before     any
	}{
		"nothing yet": {nil, nil},
		"an object":   {[]string{remember(`{"public.t": 100}`, 24)}, 100.0},
		"rows":        {[]string{remember(`[{"table": "public.t", "bytes": 200}]`, 24)}, 200.0},
		"rows inside a result": {[]string{remember(`{"row_count": 1, "rows": [{"table": "public.t", "bytes": 300}]}`,
			24)}, 300.0},
		"text is passed over":        {[]string{remember(`"public.t has 5 bytes"`, 24)}, nil},
		"other facts too":            {[]string{remember(`{"row_count": 7}`, 24)}, nil},
		"the automation's":           {[]string{measure(`400`, 24)}, 400.0},
		"yesterday's before today's": {[]string{measure(`500`, 1), measure(`600`, 25), measure(`700`, 49)}, 600.0},
		"the oldest of today's":      {[]string{measure(`800`, 1), remember(`{"public.t": 900}`, 3)}, 900.0},
		"the expired are forgotten": {[]string{
			remember(`{"public.t": 100}`, 24), `update agent_memory set expires_at = clock_timestamp() - interval '1 hour'`,
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			caller := newCaller(t, pool)
			caller.exec(`delete from agent_memory`, `delete from agent_automation_runs`)
			caller.exec(c.statements...)
			row := caller.call("compare_sizes", `{"limit": 500}`).find(t, "table", "public.t")
			assert.Truef(t, row["bytes_before"] == c.before && row["bytes_now"] == 8192.0 &&
				(row["compared_with"] == nil) == (c.before == nil), "row is %v, not %v before", row, c.before)
		})
	}
}

func TestCompareSizesShowsDroppedTables(t *testing.T) {
	c := newCaller(t, applied(t))
	c.exec(`insert into agent_memory (category, key, value) values ('sizes', 'k', '{"public.lost": 5}')`)
	row := c.call("compare_sizes", `{"limit": 500}`).find(t, "table", "public.lost")
	assert.Truef(t, row["verdict"] == "gone", "row is %v", row)
}

func TestUnusedIndexesExcludeConstraints(t *testing.T) {
	c := newCaller(t, applied(t))
	// larger than those of the schema
	c.exec(`create table t (id int primary key, u int unique, n int)`,
		`insert into t select i, i, i from generate_series(1, 5000) i`,
		`create index unused on t (n)`, `create unique index only_once on t (n)`)
	var names []any
	for _, row := range c.call("unused_indexes", `{"min_bytes": 0, "limit": 100}`).Rows {
		if row["table"] == "public.t" {
			names = append(names, row["index"])
		}
	}
	assert.Truef(t, len(names) == 1 && names[0] == "public.unused", "unused are %v", names)
}

func TestDeadRowsAreCounted(t *testing.T) {
	c := newCaller(t, applied(t))
	c.exec(`create table t (n int) with (autovacuum_enabled = off)`, `insert into t select generate_series(1, 3000)`,
		`delete from t where n <= 2000`)
	pgtest.Eventually(t, func() bool {
		c.flush()
		found := c.call("dead_rows", `{}`)
		return found.RowCount == 1 && found.Rows[0]["dead_rows"] == 2000.0
	}, "2000 dead rows are shown")
}

func TestLongRunningNamesBlockers(t *testing.T) {
	c := newCaller(t, applied(t))
	tx, err := c.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `select 'held open'`)
	found := c.call("long_running", `{"min_seconds": 0}`)
	row := found.find(t, "state", "idle in transaction")
	assert.Truef(t, row["query"] == "select 'held open'", "row is %v", row)
	found = c.call("long_running", `{}`)
	assert.Truef(t, found.RowCount == 0, "a transaction of less than a minute is long: %v", found.Rows)
}
