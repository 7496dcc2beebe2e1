package reason_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/reason"
)

// prompted returns the recorded model calls of an execution's trace.
func (w *world) prompted(t *testing.T, x executions.Execution) prompts.Page {
	t.Helper()
	page, err := prompts.Of(t.Context(), w.pool, x.TraceID, prompts.Filter{})
	require.NoError(t, err)
	return page
}

// asked returns the JSON of a request: the tools, then each message.
func asked(t *testing.T, r modeltest.Request) []string {
	t.Helper()
	var body struct {
		Tools    json.RawMessage   `json:"tools"`
		Messages []json.RawMessage `json:"messages"`
	}
	require.NoError(t, json.Unmarshal([]byte(r.Body), &body))
	list := []string{plain(t, body.Tools)}
	for _, m := range body.Messages {
		list = append(list, plain(t, m))
	}
	return list
}

// plain returns JSON with sorted members.
func plain(t *testing.T, raw json.RawMessage) string {
	t.Helper()
	var v any
	require.NoError(t, json.Unmarshal(raw, &v), raw)
	text, err := json.Marshal(v)
	require.NoError(t, err)
	return string(text)
}

// recorded returns the JSON of a recorded call, in the form of asked.
func recorded(t *testing.T, p prompts.Page, c prompts.Call) []string {
	t.Helper()
	require.True(t, c.Tools != nil, "no tools are recorded")
	list := []string{plain(t, p.Parts[*c.Tools].Body)}
	for _, d := range c.Messages {
		list = append(list, plain(t, p.Parts[d].Body))
	}
	return list
}

func TestRecordedPromptIsWhatModelWasAsked(t *testing.T) {
	t.Parallel()
	w := newWorld(t,
		modeltest.ToolCall("sizes", `{"limit":3}`).WithUsage(100, 5, 0),
		modeltest.Text("Orders is the largest: <b>ü & “co”</b>.").WithUsage(140, 9, 96))
	w.turn.History = []models.Message{
		{Role: models.RoleUser, Content: "Hi <there>\n\tü\u2028"},
		{Role: models.RoleAssistant, Content: "Hello."},
	}
	x, _ := w.completed(t)
	page := w.prompted(t, x)
	requests := w.model.Requests()
	require.Truef(t, len(page.Calls) == 2 && len(requests) == 2,
		"%d calls are recorded of %d requests", len(page.Calls), len(requests))
	for i, c := range page.Calls {
		assert.Equal(t, "", cmp.Diff(asked(t, requests[i]), recorded(t, page, c)), i)
	}
	second := page.Calls[1]
	assert.Truef(t, second.SharedParts == 1+len(page.Calls[0].Messages) && second.TokenUsage.CachedTokens == 96 &&
		second.TokenUsage.PromptTokens == 140, "the second call shares %d parts, with usage %+v", second.SharedParts,
		second.TokenUsage)
	assert.Equal(t, 1+len(second.Messages), pgtest.Value[int](t, w.pool, `select count(*) from agent_prompt_parts`))
}

func TestPromptIsRecordedWithoutSecrets(t *testing.T) {
	t.Parallel()
	const secret = "hunter2-hunter2-hunter2"
	w := newWorld(t, modeltest.Text("No."))
	w.turn.Prompt = "Connect to postgres://root:" + secret + "@db/orders"
	x, _ := w.completed(t)
	page := w.prompted(t, x)
	require.True(t, strings.Contains(w.model.Requests()[0].Body, secret), "the model was not asked with the secret")
	last := page.Parts[page.Calls[0].Messages[len(page.Calls[0].Messages)-1]]
	assert.Truef(t, strings.Contains(string(last.Body), redact.Marker), "recorded: %s", last.Body)
	assert.Equal(t, 0, pgtest.Value[int](t, w.pool, `select count(*) from agent_prompt_parts where body like '%hunter2%'`))
}

