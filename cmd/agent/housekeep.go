package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/retention"
)

const (
	// housekeepEvery is how often what is kept long enough is looked for.
	housekeepEvery = time.Hour
	// countEvery is how often the activity log is looked at for what is to be counted.
	countEvery = 5 * time.Second
)

// housekeep takes away what was kept as long as its policy says, until ctx ends. Any number of processes may do it.
func (a *app) housekeep(ctx context.Context) error {
	tick := time.NewTicker(housekeepEvery)
	defer tick.Stop()
	for {
		if _, err := retention.Run(ctx, a.pool, retention.Options{Logger: a.log}); err != nil && ctx.Err() == nil {
			a.log.WarnContext(ctx, "old rows not removed; the next pass goes on", "error", err)
		}
		a.forgetLinks(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// count keeps the counts of the activity log up to date, until ctx ends. Any number of processes may do it.
// A backlog is worked off in small passes, with as much rest between as they took.
func count(ctx context.Context, db postgres.Beginner, every time.Duration, log *slog.Logger) error {
	next := time.NewTimer(0)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-next.C:
		}
		began := time.Now()
		more, err := activity.Count(ctx, db)
		if err != nil && ctx.Err() == nil {
			log.WarnContext(ctx, "activity not counted; sums over it take longer", "error", err)
		}
		if more {
			next.Reset(time.Since(began))
		} else {
			next.Reset(every)
		}
	}
}

// warnOfPrices says when a limit in dollars bounds nothing, because the model has no price.
func (a *app) warnOfPrices(ctx context.Context) {
	l := a.config.Limits
	bounded := a.config.Budget.MaxCostUSD > 0 || l.DayUSD+l.HeartbeatUSD+l.OperateUSD+l.ChatUSD+l.WebhookUSD > 0
	if bounded && a.loop.Model != nil && !a.loop.Model.Priced() {
		a.log.WarnContext(ctx, "the model has no price, so limits in dollars bound nothing; set AGENT_PRICES", "model", a.loop.Model.Model())
	}
}
