package offline_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/offline"
)

// skill is a tool with an implementation.
type skill struct {
	name, description, schema string
	do                        func(args string) string
}

const none = `{"type":"object","properties":{}}`

func answers(text string) func(string) string { return func(string) string { return text } }

func caretaker() []skill {
	return []skill{
		{
			"table_sizes", "Tables by total size",
			`{"type":"object","properties":{"limit":{"type":"integer","default":5}},"required":["limit"]}`,
			answers(`[{"table":"orders","total_bytes":8192000},{"table":"events","total_bytes":4096000}]`),
		},
		{
			"dead_rows", "Dead rows that vacuum has not removed yet, by table", none,
			answers(`{"rows":[{"table":"events","dead":1234}]}`),
		},
		{
			"slow_queries", "Queries running longer than a threshold",
			`{"type":"object","properties":{"seconds":{"type":"number","minimum":5}},"required":["seconds"]}`,
			answers(`[]`),
		},
		{
			"replication_lag", "Lag of each replica of the database", none,
			answers(`{"error":"sql","message":"relation pg_lag does not exist"}`),
		},
		{
			"table_details", "Columns and statistics of one table",
			`{"type":"object","properties":{"table":{"type":"string"}},"required":["table"]}`,
			answers(`{"table":"orders","columns":7}`),
		},
		{
			"vacuum_table", "Vacuum a table now",
			`{"type":"object","properties":{"table":{"type":"string"}},"required":["table"]}`, answers(`{"done":true}`),
		},
		{"weather", "The forecast for a city", none, answers(`{"degrees":21}`)},
	}
}

func bookkeeping() []skill {
	return []skill{
		{
			"complete_step", "Report a step as done",
			`{"type":"object","additionalProperties":false,"required":["step_id","result"],
			"properties":{"step_id":{"type":"string"},"result":{"type":"string","minLength":1}}}`, answers(`{"status":"done"}`),
		},
		{
			"fail_step", "Report that a step did not work",
			`{"type":"object","additionalProperties":false,"required":["step_id","reason"],
			"properties":{"step_id":{"type":"string"},"reason":{"type":"string","minLength":1}}}`, answers(`{"status":"noted"}`),
		},
		{"add_steps", "Plan further steps", `{"type":"object","additionalProperties":false,"required":["titles"],
			"properties":{"titles":{"type":"array","minItems":1,"maxItems":10,"items":{"type":"string","minLength":1}}}}`, answers(`[]`)},
		{"remember", "Keep a fact", `{"type":"object","additionalProperties":false,"required":["key","value"],
			"properties":{"category":{"type":"string"},"key":{"type":"string"},"value":{}}}`, answers(`{"status":"noted"}`)},
	}
}

// talk runs a conversation to its end and returns the calls, as name and arguments, and the final text.
func talk(t *testing.T, prompt string, skills []skill) (calls []string, text string) {
	t.Helper()
	return talkOn(t, nil, prompt, skills)
}

// talkOn is talk after earlier messages, of the person and the agent in turn.
func talkOn(t *testing.T, before []string, prompt string, skills []skill) (calls []string, text string) {
	t.Helper()
	return talkAs(t, "You are an autonomous agent that acts without a person watching.", before, prompt, skills)
}

