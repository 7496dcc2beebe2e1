//go:build unix

package soak_test

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
)

var (
	pendingStep  = regexp.MustCompile(`step ([0-9a-f-]{36}): [^\n]* \(pending\)`)
	question     = regexp.MustCompile(`[Qq]uestion (\d+) of thread (\S+)\.`)
	orderPayload = regexp.MustCompile(`"type":\s*"order.paid"`)
	orderNumber  = regexp.MustCompile(`"n":\s*(\d+)`)
	operateTurn  = regexp.MustCompile(`this is turn (\d+)\.`)
	aboutSupply  = regexp.MustCompile(`About delivery (\d+)`)
)

// think is the model of the soak. What it says depends only on what it is shown. One request in sixty is
// refused, as providers do on a busy day.
func think(n int, req openai.ChatCompletionRequest) modeltest.Reply {
	if n%60 == 59 {
		return modeltest.Status(503, 0)
	}
	t := read(req)
	reply := t.next()
	return reply.Slowly(time.Millisecond)
}

// transcript is what the model knows: the task, and what its calls came to.
type transcript struct {
	system, prompt string
	offered        []string
	results        []result // of this task's calls, in order
}

type result struct{ name, args, content string }

func (r result) good() bool { return !strings.Contains(r.content, `"error"`) }

// read finds the task: what the user said last, and what was done since.
func read(req openai.ChatCompletionRequest) transcript {
	var t transcript
	last := 0
	for i, m := range req.Messages {
		switch m.Role {
		case openai.ChatMessageRoleSystem:
			t.system += m.Content
		case openai.ChatMessageRoleUser:
			last = i
		}
	}
	t.prompt = modeltest.Said(req.Messages[last])
	for _, tool := range req.Tools {
		t.offered = append(t.offered, tool.Function.Name)
	}
	calls := map[string]openai.FunctionCall{}
	for _, m := range req.Messages[last:] {
		for _, c := range m.ToolCalls {
			calls[c.ID] = c.Function
		}
		if m.Role == openai.ChatMessageRoleTool {
			c := calls[m.ToolCallID]
			t.results = append(t.results, result{c.Name, c.Arguments, m.Content})
		}
	}
	return t
}

// done is the last good result of a tool; nil when there is none.
func (t transcript) done(name string) *result {
	for _, r := range slices.Backward(t.results) {
		if r.name == name && r.good() {
			return &r
		}
	}
	return nil
}

// next is what the model does now.
func (t transcript) next() modeltest.Reply {
	switch {
	case strings.Contains(t.system, "You pursue one objective"):
		return t.pursue()
	case strings.Contains(t.prompt, "Ship what was paid"):
		return t.ship()
	case strings.Contains(t.prompt, "Count one more"):
		if reply, counted := t.count(); !counted {
			return reply
		}
		if m := operateTurn.FindStringSubmatch(t.prompt); m != nil {
			return modeltest.Text("Counted in turn " + m[1] + ".")
		}
		return modeltest.Text("Counted.")
	case question.MatchString(t.prompt):
		return t.answer()
	case aboutSupply.MatchString(t.prompt):
		n := aboutSupply.FindStringSubmatch(t.prompt)[1]
		if t.done("look_up") == nil {
			return modeltest.ToolCall("look_up", fmt.Sprintf(`{"about": "delivery %s"}`, n))
		}
		return modeltest.Text("Looked into delivery " + n + ".")
	}
	return modeltest.Text("All is well.")
}

// answer is for visitors.
func (t transcript) answer() modeltest.Reply {
	all := question.FindAllStringSubmatch(t.prompt, -1)
	m := all[len(all)-1]
	if t.done("look_up") == nil {
		return modeltest.Text("Let me look. ").AndCall("look_up", fmt.Sprintf(`{"about": "question %s of %s"}`, m[1], m[2]))
	}
	return modeltest.Text(fmt.Sprintf("This is the answer to question %s of thread %s.", m[1], m[2]))
}

// count reads the counter and writes it back, until nobody was faster.
func (t transcript) count() (reply modeltest.Reply, counted bool) {
	if t.done("memory_write") != nil {
		return reply, true
	}
	if len(t.results) == 0 || t.results[len(t.results)-1].name != "memory_search" {
		return modeltest.ToolCall("memory_search", `{"query": "counter", "category": "soak"}`), false
	}
	var found struct {
		Memories []struct {
			Key   string `json:"key"`
			Value int    `json:"value"`
		} `json:"memories"`
	}
	if err := json.Unmarshal([]byte(t.results[len(t.results)-1].content), &found); err != nil {
		return modeltest.Text("I cannot read my memory: " + err.Error()), false
	}
	value := 0
	for _, m := range found.Memories {
		if m.Key == "counter" {
			value = m.Value
		}
	}
	return modeltest.ToolCall("memory_write", modeltest.Arguments(map[string]any{
		"category": "soak", "key": "counter", "value": value + 1,
	})), false
}

// ship is for the automation that an order starts.
func (t transcript) ship() modeltest.Reply {
	n := orderNumber.FindStringSubmatch(t.prompt)
	if n == nil || !orderPayload.MatchString(t.prompt) {
		return modeltest.Text("There is no order in: " + t.prompt)
	}
	if t.done("ship") == nil {
		return modeltest.ToolCall("ship", `{"order": `+n[1]+`}`)
	}
	if reply, counted := t.count(); !counted {
		return reply
	}
	return modeltest.Text("Shipped order " + n[1] + ".")
}

// pursue does one step after the other: look, count, report.
func (t transcript) pursue() modeltest.Reply {
	reported := 0
	for _, r := range t.results {
		if r.name == "complete_step" && r.good() {
			reported++
		}
	}
	steps := pendingStep.FindAllStringSubmatch(t.prompt, -1)
	switch {
	case reported == len(steps):
		return modeltest.Text("The stock is counted.")
	case t.done("look_up") == nil:
		return modeltest.ToolCall("look_up", `{"about": "the stock"}`)
	}
	if reply, counted := t.count(); !counted {
		return reply
	}
	return modeltest.ToolCall("complete_step",
		modeltest.Arguments(map[string]string{"step_id": steps[reported][1], "result": "counted"}))
}
