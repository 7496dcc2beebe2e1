package main

import (
	"context"
	"time"

	"github.com/lanekeeper/lanekeeper/budgets"
)

// housekeepEvery is how often old bookkeeping is thrown away.
const housekeepEvery = time.Hour

// housekeep forgets what nobody asks for any more, until ctx ends. Any number of processes may do it.
func (a *app) housekeep(ctx context.Context) error {
	tick := time.NewTicker(housekeepEvery)
	defer tick.Stop()
	for {
		if _, err := budgets.Prune(ctx, a.pool); err != nil && ctx.Err() == nil {
			a.log.WarnContext(ctx, "old budgets not forgotten", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
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
