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
	// pieceRows bounds the rows that one transaction examines, which takes some tens of milliseconds.
	pieceRows = 500
	// countRows bounds the rows of one query of a dry run, which takes no locks.
	countRows = 5000
	// tries bounds the tries of a piece that locked rows block.
	tries = 20
)

// Options configure Run.
type Options struct {
	Kinds  []string // only these kinds; all if nil
	DryRun bool     // only count
	// Restart begins with the oldest row. Otherwise a pass continues where the last pass stopped, and restarts once a day.
	Restart bool
	// DetachTimeout bounds the wait for the readers of a partition; default 10 seconds.
	DetachTimeout time.Duration
	Logger        *slog.Logger // nil for none
}

// Done is the result of a pass for one kind.
type Done struct {
	Kind    string `json:"kind"`
	Keep    string `json:"keep"`
	Removed int64  `json:"removed"` // rows; of a dry run, the rows to remove
	// Partitions are the dropped partitions of the activity log; of a dry run, the partitions to drop. Only a dry run
	// counts their rows in Removed.
	Partitions []string `json:"partitions"`
	Later      string   `json:"later"` // why work remains for another pass; empty for none
}

// Run makes one pass over the kinds with a policy other than forever, and returns the results. An error of one kind
// does not stop other kinds.
func Run(ctx context.Context, pool *pgxpool.Pool, o Options) ([]Done, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.DetachTimeout = cmp.Or(o.DetachTimeout, 10*time.Second)
	policies, err := o.selectPolicies(ctx, pool)
	if err != nil {
		return nil, err
	}
	done := []Done{}
	var failed error
	for _, p := range policies {
		d := Done{Kind: p.Kind, Keep: p.Keep, Partitions: []string{}}
		err := o.pruneKind(ctx, pool, &d)
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

// selectPolicies returns the policies of a pass. It includes executions even with the policy forever, for checkpoints
// that an earlier pass left.
func (o Options) selectPolicies(ctx context.Context, db postgres.DB) ([]Policy, error) {
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
	// Executions first: their dependent rows have policies of their own, which follow.
	slices.SortStableFunc(chosen, func(a, b Policy) int { return order(a) - order(b) })
	return chosen, nil
}

func order(p Policy) int {
	if p.Kind == "executions" {
		return 0
	}
	return 1
}

// pruneKind makes a pass over one kind.
func (o Options) pruneKind(ctx context.Context, pool *pgxpool.Pool, d *Done) error {
	if o.DryRun {
		return o.count(ctx, pool, d)
	}
	if d.Kind == "activity" {
		done, err := o.retireMonths(ctx, pool, d)
		if err != nil || !done {
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
		// Rest as long as the work took, which leaves the database time for other work.
		if !sleep.For(ctx, time.Since(began)) {
			return ctx.Err()
		}
	}
}

// pruneWithRetry runs one piece, and retries it when a lock blocks it.
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
	for at, seen := s.cursor, countRows; seen == countRows; {
		err := byIndex(ctx, pool, "0", func(tx pgx.Tx) error {
			rows, err := kinds[d.Kind].page(ctx, tx, at, *s.Before, countRows)
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

// rowsOf returns the number of rows to delete with keys.
func (k kind) rowsOf(ctx context.Context, tx pgx.Tx, keys []string) (n int64, err error) {
	if k.count == "" {
		return int64(len(keys)), nil
	}
	err = tx.QueryRow(ctx, k.count, postgres.Strict{"keys": keys}).Scan(&n)
	return n, err
}
