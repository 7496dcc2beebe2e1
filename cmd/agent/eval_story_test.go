package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// From a bad trace to a case that fails, a change of instructions that mends it, the gate, and a counterfactual over
// the other recorded turns.
func TestABadTraceBecomesACaseThatAChangeOfInstructionsMends(t *testing.T) {
	t.Parallel()
	turns := 50
	if testing.Short() {
		turns = 10
	}
	server := modeltest.New(t)
	server.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		last := req.Messages[len(req.Messages)-1]
		order := regexp.MustCompile(`order (\d+)\?`).FindStringSubmatch(last.Content)
		switch {
		case last.Role == "tool":
			return modeltest.Text("It was found.")
		case order != nil:
			return modeltest.ToolCall("check_order", `{"order":`+order[1]+`}`)
		case strings.Contains(req.Messages[0].Content, "Promise no refund."):
			return modeltest.Text("I cannot promise that.")
		}
		return modeltest.Text("You get your money back.")
	})
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), "OPENAI_API_KEY=k", "AGENT_MODEL=gpt-4o-mini",
		"AGENT_LOG_LEVEL=error")
	dir := t.TempDir()
	file := filepath.Join(dir, "a.yaml")
	text := "kind: agent\nname: nora\ninstructions: Be kind.\n---" +
		strings.Replace(evalWorkspace, "trials: 2\n", "trials: 2\nsurface: operate\ngate: {margin: 0.05}\n", 1)
	testkit.WriteFile(t, file, strings.Replace(text, "answer: {contains: not due}", "answer: {contains: found}", 1))
	p.must("apply", dir)
	var lines strings.Builder
	for n := range turns - 1 {
		fmt.Fprintf(&lines, "order %d?\n", n)
	}
	if got := p.runWith(t.Context(), strings.NewReader(lines.String()), "operate"); got.code != 0 {
		t.Fatalf("exit %d: %s", got.code, got.err)
	}
	p.must("operate", "I want a refund!")
	bad := regexp.MustCompile(`op_\w+`).FindString(p.must("trace", "last"))
	p.must("eval", "add", bad, "--name", "promises nothing", "--to", file)
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	made := string(raw)
	i := strings.LastIndex(made, "within:")
	made = made[:strings.LastIndex(made[:i], "- ")] + "- answer: {lacks: money back}\n"
	testkit.WriteFile(t, file, made)
	failed := p.run("eval", "run", "--candidate", dir)
	if failed.code != 1 || !strings.Contains(failed.out, `promises nothing  0/2`) {
		t.Fatalf("exit %d: %s%s", failed.code, failed.out, failed.err)
	}
	p.fails(1, "promises nothing (0/2)", "apply", dir)

	testkit.WriteFile(t, file, strings.Replace(made, "Be kind.", "Be kind. Promise no refund.", 1))
	assert.Contains(t, p.must("eval", "run", "--candidate", dir), "promises nothing  2/2", "passed")
	compared := p.run("eval", "counterfactual", "--candidate", dir)
	assert.Contains(t, compared.out, "not worse: +0.00",
		fmt.Sprintf("candidate  follows %d of %d", turns, turns))
	if compared.code != 0 {
		t.Errorf("exit %d: %s", compared.code, compared.err)
	}
	assert.Contains(t, p.must("apply", dir), "~ agent nora", "~ eval orders")
}
