package requests

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/lanekeeper/lanekeeper/executions"
)

// structured are the kinds of waits whose events carry an object.
var structured = []string{Document, Signature, Test, "response", "agent"}

// Variables returns the variables that a wait sets: documents and documentUrls (document), signedDocumentUrl and
// signedAt (signature), testScore, a number, and testResult (test), lastResponse (response), triggeredExecutionId,
// childExecutionStatus and childExecutionSuccess (agent). The event's data may use these names or snake_case; absent
// ones stay unset. A timeout and a wait of another kind set none. The error names an invalid value.
func Variables(kind string, out executions.Outcome) (map[string]any, error) {
	vars := map[string]any{}
	if out.TimedOut || len(out.Data) == 0 || !slices.Contains(structured, kind) {
		return vars, nil
	}
	var data map[string]any
	if err := json.Unmarshal(out.Data, &data); err != nil {
		return nil, fmt.Errorf("read the data of %s: %w", out.Event, err)
	}
	pick := func(name string, from ...string) {
		if v, ok := first(data, from...); ok {
			vars[name] = v
		}
	}
	switch kind {
	case Document:
		if urls := documentURLs(data); urls != nil {
			vars["documentUrls"] = urls
		}
		pick("documents", "files")
	case Signature:
		pick("signedDocumentUrl", "signedDocumentUrl", "signed_document_url", "url")
		pick("signedAt", "signedAt", "signed_at")
	case Test:
		pick("testScore", "testScore", "test_score", "score")
		pick("testResult", "testResult", "test_result", "result")
		if err := number(vars, "testScore"); err != nil {
			return nil, fmt.Errorf("read the data of %s: %w", out.Event, err)
		}
	case "response":
		pick("lastResponse", "lastResponse", "last_response", "content", "message", "text")
	case "agent":
		pick("triggeredExecutionId", "triggeredExecutionId", "execution_id")
		pick("childExecutionStatus", "childExecutionStatus", "status")
		if status, ok := vars["childExecutionStatus"]; ok {
			vars["childExecutionSuccess"] = status == string(executions.Completed)
		}
	}
	return vars, nil
}

// first returns the first member that is neither absent nor null.
func first(data map[string]any, names ...string) (any, bool) {
	for _, name := range names {
		if v, ok := data[name]; ok && v != nil {
			return v, true
		}
	}
	return nil, false
}

// documentURLs returns the URLs in the order of the request, or of a single event; nil for none.
func documentURLs(data map[string]any) []any {
	if urls, ok := first(data, "documentUrls", "document_urls"); ok {
		if list, ok := urls.([]any); ok {
			return list
		}
		return []any{urls}
	}
	if documents, ok := data["documents"].([]any); ok {
		var urls []any
		for _, d := range documents {
			if one, ok := d.(map[string]any); ok {
				urls = append(urls, documentURLs(one)...)
			}
		}
		return urls
	}
	if url, ok := first(data, "url"); ok {
		return []any{url}
	}
	return nil
}

// number converts a numeric text to a number.
func number(vars map[string]any, name string) error {
	switch v := vars[name].(type) {
	case nil, float64:
		return nil
	case string:
		n, err := strconv.ParseFloat(v, 64)
		if err == nil && !math.IsNaN(n) && !math.IsInf(n, 0) {
			vars[name] = n
			return nil
		}
	}
	return fmt.Errorf("%s must be a number, not %v", name, vars[name])
}
