package heartbeat

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/selfheal"
)

// selfHeal disables failing skills. One transaction disables them and writes their activities, so a crash cannot lose
// the evidence.
func (b *heartbeatRun) selfHeal(ctx context.Context) (phaseResult, error) {
	fresh := false
	report, err := executions.StepTx(ctx, "heal", func(ctx context.Context, tx pgx.Tx) (selfheal.Report, error) {
		fresh = true
		report, err := selfheal.Run(ctx, tx, b.Heal)
		if err != nil {
			return report, err
		}
		return report, recordHealed(ctx, tx, report)
	})
	if err != nil {
		return phaseResult{}, err
	}
	result := phaseResult{Report: report.Prompt(), Summary: human.Counted(int64(report.Checked), "skill") + " checked"}
	if fresh {
		b.Logger.InfoContext(ctx, "healing report", "checked", report.Checked, "disabled", len(report.Healed),
			"report", result.Report)
	}
	if n := len(report.Healed); n > 0 {
		result.Summary = fmt.Sprintf("%d of %d skills taken out of service", n, report.Checked)
	}
	return result, nil
}

// recordHealed writes an activity for each disabled skill.
func recordHealed(ctx context.Context, tx pgx.Tx, report selfheal.Report) error {
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
