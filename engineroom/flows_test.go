package engineroom

import (
	"html"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// insertProcess inserts a process that runs flows in Go, with a lease in seconds.
func insertProcess(t *testing.T, pool *pgxpool.Pool, name string, lease int, inGo ...string) string {
	t.Helper()
	return insert(t, pool, `
		insert into agent_workers (name, go_flows, expires_at)
		values ($1, $2::text[], clock_timestamp() + make_interval(secs => $3::int)) returning id::text`, name, inGo, lease)
}

// insertExternalLock inserts an execution locked by an external worker.
func insertExternalLock(t *testing.T, pool *pgxpool.Pool, flow, owner string) {
	t.Helper()
	id := rows.Execution(t, pool, "running", "flow", flow)
	rows.Quiet(t, pool, `
		with w as (insert into agent_workers (kind, owner, lock_id, execution_id, claim, expires_at)
		  values ('outside', $2, 'lock-Zq81xLm0', $1::uuid, 1, clock_timestamp() + interval '1 minute') returning id)
		update agent_executions x set claimed_by = w.id, claim = 1 from w where x.id = $1::uuid`, id, owner)
}

// textareaOf returns the content of a page's only text field.
func textareaOf(t *testing.T, body string) string {
	t.Helper()
	found := regexp.MustCompile(`(?s)<textarea[^>]*>(.*?)</textarea>`).FindStringSubmatch(body)
	require.Truef(t, found != nil, "no text field:\n%s", body)
	return html.UnescapeString(found[1])
}

func TestListFlows(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/flows", "No flow yet")
	_, err := flows.Put(t.Context(), pool, flows.Definition{
		Name: "onboard", Description: "Welcomes <b>somebody</b>.", Actions: []any{map[string]any{"actionType": "end"}},
		Input: map[string]any{"type": "object", "properties": map[string]any{
			"name": map[string]any{"type": "string"}, "days": map[string]any{"type": "integer", "default": 3},
		}},
	})
	require.NoError(t, err)
	insertProcess(t, pool, "host-1", 60, "ship", "heartbeat")
	for _, status := range []string{"completed", "failed", "timeout"} {
		rows.Execution(t, pool, status, "flow", "ship")
	}
	id := rows.Execution(t, pool, "completed", "flow", "external:sum")
	rows.Quiet(t, pool, `update agent_executions set input = '{"start": 10}' where id = $1::uuid`, id)
	rows.Quiet(t, pool, `update agent_executions set input = '{"password": "hunter2-Zq81xLm0Kk77"}' where flow = 'ship'`)
	room := newRoom(t, Options{Pool: pool}) // this room has no cached suggestions
	list := serveRoom(t, room).URL
	row := func(name string) string {
		body := wantTexts(t, list+"/flows")
		_, rest, _ := strings.Cut(body, `<tr id="flow-`+name+`"`)
		text, _, _ := strings.Cut(rest, "</tr>")
		return text
	}
	assert.Contains(t, row("onboard"), "YAML", "version 1", "Welcomes &lt;b&gt;", `href="/flows/onboard#start"`)
	assert.Contains(t, row("ship"), "Go", `aria-label="3 executions of ship"`, `aria-label="2 failed executions of ship"`,
		"timeout")
	assert.Contains(t, row("external:sum"), "external", `aria-label="1 execution of external:sum"`,
		`href="/executions/`+id)
	if text := row("heartbeat"); !strings.Contains(text, "built in") || strings.Contains(text, "#start") {
		t.Errorf("row of a flow that only the program starts: %s", text)
	}
	assert.Equal(t, `{
  "days": 3,
  "name": ""
}`, textareaOf(t, wantTexts(t, list+"/flows/onboard", "an example of its schema", "Definition")))
	assert.Equal(t, "{\n  \"start\": 10\n}", textareaOf(t, wantTexts(t, list+"/flows/external:sum",
		"of its newest execution")))
	rows.Quiet(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, claim, claimed_by, input)
		select 'fl_2', 'flow', 'external:sum', 'running', 1, id, '{"start": 11}' from agent_workers limit 1`)
	assert.Equal(t, "{\n  \"start\": 11\n}", textareaOf(t, wantTexts(t, list+"/flows/external:sum")))
	body := wantTexts(t, list+"/flows/ship")
	assert.True(t, textareaOf(t, body) == "{}" && !strings.Contains(body, "hunter2"), "the form contains a secret")
	wantTexts(t, list+"/flows/heartbeat", "Only the program itself starts this flow")
	wantError(t, list+"/flows/shipp", http.StatusNotFound, "there is no flow")
	wantError(t, list+"/flows?x=1", http.StatusBadRequest, "this page has no filters")
}

func TestTalkingFlowNeedsThread(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for name, action := range map[string]string{"silent": "end", "talks": "wait_for_response"} {
		_, err := flows.Put(t.Context(), pool, flows.Definition{
			Name: name, Actions: []any{map[string]any{"actionType": action}},
		})
		require.NoError(t, err)
	}
	field := func(name string) string {
		return regexp.MustCompile(`<label>Thread, .*`).FindString(wantTexts(t, server.URL+"/flows/"+name))
	}
	assert.Contains(t, field("talks"), "because the flow talks", " required>")
	if silent := field("silent"); !strings.Contains(silent, "if the flow talks") || strings.Contains(silent, "required") {
		t.Errorf("field of a flow that need not talk: %s", silent)
	}
}

func TestStartFlowFromPage(t *testing.T) {
	t.Parallel()
	calls, server, client := serveWithAPI(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Trace-Id", "fl_1")
		w.WriteHeader(http.StatusCreated)
	})
	post(t, client, server.URL+"/act/v1/executions", url.Values{
		"flow": {"onboard"}, "input": {`{"name": "Ana"}`}, "reason": {"to try it"}, "back": {"/flows/onboard"},
	}, nil)
	post(t, client, server.URL+"/act/v1/executions", url.Values{"flow": {"onboard"}, "input": {"{Ana}"}}, nil)
	if assert.Equal(t, 1, len(*calls)); (*calls)[0].path != "/v1/executions" ||
		(*calls)[0].body != `{"flow":"onboard","input":{"name":"Ana"},"reason":"to try it"}` {
		t.Errorf("the API got the call %+v", (*calls)[0])
	}
}

func TestListProcessesAndWorkers(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/lanes", "No process is connected")
	live := insertProcess(t, pool, "host-1 pid 7", 60, "ship", "heartbeat")
	expired := insertProcess(t, pool, "host-2 pid 8", -60, "bill")
	insertProcess(t, pool, "host-3 pid 9", -3600, "old")
	insertExternalLock(t, pool, "external:sum", "sum <worker>")
	rows.Quiet(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, claimed_by) select 'fl_3', 'flow', 'ship', 'running', $1::uuid
		  from generate_series(1, 2)`, live)
	for name, left := range map[string]string{
		"idle one": "1 minute", "sum <worker>": "1 minute", "gone home": "-1 second",
	} {
		rows.Quiet(t, pool, `insert into agent_idle_workers (owner, flows, expires_at)
			values ($1, '{external:mul}', clock_timestamp() + $2::text::interval)`, name, left)
	}
	body := wantTexts(t, server.URL+"/lanes")
	_, body, _ = strings.Cut(body, `<section id="workers"`)
	body, _, _ = strings.Cut(body, "</section>")
	assert.Contains(t, body, "host-1 pid 7", `href="/flows/ship"`, "1 flows of the agent itself", "sum &lt;worker&gt;",
		"worker outside",
		`href="/flows/external:sum"`, `<td class="number" data-label="Running">2</td>`,
		"idle one", `href="/flows/external:mul"`, `<td class="number" data-label="Running">0</td>`)
	for _, bad := range []string{"host-3", "lock-Zq81xLm0", "gone home"} {
		assert.Truef(t, !strings.Contains(body, bad), "the part has %s", bad)
	}
	row := body[strings.Index(body, "worker-"+expired):]
	assert.True(t, strings.Contains(row, "lease over"), "a process with an expired lease counts as connected")
}

