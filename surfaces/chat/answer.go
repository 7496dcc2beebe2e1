package chat

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
)

// answer is the result of a turn's execution.
type answer struct {
	Text   string              `json:"text"`
	Finish openai.FinishReason `json:"finish_reason"`
	Ended  string              `json:"ended"` // how the reasoning loop or the relay ended
	Seq    int64               `json:"seq"`   // the answer's place in the thread
	// Refused: a limit, which ends at Until, replaced the answer. The client gets an error.
	Refused bool `json:"refused,omitempty"`
	// Unformed: the answer is not in the requested format. The client gets an error.
	Unformed bool         `json:"formatError,omitempty"`
	Until    time.Time    `json:"until,omitzero"`
	Usage    openai.Usage `json:"usage"`
}

// newAnswer returns the answer of the turn. Unless it is refused or unformed, its text is the whole text of the feed.
func (t *turn) newAnswer(text string, finish openai.FinishReason, o reason.Outcome) answer {
	a := answer{
		Text: cleanText(text), Finish: finish, Ended: o.Ended, Until: o.Until, Usage: openai.Usage{
			PromptTokens: o.Usage.PromptTokens, CompletionTokens: o.Usage.CompletionTokens,
			TotalTokens: o.Usage.TotalTokens,
		},
	}
	// A limit that ends a turn after it has shown text does not refuse it: the client keeps the text.
	a.Refused = (o.Ended == reason.EndedDay || o.Ended == reason.EndedSurface) && t.feed.snapshot(false).text == t.flowText
	limit := t.in.maxBytes()
	switch {
	case a.Refused:
	case t.in.Form != nil && o.Ended != reason.Answered:
		a.Unformed = true
	case t.in.Form != nil && limit > 0 && len(a.Text) > limit:
		a.Text, a.Unformed = formTooLong, true
	default:
		var truncated bool
		if a.Text, truncated = t.feed.finalText(a.Text); truncated {
			a.Finish = openai.FinishReasonLength
		}
	}
	return a
}

// formTooLong replaces a formatted answer above its limit.
const formTooLong = "The answer is longer than its token limit. Cutting it would break its format."

// visibleAnswer returns the text that the visitor reads for an outcome, and its finish reason.
func visibleAnswer(o reason.Outcome) (string, openai.FinishReason) {
	switch o.Ended {
	case reason.Answered:
		return o.Text, cmp.Or(openai.FinishReason(o.Cut), openai.FinishReasonStop)
	case reason.EndedForm:
		return o.Text, openai.FinishReasonStop
	case reason.Stalled:
		return "I could not work this out. Please try again in other words.", openai.FinishReasonStop
	case reason.EndedTokens, reason.EndedMoney:
		return "I had to stop here: this took more than I may use for one answer.", openai.FinishReasonLength
	case reason.EndedDay, reason.EndedSurface:
		if o.Until.IsZero() { // calls in progress hold the remainder
			return "I am busy with other answers just now. Please write again in a moment.", openai.FinishReasonLength
		}
		return "I have reached my limit for today. I can answer again from " + o.Until.Format("2006-01-02 15:04 MST") +
			" on.", openai.FinishReasonLength
	case reason.EndedTime:
		return "I had to stop here: this took longer than I may take for one answer. " +
				"Please try again, or ask for a smaller part of it.",
			openai.FinishReasonStop
	}
	return "I had to stop here before I was done. Please ask for a smaller part of it.", openai.FinishReasonStop
}

// cleanText returns text as it is stored and shown.
func cleanText(text string) string {
	return strings.TrimSpace(postgres.Text(text))
}

func toResult(a answer) executions.Result {
	return executions.Result{Summary: truncate(a.Text, 200), Value: a}
}

// answerOf decodes the answer of an ended turn.
func answerOf(x executions.Execution) (a answer, err error) {
	if len(x.Result) == 0 {
		return a, nil
	}
	if err := json.Unmarshal(x.Result, &a); err != nil {
		return a, fmt.Errorf("read result of execution %s: %w", x.ID, err)
	}
	return a, nil
}

// failure returns the refusal of a refused or unformatted answer; nil for any other.
func (a answer) failure() error {
	switch {
	case a.Refused:
		return quotaError(a)
	case a.Unformed:
		return formatError(a)
	}
	return nil
}

// quotaError converts an answer that a limit replaced to a *Refusal. The thread has its message and this answer.
func quotaError(a answer) error {
	r := &Refusal{
		Status: http.StatusTooManyRequests, Type: "insufficient_quota", Code: "insufficient_quota", Message: a.Text,
		stored: true,
	}
	if !a.Until.IsZero() {
		r.RetryAfter = max(time.Until(a.Until), time.Second)
	}
	return r
}

// formatError is the refusal for an answer that is not in the requested format. The thread has the reason.
func formatError(a answer) error {
	return &Refusal{
		Status: http.StatusBadGateway, Type: "server_error", Code: "answer_not_in_format", Message: a.Text,
		stored: true,
	}
}
