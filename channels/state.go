package channels

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// stateWriter records the state of a channel. It writes a changed state at once, and the same state once in
// stateInterval.
type stateWriter struct {
	pool    *pgxpool.Pool
	name    string
	log     *slog.Logger
	writing sync.Mutex // held during a write

	mu        sync.Mutex // guards the fields below
	last      string     // the error of the last state; "" for connected
	written   time.Time  // start of the last write; zero after a failed one
	writes    int        // number of writes
	refusedAt time.Time  // time of the last log line about a refused request
}

const stateInterval = 30 * time.Second

// set records that the channel is connected, or with a cause that it is failing.
func (s *stateWriter) set(ctx context.Context, cause error) {
	text, state := message(cause), "connected"
	if cause != nil {
		state = "failing"
	}
	s.mu.Lock()
	if text == s.last && time.Since(s.written) < stateInterval {
		s.mu.Unlock()
		return
	}
	changed := text != s.last || s.written.IsZero()
	s.writes++
	own := s.writes
	s.last, s.written = text, time.Now()
	s.mu.Unlock()
	if changed {
		if cause != nil {
			s.log.WarnContext(ctx, "channel failing", "channel", s.name, "error", text)
		} else {
			s.log.InfoContext(ctx, "channel connected", "channel", s.name)
		}
	}
	s.writing.Lock() // keeps the order of different states; the same state has returned above
	defer s.writing.Unlock()
	s.mu.Lock()
	superseded := s.writes != own
	s.mu.Unlock()
	if superseded {
		return
	}
	err := exec(ctx, s.pool, "record state of channel", `
		update agent_channels
		   set state = @state, error = @error,
		       state_at = case when state = @state then state_at else clock_timestamp() end,
		       seen_at = case when @state = 'connected' then clock_timestamp() else seen_at end
		 where name = @channel`, postgres.Strict{"channel": s.name, "state": state, "error": text})
	if err != nil {
		s.log.WarnContext(ctx, "state of channel not recorded", "channel", s.name, "error", err)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.writes == own {
			s.written = time.Time{}
		}
	}
}

// refused logs a request that is not from the provider, at most one a minute in this process: anybody may send them.
func (s *stateWriter) refused(ctx context.Context, why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.refusedAt) >= time.Minute {
		s.refusedAt = time.Now()
		s.log.WarnContext(ctx, "request for a channel refused: if its provider sent it, check the channel's secrets and "+
			"this machine's clock", "channel", s.name, "error", why)
	}
}
