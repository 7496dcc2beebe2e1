-- The outcomes of calls, from the counts and from the rows that are not counted yet, in one snapshot.
with tail as materialized (
  select u.* from lanekeeper.read_agent_activity_tail(@most) u),
left_out as (
  select min(t.id::text collate "C")::uuid as id from tail t where t.beyond),
ended as (
  select c.start, c.calls, c.worked, c.failed from agent_activity_counts c
   where c.skill = @skill and c.span = 'hour' and c.start >= @since::timestamptz and c.start < @hours_until::timestamptz
     and c.kind = 'call'
  union all
  select c.start, c.calls, c.worked, c.failed from agent_activity_counts c
   where c.skill = @skill and c.span = 'day' and c.start >= @hours_until::timestamptz and c.kind = 'call'
  union all
  select t.hour, 1, t.telling::int, (t.telling and t.status = 'error')::int from tail t
   where not t.beyond and t.kind = 'call' and t.skill = @skill and t.hour >= @since::timestamptz),
lines as (
  select case @period::text when 'hour' then e.start when 'day' then date_trunc('day', e.start at time zone 'UTC') at time zone 'UTC' end as period,
         sum(e.calls)::bigint as calls, sum(e.worked)::bigint as worked, sum(e.failed)::bigint as failed
    from ended e group by 1)
select l.period, coalesce(l.calls, 0) as calls, coalesce(l.worked, 0) as worked, coalesce(l.failed, 0) as failed,
       to_timestamp(('x' || substr(replace(o.id::text, '-', ''), 1, 12))::bit(48)::bigint / 1000.0) as left_out
  from left_out o left join lines l on true
 order by l.period desc nulls last
