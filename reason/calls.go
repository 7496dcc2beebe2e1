package reason

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Classes of calls that were not made: the skill is out of service; the arguments are wrong; an admin did not
// allow it.
const (
	classDisabled = "disabled"
	classInvalid  = "invalid_params"
	classDenied   = "denied"
)

// perform makes one call, or sets it aside when it needs leave. It fills in what the model is told, and the
// correction that follows when the call was refused; an error only when the turn cannot go on.
func (w *turn) perform(ctx context.Context, c *call) error {
	for _, t := range w.Tools {
		if t.Name == c.name {
			return w.performTool(ctx, c, t)
		}
	}
	for _, s := range w.skills {
		if s.Name == c.name {
			return w.performSkill(ctx, c, s)
		}
	}
	name := shown(c.name)
	text := fmt.Sprintf("Tool '%s' does not exist. Available tools: %s. Please use one of these.", name,
		strings.Join(w.names(), ", "))
	if near := nearest.To(name, w.names()); near != "" {
		text += fmt.Sprintf(" Did you mean '%s'?", near)
	}
	if w.more > 0 {
		text += " More tools are found with 'skill_search'."
	}
	c.result, c.correction = `{"error":"UNKNOWN_TOOL"}`, text
	return w.refuse(ctx, c, "", "unknown_tool", text)
}

// performTool calls a part of the runtime.
func (w *turn) performTool(ctx context.Context, c *call, t Tool) error {
	if bad := w.Skills.Check(t.asSkill(), c.args); bad != nil {
		return w.invalid(ctx, c, "", bad)
	}
	first, err := w.news(ctx, "begin "+t.Name)
	if err != nil {
		return err
	}
	if first {
		w.begin(c)
	}
	value, err := t.Do(ctx, c.args)
	var failure *executions.StepError
	switch {
	case errors.As(err, &failure) && failure.Class == classInvalid: // what the schema cannot say
		return w.invalid(ctx, c, "", &skills.InvalidParams{
			Skill: t.Name, Schema: t.schema(), Violations: []skills.Violation{{Message: failure.Message}},
		})
	case errors.As(err, &failure):
		c.result = w.bound(failed(failure))
	case err != nil:
		return err
	default:
		c.result = w.told(value)
		w.outcome.Calls = append(w.outcome.Calls, t.Name)
	}
	return w.endTool(ctx, c, t, failure)
}

// endTool shows how a part of the runtime went. It may have begun in another process, before a wait.
func (w *turn) endTool(ctx context.Context, c *call, t Tool, failure *executions.StepError) error {
	first, err := w.news(ctx, "end "+t.Name)
	if err != nil {
		return err
	}
	if c.began.IsZero() {
		c.began = time.Now()
	}
	c.live = first
	w.ended(c, failure)
	return nil
}

// told is a tool's result as the model gets it.
func (w *turn) told(value any) string {
	if text, ok := value.(verbatim); ok {
		return string(text)
	}
	return w.bound(encode(value))
}

// performSkill calls a skill, or asks for leave where its trust demands that.
func (w *turn) performSkill(ctx context.Context, c *call, s skills.Skill) error {
	if bad := w.Skills.Check(s, c.args); bad != nil {
		return w.invalid(ctx, c, s.ID, bad)
	}
	if s.Trust == skills.TrustApprove {
		return w.needLeave(ctx, c, s)
	}
	return w.invokeSkill(ctx, c, s, "skill "+s.Name, nil)
}

// invokeSkill makes a call that needs no leave, or has it. The error of the skill is the call's result.
func (w *turn) invokeSkill(
	ctx context.Context, c *call, s skills.Skill, step string, also func(b *pgx.Batch, _ string),
) error {
	about := executions.Call{Entry: activity.Entry{Purpose: w.Purpose}, OnIntent: also}
	value, err := w.invoke(ctx, step, s, c.args, w.seen, about, func() { w.begin(c) })
	var failure *executions.StepError
	switch {
	case errors.As(err, &failure) && failure.Class == builtins.ClassConflict:
		w.outcome.Calls = append(w.outcome.Calls, s.Name+" (conflict)")
		c.result = w.shownFirst(s, value)
	case errors.As(err, &failure):
		w.outcome.Calls = append(w.outcome.Calls, s.Name+" (failed)")
		c.result = w.bound(failed(failure))
	case err != nil:
		return err
	default:
		w.outcome.Calls = append(w.outcome.Calls, s.Name)
		c.result = w.shownFirst(s, value)
		w.seen.Add(builtins.SightsWritten(s, value)...)
	}
	if failure != nil && failure.Class == executions.ClassUnknown { // an earlier process made it
		return w.showOnce(ctx, c, "unknown "+s.Name, string(activity.Error), failure.Message)
	}
	w.ended(c, failure)
	return nil
}

// ended shows how a call went.
func (w *turn) ended(c *call, failure *executions.StepError) {
	if failure != nil {
		w.end(c, string(activity.Error), failure.Message)
		return
	}
	w.end(c, string(activity.Success), "")
}

