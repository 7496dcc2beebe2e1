package main

import (
	"bytes"
	"encoding/json"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/trace"
)

// listings are the listing commands, with their headings and their texts for an empty list.
var listings = map[string]struct {
	args    []string
	heading string
	empty   string
}{
	"traces": {
		[]string{"trace", "ls"},
		"TRACE FLOW STATUS STARTED TOOK ACTIONS ERRORS TOKENS COST",
		"no matching traces; `agent heartbeat` creates one",
	},
	"activity": {
		[]string{"activity", "ls"},
		"TIME TRACE SKILL STATUS TOOK TOKENS ERROR",
		"no matching activity; `agent heartbeat` creates some",
	},
	"audit": {[]string{"activity", "audit"}, "TIME WHO KIND WHAT OBJECT WHY ON BEHALF OF RESULT ERROR COST " +
		"TRACE", "no actions in that time"},
	"spend": {
		[]string{"activity", "spend"},
		"DAY SKILL SURFACE MODEL CALLS TOKENS COST UNKNOWN",
		"no model calls in that time",
	},
	"slowest": {
		[]string{"activity", "slowest"},
		"SKILL CALLS P50 MS P95 MS MAX MS SLOWEST TRACE",
		"no skill calls in that time",
	},
	"failing": {
		[]string{"activity", "failing"},
		"SKILL STATE CALLS ERRORS RATE IN A ROW LAST ERROR LAST TRACE",
		"no failed skill calls in that time",
	},
	"lanes": {[]string{"lanes", "ls"}, "LANE HELD BY TRACE HELD FOR TIME LEFT TOKEN", "no lane is held"},
	"executions": {
		[]string{"executions", "ls"},
		"EXECUTION FLOW STATUS CREATED TRACE ABOUT",
		"no executions; `agent heartbeat` starts one",
	},
	"skills": {
		[]string{"skills", "ls"},
		"SKILL STATE CALLS SUCCESS FAILED IN A ROW DISABLED BY REASON",
		"no skills; `agent apply DIR` creates some",
	},
	"approvals": {
		[]string{"approvals", "ls"},
		"APPROVAL SKILL STATUS ARGUMENTS ASKED EXPIRES TRACE",
		"no pending approvals",
	},
	"filtered traces": {[]string{
		"trace", "ls", "--surface", "heartbeat", "--status", "completed", "--since", "1h",
		"--limit", "1",
	}, "TRACE FLOW", ""},
	"filtered actions": {
		[]string{"activity", "ls", "--surface", "heartbeat", "--status", "error", "--since", "1d"},
		"TIME TRACE", "",
	},
	"filtered runs": {
		[]string{"executions", "ls", "--flow", "heartbeat", "--status", "completed", "--since", "1h"},
		"EXECUTION FLOW", "",
	},
}

func TestEmptyListings(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	for name, l := range listings {
		if l.empty == "" {
			continue
		}
		assert.Equal(t, l.empty+"\n", p.must(l.args...), name, l.empty)
		text := p.must(append(l.args, "--json")...)
		assert.Truef(t, strings.Contains(text, `"items": []`) && strings.Contains(text, `"next_cursor": null`),
			"%s as JSON: %s", name, text)
	}
}

// newUsedAgent returns a program whose database has one heartbeat of the caretaker, a held lane and a pending approval.
func newUsedAgent(t *testing.T) program {
	t.Helper()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	p.must("apply", caretaker)
	db := connect(t, url)
	makeDue(t, db)
	p.must("heartbeat")
	pgtest.Exec(t, db, `select try_acquire_agent_lock('pipeline:prices', 'import', 3600)`)
	pgtest.Exec(t, db, `
		insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash,
		  expires_at)
		select e.trace_id, e.id, s.name, s.revision, '{"limit": 3}', 'x', clock_timestamp() + interval '1 day'
		  from agent_executions e, agent_skills s where s.name = 'table_sizes'`)
	return p
}

