package api_test

import (
	"net/http"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/trace"
)

// TestTheCallersTraceIsALink: whoever starts a run, or wakes one by an event, with a traceparent is linked from the run's
// trace, which keeps its own id. What is no traceparent leaves nothing.
func TestTheCallersTraceIsALink(t *testing.T) {
	t.Parallel()
	const first, second = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
	a := alive(t)
	from := func(parent string) http.Header {
		h := asAdmin()
		h.Set("Traceparent", parent)
		return h
	}
	links := func(id string) (all string) {
		err := a.pool.QueryRow(t.Context(), `select coalesce(string_agg(traceparent, ' ' order by created_at), '') from agent_trace_links where trace_id = $1`, id).Scan(&all)
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	var x started
	a.expect(a.raw("POST", "/v1/executions", `{"flow":"external"}`, from(first)), "POST", "/v1/executions", http.StatusCreated, &x)
	if got := links(x.TraceID); got != first || trace.ID(x.TraceID).OTel() == first[3:35] {
		t.Errorf("trace %s is linked to %q, want %q", x.TraceID, got, first)
	}
	var lock lockAnswer
	a.does("POST", "/v1/executions/"+x.ID+"/lock", `{"owner":"me"}`, http.StatusOK, &lock)
	a.does("DELETE", "/v1/executions/"+x.ID+"/lock/"+lock.LockID, `{"status":"waiting","waiting_for":"event","waiting_key":"k1"}`, http.StatusOK, new(any))
	var got executions.Delivered
	a.expect(a.raw("POST", "/v1/events", `{"event":"EVENT_COMPLETED","key":"k1"}`, from(second)), "POST", "/v1/events", http.StatusAccepted, &got)
	if len(got.Resumed) != 1 || links(x.TraceID) != first+" "+second {
		t.Errorf("woken are %v; the trace is linked to %q", got.Resumed, links(x.TraceID))
	}
	var y started
	a.expect(a.raw("POST", "/v1/executions", `{"flow":"external"}`, from("00-rubbish")), "POST", "/v1/executions", http.StatusCreated, &y)
	if got := links(y.TraceID); got != "" {
		t.Errorf("rubbish is a link: %q", got)
	}
}
