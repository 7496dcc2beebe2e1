package heartbeat

import (
	"context"
	"errors"
	"fmt"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// yieldError ends a heartbeat that waited for an admin longer than YieldLimit. It is not a *executions.StepError,
// because the step that waited has no result.
type yieldError struct{}

func (yieldError) Error() string      { return "an admin is still at work" }
func (yieldError) ErrorClass() string { return classYielded }

const classYielded = "yielded"

// isYield recognises a yieldError, also after a phase recorded it.
func isYield(err error) bool {
	var failure *executions.StepError
	return errors.As(err, &yieldError{}) || errors.As(err, &failure) && failure.Class == classYielded
}

// acquireLane acquires the heartbeat's lane, or returns why the heartbeat is skipped. A resumed heartbeat that lost its
// lane waits for it, because a skip would leave half of its work undone.
func (h *Heartbeat) acquireLane(ctx context.Context, lane string) (hold *executions.Hold, skipped string, err error) {
	busy := ""
	switch hold, err = executions.Lane(ctx, lane); {
	case errors.Is(err, lanes.ErrBusy):
		busy = err.Error()
	case err != nil:
		return nil, "", err
	}
	skipped, stepErr := h.blockedBy(ctx, busy)
	if stepErr != nil || skipped != "" {
		return nil, skipped, stepErr
	}
	for errors.Is(err, lanes.ErrBusy) {
		outcome, stepErr := executions.Wait(ctx, "lane", executions.LaneFree(lane, h.YieldLimit))
		switch {
		case stepErr != nil:
			return nil, "", stepErr
		case outcome.TimedOut:
			return nil, err.Error(), nil
		}
		hold, err = executions.Lane(ctx, lane)
	}
	return hold, "", err
}

// blockedBy decides once per heartbeat whether it starts. Another heartbeat or a working admin blocks the start.
func (h *Heartbeat) blockedBy(ctx context.Context, busy string) (string, error) {
	return executions.Step(ctx, "admin at work", func(ctx context.Context) (string, error) {
		if busy != "" {
			return busy, nil
		}
		admin, err := executions.LaneHolder(ctx, OperateLane)
		if err != nil || admin == nil {
			return "", err
		}
		h.Logger.WarnContext(ctx, "lane busy", "lane", admin.Lane, "holder", admin.Holder)
		return fmt.Sprintf("an admin is at work (lane operate is held by %s)", admin.Holder), nil
	})
}

// yieldToAdmin returns a context whose steps first yield to an admin. Phases themselves do not yield: a resumed
// heartbeat must reach the step before which it waited.
func (h *Heartbeat) yieldToAdmin(ctx context.Context) context.Context {
	return executions.Gate(ctx, h.yield)
}

// withoutYield returns a context that does not yield.
func withoutYield(ctx context.Context) context.Context { return executions.Gate(ctx, nil) }

// yield waits while an admin holds the lane operate. The engine calls it before each new step.
func (h *Heartbeat) yield(ctx context.Context) error {
	for {
		admin, err := executions.LaneHolder(ctx, OperateLane)
		if err != nil || admin == nil {
			return err
		}
		outcome, err := executions.Wait(ctx, "yield to operate", executions.LaneFree(OperateLane, h.YieldLimit))
		if err != nil {
			return err
		}
		if outcome.TimedOut {
			return yieldError{}
		}
	}
}

// endEarly ends a heartbeat that waited for an admin longer than YieldLimit. It still saves the notes, which needs no
// model and does not disturb the admin.
func (h *Heartbeat) endEarly(
	ctx context.Context, b *heartbeatRun, at string, summary Summary,
) (executions.Result, error) {
	ctx = withoutYield(ctx)
	started := false
	for _, p := range b.phases() {
		if started = started || p.name == at; !started {
			continue
		}
		summary.Phases[p.name] = "skipped: " + yieldError{}.Error()
		if p.name == at {
			continue // this phase already has a row
		}
		if p.name == "save_memories" && len(b.memories) > 0 {
			result, err := h.runPhase(ctx, b, p)
			if err != nil && !isStepError(err) {
				return executions.Result{}, err
			}
			summary.Phases[p.name] = result.Summary
			continue
		}
		_, err := executions.Phase(ctx, p.name, func(_ context.Context, effect *executions.Effect) (string, error) {
			effect.Status = activity.Skipped
			return yieldError{}.Error(), nil
		})
		if err != nil {
			return executions.Result{}, err
		}
	}
	return executions.Result{Summary: "cut short at " + at + ": " + yieldError{}.Error(), Value: summary}, nil
}
