package retention

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// lockWait bounds a piece's wait for a lock.
const lockWait = "100ms"

// cursor is the last row that a pass has examined.
type cursor struct {
	At  string // a time in PostgreSQL's words; -infinity if the key alone counts
	Key string
}

// state is the stored progress of a pass over a kind.
type state struct {
	cursor
	Before *time.Time // the pass prunes older rows; nil for none
	Began  time.Time
	Open   bool // the pass has not ended
}

// found is an examined row of a piece.
type found struct {
	cursor
	Goes bool
}

// piece is one transaction of a pass over a kind.
type piece struct {
	kind   kind
	tx     pgx.Tx
	most   int // approximate bound of examined and deleted rows
	before time.Time
	more   bool // rows are left
	stays  bool // the next piece examines the same rows
}

// byIndex runs fn in a transaction whose statements use indexes, at any size of the tables. A disabled scan raises the
// estimated cost, which would start the JIT compiler, so jit is off.
func byIndex(ctx context.Context, db postgres.Beginner, wait string, fn func(tx pgx.Tx) error) error {
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

// prune examines the next rows of a kind. It deletes rows that are old by the kind's policy and that no unfinished work
// needs. One caller at a time works on a kind; concurrent callers get 0. With restart it begins with the oldest row.
func prune(
	ctx context.Context, db postgres.Beginner, name string, most int, restart bool,
) (removed int64, more bool, err error) {
	p := piece{kind: kinds[name], most: most}
	err = byIndex(ctx, db, lockWait, func(tx pgx.Tx) error {
		p.tx = tx
		var free bool
		err := tx.QueryRow(ctx, `select pg_try_advisory_xact_lock(hashtextextended('retention ' || @kind, 0))`,
			postgres.Strict{"kind": name}).Scan(&free)
		if err != nil || !free {
			return err
		}
		if name == "executions" {
			if err := p.pruneCheckpoints(ctx); err != nil || p.more {
				return err
			}
		}
		removed, err = p.next(ctx, name, restart)
		return err
	})
	if err != nil {
		return 0, false, err
	}
	return removed, p.more, nil
}

// next deletes rows and stores the progress of the pass.
func (p *piece) next(ctx context.Context, name string, restart bool) (removed int64, err error) {
	s, err := readState(ctx, p.tx, name, restart)
	if err != nil || s.Before == nil {
		return 0, err
	}
	p.before = *s.Before
	limit := min(p.most, cmp.Or(p.kind.limit, p.most))
	rows, err := p.kind.page(ctx, p.tx, s.cursor, p.before, limit)
	if err != nil {
		return 0, err
	}
	if removed, err = p.delete(ctx, keysOf(rows)); err != nil {
		return 0, err
	}
	p.more = p.more || len(rows) == limit
	if len(rows) == 0 && !s.Open {
		return 0, nil
	}
	if len(rows) > 0 && !p.stays {
		s.cursor = rows[len(rows)-1].cursor
	}
	_, err = p.tx.Exec(ctx, `
		update agent_retention_passes
		   set place_at = @at::text::timestamptz, place_key = @key, began_at = @began,
		       ended_at = case when not @more then clock_timestamp() end, removed = removed + @removed
		 where kind = @kind`,
		postgres.Strict{"kind": name, "at": s.At, "key": s.Key, "began": s.Began, "more": p.more, "removed": removed})
	return removed, err
}

// readState reads a policy and the progress of the pass. After a day, or with restart, the pass begins again. A pass
// deletes activity with a policy of 60 days or more by whole months, so it can drop their partitions. It keeps prompts
// no longer than the rows that they belong to.
func readState(ctx context.Context, db postgres.DB, name string, restart bool) (state, error) {
	return postgres.Row[state](ctx, db, "read pass", `
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
		select case when o.kind = 'prompts' and o.before is not null
		            then greatest(o.before, (select a.before from old a where a.kind = 'activity'))
		            else o.before end as before,
		       case when p.restart then '-infinity' else p.place_at::text end as at,
		       case when p.restart then '' else p.place_key end as key,
		       case when p.restart then clock_timestamp() else p.began_at end as began,
		       p.restart or p.ended_at is null or p.began_at > p.ended_at as open
		  from pass p join old o on o.kind = p.kind`, postgres.Strict{"kind": name, "restart": restart})
}

// page reads the next rows of a kind after a cursor.
func (k kind) page(ctx context.Context, tx pgx.Tx, c cursor, before time.Time, most int) ([]found, error) {
	args := postgres.Strict{"after": cmp.Or(c.Key, k.first), "before": before, "most": most}
	if k.byTime {
		args["at"] = c.At
	}
	rows, err := tx.Query(ctx, k.find, args)
	list, err := postgres.Collect(rows, err, "find rows", pgx.RowToStructByNameLax[found])
	for i := range list {
		list[i].At = cmp.Or(list[i].At, c.At)
	}
	return list, err
}

// keysOf lists the rows to delete.
func keysOf(rows []found) []string {
	keys := []string{}
	for _, r := range rows {
		if r.Goes {
			keys = append(keys, r.Key)
		}
	}
	return keys
}

// delete deletes the unlocked rows of keys, with their dependent rows.
func (p *piece) delete(ctx context.Context, keys []string) (removed int64, err error) {
	if p.kind.prune != nil {
		return p.kind.prune(ctx, p, keys)
	}
	gone, err := p.deleteRows(ctx, p.tx, keys)
	return int64(len(gone)), err
}

// deleteRows deletes unlocked rows and their recorded causes. It returns the keys of these rows.
func (p *piece) deleteRows(ctx context.Context, tx pgx.Tx, keys []string) ([]string, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	gone, err := postgres.Values[string](ctx, tx, "delete rows", p.kind.remove, postgres.Strict{"keys": keys})
	if err != nil || p.kind.effect == "" {
		return gone, err
	}
	_, err = tx.Exec(ctx, `
		delete from agent_links l where l.effect = any (array(select @effect || ' ' || k from unnest(@keys::text[]) k))`,
		postgres.Strict{"effect": p.kind.effect, "keys": gone})
	return gone, err
}

// inHalves runs fn on keys. When another transaction's lock blocks fn, inHalves runs fn on each half of the keys. So it
// deletes all unlocked rows, and the next pass tries the rest again.
func (p *piece) inHalves(
	ctx context.Context, keys []string, fn func(tx pgx.Tx, keys []string) (int64, error),
) (removed int64, err error) {
	if len(keys) == 0 {
		return 0, nil
	}
	err = postgres.InTx(ctx, p.tx, func(tx pgx.Tx) error {
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
	first, err := p.inHalves(ctx, keys[:half], fn)
	if err != nil {
		return 0, err
	}
	second, err := p.inHalves(ctx, keys[half:], fn)
	return first + second, err
}

// pruneExecutions deletes executions with their dependent rows. An execution may have many checkpoints. The pass
// deletes these in pieces, before the next executions; meanwhile no query finds them.
func pruneExecutions(ctx context.Context, p *piece, ids []string) (removed int64, err error) {
	return p.inHalves(ctx, ids, func(tx pgx.Tx, ids []string) (int64, error) {
		gone, err := p.deleteRows(ctx, tx, ids)
		if err != nil || len(gone) == 0 {
			return 0, err
		}
		var left bool
		err = tx.QueryRow(ctx, `
			with leftovers as (
			  insert into agent_retention_leftovers
			  select g from unnest(@gone::uuid[]) g where exists (select from agent_checkpoints c where c.execution_id = g)
			  on conflict do nothing returning 1),
			changes as (delete from agent_status_changes c where c.execution_id = any (@gone::uuid[])),
			requests as (delete from agent_requests r where r.execution_id = any (@gone::uuid[])),
			drafts as (delete from agent_message_drafts d where d.execution_id = any (@gone::uuid[])),
			documents as (delete from agent_documents d where d.execution_id = any (@gone::uuid[])),
			holds as (delete from agent_lane_holds h where h.execution_id = any (@gone::uuid[])),
			lost as (delete from agent_claims_lost c where c.execution_id = any (@gone::uuid[])),
			events as (
			  delete from agent_events v where v.external_id = any (array(
			    select 'completed ' || g from unnest(@gone::uuid[]) g
			    union all
			    select 'approval ' || a.id from agent_approvals a where a.execution_id = any (@gone::uuid[]) and a.parked))
			  returning v.id),
			causes as (delete from agent_links l where l.effect = any (array(select 'event ' || v.id from events v)))
			select exists (select from leftovers)`, postgres.Strict{"gone": gone}).Scan(&left)
		p.more = p.more || left
		return int64(len(gone)), err
	})
}

// pruneCheckpoints deletes some of the checkpoints of deleted executions.
func (p *piece) pruneCheckpoints(ctx context.Context) error {
	_, err := p.tx.Exec(ctx, `
		with few as (
		  select c.execution_id, c.step
		    from (select l.execution_id from agent_retention_leftovers l order by l.execution_id limit @most) l
		   cross join lateral (
		     select k.execution_id, k.step from agent_checkpoints k
		      where k.execution_id = l.execution_id order by k.step limit @most) c
		   limit @most)
		delete from agent_checkpoints c using few f where c.execution_id = f.execution_id and c.step = f.step`,
		postgres.Strict{"most": p.most})
	if err != nil {
		return err
	}
	_, err = p.tx.Exec(ctx, `
		delete from agent_retention_leftovers l
		 where l.execution_id in (select o.execution_id from agent_retention_leftovers o order by o.execution_id limit @most)
		   and not exists (select from agent_checkpoints c where c.execution_id = l.execution_id)`,
		postgres.Strict{"most": p.most})
	if err != nil {
		return err
	}
	return p.tx.QueryRow(ctx, `select exists (select from agent_retention_leftovers)`).Scan(&p.more)
}

// pruneThreads deletes messages of threads, the oldest of a thread first, so a thread that resumes has its latest
// messages. It deletes a thread with the thread's last message. A thread stays whole while an unfinished execution has
// a message in it, because the execution may wait for an answer.
func pruneThreads(ctx context.Context, p *piece, ids []string) (removed int64, err error) {
	return p.inHalves(ctx, ids, func(tx pgx.Tx, ids []string) (int64, error) {
		held, err := postgres.Values[string](ctx, tx, "lock threads", `
			select t.id from agent_threads t where t.id = any (@ids) and t.updated_at < @before
			 order by t.updated_at, t.id for update skip locked`,
			postgres.Strict{"ids": ids, "before": p.before})
		if err != nil {
			return 0, err
		}
		tag, err := tx.Exec(ctx, `
			with idle as (
			  select t.id from unnest(@threads::text[]) t (id)
			   where not exists (
			     select from (
			       select m.execution_id from agent_messages m where m.thread_id = t.id order by m.turn, m.seq limit @most) m
			       join agent_executions x on x.id = m.execution_id where x.completed_at is null)),
			oldest as (
			  select m.id from idle t cross join lateral (
			    select o.id, o.status from agent_messages o where o.thread_id = t.id order by o.turn, o.seq limit @most) m
			   where m.status not in ('queued', 'sending') limit @most)
			delete from agent_messages m using oldest o where m.id = o.id`, postgres.Strict{"threads": held, "most": p.most})
		if err != nil {
			return 0, err
		}
		_, err = tx.Exec(ctx, `
			delete from agent_threads t
			 where t.id = any (@threads) and not exists (select from agent_messages m where m.thread_id = t.id)`,
			postgres.Strict{"threads": held})
		if err == nil && tag.RowsAffected() == int64(p.most) {
			p.more, p.stays = true, true
		}
		return tag.RowsAffected(), err
	})
}

// prunePrompts deletes prompts, and parts without a prompt. A prompt marks its parts in its own transaction. So no
// prompt contains a part whose last use was before the oldest prompt. prunePrompts subtracts a day, for transactions
// that pass midnight.
func prunePrompts(ctx context.Context, p *piece, ids []string) (removed int64, err error) {
	gone, err := p.deleteRows(ctx, p.tx, ids)
	if err != nil {
		return 0, err
	}
	tag, err := p.tx.Exec(ctx, `
		with oldest as (select least((select o.created_at from agent_prompts o order by o.activity_id limit 1), now()) as at),
		held as (
		  select p.digest from agent_prompt_parts p
		   where p.used_on < (select (o.at at time zone 'UTC')::date - 1 from oldest o)
		   order by p.used_on limit @most for update skip locked)
		delete from agent_prompt_parts p using held h where p.digest = h.digest`, postgres.Strict{"most": p.most})
	p.more = p.more || tag.RowsAffected() == int64(p.most)
	return int64(len(gone)) + tag.RowsAffected(), err
}
