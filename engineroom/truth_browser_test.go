package engineroom

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// F14: the server and the browser write a value alike.
func TestTheBrowserWritesValuesAsTheServerDoes(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../internal/human/testdata/examples.json")
	require.NoError(t, err)
	var examples map[string][][2]any
	require.NoError(t, json.Unmarshal(text, &examples))
	l := listedPage(t)
	p := browser.Open(t, browser.Look{})
	p.Go(l.url)
	for name, list := range examples {
		input, err := json.Marshal(list)
		require.NoError(t, err)
		var got []string
		p.Eval(`JSON.parse(`+quoted(t, string(input))+`).map(([value]) => human.`+name+`(value))`, &got)
		for i, e := range list {
			if got[i] != e[1] {
				t.Errorf("human.%s(%v) = %q in the browser, want %q", name, e[0], got[i], e[1])
			}
		}
	}
}
