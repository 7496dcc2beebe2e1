package executions

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// The result of a step that is nothing but its result is put off being written for a moment, because what often follows is
// the end of the run, and then both are one write. It is written before the execution begins or records anything else, and
// by itself when nothing follows soon: so no other step, no wait and no end is ever ahead of a record, and records are
// written in the order in which their steps ended. A process that dies in this moment runs the step again, as if it had
// died within it.
const putOffFor = time.Millisecond

// longestPutOff is how long a result may be, in bytes, to be put off, and longestKey the key of its step, which is indexed. What
// the database might refuse is written at once, while the code can still be told.
const (
	longestPutOff = 4096
	longestKey    = 1024
)

// errUnrecorded ends a run whose result could not be written after the code had been told that the step was done.
var errUnrecorded = errors.New("the result of a step could not be recorded")

// putOff is the result of a step that is yet to be written.
type putOff struct {
	s       spec
	effect  *Effect
	value   any
	output  json.RawMessage
	failure *StepError
}

// point is the result as it is written; nil for none.
func (p *putOff) point(r *run) *point {
	if p == nil {
		return nil
	}
	return &point{id: r.exec.ID, step: p.s.key, print: p.s.print, claim: r.exec.Claim, failed: p.failure != nil, output: p.output}
}

// canWait reports a result that may be put off.
func (r *run) canWait(s spec, effect *Effect, output json.RawMessage) bool {
	return s.again && s.entry == nil && s.also == nil && (effect == nil || effect.Settle == nil) && r.replay == nil &&
		len(output) <= longestPutOff && withoutExponents(output) && len(s.key) <= longestKey && s.key == postgres.Text(s.key)
}

// withoutExponents reports JSON without exponents. Its numbers are those that jsonb holds, if they are not long.
func withoutExponents(text json.RawMessage) bool {
	quoted := false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case !quoted && (c == 'e' || c == 'E') && i > 0 && text[i-1] >= '0' && text[i-1] <= '9':
			return false
		}
	}
	return true
}

// putOff keeps a result until something else is written, or its time is up.
func (r *run) putOff(ctx context.Context, p *putOff) error {
	r.recording.Lock()
	defer r.recording.Unlock()
	if err := r.recordPutOff(ctx); err != nil { // of another branch, or of a step within this one
		return err
	}
	r.put = p
	if r.putTimer != nil {
		r.putTimer.Reset(putOffFor)
		return nil
	}
	r.putTimer = time.AfterFunc(putOffFor, func() {
		_ = r.flushDeferred(context.WithoutCancel(ctx)) // an error has stopped the run
	})
	return nil
}

// flushDeferred returns when nothing is put off any more. An error has stopped the run.
func (r *run) flushDeferred(ctx context.Context) error {
	r.recording.Lock()
	defer r.recording.Unlock()
	return r.recordPutOff(ctx)
}

// takePutOff hands what was put off to a write that takes it along; nil when there is nothing. It waits for a write that is under way.
func (r *run) takePutOff() *putOff {
	r.recording.Lock()
	defer r.recording.Unlock()
	p := r.put
	r.put = nil
	if p != nil {
		r.putTimer.Stop()
	}
	return p
}

// recordPutOff writes what was put off. The caller holds r.recording.
func (r *run) recordPutOff(ctx context.Context) error {
	p := r.put
	if p == nil {
		return nil
	}
	r.put = nil
	r.putTimer.Stop()
	return r.recordTaken(ctx, p)
}

// recordTaken writes what was taken from r.put. An error has stopped the run.
func (r *run) recordTaken(ctx context.Context, p *putOff) error {
	err := r.recordNow(ctx, p.s, p.effect, p.value, p.output, p.failure)
	switch {
	case err == nil, r.poisoned() != nil:
	case passing(err), ctx.Err() != nil:
		r.stop(ErrLost) // nobody knows, and whoever takes over runs the step again
	default:
		err = errors.Join(errUnrecorded, err)
		r.noteFailure(p.s.key)
		r.stop(err)
	}
	return err
}