// Invoke calls a skill as a durable step and tells After how it ended. It is how every surface and automation calls
// one. Errors of the skill are *executions.StepError. A write to the memory is based on the revision that the arguments
// name; it is refused with class builtins.ClassConflict, and the answer, when others have written since.
func (l *Loop) Invoke(
	ctx context.Context, step string, s skills.Skill, args json.RawMessage, call executions.Call,
) (json.RawMessage, error) {
	return l.invoke(ctx, step, s, args, nil, call, func() {})
}

// InvokeSeen is Invoke for a run that keeps what it has read of the memory: a write is based on that.
func (l *Loop) InvokeSeen(
	ctx context.Context, step string, s skills.Skill, args json.RawMessage, seen memory.Seen, call executions.Call,
) (json.RawMessage, error) {
	return l.invoke(ctx, step, s, args, seen, call, func() {})
}

// invoke is Invoke, and begins is called when the call is made in this process.
func (l *Loop) invoke(
	ctx context.Context, step string, s skills.Skill, args json.RawMessage, seen memory.Seen, call executions.Call,
	begins func(),
) (json.RawMessage, error) {
	guarded := builtins.WithRevisions(s, args, seen)
	call.Skill, call.SkillID, call.Input, call.Idempotent = s.Name, s.ID, args, s.Idempotent
	value, err := executions.Do(ctx, step, call, func(
		ctx context.Context, effect *executions.Effect,
	) (json.RawMessage, error) {
		begins()
		if err := l.admit(ctx, s, effect.Key); err != nil {
			return nil, err
		}
		value, err := l.Skills.Invoke(ctx, skills.Call{Skill: s, Args: guarded, IdempotencyKey: effect.Key})
		ended := err
		if busy(err) {
			effect.Status, ended = activity.Skipped, errSkipped
		}
		if misconfigured(err) {
			ended = errSkipped
		}
		if l.After != nil {
			if after := l.After(ctx, s, ended); after != nil {
				l.log().WarnContext(ctx, "skill call not followed up", "skill", s.Name, "error", after)
			}
		}
		if _, conflict := builtins.IsConflict(s, value); conflict {
			effect.Status = activity.Skipped
		}
		return value, classified(err)
	})
	if why, conflict := builtins.IsConflict(s, value); err == nil && conflict {
		err = &executions.StepError{Class: builtins.ClassConflict, Message: why}
	}
	return value, err
}

// errSkipped is how a call ended that decides nothing about its skill.
var errSkipped = errors.New("the call was skipped")

// busy reports a call that did nothing because a lane is held by somebody else.
func busy(err error) bool {
	failed, ok := errors.AsType[*skills.CallError](err)
	return ok && failed.Class == skills.ClassBusy
}

// misconfigured reports a call that this process has no setting for, which says nothing about the skill.
func misconfigured(err error) bool {
	failed, ok := errors.AsType[*skills.CallError](err)
	return ok && failed.Class == skills.ClassConfiguration
}

// admit lets a skill pass that is in service now, and one that is on trial once. The turn chose its tools
// when it began; what was taken out of service since is not called.
func (l *Loop) admit(ctx context.Context, s skills.Skill, owner string) error {
	now, err := executions.RetryTransient(ctx, func(ctx context.Context) (skills.Skill, error) {
		return skills.Get(ctx, l.Pool, s.Name)
	})
	switch {
	case errors.Is(err, skills.ErrNotFound):
		return &executions.StepError{Class: classDisabled, Message: "skill " + s.Name + " no longer exists"}
	case err != nil:
		return err
	case now.Trust == skills.TrustApprove && now.Revision != s.Revision:
		return &executions.StepError{
			Class:   classDisabled,
			Message: "skill " + s.Name + " was changed during this turn and needs leave as it is now",
		}
	case s.Enabled && now.Enabled:
		return nil
	case s.Enabled:
		return &executions.StepError{Class: classDisabled, Message: "skill " + s.Name + " " + now.OutOfService()}
	case now.Enabled || l.Admit == nil:
		return nil
	}
	may, err := l.Admit(ctx, s.Name, owner)
	if err == nil && !may {
		err = &executions.StepError{
			Class: classDisabled, Message: "skill " + s.Name + " is out of service, and its one trial is taken",
		}
	}
	return err
}

// classified gives a skill's failure the class under which it is recorded.
func classified(err error) error {
	var failure *skills.CallError
	var params *skills.InvalidParams
	switch {
	case errors.As(err, &failure):
		return &executions.StepError{Class: failure.Class, Message: failure.Message}
	case errors.As(err, &params):
		return &executions.StepError{Class: classInvalid, Message: params.Error()}
	}
	return err
}

// asSkill lets the registry check a tool's arguments as it does a skill's. It has no id, under which the registry would
// keep the schema for other tools of this name.
func (t Tool) asSkill() skills.Skill {
	definition, err := json.Marshal(map[string]any{"name": t.Name, "parameters": t.schema()})
	if err != nil {
		definition = nil // parameters that are no JSON, see usable
	}
	return skills.Skill{Name: t.Name, ToolDefinition: definition, Handler: "builtin:tool"}
}

// schema is that of the tool's parameters.
func (t Tool) schema() json.RawMessage {
	if len(t.Parameters) == 0 {
		return json.RawMessage(`{"type":"object","additionalProperties":false,"properties":{}}`)
	}
	return t.Parameters
}
