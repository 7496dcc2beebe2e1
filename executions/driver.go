package executions

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
)

// driver is River's way to the database: by pool, and by direct, unless that is nil, for what needs a session.
func driver(pool, direct *pgxpool.Pool) riverdriver.Driver[pgx.Tx] {
	if direct == nil {
		return riverpgxv5.New(pool)
	}
	return &twoWays{riverpgxv5.New(pool), riverpgxv5.New(direct)}
}

// twoWays listens elsewhere than it does everything else.
type twoWays struct {
	*riverpgxv5.Driver

	session *riverpgxv5.Driver
}

// GetListener listens where a session is one.
func (w *twoWays) GetListener(params *riverdriver.GetListenenerParams) riverdriver.Listener {
	return w.session.GetListener(params)
}
