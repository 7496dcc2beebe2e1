package lanekeeper_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Order is paid.
type Order struct {
	Number string
}

// Receipt is the bank's answer.
type Receipt struct {
	Key string
}

// Parcel is the data of an event.
type Parcel struct {
	Weight int
}

// account remembers what it was charged.
type account map[string]Order

var bank = account{}

func (a account) Charge(_ context.Context, order Order, key string) (Receipt, error) {
	a[key] = order
	return Receipt{key}, nil
}

func pay(ctx context.Context, order Order) (Receipt, error) {
	receipt, err := lanekeeper.Step(ctx, "charge", func(ctx context.Context) (Receipt, error) {
		return bank.Charge(ctx, order, lanekeeper.StepKey(ctx)) // the same key every time this step is tried
	}, lanekeeper.Input(order))
	if err != nil {
		return Receipt{}, err
	}
	_, err = lanekeeper.WaitEvent[Parcel](ctx, "wait for the parcel", "shipped "+order.Number, 7*24*time.Hour)
	return receipt, err
}

func work(ctx context.Context, pool *pgxpool.Pool) error {
	runtime, err := lanekeeper.Open(ctx, pool)
	if err != nil {
		return err
	}
	if _, err := lanekeeper.Register(runtime, "pay", pay); err != nil {
		return err
	}
	return runtime.Run(ctx)
}

func TestDocsWorkerRunsFlow(t *testing.T) {
	pool := pgtest.DB(t)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- work(ctx, pool) }()
	elsewhere, err := lanekeeper.Open(t.Context(), pool)
	require.NoError(t, err)
	h, err := lanekeeper.Remote[Order, Receipt](elsewhere, "pay").Start(t.Context(), Order{"n-8"})
	require.NoError(t, err)
	require.NoError(t, elsewhere.SendEvent(t.Context(), "shipped n-8", Parcel{3}, ""))
	receipt, err := h.Wait(t.Context())
	assert.Truef(t, err == nil && bank[receipt.Key] == (Order{"n-8"}),
		"the key %q is of %v among %v, %v", receipt.Key, bank[receipt.Key], bank, err)
	stop()
	assert.NoError(t, <-ended)
}
