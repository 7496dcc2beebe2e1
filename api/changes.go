package api

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
)

// change is the result of an admin action. Changed is false if the action had no effect.
type change struct {
	Name       string `json:"name"`
	Changed    bool   `json:"changed"`
	TraceID    string `json:"trace_id"`
	ActivityID string `json:"activity_id"`
}

// record wraps [activity.Record]. input identifies the object.
func (s *server) record(ctx context.Context, action, reason string, input map[string]any,
	fn func(tx pgx.Tx, traceID string) (output any, err error),
) (change, error) {
	r, err := activity.Record(ctx, s.pool, activity.Act{Name: action, Reason: reason, Input: input}, fn)
	return change{TraceID: r.TraceID, ActivityID: r.ActivityID}, err
}

// changeNamed runs an audited action on the object in the path.
func (s *server) changeNamed(
	r request, action, kind string, notFound error, fn func(tx pgx.Tx, name, reason string) (bool, error),
) (response, error) {
	name, err := pathName(r, notFound)
	if err != nil {
		return response{}, err
	}
	revision, err := r.ifMatch()
	if err != nil {
		return response{}, err
	}
	checkRevision, guarded := revisionChecks[kind]
	if revision > 0 && !guarded {
		return response{}, badPrecondition("If-Match is invalid here: the object has no revision")
	}
	reason := r.body.(reasonRequest).Reason
	var changed bool
	done, err := s.record(r.Context(), action, reason, map[string]any{kind: name},
		func(tx pgx.Tx, _ string) (any, error) {
			if guarded {
				if err := checkRevision(r.Context(), tx, name, revision); err != nil {
					return nil, err
				}
			}
			var err error
			changed, err = fn(tx, name, reason)
			return map[string]bool{"changed": changed}, err
		})
	if err != nil {
		return response{}, s.withCurrent(r.Context(), err)
	}
	done.Name, done.Changed = name, changed
	return response{body: done, trace: done.TraceID}, nil
}

// pathName returns the name or id in the path. It accepts control characters, because an admin must be able to reject
// any name that a model chose.
func pathName(r request, notFound error) (string, error) {
	name := r.PathValue("id")
	if !postgres.IsText(name) || len(name) > maxText {
		return "", notFound
	}
	return name, nil
}

// reasonRequest is the body of a change that needs only a reason.
type reasonRequest struct {
	Reason string `json:"reason"`
}

// maxReason bounds a reason in bytes.
const maxReason = 1000

func (b reasonRequest) check() error {
	if strings.TrimSpace(b.Reason) == "" {
		return problem.BadBody("reason is missing; it is kept in the audit log")
	}
	return checkReason(b.Reason)
}

// checkReason checks an optional reason.
func checkReason(reason string) error {
	switch {
	case len(reason) > maxReason:
		return problem.BadBody("reason is longer than %d bytes", maxReason)
	case !isPrintableText(reason):
		return problem.BadBody("reason has control characters")
	}
	return nil
}

// requireChanged turns an action without effect into a 409.
func requireChanged(changed bool, err error, format string, args ...any) (bool, error) {
	if err == nil && !changed {
		err = problem.New(http.StatusConflict, format, args...)
	}
	return changed, err
}

// revisionChecks lock an object and compare its revision with If-Match. The key is the object's field in the audit
// input.
var revisionChecks = map[string]func(ctx context.Context, tx pgx.Tx, name string, revision int) error{
	"objective": objectives.LockRevision, "automation": automations.LockRevision, "skill": skills.LockRevision,
}

// withCurrent attaches the current object to a StaleError.
func (s *server) withCurrent(ctx context.Context, err error) error {
	stale, ok := errors.AsType[*postgres.StaleError](err)
	if !ok {
		return err
	}
	var current any
	var getErr error
	switch stale.What {
	case "objective":
		current, getErr = objectives.Get(ctx, s.pool, stale.Name)
	case "automation":
		var a automations.Automation
		a, getErr = automations.Get(ctx, s.pool, stale.Name)
		a.Arguments = redact.JSON(a.Arguments, maxShown)
		current = a
	case "skill":
		current, getErr = skills.Get(ctx, s.pool, stale.Name)
	}
	if getErr != nil {
		return getErr
	}
	p, _ := problem.Of(stale)
	p.Current = current
	return p
}