func TestListings(t *testing.T) {
	t.Parallel()
	p := newUsedAgent(t)
	for name, l := range listings {
		t.Run(name, func(t *testing.T) {
			got := p.run(l.args...)
			first, rest, _ := strings.Cut(got.out, "\n")
			assert.Truef(t, got.code == 0 && got.err == "" &&
				strings.HasPrefix(strings.Join(strings.Fields(first), " "), l.heading) && rest != "",
				"exit %d, stderr %q, stdout:\n%s", got.code, got.err, got.out)
			for line := range strings.Lines(got.out) {
				assert.Truef(t, !strings.HasSuffix(line, " \n"), "a line ends with a space: %q", line)
			}
			var page struct {
				Items      []map[string]any `json:"items"`
				NextCursor *string          `json:"next_cursor"`
			}
			p.mustJSON(&page, l.args...)
			assert.True(t, len(page.Items) > 0, "no items")
			for _, item := range page.Items {
				for key, value := range item {
					checkField(t, key, value)
				}
			}
		})
	}
}

var (
	snakeCase = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)
	timeField = regexp.MustCompile(`(_at|_until)$`)
	idField   = regexp.MustCompile(`^id$|_id$`)
)

// checkField checks that a key is snake_case, an id a text, and a time RFC 3339 in UTC.
func checkField(t *testing.T, key string, value any) {
	t.Helper()
	assert.Truef(t, snakeCase.MatchString(key), "key %q is not snake_case", key)
	if value == nil {
		return
	}
	text, isText := value.(string)
	assert.Truef(t, !idField.MatchString(key) || isText, "%s is %v, not a text", key, value)
	if timeField.MatchString(key) {
		_, err := time.Parse(time.RFC3339, text)
		assert.Truef(t, err == nil && strings.HasSuffix(text, "Z"), "%s is %v, not RFC 3339 in UTC", key, value)
	}
}

func TestTrace(t *testing.T) {
	t.Parallel()
	p := newUsedAgent(t)
	var last struct {
		TraceID     string            `json:"trace_id"`
		OTelTraceID string            `json:"otel_trace_id"`
		Activities  []json.RawMessage `json:"activities"`
	}
	p.mustJSON(&last, "trace", "last", "--surface", "heartbeat")
	story := p.must("trace", last.TraceID)
	assert.Contains(t, story, last.TraceID, "self_heal", "advance_plan", "save_memories", "broken_on_purpose",
		"caretaker_notes", "total:")
	for _, form := range []string{
		last.OTelTraceID, strings.TrimPrefix(last.TraceID, "hb_"),
		strings.ToLower(last.TraceID),
	} {
		assert.Equal(t, story, p.must("trace", form), form)
	}
	assert.True(t, !strings.Contains(story, "\x1b["), "a story that goes to no terminal is coloured")
	forced := program{t, append(p.environ, "CLICOLOR_FORCE=1")}
	assert.Contains(t, forced.must("trace", "last"), "\x1b[")
	got := forced.must("trace", "last", "--no-color")
	assert.True(t, !strings.Contains(got, "\x1b["), "--no-color does not keep colours away")
	if got := p.run("trace", "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"); got.code != 1 || got.err !=
		"agent: read trace hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE: no such trace; see agent trace ls\n" {
		t.Errorf("an unknown trace: exit %d, stderr %q", got.code, got.err)
	}
	p.mustFail(2, "a trace id looks like hb_", "trace", "foo")
	p.mustFail(1, "no trace yet", "trace", "last", "--surface", "chat")
}

