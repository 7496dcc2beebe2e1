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

// replayPatience is how long a replay waits for a parallel branch to come to what was recorded earlier than the step
// that another branch has come to. It passes only where the code differs from the record.
const replayPatience = 5 * time.Second

// replaying is the record that a run is given in place of a database. A step gets its record when everything that was
// recorded before it has been come to; so branches that ran in parallel meet in the replay as they did in the record.
type replaying struct {
	all    []Checkpoint // by the time they were recorded
	points map[string]Checkpoint
	within map[string]bool // records within a step that has a record itself, which stands for them
	// open says that the function had not ended by itself where the record ends; waitsIn is the step in which it waits.
	open    bool
	waitsIn *string

	mu         sync.Mutex
	moved      chan struct{} // closed when a step is come to
	reached    map[string]bool
	last       string
	endedAt    string
	divergence *Divergence
	busy       []bool // the answers to give to those who ask for a lane
	answered   []bool // those that were given
}

func newReplaying(x Execution, points []Checkpoint, waitsIn *string, busy []bool) *replaying {
	p := &replaying{
		all: points, points: make(map[string]Checkpoint, len(points)), within: map[string]bool{},
		open: x.Status == Cancelled || !x.Status.Ended() || stoppedFromOutside(x), waitsIn: waitsIn,
		moved: make(chan struct{}), reached: map[string]bool{}, busy: busy,
	}
	for _, c := range points {
		p.points[c.Step] = c
	}
	for _, c := range points {
		p.within[c.Step] = p.inside(c.Step)
	}
	return p
}

// stoppedFromOutside reports an execution that failed because of its workers, not of its code.
func stoppedFromOutside(x Execution) bool {
	if x.Status != Failed || x.ErrorMessage == nil {
		return false
	}
	m := *x.ErrorMessage
	return m == "the worker's lease expired" || m == "no progress within progress_seconds" ||
		strings.HasPrefix(m, "given up after ") && strings.HasSuffix(m, " workers were lost without a checkpoint between")
}

// inside reports a record within a step that has one itself, or of a wait before one.
func (p *replaying) inside(step string) bool {
	for i, char := range step {
		if char != '/' {
			continue
		}
		if _, ok := p.points[step[:i]]; ok {
			return true
		}
		scope, name := split(step[:i])
		if waited, ok := strings.CutPrefix(name, "before "); ok {
			if _, ok := p.points[scope+waited]; ok {
				return true
			}
		}
	}
	return false
}

// split divides a key into scope and name.
func split(key string) (scope, name string) {
	i := strings.LastIndexByte(key, '/') + 1
	return key[:i], key[i:]
}

// optional reports a record that a run need not come to: a wait for a lane, which is not waited for when it is free.
func optional(c Checkpoint) bool {
	var out struct {
		Event string `json:"event"`
	}
	return json.Unmarshal(c.Output, &out) == nil && out.Event == "LANE_FREED"
}

// counts reports a record that belongs to the digest.
func (p *replaying) counts(c Checkpoint) bool { return !optional(c) }

