package executions

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// replayTimeout bounds how long a branch waits for other branches to reach earlier steps. Code that computes for longer
// between two steps looks like changed code.
const replayTimeout = 5 * time.Second

// replayRecord is the record that a replayed run reads instead of the database. A step gets its checkpoint after the
// code has reached all earlier steps. So parallel branches interleave as in the recorded run.
type replayRecord struct {
	checkpointsByTime []Checkpoint
	checkpoints       map[string]Checkpoint // by step
	nested            map[string]bool       // steps within a step that has a checkpoint of its own
	openEnded         bool                  // whether the record ends before the function returns
	waitingStep       *string               // the step in which the execution waits; nil if it does not wait

	mu          sync.Mutex
	progress    chan struct{} // closed when a step is reached
	reached     map[string]bool
	last        string // the last reached step
	endedAt     string // see Replayed.EndedAt
	divergence  *Divergence
	busyLanes   []bool // whether the first, second, … requested lane is busy in this replay
	laneAnswers []bool // the answers to lane requests so far
}

func newReplayRecord(x Execution, checkpoints []Checkpoint, waitingStep *string, busy []bool) *replayRecord {
	rec := &replayRecord{
		checkpointsByTime: checkpoints, checkpoints: make(map[string]Checkpoint, len(checkpoints)), nested: map[string]bool{},
		openEnded: x.Status == Cancelled || !x.Status.Ended() || failedByWorkers(x), waitingStep: waitingStep,
		progress: make(chan struct{}), reached: map[string]bool{}, busyLanes: busy,
	}
	for _, c := range checkpoints {
		rec.checkpoints[c.Step] = c
	}
	for _, c := range checkpoints {
		rec.nested[c.Step] = rec.isNested(c.Step)
	}
	return rec
}

// failedByWorkers reports whether an execution failed because it lost its workers, not because of its code. The errors
// are those of the SQL function lose_agent_claims.
func failedByWorkers(x Execution) bool {
	if x.Status != Failed || x.ErrorMessage == nil {
		return false
	}
	m := *x.ErrorMessage
	return m == "the worker's lease expired" || strings.HasPrefix(m, "no progress within progress_seconds") ||
		strings.HasPrefix(m, "given up after ") && strings.Contains(m, " without a checkpoint between")
}

// isNested reports whether a step is within a step that has a checkpoint too, or is a wait in the gate of such a step.
func (rec *replayRecord) isNested(step string) bool {
	for i, char := range step {
		if char != '/' {
			continue
		}
		if _, ok := rec.checkpoints[step[:i]]; ok {
			return true
		}
		scope, name := splitKey(step[:i])
		if waited, ok := strings.CutPrefix(name, "before "); ok {
			if _, ok := rec.checkpoints[scope+waited]; ok {
				return true
			}
		}
	}
	return false
}

// isLaneWait reports whether a checkpoint is of a wait for a lane. A replay that finds the lane free does not reach it.
func isLaneWait(c Checkpoint) bool {
	var out struct {
		Event string `json:"event"`
	}
	return json.Unmarshal(c.Output, &out) == nil && out.Event == "LANE_FREED"
}

// counts reports whether the digest includes a checkpoint.
func (rec *replayRecord) counts(c Checkpoint) bool { return !isLaneWait(c) }

// wasReached reports whether the replay reached a checkpoint or a step that contains it.
func (rec *replayRecord) wasReached(c Checkpoint) bool {
	if isLaneWait(c) {
		return false
	}
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if !rec.nested[c.Step] {
		return rec.reached[c.Step]
	}
	for i, char := range c.Step {
		if char != '/' {
			continue
		}
		scope, name := splitKey(c.Step[:i])
		if rec.reached[c.Step[:i]] || rec.reached[scope+strings.TrimPrefix(name, "before ")] {
			return true
		}
	}
	return false
}

// firstUnreached returns the first unreached checkpoint before a time; ok is false for none. The caller holds rec.mu.
func (rec *replayRecord) firstUnreached(before time.Time) (c Checkpoint, ok bool) {
	for _, c := range rec.checkpointsByTime {
		if !before.IsZero() && !c.CreatedAt.Before(before) {
			break
		}
		if !rec.nested[c.Step] && !rec.reached[c.Step] && !isLaneWait(c) {
			return c, true
		}
	}
	return Checkpoint{}, false
}

