package budgets_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestGrantedTokens(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		limit    budgets.Limit
		price    float64 // of a token
		spent    int64
		want     int64
		wantUnit string // of the error; empty for none
	}{
		"no limit":        {spent: 1_000_000, want: 1000},
		"ample limit":     {limit: budgets.Limit{Tokens: 5000}, want: 1000},
		"exact limit":     {limit: budgets.Limit{Tokens: 1100}, want: 1000},
		"small remainder": {limit: budgets.Limit{Tokens: 1100}, spent: 800, want: 200},
		"minimum":         {limit: budgets.Limit{Tokens: 1100}, spent: 950, want: 50},
		"below minimum":   {limit: budgets.Limit{Tokens: 1100}, spent: 951, wantUnit: budgets.Tokens},
		"overspent":       {limit: budgets.Limit{Tokens: 1100}, spent: 9000, wantUnit: budgets.Tokens},
		"exact money":     {limit: budgets.Limit{USD: 11}, price: 0.01, want: 1000},
		"little money":    {limit: budgets.Limit{USD: 3}, price: 0.01, want: 200},
		"no money":        {limit: budgets.Limit{USD: 1.49}, price: 0.01, wantUnit: budgets.USD},
		"free model":      {limit: budgets.Limit{USD: 0.0001}, spent: 100, want: 1000},
		"both limits":     {limit: budgets.Limit{Tokens: 400, USD: 3}, price: 0.01, want: 200},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.DB(t)
			id := insertRunning(t, db)
			before := reservation(id, 0, scope("s", 0, 0))
			_, err := reserve(t, db, before)
			require.NoError(t, err)
			settle(t, db, before, test.spent, 0)
			r := reservation(id, 1, scope("s", test.limit.Tokens, test.limit.USD))
			r.Need.PromptUSD, r.Need.TokenUSD = 100*test.price, test.price
			got, err := reserve(t, db, r)
			var refused *budgets.Error
			switch {
			case test.wantUnit == "" && (err != nil || got != test.want):
				t.Errorf("granted %d (%v), want %d", got, err, test.want)
			case test.wantUnit != "" &&
				(!errors.As(err, &refused) || refused.Unit != test.wantUnit || refused.Kind != budgets.Spent):
				t.Errorf("granted %d (%v), want the %s to be spent", got, err, test.wantUnit)
			}
		})
	}
}

func TestErrorNamesScope(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertRunning(t, db)
	limits := budgets.Limits{
		Day:     budgets.Limit{Tokens: 5000},
		Surface: map[trace.Surface]budgets.Limit{trace.Chat: {Tokens: 120}},
	}
	_, err := reserve(t, db, reservation(id, 0, limits.Scopes(trace.Chat, scope("run:ch_1", 9000, 0))...))
	var refused *budgets.Error
	require.Truef(t, errors.As(err, &refused) && strings.HasSuffix(refused.Scope, ":chat") && refused.Limit == 120,
		"err = %v", err)
	assert.Contains(t, err.Error(), "120 tokens for the surface chat on 20")
	got, err := reserve(t, db, reservation(id, 1, limits.Scopes(trace.Webhook)...))
	assert.Truef(t, err == nil && got == 1000, "another surface was granted %d (%v)", got, err)
	assert.Equal(t, 2, pgtest.Value[int](t, db, `select count(*) from agent_budget_today where reserved_tokens = 1100`))
	pgtest.Exec(t, db, `update agent_budgets set cost_usd = 0.0500, reserved_usd = 1.000, unknown_usd = 0.00`)
	pgtest.Equal(t, db, "0.05 1 0",
		`select string_agg(distinct concat_ws(' ', cost_usd, reserved_usd, unknown_usd), ',') from agent_budget_today`)
}

func TestStepIsReservedAndSettledOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	r := reservation(insertRunning(t, db), 0, scope("s", 1500, 0))
	for range 2 { // the first answer was lost
		got, err := reserve(t, db, r)
		require.Truef(t, err == nil && got == 1000, "granted %d (%v)", got, err)
	}
	assert.Equal(t, "0 0$ spent, 1100 0$ reserved, 0 0$ of 0 unknown", usageOf(t, db, "s"))
	for range 2 {
		settle(t, db, r, 400, 0.25)
	}
	assert.Equal(t, "400 0.25$ spent, 0 0$ reserved, 0 0$ of 0 unknown", usageOf(t, db, "s"))
}