// came reports a record that the replay came to, or to a step that it is within.
func (p *replaying) came(c Checkpoint) bool {
	if optional(c) {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.within[c.Step] {
		return p.reached[c.Step]
	}
	for i, char := range c.Step {
		if char != '/' {
			continue
		}
		scope, name := split(c.Step[:i])
		if p.reached[c.Step[:i]] || p.reached[scope+strings.TrimPrefix(name, "before ")] {
			return true
		}
	}
	return false
}

// missing is the first record before a moment that was not come to; ok is false when there is none. p.mu is held.
func (p *replaying) missing(before time.Time) (c Checkpoint, ok bool) {
	for _, c := range p.all {
		if !before.IsZero() && !c.CreatedAt.Before(before) {
			break
		}
		if !p.within[c.Step] && !p.reached[c.Step] && !optional(c) {
			return c, true
		}
	}
	return Checkpoint{}, false
}

// comeTo is called for every step. Nil lets the caller take the record; an error ends the run.
func (p *replaying) comeTo(ctx context.Context, r *run, s spec) error {
	point, recorded := p.points[s.key]
	scope := s.key[:strings.LastIndex(s.key, s.name)]
	if !recorded {
		p.cover(s.key)
	}
	for {
		p.mu.Lock()
		if p.divergence != nil || p.endedAt != "" {
			p.mu.Unlock()
			return ErrParked
		}
		earlier, wait := p.missing(point.CreatedAt)
		if !wait || earlier.Step == s.key {
			p.last = s.key
			if recorded {
				p.reached[s.key] = true
			}
			close(p.moved)
			p.moved = make(chan struct{})
			p.mu.Unlock()
			break
		}
		moved := p.moved
		p.mu.Unlock()
		if alike, _ := split(earlier.Step); alike == scope || !waited(ctx, moved) {
			if alike != scope && ctx.Err() != nil {
				return context.Cause(ctx) // another branch has ended this one
			}
			if recorded {
				return p.refuse(r, s.key, DivergedOrder, fmt.Sprintf("the code comes to it before step %q, which was recorded earlier", earlier.Step))
			}
			return p.refuse(r, s.key, DivergedUnrecorded, fmt.Sprintf("the record has no such step; there the record has step %q", earlier.Step))
		}
	}
	if recorded {
		if point.Failed && endedByAnother(point) && p.parallel(scope) {
			waited(ctx, nil) // first it is ended as it was then
		}
		return nil
	}
	if !p.open && p.parallel(scope) && !waited(ctx, nil) && ctx.Err() != nil {
		return context.Cause(ctx) // another branch has ended this one, as it did then
	}
	if err := p.asideOf(ctx, s.key); err != nil {
		return err
	}
	return p.beyond(r, s.key)
}

// endedByAnother reports the record of a step whose context was cancelled, as the failure of another branch does.
func endedByAnother(c Checkpoint) bool {
	var failure StepError
	return json.Unmarshal(c.Output, &failure) == nil && strings.Contains(failure.Message, context.Canceled.Error())
}

// asideOf holds a step up that the record does not have while another branch has yet to come to the wait in which the
// record ends: it was under way then.
func (p *replaying) asideOf(ctx context.Context, key string) error {
	if !p.open || p.waitsIn == nil {
		return nil
	}
	mine, _ := split(key)
	other, _ := split(*p.waitsIn)
	if strings.HasPrefix(mine, other) || strings.HasPrefix(other, mine) {
		return nil
	}
	for {
		p.mu.Lock()
		over, moved := p.divergence != nil || p.endedAt != "", p.moved
		p.mu.Unlock()
		if over {
			return ErrParked
		}
		if !waited(ctx, moved) {
			return context.Cause(ctx) // nil when nothing moves any more
		}
	}
}

// parallel reports whether steps of other branches than that of a scope were come to.
func (p *replaying) parallel(scope string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for step := range p.reached {
		other, _ := split(step)
		if !strings.HasPrefix(other, scope) && !strings.HasPrefix(scope, other) {
			return true
		}
	}
	return false
}

// beyond is called for what the record does not have: its end, or something new.
func (p *replaying) beyond(r *run, key string) error {
	if !p.open || p.waitsIn != nil && *p.waitsIn != key && !strings.HasPrefix(*p.waitsIn, beforeStep(key)) &&
		!strings.HasPrefix(*p.waitsIn, key+"/") {
		return p.refuse(r, key, DivergedUnrecorded, "the record has no such step: the code does something new")
	}
	p.mu.Lock()
	if p.endedAt == "" {
		p.endedAt = key
	}
	p.mu.Unlock()
	r.stop(ErrParked)
	return ErrParked
}

// beforeStep begins the keys of what is waited for before a step; see Gate.
func beforeStep(key string) string {
	scope, name := split(key)
	return scope + "before " + name + "/"
}

// waited waits for any step to be come to.
func waited(ctx context.Context, moved <-chan struct{}) bool {
	timer := time.NewTimer(replayPatience)
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

func (p *replaying) refuse(r *run, step, kind, message string) error {
	p.diverge(step, kind, message)
	r.stop(ErrParked)
	return ErrParked
}

// diverge notes the first difference.
func (p *replaying) diverge(step, kind, message string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.divergence == nil {
		p.divergence = &Divergence{Step: step, Kind: kind, Message: message}
	}
}

// unreached notes a record that the code did not come to, because of why, and reports whether there is one.
func (p *replaying) unreached(why string) bool {
	p.mu.Lock()
	c, ok := p.missing(time.Time{})
	p.mu.Unlock()
	if ok {
		p.diverge(c.Step, DivergedUnreached, "the code ends without coming to this recorded step"+because(why))
	}
	return ok
}

// lane answers who asks for a lane: it is granted, but not taken, or it is busy.
func (p *replaying) lane(ctx context.Context, r *run, name string) (*Hold, error) {
	p.mu.Lock()
	busy := len(p.answered) < len(p.busy) && p.busy[len(p.answered)]
	p.answered = append(p.answered, busy)
	p.mu.Unlock()
	if busy {
		return nil, fmt.Errorf("take lane: lane %s: %w", name, lanes.ErrBusy)
	}
	return &Hold{run: r, ctx: ctx}, nil
}

// sortPoints puts records into the order in which they were made.
func sortPoints(points []Checkpoint) {
	slices.SortStableFunc(points, func(a, b Checkpoint) int { return a.CreatedAt.Compare(b.CreatedAt) })
}

// loopReplayed lets a replay come to a loop's last snapshot, where there is one.
func (r *run) loopReplayed(ctx context.Context, s spec) error {
	if r.replay == nil {
		return nil
	}
	if _, ok := r.replay.points[s.key]; !ok {
		return nil
	}
	return r.replay.comeTo(ctx, r, s)
}

// underWay reports a step or phase that was entered and has no record of its own yet: its function is called, for the
// steps in it. A call is not, because it is an effect.
func (p *replaying) underWay(s spec) bool {
	if _, ok := p.points[s.key]; ok || s.entry != nil && s.entry.Kind != activity.KindPhase {
		return false
	}
	within := s.key + "/"
	if p.waitsIn != nil && strings.HasPrefix(*p.waitsIn, within) {
		return true
	}
	for _, c := range p.all {
		if strings.HasPrefix(c.Step, within) {
			return true
		}
	}
	return false
}

// cover lets what was recorded within a step that is not entered count as come to with it.
func (p *replaying) cover(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.all {
		if strings.HasPrefix(c.Step, key+"/") {
			p.reached[c.Step] = true
		}
	}
}

// enter calls the function of a step under way. What it would record as its result is beyond the record.
func enter[T any](ctx context.Context, r *run, s spec, fn func(ctx context.Context, effect *Effect) (T, error)) error {
	_, err := protect(inside(ctx, s), &Effect{Key: r.idempotencyKey(s.key)}, fn)
	if poison := r.poisoned(); poison != nil {
		return poison
	}
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return r.replay.beyond(r, s.key)
}
