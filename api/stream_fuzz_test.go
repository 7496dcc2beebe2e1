package api

import (
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/ssetest"
)

// FuzzStream tells a follower of an execution whatever stands in the database, and reads it as a client does.
func FuzzStream(f *testing.F) {
	for i, text := range []string{
		"running", "a\nb\r\nc\rd", "\n\nid: 9\nevent: status\ndata: {}\n\n", "\x00", "\xff\xfe", "\u2028\ufeff", "</script>", strings.Repeat("x\r", 3000),
	} {
		f.Add(text, text, text, i)
	}
	f.Fuzz(func(t *testing.T, id, status, waitingFor string, change int) {
		w := httptest.NewRecorder()
		e := statusEvent{ID: id, TraceID: id, Status: executions.Status(status), WaitingFor: &waitingFor, Claim: int64(change), Change: change}
		for range 2 {
			if err := send(w, e); err != nil {
				t.Fatal(err)
			}
		}
		got := ssetest.Read(w.Body.String())
		if len(got.Events) != 2 || len(got.Unknown)+len(got.Comments)+len(got.Retry) > 0 || got.Left != "" {
			t.Fatalf("%q are not two events", w.Body)
		}
		for _, event := range got.Events {
			var read statusEvent
			if err := json.Unmarshal([]byte(event.Data), &read); err != nil || event.Name != "status" {
				t.Fatalf("event %+v: %v", event, err)
			}
			if !utf8.ValidString(id + status + waitingFor) {
				continue
			}
			read.Claim, read.Change = e.Claim, e.Change
			if diff := cmp.Diff(e, read); diff != "" {
				t.Errorf("came out otherwise: %s", diff)
			}
			if !strings.ContainsAny(status, "\r\n\x00") && event.ID != e.mark() {
				t.Errorf("the id is %q, not %q", event.ID, e.mark())
			}
		}
	})
}
