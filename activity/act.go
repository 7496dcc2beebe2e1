package activity

import (
	"cmp"
	"context"
	"maps"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Act is an act of an admin. Its row has agent [Admin], and the reason both as purpose and in the input.
type Act struct {
	Name    string         // of the act: disable_skill, replay_webhook
	Reason  string         // from the admin
	TraceID string         // of the row; empty starts a new op_ trace
	Input   map[string]any // names the object under a key that agent_audit.object knows; the change may add to it
	Within  bool           // bounds each lock wait by postgres.LockTimeout; the caller retries
}

// Unchanged is the output of a change that had no effect. Then [Record] writes no row.
var Unchanged any = unchanged{}

type unchanged struct{}

// Recorded identifies the row of an act.
type Recorded struct{ TraceID, ActivityID string }

type recordedKey struct{}

// WithRecorded returns a context in which [Record] also stores the row of its act in r.
func WithRecorded(ctx context.Context, r *Recorded) context.Context {
	return context.WithValue(ctx, recordedKey{}, r)
}

// Record makes an admin's change and writes its row, in one transaction. The row has the trace a.TraceID, or a new one.
// change gets that trace and returns the output of the row; for Unchanged there is no row.
func Record(
	ctx context.Context, db postgres.Beginner, a Act, change func(tx pgx.Tx, traceID string) (output any, err error),
) (Recorded, error) {
	r := Recorded{TraceID: cmp.Or(a.TraceID, string(trace.New(trace.Operate)))}
	inTx := postgres.InTx
	if a.Within {
		inTx = postgres.InTxWithin
	}
	err := inTx(ctx, db, func(tx pgx.Tx) error {
		output, err := change(tx, r.TraceID)
		if err != nil || output == Unchanged {
			return err
		}
		r.ActivityID, err = Note(ctx, tx, a.entry(ctx, r.TraceID), Outcome{Output: output})
		return err
	})
	if into, ok := ctx.Value(recordedKey{}).(*Recorded); ok && err == nil && r.ActivityID != "" {
		*into = r
	}
	return r, err
}

// RecordAround is [Record] for work beyond one transaction. The row is open during the work, and then has its output or
// error. The error of the work takes precedence over one of the log.
func RecordAround(ctx context.Context, db postgres.DB, a Act, work func() (output any, err error)) error {
	e := a.entry(ctx, string(trace.New(trace.Operate)))
	id, err := Open(ctx, db, e)
	if err != nil {
		return err
	}
	output, failure := work()
	o := Outcome{Output: output}
	if failure != nil {
		o.Status, o.Message = Error, failure.Error()
	}
	if err := Close(context.WithoutCancel(ctx), db, id, e, o); failure == nil {
		return err
	}
	return failure
}

func (a Act) entry(ctx context.Context, traceID string) Entry {
	input := WithActorFields(ctx, maps.Clone(a.Input))
	if a.Reason != "" {
		if input == nil {
			input = map[string]any{}
		}
		input["reason"] = a.Reason
	}
	return Entry{
		TraceID: traceID, Surface: string(trace.Operate), Agent: Admin, Kind: KindNote, Skill: a.Name,
		Purpose: a.Reason, Input: input,
	}
}
