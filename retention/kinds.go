package retention

import "context"

// zeroID sorts before every id.
const zeroID = "00000000-0000-0000-0000-000000000000"

// kind describes how a pass finds and deletes old rows of one kind.
type kind struct {
	// findSQL selects the next @limit rows that follow a cursor and are older than @before: the key of each row, and
	// whether the pass may delete it. It reads the rows first, so the server evaluates the condition at most @limit times.
	findSQL string
	// byTime reports that a cursor has a time and a key. Then findSQL selects both, and has the argument @at. Otherwise a
	// cursor has only a key.
	byTime bool
	// firstKey is a key that sorts before all others.
	firstKey string
	// maxRows bounds the rows of a batch, if it is lower than the bound of other kinds.
	maxRows int
	// deleteSQL deletes the rows of @keys that no transaction has locked, and returns their keys.
	deleteSQL string
	// linkPrefix is the prefix of a row's id in agent_links.effect. The pass deletes the row's causes too.
	linkPrefix string
	// prune replaces deleteSQL for kinds that need more statements.
	prune func(ctx context.Context, b *batch, keys []string) (removed int64, err error)
	// countSQL counts the rows that a pass would delete with @keys. If it is empty, a pass deletes one row per
	// key.
	countSQL string
}

// kinds are all kinds with a policy.
var kinds = map[string]kind{
	// Uncounted rows stay until a pass has counted them.
	"activity": {
		firstKey: zeroID,
		findSQL: `
		with page as materialized (
		  select a.id, a.trace_id, a.execution_id, a.created_at from agent_activity a
		   where a.id > @after::uuid
		     and a.id < (select least(lanekeeper.agent_uuid7_floor(@before), c.counted_upto) from agent_activity_counted c)
		   order by a.id limit @limit),
		needed as materialized (
		  select t.trace_id from (select distinct page.trace_id from page) t
		   where exists (select from agent_executions e where e.trace_id = t.trace_id and e.completed_at is null)
		      or exists (select from agent_approvals p
		                  where p.trace_id = t.trace_id and p.status in ('pending', 'approved') and p.expires_at > now()))
		select page.id::text as key,
		       (page.created_at < @before
		        and page.trace_id not in (select n.trace_id from needed n)
		        and not exists (select from agent_activity_open w where w.activity_id = page.id)
		        and not exists (select from agent_activity_uncounted u where u.activity_id = page.id)
		        and not exists (select from agent_executions e where e.id = page.execution_id and e.completed_at is null))
		        is true as deletable
		  from page order by page.id`,
		// The bounds let the server skip partitions.
		deleteSQL: `
		with locked as (
		  select a.id from agent_activity a
		   where a.id = any (@keys::uuid[]) and a.id >= (@keys::uuid[])[1]
		     and a.id <= (@keys::uuid[])[cardinality(@keys::uuid[])]
		     for update skip locked)
		delete from agent_activity a using locked
		 where a.id = locked.id and a.id >= (@keys::uuid[])[1] and a.id <= (@keys::uuid[])[cardinality(@keys::uuid[])]
		returning a.id::text`,
	},

	// The executions of a trace stay until the last of them ended long enough ago.
	"executions": {
		firstKey:   zeroID,
		linkPrefix: "execution",
		prune:      pruneExecutions,
		findSQL: `
		with page as materialized (
		  select x.id, x.trace_id, x.parent_id, x.completed_at, x.dedupe_key from agent_executions x
		   where x.id > @after::uuid and x.id < lanekeeper.agent_uuid7_floor(@before) order by x.id limit @limit),
		needed as materialized (
		  select t.trace_id from (select distinct page.trace_id from page) t
		   where exists (select from agent_executions e
		                  where e.trace_id = t.trace_id and (e.completed_at is null or e.completed_at >= @before))
		      or exists (select from agent_approvals p
		                  where p.trace_id = t.trace_id and p.status in ('pending', 'approved') and p.expires_at > now()))
		select page.id::text as key,
		       (page.completed_at < @before
		        and page.trace_id not in (select n.trace_id from needed n)
		        and not exists (select from agent_executions e where e.id = page.parent_id and e.completed_at is null)
		        and not exists (select from agent_executions e where e.parent_id = page.id and e.completed_at is null)
		        and not exists (select from agent_executions e
		                         where e.waiting_for = 'agent' and e.waiting_key = page.id::text)
		        and not exists (select from agent_unpublished_completions u where u.execution_id = page.id)
		        and not exists (select from agent_automation_runs r where r.execution_id = page.id and r.status = 'claimed')
		        -- PostgreSQL 18 would read these two tables whole and hash them for "not exists", despite enable_seqscan.
		        and (select true from agent_messages m
		              where m.execution_id = page.id and m.status in ('queued', 'sending') limit 1) is null
		        and (select true from agent_locks k where k.execution_id = page.id limit 1) is null
		        and not exists (select from agent_budget_reservations b where b.execution_id = page.id)
		        and not exists (select from agent_events v join agent_executions e on e.id = v.consumed_by
		                         where v.external_id = 'completed ' || page.id and e.completed_at is null)
		        and not exists (select from agent_mcp_calls c
		                         where c.id = lanekeeper.agent_uuid(substr(page.dedupe_key, 10))
		                           and page.dedupe_key like 'mcp.call %'
		                           and c.collected_at is null)) is true as deletable
		  from page order by page.id`,
		deleteSQL: `
		with locked as (
		  select x.id from agent_executions x where x.id = any (@keys::uuid[]) and x.completed_at is not null order by x.id
		     for update skip locked)
		delete from agent_executions x using locked where x.id = locked.id returning x.id::text`,
	},

	// A pass deletes the event of a completion or a decision with its execution, because a later waiter or a fork reads
	// the event. An unconsumed event may be for any unfinished execution that began before the event, or within the
	// event's retention. The index finds the oldest of those executions by state and id; by id alone it would search
	// millions.
	"events": {
		firstKey:   zeroID,
		linkPrefix: "event",
		findSQL: `
		with page as materialized (
		  select v.id, v.event, v.key, v.execution_id, v.consumed_by, v.created_at from agent_events v
		   where v.id > @after::uuid and v.id < lanekeeper.agent_uuid7_floor(@before) order by v.id limit @limit),
		oldest as materialized (
		  select min(f.id::text collate "C") as id from unnest(array['pending', 'running', 'waiting']) s (status)
		   cross join lateral (
		     select x.id from agent_executions x
		      where x.status in ('pending', 'running', 'waiting') and x.status between s.status and s.status
		      order by x.status, x.id limit 1) f)
		select page.id::text as key,
		       (page.created_at < @before
		        and not exists (select from agent_executions x where x.id = page.consumed_by and x.completed_at is null)
		        and case
		          when page.event = 'AGENT_COMPLETED' then
		            not exists (select from agent_executions x
		              where x.id = coalesce(page.execution_id, lanekeeper.agent_uuid(page.key)))
		          when page.event = 'APPROVAL_DECIDED' then
		            not exists (select from agent_approvals a join agent_executions x on x.id = a.execution_id
		                         where a.id = lanekeeper.agent_uuid(page.key))
		          when page.consumed_by is null
		               and page.event in ('MESSAGE_RECEIVED', 'DOCUMENT_UPLOADED', 'SIGNATURE_COMPLETED', 'TEST_COMPLETED',
		                                  'EVENT_COMPLETED') then
		            coalesce((select o.id from oldest o) >= (
		              select lanekeeper.agent_uuid7_floor(page.created_at + r.keep)::text collate "C"
		                from agent_retention r where r.kind = 'events'), true)
		          else true end) is true as deletable
		  from page order by page.id`,
		deleteSQL: `
		with locked as (select v.id from agent_events v where v.id = any (@keys::uuid[]) for update skip locked)
		delete from agent_events v using locked where v.id = locked.id returning v.id::text`,
	},

	"messages": {
		byTime:  true,
		maxRows: 50,
		prune:   pruneThreads,
		findSQL: `
		with page as materialized (
		  select t.id, t.updated_at from agent_threads t
		   where (t.updated_at, t.id) > (@at::text::timestamptz, @after) and t.updated_at < @before
		   order by t.updated_at, t.id limit @limit)
		select page.id as key, page.updated_at::text as at,
		       not exists (select from agent_executions x where x.thread_id = page.id and x.completed_at is null)
		       and not exists (select from agent_executions x where x.waiting_for = 'response' and x.waiting_key = page.id)
		       and not exists (select from agent_messages m where m.thread_id = page.id and m.status in ('queued', 'sending'))
		       and not exists (select from agent_locks k
		                        where k.lane = 'thread:' || page.id and k.locked_by <> ''
		                          and (k.parked or k.expires_at > now())) as deletable
		  from page order by page.updated_at, page.id`,
		countSQL: `
		select count(*) from agent_messages m
		 where m.thread_id = any (@keys)
		   and not exists (select from agent_messages q join agent_executions x on x.id = q.execution_id
		                    where q.thread_id = m.thread_id and x.completed_at is null)`,
	},

	// An approval stays with its execution, because a fork of the execution reads the decision.
	"approvals": {
		firstKey: zeroID,
		findSQL: `
		with page as materialized (
		  select a.id, a.status, a.execution_id, a.parked, a.created_at, a.decided_at, a.consumed_at, a.consumed_for,
		         a.expires_at from agent_approvals a
		   where a.id > @after::uuid and a.id < lanekeeper.agent_uuid7_floor(@before) order by a.id limit @limit)
		select page.id::text as key,
		       ((page.status in ('rejected', 'expired', 'consumed') or page.expires_at < @before)
		        and greatest(page.created_at, page.decided_at, page.consumed_at) < @before
		        and not exists (select from agent_executions x
		                         where x.id = page.execution_id and (page.parked or x.completed_at is null))
		        and not exists (select from agent_executions x
		                         where x.id = lanekeeper.agent_uuid(left(page.consumed_for, 36)) and x.completed_at is null))
		       is true as deletable
		  from page order by page.id`,
		deleteSQL: `
		with locked as (select a.id from agent_approvals a where a.id = any (@keys::uuid[]) for update skip locked)
		delete from agent_approvals a using locked where a.id = locked.id returning a.id::text`,
	},

	"automation_runs": {
		firstKey:   zeroID,
		linkPrefix: "run",
		findSQL: `
		with page as materialized (
		  select r.id, r.status, r.execution_id, r.claimed_at, r.finished_at from agent_automation_runs r
		   where r.id > @after::uuid and r.id < lanekeeper.agent_uuid7_floor(@before) order by r.id limit @limit)
		select page.id::text as key,
		       (page.status in ('success', 'skipped') and coalesce(page.finished_at, page.claimed_at) < @before
		        and not exists (select from agent_executions x where x.id = page.execution_id and x.completed_at is null))
		        is true as deletable
		  from page order by page.id`,
		deleteSQL: `
		with locked as (
		  select r.id from agent_automation_runs r where r.id = any (@keys::uuid[]) and r.status in ('success', 'skipped')
		     for update skip locked)
		delete from agent_automation_runs r using locked where r.id = locked.id returning r.id::text`,
	},

	"deliveries": {
		firstKey: zeroID,
		findSQL: `
		with page as materialized (
		  select d.id, d.status, d.execution_id, d.finished_at from agent_webhook_deliveries d
		   where d.id > @after::uuid and d.id < lanekeeper.agent_uuid7_floor(@before) order by d.id limit @limit)
		select page.id::text as key,
		       page.status in ('done', 'ignored') and coalesce(page.finished_at, '-infinity') < @before
		       and not exists (select from agent_executions x
		                        where x.id = page.execution_id and x.completed_at is null) as deletable
		  from page order by page.id`,
		deleteSQL: `
		with locked as (
		  select d.id from agent_webhook_deliveries d where d.id = any (@keys::uuid[]) and d.status in ('done', 'ignored')
		     for update skip locked)
		delete from agent_webhook_deliveries d using locked where d.id = locked.id returning d.id::text`,
	},

	"channel_messages": {
		firstKey: zeroID,
		findSQL: `
		with page as materialized (
		  select m.id, m.finished_at from agent_channel_messages m
		   where m.id > @after::uuid and m.id < lanekeeper.agent_uuid7_floor(@before) order by m.id limit @limit)
		select page.id::text as key, coalesce(page.finished_at < @before, false) as deletable from page order by page.id`,
		deleteSQL: `
		with locked as (
		  select m.id from agent_channel_messages m where m.id = any (@keys::uuid[]) and m.finished_at is not null
		     for update skip locked)
		delete from agent_channel_messages m using locked where m.id = locked.id returning m.id::text`,
	},

	"outbox": {
		firstKey:   zeroID,
		linkPrefix: "outgoing",
		findSQL: `
		with page as materialized (
		  select w.id, w.status, w.finished_at from agent_webhook_outbox w
		   where w.id > @after::uuid and w.id < lanekeeper.agent_uuid7_floor(@before) order by w.id limit @limit)
		select page.id::text as key,
		       page.status in ('sent', 'dead') and coalesce(page.finished_at, '-infinity') < @before as deletable
		  from page order by page.id`,
		deleteSQL: `
		with locked as (
		  select w.id from agent_webhook_outbox w where w.id = any (@keys::uuid[]) and w.status in ('sent', 'dead')
		     for update skip locked)
		delete from agent_webhook_outbox w using locked where w.id = locked.id returning w.id::text`,
	},

	// The index has the time alone, because few rows share one time.
	"budgets": {
		byTime: true,
		findSQL: `
		with page as materialized (
		  select b.scope, b.created_at, b.reserved_tokens, b.reserved_usd from agent_budgets b
		   where b.created_at >= @at::text::timestamptz and (b.created_at > @at::text::timestamptz or b.scope > @after)
		     and b.created_at < @before
		   order by b.created_at, b.scope limit @limit)
		select page.scope as key, page.created_at::text as at,
		       page.reserved_tokens = 0 and page.reserved_usd = 0
		       and not exists (select from agent_executions x
		                        where page.scope like 'run:%' and x.trace_id = substr(page.scope, 5)
		                          and x.completed_at is null) as deletable
		  from page order by page.created_at, page.scope`,
		deleteSQL: `
		with locked as (
		  select b.scope from agent_budgets b where b.scope = any (@keys) and b.reserved_tokens = 0 and b.reserved_usd = 0
		     for update skip locked)
		delete from agent_budgets b using locked where b.scope = locked.scope returning b.scope`,
	},

	// A control stays as long as the run that is compared with it. A pass deletes a sample of recorded turns with its last
	// run.
	"evals": {
		firstKey: zeroID,
		findSQL: `
		with page as materialized (
		  select r.id, r.finished_at from agent_eval_runs r
		   where r.id > @after::uuid and r.id < lanekeeper.agent_uuid7_floor(@before) order by r.id limit @limit)
		select page.id::text as key,
		       coalesce(page.finished_at < @before, false)
		       and not exists (select from agent_eval_runs c
		                        where c.control_id = page.id and coalesce(c.finished_at >= @before, true)) as deletable
		  from page order by page.id`,
		deleteSQL: `
		with locked as (
		  select r.id from agent_eval_runs r where r.id = any (@keys::uuid[]) and r.finished_at is not null
		     for update skip locked),
		deleted as (delete from agent_eval_runs r using locked where r.id = locked.id returning r.id, r.suite),
		samples as (
		  delete from agent_evals e where e.source in ('counterfactual', 'shadow')
		     and e.name in (select deleted.suite from deleted)
		     and not exists (select from agent_eval_runs o
		                      where o.suite = e.name and o.id not in (select deleted.id from deleted)))
		select deleted.id::text from deleted`,
	},

	// A label has its own policy, and may outlive its run.
	"eval_labels": {
		byTime:   true,
		firstKey: "(0,0)",
		findSQL: `
		select l.ctid::text as key, l.created_at::text as at, true as deletable from agent_eval_labels l
		 where l.created_at >= @at::text::timestamptz
		   and (l.created_at > @at::text::timestamptz or l.ctid > @after::text::tid) and l.created_at < @before
		 order by l.created_at, l.ctid limit @limit`,
		deleteSQL: `
		with locked as (
		  select l.ctid from agent_eval_labels l
		   where l.ctid = any (@keys::text[]::tid[])
		     and l.created_at < (select now() - r.keep from agent_retention r where r.kind = 'eval_labels')
		     for update skip locked)
		delete from agent_eval_labels l using locked where l.ctid = locked.ctid returning l.ctid::text`,
	},

	// The key is the row's ctid. Another row may have that ctid when the delete runs, so the delete checks the policy
	// again.
	"hour_counts": {
		byTime:   true,
		firstKey: "(0,0)",
		findSQL: `
		select c.ctid::text as key, c.start::text as at, true as deletable from agent_activity_counts c
		 where c.span = 'hour' and c.start >= @at::text::timestamptz
		   and (c.start > @at::text::timestamptz or c.ctid > @after::text::tid)
		   and c.start < @before
		 order by c.start, c.ctid limit @limit`,
		deleteSQL: `
		with locked as (
		  select c.ctid from agent_activity_counts c
		   where c.ctid = any (@keys::text[]::tid[]) and c.span = 'hour'
		     and c.start < (select date_trunc('hour', now() - r.keep) from agent_retention r where r.kind = 'hour_counts')
		     for update skip locked)
		delete from agent_activity_counts c using locked where c.ctid = locked.ctid returning c.ctid::text`,
	},

	"prompts": {
		firstKey: zeroID,
		prune:    prunePrompts,
		findSQL: `
		with page as materialized (
		  select p.activity_id from agent_prompts p
		   where p.activity_id > @after::uuid and p.activity_id < lanekeeper.agent_uuid7_floor(@before)
		   order by p.activity_id limit @limit)
		select page.activity_id::text as key,
		       not exists (select from agent_activity_open w where w.activity_id = page.activity_id) as deletable
		  from page order by page.activity_id`,
		deleteSQL: `
		with locked as (select p.activity_id from agent_prompts p where p.activity_id = any (@keys::uuid[])
		     for update skip locked)
		delete from agent_prompts p using locked where p.activity_id = locked.activity_id returning p.activity_id::text`,
	},
}