func TestReservationReadsItsScopesOnly(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `insert into agent_budgets (scope) select 'visitor ' || n from generate_series(1, 1000) n`)
	pgtest.Exec(t, db, `analyze agent_budgets`)
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = reserve(t, tx, reservation(insertRunning(t, db), 0, scope("s", 1500, 0), scope("visitor 7", 0, 1)))
	require.NoError(t, err)
	read := pgtest.Value[int](t, tx, `select (seq_tup_read + coalesce(idx_tup_fetch, 0))::int from pg_stat_xact_user_tables
		where relname = 'agent_budgets'`)
	assert.Truef(t, read > 0 && read < 20, "%d rows were read", read)
}

// The request of the lost claim may have been billed, and the next one will be.
func TestRepeatedCallUnderNewClaimIsReservedTwice(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertRunning(t, db)
	_, err := reserve(t, db, reservation(id, 0, scope("s", 0, 0)))
	require.NoError(t, err)
	pgtest.Exec(t, db, `update agent_executions set claim = 2 where id = $1`, id) // a crash
	again := reservation(id, 0, scope("s", 0, 0))
	again.Claim = 2
	got, err := reserve(t, db, again)
	assert.Truef(t, err == nil && got == 1000, "after a crash the call was granted %d (%v)", got, err)
	assert.Equal(t, "1100 0$ spent, 1100 0$ reserved, 1100 0$ of 1 unknown", usageOf(t, db, "s"))
	settle(t, db, again, 400, 0.25)
	assert.Equal(t, "1500 0.25$ spent, 0 0$ reserved, 1100 0$ of 1 unknown", usageOf(t, db, "s"))
}

// A reservation of a lost claim counts after another claim begins. It is in the row of its call.
func TestTakeoverWritesOffReservation(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertRunning(t, db)
	r := reservation(id, 0, scope("s", 0, 0))
	r.Need.PromptUSD, r.Need.TokenUSD = 1, 0.001
	row, err := activity.Open(t.Context(), db, activity.Entry{
		TraceID: "fl_x", ExecutionID: id, Claim: 1, Step: r.Step, Skill: "model_call", Kind: activity.KindModel,
	})
	require.NoError(t, err)
	_, err = reserve(t, db, r)
	require.NoError(t, err)
	pgtest.Exec(t, db, `update agent_executions set claim = 2 where id = $1`, id)
	for range 2 {
		pgtest.Exec(t, db, `select lanekeeper.recover_agent_activity($1, 2)`, id)
	}
	assert.Equal(t, "1100 2$ spent, 0 0$ reserved, 1100 2$ of 1 unknown", usageOf(t, db, "s"))
	if got := pgtest.Value[string](t, db, `select concat_ws(' ', status, cost_usd::float8, token_usage) from agent_activity
		where id = $1`, row); got !=
		`unknown 2 {"unknown_usd": 2.000, "total_tokens": 1100, "prompt_tokens": 100, "unknown_tokens": 1100, "completion_tokens": 1000}` {
		t.Errorf("the row says %s", got)
	}
	assert.Equal(t, "1100 2 2", pgtest.Value[string](t, db,
		`select concat_ws(' ', tokens, cost_usd, unknown_usd) from agent_spend`))
}

// The other execution's next claim may need the worker slot of the waiting call.
func TestAwaitWritesOffLostReservation(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	lost := insertRunning(t, db)
	_, err := reserve(t, db, reservation(lost, 0, scope("s", 1500, 0)))
	require.NoError(t, err)
	pgtest.Exec(t, db, `update agent_executions set claimed_by = null, claim = 2 where id = $1`, lost)
	r := reservation(insertRunning(t, db), 0, scope("s", 1500, 0))
	require.NoError(t, send(t, db, queueReserve(r)))
	r.MaxWait = time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	got, err := r.Await(ctx, db)
	assert.NoError(t, err)
	assert.Equal(t, 300, got)
	assert.Equal(t, "1100 0$ spent, 400 0$ reserved, 1100 0$ of 1 unknown", usageOf(t, db, "s"))
}

