package main

import (
	"context"
	"encoding/json"
	"fmt"
	"html"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/trace"
)

// auditedYAML declares the rows that the audited commands change.
const auditedYAML = webhooksYAML + `
---
kind: skill
name: pay
description: Pay.
trust: approve
handler: "sql:"
config: {query: select 1 as n}
---
kind: channel
name: support
type: telegram
secrets: {token: "${TELEGRAM_TOKEN}"}
---
kind: automation
name: nightly
cron: "0 0 1 1 *"
skill: pay
---
kind: objective
name: tidy
goal: Tidy up.
steps: [look]
`

// notAudited lists the commands without an audit row, with the reason.
var notAudited = map[string]string{
	"": "shows help", "help": "shows help", "version": "reads", "doctor": "reads", "healthcheck": "reads", "why": "reads",
	"why last": "reads", "trace": "reads", "trace ls": "reads", "trace last": "reads",
	"activity ls": "reads", "activity spend": "reads", "activity slowest": "reads", "activity failing": "reads",
	"activity audit": "reads", "lanes ls": "reads",
	"executions ls": "reads", "executions show": "reads", "executions status": "reads", "executions waiting": "reads",
	"executions stuck": "reads", "executions replay": "reads",
	"agents ls": "reads", "agents show": "reads", "agents diff": "reads", "models ls": "reads",
	"models check": "asks a model", "init": "writes files alone", "login": "writes a file alone",
	"logout":   "writes a file alone",
	"flows ls": "reads", "flows show": "reads", "flows schema": "reads", "requests ls": "reads", "requests show": "reads",
	"skills ls": "reads", "skills show": "reads", "approvals ls": "reads",
	"approvals show": "reads", "objectives ls": "reads", "objectives show": "reads", "automations ls": "reads",
	"automations show": "reads", "automations runs": "reads",
	"automations dead": "reads", "memory ls": "reads", "memory get": "reads", "memory search": "reads",
	"memory stats": "reads", "memory conflicts ls": "reads",
	"memory conflicts show": "reads", "webhooks ls": "reads", "webhooks show": "reads", "webhooks endpoints": "reads",
	"webhooks targets": "reads",
	"channels ls":      "reads", "channels show": "reads", "channels sends": "reads", "channels pairings": "reads",
	"channels pair": "has a row; see test/channels", "channels unpair": "has a row; see test/channels",
	"retention show": "reads", "mcp ls": "reads", "mcp show": "reads", "threads ls": "reads", "threads show": "reads",
	"threads locks": "reads", "threads access": "reads",
	"migrate": "agent_schema keeps it", "serve": "does what others ask", "dev": "applies a workspace, and serves",
	"demo": "plays on a database of its own", "mcp": "serves others",
	"mcp serve": "serves others", "chat": "is a visitor", "operate": "a turn has its own rows, on behalf of the admin",
	"skills call": "the call has its own row, on behalf of the admin",
	"eval ls":     "reads", "eval show": "reads", "eval add": "writes a file", "eval labels": "reads",
	"eval run":  "the runner writes run_eval; its test reads the row",
	"heartbeat": "has its own rows", "lanes run": "runs a command of the admin's own; one that is skipped has a row",
	"selfheal": "a skill that is healed has a row", "selfheal report": "reads",
	"eval counterfactual": "the runner writes run_eval", "eval shadow": "the runner writes run_eval",
	"eval shadow ls": "reads", "eval shadow stop": "has a row; see the test of shadows",
	"principals ls": "reads", "principals show": "reads", "tokens ls": "reads", "sessions ls": "reads",
	"documents ls": "reads", "documents show": "reads", "documents get": "reads",
	"documents add": "has a row; see the tests of documents", "documents rm": "has a row; see the tests of documents",
	"threads clean": "what is freed has a row", "mcp sync": "what changes has a row",
	"mcp accept": "has a row; see the tests of quarantine",
}

