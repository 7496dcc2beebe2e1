package executions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrNotFailed reports a retry of an execution that has not failed.
var ErrNotFailed = errors.New("only a failed, timed out or cancelled execution can be retried")

// Retry forks an execution that failed, timed out or was cancelled. The fork runs the failed part again: the failed
// step (in a phase, the inner step), the wait that timed out, or the start of the failed child. If the code failed
// between steps, the fork runs the last recorded step again. If the execution was cancelled or lost its workers, the
// fork continues after the last checkpoint. The second return value is the first step that runs again.
func (e *Engine) Retry(ctx context.Context, db postgres.Beginner, id string) (Execution, string, error) {
	x, err := Get(ctx, db, id)
	if err != nil {
		return Execution{}, "", fmt.Errorf("retry: %w", err)
	}
	if !x.Status.Ended() || x.Status == Completed {
		return Execution{}, "", fmt.Errorf("retry execution %s, which is %s: %w", x.ID, x.Status, ErrNotFailed)
	}
	checkpoints, err := Checkpoints(ctx, db, x.ID)
	if err != nil {
		return Execution{}, "", err
	}
	from := retryStep(x, checkpoints)
	forked, err := e.Fork(ctx, db, ForkSpec{ID: x.ID, From: from})
	return forked, from, err
}

// retryStep returns the first step that a retry runs again. It is empty if the retry continues after all checkpoints.
func retryStep(x Execution, checkpoints []Checkpoint) string {
	if x.Status == Cancelled || failedByWorkers(x) || len(checkpoints) == 0 {
		return ""
	}
	hasCheckpoint := func(step string) bool {
		for _, c := range checkpoints {
			if c.Step == step {
				return true
			}
		}
		return false
	}
	if x.ErrorMessage != nil {
		if step := findFailedStep(*x.ErrorMessage, "", checkpoints); step != "" {
			return step
		}
	}
	if x.Status == Timeout {
		for _, c := range slices.Backward(checkpoints) {
			if isTimedOutWait(c) {
				return c.Step
			}
		}
	}
	// The execution failed with ErrChanged: the step did not fail, but its checkpoint contradicts the code.
	if x.FailedStep != nil && x.ErrorMessage != nil && strings.Contains(*x.ErrorMessage, ErrChanged.Error()) &&
		hasCheckpoint(*x.FailedStep) {
		return *x.FailedStep
	}
	last := checkpoints[len(checkpoints)-1]
	if start, ok := strings.CutSuffix(last.Step, " result"); ok && hasCheckpoint(start) && hasCheckpoint(start+" wait") {
		return start // the flow returned the child's failure: start a new child
	}
	return last.Step
}

// findFailedStep finds the earliest failed checkpoint with a key prefix whose message is part of an error message. For
// a step with inner steps, it finds the inner step. It removes each found message from the error message, so each
// occurrence of a message matches one checkpoint.
func findFailedStep(message, within string, checkpoints []Checkpoint) (step string) {
	rest, found := message, ""
	for _, c := range slices.Backward(checkpoints) {
		if !c.Failed || !strings.HasPrefix(c.Step, within) {
			continue
		}
		var failure StepError
		if err := json.Unmarshal(c.Output, &failure); err != nil || failure.Message == "" {
			continue
		}
		if before, after, ok := strings.Cut(rest, failure.Message); ok {
			rest, step, found = before+after, c.Step, failure.Message
		}
	}
	if step == "" {
		return ""
	}
	if inner := findFailedStep(found, step+"/", checkpoints); inner != "" {
		return inner
	}
	return step
}

// isTimedOutWait reports whether a checkpoint has the outcome of a wait that timed out. A checkpoint does not store its
// kind of step, so a result of a step with the same members counts too.
func isTimedOutWait(c Checkpoint) bool {
	var out struct {
		Event    string `json:"event"`
		TimedOut bool   `json:"timed_out"`
	}
	return !c.Failed && json.Unmarshal(c.Output, &out) == nil && out.TimedOut && out.Event != ""
}