func TestTurnsSharePartsOfTheirPrompts(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Two."))
	first, _ := w.completed(t)
	before := pgtest.Value[int](t, w.pool, `select count(*) from agent_prompt_parts`)
	w.turn.Prompt = "And now?"
	second, _ := w.completed(t)
	after := pgtest.Value[int](t, w.pool, `select count(*) from agent_prompt_parts`)
	assert.Truef(t, after == before+1, "the second turn added %d parts, want its message alone", after-before)
	a, b := w.prompted(t, first).Calls[0], w.prompted(t, second).Calls[0]
	assert.Truef(t, *a.Tools == *b.Tools && a.Messages[0] == b.Messages[0] && a.Messages[1] != b.Messages[1],
		"the turns have the parts %v and %v", a, b)
}

func TestCallThatFailedHasItsPrompt(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Status(400, 0))
	x, _ := w.run(t)
	page := w.prompted(t, x)
	require.Truef(t, len(page.Calls) == 1 && page.Calls[0].Status == "error" && page.Calls[0].Recorded,
		"calls: %+v", page.Calls)
	assert.NoDiff(t, asked(t, w.model.Requests()[0]), recorded(t, page, page.Calls[0]))
}

func TestPromptThatCannotBeRecordedFailsNoTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Done."), modeltest.Text("Again."))
	pgtest.Exec(t, w.pool, `alter table agent_prompts add constraint refuses check (activity_id is null)`)
	x, _ := w.completed(t)
	if page := w.prompted(t, x); len(page.Calls) != 1 || page.Calls[0].Recorded || len(page.Parts) != 0 {
		t.Errorf("recorded: %+v", page)
	}
	found := w.log.Records(t, "prompt not recorded")
	assert.Truef(t, len(found) == 1 && strings.Contains(found[0]["error"].(string), "refuses"), "logged: %v", found)
	pgtest.Exec(t, w.pool, `alter table agent_prompts drop constraint refuses`)
	next, _ := w.completed(t)
	page := w.prompted(t, next)
	assert.NoDiff(t, asked(t, w.model.Requests()[1]), recorded(t, page, page.Calls[0]))
}

func TestLockedPartBlocksNoTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Two."))
	w.completed(t)
	pgtest.Exec(t, w.pool, `update agent_prompt_parts set used_on = used_on - 1`)
	tx, err := w.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	pgtest.Exec(t, tx, `update agent_prompt_parts set truncated = truncated`)
	x, _ := w.completed(t)
	assert.True(t, !w.prompted(t, x).Calls[0].Recorded, "a prompt whose parts are locked is recorded")
}

func TestLargePartIsCutAndSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Long."))
	w.turn.Prompt = strings.Repeat(`" `, 100_000)
	w.turn.History = []models.Message{
		{Role: models.RoleUser, Parts: []models.Part{
			{Image: &models.Image{URL: "data:image/png;base64," + strings.Repeat("AAAA", 20_000)}},
		}},
	}
	x, _ := w.completed(t)
	page := w.prompted(t, x)
	cut := 0
	for _, p := range page.Parts {
		assert.Truef(t, len(p.Body) <= prompts.MaxPart, "a part has %d bytes", len(p.Body))
		if p.Truncated {
			cut++
		}
		assert.True(t, !strings.Contains(string(p.Body), "AAAAAAAA"), "a picture is recorded")
	}
	assert.Equal(t, 1, cut)
}

func TestPartsThatSomebodyDeletedAreStoredAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Two."), modeltest.Text("Three."))
	w.completed(t)
	pgtest.Exec(t, w.pool, `delete from agent_prompt_parts`)
	w.completed(t)
	found := w.log.Records(t, "parts of a prompt not recorded")
	assert.Truef(t, len(found) == 1, "logged: %v", found)
	x, _ := w.completed(t)
	page := w.prompted(t, x)
	assert.NoDiff(t, asked(t, w.model.Requests()[2]), recorded(t, page, page.Calls[0]))
}

// sentOptions are the options of a request.
type sentOptions struct {
	MaxTokens int             `json:"max_tokens"`
	Format    json.RawMessage `json:"response_format"`
}

