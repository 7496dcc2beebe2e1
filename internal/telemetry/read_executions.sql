-- Executions that have ended, by id, each with its place in the trace and its requester.
select x.id::text, x.trace_id, x.surface, x.agent, x.flow, x.status, coalesce(x.result_type, '') as result_type,
       coalesce(x.error_message, '') as error_message, coalesce(x.failed_step, '') as failed_step, x.claim, not x.awaited as detached,
       coalesce(x.thread_id, '') as thread_id, x.created_at, coalesce(x.started_at, x.completed_at) as started_at, x.completed_at,
       p.id::text as parent_id, coalesce(p.trace_id, '') as parent_trace,
       (select r.id from agent_executions r where r.trace_id = x.trace_id and r.parent_id is null order by r.id limit 1)::text as root_id,
       f.id::text as forked_from, coalesce(f.trace_id, '') as forked_trace,
       case when x.parent_id is null then
         array(select l.traceparent from agent_trace_links l where l.trace_id = x.trace_id order by l.created_at, l.traceparent limit 100)
       else '{}' end as links
  from agent_executions x
  left join agent_executions p on p.id = x.parent_id
  left join agent_executions f on f.id = x.forked_from
 where x.id = any (@ids::uuid[]) and x.completed_at is not null
 order by x.id
