package heartbeat

import (
	"context"
	"errors"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/trace"
)

// maxAutomations is how many runs one heartbeat begins; the rest stay due.
const maxAutomations = 20

// task is one run to be made: an automation's next time, or a run that is ready.
type task struct {
	automations.Automation
	Ready *automations.Run `json:"ready,omitempty"`
}

// runAutomations runs what is scheduled, what is to be tried again, and what an event or signal wants that nobody
// has taken yet.
func (b *beat) runAutomations(ctx context.Context) (done, error) {
	tasks, err := executions.Step(ctx, "due", b.tasks)
	if err != nil {
		return done{}, err
	}
	if len(tasks) == 0 {
		return done{Idle: true, Summary: "no automation is due"}, nil
	}
	var said done
	var words []string
	for _, t := range tasks {
		got, err := b.once(executions.Scope(ctx, t.Name), "automation", func(ctx context.Context) (piece, error) {
			return b.automate(ctx, t)
		})
		if isResult(err) { // it has its own row, and does not hold up the others
			got.Text, err = "failed: "+err.Error(), nil
		}
		words = append(words, t.Name+" "+got.Text)
		said.Summary, said.Memories = "automations: "+strings.Join(words, ", "), append(said.Memories, got.Memories...)
		if err != nil {
			return said, err
		}
	}
	return said, nil
}

// tasks ends what was abandoned and lists what is to be run, what waits already first.
func (b *beat) tasks(ctx context.Context) ([]task, error) {
	if err := runner.SettleAbandoned(ctx, b.Pool, b.Logger); err != nil {
		return nil, err
	}
	var tasks []task
	ready, err := runner.Ready(ctx, b.Pool, b.Logger, maxAutomations)
	if err != nil {
		return nil, err
	}
	for _, t := range ready {
		tasks = append(tasks, task{t.Automation, &t.Run})
	}
	due, err := automations.Due(ctx, b.Pool, max(1, maxAutomations-len(tasks)))
	for _, a := range due {
		tasks = append(tasks, task{a, nil})
	}
	return tasks, err
}

// automate runs one automation while it holds its lane. The run is claimed before it begins: a row that
// only one execution can insert.
func (b *beat) automate(ctx context.Context, t task) (piece, error) {
	hold, err := executions.Lane(ctx, "automation:"+t.ID)
	if errors.Is(err, lanes.ErrBusy) {
		return piece{Text: "is run by somebody else"}, b.passOver(ctx, "run_automation", t.Name, err)
	}
	if err != nil {
		return piece{}, err
	}
	defer func() { _ = hold.Release(ctx) }() // a release that is lost is covered by the lane's end with the execution
	ctx = hold.Context()
	run, err := claim(ctx, t)
	if err != nil {
		return piece{}, b.notClaimed(ctx, t, err)
	}
	if run.ID == "" {
		return piece{Text: "was claimed by somebody else"}, nil
	}
	var noted []memory
	_, err = executions.Phase(ungated(ctx), "run_automation", func(ctx context.Context, effect *executions.Effect) (string, error) {
		return b.runOnce(b.gated(ctx), t, run, &noted, effect)
	}, executions.Input(map[string]any{"automation": t.Name, "scheduled_for": run.ScheduledFor, "attempt": run.Attempt}))
	return piece{Text: "succeeded", Memories: noted}, err
}

// notClaimed leaves a row of an automation that cannot be claimed, such as one whose schedule somebody broke.
func (b *beat) notClaimed(ctx context.Context, t task, why error) error {
	if !isResult(why) {
		return why
	}
	_, err := executions.Phase(ctx, "run_automation", func(_ context.Context, effect *executions.Effect) (string, error) {
		effect.Output = map[string]string{"automation": t.Name}
		return "", why
	})
	return err
}

// claim takes the run for this execution; a run without id when somebody else has it.
func claim(ctx context.Context, t task) (automations.Run, error) {
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

// runOnce does what an automation is for, records how it went, and returns the run's status.
func (b *beat) runOnce(ctx context.Context, t task, run automations.Run, noted *[]memory, effect *executions.Effect) (string, error) {
	output, failure := runner.Work(ctx, b.Loop, t.Automation, run, reason.Turn{
		System: system("You carry out one scheduled task."), Context: b.context(), Tools: []reason.Tool{remember(noted)},
		BudgetScope: scope(ctx, "run_automations"),
	})
	switch {
	case yielded(failure):
		ctx, effect.Status, failure = ungated(ctx), activity.Skipped, runner.GivenBack{Cause: failure}
	case failure != nil && !isResult(failure):
		return "", failure
	}
	return runner.Finish(ctx, t.Automation, run, output, failure, effect)
}
