package app

import (
	"math"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/trace"
)

// NewDirectory returns the directory of agents, with the settings as defaults.
func NewDirectory(cfg config.Config) *agents.Directory {
	return &agents.Directory{Settings: agents.Settings{
		Name: cfg.Name, Model: cfg.Model, Effort: cfg.Provider.Effort, Timezone: cfg.Timezone,
		HeartbeatCron: cfg.HeartbeatCron,
		Limits: agents.Limits{
			Iterations: cfg.Budget.MaxIterations, Tokens: cfg.Budget.MaxTokens, CostUSD: cfg.Budget.MaxCostUSD,
			DayUSD: cfg.Limits.DayUSD,
		},
	}}
}

// Limits converts the limits of the settings.
func Limits(l config.Limits) budgets.Limits {
	limit := func(tokens int, usd float64) budgets.Limit { return budgets.Limit{Tokens: int64(tokens), USD: usd} }
	return budgets.Limits{
		Day: limit(l.DayTokens, l.DayUSD),
		Surface: map[trace.Surface]budgets.Limit{
			trace.Heartbeat: limit(l.HeartbeatTokens, l.HeartbeatUSD),
			trace.Operate:   limit(l.OperateTokens, l.OperateUSD),
			trace.Chat:      limit(l.ChatTokens, l.ChatUSD),
			trace.Webhook:   limit(l.WebhookTokens, l.WebhookUSD),
		},
	}
}

// unlimited maps the setting 0, no limit, to the largest int.
func unlimited(n int) int {
	if n == 0 {
		return math.MaxInt
	}
	return n
}

// admission converts the configured concurrency limits.
func admission(cfg config.Config) []executions.Admission {
	limits := make([]executions.Admission, len(cfg.Admission))
	for i, l := range cfg.Admission {
		limits[i] = executions.Admission(l)
	}
	return limits
}

// HealPolicy returns the configured rules of self-heal.
func HealPolicy(cfg config.Config) selfheal.Policy {
	return selfheal.Policy{
		Failures: cfg.SelfHeal.Failures, Window: cfg.SelfHeal.Window, Rate: cfg.SelfHeal.FailureRate,
		RateCalls: cfg.SelfHeal.RateCalls, Cooldown: cfg.SelfHeal.Cooldown,
	}
}
