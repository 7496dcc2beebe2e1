package replica

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// position is a server's position in the WAL.
type position struct {
	Identity         string // of the cluster and the database
	Standby          bool
	Position         int64          // bytes of WAL written or, on a standby, replayed
	SinceTransaction *time.Duration // since the standby's last replayed transaction; nil for none
}

// readPosition reads a server's position.
func readPosition(ctx context.Context, pool *pgxpool.Pool) (position, error) {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	return postgres.Row[position](ctx, pool, "read position in the log", `
		select (select system_identifier from pg_control_system()) || ' ' ||
		       (select oid from pg_database where datname = current_database()) as identity,
		       pg_is_in_recovery() as standby,
		       coalesce(case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end
		                - '0/0'::pg_lsn, 0)::bigint as position,
		       clock_timestamp() - pg_last_xact_replay_timestamp() as since_transaction`)
}

// maxPending bounds the positions of a lagMeter. When it is full, add drops new ones.
const maxPending = int(10 * time.Minute / interval)

// lagMeter remembers positions of the primary with their times.
type lagMeter struct {
	pending    []mark    // not replayed by the standby yet, oldest first
	replayedAt time.Time // time of the newest replayed mark; zero for none
}

// mark is a position of the primary at a time.
type mark struct {
	at       time.Time
	position int64
}

// add adds a position of the primary. A lower position than the last belongs to another server, so add
// forgets all positions.
func (m *lagMeter) add(at time.Time, position int64) {
	if n := len(m.pending); n > 0 && position < m.pending[n-1].position {
		*m = lagMeter{}
	}
	if len(m.pending) < maxPending {
		m.pending = append(m.pending, mark{at, position})
	}
}

// behind returns the lag of a standby. The lag is 0 only if the primary answers and the standby has replayed the
// position of askedAt. Any other lag is positive. The lag is unknown if the standby has replayed neither a position of
// this meter nor a transaction.
func (m *lagMeter) behind(askedAt time.Time, standby position, primaryAnswers bool) (behind time.Duration, known bool) {
	for len(m.pending) > 0 && m.pending[0].position <= standby.Position {
		m.replayedAt, m.pending = m.pending[0].at, m.pending[1:]
	}
	switch {
	case primaryAnswers && m.replayedAt.Equal(askedAt):
		return 0, true
	case !m.replayedAt.IsZero():
		return time.Since(m.replayedAt), true
	case standby.SinceTransaction != nil:
		return max(*standby.SinceTransaction, time.Millisecond), true
	}
	return time.Millisecond, false
}
