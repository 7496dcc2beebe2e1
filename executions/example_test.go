package executions_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
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
	order, err := executions.Step(ctx, "read order", func(ctx context.Context) (Order, error) { return readOrder(ctx, input) })
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

func TestTheFlowOfThePageRuns(t *testing.T) {
	p := start(t, pgtest.DB(t), map[string]executions.Func{"pay": pay})
	x, err := p.RunNow(t.Context(), executions.Spec{Flow: "pay", Surface: trace.Flow, Input: Order{"n-7"}})
	if err != nil || x.Status != executions.Completed || x.ResultSummary != "paid n-7" {
		t.Fatalf("%s %q, %v", x.Status, x.ResultSummary, err)
	}
	var receipt Receipt
	if err := json.Unmarshal(x.Result, &receipt); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(account{receipt.Key: {"n-7"}}, bank); diff != "" {
		t.Error(diff)
	}
}
