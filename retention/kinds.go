package retention

import "context"

// zeroID is before every id.
const zeroID = "00000000-0000-0000-0000-000000000000"

// kind describes how a pass finds and deletes old rows of one kind.
type kind struct {
	// find selects the next @most rows behind a cursor that are older than @before: a key, and whether to delete the row.
	// It reads the rows first. So the server evaluates the condition @most times, for tables of any size.
	find string
	// byTime: a cursor is a time and a key, and find selects both and has @at. Otherwise a cursor is a key alone.
	byTime bool
	// first is the key before all others.
	first string
	// limit bounds the rows of a piece, if lower than the bound of other kinds.
	limit int
	// remove deletes the rows of @keys that no transaction has locked, and returns their keys.
	remove string
	// effect is the word of agent_links in front of a row's id. The pass deletes the row's causes too.
	effect string
	// prune replaces remove for kinds that need more statements.
	prune func(ctx context.Context, p *piece, keys []string) (removed int64, err error)
	// count returns the number of rows that a dry run would delete with @keys: one each if empty.
	count string
}

// kinds are all kinds with a policy.
var kinds = map[string]kind{
	// Uncounted rows stay until a pass has counted them.
	"activity": {
		first: zeroID,
		find: `
		with page as materialized (
		  select a.id, a.trace_id, a.execution_id, a.created_at from agent_activity a
		   where a.id > @after::uuid
		     and a.id < (select least(lanekeeper.agent_uuid7_floor(@before), c.counted_upto) from agent_activity_counted c)
		   order by a.id limit @most),
		needed as materialized (
		  select t.trace_id from (select distinct l.trace_id from page l) t
		   where exists (select from agent_executions e where e.trace_id = t.trace_id and e.completed_at is null)
		      or exists (select from agent_approvals p
		                  where p.trace_id = t.trace_id and p.status in ('pending', 'approved') and p.expires_at > now()))
		select l.id::text as key,
		       (l.created_at < @before
		        and l.trace_id not in (select n.trace_id from needed n)
		        and not exists (select from agent_activity_open w where w.activity_id = l.id)
		        and not exists (select from agent_activity_uncounted u where u.activity_id = l.id)
		        and not exists (select from agent_executions e where e.id = l.execution_id and e.completed_at is null))
		        is true as goes
		  from page l order by l.id`,
		// The bounds let the server skip partitions.
		remove: `
		with held as (
		  select a.id from agent_activity a
		   where a.id = any (@keys::uuid[]) and a.id >= (@keys::uuid[])[1]
		     and a.id <= (@keys::uuid[])[cardinality(@keys::uuid[])]
		     for update skip locked)
		delete from agent_activity a using held h
		 where a.id = h.id and a.id >= (@keys::uuid[])[1] and a.id <= (@keys::uuid[])[cardinality(@keys::uuid[])]
		returning a.id::text`,
	},

	// A pass deletes a trace as a whole, after all its executions ended long enough ago.
	"executions": {
		first:  zeroID,
		effect: "execution",
		prune:  pruneExecutions,
		find: `
		with page as materialized (
		  select x.id, x.trace_id, x.parent_id, x.completed_at, x.dedupe_key from agent_executions x
		   where x.id > @after::uuid and x.id < lanekeeper.agent_uuid7_floor(@before) order by x.id limit @most),
		needed as materialized (
		  select t.trace_id from (select distinct l.trace_id from page l) t
		   where exists (select from agent_executions e
		                  where e.trace_id = t.trace_id and (e.completed_at is null or e.completed_at >= @before))
		      or exists (select from agent_approvals p
		                  where p.trace_id = t.trace_id and p.status in ('pending', 'approved') and p.expires_at > now()))
		select l.id::text as key,
		       (l.completed_at < @before
		        and l.trace_id not in (select n.trace_id from needed n)
		        and not exists (select from agent_executions e where e.id = l.parent_id and e.completed_at is null)
		        and not exists (select from agent_executions e where e.parent_id = l.id and e.completed_at is null)
		        and not exists (select from agent_executions e where e.waiting_for = 'agent' and e.waiting_key = l.id::text)
		        and not exists (select from agent_unpublished_completions u where u.execution_id = l.id)
		        and not exists (select from agent_automation_runs r where r.execution_id = l.id and r.status = 'claimed')
		        -- PostgreSQL 18 would read these two tables whole and hash them for "not exists", despite enable_seqscan.
		        and (select true from agent_messages m
		              where m.execution_id = l.id and m.status in ('queued', 'sending') limit 1) is null
		        and (select true from agent_locks k where k.execution_id = l.id limit 1) is null
		        and not exists (select from agent_budget_reservations b where b.execution_id = l.id)
		        and not exists (select from agent_events v join agent_executions e on e.id = v.consumed_by
		                         where v.external_id = 'completed ' || l.id and e.completed_at is null)
		        and not exists (select from agent_mcp_calls c
		                         where c.id = lanekeeper.agent_uuid(substr(l.dedupe_key, 10))
		                           and l.dedupe_key like 'mcp.call %'
		                           and c.collected_at is null)) is true as goes
		  from page l order by l.id`,
		remove: `
		with held as (
		  select x.id from agent_executions x where x.id = any (@keys::uuid[]) and x.completed_at is not null order by x.id
		     for update skip locked)
		delete from agent_executions x using held h where x.id = h.id returning x.id::text`,
	},

	// A pass deletes the event of a completion or a decision with its execution, because a later waiter or a fork reads
	// the event. An unconsumed event may be for any unfinished execution that began before the event, or within the
	// event's retention. The index finds the oldest of those executions by state and id; by id alone it would search
	// millions.
	"events": {
		first:  zeroID,
		effect: "event",
		find: `
		with page as materialized (
		  select v.id, v.event, v.key, v.execution_id, v.consumed_by, v.created_at from agent_events v
		   where v.id > @after::uuid and v.id < lanekeeper.agent_uuid7_floor(@before) order by v.id limit @most),
		oldest as materialized (
		  select min(f.id::text collate "C") as id from unnest(array['pending', 'running', 'waiting']) s (status)
		   cross join lateral (
		     select x.id from agent_executions x
		      where x.status in ('pending', 'running', 'waiting') and x.status between s.status and s.status
		      order by x.status, x.id limit 1) f)
		select l.id::text as key,
		       (l.created_at < @before
		        and not exists (select from agent_executions x where x.id = l.consumed_by and x.completed_at is null)
		        and case
		          when l.event = 'AGENT_COMPLETED' then
		            not exists (select from agent_executions x
		              where x.id = coalesce(l.execution_id, lanekeeper.agent_uuid(l.key)))
		          when l.event = 'APPROVAL_DECIDED' then
		            not exists (select from agent_approvals a join agent_executions x on x.id = a.execution_id
		                         where a.id = lanekeeper.agent_uuid(l.key))
		          when l.consumed_by is null and l.event in ('MESSAGE_RECEIVED', 'DOCUMENT_UPLOADED', 'SIGNATURE_COMPLETED',
		                                                     'TEST_COMPLETED', 'EVENT_COMPLETED') then
		            coalesce((select o.id from oldest o) >= (
		              select lanekeeper.agent_uuid7_floor(l.created_at + r.keep)::text collate "C"
		                from agent_retention r where r.kind = 'events'), true)
		          else true end) is true as goes
		  from page l order by l.id`,
		remove: `
		with held as (select v.id from agent_events v where v.id = any (@keys::uuid[]) for update skip locked)
		delete from agent_events v using held h where v.id = h.id returning v.id::text`,
	},

	"messages": {
		byTime: true,
		limit:  50,
		prune:  pruneThreads,
		find: `
		with page as materialized (
		  select t.id, t.updated_at from agent_threads t
		   where (t.updated_at, t.id) > (@at::text::timestamptz, @after) and t.updated_at < @before
		   order by t.updated_at, t.id limit @most)
		select l.id as key, l.updated_at::text as at,
		       not exists (select from agent_executions x where x.thread_id = l.id and x.completed_at is null)
		       and not exists (select from agent_executions x where x.waiting_for = 'response' and x.waiting_key = l.id)
		       and not exists (select from agent_messages m where m.thread_id = l.id and m.status in ('queued', 'sending'))
		       and not exists (select from agent_locks k
		                        where k.lane = 'thread:' || l.id and k.locked_by <> ''
		                          and (k.parked or k.expires_at > now())) as goes
		  from page l order by l.updated_at, l.id`,
		count: `
		select count(*) from agent_messages m
		 where m.thread_id = any (@keys)
		   and not exists (select from agent_messages q join agent_executions x on x.id = q.execution_id
		                    where q.thread_id = m.thread_id and x.completed_at is null)`,
	},

	// A fork of its execution reads the decision.
	"approvals": {
		first: zeroID,
		find: `
		with page as materialized (
		  select a.id, a.status, a.execution_id, a.parked, a.created_at, a.decided_at, a.consumed_at, a.consumed_for,
		         a.expires_at from agent_approvals a
		   where a.id > @after::uuid and a.id < lanekeeper.agent_uuid7_floor(@before) order by a.id limit @most)
		select l.id::text as key,
		       ((l.status in ('rejected', 'expired', 'consumed') or l.expires_at < @before)
		        and greatest(l.created_at, l.decided_at, l.consumed_at) < @before
		        and not exists (select from agent_executions x
		                         where x.id = l.execution_id and (l.parked or x.completed_at is null))
		        and not exists (select from agent_executions x
		                         where x.id = lanekeeper.agent_uuid(left(l.consumed_for, 36)) and x.completed_at is null))
		       is true as goes
		  from page l order by l.id`,
		remove: `
		with held as (select a.id from agent_approvals a where a.id = any (@keys::uuid[]) for update skip locked)
		delete from agent_approvals a using held h where a.id = h.id returning a.id::text`,
	},

	"automation_runs": {
		first:  zeroID,
		effect: "run",
		find: `
		with page as materialized (
		  select r.id, r.status, r.execution_id, r.claimed_at, r.finished_at from agent_automation_runs r
		   where r.id > @after::uuid and r.id < lanekeeper.agent_uuid7_floor(@before) order by r.id limit @most)
		select l.id::text as key,
		       (l.status in ('success', 'skipped') and coalesce(l.finished_at, l.claimed_at) < @before
		        and not exists (select from agent_executions x where x.id = l.execution_id and x.completed_at is null))
		        is true as goes
		  from page l order by l.id`,
		remove: `
		with held as (
		  select r.id from agent_automation_runs r where r.id = any (@keys::uuid[]) and r.status in ('success', 'skipped')
		     for update skip locked)
		delete from agent_automation_runs r using held h where r.id = h.id returning r.id::text`,
	},

	"deliveries": {
		first: zeroID,
		find: `
		with page as materialized (
		  select d.id, d.status, d.execution_id, d.finished_at from agent_webhook_deliveries d
		   where d.id > @after::uuid and d.id < lanekeeper.agent_uuid7_floor(@before) order by d.id limit @most)
		select l.id::text as key,
		       l.status in ('done', 'ignored') and coalesce(l.finished_at, '-infinity') < @before
		       and not exists (select from agent_executions x where x.id = l.execution_id and x.completed_at is null) as goes
		  from page l order by l.id`,
		remove: `
		with held as (
		  select d.id from agent_webhook_deliveries d where d.id = any (@keys::uuid[]) and d.status in ('done', 'ignored')
		     for update skip locked)
		delete from agent_webhook_deliveries d using held h where d.id = h.id returning d.id::text`,
	},

	"channel_messages": {
		first: zeroID,
		find: `
		with page as materialized (
		  select m.id, m.finished_at from agent_channel_messages m
		   where m.id > @after::uuid and m.id < lanekeeper.agent_uuid7_floor(@before) order by m.id limit @most)
		select l.id::text as key, coalesce(l.finished_at < @before, false) as goes from page l order by l.id`,
		remove: `
		with held as (
		  select m.id from agent_channel_messages m where m.id = any (@keys::uuid[]) and m.finished_at is not null
		     for update skip locked)
		delete from agent_channel_messages m using held h where m.id = h.id returning m.id::text`,
	},

	"outbox": {
		first:  zeroID,
		effect: "outgoing",
		find: `
		with page as materialized (
		  select w.id, w.status, w.finished_at from agent_webhook_outbox w
		   where w.id > @after::uuid and w.id < lanekeeper.agent_uuid7_floor(@before) order by w.id limit @most)
		select l.id::text as key, l.status in ('sent', 'dead') and coalesce(l.finished_at, '-infinity') < @before as goes
		  from page l order by l.id`,
		remove: `
		with held as (
		  select w.id from agent_webhook_outbox w where w.id = any (@keys::uuid[]) and w.status in ('sent', 'dead')
		     for update skip locked)
		delete from agent_webhook_outbox w using held h where w.id = h.id returning w.id::text`,
	},

	// By time alone, as in the index: few rows share one moment.
	"budgets": {
		byTime: true,
		find: `
		with page as materialized (
		  select b.scope, b.created_at, b.reserved_tokens, b.reserved_usd from agent_budgets b
		   where b.created_at >= @at::text::timestamptz and (b.created_at > @at::text::timestamptz or b.scope > @after)
		     and b.created_at < @before
		   order by b.created_at, b.scope limit @most)
		select l.scope as key, l.created_at::text as at,
		       l.reserved_tokens = 0 and l.reserved_usd = 0
		       and not exists (select from agent_executions x
		                        where l.scope like 'run:%' and x.trace_id = substr(l.scope, 5)
		                          and x.completed_at is null) as goes
		  from page l order by l.created_at, l.scope`,
		remove: `
		with held as (
		  select b.scope from agent_budgets b where b.scope = any (@keys) and b.reserved_tokens = 0 and b.reserved_usd = 0
		     for update skip locked)
		delete from agent_budgets b using held h where b.scope = h.scope returning b.scope`,
	},

	// A control stays as long as the run that is compared with it. A pass deletes a sample of recorded turns with its last
	// run.
	"evals": {
		first: zeroID,
		find: `
		with page as materialized (
		  select r.id, r.finished_at from agent_eval_runs r
		   where r.id > @after::uuid and r.id < lanekeeper.agent_uuid7_floor(@before) order by r.id limit @most)
		select l.id::text as key,
		       coalesce(l.finished_at < @before, false)
		       and not exists (select from agent_eval_runs c
		                        where c.control_id = l.id and coalesce(c.finished_at >= @before, true)) as goes
		  from page l order by l.id`,
		remove: `
		with held as (
		  select r.id from agent_eval_runs r where r.id = any (@keys::uuid[]) and r.finished_at is not null
		     for update skip locked),
		gone as (delete from agent_eval_runs r using held h where r.id = h.id returning r.id, r.suite),
		samples as (
		  delete from agent_evals e where e.source in ('counterfactual', 'shadow')
		     and e.name in (select g.suite from gone g)
		     and not exists (select from agent_eval_runs o
		                      where o.suite = e.name and o.id not in (select g.id from gone g)))
		select g.id::text from gone g`,
	},

	// A label outlives its run.
	"eval_labels": {
		byTime: true,
		first:  "(0,0)",
		find: `
		select l.ctid::text as key, l.created_at::text as at, true as goes from agent_eval_labels l
		 where l.created_at >= @at::text::timestamptz
		   and (l.created_at > @at::text::timestamptz or l.ctid > @after::text::tid) and l.created_at < @before
		 order by l.created_at, l.ctid limit @most`,
		remove: `
		with held as (
		  select l.ctid from agent_eval_labels l
		   where l.ctid = any (@keys::text[]::tid[])
		     and l.created_at < (select now() - r.keep from agent_retention r where r.kind = 'eval_labels')
		     for update skip locked)
		delete from agent_eval_labels l using held h where l.ctid = h.ctid returning l.ctid::text`,
	},

	// A row's place in the table may hold another row at the time of the delete.
	"hour_counts": {
		byTime: true,
		first:  "(0,0)",
		find: `
		select c.ctid::text as key, c.start::text as at, true as goes from agent_activity_counts c
		 where c.span = 'hour' and c.start >= @at::text::timestamptz
		   and (c.start > @at::text::timestamptz or c.ctid > @after::text::tid)
		   and c.start < @before
		 order by c.start, c.ctid limit @most`,
		remove: `
		with held as (
		  select c.ctid from agent_activity_counts c
		   where c.ctid = any (@keys::text[]::tid[]) and c.span = 'hour'
		     and c.start < (select date_trunc('hour', now() - r.keep) from agent_retention r where r.kind = 'hour_counts')
		     for update skip locked)
		delete from agent_activity_counts c using held h where c.ctid = h.ctid returning c.ctid::text`,
	},

	"prompts": {
		first: zeroID,
		prune: prunePrompts,
		find: `
		with page as materialized (
		  select p.activity_id from agent_prompts p
		   where p.activity_id > @after::uuid and p.activity_id < lanekeeper.agent_uuid7_floor(@before)
		   order by p.activity_id limit @most)
		select l.activity_id::text as key,
		       not exists (select from agent_activity_open w where w.activity_id = l.activity_id) as goes
		  from page l order by l.activity_id`,
		remove: `
		with held as (select p.activity_id from agent_prompts p where p.activity_id = any (@keys::uuid[])
		     for update skip locked)
		delete from agent_prompts p using held h where p.activity_id = h.activity_id returning p.activity_id::text`,
	},
}