// reach marks a step as reached. Every step calls it. If reach returns nil, the caller uses the checkpoint. An error
// ends the replay.
func (rec *replayRecord) reach(ctx context.Context, r *run, s stepSpec) error {
	checkpoint, recorded := rec.checkpoints[s.key]
	scope := s.key[:strings.LastIndex(s.key, s.name)]
	waitCtx := r.ctx // a recorded step waits for earlier steps even if its own context ends
	if !recorded {
		rec.reachNested(s.key)
		waitCtx = ctx
	}
	for {
		rec.mu.Lock()
		if rec.divergence != nil || rec.endedAt != "" {
			rec.mu.Unlock()
			return ErrParked
		}
		earlier, blocked := rec.firstUnreached(checkpoint.CreatedAt)
		if !blocked || earlier.Step == s.key {
			rec.last = s.key
			if recorded {
				rec.reached[s.key] = true
			}
			close(rec.progress)
			rec.progress = make(chan struct{})
			rec.mu.Unlock()
			break
		}
		progress := rec.progress
		rec.mu.Unlock()
		if sibling, _ := splitKey(earlier.Step); sibling == scope || !awaitProgress(waitCtx, progress) {
			if sibling != scope && waitCtx.Err() != nil {
				return context.Cause(waitCtx) // another branch cancelled this branch
			}
			if recorded {
				return rec.stopDiverged(r, s.key, DivergedOrder,
					fmt.Sprintf("the code reaches it before step %q, which was recorded earlier", earlier.Step))
			}
			return rec.stopDiverged(r, s.key, DivergedUnrecorded,
				fmt.Sprintf("the record has no such step; it has step %q there", earlier.Step))
		}
	}
	if recorded {
		if checkpoint.Failed && cancelledBySibling(checkpoint) && rec.hasOtherBranches(scope) {
			awaitProgress(ctx, nil) // let the other branch cancel this step first
		}
		return nil
	}
	if !rec.openEnded && rec.hasOtherBranches(scope) && !awaitProgress(ctx, nil) && ctx.Err() != nil {
		return context.Cause(ctx) // another branch cancelled this branch, as in the record
	}
	if err := rec.awaitWaitingBranch(ctx, s.key); err != nil {
		return err
	}
	return rec.beyondRecord(r, s.key)
}

// cancelledBySibling reports whether the context of a step was cancelled, for example by the failure of another branch.
func cancelledBySibling(c Checkpoint) bool {
	var failure StepError
	return json.Unmarshal(c.Output, &failure) == nil && strings.Contains(failure.Message, context.Canceled.Error())
}

// awaitWaitingBranch delays a step without a checkpoint until another branch reaches the wait where the record ends.
// Such a step was in flight when that wait began.
func (rec *replayRecord) awaitWaitingBranch(ctx context.Context, key string) error {
	if !rec.openEnded || rec.waitingStep == nil {
		return nil
	}
	own, _ := splitKey(key)
	other, _ := splitKey(*rec.waitingStep)
	if strings.HasPrefix(own, other) || strings.HasPrefix(other, own) {
		return nil
	}
	for {
		rec.mu.Lock()
		ended, progress := rec.divergence != nil || rec.endedAt != "", rec.progress
		rec.mu.Unlock()
		if ended {
			return ErrParked
		}
		if !awaitProgress(ctx, progress) {
			return context.Cause(ctx) // nil after the timeout: no branch progresses any more
		}
	}
}

// hasOtherBranches reports whether the replay reached a step of a branch other than scope.
func (rec *replayRecord) hasOtherBranches(scope string) bool {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	for step := range rec.reached {
		other, _ := splitKey(step)
		if !strings.HasPrefix(other, scope) && !strings.HasPrefix(scope, other) {
			return true
		}
	}
	return false
}

