package lanes

import (
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Listener hears what the database tells a process, over one connection: it shortens the waits of everything that
// takes one. A process has one, and calls its Run once, which returns when its context ends; a connection that breaks
// is opened again. Behind a pooler it says once that nothing is heard. Everything works without one, by looking about
// once a second.
type Listener = postgres.Listener

// NewListener returns the listener of a process. Its connection leads to the database of pool and does not count
// among pool's. logger gets what happens to it; nil for none.
func NewListener(pool *pgxpool.Pool, logger *slog.Logger) *Listener {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return postgres.NewListener(postgres.Dialer(pool), logger)
}
