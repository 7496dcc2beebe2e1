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

// The same model repeats the recorded calls. A model that omits a call is worse, and one with other calls diverges.
func TestEvalCounterfactualComparesCandidateWithAgent(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t)
	server.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		last := req.Messages[len(req.Messages)-1]
		order := regexp.MustCompile(`order (\d+)\?`).FindStringSubmatch(last.Content)
		switch {
		case last.Role == "tool" || req.Model == "gpt-4.1":
			return modeltest.Text("It was found.").WithUsage(100, 10, 0)
		case order == nil:
			return modeltest.Text("Hello.")
		case req.Model == "gpt-4.1-nano":
			return modeltest.ToolCall("check_order", `{"order":1000`+order[1]+`}`)
		}
		return modeltest.ToolCall("check_order", `{"order":`+order[1]+`}`).WithUsage(100, 10, 0)
	})
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), "OPENAI_API_KEY=k", "AGENT_MODEL=gpt-4o-mini",
		"AGENT_LOG_LEVEL=error")
	dir := t.TempDir()
	testkit.WriteFile(t, filepath.Join(dir, "a.yaml"), evalWorkspace)
	p.must("apply", dir)
	p.mustFail(1, "no recorded turn can be played", "eval", "counterfactual", "--model", "gpt-4.1")
	for n := range 8 {
		p.must("operate", fmt.Sprintf("order %d?", n))
	}
	p.mustFail(2, "name the candidate", "eval", "counterfactual")
	p.mustFail(2, "--agent-version must be 1 or more", "eval", "counterfactual", "--agent-version", "-1")
	p.mustFail(2, "the model has no price", "eval", "counterfactual", "--model", "no-such-model", "--budget", "1")
	before := len(server.Requests())

	same := p.run("eval", "counterfactual", "--model", "gpt-4o-mini", "--budget", "1")
	require.Equal(t, 0, same.code, same.out, same.err)
	assert.Contains(t, same.err, "8 recorded turns, 8 of them playable; about 32 model calls", "about $0.00")
	assert.Contains(t, same.out, "counterfactual of agent agent: version 0 with gpt-4o-mini, run ",
		"control    follows 8 of 8 (0.68–1.00), 8 decided", "candidate  follows 8 of 8", "not worse: +0.00")
	assert.Equal(t, 32, len(server.Requests())-before)
	junit := filepath.Join(dir, "evals.xml")
	worse := p.run("eval", "counterfactual", "--model", "gpt-4.1", "--junit", junit)
	require.Equal(t, 1, worse.code, worse.out, worse.err)
	assert.Contains(t, worse.out, "worse: -1.00", "check_order was not called",
		"candidate  follows 0 of 8 (0.00–0.32), 8 decided")
	text, err := os.ReadFile(junit)
	require.NoError(t, err)
	assert.Contains(t, string(text), `tests="1" failures="1"`, "not worse than the control")
	diverged := p.run("eval", "counterfactual", "--model", "gpt-4.1-nano")
	assert.Contains(t, diverged.out, "worse: -1.00", "0 decided, diverged at check_order 8",
		"check_order has no recorded call")
	id := regexp.MustCompile(`run ([0-9a-f-]{36})`).FindStringSubmatch(diverged.out)[1]
	shown := p.must("eval", "show", id)
	assert.Truef(t, strings.HasPrefix(shown, diverged.out), "the run is shown as:\n%s", shown)
	poor := p.run("eval", "counterfactual", "--model", "gpt-4o-mini", "--budget", "0.000001")
	require.Equal(t, 3, poor.code, poor.out, poor.err)
	assert.Contains(t, poor.out, "undecided: ", "the budget of the run is used up")
	// A played turn does not count as a recorded one.
	assert.Contains(t, p.run("eval", "counterfactual", "--model", "gpt-4o-mini").err, "8 recorded turns")
}
