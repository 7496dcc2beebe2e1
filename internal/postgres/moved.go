package postgres

import (
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// resetPause is how long a pool that has been emptied is left alone.
const resetPause = time.Second

// moved empties a pool whose server takes no more writes: after a failover the primary is elsewhere, and connections
// to the old one, which may live on as a standby, would fail one by one for as long as they last. New ones go where the
// connection string leads by then.
type moved struct {
	pool atomic.Pointer[pgxpool.Pool]
	last atomic.Int64 // when it was emptied, in nanoseconds of the epoch
}

// note looks at the answer to a statement. Connections that are lent meanwhile end when they are given back.
func (m *moved) note(err error) {
	if m == nil || err == nil || !IsCode(err, codeReadOnly) {
		return
	}
	now, last := time.Now().UnixNano(), m.last.Load()
	if pool := m.pool.Load(); pool != nil && now-last > int64(resetPause) && m.last.CompareAndSwap(last, now) {
		pool.Reset()
	}
}
