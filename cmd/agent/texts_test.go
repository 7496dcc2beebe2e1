package main

import (
	"bufio"
	"encoding/json"
	"html"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/principals"
)

// conversations is a server with conversations of a visitor and an admin. Each text in them contains spoken.
type conversations struct {
	*operateTest
	remoteProgram      program
	base               string
	secrets            map[principals.Role]string
	traces, runs, rows []string
}

const spoken = "PURPLE"

var pathPlaceholder = regexp.MustCompile(`\{[^}]*\}`)

func newConversations(t *testing.T) *conversations {
	t.Helper()
	const key = "visitors-key-of-this-test"
	c := &conversations{
		operateTest: newOperateTest(t, modeltest.Text(spoken+" answer"),
			modeltest.ToolCall("look", `{}`),
			modeltest.ToolCall("memory_write", `{"category": "c", "key": "k", "value": "`+spoken+`"}`),
			modeltest.ToolCall("delegate", `{"task": "`+spoken+` task"}`),
			modeltest.Text(spoken+" result"), modeltest.Text(spoken+" end")),
		secrets: map[principals.Role]string{},
	}
	c.remoteProgram, _ = c.remote("AGENT_CHAT_KEY=" + key)
	c.base = strings.TrimPrefix(c.remoteProgram.environ[0], "AGENT_SERVER=")
	got := send(t.Context(), "POST", c.base+"/v1/chat/completions", key,
		`{"model": "agent", "messages": [{"role": "user", "content": "`+spoken+` question"}]}`)
	require.Truef(t, strings.Contains(got.body, spoken+" answer"), "%d %s, %v", got.status, got.body, got.err)
	c.remoteProgram.must("operate", spoken+" order")
	ids := func(column, table string) []string {
		return pgtest.Value[[]string](t, c.pool, `select array_agg(distinct `+column+`::text) from `+table)
	}
	c.traces, c.runs = ids("trace_id", "agent_executions"), ids("id", "agent_executions")
	c.rows = ids("id", "agent_activity")
	require.Truef(t, len(c.traces) == 2 && len(c.runs) == 3, "traces %v, executions %v", c.traces, c.runs)
	return c
}

// asRole creates a principal with a role. It returns the principal's program and a reader of paths.
func (c *conversations) asRole(t *testing.T, role principals.Role) (p program, get func(path string) string) {
	t.Helper()
	return c.withScope(t, role, "*")
}

// withScope is asRole with a token of one scope.
func (c *conversations) withScope(t *testing.T, role principals.Role, scope string) (p program,
	get func(path string) string,
) {
	t.Helper()
	name := string(role) + strings.ReplaceAll(scope, "*", "")
	_, err := principals.Create(t.Context(), c.pool,
		principals.CreateParams{Name: name, Kind: principals.User, Role: role})
	require.NoError(t, err)
	_, secret, err := principals.CreateToken(t.Context(), c.pool,
		principals.TokenParams{Principal: name, Scopes: []string{scope}})
	require.NoError(t, err)
	c.secrets[role] = secret
	return newProgramWithoutDatabase(t, c.remoteProgram.environ[0], "AGENT_TOKEN="+secret), func(path string) string {
		t.Helper()
		got := send(t.Context(), "GET", c.base+path, secret, "")
		require.NoError(t, got.err)
		return got.body
	}
}

// compareTexts checks that the operator sees the texts, and the viewer the note in their place.
func compareTexts(t *testing.T, about, viewed, operated string) {
	t.Helper()
	assert.Truef(t, strings.Contains(operated, spoken), "%s shows an operator %s", about, operated)
	assert.Truef(t, strings.Contains(viewed, activity.HiddenText) && !strings.Contains(viewed, spoken),
		"%s shows a viewer %s", about, viewed)
}

