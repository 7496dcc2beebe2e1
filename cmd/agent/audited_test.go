package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// audited is what the commands that the tests audit change.
const audited = hooks + `
---
kind: skill
name: pay
description: Pay.
trust: approve
handler: "sql:"
config: {query: select 1 as n}
---
kind: automation
name: nightly
cron: "0 3 * * *"
skill: pay
---
kind: objective
name: tidy
goal: Tidy up.
steps: [look]
`

// unaudited lists the commands without an audit row, with the reason.
var unaudited = map[string]string{
	"": "shows help", "help": "shows help", "version": "reads", "doctor": "reads", "healthcheck": "reads", "why": "reads", "why last": "reads", "trace": "reads", "trace ls": "reads", "trace last": "reads",
	"activity ls": "reads", "activity spend": "reads", "activity slowest": "reads", "activity failing": "reads", "activity audit": "reads", "lanes ls": "reads",
	"executions ls": "reads", "executions show": "reads", "executions status": "reads", "executions waiting": "reads", "executions stuck": "reads", "executions replay": "reads",
	"agents ls": "reads", "agents show": "reads", "agents diff": "reads", "models ls": "reads", "models check": "asks a model", "init": "writes files alone",
	"flows ls": "reads", "flows show": "reads", "flows schema": "reads", "requests ls": "reads", "requests show": "reads", "skills ls": "reads", "skills show": "reads", "approvals ls": "reads",
	"approvals show": "reads", "objectives ls": "reads", "objectives show": "reads", "automations ls": "reads", "automations show": "reads", "automations runs": "reads",
	"automations dead": "reads", "memory ls": "reads", "memory get": "reads", "memory search": "reads", "memory stats": "reads", "memory conflicts ls": "reads",
	"memory conflicts show": "reads", "webhooks ls": "reads", "webhooks show": "reads", "webhooks endpoints": "reads", "webhooks targets": "reads",
	"retention show": "reads", "mcp ls": "reads", "mcp show": "reads", "threads ls": "reads", "threads show": "reads", "threads locks": "reads", "threads access": "reads",
	"migrate": "agent_schema keeps it", "serve": "does what others ask", "dev": "applies a workspace, and serves", "demo": "plays on a database of its own", "mcp": "serves others",
	"mcp serve": "serves others", "chat": "is a visitor", "operate": "a turn has its own rows, on behalf of the admin", "skills call": "the call has its own row, on behalf of the admin",
	"heartbeat": "has its own rows", "lanes run": "runs a command of the admin's own; one that is skipped has a row", "selfheal": "a skill that is healed has a row",
	"documents ls": "reads", "documents show": "reads", "documents get": "reads",
	"documents add": "has a row; see the tests of documents", "documents rm": "has a row; see the tests of documents",
	"threads clean": "what is freed has a row", "mcp sync": "what changes has a row", "mcp accept": "has a row; see the tests of quarantine",
}

