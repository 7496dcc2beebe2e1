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
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

const (
	// pieceRows is how many rows one transaction looks at. It takes some tens of milliseconds.
	pieceRows = 500
	// counting is how many a dry run looks at at once; it holds no lock.
	counting = 5000
	// tries is how often a piece is tried that met the lock of somebody else.
	tries = 20
)

// Options say what kind of pass Run makes.
type Options struct {
	Kinds  []string // only these; all when nil
	DryRun bool     // only count
	// Restart begins with the oldest row. Otherwise a pass continues where the last one stopped, and restarts once a day.
	Restart bool
	// DetachTimeout bounds the wait for the readers of a partition; default 10 seconds.
	DetachTimeout time.Duration
	Logger        *slog.Logger // nil for none
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

// Run makes one pass over the kinds whose rows are not kept for ever, and says what went. An error of one kind does not
// keep it from the others.
func Run(ctx context.Context, pool *pgxpool.Pool, o Options) ([]Done, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.DetachTimeout = cmp.Or(o.DetachTimeout, 10*time.Second)
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
			o.Logger.InfoContext(ctx, "old rows removed", "kind", p.Kind, "keep", p.Keep, "count", d.Removed, "partitions",
				d.Partitions)
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
	for restart := o.Restart; ; restart = false {
		began := time.Now()
		n, more, err := pruneWithRetry(ctx, pool, d.Kind, restart)
		d.Removed += n
		if err != nil || !more {
			return err
		}
		// As much rest as work, so that a backlog is not all that the database does.
		if !sleep.For(ctx, time.Since(began)) {
			return ctx.Err()
		}
	}
}

// pruneWithRetry does one piece, and again when it met a lock.
func pruneWithRetry(ctx context.Context, db postgres.Beginner, kind string, restart bool) (removed int64, more bool,
	err error,
) {
	for try := 1; ; try++ {
		removed, more, err = prune(ctx, db, kind, pieceRows, restart)
		if !postgres.IsCode(err, "55P03", "40P01") || try == tries {
			return removed, more, err
		}
		if !sleep.For(ctx, time.Duration(try)*50*time.Millisecond) {
			return 0, false, ctx.Err()
		}
	}
}

// count returns the number of rows that a restarted pass would remove now.
func (o Options) count(ctx context.Context, pool *pgxpool.Pool, d *Done) error {
	s, err := readState(ctx, pool, d.Kind, true)
	if err != nil || s.Before == nil {
		return err
	}
	if d.Kind == "activity" {
		months, err := retirable(ctx, pool, "")
		if err != nil {
			return err
		}
		for _, m := range months {
			if m.Attached {
				d.Partitions = append(d.Partitions, m.Partition)
			}
		}
	}
	for at, seen := s.cursor, counting; seen == counting; {
		err := byIndex(ctx, pool, "0", func(tx pgx.Tx) error {
			rows, err := kinds[d.Kind].page(ctx, tx, at, *s.Before, counting)
			if seen = len(rows); err != nil || seen == 0 {
				return err
			}
			at = rows[seen-1].cursor
			n, err := kinds[d.Kind].rowsOf(ctx, tx, keysOf(rows))
			d.Removed += n
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// rowsOf is how many rows go with keys.
func (k kind) rowsOf(ctx context.Context, tx pgx.Tx, keys []string) (n int64, err error) {
	if k.count == "" {
		return int64(len(keys)), nil
	}
	err = tx.QueryRow(ctx, k.count, postgres.Strict{"keys": keys}).Scan(&n)
	return n, err
}
