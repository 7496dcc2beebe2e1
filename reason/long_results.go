package reason

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/skills"
)

// longResult is a result that the model sees in part. Its text comes from the recorded call, so replays agree.
type longResult struct {
	id         string
	full       string
	shown      string
	shownBytes int          // bytes of full in shown
	seenBytes  int          // leading bytes that the model has seen
	skill      skills.Skill // set once seen
}

// maxResult bounds the shown part of a result, in bytes.
const maxResult = 16 << 10

// resultLimit bounds the shown part of a result, in bytes.
func (w *turn) resultLimit() int { return min(maxResult, max(minKept, w.budget.Context)) }

// limitResult cuts an overlong result, with a marker that explains how to read the rest.
func (w *turn) limitResult(text string) string {
	if len(text) <= w.resultLimit() {
		return text
	}
	return w.addLongResult(text, w.resultLimit())
}

// addLongResult stores a text and returns its beginning.
func (w *turn) addLongResult(text string, keep int) string {
	if len(w.longResults) == 0 {
		w.Tools = append(w.Tools, w.readResult())
	}
	r := &longResult{id: fmt.Sprintf("r%d", len(w.longResults)+1), full: text}
	w.longResults = append(w.longResults, r)
	return r.truncate(keep)
}

// truncate returns the beginning of a result, with its marker.
func (r *longResult) truncate(keep int) string {
	keep = runeStart(r.full, min(keep, len(r.full)))
	r.shownBytes = keep
	r.shown = fmt.Sprintf("%s … (%d of %d bytes shown; for more call read_result with result_id %q and offset %d)",
		r.full[:keep], keep, len(r.full), r.id, keep)
	return r.shown
}

// truncateResult shortens a result in the transcript.
func (w *turn) truncateResult(text string, keep int) string {
	if r := w.findLongResult(func(r *longResult) bool { return r.shown == text }); r != nil {
		return r.truncate(keep)
	}
	return w.addLongResult(text, keep)
}

// readResult returns the tool that reads the rest of a cut result.
func (w *turn) readResult() Tool {
	return Tool{
		Name:        "read_result",
		Description: "Reads the next piece of a result that was cut, from a byte offset on.",
		Parameters: json.RawMessage(`{"type":"object","additionalProperties":false,"required":["result_id","offset"],
			"properties":{"result_id":{"type":"string"},"offset":{"type":"integer","minimum":0}}}`),
		Do: w.readChunk,
	}
}

// verbatim is a result that reaches the model unchanged.
type verbatim string

// readChunk returns a piece of a result. The step records its bounds.
func (w *turn) readChunk(ctx context.Context, args json.RawMessage) (any, error) {
	var params struct {
		ResultID string `json:"result_id"`
		Offset   int    `json:"offset"`
	}
	if err := json.Unmarshal(args, &params); err != nil {
		return nil, &executions.StepError{Class: classInvalid, Message: err.Error()}
	}
	result := w.findLongResult(func(r *longResult) bool { return r.id == params.ResultID })
	if result == nil {
		return nil, stepError(classInvalid, "there is no result %q; the last is r%d", displayName(params.ResultID),
			len(w.longResults))
	}
	full := result.full
	if params.Offset >= len(full) {
		return nil, stepError(classInvalid, "result %s has %d bytes, none at offset %d", params.ResultID, len(full),
			params.Offset)
	}
	from := runeStart(full, params.Offset)
	to := runeStart(full, min(from+w.resultLimit(), len(full)))
	type piece struct {
		From  int `json:"from"`
		To    int `json:"to"`
		Total int `json:"total"`
	}
	_, err := executions.Do(ctx, "read_result", executions.Call{
		Entry: activity.Entry{Skill: "read_result", Purpose: w.Purpose, Input: params}, Idempotent: true,
	}, func(context.Context, *executions.Effect) (piece, error) { return piece{from, to, len(full)}, nil })
	if err != nil {
		return nil, err
	}
	next := "this is the end"
	if to < len(full) {
		next = fmt.Sprintf("go on at offset %d", to)
	}
	text := fmt.Sprintf("(bytes %d to %d of %d of %s; %s)\n%s", from, to, len(full), params.ResultID, next,
		full[from:to])
	if from <= result.seenBytes {
		w.pendingSights = append(w.pendingSights, pendingSight{
			skill: result.skill, text: full, result: result,
			piece: text, end: to,
		})
	}
	return verbatim(text), nil
}

// findLongResult returns the first long result that matches; nil for none.
func (w *turn) findLongResult(matches func(*longResult) bool) *longResult {
	if i := slices.IndexFunc(w.longResults, matches); i >= 0 {
		return w.longResults[i]
	}
	return nil
}

// longResultByText returns the long result of a full text; nil for none.
func (w *turn) longResultByText(text string) *longResult {
	return w.findLongResult(func(r *longResult) bool { return r.full == text })
}

// pendingSight is a skill's answer that the next request shows.
type pendingSight struct {
	skill  skills.Skill
	text   string
	result *longResult // nil if shown whole
	piece  string      // the shown piece of a long result
	end    int         // its end
}

// shownAnswer returns a skill's answer for the next request. The entries in the answer count as read only from then on,
// because the model chose the other calls of the same reply without the answer.
func (w *turn) shownAnswer(s skills.Skill, value json.RawMessage) string {
	a := pendingSight{skill: s, text: encode(value)}
	shown := w.limitResult(a.text)
	a.result = w.findLongResult(func(r *longResult) bool { return r.shown == shown })
	w.pendingSights = append(w.pendingSights, a)
	return shown
}

// recordSights records the memory entries that the trimmed request shows.
func (w *turn) recordSights() {
	for _, a := range w.pendingSights {
		long, upto := a.result, len(a.text)
		if long == nil {
			long = w.longResultByText(a.text) // trimContext cut the answer
		}
		if long != nil {
			long.skill = a.skill
			if a.piece == "" {
				long.seenBytes = max(long.seenBytes, long.shownBytes)
			} else if w.longResultByText(a.piece) == nil && long.seenBytes < a.end { // the request shows the whole piece
				long.seenBytes = a.end
			}
			upto = long.seenBytes
		}
		w.seen.Add(builtins.Sights(a.skill, []byte(a.text), upto)...)
		if a.piece == "" { // a read earlier in the same reply does not undo a write
			w.seen.Add(builtins.SightsWritten(a.skill, []byte(a.text))...)
		}
	}
	w.pendingSights = nil
}