// talkAs is talkOn with a system message.
func talkAs(t *testing.T, system string, before []string, prompt string, skills []skill) (calls []string, text string) {
	t.Helper()
	server := httptest.NewServer(offline.Handler())
	defer server.Close()
	client, err := models.New(models.Config{BaseURL: server.URL + "/v1", Model: offline.Model})
	require.NoError(t, err)
	req := models.Request{Messages: []models.Message{{Role: models.RoleSystem, Content: system}}}
	for i, content := range append(slices.Clone(before), prompt) {
		role := models.RoleUser
		if i%2 == 1 && i < len(before) {
			role = models.RoleAssistant
		}
		req.Messages = append(req.Messages, models.Message{Role: role, Content: content})
	}
	for _, s := range skills {
		req.Tools = append(req.Tools, models.Tool{
			Name: s.name, Description: s.description, Parameters: json.RawMessage(s.schema),
		})
	}
	for range 12 {
		resp, err := client.Complete(t.Context(), req)
		require.NoError(t, err)
		if len(resp.Message.ToolCalls) == 0 {
			return calls, resp.Message.Content
		}
		req.Messages = append(req.Messages, resp.Message)
		for _, call := range resp.Message.ToolCalls {
			made := call.Name + " " + call.Arguments
			assert.Truef(t, !slices.Contains(calls, made), "called twice: %s", made)
			calls = append(calls, made)
			i := slices.IndexFunc(skills, func(s skill) bool { return s.name == call.Name })
			require.Truef(t, i >= 0, "called a tool that was not offered: %s", made)
			checkSchema(t, skills[i].schema, call.Arguments)
			req.Messages = append(req.Messages, models.Message{
				Role: models.RoleTool, ToolCallID: call.ID, Content: skills[i].do(call.Arguments),
			})
		}
	}
	t.Fatalf("the conversation does not end; calls so far: %q", calls)
	return nil, ""
}

func checkSchema(t *testing.T, schema, arguments string) {
	t.Helper()
	decoded, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	require.NoError(t, err)
	compiler := jsonschema.NewCompiler()
	require.NoError(t, compiler.AddResource("tool.json", decoded))
	compiled, err := compiler.Compile("tool.json")
	require.NoError(t, err)
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(arguments))
	require.NoError(t, err, "arguments", arguments)
	assert.NoError(t, compiled.Validate(value), "arguments", arguments)
}

const objective = `Objective keep-healthy (round 1): Keep this database healthy and report what changed.

Steps:
step 0192f-a: Look at the largest tables (pending)
step 0192f-b: Check the lag of replicas (pending)
step 0192f-c: Find dead rows (done) → events 3
step 0192f-d: Report what changed (pending)
`

func TestObjectiveIsAdvanced(t *testing.T) {
	t.Parallel()
	calls, text := talk(t, objective, append(caretaker(), bookkeeping()...))
	for _, want := range []string{
		`table_sizes {"limit":5}`,
		`replication_lag {}`,
		`complete_step {"result":"table_sizes: orders total_bytes 8192000, events total_bytes 4096000","step_id":"0192f-a"}`,
		`fail_step {"reason":"replication_lag: sql: relation pg_lag does not exist","step_id":"0192f-b"}`,
		`remember {"category":"observation","key":"table_sizes","value":"table_sizes: orders total_bytes 8192000, events total_bytes 4096000"}`,
	} {
		assert.Truef(t, slices.Contains(calls, want), "not called: %s\ncalls:\n%s", want, strings.Join(calls, "\n"))
	}
	for _, call := range calls {
		name, args, _ := strings.Cut(call, " ")
		switch {
		case name == "weather" || name == "vacuum_table" || name == "add_steps":
			t.Errorf("called %s", call)
		case strings.Contains(args, "0192f-c"):
			t.Errorf("a finished step was settled again: %s", call)
		}
	}
	assert.Truef(t, slices.ContainsFunc(calls, func(c string) bool {
		return strings.HasPrefix(c, "complete_step") && strings.Contains(c, "0192f-d")
	}), "the summing-up step was not completed:\n%s", strings.Join(calls, "\n"))
	first, _, _ := strings.Cut(text, "\n")
	assert.Truef(t, strings.Contains(first, "8192000") && strings.Contains(text, "pg_lag does not exist"),
		"text = %s", text)
}

func TestObjectiveWithoutStepsIsPlanned(t *testing.T) {
	t.Parallel()
	calls, _ := talk(t, "Objective o (round 1): Watch table sizes.\n\nSteps:\n(none yet)\n",
		append(caretaker(), bookkeeping()...))
	assert.Truef(t, slices.ContainsFunc(calls, func(c string) bool {
		return strings.HasPrefix(c, "add_steps") && strings.Contains(c, "table_sizes") && !strings.Contains(c, "Report")
	}), "no plan was made of steps that a call can show:\n%s", strings.Join(calls, "\n"))
}

