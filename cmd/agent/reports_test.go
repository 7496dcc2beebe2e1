package main

import (
	"context"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// line is a line of a report, whoever tells it.
type line = map[string]any

// history writes a random history: skills that were enabled again, that are disabled and on trial, names that are no skill, model calls that
// lead to 0, 1 and 25 skill calls or fail, skipped rows, phases, an admin's acts, and an execution with a child.
func history(t *testing.T, db *pgxpool.Pool) {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	const root, child = "01890000-0000-7000-8000-000000000001", "01890000-0000-7000-8000-000000000002"
	_, err := db.Exec(t.Context(), `
		insert into agent_skills (name, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at, trial_at, enabled_at)
		values ('healthy', '{}', 'builtin:x', true, '', '', null, null, 'epoch'), ('again', '{}', 'builtin:x', true, '', '', null, null, clock_timestamp() - interval '3 hours'),
		       ('broken', '{}', 'builtin:x', false, 'self_heal', 'failed', now(), null, 'epoch'), ('tried', '{}', 'builtin:x', false, 'self_heal', 'failed', now(), now(), 'epoch');
		insert into agent_executions (id, trace_id, surface, agent, flow, status, parent_id)
		values ('`+root+`', 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'operate', 'agent', 'external:turn', 'pending', null),
		       ('`+child+`', 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'operate', 'agent', 'external:help', 'pending', '`+root+`');
		insert into agent_activity (trace_id, kind, agent, surface, skill_name, purpose, input)
		values ('op_01JD3V7K8ZQ6W2M5T9X4C1B0AF', 'note', 'admin', 'operate', 'disable_skill', 'it costs too much', '{"skill": "broken"}')`)
	if err != nil {
		t.Fatal(err)
	}
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
			insert into agent_activity (id, trace_id, execution_id, kind, agent, surface, skill_name, purpose, status, error_class, error_message, model, token_usage,
			       cost_usd, led_to, cause_id, created_at, finished_at, duration_ms)
			select lanekeeper.agent_uuid7(at), 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', nullif($1, '')::uuid, $2, 'agent', $3, $4, $5, $6, $7, nullif($7, ''),
			       case $2 when 'model' then 'm1' else '' end, jsonb_build_object('prompt_tokens', $8::int / 2, 'completion_tokens', $8::int - $8::int / 2, 'total_tokens', $8::int),
			       $9::float8::numeric(14, 6), $10::text::jsonb, nullif($11, '')::uuid, at, at, $12
			  from (select clock_timestamp() - make_interval(secs => $13) as at) x
			returning case when kind = 'model' then id::text else '' end`,
			pick("", root, child), kind, pick("operate", "chat", "heartbeat"), name, pick("", "turn"), status, class, tokens, cost, ledTo,
			map[bool]string{true: cause}[kind == "call"], r.IntN(60_000), float64(r.IntN(6*24*3600))).Scan(&cause)
		if err != nil {
			t.Fatal(err)
		}
	}
}

// told reads a report in each way and reports what they do not agree on; it returns the lines.
func (c *reporter) told(name, sql, since string, fields ...string) []line {
	c.t.Helper()
	var bySQL []line
	if err := c.db.QueryRow(c.t.Context(), `select coalesce(jsonb_agg(to_jsonb(x)), '[]') from (`+sql+`) x`).Scan(&bySQL); err != nil {
		c.t.Fatal(err)
	}
	var byCommand, byHTTP struct {
		Items []line `json:"items"`
	}
	args := []string{"activity", name, "--limit", "500"}
	if since != "" {
		args = append(args, "--since", since)
	}
	c.p.mustJSON(&byCommand, args...)
	if err := json.Unmarshal([]byte(c.get("/v1/activity/"+name+"?limit=500")), &byHTTP); err != nil {
		c.t.Fatal(err)
	}
	only := cmpopts.IgnoreMapEntries(func(k string, _ any) bool { return !slices.Contains(fields, k) })
	if len(bySQL) == 0 {
		c.t.Errorf("%s has no lines", name)
	}
	for way, lines := range map[string][]line{"the command line": byCommand.Items, "HTTP": byHTTP.Items} {
		if diff := cmp.Diff(bySQL, lines, only, cmpopts.EquateApprox(0, 1e-9)); diff != "" {
			c.t.Errorf("%s: SQL and %s differ:\n%s", name, way, diff)
		}
	}
	return bySQL
}

// reporter asks one running program.
type reporter struct {
	t       *testing.T
	p       program
	db      *pgxpool.Pool
	base    string
	browser *http.Client
}

// get is a page, or a route of the admin's.
func (c *reporter) get(path string) string {
	c.t.Helper()
	return c.do(http.MethodGet, path, "")
}

func (c *reporter) do(method, path, form string) string {
	c.t.Helper()
	req, err := http.NewRequestWithContext(c.t.Context(), method, c.base+path, strings.NewReader(form))
	if err != nil {
		c.t.Fatal(err)
	}
	if form != "" {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	if strings.HasPrefix(path, "/v1/") {
		req.Header.Set("Authorization", "Bearer "+strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="))
	}
	got, err := c.browser.Do(req)
	if err != nil {
		c.t.Fatal(err)
	}
	defer got.Body.Close()
	body, err := io.ReadAll(got.Body)
	if err != nil || got.StatusCode != http.StatusOK {
		c.t.Fatalf("%s %s: %d %s (%v)", method, path, got.StatusCode, body, err)
	}
	return string(body)
}

// row is the part of a page from a text up to the end of its row.
func (c *reporter) row(page, from string) string {
	c.t.Helper()
	_, rest, found := strings.Cut(page, from)
	if !found {
		c.t.Errorf("the page has no %s", from)
	}
	row, _, _ := strings.Cut(rest, "</tr>")
	return row
}

// cells reports the numbers that a row does not have.
func (c *reporter) cells(row string, numbers ...any) {
	c.t.Helper()
	plain := strings.ReplaceAll(row, ",", "")
	for _, n := range numbers {
		if n != nil && !strings.Contains(plain, fmt.Sprintf(">%.0f<", n)) {
			c.t.Errorf("the page does not say %.0f in %s", n, row)
		}
	}
}

func TestReportsSayTheSameInSQLOnTheCommandLineOverHTTPAndOnThePage(t *testing.T) {
	t.Parallel()
	address := pgtest.URL(t)
	db := connect(t, address)
	history(t, db)
	p := on(t, address, token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info", "AGENT_HEARTBEAT_CRON=0 0 29 2 *")
	s := p.start("serve")
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &reporter{t, p, db, "http://" + s.find(t, `listen=http://(\S+)`), &http.Client{Jar: jar}}
	c.do(http.MethodPost, "/login", url.Values{"token": {strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN=")}, "next": {"/spend"}}.Encode())

	c.told("spend", `select s.*, s.day::text as day from agent_spend s order by s.day desc, s.cost_usd desc, s.tokens desc, s.skill, s.surface, s.model`, "30d",
		"day", "skill", "surface", "model", "calls", "prompt_tokens", "completion_tokens", "tokens", "cost_usd", "unknown_tokens", "unknown_usd")
	c.spendIsWhole(t.Context())
	page := c.get("/skills")
	for _, l := range c.told("slowest", `select * from agent_slowest_skills`, "", "skill", "calls", "p50_ms", "p95_ms", "max_ms", "slowest_trace_id") {
		c.cells(c.row(page, fmt.Sprintf(`id="slowest-%s"`, l["skill"])), l["calls"], l["p50_ms"], l["p95_ms"], l["max_ms"])
	}
	var skills struct {
		Items []struct {
			Name   string `json:"name"`
			Health line   `json:"health"`
		} `json:"items"`
	}
	if err := json.Unmarshal([]byte(c.get("/v1/skills")), &skills); err != nil {
		t.Fatal(err)
	}
	health := map[any]line{}
	for _, k := range skills.Items {
		health[k.Name] = k.Health
	}
	for _, l := range c.told("failing", `select * from agent_failing_skills`, "", "skill", "calls", "errors", "rate", "streak", "p50_ms", "p95_ms", "last_error",
		"last_error_class", "last_trace_id", "state") {
		c.cells(c.row(page, fmt.Sprintf(`id="failing-%s"`, l["skill"])), l["errors"], l["calls"], l["streak"])
		if h := health[l["skill"]]; h["streak"] != l["streak"] || h["state"] != l["state"] {
			t.Errorf("%s: the health of skills says %v, failing says %v", l["skill"], h, l)
		}
	}
	page = c.get("/audit")
	const first = 20
	for i, l := range c.told("audit", `select * from agent_audit order by id desc`, "30d", "id", "actor", "kind", "act", "object", "reason", "origin", "on_behalf_of", "status",
		"error_class", "error_message", "model", "tokens", "cost_usd", "duration_ms", "surface", "trace_id", "execution_id", "parent_id", "cause_id", "thread_id") {
		if i < first {
			row := c.row(page, fmt.Sprintf(`id="row-%s"`, l["id"]))
			contains(t, row, l["actor"].(string), l["act"].(string), html.EscapeString(l["object"].(string)), l["reason"].(string), l["on_behalf_of"].(string))
		}
	}
}

// spendIsWhole compares the sums of the views with the log, and the page's with them.
func (c *reporter) spendIsWhole(ctx context.Context) {
	c.t.Helper()
	var charged, purposes, log string
	err := c.db.QueryRow(ctx, `
		select (select row(sum(s.calls), sum(s.prompt_tokens), sum(s.completion_tokens), sum(s.tokens), sum(s.cost_usd))::text from agent_spend s),
		       (select row(sum(s.calls), sum(s.prompt_tokens), sum(s.completion_tokens), sum(s.tokens), sum(s.cost_usd))::text from agent_spend_by_purpose s),
		       (select row(count(*), sum(lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens')), sum(lanekeeper.agent_tokens(a.token_usage, 'completion_tokens')),
		               sum(lanekeeper.agent_tokens(a.token_usage, 'total_tokens')), sum(a.cost_usd))::text from agent_activity a where a.kind = 'model')`).
		Scan(&charged, &purposes, &log)
	if err != nil || charged != log || purposes != log {
		c.t.Errorf("charged are %s, by purpose %s, the log has %s (%v)", charged, purposes, log, err)
	}
	page := c.get("/spend?days=30&by=skill")
	rows, err := c.db.Query(ctx, `select s.skill, sum(s.tokens)::float8, sum(s.calls)::float8 from agent_spend s where s.skill <> '' group by 1`)
	if err != nil {
		c.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var skill string
		var tokens, calls float64
		if err := rows.Scan(&skill, &tokens, &calls); err != nil {
			c.t.Fatal(err)
		}
		c.cells(c.row(page, ">"+skill+"</a></th>"), tokens, calls)
	}
	if err := rows.Err(); err != nil {
		c.t.Fatal(err)
	}
}
