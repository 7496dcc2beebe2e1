package chat_test

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/responses"
	gopenai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// citySchema has its members in an order that jsonb does not keep.
const citySchema = `{"type":"object","properties":{"population":{"type":"integer"},"city":{"type":"string"}},` +
	`"required":["population","city"],"additionalProperties":false}`

const (
	city       = `{"population":3,"city":"Ulm"}`
	cityFormat = `"response_format":{"type":"json_schema","json_schema":{"name":"city","strict":true,"schema":` +
		citySchema + `}}`
	citySent  = `"json_schema":{"name":"city","schema":` + citySchema + `,"strict":true}`
	cityText  = `"text":{"format":{"type":"json_schema","name":"city","strict":true,"schema":` + citySchema + `}}`
	cityAsked = `{"model":"agent",` + cityFormat + `,"messages":[{"role":"user","content":"Which city?"}]`
)

func TestAnswerHasFormThatClientAsksFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t)
	for name, ask := range map[string]func() string{
		"completion": func() string {
			_, body := p.post(t, cityAsked+`}`)
			return body
		},
		"stream": func() string {
			_, body := p.post(t, cityAsked+`,"stream":true}`)
			return `"content":` + quoted(contentOf(t, body))
		},
		"response": func() string {
			_, body := p.respond(t, "POST", "", `{"model":"agent","input":"Which city?",`+cityText+`}`)
			assert.Contains(t, body, `"name":"city"`)
			return body
		},
	} {
		asked := len(w.model.Requests())
		w.model.Add(modeltest.Text("Let me look.").AndCall("opening", `{}`), modeltest.Text("```json\n"+city+"\n```"))
		got := ask()
		assert.Truef(t, strings.Contains(got, quoted(city)) && !strings.Contains(got, "Let me look"), "%s: %s", name, got)
		for _, r := range w.model.Requests()[asked:] {
			assert.Truef(t, strings.Contains(r.Body, citySent) && !strings.Contains(r.Body, "Form of the final answer"),
				"%s: the model was asked %s", name, r.Body)
		}
	}
}

func quoted(s string) string { return `"` + strings.ReplaceAll(s, `"`, `\"`) + `"` }

func TestServerWithoutStructuredOutputsGetsFormInWords(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Refusal(400, "x", "", "response_format is not supported", 0), modeltest.Text(city),
		modeltest.Text(`{"a":1}`))
	p := w.process(t)
	_, body := p.post(t, strings.Replace(cityAsked, `"strict"`, `"description":"\u0000","strict"`, 1)+`}`)
	assert.Truef(t, strings.Contains(body, quoted(city)), "answered with %s", body)
	object := strings.Replace(cityAsked, cityFormat, `"response_format":{"type":"json_object"}`, 1)
	_, body = p.post(t, object+`}`)
	assert.Truef(t, strings.Contains(body, quoted(`{"a":1}`)), "answered with %s", body)
	asked := w.model.Requests()
	for i, want := range []string{citySent, quotedIn(citySchema), "one JSON object"} {
		assert.Truef(t, strings.Contains(asked[i].Body, want), "request %d has no %s: %s", i, want, asked[i].Body)
	}
	if last := asked[1].Messages[0]; strings.Contains(last.Content, "population") {
		t.Errorf("a client's schema is in the system message: %s", last.Content)
	}
}

func quotedIn(s string) string { return strings.Trim(quoted(s), `"`) }

// declined is a refusal of the model in words.
func declined(words string) modeltest.Reply {
	return modeltest.Raw(http.StatusOK, "application/json",
		`{"choices":[{"message":{"role":"assistant","content":null,"refusal":"`+words+`"},"finish_reason":"stop"}]}`)
}