func TestReflectionRemembersFailuresFirst(t *testing.T) {
	t.Parallel()
	prompt := "Reflect on the last 7 days of your own performance.\n\nModel tokens: 120, cost: 0.0000 USD.\nSkills:\n" +
		"- table_sizes (enabled): 9 calls, 100 % succeeded, 0 in a row\n- replication_lag (disabled): 3 calls, 0 % succeeded, 3 failures in a row\n"
	calls, text := talk(t, prompt, bookkeeping()[3:])
	assert.Truef(t, len(calls) == 2 && strings.Contains(calls[0], `"key":"replication_lag"`) &&
		strings.Contains(calls[0], "3 failures in a row"), "calls:\n%s", strings.Join(calls, "\n"))
	assert.Contains(t, text, "3 failures in a row")
}

func TestWriteToolsNeedOrder(t *testing.T) {
	t.Parallel()
	for prompt, want := range map[string]bool{
		"Please run vacuum_table for table: orders":  true,
		"Use the tool `vacuum_table`, table=orders.": true,
		"Vacuum the table orders":                    false,
		"vacuum_table is a tool for a table":         false,
		"Do not run vacuum_table on table: orders":   false,
		"No ejecutes vacuum_table":                   false,
	} {
		calls, _ := talk(t, prompt, caretaker())
		assert.Equal(t, want, slices.Contains(calls, `vacuum_table {"table":"orders"}`), prompt, calls)
	}
}

func TestNamesComeFromResults(t *testing.T) {
	t.Parallel()
	calls, _ := talk(t, "Show columns and statistics of the largest table, and table sizes", caretaker())
	assert.Truef(t, slices.Contains(calls, `table_details {"table":"orders"}`), "calls: %q", calls)
	assert.Equal(t, 0,
		slices.IndexFunc(calls, func(c string) bool { return strings.HasPrefix(c, "table_sizes") }), calls)
}

func TestArgumentsFitTheirSchema(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ schema, want string }{
		"default": {`{"type":"object","properties":{"a":{"type":"integer","default":3}},"required":["a"]}`, `{"a":3}`},
		"enum":    {`{"type":"object","properties":{"a":{"enum":["x","y"]}},"required":["a"]}`, `{"a":"x"}`},
		"const":   {`{"type":"object","properties":{"a":{"const":true}},"required":["a"]}`, `{"a":true}`},
		"example": {`{"type":"object","properties":{"a":{"type":"string","examples":["e"]}},"required":["a"]}`, `{"a":"e"}`},
		"minimum": {`{"type":"object","properties":{"a":{"type":"integer","minimum":12}},"required":["a"]}`, `{"a":12}`},
		"maximum": {
			`{"type":"object","properties":{"days":{"type":"integer","maximum":4}},"required":["days"]}`,
			`{"days":4}`,
		},
		"from prompt": {`{"type":"object","properties":{"days":{"type":"integer"}},"required":["days"]}`, `{"days":30}`},
		"boolean":     {`{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]}`, `{"a":false}`},
		"nested": {
			`{"type":"object","properties":{"a":{"type":"object","properties":{"b":{"type":"boolean"}},"required":["b"]}},"required":["a"]}`, `{"a":{"b":false}}`,
		},
		"array": {
			`{"type":"object","properties":{"a":{"type":"array","items":{"type":"integer"},"minItems":2}},"required":["a"]}`,
			`{"a":[1,1]}`,
		},
		"date": {
			`{"type":"object","properties":{"a":{"type":"string","format":"date"}},"required":["a"]}`,
			`{"a":"2026-03-04"}`,
		},
		"free text": {
			`{"type":"object","properties":{"query":{"type":"string","maxLength":8}},"required":["query"]}`,
			`{"query":"Growth o"}`,
		},
		"optional":  {`{"type":"object","properties":{"a":{"type":"string"}}}`, `{}`},
		"no schema": {`{}`, `{}`},
	} {
		t.Run(name, func(t *testing.T) {
			prompt := "Growth over the last 30 days since 2026-03-04"
			calls, _ := talk(t, prompt, []skill{{"growth", "Growth of tables", test.schema, answers("1")}})
			assert.NoDiff(t, []string{"growth " + test.want}, calls)
		})
	}
}

