package replica

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/origin"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// position is a server's position in the WAL.
type position struct {
	Identity string // of the cluster and the database
	Standby  bool
	Position int64          // bytes of WAL written or, on a standby, replayed
	Ago      *time.Duration // since the standby's last replayed transaction; nil for none
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
		       clock_timestamp() - pg_last_xact_replay_timestamp() as ago`)
}

// maxPending bounds the positions of a lagMeter: ten minutes of them.
const maxPending = 600

// lagMeter remembers positions of the primary with their times.
type lagMeter struct {
	pending []mark    // not replayed by the standby yet, oldest first
	covered time.Time // of the newest replayed mark; zero for none
}

// mark is a position of the primary at a time.
type mark struct {
	at       time.Time
	position int64
}

// note adds a position of the primary. A lower position than the last belongs to another server.
func (m *lagMeter) note(at time.Time, position int64) {
	if n := len(m.pending); n > 0 && position < m.pending[n-1].position {
		*m = lagMeter{}
	}
	if len(m.pending) < maxPending {
		m.pending = append(m.pending, mark{at, position})
	}
}

// behind returns the lag of a standby. The lag is unknown without a replayed mark and without a replayed transaction.
func (m *lagMeter) behind(askedAt time.Time, standby position, primaryAnswers bool) (behind time.Duration, known bool) {
	for len(m.pending) > 0 && m.pending[0].position <= standby.Position {
		m.covered, m.pending = m.pending[0].at, m.pending[1:]
	}
	switch {
	case primaryAnswers && m.covered.Equal(askedAt):
		return 0, true
	case !m.covered.IsZero():
		return time.Since(m.covered), true
	case standby.Ago != nil:
		return max(*standby.Ago, time.Millisecond), true
	}
	return time.Millisecond, false
}

// Header is the header with the lag in seconds of a response from the standby.
const Header = "X-Replica-Lag-Seconds"

// wroteCookie marks a browser that wrote a moment ago.
const wroteCookie = "lanekeeper_wrote"

// SetHeader sets Header on a response from the standby.
func (s *Source) SetHeader(h http.Header) {
	if s.Replica() {
		h.Set(Header, strconv.FormatFloat(s.Behind.Seconds(), 'f', 3, 64))
	}
}

// Wrote makes a browser read from the primary for a while. A forged cookie gains nothing.
func Wrote(w http.ResponseWriter, r *http.Request) {
	http.SetCookie(w, &http.Cookie{
		Name: origin.CookieName(r, wroteCookie), Value: "1", Path: "/", MaxAge: int(FreshFor.Seconds()),
		HttpOnly: true, SameSite: http.SameSiteStrictMode,
		Secure: r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https"),
	})
}

// Fresh reports whether a request must read from the primary: its browser wrote a moment ago, or it has Cache-Control:
// no-cache.
func Fresh(r *http.Request) bool {
	if strings.Contains(strings.ToLower(r.Header.Get("Cache-Control")), "no-cache") {
		return true
	}
	return JustWrote(r)
}

// JustWrote reports whether a request's browser wrote a moment ago. It replaces Fresh for event streams, because
// browsers always send Cache-Control: no-cache for them.
func JustWrote(r *http.Request) bool {
	_, err := r.Cookie(origin.CookieName(r, wroteCookie))
	return err == nil
}
