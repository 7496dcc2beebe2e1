-- The number of executions that began in each hour since @since, and how many of them failed or timed out. Each number is
-- counted up to @count_limit.
select h.at, r.runs, least(r.runs, f.failed) as failed
  from generate_series(@since::timestamptz, @until::timestamptz, interval '1 hour') h(at)
 cross join lateral (
   select lanekeeper.agent_uuid7_floor(h.at) as first,
          lanekeeper.agent_uuid7_floor(h.at + interval '1 hour') as next offset 0) i
 cross join lateral (
   select count(*) as runs from (
     select from agent_executions e
      where e.id >= i.first and e.id < i.next
        and (@agent::text = '' or e.agent = @agent) limit @count_limit::int) x) r
 cross join lateral (
   select count(*) as failed from (
     (select e.agent from agent_executions e
       where e.status = 'failed' and e.id >= i.first and e.id < i.next
       limit @count_limit::int)
     union all
     (select e.agent from agent_executions e
       where e.status = 'timeout' and e.id >= i.first and e.id < i.next
       limit @count_limit::int)) x where @agent::text = '' or x.agent = @agent) f
 order by h.at
