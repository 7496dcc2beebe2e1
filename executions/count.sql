-- Adds ended executions to the counts: from counted_upto to bound, and the next rows of agent_executions_uncounted.
with fresh as materialized (
  select e.* from agent_executions e where e.id >= @counted_upto::uuid and e.id < @bound::uuid
     and e.surface <> 'eval'),
listed as materialized (
  select u.execution_id from agent_executions_uncounted u where u.execution_id > @looked::uuid order by u.execution_id limit @most::int),
late as materialized (
  select e.* from listed l join agent_executions e on e.id = l.execution_id),
settled as (                                                                 -- ended, or gone
  delete from agent_executions_uncounted u
   where u.execution_id in (select l.execution_id from listed l except select x.id from late x where x.completed_at is null)),
postponed as (
  insert into agent_executions_uncounted select f.id from fresh f where f.completed_at is null on conflict do nothing),
ended as materialized (
  select x.id, lanekeeper.agent_count_key(x.agent) as agent, lanekeeper.agent_count_key(x.flow) as flow, x.status, x.wait_number,
         x.created_at, x.started_at, x.completed_at,
         date_trunc('hour', greatest('epoch', least(x.completed_at, now())) at time zone 'UTC') at time zone 'UTC' as hour
    from (select f.* from fresh f union all select l.* from late l) x where x.completed_at is not null),
hours as materialized (
  select e.hour, e.agent, e.flow, count(*) filter (where e.status = 'completed') as completed,
         count(*) filter (where e.status = 'failed') as failed, count(*) filter (where e.status = 'timeout') as timeout,
         count(*) filter (where e.status = 'cancelled') as cancelled
    from ended e group by 1, 2, 3),
counted as (
  insert into agent_execution_counts as c (span, start, agent, flow, completed, failed, timeout, cancelled)
  select 'hour', h.* from hours h
  union all
  select 'day', date_trunc('day', h.hour at time zone 'UTC') at time zone 'UTC', h.agent, h.flow, sum(h.completed), sum(h.failed),
         sum(h.timeout), sum(h.cancelled)
    from hours h group by 2, 3, 4
  on conflict (span, start, agent, flow) do update
     set completed = c.completed + excluded.completed, failed = c.failed + excluded.failed,
         timeout = c.timeout + excluded.timeout, cancelled = c.cancelled + excluded.cancelled),
lasted as (
  select e.hour, m.measure, e.agent, e.flow, extract(epoch from m.took) * 1000 as ms
    from ended e
   cross join lateral (
     select 'run' as measure, e.completed_at - coalesce(e.started_at, e.created_at) as took where e.status <> 'cancelled'
     union all
     select 'queue', e.started_at - e.created_at
     union all
     select 'lane', k.created_at - k.waited_since from agent_checkpoints k
      where e.wait_number > 0 and k.execution_id = e.id and k.waited_for = 'lane') m
   where isfinite(e.created_at) and isfinite(coalesce(e.started_at, e.created_at)) and isfinite(e.completed_at)),
measured as (
  select l.hour, l.measure, l.agent, l.flow,
         case when l.ms < 1 then -1 else floor(ln(least(l.ms, 1e12)::float8) / ln(1.05::float8))::int end as bucket
    from lasted l where l.ms is not null),
buckets as materialized (                                                    -- and of all agents and flows together
  select m.hour, m.measure, coalesce(m.agent, '') as agent, coalesce(m.flow, '') as flow, m.bucket, count(*) as executions
    from measured m group by grouping sets ((m.hour, m.measure, m.agent, m.flow, m.bucket), (m.hour, m.measure, m.bucket))),
stored as (
  insert into agent_execution_durations as d (span, start, measure, agent, flow, bucket, executions)
  select 'hour', b.* from buckets b
  union all
  select 'day', date_trunc('day', b.hour at time zone 'UTC') at time zone 'UTC', b.measure, b.agent, b.flow, b.bucket, sum(b.executions)
    from buckets b group by 2, 3, 4, 5, 6
  on conflict (span, start, measure, agent, flow, bucket) do update set executions = d.executions + excluded.executions)
select (select count(*) from ended)::int as counted, (select count(*) from listed)::int as listed,
       coalesce((select max(l.execution_id::text collate "C") from listed l), '') as looked
