package api

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// change is what an admin's lever did. Changed is false when it was so already.
type change struct {
	Name       string `json:"name"`
	Changed    bool   `json:"changed"`
	TraceID    string `json:"trace_id"`
	ActivityID string `json:"activity_id"`
}

// audited makes a change and records it under a new op_ trace, in one transaction. fn is told that trace
// and returns what the record says came of it.
func (s *server) audited(ctx context.Context, action, reason string, input map[string]string,
	fn func(tx pgx.Tx, traceID string) (output any, err error),
) (c change, err error) {
	c.TraceID = string(trace.New(trace.Operate))
	err = postgres.InTx(ctx, s.pool, func(tx pgx.Tx) error {
		output, err := fn(tx, c.TraceID)
		if err != nil {
			return err
		}
		c.ActivityID, err = activity.Note(ctx, tx, activity.Entry{
			TraceID: c.TraceID, Surface: string(trace.Operate), Agent: admin, Skill: action, Purpose: reason, Input: input,
		}, activity.Outcome{Output: output})
		return err
	})
	return c, err
}
