package retention

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// piece is how many rows one transaction looks at. It takes some tens of milliseconds.
	piece = 500
	// counting is how many a dry run looks at at once; it holds no lock.
	counting = 5000
	// tries is how often a piece is tried that met the lock of somebody else.
	tries = 20
)

// Options say what kind of pass Run makes.
type Options struct {
	Kinds  []string // only these; all when nil
	DryRun bool     // only count
	// Anew begins with the oldest row; else a pass goes on where the last one stopped, and begins anew once a day.
	Anew bool
	// Patience is how long the readers of a partition that is to go are waited for; 10 seconds when 0.
	Patience time.Duration
	Logger   *slog.Logger // nil for none
}

// Done is what a pass did with one kind.
type Done struct {
	Kind    string `json:"kind"`
	Keep    string `json:"keep"`
	Removed int64  `json:"removed"` // rows; of a dry run: that would go
	// Partitions of the activity log that were dropped whole, or would be; their rows are in Removed of a dry run only.
	Partitions []string `json:"partitions"`
	Later      string   `json:"later"` // why something has to wait for another pass; empty when nothing does
}

// Run makes one pass over the kinds whose rows are not kept for ever, and says what went. An error of one kind does not keep it from
// the others.
func Run(ctx context.Context, pool *pgxpool.Pool, o Options) ([]Done, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.Patience = cmp.Or(o.Patience, 10*time.Second)
	policies, err := o.chosen(ctx, pool)
	if err != nil {
		return nil, err
	}
	done := []Done{}
	var failed error
	for _, p := range policies {
		d := Done{Kind: p.Kind, Keep: p.Keep, Partitions: []string{}}
		err := o.one(ctx, pool, &d)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("prune %s: %w", p.Kind, err))
		}
		if d.Removed > 0 || len(d.Partitions) > 0 || err == nil {
			done = append(done, d)
		}
		if !o.DryRun && (d.Removed > 0 || len(d.Partitions) > 0) {
			o.Logger.InfoContext(ctx, "old rows removed", "kind", p.Kind, "keep", p.Keep, "count", d.Removed, "partitions", d.Partitions)
		}
		if ctx.Err() != nil {
			break
		}
	}
	return done, failed
}

// chosen are the policies that a pass goes by. What was left over when a policy was set to forever is seen to as well.
func (o Options) chosen(ctx context.Context, db postgres.DB) ([]Policy, error) {
	all, err := Show(ctx, db)
	if err != nil {
		return nil, err
	}
	known := map[string]Policy{}
	var chosen []Policy
	for _, p := range all {
		known[p.Kind] = p
		if o.Kinds == nil && (p.Keep != Forever || p.Kind == "executions" && !o.DryRun) {
			chosen = append(chosen, p)
		}
	}
	for _, kind := range o.Kinds {
		p, ok := known[kind]
		if !ok {
			return nil, fmt.Errorf("%w: there is no kind %q", ErrInvalid, kind)
		}
		chosen = append(chosen, p)
	}
	// Executions first: what belonged to them goes by its own policy afterwards.
	slices.SortStableFunc(chosen, func(a, b Policy) int { return order(a) - order(b) })
	return chosen, nil
}

func order(p Policy) int {
	if p.Kind == "executions" {
		return 0
	}
	return 1
}

// one works on a kind.
func (o Options) one(ctx context.Context, pool *pgxpool.Pool, d *Done) error {
	if o.DryRun {
		return o.count(ctx, pool, d)
	}
	if d.Kind == "activity" {
		whole, err := o.retire(ctx, pool, d)
		if err != nil || !whole {
			return err
		}
	}
	for anew := o.Anew; ; anew = false {
		began := time.Now()
		n, more, err := prune(ctx, pool, d.Kind, anew)
		d.Removed += n
		if err != nil || !more {
			return err
		}
		// As much rest as work, so that a backlog is not all that the database does.
		if err := rest(ctx, time.Since(began)); err != nil {
			return err
		}
	}
}

// prune does one piece, and again when it met a lock.
func prune(ctx context.Context, db postgres.DB, kind string, anew bool) (removed int64, more bool, err error) {
	for try := 1; ; try++ {
		err = db.QueryRow(ctx, `select p.removed, p.more from prune_agent(@kind, @most, @anew) p`,
			postgres.Strict{"kind": kind, "most": piece, "anew": anew}).Scan(&removed, &more)
		if !postgres.IsCode(err, "55P03", "40P01") || try == tries {
			return removed, more, err
		}
		if err := rest(ctx, time.Duration(try)*50*time.Millisecond); err != nil {
			return 0, false, err
		}
	}
}

// count is what a pass that begins anew would remove at this moment.
func (o Options) count(ctx context.Context, pool *pgxpool.Pool, d *Done) error {
	if d.Keep == Forever {
		return nil
	}
	if d.Kind == "activity" {
		rows, err := pool.Query(ctx, `select partition from agent_activity_retirable() where attached`)
		if err != nil {
			return err
		}
		if d.Partitions, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return err
		}
	}
	if d.Kind == "hour_counts" {
		return pool.QueryRow(ctx, `
			select count(*) from agent_activity_counts
			 where span = 'hour' and start < date_trunc('hour', now() - @keep::text::interval)`, postgres.Strict{"keep": d.Keep}).Scan(&d.Removed)
	}
	at, key := "-infinity", ""
	for {
		var n int64
		var nextAt, nextKey *string
		var seen int
		err := pool.QueryRow(ctx, `
			select case when @kind = 'messages'
			            then (select count(*) from agent_messages m
			                   where m.thread_id = any (o.going)
			                     and not exists (select from agent_messages q join agent_executions x on x.id = q.execution_id
			                                      where q.thread_id = m.thread_id and x.completed_at is null))
			            else coalesce(cardinality(o.going), 0) end, o.place_at::text, o.place_key, o.seen
			  from old_agent_rows(@kind, @keep::text::interval, @at::text::timestamptz, @key, @most) o`,
			postgres.Strict{"kind": d.Kind, "keep": d.Keep, "at": at, "key": key, "most": counting}).Scan(&n, &nextAt, &nextKey, &seen)
		if err != nil {
			return err
		}
		d.Removed += n
		if seen < counting || nextKey == nil {
			return nil
		}
		if nextAt != nil {
			at = *nextAt
		}
		key = *nextKey
	}
}

// rest waits, unless ctx ends.
func rest(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
