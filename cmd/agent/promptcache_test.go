package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"sync"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
)

// A provider keeps the prompts that it has read for a while. The beginning that a later prompt shares with one of them
// costs a tenth.
const (
	cacheFloor = 1024 // tokens: OpenAI keeps no shorter beginning,
	cacheBlock = 128  // and counts in such blocks
	tokenBytes = 4    // of English and JSON, about
)

// promptCache works out what a provider would have had of each request.
type promptCache struct {
	mu     sync.Mutex
	asked  map[string][]string // the prompts so far, by model
	turns  int
	counts map[string]cacheCount // by surface
}

// cacheCount is in tokens.
type cacheCount struct {
	calls, prompt int
	shared        int // with an earlier prompt
	cached        int // of these, those that a provider with a floor and blocks has
}

func (c cacheCount) plus(d cacheCount) cacheCount {
	return cacheCount{c.calls + d.calls, c.prompt + d.prompt, c.shared + d.shared, c.cached + d.cached}
}

// percent is a part of the prompt's tokens.
func (c cacheCount) percent(part int) float64 { return 100 * float64(part) / float64(max(c.prompt, 1)) }

func (c cacheCount) String() string {
	return fmt.Sprintf("%3d calls, %6d tokens, %4.1f %% shared, %4.1f %% cached", c.calls, c.prompt,
		c.percent(c.shared), c.percent(c.cached))
}

// promptClock is the time in a prompt. The test's day takes seconds, so each turn is given a minute of its own.
var promptClock = regexp.MustCompile(`Now: \w+ \d{4}-\d\d-\d\d \d\d:\d\d`)

// ask counts a request, given its body and the surface that asks.
func (c *promptCache) ask(surface, body string) (cacheCount, error) {
	var req struct {
		Model    string
		Format   json.RawMessage `json:"response_format"`
		Tools    json.RawMessage
		Messages []json.RawMessage
	}
	if err := json.Unmarshal([]byte(body), &req); err != nil {
		return cacheCount{}, err
	}
	var last struct{ Role string }
	if err := json.Unmarshal(req.Messages[len(req.Messages)-1], &last); err != nil {
		return cacheCount{}, err
	}
	text := string(req.Tools) + string(req.Format)
	for _, m := range req.Messages {
		text += string(m)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if last.Role == openai.ChatMessageRoleUser {
		c.turns++
	}
	text = promptClock.ReplaceAllString(text, fmt.Sprintf("Now: Wednesday 2026-11-25 %02d:%02d", c.turns/60%24, c.turns%60))
	longest := 0
	for _, earlier := range c.asked[req.Model] {
		longest = max(longest, sharedBytes(text, earlier))
	}
	c.asked[req.Model] = append(c.asked[req.Model], text)
	one := cacheCount{calls: 1, prompt: len(text) / tokenBytes, shared: longest / tokenBytes}
	if one.shared >= cacheFloor {
		one.cached = one.shared / cacheBlock * cacheBlock
	}
	c.counts[surface] = c.counts[surface].plus(one)
	return one, nil
}

// sharedBytes is the length of what two texts begin with.
func sharedBytes(a, b string) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// all is the sum over the surfaces.
func (c *promptCache) all() (sum cacheCount) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range c.counts {
		sum = sum.plus(one)
	}
	return sum
}

// askedBy is the surface of a request, by the rules that its system message begins with.
func askedBy(req openai.ChatCompletionRequest) string {
	for words, surface := range map[string]string{
		"talk with a visitor": "visitors", "talk with your admin": "operate", "one scheduled task": "report",
		"look back on how": "reflection",
	} {
		if strings.Contains(req.Messages[0].Content, words) {
			return surface
		}
	}
	return "other"
}

// wantedOrder is what a visitor says who asks for an order.
var wantedOrder = regexp.MustCompile(`order (\d{4}).*e-mail is (\S+@\S+\w)`)

// staffed is what a model says at the order desk: it looks up what it is asked for, and then answers.
func staffed(req openai.ChatCompletionRequest) modeltest.Reply {
	last := req.Messages[len(req.Messages)-1]
	said := modeltest.Said(last)
	order := wantedOrder.FindStringSubmatch(said)
	switch {
	case askedBy(req) == "reflection":
		return modeltest.Text("Nothing out of the ordinary: all orders that were asked for were found.")
	case last.Role == openai.ChatMessageRoleTool:
		return modeltest.Text("I have looked it up. It was promised for the day that you see above, it has left our warehouse, and the " +
			"carrier says that it is with you within two working days. Is there anything else that I can do for you?")
	case order != nil:
		return modeltest.ToolCall("order_status", fmt.Sprintf(`{"order":%s,"email":%q}`, order[1], order[2]))
	case strings.Contains(said, "weekly report"):
		return modeltest.ToolCall("week_in_numbers", `{}`).AndCall("late_orders", `{}`)
	case strings.Contains(said, "are late"):
		return modeltest.ToolCall("late_orders", `{}`)
	case strings.Contains(said, "numbers"):
		return modeltest.ToolCall("week_in_numbers", `{}`)
	}
	return modeltest.Text("You can send it back within thirty days, in its box, and it costs you nothing. We collect it at your " +
		"door on a day that suits you. A colleague decides about the refund when it is here.")
}