// No route and no command shows a viewer a text of a visitor, an admin or the model. The note names the scope.
func TestConversationTextsNeedThreadsRead(t *testing.T) {
	t.Parallel()
	c := newConversations(t)
	viewer, viewed := c.asRole(t, principals.Viewer)
	operator, operated := c.asRole(t, principals.Operator)

	shown := []string{"/v1/activity", "/v1/executions", "/v1/executions?format=csv"}
	commands := [][]string{{"executions", "ls"}, {"executions", "ls", "--json"}, {"activity", "ls", "--json"}}
	for _, id := range c.traces {
		shown = append(shown, "/v1/traces/"+id, "/v1/traces/"+id+"/why")
		commands = append(commands, []string{"trace", id, "--json"}, []string{"why", id}, []string{"why", id, "--json"})
	}
	for _, id := range c.runs {
		shown = append(shown, "/v1/executions/"+id)
		commands = append(commands, []string{"executions", "show", id}, []string{"executions", "show", id, "--json"})
	}
	for _, path := range shown {
		compareTexts(t, path, viewed(path), operated(path))
	}
	for _, args := range commands {
		compareTexts(t, strings.Join(args, " "), viewer.must(args...), operator.must(args...))
	}

	var doc struct {
		Paths map[string]map[string]json.RawMessage
	}
	require.NoError(t, json.Unmarshal([]byte(viewed("/openapi.json")), &doc))
	tried := 0
	for path, methods := range doc.Paths {
		for _, id := range slices.Concat(c.traces, c.runs, c.rows) {
			if methods["get"] == nil {
				break
			}
			at := pathPlaceholder.ReplaceAllLiteralString(path, id)
			got := viewed(at)
			assert.Truef(t, !strings.Contains(got, spoken), "%s shows a viewer %s", at, got)
			if tried++; at == path {
				break
			}
		}
	}
	assert.Truef(t, tried > 100, "only %d requests", tried)
}

// A hidden text keeps the type of its field. The rest of the row is shown.
func TestHiddenTextsKeepTheirTypes(t *testing.T) {
	t.Parallel()
	c := newConversations(t)
	_, viewed := c.asRole(t, principals.Viewer)
	for _, id := range c.traces {
		var got activity.Trace
		require.NoError(t, json.Unmarshal([]byte(viewed("/v1/traces/"+id)), &got))
		assert.Truef(t, got.Tokens > 0 && len(got.Activities) > 0, "the trace is %+v", got)
		for _, row := range got.Activities {
			if row.Kind == activity.KindModel {
				assert.Equal(t, `{"note":"[needs the scope threads:read]"}`, string(row.Input))
				assert.Truef(t, row.Model == "scripted" && row.TokenUsage.TotalTokens > 0, "the row is %+v", row)
			}
		}
	}
	for _, id := range c.runs {
		var got executions.Execution
		require.NoError(t, json.Unmarshal([]byte(viewed("/v1/executions/"+id)), &got))
		assert.Equal(t, activity.HiddenText, got.ResultSummary)
		assert.Equal(t, `{"note":"[needs the scope threads:read]"}`, string(got.Input))
		assert.Equal(t, executions.Completed, got.Status)
	}
}

// The Engine Room hides the same texts from a viewer. An operator reads them on the same page.
func TestPagesHideTextsWithoutThreadsRead(t *testing.T) {
	t.Parallel()
	c := newConversations(t)
	_, viewed := c.asRole(t, principals.Viewer)
	_, operated := c.asRole(t, principals.Operator)
	shown, others := []string{"/traces", "/executions"}, []string{"/", "/audit", "/flows", "/spend"}
	for _, id := range c.traces {
		shown = append(shown, "/traces/"+id, "/traces/"+id+"?tab=why", "/traces?trace="+id)
	}
	for _, id := range c.runs {
		shown = append(shown, "/executions/"+id)
		others = append(others, "/executions/"+id+"?tab=checkpoint")
		others = append(others, "/traces/"+c.traceOf(t, id)+"?tab=raw&span="+id)
	}
	for _, id := range c.rows {
		at := "/traces/" + pgtest.Value[string](t, c.pool, `select trace_id from agent_activity where id::text = $1`, id)
		if pgtest.Value[string](t, c.pool, `select kind from agent_activity where id::text = $1`, id) == "model" {
			shown = append(shown, "/activity?row="+id, at+"?span="+id, at+"?tab=raw&span="+id)
		}
		others = append(others, "/activity?row="+id, at+"?span="+id, at+"?tab=raw&span="+id)
	}
	for _, path := range shown {
		compareTexts(t, path, viewed(path), operated(path))
	}
	for _, path := range others {
		got := viewed(path)
		assert.Truef(t, strings.Contains(got, "<main") && !strings.Contains(got, spoken), "%s shows a viewer %s", path, got)
	}
	for _, id := range c.runs {
		path := "/live/executions/" + id
		operatorsStream := c.stream(t, principals.Operator, path)
		viewersStream := c.stream(t, principals.Viewer, path)()
		compareTexts(t, path, viewersStream, operatorsStream())
		assert.Truef(t, !strings.Contains(viewersStream, `href=\"/threads/`), "%s links a thread for a viewer", path)
	}
}

