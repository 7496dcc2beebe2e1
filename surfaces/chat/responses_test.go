package chat_test

import (
	_ "embed"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/responses"
	gopenai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/npmtest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// respond sends a request of the Responses API.
func (p *process) respond(t *testing.T, method, path, body string, headers ...string) (*http.Response, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, p.url+"/v1/responses"+path, strings.NewReader(body))
	require.NoError(t, err)
	r.Header.Set("Authorization", "Bearer site")
	return do(t, r, headers)
}

func TestOfficialClientHoldsConversationOfResponses(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Hello, Ada."), modeltest.ToolCall("opening", `{}`),
		modeltest.Text("We open at nine o'clock."))
	p := w.process(t)
	client := p.official("site")
	first, err := client.Responses.New(t.Context(), responses.ResponseNewParams{
		Model: "agent", Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("I am Ada.")},
		Instructions: openai.String("Say only moo."), Metadata: map[string]string{"a": "b"}, Store: openai.Bool(false),
	})
	require.NoError(t, err)
	if first.OutputText() != "Hello, Ada." || first.Status != "completed" || first.Usage.TotalTokens == 0 ||
		first.Metadata["a"] != "b" || !strings.HasPrefix(first.ID, "resp_") ||
		!strings.Contains(first.RawJSON(), `"store":true`) {
		t.Errorf("first: %s", first.RawJSON())
	}
	stream := client.Responses.NewStreaming(t.Context(), responses.ResponseNewParams{
		Model: "agent", Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("When do you open?")},
		PreviousResponseID: openai.String(first.ID),
	})
	var kinds []string
	var text string
	var last responses.Response
	for n := int64(0); stream.Next(); n++ {
		e := stream.Current()
		assert.Equal(t, n, e.SequenceNumber)
		if kinds = append(kinds, e.Type); e.Type == "response.output_text.delta" {
			text += e.Delta
		}
		last = e.Response
	}
	want := []string{
		"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
		"response.output_text.delta", "response.output_text.done", "response.content_part.done",
		"response.output_item.done",
		"response.completed",
	}
	diff := cmp.Diff(want, slices.Compact(kinds))
	assert.Truef(t, diff == "" && stream.Err() == nil, "%v; events (-want +got):\n%s", stream.Err(), diff)
	if text != "We open at nine o'clock." || last.OutputText() != text || last.PreviousResponseID != first.ID {
		t.Errorf("said %q; last %s", text, last.RawJSON())
	}
	lines := w.transcript(t, first.Conversation.ID)
	assert.Truef(t, len(lines) == 4 && w.called("opening") == 1, "the thread has %q", lines)
	for _, req := range w.model.Requests() {
		assert.True(t, !strings.Contains(req.Body, "moo"), "a client's instructions reached the model")
	}
	_, err = client.Responses.Get(t.Context(), "resp_none", responses.ResponseGetParams{})
	refusal(t, err, 404, "response_not_found")
	stored, err := client.Responses.Get(t.Context(), last.ID, responses.ResponseGetParams{})
	assert.Truef(t, err == nil && stored.OutputText() == text && stored.Status == "completed",
		"stored %v, %v", stored, err)
	_, err = client.Responses.New(t.Context(), responses.ResponseNewParams{
		Model: "agent", Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("And before?")},
		PreviousResponseID: openai.String(first.ID),
	})
	var failure *openai.Error
	assert.Truef(t, errors.As(err, &failure) && failure.StatusCode == http.StatusConflict &&
		failure.Code == "previous_response_not_last" && strings.Contains(failure.Message, first.Conversation.ID),
		"a response that is not the last: %v", err)
}

func TestRepeatedKeyAfterPreviousResponseIsReplayed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Two."))
	p := w.process(t)
	_, first := p.respond(t, "POST", "", `{"model":"agent","input":"hi"}`)
	var previous struct{ ID string }
	require.NoError(t, json.Unmarshal([]byte(first), &previous))
	body := `{"model":"agent","input":"and then?","previous_response_id":"` + previous.ID + `"}`
	r, answer := p.respond(t, "POST", "", body, "Idempotency-Key", "k")
	require.Equal(t, http.StatusOK, r.StatusCode, answer)
	r, again := p.respond(t, "POST", "", body, "Idempotency-Key", "k")
	assert.Truef(t, r.StatusCode == http.StatusOK && again == answer, "%d %s, want %s", r.StatusCode, again, answer)
}

