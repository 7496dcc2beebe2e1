package reason

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Invoke calls a skill as a durable step and passes its outcome to AfterCall. Calls outside a turn use it too, so they
// have an activity. Errors of the skill are *executions.StepError. A write to the memory is based on the revision
// in the arguments. The error of a conflict has class builtins.ClassConflict, with the answer.
func (l *Loop) Invoke(
	ctx context.Context, step string, s skills.Skill, args json.RawMessage, call executions.Call,
) (json.RawMessage, error) {
	return l.invoke(ctx, step, s, args, nil, call, func() {})
}

// InvokeSeen is Invoke for a run that tracks its reads of the memory. A write is based on these reads.
func (l *Loop) InvokeSeen(
	ctx context.Context, step string, s skills.Skill, args json.RawMessage, seen memory.Seen, call executions.Call,
) (json.RawMessage, error) {
	return l.invoke(ctx, step, s, args, seen, call, func() {})
}

// invoke is Invoke. It calls onStart when this process makes the call.
func (l *Loop) invoke(
	ctx context.Context, step string, s skills.Skill, args json.RawMessage, seen memory.Seen, call executions.Call,
	onStart func(),
) (json.RawMessage, error) {
	guardedArgs := builtins.WithRevisions(s, args, seen)
	call.Skill, call.SkillID, call.Input, call.Idempotent = s.Name, s.ID, args, s.Idempotent
	value, err := executions.Do(ctx, step, call, func(
		ctx context.Context, effect *executions.Effect,
	) (json.RawMessage, error) {
		onStart()
		if l.Sandbox != nil {
			return l.Sandbox.invoke(ctx, s.Name, guardedArgs)
		}
		if err := l.admit(ctx, s, effect.Key); err != nil {
			return nil, err
		}
		value, err := l.Skills.Invoke(ctx, skills.Call{
			Skill: s, Args: args, Guarded: guardedArgs, IdempotencyKey: effect.Key,
		})
		outcome := err
		if hasClass(err, skills.ClassBusy) {
			effect.Status, outcome = activity.Skipped, errSkipped
		}
		if hasClass(err, skills.ClassConfiguration) {
			outcome = errSkipped
		}
		if l.AfterCall != nil {
			if after := l.AfterCall(ctx, s, outcome); after != nil {
				l.log().WarnContext(ctx, "skill call not followed up", "skill", s.Name, "error", after)
			}
		}
		if _, conflict := builtins.IsConflict(s, value); conflict {
			effect.Status = activity.Skipped
		}
		return value, toStepError(err)
	})
	if why, conflict := builtins.IsConflict(s, value); err == nil && conflict {
		err = &executions.StepError{Class: builtins.ClassConflict, Message: why}
	}
	return value, err
}

// errSkipped is the outcome of a call that says nothing about its skill.
var errSkipped = errors.New("the call was skipped")

// hasClass reports a failed call of a class.
func hasClass(err error, class string) bool {
	callErr, ok := errors.AsType[*skills.CallError](err)
	return ok && callErr.Class == class
}

// stepError returns the error of a step, with a formatted text.
func stepError(class, format string, args ...any) *executions.StepError {
	return &executions.StepError{Class: class, Message: fmt.Sprintf(format, args...)}
}

// admit permits a call of an enabled skill, and what AdmitTrial admits of a skill that was offered on trial. It reads
// the current state, because the turn chose its tools earlier.
func (l *Loop) admit(ctx context.Context, s skills.Skill, owner string) error {
	current, err := executions.RetryTransient(ctx, func(ctx context.Context) (skills.Skill, error) {
		return skills.Get(ctx, l.Pool, s.Name)
	})
	switch {
	case errors.Is(err, skills.ErrNotFound):
		return stepError(classDisabled, "skill %s no longer exists", s.Name)
	case err != nil:
		return err
	case current.Trust == skills.TrustApprove && current.Revision != s.Revision:
		return stepError(classDisabled, "skill %s was changed during this turn, and needs approval as it is now", s.Name)
	case s.Enabled && current.Enabled:
		return nil
	case s.Enabled:
		return stepError(classDisabled, "skill %s %s", s.Name, current.OutOfService())
	case current.Enabled || l.AdmitTrial == nil:
		return nil
	}
	admitted, err := l.AdmitTrial(ctx, s.Name, owner)
	if err == nil && !admitted {
		err = stepError(classDisabled, "skill %s is out of service, and its one trial is taken", s.Name)
	}
	return err
}

// toStepError returns a skill's failure with its class.
func toStepError(err error) error {
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
