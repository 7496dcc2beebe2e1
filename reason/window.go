package reason

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/models"
)

// minKept is the length, in bytes, up to which a part of a message is not cut.
const minKept = 256

// trimContext trims the next request to the turn's context, by estimated tokens, tools included. It drops the oldest
// exchanges whole: first the history's, then the turn's. The leading system messages, the prompt and the turn's newest
// exchange stay. Then it cuts the longest messages, the leading system messages last. A request stays longer if its
// tools take more than three quarters of the context, or if no part above minKept is left.
func (w *turn) trimContext() {
	limit := max(w.budget.Context-w.toolTokens(), w.budget.Context/4)
	for models.EstimateTokens(w.messages) > limit {
		from, to := w.oldestExchange()
		if from == to {
			break
		}
		w.messages = append(w.messages[:from:from], w.messages[to:]...)
		if to <= w.promptIndex {
			w.promptIndex -= to - from
		}
	}
	for {
		excess := models.EstimateTokens(w.messages) - limit
		if excess <= 0 {
			return
		}
		i := w.longestMessage()
		if i < 0 {
			return
		}
		w.messages = slices.Clone(w.messages)
		w.messages[i] = w.shorten(w.messages[i], excess*4)
	}
}

// toolTokens estimates the tokens of the tools' definitions.
func (w *turn) toolTokens() int {
	tokens := 0
	for _, tool := range w.definitions() {
		if text, err := json.Marshal(tool); err == nil {
			tokens += len(text)/4 + 4
		}
	}
	return tokens
}

// oldestExchange returns the next exchange to drop; empty for none.
func (w *turn) oldestExchange() (from, to int) {
	if w.prefixLen < w.promptIndex {
		return w.prefixLen, w.prefixLen + exchangeOf(w.messages[w.prefixLen:w.promptIndex], models.RoleUser)
	}
	from = w.promptIndex + 1
	to = from + exchangeOf(w.messages[from:], models.RoleAssistant)
	if to >= len(w.messages) {
		return from, from
	}
	return from, to
}

// exchangeOf returns the length of the first exchange: the messages up to the next message of the role.
func exchangeOf(messages []models.Message, role string) int {
	for i := 1; i < len(messages); i++ {
		if messages[i].Role == role {
			return i
		}
	}
	return len(messages)
}

// longestMessage returns the next message to cut; -1 for none.
func (w *turn) longestMessage() int {
	for _, start := range []int{w.prefixLen, 0} {
		best, longest := -1, minKept
		for i := start; i < len(w.messages); i++ {
			if n := longestPart(w.messages[i]); n > longest {
				best, longest = i, n
			}
		}
		if best >= 0 {
			return best
		}
	}
	return -1
}

// longestPart returns the length of a message's longest part, in bytes.
func longestPart(m models.Message) int {
	n := len(m.Content)
	for _, c := range m.ToolCalls {
		n = max(n, len(c.Arguments))
	}
	return n
}

// shorten cuts about the given bytes from a message's longest part, with a marker. The model can read the rest of a
// tool's result.
func (w *turn) shorten(m models.Message, excess int) models.Message {
	if longestPart(m) > len(m.Content) {
		m.ToolCalls = slices.Clone(m.ToolCalls)
		for i, c := range m.ToolCalls {
			if n := len(c.Arguments); n == longestPart(m) {
				m.ToolCalls[i].Arguments = fmt.Sprintf(`{"cut":"%d bytes of arguments"}`, n)
				break
			}
		}
		return m
	}
	keep := max(minKept/2, len(m.Content)-excess-minKept/2)
	if m.Role == models.RoleTool {
		m.Content = w.truncateResult(m.Content, keep)
		return m
	}
	m.Content = truncateMiddle(m.Content, keep)
	return m
}

// truncateMiddle keeps the beginning and the end of a text.
func truncateMiddle(text string, keep int) string {
	if keep >= len(text) {
		return text
	}
	head, tail := runeStart(text, keep*2/3), runeStart(text, len(text)-keep/3)
	shown := head + len(text) - tail
	return fmt.Sprintf("%s\n… (%d of %d bytes shown) …\n%s", text[:head], shown, len(text), text[tail:])
}

// runeStart returns the start of the character at or before i.
func runeStart(text string, i int) int {
	for i > 0 && i < len(text) && !utf8.RuneStart(text[i]) {
		i--
	}
	return i
}

// dropIncomplete removes calls without results and results without calls, which servers reject.
func dropIncomplete(history []models.Message) []models.Message {
	var kept []models.Message
	for i := 0; i < len(history); i++ {
		m := history[i]
		if m.Role == models.RoleTool {
			continue // no call before it
		}
		if len(m.ToolCalls) == 0 {
			kept = append(kept, m)
			continue
		}
		results := i + 1
		for results < len(history) && history[results].Role == models.RoleTool {
			results++
		}
		if resultsMatch(m.ToolCalls, history[i+1:results]) {
			kept = append(kept, m.Sendable())
			kept = append(kept, history[i+1:results]...)
		} else if m.ToolCalls = nil; strings.TrimSpace(m.Content) != "" {
			kept = append(kept, m)
		}
		i = results - 1
	}
	return kept
}

// resultsMatch reports whether each call has exactly one result.
func resultsMatch(calls []models.ToolCall, results []models.Message) bool {
	open := map[string]bool{}
	for _, c := range calls {
		open[c.ID] = true
	}
	for _, r := range results {
		if !open[r.ToolCallID] {
			return false
		}
		delete(open, r.ToolCallID)
	}
	return len(open) == 0 && len(results) == len(calls)
}