// optionsOf compares the recorded options of a call with those of the request, and returns them.
func optionsOf(t *testing.T, r modeltest.Request, c prompts.Call) (got sentOptions) {
	t.Helper()
	var want sentOptions
	require.NoError(t, json.Unmarshal([]byte(r.Body), &want))
	require.NoError(t, json.Unmarshal(c.Options, &got))
	assert.Truef(t, got.MaxTokens != 0 && got.MaxTokens == want.MaxTokens && (got.Format == nil) == (want.Format == nil),
		"recorded options: %s, sent: %+v", c.Options, want)
	return got
}

func TestPromptIsRecordedInFormThatServerTook(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text(`{"n":1}`),
		modeltest.Refusal(400, "invalid_request_error", "", "response_format is not supported", 0),
		modeltest.Text(`{"n":2}`), modeltest.Text(`{"n":3}`))
	w.turn.Form = &reason.Form{Name: "count", Schema: `{"type":"object","properties":{"n":{"type":"integer"}}}`}
	var calls []prompts.Call
	for _, n := range []int{0, 2, 3} {
		x, _ := w.completed(t)
		page := w.prompted(t, x)
		require.Equal(t, 1, len(page.Calls), page.Calls)
		calls = append(calls, page.Calls[0])
		assert.Equal(t, "", cmp.Diff(asked(t, w.model.Requests()[n]), recorded(t, page, page.Calls[0])), n)
		got := optionsOf(t, w.model.Requests()[n], page.Calls[0])
		if n == 0 && !strings.Contains(string(got.Format), "integer") {
			t.Errorf("the schema that was sent is not recorded: %s", page.Calls[0].Options)
		}
	}
	assert.Truef(t, calls[0].Messages[1] != calls[1].Messages[1] && calls[1].Messages[1] == calls[2].Messages[1],
		"the schema in words is no part of the message: %v", calls)
	found := w.log.Records(t, "prompt not amended")
	assert.Truef(t, len(found) == 0, "logged: %v", found)
}

// Only empty answers in a row end the turn as a stall.
func TestAMalformedAnswerEndsARowOfEmptyAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text(""), modeltest.Text("one"), modeltest.Text(""), modeltest.Text(`{"n":1}`))
	w.turn.Form = &reason.Form{}
	_, got := w.completed(t)
	assert.Equal(t, reason.Answered+` {"n":1}`, got.Ended+" "+got.Text)
}

// A request sent as prepared is recorded once.
func TestPromptThatWasSentAsPreparedIsNotAmended(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Done."))
	w.completed(t)
	pgtest.Equal(t, w.pool, "(0,1)", `select ctid::text from agent_prompts`)
}

func TestPromptThatCannotBeAmendedFailsNoTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Refusal(400, "invalid_request_error", "", "response_format is not supported", 0),
		modeltest.Text(`{"n":1}`))
	w.turn.Form = &reason.Form{Name: "count", Schema: `{"type":"object","properties":{"n":{"type":"integer"}}}`}
	pgtest.Exec(t, w.pool, `alter table agent_prompts add constraint unamended check (options ? 'response_format')`)
	x, _ := w.completed(t)
	assert.True(t, w.prompted(t, x).Calls[0].Recorded, "the record from before the call is gone")
	found := w.log.Records(t, "prompt not amended")
	assert.Truef(t, len(found) == 1 && strings.Contains(found[0]["error"].(string), "unamended"), "logged: %v", found)
}

func TestPictureIsRecordedByItsSizeAndDigest(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Red."))
	w.turn.Images = []models.Part{{Image: &models.Image{URL: "data:image/png;base64,cGljdHVyZQ=="}}}
	x, _ := w.completed(t)
	page := w.prompted(t, x)
	last := page.Parts[page.Calls[0].Messages[len(page.Calls[0].Messages)-1]]
	want := fmt.Sprintf("[7 bytes, SHA-256 %x]", sha256.Sum256([]byte("picture")))
	assert.Truef(t, strings.Contains(string(last.Body), want), "recorded: %s, want %s", last.Body, want)
}
