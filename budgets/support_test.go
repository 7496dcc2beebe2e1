package budgets_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// insertRunning inserts an execution with a first claim of a live worker.
func insertRunning(t *testing.T, db *pgxpool.Pool) string {
	t.Helper()
	return pgtest.Value[string](t, db, `
		with w as (insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 hour') returning id)
		insert into agent_executions (trace_id, surface, flow, status, claim, claimed_by)
		select 'fl_x', 'flow', 'test', 'running', 1, id from w returning id::text`)
}

// reservation returns the reservation of call n of an execution: a prompt of 100 tokens, and 50 to 1,000 more.
func reservation(id string, n int, scopes ...budgets.Scope) *budgets.Reservation {
	return &budgets.Reservation{
		ExecutionID: id, Claim: 1, Step: fmt.Sprintf("model %d", n), Scopes: scopes,
		Need: budgets.Need{PromptTokens: 100, Wanted: 1000, Min: 50},
	}
}

func scope(name string, tokens int64, usd float64) budgets.Scope {
	return budgets.Scope{Name: name, Limit: budgets.Limit{Tokens: tokens, USD: usd}}
}

func send(t *testing.T, db postgres.DB, queue func(b *pgx.Batch)) error {
	t.Helper()
	b := &pgx.Batch{}
	queue(b)
	return db.SendBatch(t.Context(), b).Close()
}

func queueReserve(r *budgets.Reservation) func(b *pgx.Batch) {
	return func(b *pgx.Batch) { r.Reserve(b, r.Step) }
}

// reserve sends a reservation and returns the granted tokens. It does not wait for others.
func reserve(t *testing.T, db postgres.DB, r *budgets.Reservation) (int64, error) {
	t.Helper()
	r.MaxWait = 1
	require.NoError(t, send(t, db, queueReserve(r)), "Reserve")
	return r.Await(t.Context(), db)
}

func settle(t *testing.T, db postgres.DB, r *budgets.Reservation, tokens int64, usd float64) {
	t.Helper()
	require.NoError(t, send(t, db, func(b *pgx.Batch) { r.Settle(b, budgets.Spend{Tokens: tokens, USD: usd}) }), "Settle")
}

// usageOf returns a scope as text: spent, reserved, unknown.
func usageOf(t *testing.T, db postgres.DB, name string) string {
	t.Helper()
	return pgtest.Value[string](t, db, `
		select format('%s %s$ spent, %s %s$ reserved, %s %s$ of %s unknown', tokens, trim_scale(cost_usd), reserved_tokens,
		              trim_scale(reserved_usd), unknown_tokens, trim_scale(unknown_usd), unsettled)
		  from agent_budgets where scope = $1`, name)
}
