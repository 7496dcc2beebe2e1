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
	// batchRows bounds the rows that one transaction examines. It takes some tens of milliseconds.
	batchRows = 500
	// dryRunRows bounds the rows of one query of a dry run, which locks no rows.
	dryRunRows = 5000
	// maxTries bounds the tries of a batch that locks block.
	maxTries = 20
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

// Result is the result of a pass for one kind.
type Result struct {
	Kind    string `json:"kind"`
	Keep    string `json:"keep"`
	Removed int64  `json:"removed"` // deleted rows; in a dry run, the rows to delete
	// Partitions are the dropped partitions of the activity log; in a dry run, the partitions to drop. Only a dry run
	// counts their rows in Removed.
	Partitions []string `json:"partitions"`
	Later      string   `json:"later"` // why another pass must continue; empty if the pass is complete
}

// Run makes one pass over the kinds with a policy other than forever, and returns the results. After an error of one
// kind it goes on with the others, until ctx ends.
func Run(ctx context.Context, pool *pgxpool.Pool, o Options) ([]Result, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.DetachTimeout = cmp.Or(o.DetachTimeout, 10*time.Second)
	policies, err := o.selectPolicies(ctx, pool)
	if err != nil {
		return nil, err
	}
	done := []Result{}
	var errs error
	for _, p := range policies {
		d := Result{Kind: p.Kind, Keep: p.Keep, Partitions: []string{}}
		err := o.pruneKind(ctx, pool, &d)
		if err == nil && p.Kind == "activity" && d.Later == "" {
			d.Later, err = uncounted(ctx, pool)
		}
		if err != nil {
			errs = errors.Join(errs, fmt.Errorf("prune %s: %w", p.Kind, err))
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
	return done, errs
}

// selectPolicies returns the policies of a pass. With the policy forever, it includes executions, for checkpoints that
// an earlier pass left, activity, for months whose retirement an earlier pass began, and prompts, which are kept no
// longer than their activity.
func (o Options) selectPolicies(ctx context.Context, db postgres.DB) ([]Policy, error) {
	all, err := Show(ctx, db)
	if err != nil {
		return nil, err
	}
	byKind := map[string]Policy{}
	var selected []Policy
	for _, p := range all {
		byKind[p.Kind] = p
		if o.Kinds == nil && (p.Keep != Forever || (p.Kind == "executions" || p.Kind == "activity") && !o.DryRun ||
			p.Kind == "prompts" && byKind["activity"].Keep != Forever) { // Show is sorted by kind
			selected = append(selected, p)
		}
	}
	for _, kind := range o.Kinds {
		p, ok := byKind[kind]
		if !ok {
			return nil, fmt.Errorf("%w: there is no kind %q", ErrInvalid, kind)
		}
		selected = append(selected, p)
	}
	// Executions come first, because some of their dependent rows have their own policies.
	slices.SortStableFunc(selected, func(a, b Policy) int { return policyOrder(a) - policyOrder(b) })
	return selected, nil
}

func policyOrder(p Policy) int {
	if p.Kind == "executions" {
		return 0
	}
	return 1
}

// pruneKind makes a pass over one kind.
func (o Options) pruneKind(ctx context.Context, pool *pgxpool.Pool, d *Result) error {
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
		start := time.Now()
		removed, more, err := pruneWithRetry(ctx, pool, d.Kind, restart)
		d.Removed += removed
		if errors.Is(err, errOtherPass) {
			d.Later = err.Error()
			return nil
		}
		if err != nil || !more {
			return err
		}
		// Pause as long as the batch took, so other work gets at least half of the time.
		if !sleep.For(ctx, time.Since(start)) {
			return ctx.Err()
		}
	}
}

// uncounted returns why expired activity stays that is not counted yet; "" if all is counted.
func uncounted(ctx context.Context, pool *pgxpool.Pool) (reason string, err error) {
	err = inIndexTx(ctx, pool, "0", func(tx pgx.Tx) error {
		s, err := readState(ctx, tx, "activity", false)
		if err != nil || s.Before == nil {
			return err
		}
		return tx.QueryRow(ctx, `
			select case
			  when exists (select from agent_activity a
			                where a.id >= (select c.counted_upto from agent_activity_counted c)
			                  and a.id < lanekeeper.agent_uuid7_floor(@before))
			       or exists (select from agent_activity_uncounted u where u.activity_id < lanekeeper.agent_uuid7_floor(@before))
			    then 'some rows are not counted yet; agent serve counts an ended row when no write transaction is open'
			  else '' end`, postgres.Strict{"before": s.Before}).Scan(&reason)
	})
	return reason, err
}

// pruneWithRetry runs one batch, and retries it when a lock blocks it.
func pruneWithRetry(ctx context.Context, db postgres.Beginner, kind string, restart bool) (removed int64, more bool,
	err error,
) {
	for try := 1; ; try++ {
		removed, more, err = pruneBatch(ctx, db, kind, batchRows, restart)
		if !postgres.IsCode(err, "55P03", "40P01") || try == maxTries {
			return removed, more, err
		}
		if !sleep.For(ctx, time.Duration(try)*50*time.Millisecond) {
			return 0, false, ctx.Err()
		}
	}
}

// count returns the number of rows that a restarted pass would remove now, without the parts of prompts.
func (o Options) count(ctx context.Context, pool *pgxpool.Pool, d *Result) error {
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
			if m.Attached && m.Expired {
				d.Partitions = append(d.Partitions, m.Partition)
			}
		}
	}
	for after, examined := s.cursor, dryRunRows; examined == dryRunRows; {
		err := inIndexTx(ctx, pool, "0", func(tx pgx.Tx) error {
			rows, err := kinds[d.Kind].find(ctx, tx, after, *s.Before, dryRunRows)
			if examined = len(rows); err != nil || examined == 0 {
				return err
			}
			after = rows[examined-1].cursor
			n, err := kinds[d.Kind].countRows(ctx, tx, deletableKeys(rows))
			d.Removed += n
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// countRows returns the number of rows to delete with keys.
func (k kind) countRows(ctx context.Context, tx pgx.Tx, keys []string) (n int64, err error) {
	if k.countSQL == "" {
		return int64(len(keys)), nil
	}
	err = tx.QueryRow(ctx, k.countSQL, postgres.Strict{"keys": keys}).Scan(&n)
	return n, err
}
