package reason

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/skills"
)

// The model gets advice at the repeatsBeforeAdvice-th equal call in a row. The turn makes at most maxRepeats of them.
const (
	repeatsBeforeAdvice = 3
	maxRepeats          = 5
)

// repeatedResult is the result of a repeated call that the turn did not make.
const repeatedResult = `{"error":"REPEATED"}`

// call is one call of a reply.
type call struct {
	id, name   string
	args       json.RawMessage
	result     string           // the tool reply
	correction string           // system message about a refused call
	advice     string           // system message about a repeated call
	approval   *approvalRequest // the awaited approval

	runsHere  bool // made by this process
	startedAt time.Time
}

func newCall(c models.ToolCall) *call {
	args := json.RawMessage(c.Arguments)
	if len(strings.TrimSpace(c.Arguments)) == 0 {
		args = json.RawMessage("{}")
	}
	return &call{id: c.ID, name: c.Name, args: args}
}

// runCalls makes the calls of one reply: calls without an approval first, then each other call after its decision. If
// no error ends the turn, the transcript gets one tool reply for each call, in the reply's order, and then corrections.
func (w *turn) runCalls(ctx context.Context, toolCalls []models.ToolCall) error {
	calls := make([]*call, len(toolCalls))
	w.lastCalls = calls
	for i := range toolCalls {
		c := newCall(toolCalls[i])
		calls[i] = c
		if w.countRepeat(c) {
			c.result = repeatedResult
			continue
		}
		if err := w.runCall(ctx, c); err != nil {
			return err
		}
	}
	if err := w.awaitApprovals(ctx, calls); err != nil {
		return err
	}
	valid := w.appendResults(calls)
	switch {
	case w.repeats >= maxRepeats:
		return w.endStalled(ctx, calls, "the model made the same call again and again",
			fmt.Sprintf("the model called %s with the same arguments %d times in a row",
				displayName(calls[len(calls)-1].name), w.repeats))
	case valid:
		w.invalidReplies = 0
		return nil
	}
	if w.invalidReplies++; w.invalidReplies > maxRetries {
		return w.endStalled(ctx, calls, "the model kept calling tools wrongly",
			fmt.Sprintf("the model called tools wrongly %d times in a row", w.invalidReplies))
	}
	return nil
}

// appendResults appends the results to the transcript. It reports whether a call was valid.
func (w *turn) appendResults(calls []*call) (valid bool) {
	var hints []string
	for _, c := range calls {
		w.messages = append(w.messages, models.Message{
			Role: models.RoleTool, ToolCallID: c.id, Name: c.name, Content: c.result,
		})
		w.newCount++
		valid = valid || c.correction == ""
		if w.Sandbox != nil {
			w.Sandbox.OnCall(w.describeRequest(c))
		}
		for _, text := range []string{c.correction, c.advice} {
			if text != "" {
				hints = append(hints, text)
			}
		}
	}
	for _, text := range hints {
		w.addMessage(models.RoleSystem, text)
	}
	return valid
}

// countRepeat counts equal calls in a row. It returns true above the limit.
func (w *turn) countRepeat(c *call) bool {
	key := c.name + " " + canonicalArgs(c.args)
	if key != w.lastCall {
		w.lastCall, w.repeats = key, 0
	}
	w.repeats++
	if w.repeats == repeatsBeforeAdvice {
		c.advice = fmt.Sprintf("You have called '%s' with the same arguments %d times in a row. "+
			"Use the result you have, call something else, or answer.", displayName(c.name), w.repeats)
	}
	return w.repeats > maxRepeats
}

// canonicalArgs returns equal texts for equivalent arguments.
func canonicalArgs(args json.RawMessage) string {
	if text, err := encodeCanonical(args); err == nil {
		return text
	}
	return string(args)
}

// Classes of refused calls: a disabled skill, invalid arguments, a denied approval.
const (
	classDisabled = "disabled"
	classInvalid  = "invalid_params"
	classDenied   = "denied"
)

// runCall makes one call, or requests its approval. It sets the result, and the correction of a refused call. An error
// ends the turn.
func (w *turn) runCall(ctx context.Context, c *call) error {
	for _, t := range w.Tools {
		if t.Name == c.name {
			return w.runTool(ctx, c, t)
		}
	}
	for _, s := range w.skills {
		if s.Name == c.name {
			return w.runSkill(ctx, c, s)
		}
	}
	name := displayName(c.name)
	text := fmt.Sprintf("Tool '%s' does not exist. Available tools: %s. Please use one of these.", name,
		strings.Join(w.names(), ", "))
	if near := nearest.To(name, w.names()); near != "" {
		text += fmt.Sprintf(" Did you mean '%s'?", near)
	}
	if w.searchableCount > 0 {
		text += " More tools are found with 'skill_search'."
	}
	c.result, c.correction = `{"error":"UNKNOWN_TOOL"}`, text
	return w.recordRefusal(ctx, c, "", "unknown_tool", text)
}

