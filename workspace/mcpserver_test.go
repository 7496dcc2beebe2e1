package workspace_test

import (
	"strings"
	"testing"
	"testing/fstest"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/workspace"
)

func TestAnMCPServerIsAppliedAndHoldsNoSecret(t *testing.T) {
	t.Parallel()
	read := func(token string) (workspace.Workspace, error) {
		return workspace.Load(fstest.MapFS{"mcp.yaml": {Data: []byte(`kind: mcp_server
name: weather
url: https://weather.example.com/mcp
headers:
  Authorization: ` + token + "\nauto: [read_*]\n")}})
	}
	if _, err := read("Bearer abcdef123456"); err == nil || !strings.Contains(err.Error(), "mcp.yaml:5:") || !strings.Contains(err.Error(), "do not write a secret here") {
		t.Errorf("a literal secret: %v", err)
	}
	w, err := read("Bearer ${WEATHER_TOKEN}")
	if err != nil {
		t.Fatal(err)
	}
	pool := pgtest.DB(t)
	for _, want := range []workspace.Action{workspace.Create, workspace.Unchanged} {
		diff, err := workspace.Apply(t.Context(), pool, w, pruning)
		if err != nil || len(diff.Items) != 1 || diff.Items[0].Action != want || diff.Items[0].Kind != "mcp_server" {
			t.Errorf("the diff is %+v, %v; want %s", diff, err, want)
		}
	}
	got, err := mcp.Get(t.Context(), pool, "weather")
	if err != nil || got.Headers["Authorization"] != "Bearer ${WEATHER_TOKEN}" || got.Trust != "approve" || got.Source != workspace.Source {
		t.Errorf("the server is %+v, %v", got, err)
	}
	diff, err := workspace.Apply(t.Context(), pool, workspace.Workspace{}, pruning)
	if err != nil || len(diff.Items) != 1 || diff.Items[0].Action != workspace.Remove {
		t.Errorf("an empty workspace: %+v, %v", diff, err)
	}
}
