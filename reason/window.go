package reason

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/models"
)

// leastKept is how much of any message stays, in bytes, however little room there is.
const leastKept = 256

// fit makes the next request fit the turn's context, in tokens by estimate, tools included. First the oldest
// exchanges go, those of the history before those of the turn and always whole, so that no call is parted
// from its results; the opening, the prompt and the newest exchange stay. If that is not enough, the longest
// messages are cut, the opening last.
func (w *turn) fit() {
	limit := max(w.budget.Context-w.toolTokens(), w.budget.Context/4)
	for models.EstimateTokens(w.messages) > limit {
		from, to := w.oldest()
		if from == to {
			break
		}
		w.messages = append(w.messages[:from:from], w.messages[to:]...)
		if to <= w.prompt {
			w.prompt -= to - from
		}
	}
	for {
		excess := models.EstimateTokens(w.messages) - limit
		if excess <= 0 {
			return
		}
		i := w.longest()
		if i < 0 {
			return
		}
		w.messages = slices.Clone(w.messages)
		w.messages[i] = w.shorten(w.messages[i], excess*4)
	}
}

// toolTokens is about what the tools' definitions take, in tokens.
func (w *turn) toolTokens() int {
	tokens := 0
	for _, tool := range w.definitions() {
		if text, err := json.Marshal(tool); err == nil {
			tokens += len(text)/4 + 4
		}
	}
	return tokens
}

// oldest is the exchange that goes next; empty when all that is left must stay.
func (w *turn) oldest() (from, to int) {
	if w.opening < w.prompt {
		return w.opening, w.opening + exchangeOf(w.messages[w.opening:w.prompt], models.RoleUser)
	}
	from = w.prompt + 1
	to = from + exchangeOf(w.messages[from:], models.RoleAssistant)
	if to >= len(w.messages) {
		return from, from
	}
	return from, to
}

// exchangeOf is the length of the first exchange: a message and all that follows, up to the next of a role.
func exchangeOf(messages []models.Message, role string) int {
	for i := 1; i < len(messages); i++ {
		if messages[i].Role == role {
			return i
		}
	}
	return len(messages)
}

// longest is the message to cut next; -1 when nothing can be cut.
func (w *turn) longest() int {
	for _, start := range []int{w.opening, 0} {
		best, most := -1, leastKept
		for i := start; i < len(w.messages); i++ {
			if n := length(w.messages[i]); n > most {
				best, most = i, n
			}
		}
		if best >= 0 {
			return best
		}
	}
	return -1
}

// length is that of the longest part of a message, in bytes.
func length(m models.Message) int {
	n := len(m.Content)
	for _, c := range m.ToolCalls {
		n = max(n, len(c.Arguments))
	}
	return n
}

// shorten takes about a number of bytes from the longest part of a message, and says so in it. A tool's result can
// be read on where it was cut.
func (w *turn) shorten(m models.Message, bytes int) models.Message {
	if length(m) > len(m.Content) {
		m.ToolCalls = slices.Clone(m.ToolCalls)
		for i, c := range m.ToolCalls {
			if n := len(c.Arguments); n == length(m) {
				m.ToolCalls[i].Arguments = fmt.Sprintf(`{"cut":"%d bytes of arguments"}`, n)
				break
			}
		}
		return m
	}
	keep := max(leastKept/2, len(m.Content)-bytes-leastKept/2)
	if m.Role == models.RoleTool {
		m.Content = w.cutAgain(m.Content, keep)
		return m
	}
	m.Content = middleOut(m.Content, keep)
	return m
}

// middleOut keeps the beginning and the end of a text.
func middleOut(text string, keep int) string {
	if keep >= len(text) {
		return text
	}
	head, tail := runeStart(text, keep*2/3), runeStart(text, len(text)-keep/3)
	shown := head + len(text) - tail
	return fmt.Sprintf("%s\n… (%d of %d bytes shown) …\n%s", text[:head], shown, len(text), text[tail:])
}

// runeStart is the nearest place at or before i where a letter begins.
func runeStart(text string, i int) int {
	for i > 0 && i < len(text) && !utf8.RuneStart(text[i]) {
		i--
	}
	return i
}

// wholeExchanges leaves out calls without results and results without calls, which servers refuse.
func wholeExchanges(history []models.Message) []models.Message {
	var kept []models.Message
	for i := 0; i < len(history); i++ {
		m := history[i]
		if m.Role == models.RoleTool {
			continue // its call is not before it
		}
		if len(m.ToolCalls) == 0 {
			kept = append(kept, m)
			continue
		}
		results := i + 1
		for results < len(history) && history[results].Role == models.RoleTool {
			results++
		}
		if answered(m.ToolCalls, history[i+1:results]) {
			kept = append(kept, m.Sendable())
			kept = append(kept, history[i+1:results]...)
		} else if m.ToolCalls = nil; strings.TrimSpace(m.Content) != "" {
			kept = append(kept, m)
		}
		i = results - 1
	}
	return kept
}

// answered reports whether results are those of calls, one each.
func answered(calls []models.ToolCall, results []models.Message) bool {
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