// runTool calls a tool of the runtime.
func (w *turn) runTool(ctx context.Context, c *call, t Tool) error {
	if bad := w.Skills.Check(t.asSkill(), c.args); bad != nil {
		return w.refuseInvalid(ctx, c, "", bad)
	}
	first, err := w.firstTime(ctx, "begin "+t.Name)
	if err != nil {
		return err
	}
	if first {
		w.reportStart(c)
	}
	value, err := t.Do(ctx, c.args)
	var failure *executions.StepError
	switch {
	case errors.As(err, &failure) && failure.Class == classInvalid: // beyond the schema
		return w.refuseInvalid(ctx, c, "", &skills.InvalidParams{
			Skill: t.Name, Schema: t.schema(), Violations: []skills.Violation{{Message: failure.Message}},
		})
	case errors.As(err, &failure):
		c.result = w.limitResult(errorResult(failure))
	case err != nil:
		return err
	default:
		c.result = w.resultText(value)
		w.outcome.Calls = append(w.outcome.Calls, t.Name)
	}
	return w.endTool(ctx, c, t, failure)
}

// endTool reports the end of a tool that may have started in another process.
func (w *turn) endTool(ctx context.Context, c *call, t Tool, failure *executions.StepError) error {
	first, err := w.firstTime(ctx, "end "+t.Name)
	if err != nil {
		return err
	}
	if c.startedAt.IsZero() {
		c.startedAt = time.Now()
	}
	c.runsHere = first
	w.reportOutcome(c, failure)
	return nil
}

// resultText returns a tool's result for the model.
func (w *turn) resultText(value any) string {
	if text, ok := value.(verbatim); ok {
		return string(text)
	}
	return w.limitResult(encode(value))
}

// runSkill calls a skill, or requests an approval if its trust demands one.
func (w *turn) runSkill(ctx context.Context, c *call, s skills.Skill) error {
	if bad := w.Skills.Check(s, c.args); bad != nil {
		return w.refuseInvalid(ctx, c, s.ID, bad)
	}
	if s.Trust == skills.TrustApprove {
		return w.requireApproval(ctx, c, s)
	}
	return w.invokeSkill(ctx, c, s, "skill "+s.Name, nil)
}

// invokeSkill calls a skill that needs no further approval. The error of the skill is the result.
func (w *turn) invokeSkill(
	ctx context.Context, c *call, s skills.Skill, step string, onIntent func(b *pgx.Batch, _ string),
) error {
	opts := executions.Call{Entry: activity.Entry{Purpose: w.Purpose}, OnIntent: onIntent}
	value, err := w.invoke(ctx, step, s, c.args, w.seen, opts, func() { w.reportStart(c) })
	if w.Sandbox != nil && !executions.IsControl(err) {
		w.Sandbox.OnResult(s.Name, c.args, value)
	}
	var failure *executions.StepError
	switch {
	case errors.As(err, &failure) && failure.Class == builtins.ClassConflict:
		w.outcome.Calls = append(w.outcome.Calls, s.Name+" (conflict)")
		c.result = w.shownAnswer(s, value)
	case errors.As(err, &failure):
		w.outcome.Calls = append(w.outcome.Calls, s.Name+" (failed)")
		c.result = w.limitResult(errorResult(failure))
	case err != nil:
		return err
	default:
		w.outcome.Calls = append(w.outcome.Calls, s.Name)
		c.result = w.shownAnswer(s, value)
		w.seen.Add(builtins.SightsWritten(s, value)...)
	}
	if failure != nil && failure.Class == executions.ClassUnknown { // an earlier process made the call
		return w.notifyOnce(ctx, c, "unknown "+s.Name, string(activity.Error), failure.Message)
	}
	w.reportOutcome(c, failure)
	return nil
}

// reportOutcome reports the outcome of a call.
func (w *turn) reportOutcome(c *call, failure *executions.StepError) {
	if failure != nil {
		w.reportEnd(c, string(activity.Error), failure.Message)
		return
	}
	w.reportEnd(c, string(activity.Success), "")
}

// asSkill lets the registry check a tool's arguments. The skill has no id, so the registry does not cache the schema.
func (t Tool) asSkill() skills.Skill {
	definition, err := json.Marshal(map[string]any{"name": t.Name, "parameters": t.schema()})
	if err != nil {
		definition = nil // invalid JSON, see validateTool
	}
	return skills.Skill{Name: t.Name, ToolDefinition: definition, Handler: "builtin:tool"}
}

// schema returns the schema of the parameters.
func (t Tool) schema() json.RawMessage {
	if len(t.Parameters) == 0 {
		return json.RawMessage(`{"type":"object","additionalProperties":false,"properties":{}}`)
	}
	return t.Parameters
}

// maxName bounds the quoted name of an unknown tool, in characters.
const maxName = 100

