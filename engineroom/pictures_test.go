package engineroom

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/browser"
)

// takePictures makes the pictures of the documentation in the folder AGENT_PICTURES (make pictures).
func takePictures(t *testing.T, p *browser.Page, base string, ids map[string]string) {
	t.Helper()
	dir := os.Getenv("AGENT_PICTURES")
	if dir == "" {
		return
	}
	for _, shot := range []struct{ name, page, mode string }{
		{"overview", "/", "light"},
		{"trace", "/traces/{id}", "light"},
		{"approval", "/approvals/{id}", "dark"},
		{"evals", "/evals/runs/{id}/cases/{case}", "light"},
	} {
		p.As(displayModes[shot.mode])
		p.Go(base + ids[shot.page])
		p.Until("the page is live", `document.body.innerText.includes("Live")`)
		p.Screenshot(filepath.Join(dir, shot.name+".png"), false)
	}
}