func TestExecutions(t *testing.T) {
	t.Parallel()
	p := newUsedAgent(t)
	var page struct{ Items []struct{ ID, Status string } }
	p.mustJSON(&page, "executions", "ls")
	id := page.Items[0].ID
	assert.Contains(t, p.must("executions", "show", id), "heartbeat", "completed", "RECORDED", "self_heal")
	var shown struct {
		ID          string
		Checkpoints []map[string]any
	}
	p.mustJSON(&shown, "executions", "show", id)
	assert.Truef(t, shown.ID == id && len(shown.Checkpoints) > 0, "got %+v", shown)
	assert.Equal(t, id+" had already ended: completed\n", p.must("executions", "cancel", id))
	const unknown = "01a1fc7a-3cbd-7d8a-af56-b10ba12fb33d"
	for _, args := range [][]string{
		{"executions", "show", strings.ReplaceAll(unknown, "-", "")},
		{"executions", "cancel", unknown},
	} {
		if got := p.run(args...); got.code != 1 || !strings.HasSuffix(got.err, "see agent executions ls\n") {
			t.Errorf("agent %v: exit %d, stderr %q", args, got.code, got.err)
		}
	}
}

func TestApprovals(t *testing.T) {
	t.Parallel()
	p := newUsedAgent(t)
	var page struct{ Items []struct{ ID string } }
	p.mustJSON(&page, "approvals", "ls")
	id := page.Items[0].ID
	assert.Contains(t, p.must("approvals", "show", id), "approval "+id, "table_sizes", "pending",
		"\"limit\": 3", "agent trace ")
	var one struct {
		ID        string
		Arguments map[string]int
	}
	if p.mustJSON(&one, "approvals", "show", id); one.ID != id || one.Arguments["limit"] != 3 {
		t.Errorf("got %+v", one)
	}
	got := p.run("approvals", "show", "01a1fc7a-3cbd-7d8a-af56-b10ba12fb33d")
	assert.Truef(t, got.code == 1 && strings.HasSuffix(got.err, "; see agent approvals ls --all\n"),
		"one that is not there: exit %d, stderr %q", got.code, got.err)
	assert.Equal(t, "approved "+id+": table_sizes {\"limit\": 3}\n",
		p.must("approvals", "approve", id, "--reason", "known address"))
	for id, next := range map[string]string{id: "show " + id, "01a1fc7a-3cbd-7d8a-af56-b10ba12fb33d": "ls --all"} {
		got := p.run("approvals", "reject", id)
		assert.Truef(t, got.code == 1 && strings.HasSuffix(got.err, "; see agent approvals "+next+"\n"),
			"a second decision on %s: exit %d, stderr %q", id, got.code, got.err)
	}
}

// Foreign text cannot control the terminal.
func TestListingsEscapeControlCharacters(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	_, err := connect(t, url).Exec(t.Context(), `
		insert into agent_executions (trace_id, surface, agent, flow, status)
		values ('fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'agent', E'red \u001b[31m\nand two lines', 'pending')`)
	require.NoError(t, err)
	got := newProgram(t, url).must("executions", "ls")
	assert.Truef(t, !strings.Contains(got, "\x1b") && strings.Count(got, "\n") == 2, "got %q", got)
}

// Every filter accepts every form of a trace ID.
func TestListingTraceIDForms(t *testing.T) {
	t.Parallel()
	p := newUsedAgent(t)
	p.must("memory", "set", "contact", "Ana")
	for command, of := range map[string]string{
		"activity ls": "activity ls", "executions ls": "executions ls", "approvals ls": "executions ls",
		"memory ls": "memory ls",
	} {
		var rows struct {
			Items []struct {
				TraceID trace.ID `json:"trace_id"`
			} `json:"items"`
		}
		p.mustJSON(&rows, strings.Fields(of)...)
		id := rows.Items[0].TraceID
		for _, form := range []string{
			string(id), strings.ToLower(string(id)), id.OTel(),
			strings.ToUpper(id.OTel()), id.Suffix(),
		} {
			assert.Contains(t, p.must(append(strings.Fields(command), "--trace", form)...), string(id))
		}
		another := trace.New(trace.Heartbeat).OTel()
		got := p.must(append(strings.Fields(command), "--trace", another)...)
		assert.Truef(t, !strings.Contains(got, string(id)), "agent %s --trace %s: %s", command, another, got)
	}
}