// auditedCommands are the others, in an order in which each changes something: with the object that the audit names,
// and the reason.
func auditedCommands(t *testing.T, p program, db *pgxpool.Pool, dir string) [][]string {
	one := func(sql string, args ...any) (id string) {
		t.Helper()
		if err := db.QueryRow(t.Context(), sql, args...).Scan(&id); err != nil {
			t.Fatal(err)
		}
		return id
	}
	begin := func() string {
		engine, err := executions.New(db, executions.Options{Keeper: lanes.NewKeeper(db, lanes.Options{})})
		if err != nil {
			t.Fatal(err)
		}
		x, _, err := engine.Start(t.Context(), db, executions.Spec{Flow: executions.External, Surface: trace.Flow, Agent: "tester", OnLost: "fail"})
		if err != nil {
			t.Fatal(err)
		}
		return x.ID
	}
	first, second := begin(), begin()
	asked := func() string {
		return one(`insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
			select x.trace_id, x.id, s.name, s.revision, '{}', lanekeeper.agent_uuid7()::text, clock_timestamp() + interval '1 day'
			  from agent_skills s, agent_executions x where s.name = 'pay' and x.id = $1::uuid returning id::text`, first)
	}
	dead := one(`insert into agent_automation_runs (automation_id, cause, scheduled_for, status)
		select id, 'manual', clock_timestamp(), 'dead' from agent_automations where name = 'nightly' returning id::text`)
	for _, name := range []string{"later", "never"} {
		one(`insert into agent_objectives (name, goal, status, proposed_by) values ($1, 'g', 'proposed', 'tester') returning id::text`, name)
	}
	one(`insert into agent_automations (name, skill_name, cron, timezone, enabled, disabled_by, proposed_by)
		select 'proposed', skill_name, cron, timezone, false, 'proposal', 'tester' from agent_automations where name = 'nightly' returning id::text`)
	one(`insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, headers, body, body_sha256)
		values ('shop', 'msg_1', 'wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'dead', '{}', '{"id": 7}', 'abc') returning id::text`)
	one(`insert into agent_threads (id, channel) values ('maria', 'chat') returning id`)
	one(`select try_acquire_agent_lock('pipeline:x', 'import', 3600)::text`)
	conflict := one(`insert into agent_memory_conflicts (category, key, value, if_revision, found_revision, found_value, trace_id, found_trace_id)
		values ('admin', 'contact', '"b"', 1, 1, '"a"', 'op_x', 'op_y') returning id::text`)
	request := one(`insert into agent_requests (kind, execution_id, trace_id, title) values ('test', $1::uuid, 'fl_x', 'sql') returning id::text`, second)
	step := one(`select s.id::text from agent_objective_steps s`)
	approve, reject := asked(), asked()
	return [][]string{
		{"skills disable pay", "skill pay", "why not"},
		{"skills enable pay", "skill pay", "why not"},
		{"webhooks disable shop", "endpoint shop", "why not"},
		{"webhooks enable shop", "endpoint shop", "why not"},
		{"webhooks disable ops --target", "target ops", "why not"},
		{"webhooks replay msg_1", "delivery msg_1", "why not"},
		{"approvals approve " + approve, "decision: approve, approval " + approve + ", skill pay", "why not"},
		{"approvals reject " + reject, "decision: reject, approval " + reject + ", skill pay", "why not"},
		{"automations disable nightly", "automation nightly", "why not"},
		{"automations enable nightly", "automation nightly", "why not"},
		{"automations accept proposed", "automation proposed", "why not"},
		{"automations redrive " + dead, "automation nightly, run " + dead, "why not"},
		{"automations run nightly", "automation nightly", "why not"},
		{"objectives add new --goal g", "objective new", ""},
		{"objectives accept later", "objective later", "why not"},
		{"objectives reject never", "objective never", "why not"},
		{"objectives pause tidy", "objective tidy", "why not"},
		{"objectives resume tidy", "objective tidy", "why not"},
		{"objectives done " + step, "step " + step, "why not"},
		{"memory set contact Ana --category admin", "memory admin / contact", "why not"},
		{"memory conflicts resolve " + conflict + " --take theirs", "decision: keep, conflict " + conflict + ", memory admin / contact", "why not"},
		{"memory forget contact --category admin", "memory admin / contact", "why not"},
		{"executions cancel " + first, "execution " + first + ", flow external", "why not"},
		{"executions retry " + first, "execution " + first, "why not"},
		{"executions fork " + second, "execution " + second, "why not"},
		{"executions start external:x", "flow external:x", "why not"},
		{"executions event EVENT_COMPLETED invoice-7", "event EVENT_COMPLETED, key invoice-7", ""},
		{"requests answer " + request + " --yes", "event TEST_COMPLETED, key " + request, ""},
		{"lanes release pipeline:x", "lane pipeline:x", "why not"},
		{"threads send maria hello", "thread maria", ""},
		{"threads invite maria", "thread maria", ""},
		{"threads open maria --flow support", "thread maria", ""},
		{"mcp offer pay", "skill pay", ""},
		{"mcp withdraw pay", "skill pay", ""},
		{"retention set activity=90d", `rows: {"activity"`, "why not"},
		{"retention run activity", "rows: activity", "why not"},
		{"pause", "", "why not"},
		{"resume", "", "why not"},
		{"apply " + dir, "changed: ", ""},
	}
}

