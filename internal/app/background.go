package app

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/retention"
)

// linkRetention is twice the maximum of most waits of executions, 30 days.
const linkRetention = 60 * 24 * time.Hour

const (
	housekeepEvery = time.Hour
	countEvery     = 5 * time.Second
)

// runHousekeeping prunes rows past their retention now and every hour until ctx ends. Several processes may run it.
func (a *App) runHousekeeping(ctx context.Context) error {
	tick := time.NewTicker(housekeepEvery)
	defer tick.Stop()
	for {
		if err := a.prune(ctx); err != nil && ctx.Err() == nil {
			a.Log.WarnContext(ctx, "old rows not pruned; the next pass retries", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// prune makes one pass: rows past their retention, and rows that are kept for a fixed time.
func (a *App) prune(ctx context.Context) error {
	_, err := retention.Run(ctx, a.Pool, retention.Options{Logger: a.Log})
	return errors.Join(err, activity.PruneLinks(ctx, a.Pool, linkRetention), documents.DeleteExpired(ctx, a.Pool),
		api.DeleteExpiredKeys(ctx, a.Pool))
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

// runCounts calls count once in interval until ctx ends. While count reports more rows, it pauses only as long as the
// last call took, so a backlog costs half of one connection's time.
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
