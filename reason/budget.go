package reason

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

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
	endedTime       = "time"
	endedTokens     = "tokens"  // of the run
	endedMoney      = "money"   // of the run
	endedDay        = "day"     // tokens or money of all runs together
	endedSurface    = "surface" // tokens or money of the surface's runs
)

// leastAnswer is how many tokens an answer must be allowed to have for a call to be worth its prompt.
const leastAnswer = 64

// account is where the model calls of one turn are counted.
type account struct {
	scopes   []budgets.Scope
	patience time.Duration // with others' reservations
	answer   int           // tokens of one answer; 0 for the model's usual
	key      string        // begins the names of its reservations
	calls    int
}

// open says where a turn's calls are counted: in the day, the surface's day, the run, and what a run that
// delegated the turn allows it.
func (l *Loop) open(ctx context.Context, t Turn, b Budget) *account {
	span, _ := trace.From(ctx)
	return &account{
		scopes:   l.Limits.Scopes(span.Surface, append(slices.Clone(t.above), t.scope(span.TraceID, b))...),
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

// bounded reports whether anything limits the account.
func (a *account) bounded() bool {
	for _, s := range a.scopes {
		if s.Limit != (budgets.Limit{}) {
			return true
		}
	}
	return false
}

// reservation is that of the account's next call. Its name is the same in every run of the execution.
func (a *account) reservation(ctx context.Context, model *models.Client, req models.Request) (*reservation, error) {
	if a.key == "" {
		var err error
		if a.key, err = executions.Step(ctx, "account", func(context.Context) (string, error) { return rand.Text(), nil }); err != nil {
			return nil, err
		}
	}
	current, ok := executions.Current(ctx)
	if !ok {
		return nil, executions.ErrOutside
	}
	a.calls++
	req.MaxTokens = a.answer
	quote := model.Quote(req)
	need := func() budgets.Need {
		dense := model.Density()
		return budgets.Need{
			PromptTokens: int64(math.Ceil(float64(quote.PromptTokens) * dense)), PromptUSD: quote.PromptUSD * dense, TokenUSD: quote.TokenUSD,
			Wanted: int64(quote.AnswerTokens), Least: int64(min(leastAnswer, quote.AnswerTokens)),
		}
	}
	return &reservation{
		Reservation: budgets.Reservation{
			ExecutionID: current.ID, Claim: current.Claim, Step: fmt.Sprintf("model %d of %s", a.calls, a.key), Scopes: a.scopes,
			Patience: a.patience, Need: need(), Reckon: need,
		},
		bounded: a.bounded() || a.answer > 0, reckoned: quote.PromptTokens,
	}, nil
}

// reservation is one call's, with what the call has used.
type reservation struct {
	budgets.Reservation
	bounded  bool
	reckoned int // tokens of the prompt
	tokens   int64
	cost     float64
}

// grant returns how long the answer may be, in tokens; 0 is no bound. From then on the call's worst case counts, until
// it says what it used.
func (r *reservation) grant(ctx context.Context, db postgres.DB, effect *executions.Effect) (int, error) {
	effect.Settle = func(b *pgx.Batch) { r.Settle(b, r.tokens, r.cost) }
	granted, err := r.Await(ctx, db)
	var refused *budgets.Error
	switch {
	case errors.As(err, &refused):
		return 0, &executions.StepError{Class: classLimit + endedByScope(refused), Message: refused.Error()}
	case err != nil:
		return 0, err
	}
	r.tokens = r.Need.PromptTokens + granted
	r.cost = r.Need.PromptUSD + float64(granted)*r.Need.TokenUSD
	if !r.bounded {
		return 0, nil
	}
	return int(granted), nil
}

// used says what the call has come to.
func (r *reservation) used(tokens int, cost float64) { r.tokens, r.cost = int64(tokens), cost }

// endedByScope names the limit that a refusal is about.
func endedByScope(refused *budgets.Error) string {
	kind, rest, _ := strings.Cut(refused.Scope, ":")
	switch {
	case kind == "day" && strings.Contains(rest, ":"):
		return endedSurface
	case kind == "day":
		return endedDay
	case refused.Unit == budgets.USD:
		return endedMoney
	}
	return endedTokens
}

// endedBy says which limit made a model call fail, and in a sentence why; ok is false for other errors.
func endedBy(err error) (limit, why string, ok bool) {
	var failure *executions.StepError
	if !errors.As(err, &failure) {
		return "", "", false
	}
	if failure.Class == classBudget {
		return endedTime, "", true
	}
	limit, ok = strings.CutPrefix(failure.Class, classLimit)
	return limit, failure.Message, ok
}
