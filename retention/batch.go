package retention

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// lockWait bounds a batch's wait for a lock.
const lockWait = "100ms"

// cursor is the last row that a pass has examined.
type cursor struct {
	At  string // a timestamptz as text; -infinity for a cursor with only a key
	Key string
}

// state is the stored progress of a pass over a kind.
type state struct {
	cursor
	Before *time.Time // the pass prunes older rows; nil for none
	Began  time.Time
	Open   bool // the pass has not ended
}

// candidate is an examined row of a batch.
type candidate struct {
	cursor
	Deletable bool
}

// batch is one transaction of a pass over a kind.
type batch struct {
	kind   kind
	tx     pgx.Tx
	limit  int // approximate limit of examined and deleted rows
	before time.Time
	more   bool // another batch must follow
	repeat bool // the next batch examines the same rows
}

// errOtherPass reports that another pass works on the kind.
var errOtherPass = errors.New("another pass works on it")

// inIndexTx runs fn in a transaction whose statements use indexes, for tables of any size. A disabled scan type raises
// the estimated cost, and a high cost would start the JIT compiler, so inIndexTx turns jit off.
func inIndexTx(ctx context.Context, db postgres.Beginner, wait string, fn func(tx pgx.Tx) error) error {
	return postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			select set_config('lock_timeout', @wait, true), set_config('plan_cache_mode', 'force_custom_plan', true),
			       set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
			       set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
			       set_config('jit', 'off', true)`,
			postgres.Strict{"wait": wait})
		if err != nil {
			return err
		}
		return fn(tx)
	})
}

// pruneBatch examines the next rows of a kind. It deletes the rows that the kind's policy no longer keeps, unless
// unfinished work needs them. One caller at a time works on a kind; concurrent callers get errOtherPass. With restart
// it begins with the oldest row.
func pruneBatch(
	ctx context.Context, db postgres.Beginner, name string, limit int, restart bool,
) (removed int64, more bool, err error) {
	b := batch{kind: kinds[name], limit: limit}
	err = inIndexTx(ctx, db, lockWait, func(tx pgx.Tx) error {
		b.tx = tx
		var acquired bool
		err := tx.QueryRow(ctx, `select pg_try_advisory_xact_lock(hashtextextended('retention ' || @kind, 0))`,
			postgres.Strict{"kind": name}).Scan(&acquired)
		if err != nil {
			return err
		}
		if !acquired {
			return errOtherPass
		}
		if name == "executions" {
			if err := b.pruneCheckpoints(ctx); err != nil || b.more && !restart {
				return err
			}
		}
		removed, err = b.run(ctx, name, restart)
		return err
	})
	if err != nil {
		return 0, false, err
	}
	return removed, b.more, nil
}

// run deletes rows and stores the progress of the pass.
func (b *batch) run(ctx context.Context, name string, restart bool) (removed int64, err error) {
	s, err := readState(ctx, b.tx, name, restart)
	if err != nil || s.Before == nil {
		return 0, err
	}
	b.before = *s.Before
	maxRows := min(b.limit, cmp.Or(b.kind.maxRows, b.limit))
	rows, err := b.kind.find(ctx, b.tx, s.cursor, b.before, maxRows)
	if err != nil {
		return 0, err
	}
	if removed, err = b.delete(ctx, deletableKeys(rows)); err != nil {
		return 0, err
	}
	b.more = b.more || len(rows) == maxRows
	if len(rows) == 0 && !s.Open {
		return 0, nil
	}
	if len(rows) > 0 && !b.repeat {
		s.cursor = rows[len(rows)-1].cursor
	}
	_, err = b.tx.Exec(ctx, `
		update agent_retention_passes
		   set place_at = @at::text::timestamptz, place_key = @key, began_at = @began,
		       ended_at = case when not @more then clock_timestamp() end, removed = removed + @removed
		 where kind = @kind`,
		postgres.Strict{"kind": name, "at": s.At, "key": s.Key, "began": s.Began, "more": b.more, "removed": removed})
	return removed, err
}

// readState reads a policy and the progress of the pass. After a day, or with restart, the pass begins again. A pass
// deletes activity with a policy of 60 days or more by whole months, so it can drop their partitions. It keeps prompts
// no longer than the rows that they belong to.
func readState(ctx context.Context, db postgres.DB, name string, restart bool) (state, error) {
	s, err := postgres.Row[state](ctx, db, "read pass", `
		with old as (
		  select r.kind, case when r.kind = 'hour_counts' then date_trunc('hour', now() - r.keep)
		                      when r.kind = 'activity' and r.keep >= interval '60 days'
		                      then date_trunc('month', (now() - r.keep) at time zone 'UTC') at time zone 'UTC'
		                      else now() - r.keep end as before
		    from agent_retention r where r.kind in (@kind, 'activity')),
		pass as (
		  select p.kind, p.place_at, p.place_key, p.began_at, p.ended_at,
		         @restart or p.ended_at is not null and p.began_at < clock_timestamp() - interval '1 day' as restart
		    from agent_retention_passes p where p.kind = @kind)
		select case when o.kind = 'prompts' -- greatest ignores the null of forever
		            then greatest(o.before, (select a.before from old a where a.kind = 'activity'))
		            else o.before end as before,
		       case when p.restart then '-infinity' else p.place_at::text end as at,
		       case when p.restart then '' else p.place_key end as key,
		       case when p.restart then clock_timestamp() else p.began_at end as began,
		       p.restart or p.ended_at is null or p.began_at > p.ended_at as open
		  from pass p join old o on o.kind = p.kind`, postgres.Strict{"kind": name, "restart": restart})
	if epoch := time.Unix(0, 0); s.Before != nil && s.Before.Before(epoch) {
		s.Before = &epoch // for an earlier time, agent_uuid7_floor would overflow to a very large id
	}
	return s, err
}

// find reads the next rows of a kind after a cursor.
func (k kind) find(ctx context.Context, tx pgx.Tx, after cursor, before time.Time, limit int) ([]candidate, error) {
	args := postgres.Strict{"after": cmp.Or(after.Key, k.firstKey), "before": before, "limit": limit}
	if k.byTime {
		args["at"] = after.At
	}
	rows, err := tx.Query(ctx, k.findSQL, args)
	list, err := postgres.Collect(rows, err, "find rows", pgx.RowToStructByNameLax[candidate])
	for i := range list {
		list[i].At = cmp.Or(list[i].At, after.At)
	}
	return list, err
}

// deletableKeys lists the rows to delete.
func deletableKeys(rows []candidate) []string {
	keys := []string{}
	for _, r := range rows {
		if r.Deletable {
			keys = append(keys, r.Key)
		}
	}
	return keys
}

// delete deletes the unlocked rows of keys, with their dependent rows.
func (b *batch) delete(ctx context.Context, keys []string) (removed int64, err error) {
	if b.kind.prune != nil {
		return b.kind.prune(ctx, b, keys)
	}
	deleted, err := b.deleteRows(ctx, b.tx, keys)
	return int64(len(deleted)), err
}

// deleteRows deletes unlocked rows and their recorded causes. It returns the keys of these rows.
func (b *batch) deleteRows(ctx context.Context, tx pgx.Tx, keys []string) ([]string, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	deleted, err := postgres.Values[string](ctx, tx, "delete rows", b.kind.deleteSQL, postgres.Strict{"keys": keys})
	if err != nil || b.kind.linkPrefix == "" {
		return deleted, err
	}
	_, err = tx.Exec(ctx, `
		delete from agent_links l where l.effect = any (array(select @effect || ' ' || k from unnest(@keys::text[]) k))`,
		postgres.Strict{"effect": b.kind.linkPrefix, "keys": deleted})
	return deleted, err
}

// bisect runs fn on keys. If another transaction's lock blocks fn, bisect runs fn on each half of the keys. So it
// deletes the unlocked rows. After its restart, a pass tries the locked rows again.
func (b *batch) bisect(
	ctx context.Context, keys []string, fn func(tx pgx.Tx, keys []string) (int64, error),
) (removed int64, err error) {
	if len(keys) == 0 {
		return 0, nil
	}
	err = postgres.InTx(ctx, b.tx, func(tx pgx.Tx) error {
		removed, err = fn(tx, keys)
		return err
	})
	if !postgres.IsCode(err, "55P03") {
		return removed, err
	}
	half := len(keys) / 2
	if half == 0 {
		return 0, nil
	}
	firstHalf, err := b.bisect(ctx, keys[:half], fn)
	if err != nil {
		return 0, err
	}
	secondHalf, err := b.bisect(ctx, keys[half:], fn)
	return firstHalf + secondHalf, err
}
