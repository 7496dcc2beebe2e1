package executions

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// stuckAfter is how long the claims of a lost worker may be left until somebody says so, and stuckAgain until it is said again.
	stuckAfter = 5 * time.Second
	stuckAgain = 15 * time.Second
)

// stuckNotice is when it was last said.
type stuckNotice struct {
	mu   sync.Mutex
	last time.Time
}

// due reports whether to say it now.
func (n *stuckNotice) due() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.last.IsZero() && time.Since(n.last) < stuckAgain {
		return false
	}
	n.last = time.Now()
	return true
}

// warnOfStuck says whose executions nobody can take over, and what may be in the way: a sweep passes over what is locked, as by a
// process that was stopped in the middle of a step's transaction. The server ends such a transaction after a while.
func (e *Engine) warnOfStuck(ctx context.Context) error {
	if !e.stuck.due() {
		return nil
	}
	var worker, sessions string
	var seconds float64
	var n int
	err := e.pool.QueryRow(ctx, `
		-- what a sweep has passed over
		select w.name, extract(epoch from clock_timestamp() - w.expires_at)::float8,
		       (select count(*) from agent_executions x where x.claimed_by = w.id),
		       (select coalesce(string_agg(format('pid %s of %s, %s for %s', s.pid, s.application_name, s.state,
		                 date_trunc('second', clock_timestamp() - s.state_change)), '; ' order by s.xact_start), '')
		          from pg_stat_activity s
		         where s.datname = current_database() and s.pid <> pg_backend_pid()
		           and s.xact_start < clock_timestamp() - interval '1 second')
		  from (select k.* from agent_workers k
		         where k.expires_at < clock_timestamp() and exists (select from agent_executions x where x.claimed_by = k.id)
		         order by k.expires_at limit 1) w`).Scan(&worker, &seconds, &n, &sessions)
	switch {
	case errors.Is(err, pgx.ErrNoRows): // another sweep has just taken them
		return nil
	case err != nil:
		return fmt.Errorf("look at what is not taken over: %w", err)
	}
	e.log.WarnContext(ctx, "lost executions not taken over yet, their rows are locked", "worker", worker, "executions", n,
		"lost_for", time.Duration(seconds*float64(time.Second)).Round(time.Second), "open_transactions", sessions)
	return nil
}