func TestPendingExecutionReportsMissingWorker(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	_, err := flows.Put(t.Context(), pool, flows.Definition{
		Name: "onboard", Actions: []any{map[string]any{"actionType": "end"}},
	})
	require.NoError(t, err)
	says := func(status, flow, text string) {
		t.Helper()
		id := rows.Execution(t, pool, status, "flow", flow)
		rows.Quiet(t, pool, `
			update agent_executions set updated_at = updated_at - interval '1 minute' where id = $1::uuid`, id)
		body := wantTexts(t, server.URL+"/executions/"+id)
		if linked := strings.Contains(body, `href="/lanes#workers"`); linked != (text != "") ||
			!strings.Contains(body, text) {
			t.Errorf("%s %s: reports a missing worker: %t, want %q", status, flow, linked, text)
		}
	}
	says("pending", "ship", "No process for flow ship is connected.")
	says("pending", "onboard", "No process is connected.")
	says("pending", "external:sum", "No worker for flow external:sum is connected. None has taken")
	says("completed", "ship", "")
	insertProcess(t, pool, "host-1", 60, "ship")
	insertProcess(t, pool, "host-2", -60, "bill")
	says("pending", "ship", "")
	says("pending", "onboard", "")
	says("pending", "bill", "No process for flow bill is connected.")
	says("running", "bill", "No process for flow bill is connected.")
	insertExternalLock(t, pool, "external:sum", "w")
	says("pending", "external:sum", "")
}
