package postgres

import (
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// refusedWrite is one that the server did not take, for a reason that an operator has to mend.
type refusedWrite struct {
	at  time.Time
	err error
}

// refusals keeps the last one of a pool and of what was reserved beside it.
type refusals struct{ last atomic.Pointer[refusedWrite] }

// note looks at the answer to a statement.
func (r *refusals) note(err error) {
	if r != nil && err != nil && IsCode(err, codeDiskFull, codeReadOnly) {
		r.last.Store(&refusedWrite{time.Now(), err})
	}
}

// LastRefusal is when the server last refused a write of this process because its disk is full or it is read-only;
// the error is nil when it never did. pool was made by [Open] or [Reserve], which share what they note.
func LastRefusal(pool *pgxpool.Pool) (at time.Time, err error) {
	g, ok := pool.Config().ConnConfig.Tracer.(guard)
	if !ok || g.refused == nil {
		return time.Time{}, nil
	}
	last := g.refused.last.Load()
	if last == nil {
		return time.Time{}, nil
	}
	return last.at, last.err
}
