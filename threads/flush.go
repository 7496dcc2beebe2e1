package threads

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// flushed is how many messages of a thread one transaction sends.
const flushed = 100

// Flush sends what is queued in a thread and may leave now, in its order, and says how many messages that was. It is
// called whenever a thread changes hands; the sweep of the executions does it, too. A thread that another transaction
// has locked is an error with SQLSTATE 55P03, and left to the sweep.
func Flush(ctx context.Context, db postgres.DB, thread string) (int, error) {
	all := 0
	for {
		var n int
		err := db.QueryRow(ctx, `
			select lanekeeper.flush_agent_thread(case when p <> '' then @thread end, @limit) from set_config('lock_timeout', @patience, true) p`,
			postgres.Strict{"thread": postgres.Text(thread), "limit": flushed, "patience": postgres.LockTimeout}).Scan(&n)
		if postgres.IsCode(err, "P0002") {
			err = ErrNotFound
		}
		if err != nil {
			return all, fmt.Errorf("send what is queued in thread %q: %w", thread, err)
		}
		if all += n; n < flushed {
			return all, nil
		}
	}
}

// flushAll sends what is queued anywhere and may leave now.
func flushAll(ctx context.Context, db postgres.DB) (int, error) {
	var n int
	if err := db.QueryRow(ctx, `select lanekeeper.flush_agent_threads()`).Scan(&n); err != nil {
		return 0, fmt.Errorf("send what is queued: %w", err)
	}
	return n, nil
}

// Freed is a thread that was taken away from a holder which has ended, is gone, or did not send anything for too long.
type Freed struct {
	ThreadID    string  `json:"thread_id"`
	Holder      string  `json:"holder"`
	ExecutionID *string `json:"execution_id"`
	IdleSeconds int64   `json:"idle_seconds"`
}

// idleGrace is how much longer a thread that has been silent for too long stays as it is while nobody wants to speak
// in it. Who does takes it over; meanwhile it is there to be seen.
const idleGrace = 5 * time.Minute

// Clean frees the threads whose holder has ended, is gone, or has not sent anything for the time of its lease, and
// logs each.
func Clean(ctx context.Context, db postgres.DB, log *slog.Logger) ([]Freed, error) {
	return clean(ctx, db, log, 0)
}

// clean is Clean that leaves the silent holders of threads where nothing is queued in peace for longer.
func clean(ctx context.Context, db postgres.DB, log *slog.Logger, longer time.Duration) ([]Freed, error) {
	rows, err := db.Query(ctx, `
		select thread_id, locked_by as holder, execution_id::text, idle_seconds
		  from lanekeeper.clean_agent_threads('0', make_interval(secs => @longer))`, postgres.Strict{"longer": longer.Seconds()})
	if err != nil {
		return nil, fmt.Errorf("clean threads: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[Freed])
	if err != nil {
		return nil, fmt.Errorf("clean threads: %w", err)
	}
	for _, f := range got {
		log.WarnContext(ctx, "lane stale, clearing", "lane", Lane(f.ThreadID), "holder", f.Holder,
			"age", time.Duration(f.IdleSeconds)*time.Second)
	}
	if len(got) > 0 {
		log.InfoContext(ctx, "locks released", "count", len(got))
	}
	return got, nil
}
