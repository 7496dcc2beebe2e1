package reason

import (
	"cmp"
	"context"
	"errors"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Classes of stopped model calls: by time, or by the limit whose name follows.
const (
	classBudget      = "budget"
	classLimitPrefix = "budget_"
)

// minAnswer is the length, in tokens, of the shortest useful answer.
const minAnswer = 64

// account has the budget scopes of a turn.
type account struct {
	scopes       []budgets.Scope
	phase        string        // the PhaseScope
	maxWait      time.Duration // bound of the wait for others' reservations
	answerTokens int           // tokens of one answer; 0 for the model's default
}

// newAccount returns the budget scopes of a turn: the day, the surface's day, the run, the delegating turns or the
// phase, and the agent's day.
func (l *Loop) newAccount(ctx context.Context, t *Turn, b Budget, a agents.Agent) *account {
	span, _ := trace.From(ctx)
	others := append([]budgets.Scope{t.scope(span.TraceID, b)}, t.parentScopes...) // of equal limits, the first refuses
	if l.Sandbox != nil {
		return &account{scopes: append(others, l.Sandbox.Budget), maxWait: l.Limits.MaxWait, answerTokens: b.Answer}
	}
	if a.Declared() {
		others = append(others, budgets.AgentScope(a.Name, budgets.Limit{USD: a.Limits.DayUSD}))
	}
	return &account{
		scopes: l.Limits.Scopes(span.Surface, others...), phase: t.PhaseScope,
		maxWait: l.Limits.MaxWait, answerTokens: b.Answer,
	}
}

// scope returns the turn's own scope.
func (t *Turn) scope(id trace.ID, b Budget) budgets.Scope {
	return budgets.Scope{Name: cmp.Or(t.BudgetScope, budgets.RunScope(id)), Limit: b.limit()}
}

// limit returns the tokens and money of a budget.
func (b Budget) limit() budgets.Limit {
	limit := budgets.Limit{Tokens: int64(b.Tokens), USD: b.CostUSD}
	if b.Tokens == math.MaxInt {
		limit.Tokens = 0
	}
	return limit
}

// newReservation returns the reservation of a call. Each request of the call renews it.
func (a *account) newReservation(ctx context.Context, model *models.Client, req models.Request) (*reservation, error) {
	current, ok := executions.Current(ctx)
	if !ok {
		return nil, executions.ErrNotInExecution
	}
	req.MaxTokens = a.answerTokens
	quote := model.Quote(req)
	need := func() budgets.Need {
		density := model.Density(quote)
		return budgets.Need{
			PromptTokens: int64(math.Ceil(float64(quote.PromptTokens) * density)), PromptUSD: quote.PromptUSD * density,
			TokenUSD: quote.TokenUSD,
			Wanted:   int64(quote.AnswerTokens), Min: int64(min(minAnswer, quote.AnswerTokens)),
		}
	}
	return &reservation{
		Reservation: budgets.Reservation{
			ExecutionID: current.ID, Claim: current.Claim, Scopes: a.scopes, MaxWait: a.maxWait, Need: need(),
			Estimate: need,
		},
		quote: quote, phase: a.phase,
	}, nil
}

// reservation reserves a call and tracks its usage.
type reservation struct {
	budgets.Reservation
	phase            string // the PhaseScope
	quote            models.Quote
	grantedTokens    int64         // tokens of the answer
	lastSpend        budgets.Spend // of the last request
	lostSpend        budgets.Spend // of earlier, written-off requests
	lostAnswerTokens int64         // the part of lostSpend that was granted to their answers
}

// grant returns the granted tokens of the answer. From then on, the request counts at its worst case until the server
// reports usage.
func (r *reservation) grant(ctx context.Context, db postgres.DB, effect *executions.Effect) (int, error) {
	effect.OnResult = func(b *pgx.Batch) { r.Settle(b, r.lastSpend) }
	granted, err := r.Await(ctx, db)
	return r.accept(granted, err)
}

// renew reserves a further request after a request that may have been billed.
func (r *reservation) renew(ctx context.Context, db postgres.DB) (int, error) {
	lost, granted, err := r.Renew(ctx, db)
	r.lostSpend, r.lastSpend = r.lostSpend.Plus(lost), budgets.Spend{}
	r.lostAnswerTokens += min(r.grantedTokens, lost.Tokens)
	return r.accept(granted, err)
}

// accept accepts a grant, or converts a refusal to a step error.
func (r *reservation) accept(granted int64, err error) (int, error) {
	var refused *budgets.Error
	switch {
	case errors.As(err, &refused):
		return 0, &executions.StepError{
			Class: classLimitPrefix + r.limit(refused), Message: refused.Error(),
			Until: refused.ResetsAt(),
		}
	case err != nil:
		return 0, err
	}
	r.grantedTokens = granted
	r.assumeWorstCase(0, 0)
	return int(granted), nil
}

// assumeWorstCase counts the last request at its worst case, or at its known usage if that is more.
func (r *reservation) assumeWorstCase(tokens int, usd float64) {
	tokens64 := max(r.Need.PromptTokens+r.grantedTokens, int64(tokens))
	usd = max(r.Need.PromptUSD+float64(r.grantedTokens)*r.Need.TokenUSD, usd)
	r.lastSpend = budgets.Spend{Tokens: tokens64, USD: usd, UnknownTokens: tokens64, UnknownUSD: usd}
}

// recordUsage counts a request by its response, and returns the usage of the call.
func (r *reservation) recordUsage(response models.Response) (activity.Usage, float64) {
	u := response.Usage
	shown := activity.Usage{
		PromptTokens: u.PromptTokens, CachedTokens: u.CachedTokens, CacheWriteTokens: u.CacheWriteTokens,
		CompletionTokens: u.CompletionTokens, TotalTokens: u.TotalTokens, Estimated: u.Estimated,
	}
	r.lastSpend = budgets.Spend{Tokens: int64(u.TotalTokens), USD: response.CostUSD}
	switch {
	case response.Unknown:
		r.assumeWorstCase(u.TotalTokens, response.CostUSD)
		shown.PromptTokens = int(min(r.Need.PromptTokens, r.lastSpend.Tokens))
		shown.CompletionTokens, shown.Estimated = int(r.lastSpend.Tokens)-shown.PromptTokens, false
	case u.Estimated:
		r.lastSpend.UnknownTokens, r.lastSpend.UnknownUSD = r.lastSpend.Tokens, r.lastSpend.USD
	}
	all := r.lostSpend.Plus(r.lastSpend)
	shown.PromptTokens += int(r.lostSpend.Tokens - r.lostAnswerTokens)
	shown.CompletionTokens += int(r.lostAnswerTokens)
	shown.TotalTokens, shown.UnknownTokens, shown.UnknownUSD = int(all.Tokens), int(all.UnknownTokens), all.UnknownUSD
	return shown, all.USD
}

// limit returns the limit that refused a call.
func (r *reservation) limit(refused *budgets.Error) string {
	kind, rest, _ := strings.Cut(refused.Scope, ":")
	switch {
	case refused.Scope == r.phase:
		return EndedPhase
	case kind == "eval":
		return EndedEval
	case kind == "day" && strings.Contains(rest, ":"):
		return EndedSurface
	case kind == "day":
		return EndedDay
	case refused.Unit == budgets.USD:
		return EndedMoney
	}
	return EndedTokens
}

// limitFromError returns the limit that stopped a model call; ok is false for other errors.
func limitFromError(err error) (limit string, failure *executions.StepError, ok bool) {
	if !errors.As(err, &failure) {
		return "", nil, false
	}
	if failure.Class == classBudget {
		return EndedTime, failure, true
	}
	limit, ok = strings.CutPrefix(failure.Class, classLimitPrefix)
	return limit, failure, ok
}
