package reason

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/skills"
)

// maxResult is how much of a tool's result the model gets to see at once, in bytes; less in a small context.
const maxResult = 16 << 10

// longResult is a result of which the model sees the beginning. Its text is rebuilt from the record of the call
// that gave it, so it is the same in every run.
type longResult struct {
	id    string
	full  string
	shown string
	kept  int          // bytes that shown has of it
	seen  int          // bytes from the beginning that the model has seen
	skill skills.Skill // whose answer it is, once it was seen
}

// verbatim is a result that the model gets as it is.
type verbatim string

// limit is how much of a result fits, in bytes.
func (w *turn) limit() int { return min(maxResult, max(leastKept, w.budget.Context)) }

// bound cuts what is too long for the model, with a marker that says how to read on.
func (w *turn) bound(text string) string {
	if len(text) <= w.limit() {
		return text
	}
	return w.keepLong(text, w.limit())
}

// keepLong remembers a text and returns its beginning.
func (w *turn) keepLong(text string, keep int) string {
	if len(w.results) == 0 {
		w.Tools = append(w.Tools, w.readResult())
	}
	r := &longResult{id: fmt.Sprintf("r%d", len(w.results)+1), full: text}
	w.results = append(w.results, r)
	return r.cut(keep)
}

// cut shows the beginning of a result.
func (r *longResult) cut(keep int) string {
	keep = runeStart(r.full, min(keep, len(r.full)))
	r.kept = keep
	r.shown = fmt.Sprintf("%s … (%d of %d bytes shown; for more call read_result with result_id %q and offset %d)",
		r.full[:keep], keep, len(r.full), r.id, keep)
	return r.shown
}

// cutAgain makes a result shorter that is in the transcript already.
func (w *turn) cutAgain(text string, keep int) string {
	for _, r := range w.results {
		if r.shown == text {
			return r.cut(keep)
		}
	}
	return w.keepLong(text, keep)
}

// readResult lets the model read on in a result that was cut.
func (w *turn) readResult() Tool {
	return Tool{
		Name:        "read_result",
		Description: "Reads the next piece of a result that was cut, from a byte offset on.",
		Parameters: json.RawMessage(`{"type":"object","additionalProperties":false,"required":["result_id","offset"],
			"properties":{"result_id":{"type":"string"},"offset":{"type":"integer","minimum":0}}}`),
		Do: w.readOn,
	}
}

// readOn returns a piece. Which it was is recorded; its text is that of the recorded call.
func (w *turn) readOn(ctx context.Context, args json.RawMessage) (any, error) {
	var asked struct {
		ResultID string `json:"result_id"`
		Offset   int    `json:"offset"`
	}
	if err := json.Unmarshal(args, &asked); err != nil {
		return nil, &executions.StepError{Class: classInvalid, Message: err.Error()}
	}
	result, known := w.long(asked.ResultID)
	full := ""
	if known {
		full = result.full
	}
	switch {
	case !known:
		return nil, &executions.StepError{
			Class:   classInvalid,
			Message: fmt.Sprintf("there is no result %q; the last is r%d", shown(asked.ResultID), len(w.results)),
		}
	case asked.Offset >= len(full):
		return nil, &executions.StepError{
			Class:   classInvalid,
			Message: fmt.Sprintf("result %s has %d bytes, none at offset %d", asked.ResultID, len(full), asked.Offset),
		}
	}
	from := runeStart(full, asked.Offset)
	to := runeStart(full, min(from+w.limit(), len(full)))
	type piece struct {
		From  int `json:"from"`
		To    int `json:"to"`
		Total int `json:"total"`
	}
	_, err := executions.Do(ctx, "read_result", executions.Call{
		Entry: activity.Entry{Skill: "read_result", Purpose: w.Purpose, Input: asked}, Idempotent: true,
	}, func(context.Context, *executions.Effect) (piece, error) { return piece{from, to, len(full)}, nil })
	if err != nil {
		return nil, err
	}
	next := "this is the end"
	if to < len(full) {
		next = fmt.Sprintf("go on at offset %d", to)
	}
	text := fmt.Sprintf("(bytes %d to %d of %d of %s; %s)\n%s", from, to, len(full), asked.ResultID, next,
		full[from:to])
	if from <= result.seen {
		w.unseen = append(w.unseen, answer{skill: result.skill, text: full, long: result, piece: text, upto: to})
	}
	return verbatim(text), nil
}

func (w *turn) long(id string) (r *longResult, known bool) {
	for _, r := range w.results {
		if r.id == id {
			return r, true
		}
	}
	return nil, false
}
