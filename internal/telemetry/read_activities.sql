-- Activities by id, each with the data that decides its place in the trace. A row without a parent is filed under its
-- execution, or else under the root of its trace. The root is the first execution without a parent, or else the first
-- activity.
select a.id::text, a.trace_id, a.execution_id::text, a.kind, a.skill_name, a.agent, a.surface, a.status, a.purpose, a.step, a.model,
       a.error_class, coalesce(a.error_message, '') as error_message,
       coalesce(a.token_usage ->> 'prompt_tokens', '0') as prompt_tokens,
       coalesce(a.token_usage ->> 'completion_tokens', '0') as completion_tokens,
       coalesce(a.token_usage ->> 'unknown_tokens', '0') as unknown_tokens,
       coalesce(a.token_usage ->> 'estimated', '') = 'true' as estimated,
       a.cost_usd::float8 as cost_usd, coalesce(a.thread_id, '') as thread_id, a.lane, a.idempotency_key, a.created_at,
       coalesce(a.finished_at, a.created_at) as finished_at,
       case when @content then a.input end as input, case when @content then a.output end as output,
       p.id::text as parent_id, p.finished_at as parent_ended, x.completed_at as owner_ended, x.id::text as owner_id,
       case when a.execution_id is null and p.id is null then
         coalesce((select r.id from agent_executions r where r.trace_id = a.trace_id and r.parent_id is null order by r.id limit 1),
                  (select f.id from agent_activity f where f.trace_id = a.trace_id order by f.created_at, f.id limit 1))::text
       end as root_id
  from agent_activity a
  left join agent_activity p on p.id = a.parent_id and p.trace_id = a.trace_id
  left join agent_executions x on x.id = a.execution_id
 where a.id = any (@ids::uuid[])
 order by a.id
