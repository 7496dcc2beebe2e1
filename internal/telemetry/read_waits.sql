-- The waits of executions that have ended. A stored wait is its outcome. The wait began when the execution had recorded
-- the row before it. A wait inside a phase belongs to that phase.
with points as (
  select c.execution_id, c.step, c.output, c.created_at, lag(c.created_at) over w as before
    from agent_checkpoints c where c.execution_id = any (@ids::uuid[])
  window w as (partition by c.execution_id order by c.created_at, c.step))
select c.execution_id::text, c.step,
       coalesce((select k.kind from lanekeeper.agent_wait_events k where k.event = c.output ->> 'event'), 'event') as kind,
       coalesce(c.output ->> 'timed_out', '') = 'true' as timed_out,
       c.created_at as ended_at, g.phase_id::text,
       greatest(x.started_at, c.before,
         (select max(greatest(a.created_at, case when a.finished_at < c.created_at then a.finished_at end)) from agent_activity a
           where a.execution_id = c.execution_id and a.created_at < c.created_at)) as began_at
  from points c
  join agent_executions x on x.id = c.execution_id
  left join lateral (
    select a.id as phase_id from agent_activity a
     where a.execution_id = c.execution_id and a.kind = 'phase' and a.step <> '' and starts_with(c.step, a.step || '/')
     order by length(a.step) desc, a.id limit 1) g on true
 where c.output ? 'timed_out' and jsonb_typeof(c.output -> 'event') = 'string' and c.output ? 'data'
 order by c.created_at, c.step limit @most