// Each link of a page opens for its viewer. Links that only an admin may open are plain text.
func TestPagesLinkOnlyPermittedPages(t *testing.T) {
	t.Parallel()
	c := newConversations(t)
	pgtest.Exec(t, c.pool, `
		insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash,
		                             expires_at)
		select e.trace_id, e.id, 'look', 1, '{}', e.id::text, now() + interval '1 hour' from agent_executions e`)
	pages := []string{
		"/", "/activity", "/traces?q=nothing+has+this", "/executions", "/flows", "/agents", "/skills/look", "/approvals",
		"/threads", "/memory", "/find", "/find/results",
	}
	for _, id := range c.traces {
		pages = append(pages, "/traces/"+id, "/traces/"+id+"?tab=raw")
	}
	for _, id := range c.runs {
		pages = append(pages, "/executions/"+id, "/traces/"+c.traceOf(t, id)+"?tab=raw&span="+id)
	}
	const refused = "this needs the scope"
	links := regexp.MustCompile(`<a [^>]*?href="(/[^"#]*)`)
	for scope, role := range map[string]principals.Role{
		"*": principals.Viewer, "runs:read": principals.Admin, "approvals:read": principals.Admin,
		"threads:read": principals.Admin,
	} {
		_, get := c.withScope(t, role, scope)
		tried := map[string]bool{}
		for _, page := range pages {
			body := get(page)
			for _, link := range links.FindAllStringSubmatch(body, -1) {
				to := html.UnescapeString(link[1])
				if !tried[to] && !strings.Contains(body, refused) {
					tried[to] = true
					assert.Truef(t, !strings.Contains(get(to), refused), "%s links %s for %s", page, to, scope)
				}
			}
		}
		assert.Truef(t, len(tried) > 0, "no link for %s", scope)
	}
}

func (c *conversations) traceOf(t *testing.T, execution string) string {
	t.Helper()
	return pgtest.Value[string](t, c.pool, `select trace_id from agent_executions where id::text = $1`, execution)
}

// stream opens a live page. The returned function reads it until it has the texts or the note.
func (c *conversations) stream(t *testing.T, role principals.Role, path string) (read func() string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.base+path, nil)
	require.NoError(t, err)
	r.Header.Set("Authorization", "Bearer "+c.secrets[role])
	got, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	t.Cleanup(func() { _ = got.Body.Close() })
	return func() string {
		var read strings.Builder
		for lines := bufio.NewScanner(got.Body); lines.Scan(); {
			read.WriteString(lines.Text())
			if strings.Contains(lines.Text(), spoken) || strings.Contains(lines.Text(), activity.HiddenText) {
				break
			}
		}
		return read.String()
	}
}

// A sample of recorded turns is complete for every caller. A separate check restricts its answers.
func TestRecordedTurnsKeepTheirTexts(t *testing.T) {
	t.Parallel()
	c := newConversations(t)
	of := evals.SampleFilter{Agent: "agent", All: true, Since: time.Hour, Size: 5}
	_, whole, err := evals.DrawSample(t.Context(), c.pool, of)
	require.NoError(t, err)
	_, drawn, err := evals.DrawSample(activity.WithoutTexts(t.Context()), c.pool, of)
	require.NoError(t, err)
	assert.NoDiff(t, whole, drawn)
	calls := 0
	for _, turn := range drawn.Turns {
		calls += len(turn.Calls)
	}
	assert.Truef(t, calls > 0, "the sample is %+v", drawn)
}
