package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestDoctor(t *testing.T) {
	t.Parallel()
	type findings struct {
		Items []struct {
			Check, Detail string
			OK            bool
		}
	}
	url := pgtest.URL(t)
	p := newProgram(t, url+"&synchronous_commit=off")
	pgtest.Exec(t, connect(t, url), `
		insert into agent_workers (name, kind, ttl_seconds, expires_at)
		values ('a worker outside', 'outside', 60, now() + interval '1 minute')`)
	assert.Contains(t, p.must("doctor"), "ok   configuration", "ok   database", "ok   schema", "ok   rights", "none alive",
		"ok   model answers", "commits        do not wait for the disk: fsync is ")
	var all findings
	p.mustJSON(&all, "doctor")
	for _, f := range all.Items {
		assert.Truef(t, f.OK, "%s: %s", f.Check, f.Detail)
	}
	for name, environ := range map[string][]string{
		"configuration": {"AGENT_LANES=maybe", "AGENT_WORKERS=0"},
		"database":      {"DATABASE_URL=postgres://localhost:1/none"},
		"schema":        {"DATABASE_URL=" + pgtest.EmptyURL(t)},
		"rights":        {"DATABASE_URL=" + pgtest.URL(t) + "&default_transaction_read_only=on"},
		"prices": {
			"DATABASE_URL=" + pgtest.URL(t), "OPENAI_BASE_URL=http://127.0.0.1:1/v1", "AGENT_MODEL=gpt-4o",
			`AGENT_PRICES={"gpt-4o":{"input":2}}`,
		},
		"model":         {"DATABASE_URL=" + withSecret(t, pgtest.URL(t)), "OPENAI_BASE_URL=http://me:hunter2@127.0.0.1:1/v1"},
		"model answers": {"DATABASE_URL=" + pgtest.URL(t), "OPENAI_BASE_URL=http://127.0.0.1:1/v1"},
	} {
		got := newProgramWithoutDatabase(t, environ...).run("doctor")
		assert.Truef(t, got.code == 1 && !strings.Contains(got.err, "agent:") &&
			!strings.Contains(got.out+got.err, "hunter2") && strings.Contains(got.out, "BAD  "+name),
			"bad %s: exit %d, stderr %q, stdout:\n%s", name, got.code, got.err, got.out)
	}
}

func TestDoctorWarnsOfMissingProcessAndRights(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p, db := newProgram(t, url), connect(t, url)
	got := p.must("doctor")
	assert.True(t, !strings.Contains(got, "client role") && strings.Contains(got, "ok   workers"), got)
	p.must("executions", "start", "external:work")
	assert.Contains(t, p.must("doctor"), "ok   workers")
	pgtest.Exec(t, db, `insert into agent_executions (trace_id, surface, flow, status)
		values (lanekeeper.agent_trace_id('fl'), 'flow', 'orders', 'pending')`)
	pgtest.Exec(t, db, `revoke select on agent_locks_live from agent_client`)
	assert.Contains(t, p.must("doctor"),
		"WARN workers        executions are pending and no process is alive; start `agent serve`",
		"WARN client role    the rights of agent_client differ from the contract's; run `agent migrate`")
}

func TestDoctorAndMigrateWarnOfRoleThatCanCreateObjects(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p, db := newProgram(t, url), connect(t, url)
	pgtest.Exec(t, db, `grant create on schema public to public`)
	const everyone = "every login may create functions and operators in the schema public"
	assert.Contains(t, p.must("doctor"), "WARN schema rights  "+everyone)
	assert.Contains(t, p.run("migrate").err, "warning: "+everyone)
}

func TestDoctorWarnsOfOldDueRuns(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p, db := newProgram(t, url), connect(t, url)
	pgtest.Exec(t, db, `
		insert into agent_automations (name, skill_name, trigger, event) values ('mail', 'sizes', 'event', 'e')`)
	due := `insert into agent_automation_runs (automation_id, cause, scheduled_for, status, created_at)
		select id, 'signal', now() - $1::interval, 'due', now() - $1::interval from agent_automations`
	pgtest.Exec(t, db, due, "1 second")
	assert.Contains(t, p.must("doctor"), "ok   automations    no run has been due for more than 10 min")
	pgtest.Exec(t, db, due, "1 day")
	assert.Contains(t, p.must("doctor"), "WARN automations    mail: 2 runs due, the oldest since ",
		"see `agent automations ls`")
	assert.Contains(t, p.must("automations", "ls"), "OLDEST DUE", "  2  ")
	var all struct {
		Items []struct {
			RunsDue     int        `json:"runs_due"`
			OldestDueAt *time.Time `json:"oldest_due_at"`
		}
	}
	p.mustJSON(&all, "automations", "ls")
	assert.True(t, len(all.Items) == 1 && all.Items[0].RunsDue == 2 && all.Items[0].OldestDueAt != nil, all)
}

func TestDoctorWarnsOfUncountedActivity(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p, db := newProgram(t, url), connect(t, url)
	pgtest.Exec(t, db, `
		insert into agent_workers (name, kind, ttl_seconds, started_at, expires_at)
		values ('p', 'process', 60, now() - interval '1 hour', now() + interval '1 day')`)
	row := `insert into agent_activity (id, trace_id, kind, skill_name, created_at)
		select lanekeeper.agent_uuid7(t), 'fl_x', 'call', 'fetch', t from (select now() - $1::interval) x (t)`
	pgtest.Exec(t, db, row, "1 second")
	assert.Contains(t, p.must("doctor"), "ok   counts         no activity is uncounted for more than 10 min")
	pgtest.Exec(t, db, row, "1 hour")
	assert.Contains(t, p.must("doctor"), "WARN counts         the activity log is not counted since ")
}

// doctor must not wait for the lock that blocks everyone. It names the blocking session.
func TestDoctorNamesBlockingSession(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t)
	pool := pgtest.Pool(t, server.URL(), postgres.Options{ApplicationName: "upkeep"})
	p := newProgram(t, server.URL())
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `lock table agent_workers in access exclusive mode`)
	got := p.run("doctor")
	assert.Equal(t, 1, got.code)
	assert.Contains(t, got.out, "ok   commits", "BAD  workers        session ", "(upkeep, idle in transaction, ",
		"locks agent_workers; it ends with its transaction, or by pg_terminate_backend")
	require.NoError(t, tx.Rollback(t.Context()))
	pgtest.Exec(t, pool, `alter system set synchronous_standby_names = 'nobody'`)
	pgtest.Exec(t, pool, `select pg_reload_conf()`)
	pgtest.Eventually(t, func() bool { // the checkpointer applies the setting to commits
		got = p.run("doctor")
		return got.code == 1
	}, "commits wait for a standby")
	assert.Contains(t, got.out, "BAD  commits        a commit is not finished after 5s; check that the standbys of "+
		"synchronous_standby_names (nobody) are connected", "ok   workers")
	pgtest.Exec(t, pool, `alter system reset synchronous_standby_names`)
	pgtest.Exec(t, pool, `select pg_reload_conf()`)
	pgtest.Exec(t, pool, `
		create function full_disk() returns trigger language plpgsql as $$ begin raise 'full' using errcode = '53100'; end $$;
		create trigger full_disk before insert on agent_idempotency execute function full_disk()`)
	assert.Contains(t, p.run("doctor").out, "BAD  commits        ", "the database server's disk is full: free space on it")
}
