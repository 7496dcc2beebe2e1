package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/retention"
)

// shownState has the tested fields of the three commands.
type shownState struct {
	Changed   bool
	Objective struct {
		Status, DecidedBy string
		Done              int
		Steps             []struct{ ID, Status string }
		Evidence          []struct {
			GivenBy string `json:"given_by"`
			Reason  string
		}
	}
	Automation struct {
		Enabled  bool
		NextRuns []string `json:"next_runs"`
	}
	Run struct{ ID, Status, Cause string }
}

func TestObjectiveCommands(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	db := pgtest.Pool(t, url, postgres.Options{})
	for goal, did := range []string{"added", "changed"} {
		assert.Equal(t, "tidy: "+did+"; it is active\n", p.must("objectives", "add", "tidy", "--goal",
			fmt.Sprint("be tidy ", goal), "--success", "no dust", "--step", "sweep"))
		if did == "added" {
			pgtest.Exec(t, db, `update agent_objectives set agent = 'cleaner'`)
		}
	}
	pgtest.Equal(t, db, "cleaner be tidy 1", `select agent || ' ' || goal from agent_objectives`)
	var got shownState
	p.mustJSON(&got, "objectives", "pause", "tidy")
	assert.Truef(t, got.Changed && got.Objective.Status == "paused", "got %+v", got)
	assert.Equal(t, "tidy: changed; it is active\n", p.must("objectives", "resume", "tidy"))
	var shown struct{ Steps []struct{ ID string } }
	p.mustJSON(&shown, "objectives", "show", "tidy")
	bad := p.run("objectives", "done", shown.Steps[0].ID)
	assert.Truef(t, bad.code == exitUsage && strings.Contains(bad.err, "--reason"), "done without a reason: %+v", bad)
	if bad := p.run("objectives", "done", "01a1fc7a-3cbd-7d8a-af56-b10ba12fb33d", "--reason",
		"I saw it"); bad.code != exitFailed || !strings.Contains(bad.err, "step not found") {
		t.Errorf("done of a step that is not there: %+v", bad)
	}
	p.must("objectives", "done", shown.Steps[0].ID, "--reason", "I saw it")
	assert.Contains(t, p.must("objectives", "done", shown.Steps[0].ID, "--reason", "I saw it"), "no longer pending")
	assert.Contains(t, p.must("objectives", "show", "tidy"), "completed", "admin's word: I saw it", "no dust",
		"1 of 1 steps (100 %)")
	bad = p.run("objectives", "accept", "nothing")
	assert.Truef(t, bad.code == exitFailed && strings.Contains(bad.err, "agent objectives ls"), "got %+v", bad)
	assert.Contains(t, p.must("activity", "ls"), "add_objective", "confirm_step", "pause_objective")
}

func TestProposalCommands(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	p.must("skills", "call", "objective_propose", "--args", `{"name":"wish","goal":"g\u001b[2J"}`)
	p.must("skills", "call", "automation_propose", "--args",
		`{"name":"watch","cron":"0 9 * * 1-5","timezone":"Europe/Madrid","skill":"recent_activity"}`)
	p.must("skills", "call", "automation_propose", "--args",
		`{"name":"mail","cron":"0 9 * * 1-5","skill":"recent_activity","description":"d\u001b[2J"}`)
	assert.Contains(t, p.must("objectives", "show", "wish"), "wish\ng[2J\n") // no escape sequence reaches the terminal
	assert.Contains(t, p.must("automations", "show", "mail"), "mail\nd[2J\n")
	assert.Contains(t, p.must("objectives", "ls", "--status", "proposed"), "wish")
	assert.Contains(t, p.must("automations", "ls"), "watch", "proposed")
	bad := p.run("automations", "enable", "watch")
	assert.Truef(t, bad.code == exitFailed && strings.Contains(bad.err, "accept"), "a proposal was enabled: %+v", bad)
	var got shownState
	p.mustJSON(&got, "objectives", "accept", "wish", "--reason", "good")
	assert.Equal(t, "active", got.Objective.Status, got)
	p.mustJSON(&got, "automations", "accept", "watch")
	assert.Truef(t, got.Automation.Enabled && len(got.Automation.NextRuns) == 3, "got %+v", got)
	show := p.must("automations", "show", "watch")
	assert.Contains(t, show, "0 9 * * 1-5 Europe/Madrid", "no runs yet", "CE")
	assert.Truef(t, strings.HasPrefix(show, "watch\n\nstate"), "an empty description has a line:\n%s", show)
	p.mustJSON(&got, "automations", "run", "watch")
	assert.Equal(t, "success", got.Run.Status, got)
	assert.Equal(t, "manual", got.Run.Cause, got)
	assert.Contains(t, p.must("automations", "show", "watch"), "result of ")
	_, err := connect(t, url).Exec(t.Context(), `update agent_automations set next_run_at = now() - interval '1 minute'`)
	require.NoError(t, err)
	assert.Contains(t, p.must("automations", "show", "watch"), "due since ")
	ls := p.must("automations", "ls")
	assert.Truef(t, regexp.MustCompile(`watch +in service +0 9 \* \* 1-5 Europe/Madrid +due `).MatchString(ls), "%s", ls)
	assert.Contains(t, p.must("automations", "runs", "watch"), "manual", "success")
	assert.Contains(t, p.must("automations", "dead"), "no dead runs")
	assert.Contains(t, p.must("automations", "disable", "watch"), "disabled by admin")
}

