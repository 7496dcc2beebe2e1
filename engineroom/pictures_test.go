package engineroom

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// TestPictures makes pictures of the documentation in the folder AGENT_PICTURES (make pictures). Without that variable
// it does nothing; scripts/test would report a skipped test.
func TestPictures(t *testing.T) {
	t.Parallel()
	dir := os.Getenv("AGENT_PICTURES")
	if dir == "" {
		return
	}
	pool, server := openRoom(t)
	addresses := seedAllPages(t, pool, "It is done. See the list of orders that were refunded.")
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('agent', now() + interval '1 hour')`)
	p := browser.Open(t, browser.Look{})
	for _, shot := range []struct{ name, page, mode string }{
		{"overview", "/", "light"},
		{"trace", "/traces/{id}", "light"},
		{"approval", "/approvals/{id}", "dark"},
		{"evals", "/evals/runs/{id}/cases/{case}", "light"},
	} {
		p.As(displayModes[shot.mode])
		p.Go(server.URL + addresses[shot.page])
		p.Until("the page is live", `document.body.innerText.includes("Live")`)
		p.Screenshot(filepath.Join(dir, shot.name+".png"), false)
	}
}
