-- Failures since @since (the last day): executions that failed or timed out, at most @max_executions of each, then calls of skills,
-- other actions and models, at most @max_calls of a name. An execution whose call a person rejected did not fail. Evals do not count:
-- of the broken executions the newest @max_scanned are searched for others.
-- inner_message is the last error inside an execution, except of a rejected write (class stale). It is also the deepest
-- error, because an action begins after the action that contains it.
with rejected as materialized (select lanekeeper.agent_rejected_executions(@rejections) as id),
broken as materialized (
  select x.* from (
    (select e.id, e.parent_id, e.trace_id, e.agent, e.flow, e.failed_step, e.error_message, coalesce(e.completed_at, e.updated_at) as at
       from (select * from agent_executions where status = 'failed' order by id desc limit @max_scanned::int) e
      where e.surface <> 'eval' and e.id not in (select r.id from rejected r) order by e.id desc limit @max_executions::int)
    union all
    (select e.id, e.parent_id, e.trace_id, e.agent, e.flow, e.failed_step, coalesce(e.error_message, 'timed out'), coalesce(e.completed_at, e.updated_at)
       from (select * from agent_executions where status = 'timeout' order by id desc limit @max_scanned::int) e
      where e.surface <> 'eval' order by e.id desc limit @max_executions::int)) x
   where x.at > @since::timestamptz),
named as materialized (
  select n.name from (
    select c.skill as name, sum(c.failed) as failed from agent_activity_counts c
     where c.span = 'hour' and c.start >= @since::timestamptz - interval '1 hour' and c.kind = 'call' and c.failed > 0
     group by c.skill
    union all
    select r.skill_name, 1 from (select a.skill_name, a.status, a.kind from agent_activity a order by a.id desc limit @newest::int) r
     where r.status = 'error' and r.kind = 'call') n
   group by n.name order by sum(n.failed) desc, n.name limit @max_names::int)
select 'flow' as kind, left(b.flow, 300) as name, left(b.agent, 300) as agent, b.id::text, coalesce(b.parent_id::text, '') as parent,
       left(b.trace_id, 100) as trace_id, b.at, coalesce(left(b.error_message, 1000), '') as message,
       coalesce(left(b.failed_step, 300), '') as step, coalesce(c.name, '') as inner_name, coalesce(c.step, '') as inner_step,
       coalesce(c.message, '') as inner_message, coalesce(c.class, '') as class,
       exists (select from agent_executions k where k.forked_from = b.id) as retried
  from broken b
  left join lateral (
    select left(r.skill_name, 300) as name, left(r.step, 300) as step, left(r.error_message, 1000) as message,
           left(r.error_class, 100) as class from (
      select a.id, a.status, a.skill_name, a.step, a.error_message, a.error_class from agent_activity a
       where a.execution_id = b.id and a.id >= b.id order by a.id desc limit 50) r
     where r.status = 'error' and r.error_message <> '' and r.error_class <> 'stale' order by r.id desc limit 1) c on true
union all
select case when exists (select from agent_skills s where s.name = n.name) then 'skill' else 'action' end, left(n.name, 300), left(a.agent, 300),
       f.id::text, '', left(f.trace_id, 100), f.created_at, coalesce(left(f.error_message, 1000), ''), '', '', '', '', left(f.error_class, 100), false
  from named n
 cross join lateral (
   select k.* from (
     select k.id, k.status, k.error_class, k.error_message, k.trace_id, k.created_at from agent_skill_calls k
      where k.skill_name between n.name and n.name and k.id >= (select lanekeeper.agent_uuid7_floor(@since::timestamptz))
      order by k.skill_name desc, k.id desc limit @max_outcomes::int) k
    where k.status = 'error' limit @max_calls::int) f
  join agent_activity a on a.id = f.id
union all
select 'model', 'model_call', left(f.agent, 300), f.id::text, '', left(f.trace_id, 100), f.created_at, coalesce(left(f.error_message, 1000), ''),
       '', '', '', '', left(f.error_class, 100), false
  from (
    select a.* from (
      select a.id, a.agent, a.kind, a.status, a.error_class, a.error_message, a.trace_id, a.created_at from agent_activity a
       where a.skill_name between 'model_call' and 'model_call' and a.id >= (select lanekeeper.agent_uuid7_floor(@since::timestamptz)) and a.surface <> 'eval'
       order by a.skill_name desc, a.id desc limit @max_outcomes::int) a
     where a.kind = 'model' and a.status = 'error' and a.error_class not in ('cancelled', 'interrupted', 'stale', 'yielded', 'budget')
     limit @max_calls::int) f
