package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/retention"
	"github.com/lanekeeper/lanekeeper/skills"
)

// linkRetention keeps trace links long enough for their traces to end.
const linkRetention = 60 * 24 * time.Hour

func (a *App) pruneLinks(ctx context.Context) {
	if err := activity.PruneLinks(ctx, a.Pool, linkRetention); err != nil && ctx.Err() == nil {
		a.Log.WarnContext(ctx, "old trace links not pruned", "error", err)
	}
}

const (
	housekeepEvery = time.Hour
	countEvery     = 5 * time.Second
)

// runHousekeeping prunes rows past their retention until ctx ends. Several processes may run it.
func (a *App) runHousekeeping(ctx context.Context) error {
	tick := time.NewTicker(housekeepEvery)
	defer tick.Stop()
	for {
		if _, err := retention.Run(ctx, a.Pool, retention.Options{Logger: a.Log}); err != nil && ctx.Err() == nil {
			a.Log.WarnContext(ctx, "old rows not pruned; the next pass retries", "error", err)
		}
		a.pruneLinks(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// runActivityCounts updates the counters of the activity log until ctx ends. Several processes may run it.
func runActivityCounts(ctx context.Context, db postgres.Beginner, interval time.Duration, log *slog.Logger) error {
	return runCounts(ctx, interval, log, "activity",
		func(ctx context.Context) (bool, error) { return activity.Count(ctx, db) })
}

// runExecutionCounts updates the counters of executions, likewise.
func runExecutionCounts(ctx context.Context, db postgres.Beginner, interval time.Duration, log *slog.Logger) error {
	return runCounts(ctx, interval, log, "executions",
		func(ctx context.Context) (bool, error) { return executions.Count(ctx, db) })
}

// runCounts calls count until ctx ends. It works off a backlog at half speed.
func runCounts(
	ctx context.Context, interval time.Duration, log *slog.Logger, kind string, count func(context.Context) (bool, error),
) error {
	next := time.NewTimer(0)
	defer next.Stop()
	var failures logging.Failures
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-next.C:
		}
		began := time.Now()
		more, err := count(ctx)
		failures.Log(ctx, log, "rows not counted; reports lag", err, "of", kind)
		if more {
			next.Reset(time.Since(began))
		} else {
			next.Reset(interval)
		}
	}
}

// warnUnpriced warns about answers that cost nothing because their model has no price, or no output price.
func (a *App) warnUnpriced(ctx context.Context) {
	if list, err := a.Loop.Agents.List(ctx, a.Pool); err == nil {
		if free := FreeAnswers(a.Config, list); len(free) > 0 {
			a.Log.WarnContext(ctx, "prices have no output, so answers cost nothing; add it to AGENT_PRICES", "models", free)
		}
	}
	l := a.Config.Limits
	limited := a.Config.Budget.MaxCostUSD > 0 || l.DayUSD+l.HeartbeatUSD+l.OperateUSD+l.ChatUSD+l.WebhookUSD > 0
	if limited && a.Loop.Model != nil && !a.Loop.Model.Priced() {
		a.Log.WarnContext(ctx, "the model has no price, so dollar limits have no effect; set AGENT_PRICES", "model",
			a.Loop.Model.Model())
	}
}

// approvers finds the principals of accounts that press buttons in channels. Only a linked account has a principal;
// pairing creates none.
type approvers struct{ pool *pgxpool.Pool }

// Approver implements [channels.Principals].
func (a approvers) Approver(
	ctx context.Context, issuer, subject, via, message string,
) (context.Context, string, error) {
	p, err := principals.ByIdentity(ctx, a.pool, issuer, subject)
	switch {
	case errors.Is(err, principals.ErrNotFound):
		return nil, "", channels.ErrNotLinked
	case err != nil:
		return nil, "", err
	case !p.Role.May(principals.ApprovalsDecide):
		return nil, "", channels.ErrMayNot
	}
	return actingFor(ctx, p, via, message), p.Name, nil
}

// Asking implements [channels.Principals].
func (a approvers) Asking(ctx context.Context, issuer, subject, via, message string) (context.Context, error) {
	p, err := principals.ByIdentity(ctx, a.pool, issuer, subject)
	if errors.Is(err, principals.ErrNotFound) {
		return ctx, nil
	}
	if err != nil {
		return nil, err
	}
	return actingFor(ctx, p, via, message), nil
}

func actingFor(ctx context.Context, p principals.Principal, via, message string) context.Context {
	return activity.WithActor(ctx, activity.Actor{Name: p.Name, Via: via, Message: message})
}

// CallFlow is the flow of an admin's skill call: one durable step.
const CallFlow = "skill_call"

// SkillCall is the input of the flow CallFlow.
type SkillCall struct {
	Skill string          `json:"skill"`
	Args  json.RawMessage `json:"args"`
}

// registerCallFlow lets every process resume a skill call.
func registerCallFlow(a *App, loop *reason.Loop) error {
	a.Engine.Unforkable(CallFlow, "a fork would skip the check of its caller; call it again with agent skills call")
	return a.Engine.Register(CallFlow, func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		var call SkillCall
		if err := json.Unmarshal(input, &call); err != nil {
			return executions.Result{}, fmt.Errorf("read input: %w", err)
		}
		skill, err := executions.Step(ctx, "skill", func(ctx context.Context) (skills.Skill, error) {
			return skills.Get(ctx, a.Pool, call.Skill)
		})
		if err != nil {
			return executions.Result{}, err
		}
		value, err := loop.Invoke(ctx, "skill "+skill.Name, skill, call.Args, executions.Call{
			Entry: activity.Entry{Purpose: "called by an admin"},
		})
		if err != nil {
			return executions.Result{}, err
		}
		return executions.Result{Summary: "called " + skill.Name, Value: value}, nil
	})
}
