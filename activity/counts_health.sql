-- The health of each skill, over the calls of agent_skill_calls. The streak of a skill with failures is read newest
-- first, back to the last success, and at most @walk rows.
with tail as materialized (
  select u.* from lanekeeper.read_agent_activity_tail(@most) u),
left_out as (
  select min(t.id::text collate "C")::uuid as id from tail t where t.beyond),
live as (
  select t.* from tail t where not t.beyond and t.telling and t.hour >= @since::timestamptz),
calls as materialized (
  select x.skill, sum(x.worked)::bigint as worked, sum(x.failed)::bigint as failed
    from (select c.skill, c.worked, c.failed from agent_activity_counts c
           where c.span = 'hour' and c.start >= @since::timestamptz and c.start < @hours_until::timestamptz and c.kind = 'call'
             and (@skill::text = '' or c.skill = @skill)
          union all
          -- Day by day, so an index serves also when these are most of the days.
          select c.skill, c.worked, c.failed
            from generate_series(greatest(@hours_until::timestamptz, (select min(o.start) from agent_activity_counts o where o.span = 'day')),
                                 clock_timestamp() + interval '24 hours', interval '24 hours') g (day)
           cross join lateral (select c.skill, c.worked, c.failed from agent_activity_counts c
                                where c.span = 'day' and c.start = g.day and c.kind = 'call' and (@skill::text = '' or c.skill = @skill) offset 0) c
          union all
          select l.skill, 1, (l.status = 'error')::int from live l) x
   group by x.skill),
lasted as materialized (
  -- No skills unless @durations.
  select x.skill, array_agg(x.bucket order by x.bucket) as buckets, array_agg(x.calls order by x.bucket) as counts
    from (select y.skill, y.bucket, sum(y.calls)::bigint as calls
            from (select d.skill, d.bucket, d.calls
                    from generate_series((@since::timestamptz at time zone 'UTC')::date::timestamp,
                                         (clock_timestamp() at time zone 'UTC') + interval '1 day', interval '1 day') g (day)
                   cross join lateral (select d.skill, d.bucket, d.calls from agent_activity_durations d
                                        where @durations::bool and d.day = g.day::date and (@skill::text = '' or d.skill = @skill) offset 0) d
                  union all
                  select l.skill, l.bucket, 1 from live l where @durations::bool and l.bucket is not null) y
           group by 1, 2) x
   group by x.skill),
listed as (
  select s.*, lanekeeper.agent_uuid7_floor(greatest(@since::timestamptz, s.enabled_at)) as first from agent_skills s
   where (@skill::text = '' or s.name = @skill) and (@after::text = '' or s.name > @after)
     and (@state::text = '' or @state = case when s.enabled then 'enabled' when s.trial_at is not null then 'on trial' else 'disabled' end)
   order by s.name limit @limit::int),
fared as (
  select s.name as skill, coalesce(c.worked, 0) as calls, coalesce(c.failed, 0) as failed, coalesce(w.streak, 0) as streak,
         coalesce(w.more, false) as streak_more, coalesce(d.buckets, '{}') as buckets, coalesce(d.counts, '{}') as counts,
         case when s.enabled then 'enabled' when s.trial_at is not null then 'on trial' else 'disabled' end as state,
         s.disabled_by, left(s.disabled_reason, 2000) as disabled_reason, s.disabled_at
    from listed s
    left join calls c on c.skill = s.name
    left join lasted d on d.skill = s.name
    -- Newest first, and by name too, as in the index. By id alone PostgreSQL would search a rarely called skill
    -- among all others.
    left join lateral (
      select r.n from (
        select row_number() over () as n, u.* from (
          select m.telling, m.status, m.created_at from agent_activity_measured m
           where m.skill_name between s.name and s.name and m.id >= s.first
           order by m.skill_name desc, m.id desc limit @walk::int) u) r
       where r.telling and r.status = 'success' and r.created_at > s.enabled_at limit 1) won on c.failed > 0
    left join lateral (
      select count(*) filter (where r.telling and r.created_at > s.enabled_at) as streak, won.n is null and count(*) = @walk::int as more
        from (
        select u.* from (
          select m.telling, m.created_at from agent_activity_measured m
           where m.skill_name between s.name and s.name and m.id >= s.first
           order by m.skill_name desc, m.id desc limit @walk::int) u
         limit coalesce(won.n - 1, @walk::int)) r) w on c.failed > 0)
select f.*,
       to_timestamp(('x' || substr(replace(o.id::text, '-', ''), 1, 12))::bit(48)::bigint / 1000.0) as left_out
  from fared f cross join left_out o
 order by f.skill
