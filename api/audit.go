package api

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
)

// change is what an admin's lever did. Changed is false when it was so already.
type change struct {
	Name       string `json:"name"`
	Changed    bool   `json:"changed"`
	TraceID    string `json:"trace_id"`
	ActivityID string `json:"activity_id"`
}

// atRevision lock what an admin changes, by what it is called in the record, where the request says on which revision that is based.
var atRevision = map[string]func(ctx context.Context, tx pgx.Tx, name string, revision int) error{
	"objective": objectives.AtRevision, "automation": automations.AtRevision, "skill": skills.AtRevision,
}

// withCurrent adds what is there now to the refusal of a change that was based on something else.
func (s *server) withCurrent(ctx context.Context, err error) error {
	stale, ok := errors.AsType[*postgres.StaleError](err)
	if !ok {
		return err
	}
	var current any
	var unread error
	switch stale.What {
	case "objective":
		current, unread = objectives.Get(ctx, s.pool, stale.Name)
	case "automation":
		var a automations.Automation
		a, unread = automations.Get(ctx, s.pool, stale.Name)
		a.Arguments = redact.JSON(a.Arguments, maxShown)
		current = a
	case "skill":
		current, unread = skills.Get(ctx, s.pool, stale.Name)
	}
	if unread != nil {
		return unread
	}
	p, _ := problem.Of(stale)
	return p.WithBoth(current, nil)
}

// audited is [activity.Record] for the admin of a request: input names the object.
func (s *server) audited(ctx context.Context, action, reason string, input map[string]any,
	fn func(tx pgx.Tx, traceID string) (output any, err error),
) (change, error) {
	r, err := activity.Record(ctx, s.pool, activity.Act{Name: action, Reason: reason, Input: input}, fn)
	return change{TraceID: r.TraceID, ActivityID: r.ActivityID}, err
}
