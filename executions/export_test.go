package executions

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// StartSeveral starts executions in one statement; those of here claimed by this process, for callers who run them.
func (e *Engine) StartSeveral(ctx context.Context, specs []Spec, here []bool) ([]Execution, error) {
	all := make([]opening, len(specs))
	for i, s := range specs {
		o, err := s.opening(here[i])
		if err != nil {
			return nil, err
		}
		all[i] = o
	}
	answers, err := e.startSeveral(ctx, all)
	if err != nil {
		return nil, err
	}
	started := make([]Execution, len(answers))
	for i, a := range answers {
		started[i] = a.Value
	}
	return started, nil
}

// Works reports whether the workers of this process look for executions.
func (e *Engine) Works() bool { return e.works() }

// SweepPause is how long the sweeper may sleep.
func (e *Engine) SweepPause() time.Duration { return e.due.pause(time.Hour) }

// AsStored is JSON as jsonb gives it back.
func AsStored(text json.RawMessage) (json.RawMessage, error) { return asStored(text) }

// RenewWorker prolongs the lease of a worker, and reports whether it lives.
func RenewWorker(ctx context.Context, pool *pgxpool.Pool, id string) (alive bool, err error) {
	var mine, requested []string
	err = renewWorker(ctx, pool, id, &alive, &mine, &requested)
	return alive, err
}

// TryComplete completes a requested cancel, if no transaction has the execution locked any more.
func (e *Engine) TryComplete(ctx context.Context, id string) (bool, error) {
	return e.tryComplete(ctx, id)
}
