-- The number of calls of a skill that count, its failures by class, and the newest of them.
with failed as materialized (
  select c.id, c.trace_id, c.created_at, c.error_class, c.error_message
    from agent_skill_calls c
   where c.skill_name = @skill and c.id >= lanekeeper.agent_uuid7_floor(@since::timestamptz) and c.created_at >= @since
     and c.status = 'error')
select (select count(*) from agent_skill_calls c
         where c.skill_name = @skill and c.id >= lanekeeper.agent_uuid7_floor(@since::timestamptz)
           and c.created_at >= @since) as calls,
       (select count(*) from failed) as errors,
       coalesce((select jsonb_object_agg(x.error_class, x.n)
                   from (select f.error_class, count(*) as n from failed f group by f.error_class) x), '{}') as classes,
       coalesce((select jsonb_agg(jsonb_build_object('activity_id', x.id, 'trace_id', x.trace_id, 'at', x.created_at,
                          'error_class', x.error_class, 'error_message', left(coalesce(x.error_message, ''), 300)) order by x.id desc)
                   from (select f.* from failed f order by f.id desc limit @most) x), '[]') as failures