// Pages have the requested length up to the maximum; the next page continues.
func TestListingPagesAreComplete(t *testing.T) {
	t.Parallel()
	const all = `generate_series(1, 501) g`
	url := pgtest.URL(t)
	_, err := connect(t, url).Exec(t.Context(), `
		insert into agent_executions (trace_id, surface, agent, flow, status)
		  select 'fl_' || lpad(g::text, 26, '0'), 'flow', 'agent', 'import', 'pending' from `+all+`;
		insert into agent_activity (trace_id, surface, agent, skill_name, status)
		  select 'fl_1', 'flow', 'agent', 'import', 'success' from `+all+`;
		insert into agent_memory (key, value) select 'k' || g, '1' from `+all+`;
		insert into agent_objectives (name, goal) select 'o' || g, 'goal' from `+all+`;
		insert into agent_skills (name, handler, tool_definition) values ('sizes', 'builtin:table_sizes', '{}');
		insert into agent_automations (name, skill_name, trigger, event)
		  select 'a' || g, 'sizes', 'event', 'order.paid' from `+all+`;
		insert into agent_automation_runs (automation_id, scheduled_for, status)
		  select id, clock_timestamp(), 'dead' from agent_automations;
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, body, body_sha256)
		  select 'orders', 'd' || g, 'wh_1', 'wh_1', '', '' from `+all+`;
		insert into agent_requests (kind, execution_id, trace_id, items)
		  select 'document', e.id, e.trace_id, '{cv}' from agent_executions e`)
	require.NoError(t, err)
	p := newProgram(t, url)
	for _, listing := range []string{
		"executions ls", "activity ls", "activity audit", "trace ls", "memory ls", "objectives ls", "automations ls",
		"automations runs", "automations dead",
		"webhooks ls", "requests ls",
	} {
		args := append(strings.Fields(listing), "--limit", "500")
		for _, want := range []int{500, 1} {
			var page struct {
				Items      []map[string]any `json:"items"`
				NextCursor *string          `json:"next_cursor"`
			}
			p.mustJSON(&page, args...)
			if len(page.Items) != want || (page.NextCursor != nil) != (want == 500) {
				t.Errorf("agent %s: %d rows, want %d; next %v", strings.Join(args, " "), len(page.Items), want, page.NextCursor)
				break
			}
			if page.NextCursor != nil {
				args = append(args, "--cursor", *page.NextCursor)
			}
		}
	}
}

// Executions keep replay data. Commands hide its secrets and truncate large values.
func TestExecutionsHideSecrets(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := connect(t, url)
	const id = "01a1fc7a-3cbd-7d8a-af56-b10ba12fb33d"
	for _, sql := range []string{
		`insert into agent_executions (id, trace_id, surface, flow, status, input, variables, result_summary, cancel_reason)
		 values ('01a1fc7a-3cbd-7d8a-af56-b10ba12fb33d', 'fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'import', 'pending',
		         jsonb_build_object('api_key', 'Zq81xLm0Kk77', 'long', repeat('long ', 40000)), '{"token": "Zq81xLm0Kk77"}',
		         'password=Zq81xLm0Kk77', 'Bearer Zq81xLm0Kk77')`,
		`with w as (insert into agent_workers (name, expires_at) values ('w', clock_timestamp() + interval '1 hour')
			returning id)
		 update agent_executions x set status = 'running', claimed_by = w.id, claim = x.claim + 1 from w`,
		`insert into agent_checkpoints (execution_id, step, claim, output)
		 select id, 'login', claim, '{"password": "Zq81xLm0Kk77"}' from agent_executions`,
	} {
		pgtest.Exec(t, db, sql)
	}
	p := newProgram(t, url)
	for _, args := range [][]string{
		{"executions", "ls"},
		{"executions", "ls", "--json"},
		{"executions", "show", id},
		{"executions", "show", id, "--json"},
	} {
		got := p.must(args...)
		assert.Truef(t, !strings.Contains(got, "Zq81xLm0Kk77") && strings.Contains(got, "[redacted]") && len(got) <= 128<<10,
			"agent %v: %d bytes: %.2000s", args, len(got), got)
	}
}