func TestMemoryCommands(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	p.must("memory", "set", "contact", `{"name": "Ana"}`, "--category", "admin", "--expires", "720h")
	p.must("memory", "set", "plain", "just words")
	assert.Contains(t, p.must("memory", "ls"), "contact", "just words")
	assert.Contains(t, p.must("memory", "search", "ana"), "contact")
	assert.Contains(t, p.must("memory", "get", "contact", "--category", "admin"), "name: Ana", "revision 1")
	assert.Contains(t, p.must("memory", "stats"), "admin", "general")
	for _, refused := range [][]string{
		{"memory", "set", "plain", "x", "--if-revision", "7"},
		{"memory", "set", "api_key", "hunter2"},
		{"memory", "get", "nothing"},
	} {
		got := p.run(refused...)
		assert.Truef(t, got.code == exitFailed && !strings.Contains(got.err, "hunter2"), "%v: %+v", refused, got)
	}
	for _, wrong := range [][]string{
		{"", "x"},
		{"plain", "x", "--category", " "},
		{"plain", "x", "--expires", "-1s"},
		{"plain", strings.Repeat("x", 70000)},
	} {
		p.mustFail(exitUsage, "see agent memory set --help", append([]string{"memory", "set"}, wrong...)...)
	}
	assert.Contains(t, p.must("memory", "forget", "plain"), "forgotten")
	p.mustFail(exitFailed, `forget memory "plain" of category "general": memory not found; see agent memory ls`,
		"memory", "forget", "plain")
}

// browserTab is an admin's browser for forms.
type browserTab struct {
	t      *testing.T
	base   string
	client *http.Client
}

func newTab(t *testing.T, base string) browserTab {
	t.Helper()
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	return browserTab{t, base, &http.Client{Jar: jar}}
}

