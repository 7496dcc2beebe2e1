package retention

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// pruneExecutions deletes executions with their dependent rows. An execution may have many checkpoints. The pass
// deletes these in batches, before the next executions; meanwhile no query finds them.
func pruneExecutions(ctx context.Context, b *batch, ids []string) (removed int64, err error) {
	return b.bisect(ctx, ids, func(tx pgx.Tx, ids []string) (int64, error) {
		deleted, err := b.deleteRows(ctx, tx, ids)
		if err != nil || len(deleted) == 0 {
			return 0, err
		}
		var hasCheckpoints bool
		err = tx.QueryRow(ctx, `
			with leftovers as (
			  insert into agent_retention_leftovers
			  select g from unnest(@deleted::uuid[]) g where exists (select from agent_checkpoints c where c.execution_id = g)
			  on conflict do nothing returning 1),
			changes as (delete from agent_status_changes c where c.execution_id = any (@deleted::uuid[])),
			requests as (delete from agent_requests r where r.execution_id = any (@deleted::uuid[])),
			drafts as (delete from agent_message_drafts d where d.execution_id = any (@deleted::uuid[])),
			documents as (delete from agent_documents d where d.execution_id = any (@deleted::uuid[])),
			holds as (delete from agent_lane_holds h where h.execution_id = any (@deleted::uuid[])),
			lost as (delete from agent_claims_lost c where c.execution_id = any (@deleted::uuid[])),
			events as (
			  delete from agent_events v where v.external_id = any (array(
			    select 'completed ' || g from unnest(@deleted::uuid[]) g
			    union all
			    select 'approval ' || a.id from agent_approvals a where a.execution_id = any (@deleted::uuid[]) and a.parked))
			  returning v.id),
			causes as (delete from agent_links l where l.effect = any (array(select 'event ' || v.id from events v)))
			select exists (select from leftovers)`, postgres.Strict{"deleted": deleted}).Scan(&hasCheckpoints)
		b.more = b.more || hasCheckpoints
		return int64(len(deleted)), err
	})
}

// pruneCheckpoints deletes some of the checkpoints of deleted executions.
func (b *batch) pruneCheckpoints(ctx context.Context) error {
	_, err := b.tx.Exec(ctx, `
		with batch as (
		  select c.execution_id, c.step
		    from (select l.execution_id from agent_retention_leftovers l order by l.execution_id limit @limit) l
		   cross join lateral (
		     select k.execution_id, k.step from agent_checkpoints k
		      where k.execution_id = l.execution_id order by k.step limit @limit) c
		   limit @limit)
		delete from agent_checkpoints c using batch
		 where c.execution_id = batch.execution_id and c.step = batch.step`,
		postgres.Strict{"limit": b.limit})
	if err != nil {
		return err
	}
	_, err = b.tx.Exec(ctx, `
		delete from agent_retention_leftovers l
		 where l.execution_id in (select o.execution_id from agent_retention_leftovers o order by o.execution_id limit @limit)
		   and not exists (select from agent_checkpoints c where c.execution_id = l.execution_id)`,
		postgres.Strict{"limit": b.limit})
	if err != nil {
		return err
	}
	return b.tx.QueryRow(ctx, `select exists (select from agent_retention_leftovers)`).Scan(&b.more)
}

// pruneThreads deletes messages of threads, the oldest of a thread first, so a thread that resumes has its latest
// messages. It deletes a thread with the thread's last message. A batch leaves a thread whole if an unfinished
// execution has one of its oldest messages, up to the batch's limit, because the execution may wait for an answer.
func pruneThreads(ctx context.Context, b *batch, ids []string) (removed int64, err error) {
	return b.bisect(ctx, ids, func(tx pgx.Tx, ids []string) (int64, error) {
		locked, err := postgres.Values[string](ctx, tx, "lock threads", `
			select t.id from agent_threads t where t.id = any (@ids) and t.updated_at < @before
			 order by t.updated_at, t.id for update skip locked`,
			postgres.Strict{"ids": ids, "before": b.before})
		if err != nil {
			return 0, err
		}
		tag, err := tx.Exec(ctx, `
			with idle as (
			  select t.id from unnest(@threads::text[]) t (id)
			   where not exists (
			     select from (
			       select m.execution_id from agent_messages m where m.thread_id = t.id order by m.turn, m.seq limit @limit) m
			       join agent_executions x on x.id = m.execution_id where x.completed_at is null)),
			oldest as (
			  select m.id from idle t cross join lateral (
			    select o.id, o.status from agent_messages o where o.thread_id = t.id order by o.turn, o.seq limit @limit) m
			   where m.status not in ('queued', 'sending') limit @limit)
			delete from agent_messages m using oldest o where m.id = o.id`, postgres.Strict{"threads": locked, "limit": b.limit})
		if err != nil {
			return 0, err
		}
		_, err = tx.Exec(ctx, `
			delete from agent_threads t
			 where t.id = any (@threads) and not exists (select from agent_messages m where m.thread_id = t.id)`,
			postgres.Strict{"threads": locked})
		if err == nil && tag.RowsAffected() == int64(b.limit) {
			b.more, b.repeat = true, true
		}
		return tag.RowsAffected(), err
	})
}

// prunePrompts deletes prompts, and parts without a prompt. A prompt marks its parts in its own transaction. So no
// prompt contains a part whose last use was before the oldest prompt. prunePrompts subtracts a day, for transactions
// that pass midnight.
func prunePrompts(ctx context.Context, b *batch, ids []string) (removed int64, err error) {
	deleted, err := b.deleteRows(ctx, b.tx, ids)
	if err != nil {
		return 0, err
	}
	tag, err := b.tx.Exec(ctx, `
		with oldest as (select least((select o.created_at from agent_prompts o order by o.activity_id limit 1), now()) as at),
		locked as (
		  select p.digest from agent_prompt_parts p
		   where p.used_on < (select (o.at at time zone 'UTC')::date - 1 from oldest o)
		   order by p.used_on limit @limit for update skip locked)
		delete from agent_prompt_parts p using locked where p.digest = locked.digest`, postgres.Strict{"limit": b.limit})
	b.more = b.more || tag.RowsAffected() == int64(b.limit)
	return int64(len(deleted)) + tag.RowsAffected(), err
}
