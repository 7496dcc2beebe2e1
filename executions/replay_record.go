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
	ordered     []Checkpoint // by time of recording
	checkpoints map[string]Checkpoint
	nested      map[string]bool // checkpoints within a step whose own checkpoint replaces them
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
	p := &replayRecord{
		ordered: checkpoints, checkpoints: make(map[string]Checkpoint, len(checkpoints)), nested: map[string]bool{},
		openEnded: x.Status == Cancelled || !x.Status.Ended() || failedByWorkers(x), waitingStep: waitingStep,
		progress: make(chan struct{}), reached: map[string]bool{}, busyLanes: busy,
	}
	for _, c := range checkpoints {
		p.checkpoints[c.Step] = c
	}
	for _, c := range checkpoints {
		p.nested[c.Step] = p.isNested(c.Step)
	}
	return p
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
func (p *replayRecord) isNested(step string) bool {
	for i, char := range step {
		if char != '/' {
			continue
		}
		if _, ok := p.checkpoints[step[:i]]; ok {
			return true
		}
		scope, name := splitKey(step[:i])
		if waited, ok := strings.CutPrefix(name, "before "); ok {
			if _, ok := p.checkpoints[scope+waited]; ok {
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
func (p *replayRecord) counts(c Checkpoint) bool { return !isLaneWait(c) }

// wasReached reports a checkpoint that the replay reached, or whose containing step it reached.
func (p *replayRecord) wasReached(c Checkpoint) bool {
	if isLaneWait(c) {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.nested[c.Step] {
		return p.reached[c.Step]
	}
	for i, char := range c.Step {
		if char != '/' {
			continue
		}
		scope, name := splitKey(c.Step[:i])
		if p.reached[c.Step[:i]] || p.reached[scope+strings.TrimPrefix(name, "before ")] {
			return true
		}
	}
	return false
}

// firstUnreached returns the first unreached checkpoint before a moment; ok is false for none. The caller holds p.mu.
func (p *replayRecord) firstUnreached(before time.Time) (c Checkpoint, ok bool) {
	for _, c := range p.ordered {
		if !before.IsZero() && !c.CreatedAt.Before(before) {
			break
		}
		if !p.nested[c.Step] && !p.reached[c.Step] && !isLaneWait(c) {
			return c, true
		}
	}
	return Checkpoint{}, false
}

// reach marks a step as reached; every step calls it. On nil the caller uses the checkpoint; an error ends the run.
func (p *replayRecord) reach(ctx context.Context, r *run, s stepSpec) error {
	checkpoint, recorded := p.checkpoints[s.key]
	scope := s.key[:strings.LastIndex(s.key, s.name)]
	waitCtx := r.ctx // a recorded step waits for its turn, even if its own context ends
	if !recorded {
		p.reachNested(s.key)
		waitCtx = ctx
	}
	for {
		p.mu.Lock()
		if p.divergence != nil || p.endedAt != "" {
			p.mu.Unlock()
			return ErrParked
		}
		earlier, wait := p.firstUnreached(checkpoint.CreatedAt)
		if !wait || earlier.Step == s.key {
			p.last = s.key
			if recorded {
				p.reached[s.key] = true
			}
			close(p.progress)
			p.progress = make(chan struct{})
			p.mu.Unlock()
			break
		}
		moved := p.progress
		p.mu.Unlock()
		if sibling, _ := splitKey(earlier.Step); sibling == scope || !awaitProgress(waitCtx, moved) {
			if sibling != scope && waitCtx.Err() != nil {
				return context.Cause(waitCtx) // another branch ended this one
			}
			if recorded {
				return p.stopDiverged(r, s.key, DivergedOrder,
					fmt.Sprintf("the code reaches it before step %q, which was recorded earlier", earlier.Step))
			}
			return p.stopDiverged(r, s.key, DivergedUnrecorded,
				fmt.Sprintf("the record has no such step; it has step %q there", earlier.Step))
		}
	}
	if recorded {
		if checkpoint.Failed && cancelledBySibling(checkpoint) && p.hasOtherBranches(scope) {
			awaitProgress(ctx, nil) // let the other branch cancel this step first
		}
		return nil
	}
	if !p.openEnded && p.hasOtherBranches(scope) && !awaitProgress(ctx, nil) && ctx.Err() != nil {
		return context.Cause(ctx) // another branch ended this one, as recorded
	}
	if err := p.awaitWaitingBranch(ctx, s.key); err != nil {
		return err
	}
	return p.beyondRecord(r, s.key)
}

// cancelledBySibling reports a step whose context was cancelled, for example by the failure of another branch.
func cancelledBySibling(c Checkpoint) bool {
	var failure StepError
	return json.Unmarshal(c.Output, &failure) == nil && strings.Contains(failure.Message, context.Canceled.Error())
}

// awaitWaitingBranch delays a step without a checkpoint until another branch reaches the wait where the record ends.
// The step was in flight when that wait began.
func (p *replayRecord) awaitWaitingBranch(ctx context.Context, key string) error {
	if !p.openEnded || p.waitingStep == nil {
		return nil
	}
	own, _ := splitKey(key)
	other, _ := splitKey(*p.waitingStep)
	if strings.HasPrefix(own, other) || strings.HasPrefix(other, own) {
		return nil
	}
	for {
		p.mu.Lock()
		ended, moved := p.divergence != nil || p.endedAt != "", p.progress
		p.mu.Unlock()
		if ended {
			return ErrParked
		}
		if !awaitProgress(ctx, moved) {
			return context.Cause(ctx) // nil when no branch progresses any more
		}
	}
}

// hasOtherBranches reports whether steps of other branches were reached.
func (p *replayRecord) hasOtherBranches(scope string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for step := range p.reached {
		other, _ := splitKey(step)
		if !strings.HasPrefix(other, scope) && !strings.HasPrefix(scope, other) {
			return true
		}
	}
	return false
}

// beyondRecord handles a step without a checkpoint: the record ends there, or the step is new.
func (p *replayRecord) beyondRecord(r *run, key string) error {
	if !p.openEnded || p.waitingStep != nil && *p.waitingStep != key &&
		!strings.HasPrefix(*p.waitingStep, gatePrefix(key)) &&
		!strings.HasPrefix(*p.waitingStep, key+"/") {
		return p.stopDiverged(r, key, DivergedUnrecorded, "the record has no such step; the code is different")
	}
	p.mu.Lock()
	p.endedAt = cmp.Or(p.endedAt, key)
	p.mu.Unlock()
	r.stop(ErrParked)
	return ErrParked
}

// gatePrefix is the key prefix of waits in the gate of a step; see Gate.
func gatePrefix(key string) string {
	scope, name := splitKey(key)
	return scope + "before " + name + "/"
}

// awaitProgress waits until any step is reached.
func awaitProgress(ctx context.Context, moved <-chan struct{}) bool {
	timer := time.NewTimer(replayTimeout)
	defer timer.Stop()
	select {
	case <-moved:
		return true
	case <-timer.C:
	case <-ctx.Done():
		select {
		case <-moved: // progress came before the end of ctx
			return true
		default:
		}
	}
	return false
}

func (p *replayRecord) stopDiverged(r *run, step, kind, message string) error {
	p.diverge(step, kind, message)
	r.stop(ErrParked)
	return ErrParked
}

// diverge stores the first difference.
func (p *replayRecord) diverge(step, kind, message string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.divergence == nil {
		p.divergence = &Divergence{Step: step, Kind: kind, Message: message}
	}
}

// divergeUnreached reports whether the replay left a checkpoint unreached, and stores that as the difference.
func (p *replayRecord) divergeUnreached(why string) bool {
	p.mu.Lock()
	c, ok := p.firstUnreached(time.Time{})
	p.mu.Unlock()
	if ok {
		p.diverge(c.Step, DivergedUnreached, "the code ends before this recorded step"+errorSuffix(why))
	}
	return ok
}

// answerLane answers a lane request: granted without an effect, or busy.
func (p *replayRecord) answerLane(ctx context.Context, r *run, name string) (*Hold, error) {
	p.mu.Lock()
	busy := len(p.laneAnswers) < len(p.busyLanes) && p.busyLanes[len(p.laneAnswers)]
	p.laneAnswers = append(p.laneAnswers, busy)
	p.mu.Unlock()
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
func (p *replayRecord) isUnderWay(s stepSpec) bool {
	if _, ok := p.checkpoints[s.key]; ok || s.entry != nil && s.entry.Kind != activity.KindPhase {
		return false
	}
	within := s.key + "/"
	if p.waitingStep != nil && strings.HasPrefix(*p.waitingStep, within) {
		return true
	}
	for _, c := range p.ordered {
		if strings.HasPrefix(c.Step, within) {
			return true
		}
	}
	return false
}

// reachNested marks the checkpoints within a skipped step as reached.
func (p *replayRecord) reachNested(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.ordered {
		if strings.HasPrefix(c.Step, key+"/") {
			p.reached[c.Step] = true
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