// page returns the text of a page, after submitting a form if given.
func (b browserTab) page(path string, form url.Values) string {
	b.t.Helper()
	method, body := http.MethodGet, io.Reader(http.NoBody)
	if form != nil {
		method, body = http.MethodPost, strings.NewReader(form.Encode())
	}
	r, err := http.NewRequestWithContext(b.t.Context(), method, b.base+path, body)
	require.NoError(b.t, err)
	r.Header.Set("Authorization", "Bearer "+strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="))
	if form != nil {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Origin", b.base)
		r.Header.Set("Sec-Fetch-Site", "same-origin")
	}
	response, err := b.client.Do(r)
	require.NoError(b.t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.Truef(b.t, err == nil && response.StatusCode == http.StatusOK,
		"%s %s: %d, %v: %s", method, path, response.StatusCode, err, text)
	return string(text)
}

// insertConflict writes a key twice, then stores a note as a conflict. The note is based on the first value.
func insertConflict(t *testing.T, pool *pgxpool.Pool) (conflict string) {
	t.Helper()
	for _, value := range []string{"first", "second"} {
		_, err := memory.Save(t.Context(), pool, memory.Note{Key: "contact", Value: value, TraceID: "op_1"})
		require.NoError(t, err)
	}
	note := memory.Note{Key: "contact", Value: "the late one", Revision: 1, TraceID: "hb_1"}
	_, err := memory.Save(t.Context(), pool, note)
	found, refused := errors.AsType[*memory.ConflictError](err)
	require.True(t, refused, err)
	id, err := memory.StoreConflict(t.Context(), pool, note, found, "")
	require.NoError(t, err)
	return id
}

// TestStalePagesDoNotOverwrite submits forms of pages opened before another write.
func TestStalePagesDoNotOverwrite(t *testing.T) {
	t.Parallel()
	database := pgtest.URL(t)
	p, pool := newProgram(t, database, token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=0 0 1 1 *",
		"AGENT_LOG_LEVEL=info"), connect(t, database)
	conflict := insertConflict(t, pool)
	served := p.start("serve")
	base := strings.TrimSuffix(served.find(t, `msg=serving listen=(\S+)`), "/")
	ana, bea := newTab(t, base), newTab(t, base)
	assert.Contains(t, ana.page("/memory", nil), "the late one", "second", "/act/v1/memory/conflicts/"+conflict+"/decide",
		`name="if_revision" value="2"`)
	decide := func(b browserTab, decision, revision string) string {
		b.t.Helper()
		return b.page("/act/v1/memory/conflicts/"+conflict+"/decide",
			url.Values{"decision": {decision}, "reason": {"x"}, "if_revision": {revision}, "back": {"/memory"}})
	}
	holds := func(value string, revision int) {
		t.Helper()
		e, err := memory.Shared.Get(t.Context(), pool, "general", "contact")
		assert.Truef(t, err == nil && string(e.Value) == `"`+value+`"` && e.Revision == revision,
			"it holds %s at %d, want %s at %d, %v", e.Value, e.Revision, value, revision, err)
	}
	p.must("memory", "set", "contact", "third") // after both have opened the page
	output := decide(ana, "take", "2")
	assert.Contains(t, output, `role="alert"`, "nothing was written", "the late one", "third", "revision 3 is there")
	holds("third", 3)
	assert.Contains(t, decide(ana, "take", "3"), "The conflict is decided.")
	holds("the late one", 4)
	assert.Contains(t, decide(bea, "take", "3"), "decided already")
	holds("the late one", 4)

	e, err := memory.Shared.Get(t.Context(), pool, "general", "contact")
	require.NoError(t, err)
	forget := func(b browserTab, revision string) string {
		b.t.Helper()
		return b.page("/act/v1/memory/"+e.ID+"/forget", url.Values{
			"reason": {"x"}, "if_revision": {revision},
			"back": {"/memory"},
		})
	}
	assert.Contains(t, bea.page("/memory/contact", nil), `name="if_revision" value="4"`)
	p.must("memory", "set", "contact", "fifth")
	assert.Contains(t, forget(bea, "4"), "nothing was written", "fifth", "revision 5 is there")
	holds("fifth", 5)
	assert.Contains(t, forget(bea, "5"), "The entry is forgotten.")

	p.must("objectives", "add", "tidy", "--goal", "be tidy")
	assert.Contains(t, ana.page("/objectives/tidy", nil), `name="if_revision" value="1"`)
	p.must("objectives", "pause", "tidy")
	pause := url.Values{"reason": {"x"}, "if_revision": {"1"}, "back": {"/objectives"}}
	assert.Contains(t, ana.page("/act/v1/objectives/tidy/resume", pause), "nothing was done", "at revision 2 and not at 1")
	assert.Contains(t, p.must("objectives", "show", "tidy"), "paused")
}

func TestRetentionCommands(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	p := newProgram(t, db.Config().ConnString())
	assert.Contains(t, p.must("retention", "show"), "KIND", "messages          forever  1 day")
	assert.Contains(t, p.must("retention", "set", "executions=30d", "events=1 day", "--reason", "little room"),
		"changed; trace op_")
	assert.Contains(t, p.must("retention", "set", "executions=30 days"), "already set")
	pgtest.Exec(t, db, `
		insert into agent_executions (id, trace_id, surface, flow, created_at)
		select lanekeeper.agent_uuid7(at), 'fl_' || n, 'flow', 'f', at
		  from (select n, clock_timestamp() - interval '40 days' as at from generate_series(1, 3) n) x`)
	for _, end := range []string{"running", "completed"} {
		pgtest.Exec(t, db, `update agent_executions set status = $1::text, completed_at = case when $1::text = 'completed'
			then created_at end where trace_id <> 'fl_3'`, end)
	}
	for _, args := range [][]string{{"retention", "run", "--dry-run"}, {"retention", "run", "executions"}} {
		var done struct{ Items []retention.Result }
		p.mustJSON(&done, args...)
		found := false
		for _, d := range done.Items {
			found = found || d.Kind == "executions" && d.Removed == 2 && d.Keep == "30 days"
		}
		assert.Truef(t, found, "agent %v: %+v", args, done)
	}
	assert.Contains(t, p.must("retention", "run", "executions"), "executions  30 days  0")
	for _, args := range [][]string{
		{"retention", "set", "memory=3d"},
		{"retention", "set", "executions=1h"},
		{"retention", "set", "executions"},
		{"retention", "run", "memory"},
		{"retention", "set", "executions=3d", "executions=4d"},
		{"retention", "set"},
	} {
		got := p.run(args...)
		assert.Truef(t, got.code == 2 && got.err != "" && got.out == "", "agent %v: %+v", args, got)
	}
}

const webhooksYAML = `
kind: webhook
name: shop
scheme: standard
secrets: ["${SHOP_SECRET}"]
actions: [{event: EVENT_COMPLETED, key: "order-{body.id}"}]
---
kind: webhook_target
name: ops
url: https://example.com/hook
secrets: ["${OPS_SECRET}"]
events: [execution.failed]
`

func TestWebhookCommands(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	dir := t.TempDir()
	testkit.WriteFile(t, filepath.Join(dir, "hooks.yaml"), webhooksYAML)
	p.must("apply", dir)
	db := connect(t, url)
	pgtest.Exec(t, db, `
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, headers, body,
		  body_sha256, error_message)
		values ('shop', 'msg_1', 'wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'dead',
		  '{"X-Shop": ["a"]}', '{"id": 7, "password": "hunter2", "text": "\\u001b[2J"}', 'abc', 'action 1: it failed')`)
	for command, wants := range map[string][]string{
		"endpoints": {
			"shop", "standard", "/webhooks/shop", "set the environment variable SHOP_SECRET",
		},
		"targets":                          {"ops", "https://example.com/hook", "execution.failed"},
		"ls --status dead --endpoint shop": {"msg_1", "action 1: it failed"},
		"ls --json":                        {`"delivery_id": "msg_1"`, `"next_cursor": null`},
		"show msg_1":                       {"X-Shop", `"id": 7`, "first trace", `\u001b[2J`},
		"show msg_1 --json":                {`"body": {`},
		"enable ops --target":              {"target ops is enabled already\n"},
		"ls --status done":                 {"no matching deliveries"},
	} {
		got := p.must(append([]string{"webhooks"}, strings.Fields(command)...)...)
		for _, want := range wants {
			assert.Truef(t, strings.Contains(got, want), "webhooks %s has no %q:\n%s", command, want, got)
		}
		assert.Truef(t, !strings.Contains(got, "hunter2") && !strings.Contains(got, "\x1b"),
			"webhooks %s shows a secret", command)
	}
	for _, want := range []string{"endpoint shop is disabled\n", "endpoint shop is disabled already\n"} {
		assert.Equal(t, want, p.must("webhooks", "disable", "shop"))
	}
	p.mustFail(1, "see agent webhooks endpoints; a target needs --target", "webhooks", "enable", "ops")
	assert.Contains(t, p.must("webhooks", "replay", "msg_1"), "replay 1 of")
	for command, code := range map[string]int{
		"replay msg_1": 1, "show none": 1, "ls --status lost": 2, "enable none": 1, "replay": 2,
	} {
		got := p.run(append([]string{"webhooks"}, strings.Fields(command)...)...)
		assert.Truef(t, got.code == code && got.err != "", "webhooks %s: exit %d, %s", command, got.code, got.err)
	}
	pgtest.Equal(t, db, "pending", `select status from agent_executions where flow = 'webhook'`)
}
