package engineroom

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
)

func TestEveryPageSaysThatTheAgentIsPaused(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	if _, body := see(t, server.URL+"/"); !strings.Contains(body, `action="/act/v1/pause"`) || strings.Contains(body, "is paused") {
		t.Errorf("the overview has no lever:\n%s", body)
	}
	if _, body := see(t, server.URL+"/lanes"); strings.Contains(body, "/act/v1/pause") || strings.Contains(body, "is paused") {
		t.Errorf("another page has the lever:\n%s", body)
	}
	got, err := executions.PauseAll(t.Context(), pool, "ana", "<b>prices</b> look wrong")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/", "/lanes", "/traces", "/executions?status=waiting", "/operate"} {
		status, body := see(t, server.URL+path)
		for _, want := range []string{
			"Autonomous work is paused", "by ana", "&lt;b&gt;prices&lt;/b&gt; look wrong", `action="/act/v1/resume"`, "/traces/" + got.TraceID,
		} {
			if status != 200 || !strings.Contains(body, want) {
				t.Errorf("%s: status %d, %q is missing", path, status, want)
			}
		}
		if strings.Count(body, `id="pause"`) != 1 || strings.Contains(body, "/act/v1/pause") {
			t.Errorf("%s has the part more than once, or both levers", path)
		}
	}
	if _, err := executions.ResumeAll(t.Context(), pool, "ana", ""); err != nil {
		t.Fatal(err)
	}
	if _, body := see(t, server.URL+"/lanes"); strings.Contains(body, "is paused") {
		t.Error("it says so still")
	}
}
