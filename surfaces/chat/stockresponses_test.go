package chat_test

import (
	"context"
	_ "embed"
	"encoding/json"
	"os"
	osexec "os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	gopenai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
)

//go:embed testdata/stock.mjs
var stockScript []byte

// TestTheStockClientsOfNodeWorkUnchanged installs OpenAI's client, the AI SDK and LangChain from npm. Each talks as it
// does by default, and by its other protocol.
func TestTheStockClientsOfNodeWorkUnchanged(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, tool := range []string{"npm", "node"} {
		if _, err := osexec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed: the clients for Node are not tried", tool)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "try.mjs"), stockScript, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	install := osexec.CommandContext(ctx, "npm", "install", "--no-audit", "--no-fund", "--no-save", "--prefix", dir,
		"openai@6", "ai@6", "@ai-sdk/openai@3", "@langchain/openai@1", "@langchain/core@1")
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		t.Skipf("npm cannot install the packages (offline?): the clients for Node are not tried: %v\n%s", err, out)
	}
	w := newWorld(t)
	w.model.Handle(func(_ int, req gopenai.ChatCompletionRequest) modeltest.Reply {
		if f := req.ResponseFormat; f != nil && f.JSONSchema != nil {
			return modeltest.Text(city)
		}
		return modeltest.Text("Hello to you.")
	})
	p := w.process(t)
	run := osexec.CommandContext(ctx, "node", "try.mjs")
	run.Dir = dir
	run.Env = append(os.Environ(), "BASE="+p.url+"/v1", "AI_SDK_LOG_WARNINGS=false")
	out, err := run.Output()
	if err != nil {
		var stderr []byte
		if e, is := err.(*osexec.ExitError); is { //nolint:errorlint // as Output documents it
			stderr = e.Stderr
		}
		t.Fatalf("%v: %s\n%s", err, out, stderr)
	}
	var got map[string]any
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	want := map[string]any{"previous": true, "same": true, "stale": "409 previous_response_not_last", "tools": "400 tools"}
	for _, name := range []string{"parsed", "parsedResponse", "aiObject", "aiChatObject", "aiStreamObject", "lcObject"} {
		want[name] = "Ulm 3"
	}
	for _, name := range []string{
		"first", "deltas", "final", "ai", "aiAgain", "aiStream", "aiHeld", "aiChat", "aiChatStream", "lctrue", "lcStreamtrue",
		"lcfalse", "lcStreamfalse",
	} {
		want[name] = "Hello to you."
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the clients saw (-want +got):\n%s", diff)
	}
}
