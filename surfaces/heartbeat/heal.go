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
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
)

// selfHeal takes failing skills out of service. What it finds, and the row of each healed skill, are one
// transaction, so that a crash cannot lose the evidence.
func (b *beat) selfHeal(ctx context.Context) (done, error) {
	fresh := false
	report, err := executions.StepTx(ctx, "heal", func(ctx context.Context, tx pgx.Tx) (selfheal.Report, error) {
		fresh = true
		report, err := selfheal.Run(ctx, tx, b.Heal)
		if err != nil {
			return report, err
		}
		return report, noteHealed(ctx, tx, report)
	})
	if err != nil {
		return done{}, err
	}
	said := done{Report: report.Prompt(), Summary: fmt.Sprintf("%d skills checked", report.Checked)}
	if fresh {
		b.Logger.InfoContext(ctx, "healing report", "checked", report.Checked, "disabled", len(report.Healed), "report", said.Report)
	}
	if n := len(report.Healed); n > 0 {
		said.Summary = fmt.Sprintf("%d of %d skills taken out of service", n, report.Checked)
	}
	return said, nil
}

// noteHealed leaves a row for each skill that was disabled.
func noteHealed(ctx context.Context, tx pgx.Tx, report selfheal.Report) error {
	current, _ := executions.Current(ctx)
	for _, healed := range report.Healed {
		_, err := activity.Note(ctx, tx, activity.Entry{
			Skill: "heal_skill", Claim: current.Claim, Input: map[string]any{"skill": healed.Skill},
		}, activity.Outcome{Output: healed})
		if err != nil {
			return err
		}
	}
	return nil
}

// followThrough does what was approved since the last heartbeat.
func (b *beat) followThrough(ctx context.Context) (done, error) {
	granted, err := executions.Step(ctx, "granted", func(ctx context.Context) ([]approvals.Approval, error) {
		return approvals.Approved(ctx, b.Pool, 20)
	})
	if err != nil {
		return done{}, err
	}
	if len(granted) == 0 {
		return done{Idle: true, Summary: "nothing was approved"}, nil
	}
	ran := 0
	for _, grant := range granted {
		err := b.useGrant(ctx, grant)
		if err != nil && !isResult(err) {
			return done{}, err
		}
		if err == nil {
			ran++
		}
	}
	return done{Summary: fmt.Sprintf("%d of %d approved calls made", ran, len(granted))}, nil
}

// useGrant makes one approved call. The grant is consumed with the call's intent.
func (b *beat) useGrant(ctx context.Context, grant approvals.Approval) error {
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
	_, err = b.Loop.Invoke(ctx, step, skill, grant.Arguments, executions.Call{
		Entry: activity.Entry{Purpose: "follow_through"}, Also: approvals.Use(grant.ID, current.ID, step),
	})
	if approvals.IsUsed(err) {
		return &executions.StepError{Class: "refused", Message: "approval " + grant.ID + " was used by somebody else, or has expired"}
	}
	if err != nil && !isResult(err) {
		return err
	}
	failure := ""
	if err != nil {
		failure = err.Error()
	}
	_, unsettled := executions.StepTx(ctx, "settle "+grant.ID, func(ctx context.Context, tx pgx.Tx) (struct{}, error) {
		return struct{}{}, automations.Settle(ctx, tx, grant.ID, failure)
	})
	return cmp.Or(unsettled, err)
}