// heartbeat and skills call redact their output too.
func TestCommandsHideSecrets(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	_, err := connect(t, url).Exec(t.Context(), `
		create function spill() returns trigger language plpgsql as $$
		begin
			new.result_summary := 'password=Zq81xLm0Kk77';
			return new;
		end $$;
		create trigger spill before update on agent_executions for each row
		  when (new.status = 'completed') execute function spill()`)
	require.NoError(t, err)
	p := newProgram(t, url)
	query := `select 'Zq81xLm0Kk77' as password`
	p.must("apply", writeFolder(t, map[string]string{"one.yaml": strings.Replace(goodSkill, "select 1 as n", query, 1)}))
	for _, args := range [][]string{
		{"heartbeat"},
		{"heartbeat", "--json"},
		{"skills", "call", "one"},
		{"skills", "call", "one", "--json"},
	} {
		got := p.must(args...)
		assert.Truef(t, !strings.Contains(got, "Zq81xLm0Kk77") && strings.Contains(got, "[redacted]"),
			"agent %v: %s", args, got)
	}
}

func TestResultsKeepTheirDigits(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, writeResult(&out, executions.Execution{Result: []byte(`{"id":9007199254740993,"price":1.10}`)}))
	assert.Equal(t, "{\n  \"id\": 9007199254740993,\n  \"price\": 1.10\n}\n", out.String())
}

func TestUnprintableIsEscaped(t *testing.T) {
	t.Parallel()
	if got, want := escapeJSON("{\n  \"a\": \"é\u202e\u200b\U000e0041\"\n}"),
		"{\n  \"a\": \"é\\u202e\\u200b\\udb40\\udc41\"\n}"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	var asked bytes.Buffer
	show := eventPrinter{out: &asked, status: &asked}
	show.print(operate.Event{Name: "approval", Data: operate.Approval{
		Skill: "pay", Arguments: json.RawMessage(`{"to": "` + "\u202e" + `gnp.exe"}`),
	}})
	assert.Contains(t, asked.String(), `waits for approval: pay {"to": "\u202egnp.exe"}`)
}

// TestTableWidth expects truncated prose on a narrow terminal, whole ids, and no truncation without a terminal.
func TestTableWidth(t *testing.T) {
	t.Parallel()
	id, about := strings.Repeat("i", 36), strings.Repeat("text ", 20)+"end"
	heading, rows := []string{"THREAD", "ABOUT", "STATE"}, [][]string{{id, about, "open"}, {"short", "é", "open"}}
	for name, test := range map[string]struct {
		columns uint16
		want    string
	}{
		"wide terminal":   {200, id + "  " + about + "  open"},
		"narrow terminal": {80, id + "  " + about[:34] + "…  open"},
		"tiny terminal":   {20, id + "  " + about[:15] + "…  open"},
		"no terminal":     {0, id + "  " + about + "  open"},
	} {
		t.Run(name, func(t *testing.T) {
			got := tableOn(t, test.columns, heading, rows)
			assert.Truef(t, strings.Contains(got, test.want+"\n"), "the table is\n%s, want %q in it", got, test.want)
		})
	}
}

// tableOn prints a table on a terminal of that many columns, or to a buffer for 0.
func tableOn(t *testing.T, columns uint16, heading []string, rows [][]string) string {
	t.Helper()
	var text bytes.Buffer
	if columns == 0 {
		writeTable(&errWriter{w: &text}, "", heading, rows)
		return text.String()
	}
	screen, tty, err := pty.Open()
	require.NoError(t, err)
	defer screen.Close()
	require.NoError(t, pty.Setsize(tty, &pty.Winsize{Rows: 40, Cols: columns}))
	writeTable(&errWriter{w: tty}, "", heading, rows)
	require.NoError(t, tty.Close())
	_, _ = io.Copy(&text, screen) // a terminal ends with EIO
	return strings.ReplaceAll(text.String(), "\r\n", "\n")
}
