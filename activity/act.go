package activity

import (
	"cmp"
	"context"
	"maps"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Admin is the actor of what a person does on the command line, over the HTTP API or in the Engine Room.
const Admin = "admin"

// Act is what an admin does. Its row has agent [Admin], and the reason both as purpose and in the input.
type Act struct {
	Within  bool           // each wait for a lock is bounded by postgres.LockTimeout; the caller tries again
	Name    string         // of the act: disable_skill, replay_webhook
	Reason  string         // as the admin gave it
	TraceID string         // of the row; a new op_ trace when empty
	Input   map[string]any // names the object under a word that the column object of agent_audit knows; the change may add to it
}

// Unchanged is the output of a change that changed nothing: it leaves no row.
var Unchanged any = unchanged{}

type unchanged struct{}

// Recorded says where the row of an act is.
type Recorded struct{ TraceID, ActivityID string }

// Record makes an admin's change and writes its row, in one transaction and under a trace of its own. change gets that
// trace and returns the output of the row.
func Record(ctx context.Context, db postgres.Beginner, a Act, change func(tx pgx.Tx, traceID string) (output any, err error)) (Recorded, error) {
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
		r.ActivityID, err = Note(ctx, tx, a.entry(r.TraceID), Outcome{Output: output})
		return err
	})
	return r, err
}

// RecordAround is [Record] for work that is more than one transaction: the row is open while it lasts, and has its
// error.
func RecordAround(ctx context.Context, db postgres.DB, a Act, work func() (output any, err error)) error {
	e := a.entry(string(trace.New(trace.Operate)))
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

func (a Act) entry(traceID string) Entry {
	input := maps.Clone(a.Input)
	if a.Reason != "" {
		if input == nil {
			input = map[string]any{}
		}
		input["reason"] = a.Reason
	}
	return Entry{TraceID: traceID, Surface: string(trace.Operate), Agent: Admin, Kind: KindNote, Skill: a.Name, Purpose: a.Reason, Input: input}
}
