package reason

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/skills"
)

// maxName is how much of a tool's name that does not exist is repeated, in letters.
const maxName = 100

// invalid refuses a call whose arguments are wrong.
func (w *turn) invalid(ctx context.Context, c *call, id string, bad error) error {
	schema := "{}"
	if params, ok := errors.AsType[*skills.InvalidParams](bad); ok {
		schema = string(params.Schema)
	}
	c.result = `{"error":"INVALID_PARAMS"}`
	c.correction = fmt.Sprintf("Tool call failed: INVALID_PARAMS. Schema: %s Errors: %s", schema, bad)
	return w.refuse(ctx, c, id, classInvalid, bad.Error())
}

// refuse leaves a row of a call that was not made. Its class keeps it out of the skill's failures.
func (w *turn) refuse(ctx context.Context, c *call, id, class, why string) error {
	name := shown(c.name)
	_, err := executions.Do(ctx, "refuse", executions.Call{
		Entry:      activity.Entry{Skill: name, SkillID: id, Purpose: w.Purpose, Input: attempt(name, c.args)},
		Idempotent: true,
	}, func(ctx context.Context, effect *executions.Effect) (struct{}, error) {
		w.begin(c)
		w.log().WarnContext(ctx, "tool call refused", "tool", name, "class", class, "arguments", string(c.args))
		if class == classDenied {
			effect.Status = activity.Skipped
		}
		return struct{}{}, &executions.StepError{Class: class, Message: why}
	})
	if failure, ok := errors.AsType[*executions.StepError](err); ok {
		w.ended(c, failure)
		return nil
	}
	return err
}

// stall ends a turn whose model does not find back, and leaves the evidence.
func (w *turn) stall(ctx context.Context, calls []*call, why, details string) error {
	w.outcome.Ended, w.why = Stalled, why
	return w.noteStall(ctx, calls, details)
}

// noteStall leaves the evidence of a model that comes to no answer.
func (w *turn) noteStall(ctx context.Context, calls []*call, details string) error {
	attempts := make([]map[string]any, len(calls))
	for i, c := range calls {
		attempts[i] = attempt(c.name, c.args)
	}
	last := models.Shown(w.messages[max(0, len(w.messages)-6):])
	_, err := executions.Do(ctx, "stall", executions.Call{
		Entry: activity.Entry{
			Skill: "reasoning", Purpose: w.Purpose,
			Input: map[string]any{"attempts": attempts, "context": last, "done": w.outcome.Calls},
		},
		Idempotent: true,
	}, func(ctx context.Context, _ *executions.Effect) (struct{}, error) {
		w.log().ErrorContext(ctx, "reasoning stalled", "purpose", w.Purpose, "attempts", brief(attempts),
			"last_calls", strings.Join(w.outcome.Calls[max(0, len(w.outcome.Calls)-10):], ", "))
		return struct{}{}, &executions.StepError{Class: "stall", Message: details + "; " + w.summary()}
	})
	if _, ok := errors.AsType[*executions.StepError](err); ok {
		return nil
	}
	return err
}

// shown makes a name that a model made up fit a message and a row.
func shown(name string) string {
	name = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return -1
		}
		return r
	}, strings.ToValidUTF8(name, ""))
	if letters := []rune(name); len(letters) > maxName {
		name = string(letters[:maxName]) + "…"
	}
	return name
}

// brief is what a log line says of attempts; the whole is in the activity row.
func brief(attempts []map[string]any) []string {
	const most = 200 // bytes of arguments
	lines := make([]string, len(attempts))
	for i, a := range attempts {
		lines[i] = fmt.Sprintf("%s %s", shown(fmt.Sprint(a["tool"])),
			redact.Text(fmt.Sprintf("%s", a["arguments"]), most))
	}
	return lines
}

// attempt shows a call as it came, malformed JSON included.
func attempt(name string, args json.RawMessage) map[string]any {
	if json.Valid(args) {
		return map[string]any{"tool": name, "arguments": args}
	}
	return map[string]any{"tool": name, "arguments": string(args)}
}

// failed is an error as the model gets it.
func failed(e *executions.StepError) string {
	text, err := json.Marshal(map[string]string{"error": e.Class, "message": e.Message})
	if err != nil {
		return `{"error":"error"}`
	}
	return string(text)
}
