package heartbeat

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// followThrough runs approved calls of the agent, at most 20. The default agent runs those of all agents. The next
// heartbeat runs further ones. Of two heartbeats at the same time, one consumes an approval and makes its call.
func (b *heartbeatRun) followThrough(ctx context.Context) (phaseResult, error) {
	granted, err := executions.Step(ctx, "granted", func(ctx context.Context) ([]approvals.Approval, error) {
		return approvals.Approved(ctx, b.Pool, b.agent, 20)
	})
	if err != nil {
		return phaseResult{}, err
	}
	if len(granted) == 0 {
		return phaseResult{Idle: true, Summary: "nothing was approved"}, nil
	}
	ran := 0
	for _, grant := range granted {
		err := b.runApproved(ctx, grant)
		if err != nil && !isStepError(err) {
			return phaseResult{}, err
		}
		if err == nil {
			ran++
		}
	}
	return phaseResult{Summary: fmt.Sprintf("%d of %d approved calls made", ran, len(granted))}, nil
}

// runApproved makes one approved call as the agent that requested it, whose memory a builtin uses. The transaction that
// records the call's intent consumes the approval.
func (b *heartbeatRun) runApproved(ctx context.Context, grant approvals.Approval) error {
	skill, err := executions.Step(ctx, "skill of "+grant.ID, func(ctx context.Context) (skills.Skill, error) {
		skill, err := skills.Get(ctx, b.Pool, grant.SkillName)
		switch {
		case err != nil:
			return skill, err
		case skill.Revision != grant.SkillRevision:
			return skill, fmt.Errorf("skill %s has changed since it was approved", grant.SkillName)
		case !skill.Enabled:
			return skill, fmt.Errorf("skill %s %s", grant.SkillName, skill.OutOfService())
		}
		return skill, nil
	})
	if err != nil {
		return err
	}
	current, _ := executions.Current(ctx)
	step := "approved " + grant.ID
	_, err = b.Loop.Invoke(trace.As(ctx, grant.Agent), step, skill, grant.Arguments, executions.Call{
		Entry: activity.Entry{Purpose: "follow_through"}, OnIntent: approvals.Use(grant.ID, current.ID, step),
	})
	if approvals.IsUnusable(err) {
		return &executions.StepError{Class: "refused", Message: "approval " + grant.ID +
			" was used elsewhere, or has expired"}
	}
	if err != nil && !isStepError(err) {
		return err
	}
	failure := ""
	if err != nil {
		failure = err.Error()
	}
	_, settleErr := executions.StepTx(ctx, "settle "+grant.ID, func(ctx context.Context, tx pgx.Tx) (struct{}, error) {
		return struct{}{}, automations.Settle(ctx, tx, grant.ID, failure)
	})
	return cmp.Or(settleErr, err)
}
