package api_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/lanekeeper/lanekeeper/flows"
)

// listed is a page of anything.
type listed struct {
	Items      []map[string]any `json:"items"`
	NextCursor *string          `json:"next_cursor"`
}

func TestFlowsAreListedByName(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, name := range []string{"c", "a", "b"} {
		for range 2 {
			d := flows.Definition{Name: name, Description: fmt.Sprint(len(name)), Actions: []any{map[string]any{"actionType": "end"}}}
			if _, err := flows.Put(t.Context(), a.pool, d, "workspace"); err != nil {
				t.Fatal(err)
			}
		}
	}
	names := ""
	for path, cursor := "/v1/flows?limit=2", new(string); cursor != nil; {
		var page listed
		w := a.raw("GET", path, "", asAdmin())
		if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil || w.Code != http.StatusOK {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
		for _, item := range page.Items {
			names += fmt.Sprint(item["name"], item["version"], " ")
		}
		if cursor = page.NextCursor; cursor != nil {
			path = "/v1/flows?limit=2&cursor=" + *cursor
		}
	}
	if names != "a1 b1 c1 " {
		t.Errorf("listed %s", names)
	}
	var one flows.Flow
	if w := a.raw("GET", "/v1/flows/b", "", asAdmin()); json.Unmarshal(w.Body.Bytes(), &one) != nil || one.Name != "b" || !one.Current || len(one.Definition.Actions) != 1 {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	a.refused(a.raw("GET", "/v1/flows/nobody", "", asAdmin()), http.StatusNotFound, `there is no flow "nobody"`)
	var schema map[string]any
	if w := a.raw("GET", "/v1/schemas/flow", "", asAdmin()); json.Unmarshal(w.Body.Bytes(), &schema) != nil || schema["$schema"] == nil {
		t.Errorf("%d %.200s", w.Code, w.Body)
	}
}

func TestRequestsAreListed(t *testing.T) {
	t.Parallel()
	a := start(t)
	exec(t, a.pool, `
		with x as (
		  insert into agent_executions (trace_id, surface, flow) values ('fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'a') returning id, trace_id)
		insert into agent_requests (kind, execution_id, trace_id, thread_id, title, items)
		select k, x.id, x.trace_id, 'maria', k, case k when 'document' then '{INE,CURP}'::text[] else '{}' end
		  from x cross join unnest(array['document', 'test']) k`)
	var page listed
	w := a.raw("GET", "/v1/requests?kind=document&status=pending&thread_id=maria", "", asAdmin())
	if err := json.Unmarshal(w.Body.Bytes(), &page); err != nil || len(page.Items) != 1 || fmt.Sprint(page.Items[0]["items"]) != "[INE CURP]" {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	id := fmt.Sprint(page.Items[0]["id"])
	one := a.raw("GET", "/v1/requests/"+id, "", asAdmin())
	if one.Code != http.StatusOK || one.Header().Get("X-Trace-Id") != "fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE" {
		t.Errorf("%d %s", one.Code, one.Body)
	}
	for path, c := range map[string]struct {
		status int
		words  string
	}{
		"/v1/requests/nonsense":                             {http.StatusBadRequest, "not the id of a request"},
		"/v1/requests/0198c0de-0000-7000-8000-000000000000": {http.StatusNotFound, "there is no request"},
		"/v1/requests?kind=favour":                          {http.StatusBadRequest, "document"},
		"/v1/requests?execution_id=zz":                      {http.StatusBadRequest, "uuid"},
	} {
		a.refused(a.raw("GET", path, "", asAdmin()), c.status, c.words)
	}
}