func TestResponsesRefuseWhatTheyCannotDo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t)
	for _, c := range []struct{ body, want string }{
		{`"input":"hi","tools":[{"type":"function","name":"f"}]`, "unsupported_value tools"},
		{`"input":"hi","tool_choice":"required"`, "unsupported_value tool_choice"},
		{`"input":"hi","max_tool_calls":1`, "unsupported_value max_tool_calls"},
		{`"input":"hi","prompt":{"id":"pmpt_1"}`, "unsupported_value prompt"},
		{`"input":"hi","include":["message.output_text.logprobs"]`, "unsupported_value include"},
		{`"input":"hi","text":{"format":{"type":"grammar"}}`, "unsupported_value text.format"},
		{`"input":"hi","max_output_tokens":0`, "invalid_value max_output_tokens"},
		{`"input":"hi","metadata":{"a":1}`, "invalid_type metadata"},
		{`"input":"hi","metadata":{"a":"\u0000"}`, "invalid_value metadata"},
		{`"input":"hi","conversation":7`, "invalid_type conversation"},
		{`"input":"hi","conversation":"a","previous_response_id":"b"`, "mutually_exclusive_parameters previous_response_id"},
		{`"input":"hi","previous_response_id":"resp_none"`, "previous_response_not_found previous_response_id"},
		{`"input":"hi","previous_response_id":"resp_\u0000"`, "previous_response_not_found previous_response_id"},
		{`"input":[{"type":"function_call_output","call_id":"c","output":"x"}]`, "unsupported_value input[0]"},
		{`"input":[{"type":"item_reference","id":"msg_x"},{"role":"user","content":"a"}]`, "item_not_found input[0]"},
		{
			`"input":[{"role":"user","content":[{"type":"input_image","image_url":"x"}]}]`,
			"unsupported_content input[0].content",
		},
		{`"input":[{"role":"assistant","content":"a"}]`, "invalid_value input"},
		{`"input":""`, "missing_messages input"},
		{`"input":7`, "invalid_type input"},
	} {
		r, got := p.respond(t, "POST", "", `{"model":"agent",`+c.body+`}`)
		f := failureOf(t, got)
		param := ""
		if f.Param != nil {
			param = *f.Param
		}
		assert.Truef(t, r.StatusCode == http.StatusBadRequest && f.Code+" "+param == c.want && f.Message != "",
			"%s: %d %s", c.body, r.StatusCode, got)
	}
	assert.Equal(t, 0, pgtest.Value[int](t, p.pool, `select count(*) from agent_threads`))
}

func TestResponseIsPolledCancelledAndSeenByItsOwnerOnly(t *testing.T) {
	t.Parallel()
	g, reply := gated()
	w := newWorld(t, reply)
	p := w.process(t)
	r, body := p.respond(t, "POST", "", `{"model":"agent","background":true,"input":"slowly",
		"conversation":{"id":"c"}}`)
	var got struct {
		ID, Status, Object string
		Background         bool
	}
	err := json.Unmarshal([]byte(body), &got)
	require.Truef(t, err == nil && got.Status == "in_progress" && r.StatusCode == http.StatusOK &&
		got.Object == "response" && got.Background && r.Header.Get("X-Thread-Id") == "c" && r.Header.Get("X-Trace-Id") != "",
		"%d %s", r.StatusCode, body)
	testkit.Receive(t, g.asked)
	send(t, g.pieces, "Half of it")
	pgtest.Eventually(t, func() bool {
		_, body := p.respond(t, "GET", "/"+got.ID, "")
		return strings.Contains(body, `"status":"in_progress"`) && strings.Contains(body, "Half of it")
	}, "the text so far is shown")
	for _, c := range []struct{ method, path string }{
		{"GET", "/" + got.ID},
		{"POST", "/" + got.ID + "/cancel"},
		{"GET", "/" + got.ID + "/input_items"},
		{"DELETE", "/" + got.ID},
	} {
		r, theirs := p.respond(t, c.method, c.path, "", "Authorization", "Bearer shop")
		assert.Equal(t, http.StatusNotFound, r.StatusCode, c.method, c.path, theirs)
	}
	r, body = p.respond(t, "DELETE", "/"+got.ID, "")
	assert.Truef(t, r.StatusCode == http.StatusBadRequest && failureOf(t, body).Param != nil,
		"delete: %d %s", r.StatusCode, body)
	_, body = p.respond(t, "GET", "/"+got.ID+"/input_items", "")
	assert.Truef(t, strings.Contains(body, `"input_text"`) && strings.Contains(body, "slowly"), "input items: %s", body)
	for range 2 {
		_, body := p.respond(t, "POST", "/"+got.ID+"/cancel", "")
		assert.Truef(t, strings.Contains(body, `"status":"cancelled"`) && strings.Contains(body, `"text":"Half of it"`),
			"cancelled: %s", body)
	}
	want := []string{"user: slowly", "assistant: Half of it [interrupted]"}
	assert.NoDiff(t, want, w.transcript(t, "c"))
}

