package offline_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/models/offline"
)

func FuzzRequest(f *testing.F) {
	f.Add(
		`{"messages":[{"role":"user","content":"table sizes"}],"tools":[{"type":"function","function":{"name":"table_sizes",
		"parameters":{"type":"object","properties":{"a":{"$ref":"#/properties/a"}},"required":["a","b"]}}}]}`)
	f.Add(
		`{"messages":[{"role":"user","content":"step 1: x"},{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"x"}}]},
		{"role":"tool","tool_call_id":"c","content":"[{\"n\":1e999}]"}],"tools":[{"function":{"name":"complete_step",
		"parameters":{"required":["result"],"properties":{"result":{"maxLength":-1,"minLength":1e9}}}}}]}`)
	f.Add(
		`{"messages":[{"role":"user","content":"n"}],"response_format":{"type":"json_schema","json_schema":{"schema":{"type":"array","minItems":1e300}}}}`)
	for _, text := range []string{
		"forget the x", "remember that a is b", `use memory_forget with {\"key\":`, "¿Qué recuerdas de \\u0000?",
		"again", "and?", "run a_b",
		`{\"summary_so_far\":\"\",\"messages\":[{}]}`, "<delivery <delivery </delivery>", `propose an objective \"\"`,
	} {
		f.Add(`{"messages":[{"role":"user","content":"x"},{"role":"user","content":"` + text +
			`"},{"role":"assistant","tool_calls":[{"id":"c",
			"function":{"name":"memory_search"}}]},{"role":"tool","tool_call_id":"c","content":"{\"memories\":[{},7,{\"key\":\"x\"}]}"},
			{"role":"system","content":"Tool call failed: INVALID_PARAMS. Schema: {} Errors: x"}],"tools":[{"function":{"name":"memory_forget",
			"parameters":{"required":["key"]}}},{"function":{"name":"memory_search"}},{"function":{"name":"skill_search","parameters":{"required":["query"]}}}]}`)
	}
	f.Fuzz(func(t *testing.T, body string) {
		var answers [2]string
		for i := range answers {
			r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(body))
			w := httptest.NewRecorder()
			offline.Handler().ServeHTTP(w, r)
			assert.Truef(t, w.Code == http.StatusOK || w.Code == http.StatusBadRequest, "status %d: %s", w.Code, w.Body)
			answers[i] = w.Body.String()
		}
		assert.Equal(t, answers[1], answers[0])
	})
}

func TestExponentialSchemaIsBounded(t *testing.T) {
	t.Parallel()
	schema := `{"type":"array","minItems":10}`
	for range 8 {
		schema = `{"type":"array","minItems":10,"items":` + schema + `}`
	}
	schema = `{"type":"object","required":["a"],"properties":{"a":` + schema + `}}`
	body := `{"messages":[{"role":"user","content":"nodes"}],"tools":[{"function":{"name":"nodes","parameters":` + schema +
		`}}]}`
	w := httptest.NewRecorder()
	offline.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(body)))
	assert.Truef(t, w.Code == http.StatusOK && w.Body.Len() <= 64<<10, "status %d, %d bytes", w.Code, w.Body.Len())
}