func TestAnswerWithoutItsFormIsCorrectedOnceAndThenRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		replies []modeltest.Reply
		asked   int
		why     string
	}{
		"words twice":   {[]modeltest.Reply{modeltest.Text("Ulm."), modeltest.Text("Ulm!")}, 2, "not JSON"},
		"other members": {[]modeltest.Reply{modeltest.Text(`{"city":"Ulm"}`), modeltest.Text(`{"city":7}`)}, 2, "population"},
		"then right":    {[]modeltest.Reply{modeltest.Text("Ulm."), modeltest.Text(city)}, 2, ""},
		"cut off":       {[]modeltest.Reply{modeltest.Text(`{"population":3,`).WithFinish("length")}, 1, "limit of tokens"},
		"withheld":      {[]modeltest.Reply{modeltest.Text(city).WithFinish("content_filter")}, 1, "withheld"},
		"declined":      {[]modeltest.Reply{declined("I will not.")}, 1, "the model declined: I will not"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, c.replies...)
			p := w.process(t)
			r, body := p.post(t, cityAsked+`}`, inThread("s")...)
			if asked := w.model.Requests(); len(asked) != c.asked ||
				c.asked > 1 && !strings.Contains(asked[1].Body, "does not have the form") {
				t.Errorf("the model was asked %d times: %s", len(asked), asked[len(asked)-1].Body)
			}
			if c.why == "" {
				assert.Contains(t, body, quoted(city))
				return
			}
			f := failureOf(t, body)
			assert.Truef(t, r.StatusCode == http.StatusBadGateway && f.Code == "answer_not_in_format" &&
				strings.Contains(f.Message, c.why) && r.Header.Get("X-Should-Retry") == "false", "%d %s", r.StatusCode, body)
			lines := w.transcript(t, "s")
			assert.Truef(t, len(lines) == 2 && strings.Contains(lines[1], c.why), "the thread holds %q", lines)
			assert.Equal(t, 0, pgtest.Value[int](t, w.pool,
				`select count(*) from agent_activity where error_message like '%I will not%'`), "error messages with the quote")
		})
	}
}

func TestStreamShowsNothingThatIsNotInItsForm(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Ulm."), modeltest.Text("Ulm!"), modeltest.Text("Ulm."), modeltest.Text("Ulm!"))
	p := w.process(t)
	_, body := p.post(t, cityAsked+`,"stream":true}`)
	assert.Truef(t, !strings.Contains(body, "Ulm") && strings.Contains(body, "answer_not_in_format"), "streamed %s", body)
	_, body = p.respond(t, "POST", "", `{"model":"agent","input":"Which city?","stream":true,`+cityText+`}`)
	assert.Truef(t, !strings.Contains(body, "Ulm") && strings.Contains(body, "response.failed"), "streamed %s", body)
}

func TestFormThatCannotBeGivenIsRefusedByName(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t)
	for format, want := range map[string]string{
		`{"type":"json_schema"}`:                                                   "missing_required_parameter json_schema",
		`{"type":"json_schema","json_schema":{"schema":{}}}`:                       "missing_required_parameter " + "json_schema.name",
		`{"type":"json_schema","json_schema":{"name":"a b"}}`:                      "invalid_json_schema json_schema.schema",
		schemaOf(`{"type":"thing"}`):                                               "invalid_json_schema json_schema.schema",
		schemaOf(`7`):                                                              "invalid_json_schema json_schema.schema",
		schemaOf(`{"$ref":"https://example.com/x.json"}`):                          "invalid_json_schema json_schema.schema",
		schemaOf(`{"$ref":"file:///etc/passwd"}`):                                  "invalid_json_schema json_schema.schema",
		schemaOf(strings.Repeat(`{"items":`, 70) + `{}` + strings.Repeat(`}`, 70)): "invalid_json_schema json_schema.schema",
		`{"type":"grammar"}`:                                                       "unsupported_value ",
	} {
		r, body := p.post(t, `{"model":"agent","response_format":`+format+`,"messages":[{"role":"user","content":"hi"}]}`)
		f := failureOf(t, body)
		code, param, _ := strings.Cut(want, " ")
		param = strings.TrimSuffix("response_format."+param, ".")
		assert.Truef(t, r.StatusCode == http.StatusBadRequest && f.Code == code && f.Param != nil && *f.Param == param,
			"%.100s: %d %s", format, r.StatusCode, body)
	}
	for format, want := range map[string]string{
		`{"type":"json_schema"}`: "text.format.name",
		`{"type":"json_schema","name":"a","schema":{"type":"thing"}}`: "text.format.schema",
	} {
		_, body := p.respond(t, "POST", "", `{"model":"agent","input":"hi","text":{"format":`+format+`}}`)
		f := failureOf(t, body)
		assert.Truef(t, f.Param != nil && *f.Param == want, "%s: %s", format, body)
	}
}

func schemaOf(schema string) string {
	return `{"type":"json_schema","json_schema":{"name":"a","schema":` + schema + `}}`
}

