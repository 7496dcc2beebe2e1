package executions_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Order is what is paid.
type Order struct {
	Number string
}

// Receipt is what the bank gives.
type Receipt struct {
	Key string
}

// account remembers what it was charged.
type account map[string]Order

var bank = account{}

func (a account) Charge(_ context.Context, order Order, key string) (Receipt, error) {
	a[key] = order
	return Receipt{key}, nil
}

func readOrder(_ context.Context, input json.RawMessage) (order Order, err error) {
	return order, json.Unmarshal(input, &order)
}

// docs/executions.md shows it.
func pay(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	order, err := executions.Step(ctx, "read order",
		func(ctx context.Context) (Order, error) { return readOrder(ctx, input) })
	if err != nil {
		return executions.Result{}, err
	}
	receipt, err := executions.Do(ctx, "charge", executions.Call{
		Entry: activity.Entry{Skill: "charge_card", Input: order}, Idempotent: true,
	}, func(ctx context.Context, effect *executions.Effect) (Receipt, error) {
		return bank.Charge(ctx, order, effect.Key) // the same key every time this step is tried
	})
	if err != nil {
		return executions.Result{}, err
	}
	return executions.Result{Summary: "paid " + order.Number, Value: receipt}, nil
}

func TestTheFlowOfTheDocsRuns(t *testing.T) {
	p := start(t, pgtest.DB(t), map[string]executions.Func{"pay": pay})
	x, err := p.RunSync(t.Context(), executions.Spec{Flow: "pay", Surface: trace.Flow, Input: Order{"n-7"}})
	if err != nil || x.Status != executions.Completed || x.ResultSummary != "paid n-7" {
		t.Fatalf("%s %q, %v", x.Status, x.ResultSummary, err)
	}
	var receipt Receipt
	require.NoError(t, json.Unmarshal(x.Result, &receipt))
	if bank[receipt.Key] != (Order{"n-7"}) {
		t.Errorf("the key %q is of %v among %v", receipt.Key, bank[receipt.Key], bank)
	}
}

// docs/executions.md shows it.
func work(ctx context.Context, pool *pgxpool.Pool) error {
	listener := lanes.NewListener(pool, nil)
	keeper := lanes.NewKeeper(pool, lanes.Options{Listener: listener})
	engine, err := executions.New(pool, executions.Options{Keeper: keeper, Listener: listener})
	if err != nil {
		return err
	}
	if err := engine.Register("pay", pay); err != nil {
		return err
	}
	under, stop := context.WithCancel(context.WithoutCancel(ctx)) // both are needed until the last run has stopped
	defer stop()
	go listener.Run(under)
	go keeper.Run(under)
	return engine.Run(ctx)
}

func TestTheWorkerOfTheDocsRuns(t *testing.T) {
	pool := pgtest.DB(t)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- work(ctx, pool) }()
	elsewhere := start(t, pool, nil)
	x, created, err := elsewhere.Start(t.Context(), pool, executions.Spec{
		Flow: "pay", Surface: trace.Flow,
		Input: Order{"n-8"},
	})
	if err != nil || !created {
		t.Fatal(created, err)
	}
	until(t, pool, x.ID, executions.Completed)
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