// auditedCommands returns all commands with an audit row, each with audited object and reason. In their order, each has
// an effect.
func auditedCommands(t *testing.T, p program, db *pgxpool.Pool, dir string) [][]string {
	one := func(sql string, args ...any) string { return pgtest.Value[string](t, db, sql, args...) }
	begin := func() string {
		engine, err := executions.New(db, executions.Options{Keeper: lanes.NewKeeper(db, lanes.Options{})})
		require.NoError(t, err)
		x, _, err := engine.Start(t.Context(), db, executions.Spec{
			Flow: executions.External, Surface: trace.Flow,
			Agent: "tester", OnLost: "fail",
		})
		require.NoError(t, err)
		return x.ID
	}
	first, second := begin(), begin()
	asked := func() string {
		return one(`insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments,
			arguments_hash, expires_at)
			select x.trace_id, x.id, s.name, s.revision, '{}', lanekeeper.agent_uuid7()::text,
			       clock_timestamp() + interval '1 day'
			  from agent_skills s, agent_executions x where s.name = 'pay' and x.id = $1::uuid returning id::text`, first)
	}
	dead := one(`insert into agent_automation_runs (automation_id, cause, scheduled_for, status)
		select id, 'manual', clock_timestamp(), 'dead' from agent_automations where name = 'nightly' returning id::text`)
	for _, name := range []string{"later", "never"} {
		one(`insert into agent_objectives (name, goal, status, proposed_by) values ($1, 'g', 'proposed', 'tester')
			returning id::text`, name)
	}
	one(`insert into agent_automations (name, skill_name, cron, timezone, enabled, disabled_by, proposed_by)
		select 'proposed', skill_name, cron, timezone, false, 'proposal', 'tester' from agent_automations
		where name = 'nightly' returning id::text`)
	one(`insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, headers, body,
		body_sha256)
		values ('shop', 'msg_1', 'wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'dead', '{}', '{"id": 7}',
		  'abc') returning id::text`)
	one(`insert into agent_threads (id, channel) values ('maria', 'chat') returning id`)
	one(`select try_acquire_agent_lock('pipeline:x', 'import', 3600)::text`)
	conflict := one(`insert into agent_memory_conflicts (category, key, value, if_revision, found_revision, found_value,
		trace_id, found_trace_id)
		values ('admin', 'contact', '"b"', 1, 1, '"a"', 'op_x', 'op_y') returning id::text`)
	request := one(`insert into agent_requests (kind, execution_id, trace_id, title)
		values ('test', $1::uuid, 'fl_x', 'sql') returning id::text`, second)
	step := one(`select s.id::text from agent_objective_steps s`)
	approve, reject := asked(), asked()
	one(`insert into agent_tokens (id, secret_sha256, principal_id, scopes)
		select 'abc', 'x', p.id, '{*}' from agent_principals p returning id`)
	login := one(`insert into agent_sessions (secret_sha256, principal_id, method, expires_at)
		select 'x', p.id, 'token', clock_timestamp() + interval '1 hour' from agent_principals p returning id::text`)
	run := one(`insert into agent_eval_runs (suite, version, agent, agent_version, model, trials)
		values ('returns', 1, 'a', 1, 'm', 1) returning id::text`)
	one(`insert into agent_eval_trials (run_id, case_name, trial, position, verdict, answer)
		values ($1::uuid, 'late', 1, 1, 'pass', 'It is late.')
		returning case_name`, run)
	return [][]string{
		{"eval label " + run + " late bad --note kind", "run " + run + ", eval returns, case late", ""},
		{"skills disable pay", "skill pay", "why not"},
		{"skills enable pay", "skill pay", "why not"},
		{"webhooks disable shop", "endpoint shop", "why not"},
		{"webhooks enable shop", "endpoint shop", "why not"},
		{"webhooks disable ops --target", "target ops", "why not"},
		{"channels disable support", "channel support", "why not"},
		{"channels enable support", "channel support", "why not"},
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
		{"memory conflicts resolve " + conflict + " --take theirs", "decision: keep, conflict " + conflict +
			", memory admin / contact", "why not"},
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
		{"principals add anna --role viewer", "principal anna", "why not"},
		{"principals role anna approver", "principal anna", "why not"},
		{"principals link anna slack:T U1", "principal anna, identity U1", "why not"},
		{"principals unlink anna slack:T U1", "principal anna, identity U1", "why not"},
		{"principals login-link anna", "principal anna", "why not"},
		{"tokens create anna --scope runs:read", "principal anna, token ", "why not"},
		{"tokens revoke abc", "principal root, token abc", "why not"},
		{"sessions revoke " + login, "principal root, session " + login, "why not"},
		{"principals disable anna", "principal anna", "why not"},
		{"principals enable anna", "principal anna", "why not"},
		{"retention set activity=90d", `rows: {"activity"`, "why not"},
		{"retention run activity", "rows: activity", "why not"},
		{"pause", "", "why not"},
		{"resume", "", "why not"},
		{"apply " + dir, "changed: ", ""},
	}
}

