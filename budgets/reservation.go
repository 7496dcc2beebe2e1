package budgets

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// DefaultMaxWait bounds the wait for others' reservations.
const DefaultMaxWait = 30 * time.Second

// Pauses between attempts double from the first to the longest.
const (
	firstPause   = 20 * time.Millisecond
	longestPause = time.Second
)

// Need is the worst case of a call.
type Need struct {
	PromptTokens int64
	PromptUSD    float64
	TokenUSD     float64 // of one completion token; 0 for a model without a price
	Wanted       int64   // completion tokens
	Min          int64   // completion tokens of a useful answer
}

// Reservation reserves and settles one call. Its fields are set before use; only Estimate changes Need later. It is not
// safe for concurrent use.
type Reservation struct {
	ExecutionID string
	Claim       int64
	Step        string // of the call; Reserve sets it
	Scopes      []Scope
	Need        Need
	// Estimate, if set, computes Need before each attempt, because a waiting call learns from others.
	Estimate func() Need
	// MaxWait bounds the wait of Await. Default: DefaultMaxWait.
	MaxWait time.Duration

	answer verdict
}

// verdict is a row of reserve_agent_budget.
type verdict struct {
	Granted  *int64
	Scope    *string
	Unit     *string
	Kind     *string
	Bound    *float64
	Spent    *float64
	Reserved *float64
}

const reserve = `
	select granted, scope, unit, kind, bound::float8, spent::float8, reserved::float8
	  from lanekeeper.reserve_agent_budget(@execution_id, @claim, @step, @limits, @need)`

// writeOff settles a reservation of a lost claim as unknown, as the next claim would do. That claim may need the worker
// slot of the waiting call. Like every settlement, it locks the execution first. It skips locked executions.
const writeOff = `
	select lanekeeper.settle_agent_budget(l.execution_id, l.step)
	  from (select r.execution_id, r.step from agent_budget_reservations r join agent_executions x on x.id = r.execution_id
	         where x.claim > r.claim limit 1 for update of x, r skip locked) l`

// Spend is the usage of a call. UnknownTokens and UnknownUSD are the parts of Tokens and USD that the provider did not
// report: the worst case of a request without an answer, and the estimate of an answer without usage.
type Spend struct {
	Tokens        int64
	USD           float64
	UnknownTokens int64
	UnknownUSD    float64
}

// Plus adds the usage of another request.
func (s Spend) Plus(other Spend) Spend {
	return Spend{
		Tokens: s.Tokens + other.Tokens, USD: s.USD + other.USD,
		UnknownTokens: s.UnknownTokens + other.UnknownTokens, UnknownUSD: s.UnknownUSD + other.UnknownUSD,
	}
}

// Reserve queues the reservation for the call of a step, as executions.Call.OnIntent. A refusal does not fail the
// transaction; Await returns it.
func (r *Reservation) Reserve(b *pgx.Batch, step string) {
	r.estimate()
	r.Step, r.answer = step, verdict{}
	b.Queue(reserve, r.arguments(r.enough())).QueryRow(r.answer.scan)
}

// Renew writes the reservation off, because its request may have been billed, and reserves for another request. It
// returns the written-off usage and, like Await, the granted tokens.
func (r *Reservation) Renew(ctx context.Context, db postgres.DB) (Spend, int64, error) {
	r.estimate()
	lost, err := executions.RetryTransient(ctx, func(ctx context.Context) (lost Spend, err error) {
		r.answer = verdict{}
		b := &pgx.Batch{}
		// lock order: the execution, then its budgets
		b.Queue(`select fence_agent_execution(@id, @claim)`, postgres.Strict{"id": r.ExecutionID, "claim": r.Claim})
		b.Queue(`select tokens, cost_usd::float8 from lanekeeper.settle_agent_budget(@execution_id, @step)`,
			postgres.Strict{"execution_id": r.ExecutionID, "step": r.Step}).QueryRow(func(row pgx.Row) error {
			return row.Scan(&lost.Tokens, &lost.USD)
		})
		b.Queue(reserve, r.arguments(r.enough())).QueryRow(r.answer.scan)
		return lost, db.SendBatch(ctx, b).Close()
	})
	if err != nil {
		return Spend{}, 0, fmt.Errorf("renew reservation: %w", err)
	}
	lost.UnknownTokens, lost.UnknownUSD = lost.Tokens, lost.USD
	granted, err := r.Await(ctx, db)
	return lost, granted, err
}