// beyondRecord ends the replay at a step without a checkpoint. Either the record ends there, or the step is new.
func (rec *replayRecord) beyondRecord(r *run, key string) error {
	if !rec.openEnded || rec.waitingStep != nil && *rec.waitingStep != key &&
		!strings.HasPrefix(*rec.waitingStep, gatePrefix(key)) && !strings.HasPrefix(*rec.waitingStep, key+"/") {
		return rec.stopDiverged(r, key, DivergedUnrecorded, "the record has no such step; the code is different")
	}
	rec.mu.Lock()
	rec.endedAt = cmp.Or(rec.endedAt, key)
	rec.mu.Unlock()
	r.stop(ErrParked)
	return ErrParked
}

// awaitProgress waits until progress is closed. It returns false after replayTimeout or the end of ctx.
func awaitProgress(ctx context.Context, progress <-chan struct{}) bool {
	timer := time.NewTimer(replayTimeout)
	defer timer.Stop()
	select {
	case <-progress:
		return true
	case <-timer.C:
	case <-ctx.Done():
		select {
		case <-progress: // both channels were ready
			return true
		default:
		}
	}
	return false
}

// stopDiverged stores a difference and stops the replay.
func (rec *replayRecord) stopDiverged(r *run, step, kind, message string) error {
	rec.diverge(step, kind, message)
	r.stop(ErrParked)
	return ErrParked
}

// diverge stores a difference, unless an earlier one is stored.
func (rec *replayRecord) diverge(step, kind, message string) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.divergence == nil {
		rec.divergence = &Divergence{Step: step, Kind: kind, Message: message}
	}
}

// divergeUnreached reports whether the replay did not reach a checkpoint, and stores that as the difference. reason is
// the error with which the code ended.
func (rec *replayRecord) divergeUnreached(reason string) bool {
	rec.mu.Lock()
	c, ok := rec.firstUnreached(time.Time{})
	rec.mu.Unlock()
	if ok {
		rec.diverge(c.Step, DivergedUnreached, "the code ends before this recorded step"+errorSuffix(reason))
	}
	return ok
}

// answerLane answers a lane request in a replay: with a hold that has no lease, or with lanes.ErrBusy.
func (rec *replayRecord) answerLane(ctx context.Context, r *run, name string) (*Hold, error) {
	rec.mu.Lock()
	busy := len(rec.laneAnswers) < len(rec.busyLanes) && rec.busyLanes[len(rec.laneAnswers)]
	rec.laneAnswers = append(rec.laneAnswers, busy)
	rec.mu.Unlock()
	if busy {
		return nil, fmt.Errorf("acquire lane: lane %s: %w", name, lanes.ErrBusy)
	}
	return &Hold{run: r, ctx: ctx}, nil
}

// replayLoop marks the last snapshot of a loop as reached in a replay.
func (r *run) replayLoop(ctx context.Context, s stepSpec) error {
	if r.replay == nil {
		return nil
	}
	if _, ok := r.replay.checkpoints[s.key]; !ok {
		return nil
	}
	return r.replay.reach(ctx, r, s)
}

// isUnderWay reports whether a step or phase has started but has no checkpoint. The replay calls its function, so inner
// steps are reached. It never makes a Call, because a Call has an effect.
func (rec *replayRecord) isUnderWay(s stepSpec) bool {
	if _, ok := rec.checkpoints[s.key]; ok || s.entry != nil && s.entry.Kind != activity.KindPhase {
		return false
	}
	within := s.key + "/"
	if rec.waitingStep != nil && strings.HasPrefix(*rec.waitingStep, within) {
		return true
	}
	for _, c := range rec.checkpointsByTime {
		if strings.HasPrefix(c.Step, within) {
			return true
		}
	}
	return false
}

// reachNested marks the checkpoints within a skipped step as reached.
func (rec *replayRecord) reachNested(key string) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	for _, c := range rec.checkpointsByTime {
		if strings.HasPrefix(c.Step, key+"/") {
			rec.reached[c.Step] = true
		}
	}
}

// callUnderWay calls the function of an unfinished step. The result of the function is not in the record.
func callUnderWay[T any](
	ctx context.Context, r *run, s stepSpec, fn func(ctx context.Context, effect *Effect) (T, error),
) error {
	_, err := recoverPanic(stepScope(ctx, s), &Effect{Key: r.idempotencyKey(s.key)}, fn)
	if stopErr := r.stopCause(); stopErr != nil {
		return stopErr
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return r.replay.beyondRecord(r, s.key)
}
