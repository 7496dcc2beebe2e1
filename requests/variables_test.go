package requests_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/requests"
)

func TestVariables(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		kind, data string
		want       map[string]any
	}{
		"documents of a request": {
			"document", `{"documents": {"cv": "u"}, "documentUrls": ["u"]}`,
			map[string]any{"documentUrls": []any{"u"}},
		},
		"documents of an event": {
			"document", `{"documents": [{"url": "a"}, 3, {"url": "b"}]}`,
			map[string]any{"documentUrls": []any{"a", "b"}},
		},
		"one document": {"document", `{"url": "a"}`, map[string]any{"documentUrls": []any{"a"}}},
		"snake case":   {"document", `{"document_urls": ["a"]}`, map[string]any{"documentUrls": []any{"a"}}},
		"signature": {
			"signature", `{"signedDocumentUrl": "u", "signed_at": "t"}`,
			map[string]any{"signedDocumentUrl": "u", "signedAt": "t"},
		},
		"nothing said": {"signature", `{}`, map[string]any{}},
		"score as text": {
			"test", `{"test_score": "7.5", "test_result": "passed"}`,
			map[string]any{"testScore": 7.5, "testResult": "passed"},
		},
		"score of nothing":   {"test", `{"score": 0}`, map[string]any{"testScore": 0.0}},
		"response":           {"response", `{"content": "hola"}`, map[string]any{"lastResponse": "hola"}},
		"response of others": {"response", `{"message": "hola"}`, map[string]any{"lastResponse": "hola"}},
		"child": {"agent", `{"execution_id": "x", "status": "completed"}`, map[string]any{
			"triggeredExecutionId": "x", "childExecutionStatus": "completed", "childExecutionSuccess": true,
		}},
		"child that failed": {"agent", `{"execution_id": "x", "status": "failed"}`, map[string]any{
			"triggeredExecutionId": "x", "childExecutionStatus": "failed", "childExecutionSuccess": false,
		}},
		"another kind":        {"event", `{"url": "x"}`, map[string]any{}},
		"another kind's list": {"event", `[1]`, map[string]any{}},
	} {
		got, err := requests.Variables(c.kind, executions.Outcome{Data: json.RawMessage(c.data)})
		diff := cmp.Diff(c.want, got)
		assert.Truef(t, diff == "" && err == nil, "%s: %v %s", name, err, diff)
	}
	for _, data := range []string{`{"testScore": "good"}`, `{"testScore": "NaN"}`, `{"testScore": [1]}`, `[1]`} {
		got, err := requests.Variables("test", executions.Outcome{Data: json.RawMessage(data)})
		assert.Error(t, err, data, "became", got)
	}
	got, err := requests.Variables("test", executions.Outcome{Data: json.RawMessage(`{"score": 1}`), TimedOut: true})
	assert.Truef(t, err == nil && len(got) == 0, "a timeout set %v, %v", got, err)
}
