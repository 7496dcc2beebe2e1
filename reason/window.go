package reason

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/models"
)

// Sizes of a message's parts, in bytes.
const (
	minKept   = 256  // up to this length, a part is not cut
	imageSize = 6000 // of an image, by models.EstimateTokens
)

// imageLeftOut replaces an image that does not fit into the context.
const imageLeftOut = "[An image was left out here: the conversation is too long.]"

// trimContext trims the next request to the turn's context, by estimated tokens, tools included. It drops the oldest
// exchanges whole: first the history's, then the turn's. The leading system messages, the prompt and the turn's newest
// exchange stay. Then it shortens the longest parts of messages, the leading system messages last, and only if the
// others fit. It removes reasoning and images whole. A request stays longer if its tools take more than three quarters
// of the context, or if no part above minKept is left.
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
		i, second := w.longestMessage()
		if i < 0 || i < w.prefixLen && models.EstimateTokens(w.messages[w.prefixLen:]) > limit {
			return
		}
		w.messages = slices.Clone(w.messages)
		w.messages[i] = w.shorten(w.messages[i], excess*4, second/2)
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

// longestMessage returns the next message to shorten, -1 for none, and the size of the second longest part.
func (w *turn) longestMessage() (best, second int) {
	for _, start := range []int{w.prefixLen, 0} {
		best, longest := -1, minKept
		for i := start; i < len(w.messages); i++ {
			for _, n := range partSizes(w.messages[i]) {
				if n > longest {
					best, longest, second = i, n, longest
				} else {
					second = max(second, n)
				}
			}
		}
		if best >= 0 {
			return best, second
		}
	}
	return -1, 0
}

// partSizes returns the sizes of a message's parts, in bytes.
func partSizes(m models.Message) []int {
	sizes := []int{len(m.Content), reasoningSize(m)}
	for _, c := range m.ToolCalls {
		sizes = append(sizes, len(c.Arguments))
	}
	for _, p := range m.Parts {
		if p.Image != nil {
			sizes = append(sizes, imageSize)
		}
	}
	return sizes
}

// reasoningSize returns the size of a message's reasoning, as text and as fields that the provider gets back.
func reasoningSize(m models.Message) int {
	return 4 * (models.EstimateTokens([]models.Message{m}) - models.EstimateTokens([]models.Message{withoutReasoning(m)}))
}

func withoutReasoning(m models.Message) models.Message {
	m.Reasoning, m.Opaque = "", nil
	m.ToolCalls = slices.Clone(m.ToolCalls)
	for i := range m.ToolCalls {
		m.ToolCalls[i].Opaque = nil
	}
	return m
}

// shorten removes a message's longest part, or cuts about excess bytes from it and keeps at least kept bytes. It leaves
// a marker. The model can read the rest of a tool's result.
func (w *turn) shorten(m models.Message, excess, kept int) models.Message {
	longest := slices.Max(partSizes(m))
	switch {
	case longest == reasoningSize(m):
		return withoutReasoning(m)
	case longest == len(m.Content):
		keep := max(minKept/2, kept, longest-excess-minKept/2)
		if m.Role == models.RoleTool {
			m.Content = w.truncateResult(m.Content, keep)
		} else {
			m.Content = truncateMiddle(m.Content, keep)
		}
		return m
	}
	m.ToolCalls, m.Parts = slices.Clone(m.ToolCalls), slices.Clone(m.Parts)
	for i, c := range m.ToolCalls {
		if n := len(c.Arguments); n == longest {
			m.ToolCalls[i].Arguments = fmt.Sprintf(`{"cut":"%d bytes of arguments"}`, n)
			return m
		}
	}
	for i, p := range slices.Backward(m.Parts) {
		if p.Image != nil {
			m.Parts[i] = models.Part{Text: imageLeftOut}
			return m
		}
	}
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
