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

// replayTimeout bounds how long one branch waits for another to reach an earlier step. The timeout expires only if the
// code differs from the record.
const replayTimeout = 5 * time.Second

// replayRecord is the record that a run gets in place of a database. A step gets its checkpoint after the code has
// reached all earlier steps. So parallel branches interleave as in the recorded run.
type replayRecord struct {
	checkpointsByTime []Checkpoint // by time of recording
	checkpoints       map[string]Checkpoint
	nested            map[string]bool // checkpoints within a step whose own checkpoint replaces them
	// openEnded says that the record ends before the function returned. waitingStep is the step in which the execution
	// waits.
	openEnded   bool
	waitingStep *string

	mu          sync.Mutex
	progress    chan struct{} // closed when a step is reached
	reached     map[string]bool
	last        string
	endedAt     string
	divergence  *Divergence
	busyLanes   []bool // the lane answers to give
	laneAnswers []bool // the lane answers that were given
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

// failedByWorkers reports an execution that failed because of its workers, not its code.
func failedByWorkers(x Execution) bool {
	if x.Status != Failed || x.ErrorMessage == nil {
		return false
	}
	m := *x.ErrorMessage
	return m == "the worker's lease expired" || m == "no progress within progress_seconds" ||
		strings.HasPrefix(m, "given up after ") && strings.HasSuffix(m, " workers were lost without a checkpoint between")
}

// isNested reports a checkpoint within a step that has a checkpoint too, or of a wait before such a step.
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

func splitKey(key string) (scope, name string) {
	i := strings.LastIndexByte(key, '/') + 1
	return key[:i], key[i:]
}

// isLaneWait reports a wait for a lane. A run that finds the lane free never reaches this wait.
func isLaneWait(c Checkpoint) bool {
	var out struct {
		Event string `json:"event"`
	}
	return json.Unmarshal(c.Output, &out) == nil && out.Event == "LANE_FREED"
}

// counts reports a checkpoint that belongs to the digest.
func (rec *replayRecord) counts(c Checkpoint) bool { return !isLaneWait(c) }

// wasReached reports a checkpoint that the replay reached, or whose containing step it reached.
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

// firstUnreached returns the first unreached checkpoint before a moment; ok is false for none. The caller holds p.mu.
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

// reach marks a step as reached; every step calls it. On nil the caller uses the checkpoint; an error ends the run.
func (rec *replayRecord) reach(ctx context.Context, r *run, s stepSpec) error {
	checkpoint, recorded := rec.checkpoints[s.key]
	scope := s.key[:strings.LastIndex(s.key, s.name)]
	waitCtx := r.ctx // a recorded step waits for its turn, even if its own context ends
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
				return context.Cause(waitCtx) // another branch ended this one
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
		return context.Cause(ctx) // another branch ended this one, as recorded
	}
	if err := rec.awaitWaitingBranch(ctx, s.key); err != nil {
		return err
	}
	return rec.beyondRecord(r, s.key)
}

// cancelledBySibling reports a step whose context was cancelled, for example by the failure of another branch.
func cancelledBySibling(c Checkpoint) bool {
	var failure StepError
	return json.Unmarshal(c.Output, &failure) == nil && strings.Contains(failure.Message, context.Canceled.Error())
}

// awaitWaitingBranch delays a step without a checkpoint until another branch reaches the wait where the record ends.
// The step was in flight when that wait began.
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
			return context.Cause(ctx) // nil when no branch progresses any more
		}
	}
}

// hasOtherBranches reports whether steps of other branches were reached.
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

// beyondRecord handles a step without a checkpoint: the record ends there, or the step is new.
func (rec *replayRecord) beyondRecord(r *run, key string) error {
	if !rec.openEnded || rec.waitingStep != nil && *rec.waitingStep != key &&
		!strings.HasPrefix(*rec.waitingStep, gatePrefix(key)) &&
		!strings.HasPrefix(*rec.waitingStep, key+"/") {
		return rec.stopDiverged(r, key, DivergedUnrecorded, "the record has no such step; the code is different")
	}
	rec.mu.Lock()
	rec.endedAt = cmp.Or(rec.endedAt, key)
	rec.mu.Unlock()
	r.stop(ErrParked)
	return ErrParked
}

// gatePrefix is the key prefix of waits in the gate of a step; see Gate.
func gatePrefix(key string) string {
	scope, name := splitKey(key)
	return scope + "before " + name + "/"
}

// awaitProgress waits until any step is reached.
func awaitProgress(ctx context.Context, progress <-chan struct{}) bool {
	timer := time.NewTimer(replayTimeout)
	defer timer.Stop()
	select {
	case <-progress:
		return true
	case <-timer.C:
	case <-ctx.Done():
		select {
		case <-progress: // progress came before the end of ctx
			return true
		default:
		}
	}
	return false
}

func (rec *replayRecord) stopDiverged(r *run, step, kind, message string) error {
	rec.diverge(step, kind, message)
	r.stop(ErrParked)
	return ErrParked
}

// diverge stores the first difference.
func (rec *replayRecord) diverge(step, kind, message string) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if rec.divergence == nil {
		rec.divergence = &Divergence{Step: step, Kind: kind, Message: message}
	}
}

// divergeUnreached reports whether the replay left a checkpoint unreached, and stores that as the difference.
func (rec *replayRecord) divergeUnreached(why string) bool {
	rec.mu.Lock()
	c, ok := rec.firstUnreached(time.Time{})
	rec.mu.Unlock()
	if ok {
		rec.diverge(c.Step, DivergedUnreached, "the code ends before this recorded step"+errorSuffix(why))
	}
	return ok
}

// answerLane answers a lane request: granted without an effect, or busy.
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

// replayLoop reaches a loop's last snapshot in a replay.
func (r *run) replayLoop(ctx context.Context, s stepSpec) error {
	if r.replay == nil {
		return nil
	}
	if _, ok := r.replay.checkpoints[s.key]; !ok {
		return nil
	}
	return r.replay.reach(ctx, r, s)
}

// isUnderWay reports a started step or phase without a checkpoint. The replay calls its function for the inner steps.
// The replay never makes a Call, because a Call is an effect.
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

// callUnderWay calls the function of a step under way. The function's result is beyond the record.
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