// Every changing command writes an audit row with admin, reason and object.
func TestEveryChangingCommandIsAudited(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p, db := newProgram(t, url), connect(t, url)
	dir := writeFolder(t, map[string]string{"all.yaml": auditedYAML})
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
		by := activity.Admin
		if strings.HasPrefix(command, "eval label ") { // a label has the same principal as on the page without a login
			by = principals.Root
		}
		var page struct{ Items []activity.AuditEntry }
		p.mustJSON(&page, "activity", "audit")
		for _, r := range page.Items {
			if r.ID > before && r.Actor == by && r.OnBehalfOf == activity.Admin &&
				strings.Contains(r.Object, object) && (reason == "" || r.Reason == reason) {
				return
			}
		}
		t.Errorf("agent %s: no row names the admin, %q and %q: %+v", command, object, reason,
			page.Items[:min(3, len(page.Items))])
	}
	for _, c := range auditedCommands(t, p, db, dir) {
		if strings.HasPrefix(c[0], "apply") {
			testkit.WriteFile(t, filepath.Join(dir, "all.yaml"), strings.Replace(auditedYAML, "Pay.", "Pay now.", 1))
		}
		check(c[0], c[1], c[2])
		words := strings.Fields(c[0])
		for n := 1; n <= min(3, len(words)); n++ {
			seen[strings.Join(words[:n], " ")] = true
		}
	}
	access := pgtest.Value[string](t, db, `select id::text from agent_thread_access where thread_id = 'maria' limit 1`)
	check("threads revoke maria "+access, "thread maria, access "+access, "")
	seen["threads revoke"] = true
	for name, cmd := range everyCommand(t) {
		if notAudited[name] == "" && !seen[name] && len(cmd.Commands()) == 0 && !strings.HasPrefix(name, "completion") {
			t.Errorf("agent %s: does it change something? Then give it a row in the audit, and a line here", name)
		}
	}
}

// A run that needs approval prints the next command, and ends with the approved call.
func TestAutomationRunNeedsApproval(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	p.must("apply", writeFolder(t, map[string]string{"all.yaml": auditedYAML}))
	var ran struct {
		Run        struct{ ID, Status string }
		ApprovalID string `json:"approval_id"`
	}
	p.mustJSON(&ran, "automations", "run", "nightly")
	assert.Contains(t, p.must("automations", "run", "nightly"), "waits for approval "+ran.ApprovalID,
		"agent approvals approve")
	assert.Contains(t, p.must("approvals", "show", ran.ApprovalID), "requested by",
		"agent in automation (surface operate) for the admin")
	assert.Contains(t, p.must("automations", "runs"), "awaits approval "+ran.ApprovalID[:30])
	p.must("approvals", "approve", ran.ApprovalID, "--reason", "it is due")
	late := p.run("approvals", "reject", ran.ApprovalID)
	assert.Contains(t, late.err, "decided already: approved by admin via cli at", "it is due",
		"see agent approvals show "+ran.ApprovalID)
	assert.Truef(t, late.code == 1 && !strings.Contains(late.err, "or its skill"), "exit %d: %s", late.code, late.err)
	p.must("heartbeat")
	var runs struct{ Items []struct{ ID, Status string } }
	p.mustJSON(&runs, "automations", "runs", "nightly")
	for _, r := range runs.Items {
		assert.Equal(t, "success", r.Status, r)
	}
	shown := p.must("approvals", "show", ran.ApprovalID)
	assert.Truef(t, !strings.Contains(shown, "waits for the decision") && strings.Contains(shown, "consumed"),
		"shown is %s", shown)

	p.mustJSON(&ran, "automations", "run", "nightly")
	p.must("approvals", "reject", ran.ApprovalID, "--reason", "too dear")
	assert.Contains(t, p.must("automations", "runs"), "rejected by admin: too dear")

	p.must("skills", "disable", "pay")
	off := p.run("automations", "run", "nightly")
	if off.code != 1 || strings.HasPrefix(off.out, "\n") || !strings.Contains(off.err, "agent skills enable pay") {
		t.Errorf("of a disabled skill: exit %d, stdout %q, stderr %q", off.code, off.out, off.err)
	}
}

// line is a line of a report.
type line = map[string]any