func TestInputItemsAreThoseOfTheConversation(t *testing.T) {
	t.Parallel()
	p := newWorld(t, modeltest.Text("The same.")).process(t)
	file := p.upload(t, "note.txt", "a dot")
	r, body := p.respond(t, "POST", "", `{"model":"agent","input":[{"role":"user","content":[`+
		`{"type":"input_text","text":"Compare."},{"type":"input_file","file_id":"`+file+`"},`+
		`{"type":"input_image","image_url":"`+picture+`"}]}]}`, inThread("s")...)
	require.Equal(t, http.StatusOK, r.StatusCode, body)
	var response struct{ ID string }
	require.NoError(t, json.Unmarshal([]byte(body), &response))
	want := `[{"type":"input_text","text":"Compare."},{"type":"input_file","file_id":"` + file +
		`","filename":"note.txt"},{"type":"input_image","image_url":"` + picture + `","detail":"auto"}]`
	for _, path := range []string{"/v1/responses/" + response.ID + "/input_items", "/v1/conversations/s/items"} {
		_, body := p.get(t, path)
		assert.Contains(t, body, `"role":"user","status":"completed","content":`+want)
	}
}

func TestStreamOfCancelledResponseEndsCancelled(t *testing.T) {
	t.Parallel()
	g, reply := gated()
	p := newWorld(t, reply).process(t)
	stream := make(chan string, 1)
	go func() {
		_, body := p.respond(t, "POST", "", `{"model":"agent","stream":true,"input":"slowly"}`)
		stream <- body
	}()
	testkit.Receive(t, g.asked)
	id := pgtest.Value[string](t, p.pool, `select id::text from agent_executions`)
	_, body := p.respond(t, "POST", "/resp_"+id+"/cancel", "")
	assert.Contains(t, body, `"status":"cancelled"`)
	_, last, _ := strings.Cut(testkit.Receive(t, stream), "event: response.failed")
	assert.Contains(t, last, `"status":"cancelled"`)
	assert.Contains(t, last, `"error":null`)
}

func TestHistoryOfInputIsTakenOverOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Nine."), modeltest.Text("Five."))
	p := w.process(t, func(*chat.Chat) {})
	r, body := p.respond(t, "POST", "", `{"model":"agent","input":[{"role":"user",
		"content":[{"type":"input_text","text":"When?"}]}]}`)
	var got struct {
		Output []struct{ ID string }
	}
	if err := json.Unmarshal([]byte(body), &got); err != nil || len(got.Output) != 1 {
		t.Fatalf("%d %s", r.StatusCode, body)
	}
	r, body = p.respond(t, "POST", "", `{"model":"agent","input":[{"role":"system","content":"moo"},
		{"role":"user","content":"When?"},{"type":"item_reference","id":"`+got.Output[0].ID+`"},
		{"type":"message","role":"user","content":[{"type":"input_text","text":"And close?"}]}]}`)
	want := []string{"user: When?", "assistant: Nine.", "user: And close?", "assistant: Five."}
	assert.Equal(t, "", cmp.Diff(want, w.transcript(t, r.Header.Get("X-Thread-Id"))), body)
}

//go:embed testdata/stock.mjs
var stockScript string

// OpenAI's client, the AI SDK and LangChain work with their default protocol and with the other one.
func TestTheStockClientsOfNodeWorkUnchanged(t *testing.T) {
	t.Parallel()
	run := npmtest.Command(t, stockScript, "openai@6.49.0", "ai@6.0.326", "@ai-sdk/openai@3.0.141",
		"@langchain/openai@1.6.0", "@langchain/core@1.4.0")
	w := newWorld(t)
	w.model.Handle(func(_ int, req gopenai.ChatCompletionRequest) modeltest.Reply {
		if f := req.ResponseFormat; f != nil && f.JSONSchema != nil {
			return modeltest.Text(city)
		}
		switch req.Messages[len(req.Messages)-1].Content {
		case "fail":
			return modeltest.Refusal(400, "invalid_request_error", "no", "no", 0)
		case "hello":
			return modeltest.Text("Hello to you.").Slowly(60 * time.Millisecond)
		}
		return modeltest.Text("Hello to you.")
	})
	p := w.process(t, func(c *chat.Chat) { c.KeepAlive = 20 * time.Millisecond })
	run.Env = append(run.Env, "BASE="+p.url+"/v1", "AI_SDK_LOG_WARNINGS=false")
	out, err := run.Output()
	require.NoError(t, err, out)
	var got map[string]any
	require.NoError(t, json.Unmarshal(out, &got), out)
	want := map[string]any{
		"previous": true, "same": true, "stale": "409 previous_response_not_last", "tools": "400 tools",
		"counted": true, "keptAlive": true, "models": 2.0, "missing": "NotFoundError model_not_found",
		"key": "AuthenticationError invalid_api_key", "bad": "BadRequestError ch_", "middle": "APIError answer_failed",
	}
	for _, name := range []string{"parsed", "parsedResponse", "aiObject", "aiChatObject", "aiStreamObject", "lcObject"} {
		want[name] = "Ulm 3"
	}
	for _, name := range []string{
		"first", "deltas", "final", "whole", "text", "ai", "aiAgain", "aiStream", "aiHeld", "aiChat", "aiChatStream",
		"lctrue", "lcStreamtrue", "lcfalse", "lcStreamfalse",
	} {
		want[name] = "Hello to you."
	}
	assert.NoDiff(t, want, got)
}