// TestSchemaThatMultipliesItselfEnds sends a schema whose check would take 2^40 steps.
func TestSchemaThatMultipliesItselfEnds(t *testing.T) {
	t.Parallel()
	var defs strings.Builder
	for i := range 40 {
		n := string(rune('A'+i/10)) + string(rune('0'+i%10))
		m := string(rune('A'+(i+1)/10)) + string(rune('0'+(i+1)%10))
		defs.WriteString(`"` + n + `":{"anyOf":[{"$ref":"#/$defs/` + m + `"},{"allOf":[{"$ref":"#/$defs/` + m + `"}]}]},`)
	}
	for _, last := range []string{"false", "true", `{"type":"string"}`} {
		word := map[bool]string{true: "allOf", false: "anyOf"}[last == "true"]
		w := newWorld(t, modeltest.Text("{}"), modeltest.Text("{}"))
		p := w.process(t)
		schema := `{"$ref":"#/$defs/A0","$defs":{` + strings.ReplaceAll(defs.String(), "anyOf", word) + `"E0":` + last + `}}`
		began := time.Now()
		_, body := p.post(t, `{"model":"agent","response_format":`+schemaOf(schema)+
			`,"messages":[{"role":"user","content":"hi"}]}`)
		assert.Truef(t, failureOf(t, body).Code == "answer_not_in_format" && time.Since(began) <= time.Minute,
			"%s after %s: %s", last, time.Since(began), body)
	}
}

func TestFormEndsWithErrorWhereOnlyNoticeCouldBeSaid(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("refund", `{}`))
	p := w.process(t, func(c *chat.Chat) { c.ApprovalWait = 50 * time.Millisecond })
	r, body := p.post(t, cityAsked+`}`)
	f := failureOf(t, body)
	assert.Truef(t, f.Code == "approval_pending" && r.Header.Get("X-Completion-Id") != "" &&
		r.Header.Get("X-Should-Retry") == "false", "%d %s", r.StatusCode, body)
}

func TestFormIsNotCutAtBoundOfTokens(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text(city))
	p := w.process(t)
	_, body := p.post(t, cityAsked+`,"max_tokens":2}`)
	f := failureOf(t, body)
	assert.True(t, f.Code == "answer_not_in_format" && strings.Contains(f.Message, "token limit"), body)
}

func TestOfficialClientGetsStructuredOutputs(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text(city))
	p := w.process(t)
	client := p.official("site")
	got, err := client.Responses.New(t.Context(), responses.ResponseNewParams{
		Model: "nora", Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("Which city?")},
		Text: responses.ResponseTextConfigParam{Format: responses.ResponseFormatTextConfigParamOfJSONSchema("city",
			map[string]any{"type": "object", "required": []string{"city"}})},
	})
	if err != nil || got.OutputText() != city || got.Text.Format.Name != "city" {
		t.Errorf("%v, %s", err, got.RawJSON())
	}
}

func TestResumedTurnKeepsItsFormAndImages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g, held := gated()
	var n atomic.Int32
	w.model.Handle(func(int, gopenai.ChatCompletionRequest) modeltest.Reply {
		if n.Add(1) == 1 {
			return held // the loss interrupts the process here
		}
		return modeltest.Text(city)
	})
	first, _ := w.silent(t)
	var group errgroup.Group
	var body string
	group.Go(func() error {
		_, body = first.post(t, strings.TrimSuffix(shows("", pixel("one")), "}")+`,`+cityFormat+`}`)
		return nil
	})
	testkit.Receive(t, g.asked)
	pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
	w.process(t)
	pgtest.Until(t, w.pool, 1, `select count(*) from agent_executions where status = 'completed'`)
	close(g.pieces)
	err := group.Wait()
	assert.Truef(t, err == nil && strings.Contains(body, quoted(city)), "%v: %s", err, body)
	for _, r := range w.model.Requests() {
		assert.Contains(t, r.Body, citySent, pixel("one"))
	}
}

func TestFormIsRefusedWhereFlowAnswersInItsOwnWords(t *testing.T) {
	t.Parallel()
	p := conversing(t, func(_ context.Context, say func(string), hear func() string) {
		say("Who are you?")
		say("Hello, " + hear() + ".")
	})
	p.talks(t)
	r, body := p.post(t, cityAsked+`}`, inThread("t")...)
	f := failureOf(t, body)
	assert.Truef(t, r.StatusCode == http.StatusBadRequest && *f.Param == "response_format", "%d %s", r.StatusCode, body)
	assert.Equal(t, "Hello, Ada.", p.answerTo(t, "t", "Ada"))
}
