package api_test

import (
	"net/http"
	"testing"

	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/why"
)

func TestATraceSaysWhyByEveryFormOfItsID(t *testing.T) {
	t.Parallel()
	a := start(t)
	id := trace.New(trace.Flow)
	begun := a.begin("order", id)
	for _, form := range []string{string(id), id.OTel(), id.Suffix()} {
		var got why.Answer
		header := a.get("/v1/traces/"+form+"/why", &got)
		if got.TraceID != string(id) || got.OTelTraceID != id.OTel() || header.Get("X-Trace-Id") != string(id) {
			t.Errorf("by %s the trace is %s, %s, %s", form, got.TraceID, got.OTelTraceID, header.Get("X-Trace-Id"))
		}
		cause := got.Of(why.Because)
		if len(cause) != 1 || cause[0].FromRef != "outside" || cause[0].ToRef != "execution "+begun.ID {
			t.Errorf("by %s the cause is %+v", form, cause)
		}
	}
	a.refused(a.raw("GET", "/v1/traces/"+string(trace.New(trace.Chat))+"/why", "", asAdmin()), http.StatusNotFound, "")
	a.refused(a.raw("GET", "/v1/traces/nonsense/why", "", asAdmin()), http.StatusBadRequest, "not a trace id")
}
