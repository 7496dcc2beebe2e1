package executions

import (
	"encoding/json"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// maxShown is how many bytes of one value of a row are shown.
const maxShown = 64 << 10

// Redacted is the execution as it may be shown: without secrets, each value at most 64 KiB. The row keeps
// them whole, because a replay needs what was there, so whatever prints an execution prints this.
func (x Execution) Redacted() Execution {
	for _, value := range []*json.RawMessage{&x.Input, &x.Variables, &x.WaitingData, &x.Result} {
		*value = shown(*value)
	}
	x.ResultSummary = redact.Text(x.ResultSummary, maxShown)
	for _, text := range []**string{&x.WaitingKey, &x.ErrorMessage, &x.FailedStep, &x.CancelReason, &x.DedupeKey} {
		if *text != nil {
			*text = new(redact.Text(**text, maxShown))
		}
	}
	return x
}

// Redacted is the checkpoint as it may be shown; see [Execution.Redacted].
func (c Checkpoint) Redacted() Checkpoint {
	c.Step = redact.Text(c.Step, maxShown)
	c.Output = shown(c.Output)
	return c
}

// shown is a value without secrets; one that is not there stays so.
func shown(value json.RawMessage) json.RawMessage {
	if value == nil {
		return nil
	}
	return redact.JSON(value, maxShown)
}