// A request that may have been billed is written off before the next one is sent.
func TestRenewWritesOffPreviousRequest(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertRunning(t, db)
	r := reservation(id, 0, scope("s", 1500, 0))
	r.MaxWait = 1
	_, err := reserve(t, db, r)
	require.NoError(t, err)
	lost, granted, err := r.Renew(t.Context(), db)
	assert.Truef(t, err == nil && granted == 300 && lost == (budgets.Spend{Tokens: 1100, UnknownTokens: 1100}),
		"lost %+v, granted %d (%v); want the 300 that are left", lost, granted, err)
	assert.Equal(t, "1100 0$ spent, 400 0$ reserved, 1100 0$ of 1 unknown", usageOf(t, db, "s"))
	var refused *budgets.Error
	_, _, err = r.Renew(t.Context(), db)
	assert.Truef(t, errors.As(err, &refused) && refused.Kind == budgets.Spent, "a third request: %v", err)
	assert.Equal(t, "1500 0$ spent, 0 0$ reserved, 1500 0$ of 2 unknown", usageOf(t, db, "s"))
	r.Claim = 0
	_, _, err = r.Renew(t.Context(), db)
	assert.Truef(t, postgres.IsCode(err, "LK001"), "a stale claim: %v, want SQLSTATE LK001", err)
}

func TestStaleClaimReservesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	r := reservation(insertRunning(t, db), 0, scope("s", 0, 0))
	r.Claim = 0
	err := send(t, db, queueReserve(r))
	assert.Truef(t, postgres.IsCode(err, "LK001"), "err = %v, want SQLSTATE LK001", err)
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*) from agent_budget_reservations`))
}

func TestAwaitWaitsForOtherReservations(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertRunning(t, db)
	first, second := reservation(id, 1, scope("s", 1220, 0)), reservation(id, 2, scope("s", 1220, 0))
	_, err := reserve(t, db, first)
	require.NoError(t, err)
	_, err = reserve(t, db, second)
	var refused *budgets.Error
	require.Truef(t, errors.As(err, &refused) && refused.Kind == budgets.Reserved && refused.Reserved == 1100,
		"err = %v, want the reservation of the first to be in the way", err)
	second.MaxWait = time.Minute
	require.NoError(t, send(t, db, queueReserve(second)))
	settled := make(chan error, 1)
	go func() {
		_, err := db.Exec(t.Context(), `select lanekeeper.settle_agent_budget($1, 'model 1',
			'{"tokens": 150, "usd": 0, "unknown_tokens": 0, "unknown_usd": 0}')`, id)
		settled <- err
	}()
	got, err := second.Await(t.Context(), db)
	assert.NoError(t, err)
	assert.Equal(t, 970, got)
	assert.NoError(t, <-settled)
}

// Two concurrent reservations must not both find the same room: the second reads the budget after the first has
// decided.
func TestConcurrentReservationsAreSerialized(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertRunning(t, db)
	earlier := reservation(id, 0, scope("s", 0, 0))
	_, err := reserve(t, db, earlier)
	require.NoError(t, err)
	settle(t, db, earlier, 0, 0)
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `select from agent_budgets for update`) // the first is about to decide
	second := reservation(insertRunning(t, db), 2, scope("s", 1220, 0))
	second.MaxWait = 1
	sent := make(chan error, 1)
	go func() { sent <- send(t, db, queueReserve(second)) }()
	pgtest.AwaitBlocked(t, db, 1, "reserve_agent_budget")
	got, err := reserve(t, tx, reservation(id, 1, scope("s", 1220, 0)))
	require.Truef(t, err == nil && got == 1000, "the first was granted %d (%v)", got, err)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-sent)
	got, err = second.Await(t.Context(), db)
	assert.Error(t, err, "the second was granted", got, "beside the first")
	assert.Equal(t, "0 0$ spent, 1100 0$ reserved, 0 0$ of 0 unknown", usageOf(t, db, "s"))
}

// Two surfaces may name their scopes in different orders. Their calls must not wait for each other.
func TestScopesInAnyOrderDoNotDeadlock(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	var group errgroup.Group
	for n := range 16 {
		id := insertRunning(t, db)
		scopes := []budgets.Scope{scope("a", 0, 0), scope("b", 0, 0), scope("c", 0, 0)}
		if n%2 == 1 {
			slices.Reverse(scopes)
		}
		group.Go(func() error {
			for i := range 20 {
				r := reservation(id, i, scopes...)
				b := &pgx.Batch{}
				r.Reserve(b, r.Step)
				if i%3 != 0 {
					r.Settle(b, budgets.Spend{Tokens: 10})
				}
				if err := db.SendBatch(t.Context(), b).Close(); err != nil {
					return err
				}
			}
			_, err := db.Exec(t.Context(),
				`select lanekeeper.complete_agent_execution($1, 1, 'completed', '', null, null, null)`, id)
			return err
		})
	}
	require.NoError(t, group.Wait())
	for _, s := range []string{"a", "b", "c"} {
		assert.Equal(t, "125280 0$ spent, 0 0$ reserved, 123200 0$ of 112 unknown", usageOf(t, db, s), s)
	}
}

func TestAwaitAcceptsSmallRemainderAfterMaxWait(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertRunning(t, db)
	_, err := reserve(t, db, reservation(id, 1, scope("s", 1500, 0)))
	require.NoError(t, err)
	second := reservation(id, 2, scope("s", 1500, 0))
	second.Need.PromptTokens = 200
	got, err := reserve(t, db, second)
	assert.Truef(t, err == nil && got == 200, "granted %d (%v), want the 200 that are left", got, err)
}

func TestEndOfExecutionWritesOffReservations(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertRunning(t, db)
	r := reservation(id, 1, scope("s", 0, 0), scope("r", 0, 0))
	r.Need.PromptUSD, r.Need.TokenUSD = 1, 0.001
	_, err := reserve(t, db, r)
	require.NoError(t, err)
	pgtest.Exec(t, db, `select cancel_agent_execution($1, 'admin', 'enough')`, id)
	for _, s := range []string{"s", "r"} {
		assert.Equal(t, "1100 2$ spent, 0 0$ reserved, 1100 2$ of 1 unknown", usageOf(t, db, s), s)
	}
	settle(t, db, r, 400, 0.25) // too late
	assert.Equal(t, "1100 2$ spent, 0 0$ reserved, 1100 2$ of 1 unknown", usageOf(t, db, "s"))
}

func TestUsageAboveReservationIsSettled(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertRunning(t, db)
	r := reservation(id, 1, scope("s", 1500, 0))
	_, err := reserve(t, db, r)
	require.NoError(t, err)
	settle(t, db, r, 9000, 0)
	assert.Equal(t, "9000 0$ spent, 0 0$ reserved, 0 0$ of 0 unknown", usageOf(t, db, "s"))
}

func TestInvalidArgumentsAreRejected(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := insertRunning(t, db)
	for name, change := range map[string]func(r *budgets.Reservation){
		"no scope":        func(r *budgets.Reservation) { r.Scopes = nil },
		"no step":         func(r *budgets.Reservation) { r.Step = "" },
		"negative prompt": func(r *budgets.Reservation) { r.Need.PromptTokens = -1 },
		"negative price":  func(r *budgets.Reservation) { r.Need.TokenUSD = -1 },
	} {
		r := reservation(id, 1, scope("s", 0, 0))
		change(r)
		err := send(t, db, queueReserve(r))
		assert.Truef(t, postgres.IsCode(err, "22023"), "%s: %v, want SQLSTATE 22023", name, err)
	}
	for _, spend := range []string{
		`{"tokens": -1, "usd": 0, "unknown_tokens": 0, "unknown_usd": 0}`,
		`{"tokens": 0, "usd": null, "unknown_tokens": 0, "unknown_usd": 0}`,
		`{"tokens": 1, "usd": 0, "unknown_tokens": 2, "unknown_usd": 0}`, `{}`,
	} {
		const sql = `select lanekeeper.settle_agent_budget(gen_random_uuid(), 's', $1)`
		_, err := db.Exec(t.Context(), sql, spend)
		assert.Truef(t, postgres.IsCode(err, "22023"), "%s: %v, want SQLSTATE 22023", spend, err)
	}
}

func TestTodayIsUTCDayOfDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	require.NoError(t, pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		pgtest.Exec(t, tx, `set local timezone = 'Pacific/Kiritimati'`)
		_, err := reserve(t, tx, reservation(insertRunning(t, db), 0, budgets.Limits{}.Scopes(trace.Chat)...))
		return err
	}))
	got, err := budgets.Today(t.Context(), db)
	day := "day:" + time.Now().UTC().Format(time.DateOnly)
	assert.Truef(t, err == nil && len(got) == 2 && got[0].Scope == day && got[1].Scope == day+":chat" &&
		got[1].ReservedTokens == 1100, "today is %+v (%v)", got, err)
}

func TestErrorRoundsDollars(t *testing.T) {
	t.Parallel()
	err := &budgets.Error{Scope: "run:op_1", Unit: budgets.USD, Limit: 0.002, Spent: 0.1 + 0.2 - 0.29837475}
	assert.Equal(t, "the limit of $0.002 for the run op_1 leaves too little for another model call: $0.001625 spent",
		err.Error())
	err = &budgets.Error{Scope: "run:op_1", Unit: budgets.USD, Limit: 0.0000005, Spent: 0.00000044}
	assert.Equal(t, "the limit of $0.0000005 for the run op_1 leaves too little for another model call: $0.00000044 spent",
		err.Error())
}
