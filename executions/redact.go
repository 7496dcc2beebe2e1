package executions

import (
	"context"
	"encoding/json"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// maxRedactedBytes bounds each value of a redacted row.
const maxRedactedBytes = 64 << 10

// Redacted returns the execution without secrets and without the conversation texts that ctx hides. It cuts each value
// at 64 KiB. Show users only this form. The row keeps the original values, because a replay needs them.
func (x Execution) Redacted(ctx context.Context) Execution {
	hide := activity.HidesTexts(ctx) && activity.IsConversation(x.Flow, x.Surface, x.ThreadID)
	for _, value := range []*json.RawMessage{&x.Input, &x.Variables, &x.WaitingData, &x.Result} {
		if *value = redactValue(*value); hide {
			*value = activity.HiddenJSON(*value)
		}
	}
	if hide && x.ResultSummary != "" {
		x.ResultSummary = activity.HiddenText
	}
	x.ResultSummary = redact.Text(x.ResultSummary, maxRedactedBytes)
	for _, text := range []**string{&x.WaitingKey, &x.ErrorMessage, &x.FailedStep, &x.CancelReason, &x.DedupeKey} {
		if *text != nil {
			*text = new(redact.Text(**text, maxRedactedBytes))
		}
	}
	return x
}

// Redacted returns the checkpoint without secrets; see [Execution.Redacted]. If ctx hides texts, it hides every output,
// which may be the answer of a model or a memory entry in any execution.
func (c Checkpoint) Redacted(ctx context.Context) Checkpoint {
	c.Step = redact.Text(c.Step, maxRedactedBytes)
	if c.Output = redactValue(c.Output); activity.HidesTexts(ctx) {
		c.Output = activity.HiddenJSON(c.Output)
	}
	return c
}

// redactValue redacts a JSON value; nil stays nil.
func redactValue(value json.RawMessage) json.RawMessage {
	if value == nil {
		return nil
	}
	return redact.JSON(value, maxRedactedBytes)
}
