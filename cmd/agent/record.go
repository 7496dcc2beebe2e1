package main

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/principals"
)

// recordChange makes an admin's change and records it in one transaction under a new trace. input names the object
// and the reason. A change without effect leaves no record.
func recordChange(
	ctx context.Context, s *session, verb string, input map[string]any,
	change func(tx pgx.Tx, traceID string) (bool, error),
) (changed bool, err error) {
	return recordChangeWith(ctx, s, verb, input, map[string]any{}, change)
}

// recordChangeWith is recordChange with output that change fills in.
func recordChangeWith(
	ctx context.Context, s *session, verb string, input, output map[string]any,
	change func(tx pgx.Tx, traceID string) (bool, error),
) (changed bool, err error) {
	reason, _ := input["reason"].(string)
	_, err = activity.Record(ctx, s.Pool, activity.Act{Name: verb, Reason: reason, Input: input},
		func(tx pgx.Tx, traceID string) (any, error) {
			if changed, err = change(tx, traceID); err != nil || !changed {
				return activity.Unchanged, err
			}
			return output, nil
		})
	return changed, err
}

// admin is the actor of local commands. A command that a caller sent to a server has the caller as its actor.
const admin = activity.Admin

// acting adds the actor of a command to ctx: the caller of a server, or the admin with access to the database.
func acting(ctx context.Context) context.Context {
	if principals.From(ctx) != nil {
		return ctx
	}
	return activity.WithActor(ctx, activity.Actor{Name: admin, Via: "cli"})
}

// actor is the name of the acting principal, for the audit.
func actor(ctx context.Context) string { return activity.ActorFrom(ctx).Name }
