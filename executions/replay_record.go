package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// replayTimeout is how long a replay waits for a parallel branch to come to what was recorded earlier than the step
// that another branch has come to. It passes only where the code differs from the record.
const replayTimeout = 5 * time.Second

// replayRecord is the record that a run is given in place of a database. A step gets its record when everything that
// was recorded before it has been come to; so branches that ran in parallel meet in the replay as they did in the
// record.
type replayRecord struct {
	ordered     []Checkpoint // by the time they were recorded
	checkpoints map[string]Checkpoint
	nested      map[string]bool // records within a step that has a record itself, which stands for them
	// openEnded says that the function had not ended by itself where the record ends; waitsIn is the step in which it
	// waits.
	openEnded   bool
	waitingStep *string

	mu          sync.Mutex
	progress    chan struct{} // closed when a step is come to
	reached     map[string]bool
	last        string
	endedAt     string
	divergence  *Divergence
	busyLanes   []bool // the answers to give to those who ask for a lane
	laneAnswers []bool // those that were given
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

// failedByWorkers reports an execution that failed because of its workers, not of its code.
func failedByWorkers(x Execution) bool {
	if x.Status != Failed || x.ErrorMessage == nil {
		return false
	}
	m := *x.ErrorMessage
	return m == "the worker's lease expired" || m == "no progress within progress_seconds" ||
		strings.HasPrefix(m, "given up after ") && strings.HasSuffix(m, " workers were lost without a checkpoint between")
}

// isNested reports a record within a step that has one itself, or of a wait before one.
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

// splitKey divides a key into scope and name.
func splitKey(key string) (scope, name string) {
	i := strings.LastIndexByte(key, '/') + 1
	return key[:i], key[i:]
}

// isLaneWait reports a record that a run need not come to: a wait for a lane, which is not waited for when it is free.
func isLaneWait(c Checkpoint) bool {
	var out struct {
		Event string `json:"event"`
	}
	return json.Unmarshal(c.Output, &out) == nil && out.Event == "LANE_FREED"
}

// counts reports a record that belongs to the digest.
func (p *replayRecord) counts(c Checkpoint) bool { return !isLaneWait(c) }

// wasReached reports a record that the replay came to, or to a step that it is within.
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

// firstUnreached is the first record before a moment that was not come to; ok is false when there is none. p.mu is
// held.
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

// reach is called for every step. Nil lets the caller take the record; an error ends the run.
func (p *replayRecord) reach(ctx context.Context, r *run, s stepSpec) error {
	checkpoint, recorded := p.checkpoints[s.key]
	scope := s.key[:strings.LastIndex(s.key, s.name)]
	if !recorded {
		p.reachNested(s.key)
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
		if sibling, _ := splitKey(earlier.Step); sibling == scope || !awaitProgress(ctx, moved) {
			if sibling != scope && ctx.Err() != nil {
				return context.Cause(ctx) // another branch has ended this one
			}
			if recorded {
				return p.stopDiverged(r, s.key, DivergedOrder, fmt.Sprintf("the code comes to it before step %q, which was recorded earlier", earlier.Step))
			}
			return p.stopDiverged(r, s.key, DivergedUnrecorded, fmt.Sprintf("the record has no such step; there the record has step %q", earlier.Step))
		}
	}
	if recorded {
		if checkpoint.Failed && cancelledBySibling(checkpoint) && p.hasOtherBranches(scope) {
			awaitProgress(ctx, nil) // first it is ended as it was then
		}
		return nil
	}
	if !p.openEnded && p.hasOtherBranches(scope) && !awaitProgress(ctx, nil) && ctx.Err() != nil {
		return context.Cause(ctx) // another branch has ended this one, as it did then
	}
	if err := p.awaitWaitingBranch(ctx, s.key); err != nil {
		return err
	}
	return p.beyondRecord(r, s.key)
}

// cancelledBySibling reports the record of a step whose context was cancelled, as the failure of another branch does.
func cancelledBySibling(c Checkpoint) bool {
	var failure StepError
	return json.Unmarshal(c.Output, &failure) == nil && strings.Contains(failure.Message, context.Canceled.Error())
}

// awaitWaitingBranch holds a step up that the record does not have while another branch has yet to come to the wait
// in which the record ends: it was under way then.
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
			return context.Cause(ctx) // nil when nothing moves any more
		}
	}
}