// Await returns the granted completion tokens. While other calls hold the remainder, it retries with growing pauses,
// and writes off what lost claims hold. After MaxWait it accepts a small remainder. A refusal is an [*Error].
func (r *Reservation) Await(ctx context.Context, db postgres.DB) (int64, error) {
	deadline := time.Now().Add(cmp.Or(r.MaxWait, DefaultMaxWait))
	last := false
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		switch {
		case r.answer.Granted != nil:
			return *r.answer.Granted, nil
		case r.answer.Kind == nil: // Reserve was not sent
		case *r.answer.Kind == Spent || last:
			a := r.answer
			return 0, &Error{
				Scope: *a.Scope, Unit: *a.Unit, Kind: *a.Kind, Limit: *a.Bound, Spent: *a.Spent,
				Reserved: *a.Reserved,
			}
		case !sleep.For(ctx, min(pause/2+rand.N(pause), time.Until(deadline))):
			return 0, context.Cause(ctx)
		}
		enough := r.enough()
		if last = !time.Now().Before(deadline); last {
			enough = r.Need.Min
		}
		if err := r.retry(ctx, db, enough); err != nil {
			return 0, err
		}
	}
}

// retry writes off lost reservations, then reserves, each in its own transaction.
func (r *Reservation) retry(ctx context.Context, db postgres.DB, enough int64) error {
	r.estimate()
	_, err := executions.RetryTransient(ctx, func(ctx context.Context) (struct{}, error) {
		for lost := int64(1); lost > 0; {
			tag, err := db.Exec(ctx, writeOff)
			if err != nil {
				return struct{}{}, err
			}
			lost = tag.RowsAffected()
		}
		return struct{}{}, r.answer.scan(db.QueryRow(ctx, reserve, r.arguments(enough)))
	})
	if err != nil {
		return fmt.Errorf("reserve budget: %w", err)
	}
	return nil
}

// estimate updates the need.
func (r *Reservation) estimate() {
	if r.Estimate != nil {
		r.Need = r.Estimate()
	}
}

// Settle queues the usage of the last request, as executions.Effect.OnResult. It has no effect without a reservation.
func (r *Reservation) Settle(b *pgx.Batch, s Spend) {
	tokens, usd := max(s.Tokens, 0), max(s.USD, 0)
	b.Queue(`select lanekeeper.settle_agent_budget(@execution_id, @step, @spend)`, postgres.Strict{
		"execution_id": r.ExecutionID, "step": r.Step, "spend": map[string]any{
			"tokens": tokens, "usd": usd, "unknown_tokens": min(max(s.UnknownTokens, 0), tokens),
			"unknown_usd": min(max(s.UnknownUSD, 0), usd),
		},
	})
}

// limit is a scope for reserve_agent_budget.
type limit struct {
	Scope  string  `json:"scope"`
	Tokens int64   `json:"tokens"`
	USD    float64 `json:"usd"`
}

func (r *Reservation) arguments(enough int64) postgres.Strict {
	limits := make([]limit, len(r.Scopes))
	for i, s := range r.Scopes {
		limits[i] = limit{s.Name, max(s.Tokens, 0), max(s.USD, 0)}
	}
	minimum := max(r.Need.Min, 1)
	enough = max(enough, minimum)
	return postgres.Strict{
		"execution_id": r.ExecutionID, "claim": r.Claim, "step": r.Step, "limits": limits, "need": map[string]any{
			"prompt_tokens": r.Need.PromptTokens, "prompt_usd": r.Need.PromptUSD, "token_usd": r.Need.TokenUSD,
			"wanted": max(r.Need.Wanted, enough), "enough": enough, "least": minimum,
		},
	}
}

// enough is the accepted length of an answer while others hold the remainder: half of the wanted one. A wait is better
// than a short answer.
func (r *Reservation) enough() int64 { return max(r.Need.Wanted/2, r.Need.Min, 1) }

func (v *verdict) scan(row pgx.Row) error {
	var got verdict
	err := row.Scan(&got.Granted, &got.Scope, &got.Unit, &got.Kind, &got.Bound, &got.Spent, &got.Reserved)
	if err == nil {
		*v = got
	}
	return err
}
