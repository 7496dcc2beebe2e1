-- The newest calls of a skill and of the others inside the window, newest first. The order is by time, so rows that SQL
-- wrote late count in their place.
select c.skill_name as skill, coalesce(c.thread_id, c.trace_id) as caller, c.created_at as at, c.status = 'error' as failed
  from ((select * from agent_skill_calls o
          where o.skill_name = @skill and o.id >= lanekeeper.agent_uuid7_floor(clock_timestamp() - @window::interval)
          order by o.id desc limit @own)
        union all
        (select * from agent_skill_calls o
          where o.skill_name <> @skill and o.id >= lanekeeper.agent_uuid7_floor(clock_timestamp() - @window::interval)
          order by o.id desc limit @others)) c
 order by c.created_at desc, c.id desc