// hasOtherBranches reports whether steps of other branches than that of a scope were come to.
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

// beyondRecord is called for what the record does not have: its end, or something new.
func (p *replayRecord) beyondRecord(r *run, key string) error {
	if !p.openEnded || p.waitingStep != nil && *p.waitingStep != key && !strings.HasPrefix(*p.waitingStep, gatePrefix(key)) &&
		!strings.HasPrefix(*p.waitingStep, key+"/") {
		return p.stopDiverged(r, key, DivergedUnrecorded, "the record has no such step: the code does something new")
	}
	p.mu.Lock()
	if p.endedAt == "" {
		p.endedAt = key
	}
	p.mu.Unlock()
	r.stop(ErrParked)
	return ErrParked
}

// gatePrefix begins the keys of what is waited for before a step; see Gate.
func gatePrefix(key string) string {
	scope, name := splitKey(key)
	return scope + "before " + name + "/"
}

// awaitProgress waits for any step to be come to.
func awaitProgress(ctx context.Context, moved <-chan struct{}) bool {
	timer := time.NewTimer(replayTimeout)
	defer timer.Stop()
	select {
	case <-moved:
		return true
	case <-timer.C:
	case <-ctx.Done():
		select {
		case <-moved: // what ended ctx was come to first
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

// diverge notes the first difference.
func (p *replayRecord) diverge(step, kind, message string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.divergence == nil {
		p.divergence = &Divergence{Step: step, Kind: kind, Message: message}
	}
}

// divergeUnreached notes a record that the code did not come to, because of why, and reports whether there is one.
func (p *replayRecord) divergeUnreached(why string) bool {
	p.mu.Lock()
	c, ok := p.firstUnreached(time.Time{})
	p.mu.Unlock()
	if ok {
		p.diverge(c.Step, DivergedUnreached, "the code ends without coming to this recorded step"+errorSuffix(why))
	}
	return ok
}

// answerLane answers who asks for a lane: it is granted, but not taken, or it is busy.
func (p *replayRecord) answerLane(ctx context.Context, r *run, name string) (*Hold, error) {
	p.mu.Lock()
	busy := len(p.laneAnswers) < len(p.busyLanes) && p.busyLanes[len(p.laneAnswers)]
	p.laneAnswers = append(p.laneAnswers, busy)
	p.mu.Unlock()
	if busy {
		return nil, fmt.Errorf("take lane: lane %s: %w", name, lanes.ErrBusy)
	}
	return &Hold{run: r, ctx: ctx}, nil
}

// sortCheckpoints puts records into the order in which they were made.
func sortCheckpoints(points []Checkpoint) {
	slices.SortStableFunc(points, func(a, b Checkpoint) int { return a.CreatedAt.Compare(b.CreatedAt) })
}

// replayLoop lets a replay come to a loop's last snapshot, where there is one.
func (r *run) replayLoop(ctx context.Context, s stepSpec) error {
	if r.replay == nil {
		return nil
	}
	if _, ok := r.replay.checkpoints[s.key]; !ok {
		return nil
	}
	return r.replay.reach(ctx, r, s)
}

// isUnderWay reports a step or phase that was entered and has no record of its own yet: its function is called, for the
// steps in it. A call is not, because it is an effect.
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

// reachNested lets what was recorded within a step that is not entered count as come to with it.
func (p *replayRecord) reachNested(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.ordered {
		if strings.HasPrefix(c.Step, key+"/") {
			p.reached[c.Step] = true
		}
	}
}

// callUnderWay calls the function of a step under way. What it would record as its result is beyond the record.
func callUnderWay[T any](ctx context.Context, r *run, s stepSpec, fn func(ctx context.Context, effect *Effect) (T, error)) error {
	_, err := recoverPanic(stepScope(ctx, s), &Effect{Key: r.idempotencyKey(s.key)}, fn)
	if stopErr := r.stopCause(); stopErr != nil {
		return stopErr
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return r.replay.beyondRecord(r, s.key)
}
