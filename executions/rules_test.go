package executions_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// attacks are writes that no rule allows, whatever the state of execution $1. Each ends with rows that were written.
var attacks = map[string]string{
	"no status":            `update agent_executions set status = 'banana' where id = $1`,
	"null status":          `update agent_executions set status = null where id = $1`,
	"begins ended":         `insert into agent_executions (trace_id, surface, flow, status) select 't', 'flow', 'f', 'completed' where $1::uuid is not null`,
	"begins waiting":       `insert into agent_executions (trace_id, surface, flow, status) select 't', 'flow', 'f', 'waiting' where $1::uuid is not null`,
	"unknown surface":      `insert into agent_executions (trace_id, surface, flow) select 't', 'page', 'f' where $1::uuid is not null`,
	"claim goes back":      `update agent_executions set claim = -1 where id = $1`,
	"unknown wait":         `update agent_executions set waiting_for = 'godot' where id = $1`,
	"unknown result":       `update agent_executions set result_type = 'fine' where id = $1`,
	"stale checkpoint":     `insert into agent_checkpoints (execution_id, step, claim) values ($1, 'stolen', 99)`,
	"old checkpoint":       `insert into agent_checkpoints (execution_id, step, claim) values ($1, 'stolen', -1)`,
	"checkpoint of none":   `insert into agent_checkpoints (execution_id, step, claim) select gen_random_uuid(), 'stolen', 1 where $1::uuid is not null`,
	"checkpoint moved":     `update agent_checkpoints set claim = 99 where execution_id = $1`,
	"begins while paused":  `insert into agent_executions (trace_id, surface, flow, status, claimed_by) select 't', 'flow', 'f', 'running', gen_random_uuid() where $1::uuid is not null`,
	"claimed while paused": `update agent_executions set status = 'running', claimed_by = gen_random_uuid() where id = $1 and status = 'pending'`,
	"stale activity":       `insert into agent_activity (trace_id, execution_id, claim, kind, agent, surface, skill_name, status) values ('t', $1, 99, 'note', 'a', 'flow', 's', 'success')`,
	"claimed without run":  `update agent_executions set claimed_by = gen_random_uuid(), status = status where id = $1 and status <> 'running'`,
	"ended without an end": `update agent_executions set completed_at = clock_timestamp() where id = $1 and completed_at is null`,
	"end taken back":       `update agent_executions set completed_at = null where id = $1 and completed_at is not null`,
}

// settings are the names that the code has ever set, and those that it read to let something pass.
func settings(t *testing.T) []string {
	t.Helper()
	names := map[string]bool{}
	for _, n := range []string{"valid", "follows", "fenced", "unpaused", "changed", "claimed", "missed"} {
		names["lanekeeper."+n] = true
	}
	paths, err := filepath.Glob("../migrations/schema/*.sql")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no schema: %v", err)
	}
	for _, p := range paths {
		text, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`'(lanekeeper\.[a-z_]+)'`).FindAllStringSubmatch(string(text), -1) {
			names[m[1]] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// Nobody below superuser writes past a rule: by no setting, in no state, with every right on the tables.
func TestNoSettingAndNoRoleSwitchesARuleOff(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	role := "attacker_" + strings.ToLower(value[string](t, pool, `select current_database()`))
	exec(t, pool, fmt.Sprintf(`create role %q`, role))
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if _, err := pool.Exec(ctx, fmt.Sprintf(`drop owned by %[1]q; drop role %[1]q`, role), pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Error(err)
		}
	})
	exec(t, pool, fmt.Sprintf(`
		grant all on all tables in schema public to %[1]q;
		grant usage on schema lanekeeper to %[1]q;
		grant execute on all functions in schema lanekeeper to %[1]q`, role))
	subjects := map[executions.Status]subject{}
	for _, s := range states {
		subjects[s] = inState(t, pool, s)
	}
	exec(t, pool, `insert into agent_checkpoints (execution_id, step, claim) values ($1, 'done', $2)`,
		subjects[executions.Running].id, subjects[executions.Running].claim)
	exec(t, pool, `select pause_agent('an attack')`)
	everything := `select md5(string_agg(to_jsonb(x)::text, '' order by x.id)) || (select count(*) from agent_checkpoints) from agent_executions x`
	before := value[string](t, pool, everything)
	direct := pgtest.DirectURL(t, pool.Config().ConnString()) // a pooler hands on what a session sets
	for _, as := range []string{"owner", role} {
		for _, value := range []string{"", "yes", "on", "{}"} {
			attackAs(t, direct, as, value, subjects)
		}
	}
	if after := value[string](t, pool, everything); after != before {
		t.Error("something was written")
	}
}

// attackAs tries each attack on an execution in each state, with every setting at a value.
func attackAs(t *testing.T, url, role, value string, subjects map[executions.Status]subject) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	for _, name := range settings(t) {
		if _, err := conn.Exec(t.Context(), `select set_config($1, $2, false)`, name, value); err != nil {
			t.Fatal(err)
		}
	}
	if role != "owner" {
		if _, err := conn.Exec(t.Context(), fmt.Sprintf(`set role %q`, role)); err != nil {
			t.Fatal(err)
		}
	}
	for state, x := range subjects {
		for what, sql := range attacks {
			tag, err := conn.Exec(t.Context(), sql, x.id)
			if err == nil && tag.RowsAffected() > 0 || err != nil && !refusedByRule(err) {
				t.Errorf("%s with settings %q: %s of one that is %s: %v, %d rows", role, value, what, state, err, tag.RowsAffected())
			}
		}
		for _, to := range states {
			if to == state || slices.Contains(next[state], to) {
				continue
			}
			if _, err := conn.Exec(t.Context(), `update agent_executions set status = $2 where id = $1`, x.id, string(to)); !refusedByRule(err) {
				t.Errorf("%s with settings %q: from %s to %s: %v", role, value, state, to, err)
			}
		}
		copied(t, conn, x)
	}
}

// copied tries to load rows past the rules.
func copied(t *testing.T, conn *pgx.Conn, x subject) {
	t.Helper()
	id, err := conn.PgConn().EscapeString(x.id)
	if err != nil {
		t.Fatal(err)
	}
	for what, from := range map[string][2]string{
		"an execution that ended": {`copy agent_executions (trace_id, surface, flow, status) from stdin`, "t\tflow\tf\tcompleted\n"},
		"a stale checkpoint":      {`copy agent_checkpoints (execution_id, step, claim) from stdin`, id + "\tstolen\t99\n"},
	} {
		if _, err := conn.PgConn().CopyFrom(t.Context(), strings.NewReader(from[1]), from[0]); !refusedByRule(err) {
			t.Errorf("%s was copied: %v", what, err)
		}
	}
}

// refusedByRule reports whether an error is a rule's: not one of syntax, rights or the connection.
func refusedByRule(err error) bool {
	var e *pgconn.PgError
	return errors.As(err, &e) && slices.Contains([]string{"LK001", "LK002", "LK003", "23502", "23514"}, e.Code)
}
