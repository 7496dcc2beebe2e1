package heartbeat

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/trace"
)

// maxAutomations bounds the runs of one heartbeat; the rest stay due. Of the due schedules one runs in any case.
const maxAutomations = 20

// automationTask is an automation that is due, or a ready run of an automation.
type automationTask struct {
	automations.Automation
	Ready *automations.Run `json:"ready,omitempty"`
}

// runAutomations runs due schedules, retries, and unclaimed runs of events and signals.
func (b *heartbeatRun) runAutomations(ctx context.Context) (phaseResult, error) {
	tasks, err := executions.Step(ctx, "due", b.dueTasks)
	if err != nil {
		return phaseResult{}, err
	}
	if len(tasks) == 0 {
		return phaseResult{Idle: true, Summary: "no automation is due"}, nil
	}
	var result phaseResult
	var texts []string
	for _, t := range tasks {
		item, err := b.runItem(executions.Scope(ctx, t.Name), "automation", func(ctx context.Context) (itemResult, error) {
			return b.runAutomation(ctx, t)
		})
		if isStepError(err) { // the failure has its own row, and the other automations still run
			item.Text, err = "failed: "+err.Error(), nil
		}
		texts = append(texts, t.Name+" "+item.Text)
		result.Summary, result.Memories = "automations: "+strings.Join(texts, ", "), append(result.Memories, item.Memories...)
		if err != nil {
			return result, err
		}
	}
	return result, nil
}

// dueTasks settles abandoned runs and lists the tasks, ready runs first.
func (b *heartbeatRun) dueTasks(ctx context.Context) ([]automationTask, error) {
	if err := runner.SettleAbandoned(ctx, b.Pool, b.Logger); err != nil {
		return nil, err
	}
	var tasks []automationTask
	ready, err := runner.Ready(ctx, b.Pool, b.Logger, maxAutomations)
	if err != nil {
		return nil, err
	}
	for _, t := range ready {
		tasks = append(tasks, automationTask{t.Automation, &t.Run})
	}
	due, err := automations.Due(ctx, b.Pool, time.Time{}, max(1, maxAutomations-len(tasks)))
	for _, a := range due {
		tasks = append(tasks, automationTask{a, nil})
	}
	return tasks, err
}

// runAutomation runs one automation while it holds its lane. It first claims the run: only one execution can insert
// that row.
func (b *heartbeatRun) runAutomation(ctx context.Context, t automationTask) (itemResult, error) {
	hold, err := executions.Lane(ctx, "automation:"+t.ID)
	if busy, is := errors.AsType[*lanes.BusyError](err); is {
		return itemResult{Text: "is run by another execution"}, b.recordBusy(ctx, "run_automation", t.Name, busy)
	}
	if err != nil {
		return itemResult{}, err
	}
	defer func() { _ = hold.Release(ctx) }() // if the release fails, the end of the execution releases the lane
	ctx = hold.Context()
	run, err := claimRun(ctx, t)
	if err != nil {
		return itemResult{}, b.recordUnclaimed(ctx, t, err)
	}
	if run.ID == "" {
		return itemResult{Text: "is run by another execution"}, nil
	}
	var notes []memoryNote
	_, err = executions.Phase(withoutYield(ctx), "run_automation",
		func(ctx context.Context, effect *executions.Effect) (string, error) {
			return b.executeRun(b.yieldToAdmin(ctx), t, run, &notes, effect)
		}, executions.Input(map[string]any{"automation": t.Name, "scheduled_for": run.ScheduledFor, "attempt": run.Attempt}))
	return itemResult{Text: "succeeded", Memories: notes}, err
}

// recordUnclaimed records an automation that cannot be claimed, for example because its schedule is invalid.
func (b *heartbeatRun) recordUnclaimed(ctx context.Context, t automationTask, cause error) error {
	if !isStepError(cause) {
		return cause
	}
	_, err := executions.Phase(ctx, "run_automation", func(_ context.Context, effect *executions.Effect) (string, error) {
		effect.Output = map[string]string{"automation": t.Name}
		return "", cause
	})
	return err
}

// claimRun claims the run for this execution. It returns a run without id if another execution has claimed it.
func claimRun(ctx context.Context, t automationTask) (automations.Run, error) {
	return executions.StepTx(ctx, "claim", func(ctx context.Context, tx pgx.Tx) (automations.Run, error) {
		current, _ := executions.Current(ctx)
		trace := string(trace.IDFrom(ctx))
		var run automations.Run
		var ok bool
		var err error
		if t.Ready != nil {
			run, ok, err = automations.ClaimRun(ctx, tx, t.Ready.ID, t.Ready.Attempt, current.ID, trace)
		} else {
			run, ok, err = automations.Claim(ctx, tx, t.ID, *t.NextRunAt, current.ID, trace)
		}
		if !ok {
			run = automations.Run{}
		}
		return run, err
	})
}

// executeRun runs an automation, records the result, and returns the run's status.
func (b *heartbeatRun) executeRun(
	ctx context.Context, t automationTask, run automations.Run, notes *[]memoryNote, effect *executions.Effect,
) (string, error) {
	output, failure := runner.Work(ctx, b.Loop, t.Automation, run, reason.Turn{
		System: systemPrompt("You carry out one scheduled task."), Context: b.promptContext(),
		Tools:      []reason.Tool{rememberTool(notes)},
		PhaseScope: budgetScope(ctx, "run_automations"), BudgetScope: budgetScope(ctx, "run_automations/"+run.ID),
	})
	switch {
	case isYield(failure):
		ctx, effect.Status, failure = withoutYield(ctx), activity.Skipped, runner.Released{Cause: failure}
	case failure != nil && !isStepError(failure):
		return "", failure
	}
	return runner.Finish(ctx, t.Automation, run, output, failure, effect)
}
