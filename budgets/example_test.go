package budgets_test

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
)

// The reservation commits with the intent of the call, and is settled with its result.
func ExampleReservation() {
	var pool *pgxpool.Pool
	flow := func(ctx context.Context) (string, error) {
		x, _ := executions.Current(ctx)
		r := &budgets.Reservation{
			ExecutionID: x.ID, Claim: x.Claim,
			Scopes: []budgets.Scope{{Name: "day", Limit: budgets.Limit{Tokens: 100_000}}},
			Need:   budgets.Need{PromptTokens: 900, Wanted: 500, Min: 50},
		}
		return executions.Do(ctx, "model", executions.Call{
			Entry: activity.Entry{Skill: "ask"}, OnIntent: r.Reserve,
		}, func(ctx context.Context, effect *executions.Effect) (string, error) {
			tokens, err := r.Await(ctx, pool)
			if err != nil {
				return "", err // a *budgets.Error: a limit
			}
			text, used, cost, err := complete(ctx, tokens)
			effect.OnResult = func(b *pgx.Batch) { r.Settle(b, budgets.Spend{Tokens: used, USD: cost}) }
			return text, err
		})
	}
	_ = flow // called within an execution
}

// complete is a fake model that answers within a number of tokens.
func complete(_ context.Context, tokens int64) (text string, used int64, cost float64, err error) {
	return "All is well.", min(tokens, 4) + 900, 0.001, nil
}
