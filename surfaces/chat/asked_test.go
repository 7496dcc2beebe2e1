package chat_test

import (
	"net/http"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestAParameterThatCannotBeHonouredIsRefusedByName(t *testing.T) {
	t.Parallel()
	p := newWorld(t).process(t)
	for value, param := range map[string]string{
		`"tools":[{"type":"function","function":{"name":"f","parameters":{}}}]`: "tools",
		`"functions":[{"name":"f"}]`:                                "functions",
		`"tool_choice":"required"`:                                  "tool_choice",
		`"tool_choice":{"type":"function","function":{"name":"f"}}`: "tool_choice",
		`"function_call":{"name":"f"}`:                              "function_call",
		`"logprobs":true`:                                           "logprobs",
		`"top_logprobs":3`:                                          "top_logprobs",
		`"n":2`:                                                     "n",
		`"audio":{"voice":"alloy","format":"mp3"}`:                  "audio",
		`"modalities":["text","audio"]`:                             "modalities",
		`"stop":"END"`:                                              "stop",
		`"stop":["a","b"]`:                                          "stop",
		`"logit_bias":{"50256":-100}`:                               "logit_bias",
		`"web_search_options":{}`:                                   "web_search_options",
		`"moderation":{"model":"omni-moderation-latest"}`:           "moderation",
		`"response_format":{"type":"grammar"}`:                      "response_format",
		`"response_format":7`:                                       "response_format",
	} {
		r, body := p.post(t, `{"model":"agent",`+value+`,"messages":[{"role":"user","content":"hi"}]}`)
		got := failureOf(t, body)
		if r.StatusCode != http.StatusBadRequest || got.Param == nil || *got.Param != param ||
			got.Code != "unsupported_value" || got.Type != "invalid_request_error" || len(got.Message) < len(param)+15 {
			t.Errorf("%s: %d %s", value, r.StatusCode, body)
		}
	}
	if n := pgtest.Value[int](t, p.pool, `select count(*) from agent_threads`); n != 0 {
		t.Errorf("%d threads were begun by requests that were refused", n)
	}
}

func TestParametersThatChangeNothingAreAccepted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t)
	for _, value := range []string{
		`"temperature":0.7,"top_p":1,"seed":7,"frequency_penalty":0,"presence_penalty":0,"reasoning_effort":"low"`,
		`"tools":[],"tool_choice":"auto","functions":[],"function_call":"auto"`,
		`"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none"`,
		`"functions":[{"name":"f"}],"function_call":"none"`,
		`"response_format":{"type":"text"},"modalities":[ "text" ],"logprobs":false,"top_logprobs":0,"n":1`,
		`"stop":null,"audio":null,"logit_bias":{},"tools":null,"response_format":null,"stop":[]`,
		`"store":false,"service_tier":"auto","parallel_tool_calls":true,"prompt_cache_key":"k","safety_identifier":"s"`,
		`"verbosity":"low","prediction":{"type":"content","content":"x"},"prompt_cache_retention":"24h"`,
	} {
		w.model.Add(modeltest.Text("Hello."))
		r, body := p.post(t, `{"model":"agent",`+value+`,"messages":[{"role":"user","content":"hi"}]}`)
		if r.StatusCode != http.StatusOK {
			t.Errorf("%s: %d %s", value, r.StatusCode, body)
		}
	}
	for _, req := range w.model.Requests() {
		if req.Temperature != 0 || req.Seed != nil || len(req.Stop) > 0 {
			t.Errorf("a client's setting reached the model: %+v", req)
		}
	}
}