// insertHistory writes a random history. It has enabled, disabled and trial skills, unknown names, failed model calls,
// model calls with 0, 1 and 25 skill calls, skips, phases, admin actions, and an execution with a child.
func insertHistory(t *testing.T, db *pgxpool.Pool) {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	const root, child = "01890000-0000-7000-8000-000000000001", "01890000-0000-7000-8000-000000000002"
	pgtest.Exec(t, db, `
		insert into agent_skills (name, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at,
		  trial_at, enabled_at)
		values ('healthy', '{}', 'builtin:x', true, '', '', null, null, 'epoch'),
		  ('again', '{}', 'builtin:x', true, '', '', null, null, clock_timestamp() - interval '3 hours'),
		       ('broken', '{}', 'builtin:x', false, 'self_heal', 'failed', now(), null, 'epoch'),
		         ('tried', '{}', 'builtin:x', false, 'self_heal', 'failed', now(), now(), 'epoch');
		insert into agent_executions (id, trace_id, surface, agent, flow, status, parent_id)
		values ('`+root+`', 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'operate', 'agent', 'external:turn', 'pending', null),
		       ('`+child+`', 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'operate', 'agent', 'external:help', 'pending', '`+root+`');
		insert into agent_activity (trace_id, kind, agent, surface, skill_name, purpose, input)
		values ('op_01JD3V7K8ZQ6W2M5T9X4C1B0AF', 'note', 'admin', 'operate', 'disable_skill', 'it costs too much',
		        '{"skill": "broken"}')`)
	pick := func(words ...string) string { return words[r.IntN(len(words))] }
	cause := ""
	for range 250 {
		kind := pick("call", "call", "call", "model", "phase", "note")
		name, ledTo, tokens, cost := pick("healthy", "again", "broken", "tried", "imagined", "reasoning"), `{}`, 0, 0.0
		status, class := pick("success", "success", "error", "skipped", "pending_approval", "unknown"), ""
		if status == "error" {
			class = pick("timeout", "http_status", "invalid_params", "unknown_tool", "disabled")
		}
		if kind == "model" {
			name, ledTo = "model_call", pick(`{}`, `{"healthy": 1}`, `{"again": 25}`, `{"healthy": 3, "tried": 1, "broken": 2}`)
			tokens, cost = 1+r.IntN(5000), float64(r.IntN(1_000_000))/1e6
		}
		err := db.QueryRow(t.Context(), `
			insert into agent_activity (id, trace_id, execution_id, kind, agent, surface, skill_name, purpose, status,
			  error_class, error_message, model, token_usage, cost_usd, led_to, cause_id, created_at, finished_at, duration_ms)
			select lanekeeper.agent_uuid7(at), 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', nullif($1, '')::uuid, $2, 'agent', $3, $4, $5,
			  $6, $7, nullif($7, ''),
			       case $2 when 'model' then 'm1' else '' end,
			         jsonb_build_object('prompt_tokens', $8::int / 2, 'completion_tokens', $8::int - $8::int / 2, 'total_tokens',
			           $8::int),
			       $9::float8::numeric(14, 6), $10::text::jsonb, nullif($11, '')::uuid, at, at, $12
			  from (select clock_timestamp() - make_interval(secs => $13) as at) x
			returning case when kind = 'model' then id::text else '' end`,
			pick("", root, child), kind, pick("operate", "chat", "heartbeat"), name, pick("", "turn"), status,
			class, tokens, cost, ledTo,
			map[bool]string{true: cause}[kind == "call"], r.IntN(60_000), float64(r.IntN(6*24*3600))).Scan(&cause)
		require.NoError(t, err)
	}
}

// check reads a report in each way, reports differences, and returns the lines.
func (c *reportChecker) check(name, sql, since string, fields ...string) []line {
	c.t.Helper()
	var bySQL []line
	require.NoError(c.t, c.db.QueryRow(c.t.Context(), `select coalesce(jsonb_agg(to_jsonb(x)), '[]') from (`+
		sql+`) x`).Scan(&bySQL))
	var byCommand, byHTTP struct {
		Items []line `json:"items"`
	}
	args := []string{"activity", name, "--limit", "500"}
	if since != "" {
		args = append(args, "--since", since)
	}
	c.p.mustJSON(&byCommand, args...)
	require.NoError(c.t, json.Unmarshal([]byte(c.page("/v1/activity/"+name+"?limit=500", nil)), &byHTTP))
	only := cmpopts.IgnoreMapEntries(func(k string, _ any) bool { return !slices.Contains(fields, k) })
	assert.Truef(c.t, len(bySQL) > 0, "%s has no lines", name)
	for way, lines := range map[string][]line{"the command line": byCommand.Items, "HTTP": byHTTP.Items} {
		diff := cmp.Diff(bySQL, lines, only, cmpopts.EquateApprox(0, 1e-9))
		assert.Truef(c.t, diff == "", "%s: SQL and %s differ:\n%s", name, way, diff)
	}
	return bySQL
}

