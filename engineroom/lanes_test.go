package engineroom

import (
	"strings"
	"testing"
)

func TestHeldLanesAreListed(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	if _, body := see(t, server.URL+"/lanes"); !strings.Contains(body, "No lane is held") {
		t.Fatalf("nothing is held, but the page says:\n%s", body)
	}
	_, err := pool.Exec(t.Context(), `select try_acquire_agent_lock('pipeline:<b>prices</b>', 'someone else', 60)`)
	if err != nil {
		t.Fatal(err)
	}
	status, body := see(t, server.URL+"/lanes")
	if status != 200 || !strings.Contains(body, "pipeline:&lt;b&gt;prices&lt;/b&gt;") || !strings.Contains(body, "someone else") {
		t.Fatalf("status %d, the lane or its holder is missing:\n%s", status, body)
	}
}