func TestEveryConversationEnds(t *testing.T) {
	t.Parallel()
	for name, result := range map[string]string{
		"errors": `{"error":"INVALID_PARAMS"}`, "nothing": "", "prose": "Error: no", "nested": `{"a":{"b":[{"c":[1,2]}]}}`,
		"cut": `[{"table":"x","n":1},{"ta … (9 of 99 bytes shown)`,
	} {
		t.Run(name, func(t *testing.T) {
			all := append(caretaker(), bookkeeping()...)
			for i := range all {
				all[i].do = answers(result)
			}
			calls, text := talk(t, objective, all)
			assert.Truef(t, text != "" && len(calls) > 0, "calls = %q, text = %q", calls, text)
		})
	}
}

func TestAnswerWithoutRelevantFacts(t *testing.T) {
	t.Parallel()
	calls, text := talk(t, "Sing me a song", caretaker())
	assert.Truef(t, len(calls) == 0 && strings.Contains(text, "offline model") && strings.Contains(text, "OPENAI_API_KEY"),
		"calls = %q, text = %q", calls, text)
}

func post(t *testing.T, url, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/chat/completions",
		strings.NewReader(body))
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(text)
}

func TestEqualRequestsGetEqualResponses(t *testing.T) {
	t.Parallel()
	const body = `{"model":"offline","stream":true,"messages":[{"role":"user","content":"table sizes?"}],
		"tools":[{"type":"function","function":{"name":"table_sizes","parameters":{"type":"object"}}}]}`
	first, second := httptest.NewServer(offline.Handler()), httptest.NewServer(offline.Handler())
	defer first.Close()
	defer second.Close()
	_, once := post(t, first.URL, body)
	_, again := post(t, first.URL, body)
	_, elsewhere := post(t, second.URL, body)
	assert.Truef(t, once == again && once == elsewhere && strings.Contains(once, "table_sizes"),
		"answers differ:\n%s\n%s\n%s", once, again, elsewhere)
}

func TestProtocol(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(offline.Handler())
	defer server.Close()
	for name, test := range map[string]struct {
		body   string
		status int
		want   string
	}{
		"not JSON":      {`{`, 400, "invalid_request_error"},
		"no messages":   {`{"messages":[]}`, 400, "no messages"},
		"parts":         {`{"messages":[{"role":"user","content":[{"type":"text","text":"12 geese"}]}]}`, 200, "12 geese"},
		"unknown field": {`{"shoe_size":44,"messages":[{"role":"user","content":"hi"}]}`, 200, `"model":"offline"`},
		"JSON wanted": {
			`{"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"object","properties":{"text":{"type":"string"}},"required":["text"]}}},
			"messages":[{"role":"user","content":"12 geese"}]}`, 200, `{\"text\":\"From what I was given: 12 geese`,
		},
		"short, as counted": {`{"max_tokens":2,"messages":[{"role":"user","content":"hi"}]}`, 200, `"completion_tokens":2,`},
		"short":             {`{"max_tokens":2,"messages":[{"role":"user","content":"hi"}]}`, 200, `"finish_reason":"length"`},
	} {
		t.Run(name, func(t *testing.T) {
			status, text := post(t, server.URL, test.body)
			assert.Truef(t, status == test.status && strings.Contains(text, test.want),
				"answer = %d %s, want %d with %s", status, text, test.status, test.want)
		})
	}
}

func TestServerStartsAndStops(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	url, stop, err := offline.Start(ctx)
	require.NoError(t, err)
	resp, err := http.Get(url + "/models")
	require.NoError(t, err)
	resp.Body.Close()
	cancel()
	stop()
	stop()
	if resp, err := http.Get(url + "/models"); err == nil {
		resp.Body.Close()
		t.Error("the server answers after its end")
	}
}