// reportChecker queries one running program.
type reportChecker struct {
	browserTab
	p  program
	db *pgxpool.Pool
}

// row returns the part of a page from a text to the end of its table row.
func (c *reportChecker) row(page, from string) string {
	c.t.Helper()
	_, rest, found := strings.Cut(page, from)
	assert.Truef(c.t, found, "the page has no %s", from)
	row, _, _ := strings.Cut(rest, "</tr>")
	return row
}

// cells reports values that the row lacks.
func (c *reportChecker) cells(row string, values ...any) {
	c.t.Helper()
	plain := strings.ReplaceAll(row, ",", "")
	for _, v := range values {
		if n, is := v.(float64); is {
			v = fmt.Sprintf("%.0f", n)
		}
		assert.Truef(c.t, v == nil || strings.Contains(plain, fmt.Sprintf(">%s<", v)),
			"the page does not say %s in %s", v, row)
	}
}

// duration formats a number of milliseconds; nil gives the text for none.
func duration(ms any) any {
	if n, is := ms.(float64); is {
		return human.Millis(int64(n))
	}
	return nil
}

func TestReportsAgreeEverywhere(t *testing.T) {
	t.Parallel()
	address := pgtest.URL(t)
	db := connect(t, address)
	insertHistory(t, db)
	p := newProgram(t, address, token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info",
		"AGENT_HEARTBEAT_CRON=0 0 29 2 *")
	s := p.start("serve")
	c := &reportChecker{newTab(t, s.find(t, `listen=(http://\S+)`)), p, db}

	c.check("spend", `select s.*, s.day::text as day from agent_spend s order by s.day desc, s.cost_usd desc,
		s.tokens desc, s.skill, s.surface, s.model`, "30d",
		"day", "skill", "surface", "model", "calls", "prompt_tokens", "completion_tokens", "tokens", "cost_usd",
		"unknown_tokens", "unknown_usd")
	c.checkSpendTotal(t.Context())
	page := c.page("/skills", nil)
	for _, l := range c.check("slowest", `select * from agent_slowest_skills`, "", "skill", "calls", "p50_ms", "p95_ms",
		"max_ms", "slowest_trace_id") {
		c.cells(c.row(page, fmt.Sprintf(`id="slowest-%s"`, l["skill"])), l["calls"], duration(l["p50_ms"]),
			duration(l["p95_ms"]), duration(l["max_ms"]))
	}
	var skills struct {
		Items []struct {
			Name   string `json:"name"`
			Health line   `json:"health"`
		} `json:"items"`
	}
	require.NoError(t, json.Unmarshal([]byte(c.page("/v1/skills", nil)), &skills))
	health := map[any]line{}
	for _, k := range skills.Items {
		health[k.Name] = k.Health
	}
	for _, l := range c.check("failing", `select * from agent_failing_skills`, "", "skill", "calls", "errors", "rate",
		"streak", "p50_ms", "p95_ms", "last_error",
		"last_error_class", "last_trace_id", "state") {
		c.cells(c.row(page, fmt.Sprintf(`id="failing-%s"`, l["skill"])), l["errors"], l["calls"], l["streak"])
		if h := health[l["skill"]]; h["streak"] != l["streak"] || h["state"] != l["state"] {
			t.Errorf("%s: the health of skills says %v, failing says %v", l["skill"], h, l)
		}
	}
	page = c.page("/audit", nil)
	const first = 20
	for i, l := range c.check("audit", `select * from agent_audit order by id desc`, "30d", "id", "actor", "kind", "act",
		"object", "reason", "origin", "on_behalf_of", "status",
		"error_class", "error_message", "model", "tokens", "cost_usd", "duration_ms", "surface", "trace_id", "execution_id",
		"parent_id", "cause_id", "thread_id") {
		if i < first {
			row := c.row(page, fmt.Sprintf(`id="row-%s"`, l["id"]))
			assert.Contains(t, row, l["actor"].(string), l["act"].(string), html.EscapeString(l["object"].(string)),
				l["reason"].(string), l["on_behalf_of"].(string))
		}
	}
}