// Every command that changes something leaves a row, of the admin, with the reason and the object.
func TestEveryCommandThatChangesSomethingIsInTheAudit(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p, db := on(t, url), connect(t, url)
	dir := folder(t, map[string]string{"all.yaml": audited})
	p.must("apply", dir)
	seen := map[string]bool{}
	check := func(command, object, reason string) {
		t.Helper()
		newest := func() (id string) {
			_ = db.QueryRow(t.Context(), `select coalesce(max(id::text), '') from agent_activity`).Scan(&id)
			return id
		}
		before := newest()
		args := strings.Fields(command)
		if reason != "" {
			args = append(args, "--reason", reason)
		}
		if got := p.run(args...); got.code != 0 {
			t.Errorf("agent %s: exit %d: %s", command, got.code, got.err)
			return
		}
		var page struct{ Items []activity.Audited }
		p.mustJSON(&page, "activity", "audit")
		for _, r := range page.Items {
			if r.ID > before && r.Actor == activity.Admin && r.OnBehalfOf == activity.Admin && strings.Contains(r.Object, object) && (reason == "" || r.Reason == reason) {
				return
			}
		}
		t.Errorf("agent %s: no row names the admin, %q and %q: %+v", command, object, reason, page.Items[:min(3, len(page.Items))])
	}
	for _, c := range auditedCommands(t, p, db, dir) {
		if strings.HasPrefix(c[0], "apply") {
			if err := os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(strings.Replace(audited, "Pay.", "Pay now.", 1)), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		check(c[0], c[1], c[2])
		words := strings.Fields(c[0])
		for n := 1; n <= min(3, len(words)); n++ {
			seen[strings.Join(words[:n], " ")] = true
		}
	}
	var access string
	if err := db.QueryRow(t.Context(), `select id::text from agent_thread_access where thread_id = 'maria' limit 1`).Scan(&access); err != nil {
		t.Fatal(err)
	}
	check("threads revoke maria "+access, "thread maria, access "+access, "")
	seen["threads revoke"] = true
	for name, cmd := range everyCommand(t) {
		if unaudited[name] == "" && !seen[name] && len(cmd.Commands()) == 0 && !strings.HasPrefix(name, "completion") {
			t.Errorf("agent %s: does it change something? Then give it a row in the audit, and a line here", name)
		}
	}
}

// A run whose call needs an approval says so, with what to do, and is settled when the approved call was made.
func TestARunThatNeedsAnApprovalSaysSoAndIsSettledWithIt(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	p.must("apply", folder(t, map[string]string{"all.yaml": audited}))
	var ran struct {
		Run        struct{ ID, Status string }
		ApprovalID string `json:"approval_id"`
	}
	p.mustJSON(&ran, "automations", "run", "nightly")
	contains(t, p.must("automations", "run", "nightly"), "waits for approval "+ran.ApprovalID, "agent approvals approve")
	contains(t, p.must("approvals", "show", ran.ApprovalID), "asked by", "agent in automation (surface operate) for the admin")
	contains(t, p.must("automations", "runs"), "awaits approval "+ran.ApprovalID[:30])
	p.must("approvals", "approve", ran.ApprovalID, "--reason", "it is due")
	late := p.run("approvals", "reject", ran.ApprovalID)
	contains(t, late.err, "decided already: approved by admin at", "it is due", "see agent approvals show "+ran.ApprovalID)
	if late.code != 1 || strings.Contains(late.err, "or its skill") {
		t.Errorf("exit %d: %s", late.code, late.err)
	}
	p.must("heartbeat")
	var runs struct{ Items []struct{ ID, Status string } }
	p.mustJSON(&runs, "automations", "runs", "nightly")
	for _, r := range runs.Items {
		if r.Status != "success" {
			t.Errorf("after the call the run is %+v", r)
		}
	}
	if shown := p.must("approvals", "show", ran.ApprovalID); strings.Contains(shown, "waits for the decision") || !strings.Contains(shown, "consumed") {
		t.Errorf("shown is %s", shown)
	}

	p.mustJSON(&ran, "automations", "run", "nightly")
	p.must("approvals", "reject", ran.ApprovalID, "--reason", "too dear")
	contains(t, p.must("automations", "runs"), "rejected by admin: too dear")

	p.must("skills", "disable", "pay")
	off := p.run("automations", "run", "nightly")
	if off.code != 1 || strings.HasPrefix(off.out, "\n") || !strings.Contains(off.err, "agent skills enable pay") {
		t.Errorf("of a disabled skill: exit %d, stdout %q, stderr %q", off.code, off.out, off.err)
	}
}
