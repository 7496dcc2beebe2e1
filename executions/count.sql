-- Adds ended executions to the counts: those with an id from counted_upto to bound, and those of the next rows of
-- agent_executions_uncounted, which lists executions that were open in an earlier pass.
with new_executions as materialized (
  select e.* from agent_executions e
   where e.id >= @counted_upto::uuid and e.id < @bound::uuid and e.surface <> 'eval'),
listed as materialized (
  select u.execution_id from agent_executions_uncounted u
   where u.execution_id > @checked_upto::uuid
   order by u.execution_id limit @limit::int),
listed_executions as materialized (
  select e.* from listed l join agent_executions e on e.id = l.execution_id),
unlisted as (                                                                -- ended or deleted executions
  delete from agent_executions_uncounted u
   where u.execution_id in (select l.execution_id from listed l
                            except
                            select x.id from listed_executions x where x.completed_at is null)),
newly_listed as (
  insert into agent_executions_uncounted
  select n.id from new_executions n where n.completed_at is null
  on conflict do nothing),
ended as materialized (
  select x.id, lanekeeper.agent_count_key(x.agent) as agent, lanekeeper.agent_count_key(x.flow) as flow, x.status, x.wait_number,
         x.created_at, x.started_at, x.completed_at,
         date_trunc('hour', greatest('epoch', least(x.completed_at, now())) at time zone 'UTC') at time zone 'UTC' as hour
    from (select n.* from new_executions n union all select l.* from listed_executions l) x
   where x.completed_at is not null),
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
durations as (
  select e.hour, m.measure, e.agent, e.flow, extract(epoch from m.duration) * 1000 as ms
    from ended e
   cross join lateral (
     select 'run' as measure, e.completed_at - coalesce(e.started_at, e.created_at) as duration
      where e.status <> 'cancelled'
     union all
     select 'queue', e.started_at - e.created_at
     union all
     select 'lane', k.created_at - k.waited_since from agent_checkpoints k
      where e.wait_number > 0 and k.execution_id = e.id and k.waited_for = 'lane') m
   where isfinite(e.created_at) and isfinite(coalesce(e.started_at, e.created_at)) and isfinite(e.completed_at)),
bucketed as (
  select d.hour, d.measure, d.agent, d.flow,
         case when d.ms < 1 then -1 else floor(ln(least(d.ms, 1e12)::float8) / ln(1.05::float8))::int end as bucket
    from durations d where d.ms is not null),
buckets as materialized (                           -- by agent and flow, and for all agents and flows together
  select b.hour, b.measure, coalesce(b.agent, '') as agent, coalesce(b.flow, '') as flow, b.bucket, count(*) as executions
    from bucketed b
   group by grouping sets ((b.hour, b.measure, b.agent, b.flow, b.bucket), (b.hour, b.measure, b.bucket))),
stored_durations as (
  insert into agent_execution_durations as d (span, start, measure, agent, flow, bucket, executions)
  select 'hour', b.* from buckets b
  union all
  select 'day', date_trunc('day', b.hour at time zone 'UTC') at time zone 'UTC', b.measure, b.agent, b.flow, b.bucket, sum(b.executions)
    from buckets b group by 2, 3, 4, 5, 6
  on conflict (span, start, measure, agent, flow, bucket) do update set executions = d.executions + excluded.executions)
select (select count(*) from ended)::int as counted, (select count(*) from listed)::int as listed,
       coalesce((select max(l.execution_id::text collate "C") from listed l), '') as checked_upto