// checkSpendTotal compares the sums of views, page and log.
func (c *reportChecker) checkSpendTotal(ctx context.Context) {
	c.t.Helper()
	var charged, purposes, log string
	err := c.db.QueryRow(ctx, `
		select (select row(sum(s.calls), sum(s.prompt_tokens), sum(s.completion_tokens), sum(s.tokens), sum(s.cost_usd))::text
		  from agent_spend s),
		       (select row(sum(s.calls), sum(s.prompt_tokens), sum(s.completion_tokens), sum(s.tokens), sum(s.cost_usd))::text
		         from agent_spend_by_purpose s),
		       (select row(count(*), sum(lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens')),
		         sum(lanekeeper.agent_tokens(a.token_usage, 'completion_tokens')),
		               sum(lanekeeper.agent_tokens(a.token_usage, 'total_tokens')), sum(a.cost_usd))::text
		                 from agent_activity a where a.kind = 'model')`).
		Scan(&charged, &purposes, &log)
	assert.Truef(c.t, err == nil && charged == log && purposes == log,
		"charged are %s, by purpose %s, the log has %s (%v)", charged, purposes, log, err)
	page := c.page("/spend?days=30&by=skill", nil)
	rows, err := c.db.Query(ctx, `select s.skill, sum(s.tokens)::float8, sum(s.calls)::float8 from agent_spend s
		where s.skill <> '' group by 1`)
	require.NoError(c.t, err)
	defer rows.Close()
	for rows.Next() {
		var skill string
		var tokens, calls float64
		require.NoError(c.t, rows.Scan(&skill, &tokens, &calls))
		if calls == 0 { // counted for another skill
			c.cells(c.row(page, ">"+skill+"</a></th>"), tokens, "shared")
			continue
		}
		c.cells(c.row(page, ">"+skill+"</a></th>"), tokens, calls)
	}
	require.NoError(c.t, rows.Err())
}

func TestTracePrompts(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	p := newProgram(t, db.Config().ConnString())
	const id = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	pgtest.Exec(t, db, `
		with old as (
		  insert into agent_activity (trace_id, surface, agent, skill_name, kind, model)
		    values ($1, 'operate', 'ops', 'model_call', 'model', 'old')),
		call as (
		  insert into agent_activity (trace_id, surface, agent, skill_name, kind, model, token_usage)
		  values ($1, 'operate', 'ops', 'model_call', 'model', 'gpt-4o-mini',
		          '{"prompt_tokens": 1200, "cached_tokens": 1024, "completion_tokens": 9, "total_tokens": 1209}')
		            returning id),
		part as (
		  insert into agent_prompt_parts (digest, body)
		  select sha256(b::bytea), b from unnest(array['[{"type":"function"}]', '{"content":"You act.","role":"system"}']) b)
		insert into agent_prompts (activity_id, tools, messages, options)
		select id, sha256('[{"type":"function"}]'), array[sha256('{"content":"You act.","role":"system"}'), sha256('gone')],
		       '{"max_tokens": 4096}' from call`, id)
	text := p.must("trace", id, "--prompts")
	assert.Contains(t, text, "prompt: not recorded, or pruned",
		"tokens: 1200 prompt (1024 cached, 0 cache writes), 9 completion", `options: {"max_tokens": 4096}`,
		"[tools, 21 bytes]\n[{\"type\":\"function\"}]", "[system, 38 bytes]\nYou act.", "is no longer kept]")
	var page prompts.Page
	p.mustJSON(&page, "trace", id, "--prompts")
	assert.Truef(t, page.TraceID == id && len(page.Calls) == 2 && len(page.Parts) == 2, "--json: %+v", page)
}

func TestAuditOfUnpricedCalls(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	p := newProgram(t, db.Config().ConnString())
	pgtest.Exec(t, db, `
		insert into agent_activity (trace_id, surface, skill_name, kind, model, token_usage, cost_usd)
		values ('op_01J8052XG1XHJAZ95GX5TCNBAZ', 'operate', 'model_call', 'model', 'free', '{"total_tokens": 9}', 0),
		       ('op_01J8052XG1XHJAZ95GX5TCNBAZ', 'operate', 'model_call', 'model', 'paid', '{"total_tokens": 9}', 0.25),
		       ('op_01J8052XG1XHJAZ95GX5TCNBAZ', 'operate', 'look', 'call', '', '{}', 0)`)
	text := p.must("activity", "audit")
	assert.Contains(t, text, "no price", "$0.25")
	assert.Truef(t, !strings.Contains(text, "$0.00"), "a call without a price is free: %s", text)
}
