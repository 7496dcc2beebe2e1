//go:build unix

package sdks

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// What a README shows first is a whole worker, in less than 20 lines, and the README is a page. It runs as it is
// written; only its bank comes from here.
func TestTheWorkerOfAReadmeRuns(t *testing.T) {
	eachSDK(t, func(w *world) {
		fence, bank, file := "```python\n", readmeBank, "worker.py"
		if w.name == "typescript" {
			fence, bank, file = "```ts\n", "const bank = { charge: async (order, key) => `charged for ${order.id}` };\n", "worker.mjs"
		}
		page, err := os.ReadFile(filepath.Join("../../sdk", w.name, "README.md"))
		require.NoError(w, err)
		_, rest, _ := strings.Cut(string(page), fence)
		code, _, whole := strings.Cut(rest, "```")
		if lines := strings.Count(code, "\n"); !whole || lines >= 20 || strings.Count(string(page), "\n") > 50 {
			w.Errorf("the worker has %d lines, the README %d", lines, strings.Count(string(page), "\n"))
		}
		folder, index := w.TempDir(), "../../sdk/typescript/index.js"
		if packed && w.name == "typescript" {
			folder, index = filepath.Dir(w.command[1]), "lanekeeper"
		} else if index, err = filepath.Abs(index); err != nil {
			w.Fatal(err)
		}
		code = strings.Replace(code, `from "lanekeeper"`, `from "`+index+`"`, 1)
		w.command[1] = filepath.Join(folder, file)
		require.NoError(w, os.WriteFile(w.command[1], []byte(bank+code), 0o600))
		w.worker("readme", w.base, 30)
		id := w.start("external:order", `{"id":7}`)
		pgtest.Until(w, w.db, "waiting", `select status::text from agent_executions where id = $1::uuid`, id)
		w.call("POST", "/v1/events", `{"event":"EVENT_COMPLETED","key":"shipped 7","data":"parcel 3"}`, nil)
		text := `{"paid":"charged for 7","parcel":"parcel 3"}`
		if w.name == "python" {
			text = `{"paid": "charged for 7", "parcel": "parcel 3"}`
		}
		w.expect(id, "completed", text)
	})
}

const readmeBank = `import os, sys
sys.path.insert(0, os.environ["SDK"])

class bank:
    def charge(order, key):
        return f"charged for {order['id']}"

`
