package reason

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"
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

// Classes of model calls that were not made or not finished: the time has run out; or, with the name of the
// limit after it, a limit of tokens or money.
const (
	classBudget = "budget"
	classLimit  = "budget_"
)

// How a turn ends that a limit stops.
const (
	endedIterations = "iterations"
	EndedTime       = "time"
	EndedTokens     = "tokens"  // of the run
	endedMoney      = "money"   // of the run
	EndedDay        = "day"     // tokens or money of all runs together
	EndedSurface    = "surface" // tokens or money of the surface's runs
)

// leastAnswer is how many tokens an answer must be allowed to have for a call to be worth its prompt.
const leastAnswer = 64

// account is where the model calls of one turn are counted.
type account struct {
	scopes   []budgets.Scope
	patience time.Duration // with others' reservations
	answer   int           // tokens of one answer; 0 for the model's usual
}

// open says where a turn's calls are counted: in the day, the surface's day, the run, what a run that delegated the
// turn allows it, and the day of its agent.
func (l *Loop) open(ctx context.Context, t Turn, b Budget, a agents.Agent) *account {
	span, _ := trace.From(ctx)
	others := append(slices.Clone(t.above), t.scope(span.TraceID, b))
	if a.Declared() {
		others = append(others, budgets.AgentScope(a.Name, budgets.Limit{USD: a.Limits.DayUSD}))
	}
	return &account{
		scopes:   l.Limits.Scopes(span.Surface, others...),
		patience: l.Limits.Patience, answer: b.Answer,
	}
}

// scope is the turn's own.
func (t Turn) scope(id trace.ID, b Budget) budgets.Scope {
	return budgets.Scope{Name: cmp.Or(t.BudgetScope, budgets.RunScope(id)), Limit: b.limit()}
}

// limit is a budget's tokens and money.
func (b Budget) limit() budgets.Limit {
	limit := budgets.Limit{Tokens: int64(b.Tokens), USD: b.CostUSD}
	if b.Tokens == math.MaxInt {
		limit.Tokens = 0
	}
	return limit
}

// reservation is that of a call. Each request that the call sends has one; they follow each other.
func (a *account) reservation(ctx context.Context, model *models.Client, req models.Request) (*reservation, error) {
	current, ok := executions.Current(ctx)
	if !ok {
		return nil, executions.ErrNotInExecution
	}
	req.MaxTokens = a.answer
	quote := model.Quote(req)
	need := func() budgets.Need {
		dense := model.Density()
		return budgets.Need{
			PromptTokens: int64(math.Ceil(float64(quote.PromptTokens) * dense)), PromptUSD: quote.PromptUSD * dense,
			TokenUSD: quote.TokenUSD,
			Wanted:   int64(quote.AnswerTokens), Least: int64(min(leastAnswer, quote.AnswerTokens)),
		}
	}
	return &reservation{
		Reservation: budgets.Reservation{
			ExecutionID: current.ID, Claim: current.Claim, Scopes: a.scopes, Patience: a.patience, Need: need(),
			Reckon: need,
		},
		reckoned: quote.PromptTokens,
	}, nil
}

// reservation is one call's, with what the call has used.
type reservation struct {
	budgets.Reservation
	reckoned int           // tokens of the prompt
	granted  int64         // tokens of the answer
	last     budgets.Spend // of the last request
	lost     budgets.Spend // of the requests before it, written off,
	answers  int64         // and what their answers were allowed of that
}

// grant returns how long the answer may be, in tokens. From then on the request's worst case counts, until it says what
// it used.
func (r *reservation) grant(ctx context.Context, db postgres.DB, effect *executions.Effect) (int, error) {
	effect.OnResult = func(b *pgx.Batch) { r.Settle(b, r.last) }
	granted, err := r.Await(ctx, db)
	return r.take(granted, err)
}

// renew has another request follow one that may have been billed.
func (r *reservation) renew(ctx context.Context, db postgres.DB) (int, error) {
	lost, granted, err := r.Renew(ctx, db)
	r.lost, r.last = r.lost.Plus(lost), budgets.Spend{}
	r.answers += min(r.granted, lost.Tokens)
	return r.take(granted, err)
}

// take takes what a limit grants.
func (r *reservation) take(granted int64, err error) (int, error) {
	var refused *budgets.Error
	switch {
	case errors.As(err, &refused):
		return 0, &executions.StepError{
			Class: classLimit + endedByScope(refused), Message: refused.Error(),
			Until: refused.Ends(),
		}
	case err != nil:
		return 0, err
	}
	r.granted = granted
	r.unknown(0, 0)
	return int(granted), nil
}

// unknown counts the last request at its worst case, and no less than what is known of it.
func (r *reservation) unknown(tokens int, usd float64) {
	tokens64 := max(r.Need.PromptTokens+r.granted, int64(tokens))
	usd = max(r.Need.PromptUSD+float64(r.granted)*r.Need.TokenUSD, usd)
	r.last = budgets.Spend{Tokens: tokens64, USD: usd, UnknownTokens: tokens64, UnknownUSD: usd}
}

// used counts a request by its response, and returns what the call has used in all.
func (r *reservation) used(response models.Response) (activity.Usage, float64) {
	u := response.Usage
	shown := activity.Usage{
		PromptTokens: u.PromptTokens, CachedTokens: u.CachedTokens, CacheWriteTokens: u.CacheWriteTokens,
		CompletionTokens: u.CompletionTokens, TotalTokens: u.TotalTokens, Estimated: u.Estimated,
	}
	r.last = budgets.Spend{Tokens: int64(u.TotalTokens), USD: response.CostUSD}
	switch {
	case response.Unknown:
		r.unknown(u.TotalTokens, response.CostUSD)
		shown.PromptTokens = int(min(r.Need.PromptTokens, r.last.Tokens))
		shown.CompletionTokens, shown.Estimated = int(r.last.Tokens)-shown.PromptTokens, false
	case u.Estimated:
		r.last.UnknownTokens, r.last.UnknownUSD = r.last.Tokens, r.last.USD
	}
	all := r.lost.Plus(r.last)
	shown.PromptTokens += int(r.lost.Tokens - r.answers)
	shown.CompletionTokens += int(r.answers)
	shown.TotalTokens, shown.UnknownTokens, shown.UnknownUSD = int(all.Tokens), int(all.UnknownTokens), all.UnknownUSD
	return shown, all.USD
}

// endedByScope names the limit that a refusal is about.
func endedByScope(refused *budgets.Error) string {
	kind, rest, _ := strings.Cut(refused.Scope, ":")
	switch {
	case kind == "day" && strings.Contains(rest, ":"):
		return EndedSurface
	case kind == "day":
		return EndedDay
	case refused.Unit == budgets.USD:
		return endedMoney
	}
	return EndedTokens
}

// endedBy says which limit made a model call fail, and how; ok is false for other errors.
func endedBy(err error) (limit string, failure *executions.StepError, ok bool) {
	if !errors.As(err, &failure) {
		return "", nil, false
	}
	if failure.Class == classBudget {
		return EndedTime, failure, true
	}
	limit, ok = strings.CutPrefix(failure.Class, classLimit)
	return limit, failure, ok
}