// refuseInvalid refuses a call with invalid arguments.
func (w *turn) refuseInvalid(ctx context.Context, c *call, id string, err error) error {
	schema := "{}"
	if params, ok := errors.AsType[*skills.InvalidParams](err); ok {
		schema = string(params.Schema)
	}
	c.result = `{"error":"INVALID_PARAMS"}`
	c.correction = fmt.Sprintf("Tool call failed: INVALID_PARAMS. Schema: %s Errors: %s", schema, err)
	return w.recordRefusal(ctx, c, id, classInvalid, err.Error())
}

// recordRefusal records the activity of a refused call. Its class does not count as a failure of the skill.
func (w *turn) recordRefusal(ctx context.Context, c *call, id, class, reason string) error {
	name := displayName(c.name)
	_, err := executions.Do(ctx, "refuse", executions.Call{
		Entry:      activity.Entry{Skill: name, SkillID: id, Purpose: w.Purpose, Input: describeCall(name, c.args)},
		Idempotent: true,
	}, func(ctx context.Context, effect *executions.Effect) (struct{}, error) {
		w.reportStart(c)
		w.log().WarnContext(ctx, "tool call refused", "tool", name, "class", class, "arguments", string(c.args))
		if class == classDenied {
			effect.Status = activity.Skipped
		}
		return struct{}{}, &executions.StepError{Class: class, Message: reason}
	})
	if failure, ok := errors.AsType[*executions.StepError](err); ok {
		status := string(activity.Error)
		if class == classDenied {
			status = classDenied
		}
		w.reportEnd(c, status, failure.Message)
		return nil
	}
	return err
}

// endStalled ends the turn as stalled.
func (w *turn) endStalled(ctx context.Context, calls []*call, reason, details string) error {
	w.outcome.Ended, w.stopReason = Stalled, reason
	return w.recordStall(ctx, calls, details)
}

// recordStall records the activity of a stall.
func (w *turn) recordStall(ctx context.Context, calls []*call, details string) error {
	attempts := make([]map[string]any, len(calls))
	for i, c := range calls {
		attempts[i] = describeCall(c.name, c.args)
	}
	last := models.Shown(w.messages[max(0, len(w.messages)-6):])
	_, err := executions.Do(ctx, "stall", executions.Call{
		Entry: activity.Entry{
			Skill: "reasoning", Purpose: w.Purpose,
			Input: map[string]any{"attempts": attempts, "context": last, "done": w.outcome.Calls},
		},
		Idempotent: true,
	}, func(ctx context.Context, _ *executions.Effect) (struct{}, error) {
		w.log().ErrorContext(ctx, "reasoning stalled", "purpose", w.Purpose, "attempts", summarizeAttempts(attempts),
			"last_calls", strings.Join(w.outcome.Calls[max(0, len(w.outcome.Calls)-10):], ", "))
		return struct{}{}, &executions.StepError{Class: "stall", Message: details + "; " + w.summary()}
	})
	if _, ok := errors.AsType[*executions.StepError](err); ok {
		return nil
	}
	return err
}

// displayName makes a model's tool name safe to store and show.
func displayName(name string) string {
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

// summarizeAttempts returns cut attempts for a log line; the activity has the whole attempts.
func summarizeAttempts(attempts []map[string]any) []string {
	const maxBytes = 200 // bytes of arguments
	lines := make([]string, len(attempts))
	for i, a := range attempts {
		lines[i] = fmt.Sprintf("%s %s", displayName(fmt.Sprint(a["tool"])),
			redact.Text(fmt.Sprintf("%s", a["arguments"]), maxBytes))
	}
	return lines
}

// describeCall describes a call, which may have invalid JSON.
func describeCall(name string, args json.RawMessage) map[string]any {
	if json.Valid(args) {
		return map[string]any{"tool": name, "arguments": args}
	}
	return map[string]any{"tool": name, "arguments": string(args)}
}

// errorResult returns an error for the model.
func errorResult(e *executions.StepError) string {
	text, err := json.Marshal(map[string]string{"error": e.Class, "message": e.Message})
	if err != nil {
		return `{"error":"error"}`
	}
	return string(text)
}

// encode returns a result for the model. PostgreSQL reorders keys and rewrites numbers in a checkpoint. encode returns
// the same text for both forms, so a replay has the same transcript.
func encode(value any) string {
	text, err := encodeCanonical(value)
	if err != nil {
		return errorResult(&executions.StepError{Class: "error", Message: "the result cannot be shown: " + err.Error()})
	}
	return text
}

// encodeCanonical encodes JSON with sorted keys and plain numbers.
func encodeCanonical(value any) (string, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return "", err
	}
	tree, err := exactjson.Decode(raw)
	if err != nil {
		return "", err
	}
	text, err := exactjson.Encode(exactjson.PlainNumbers(tree))
	return string(text), err
}
