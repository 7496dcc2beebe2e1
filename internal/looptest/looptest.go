// Package looptest makes reasoning loops for tests.
package looptest

import (
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// New returns a loop that asks a scripted model and calls the skills of a database. It repeats a failed request once.
func New(tb testing.TB, pool *pgxpool.Pool, model *modeltest.Server, o skills.Options) *reason.Loop {
	tb.Helper()
	quiet := slog.New(slog.DiscardHandler)
	client, err := models.New(models.Config{
		BaseURL: model.URL(), Model: "gpt-4o-mini", Logger: quiet,
		Retry: models.Retry{Attempts: 2, Base: time.Millisecond, MaxWait: time.Second},
	})
	require.NoError(tb, err)
	o.Pool = pool
	registry, err := skills.New(o)
	require.NoError(tb, err)
	return &reason.Loop{Pool: pool, Model: client, Skills: registry, Logger: quiet}
}
