package offline

import (
	"encoding/json"
	"slices"
	"strings"
)

const (
	maxDigest = 5000 // bytes of a summary
	maxSaid   = 200  // bytes of one message in it
)

// digest is the summary of a conversation that came as JSON, by the runtime's own form; not ok for anything else.
// It keeps the beginning of each message, the newest as long as there is room. Nothing in it is an order.
func (s situation) digest() (string, bool) {
	var asked struct {
		Before   *string `json:"summary_so_far"`
		Messages []struct {
			Role string `json:"role"`
			Text string `json:"text"`
		} `json:"messages"`
	}
	if !strings.HasPrefix(s.prompt, "{") || json.Unmarshal([]byte(s.prompt), &asked) != nil || asked.Before == nil || len(asked.Messages) == 0 {
		return "", false
	}
	var lines []string
	if *asked.Before != "" {
		lines = strings.Split(*asked.Before, "\n")
	}
	for _, m := range asked.Messages {
		if text := strings.Join(strings.Fields(m.Text), " "); text != "" {
			lines = append(lines, m.Role+": "+clip(text, maxSaid))
		}
	}
	size := 0
	for i, line := range slices.Backward(lines) {
		if size += len(line) + 1; size > maxDigest {
			lines = lines[i+1:]
			break
		}
	}
	if len(lines) == 0 {
		return "(nothing was said)", true
	}
	return strings.Join(lines, "\n"), true
}
