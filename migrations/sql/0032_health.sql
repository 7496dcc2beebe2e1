-- agent_skill_health without the log: it read every call of seven days, which took a minute at 10,000,000 rows. Skills that are called
-- seldom are still read, so what is asked about a few calls is answered as ever; of the others it adds up what is counted.

create function agent_bucket_duration(p_bucket int) returns float8 language sql immutable parallel safe as $$
  select case when p_bucket < 0 then 0 else power(1.05::float8, p_bucket + 0.5::float8) end
$$;
comment on function agent_bucket_duration is 'The middle of a bucket of agent_activity_durations, in milliseconds.';

create function agent_skill_figures(p_read int default 10000)
returns table (skill text, calls bigint, failed bigint, streak bigint, p50_ms float8, p95_ms float8)
language sql stable set enable_seqscan = off set jit = off as $$
  with began as materialized (
    -- hour and day: from when on whole ones are added up. The first hour began before the seven days did.
    select n.since, n.hour, (date_trunc('day', (n.hour - interval '1 microsecond') at time zone 'UTC') + interval '1 day') at time zone 'UTC' as day
      from (select x.since, date_trunc('hour', x.since at time zone 'UTC') at time zone 'UTC' as hour
              from (select clock_timestamp() - interval '7 days' as since) x) n),
  tail as materialized (
    select u.skill, u.hour, u.telling, u.status, u.duration_ms from uncounted_agent_activity(2000000000) u
     where u.kind <> 'model' and (u.hour at time zone 'UTC')::date >= (select (b.since at time zone 'UTC')::date from began b)),
  sums as materialized (
    select x.skill, sum(x.calls) as calls, sum(x.worked)::bigint as worked, sum(x.failed)::bigint as failed
      from (select c.skill, c.calls, c.worked, c.failed from agent_activity_counts c
             where c.span = 'hour' and c.start >= (select b.hour from began b) and c.start < (select b.day from began b) and c.kind <> 'model'
            union all
            select c.skill, c.calls, c.worked, c.failed from agent_activity_counts c
             where c.span = 'day' and c.start >= (select b.day from began b) and c.kind <> 'model'
            union all
            select t.skill, 1, t.telling::int, (t.telling and t.status = 'error')::int from tail t
             where t.hour >= (select b.hour from began b)) x
     group by x.skill),
  ranked as materialized (
    select s.name, s.enabled_at, u.calls, u.worked, u.failed, sum(u.calls) over (order by u.calls, s.name) <= p_read as few
      from sums u join agent_skills s on s.name = u.skill),
  -- Of few calls: the rows.
  little as (
    select r.name, x.calls, x.failed, x.streak, x.p50_ms, x.p95_ms
      from ranked r
     cross join lateral (
           select count(*) as calls, count(*) filter (where c.status = 'error') as failed,
                  count(*) filter (where c.status = 'error' and c.created_at > greatest(c.last_ok, r.enabled_at)) as streak,
                  percentile_cont(0.5) within group (order by c.duration_ms) as p50_ms,
                  percentile_cont(0.95) within group (order by c.duration_ms) as p95_ms
             from (select k.status, k.created_at, k.duration_ms, max(k.created_at) filter (where k.status = 'success') over () as last_ok
                     from agent_skill_calls k
                    where k.skill_name = r.name and k.id >= (select agent_uuid7_floor(b.since) from began b)
                      and k.created_at >= (select b.since from began b)) c) x
     where r.few),
  -- Of many: what is counted, without what came in the first hour before the seven days.
  many as materialized (
    select r.name, r.enabled_at, r.worked - e.worked as worked, r.failed - e.failed as failed
      from ranked r
     cross join lateral (
           select count(*) as worked, count(*) filter (where k.status = 'error') as failed from agent_skill_calls k
            where k.skill_name = r.name and k.id >= (select agent_uuid7_floor(b.hour) from began b)
              and k.id < (select agent_uuid7_floor(b.since) from began b)) e
     where not r.few),
  -- A streak begins in the last hour that has a success, in that of the beginning, or in that in which the skill was enabled.
  streaks as materialized (
    select m.name, m.enabled_at, greatest(ok.hour, live.hour, date_trunc('hour', greatest(b.since, m.enabled_at) at time zone 'UTC') at time zone 'UTC') as hour
      from many m
     cross join began b
      left join lateral (
           select c.start as hour from agent_activity_counts c
            where c.skill = m.name and c.span = 'hour' and c.start >= b.hour and c.kind = 'call' and c.worked > c.failed
            order by c.start desc limit 1) ok on true
      left join lateral (
           select max(t.hour) as hour from tail t where t.skill = m.name and t.hour >= b.hour and t.telling and t.status = 'success') live on true
     where m.failed > 0),
  failures as (
    select s.name, later.failed + live.failed + within.failed as failed
      from streaks s
     cross join lateral (
           select coalesce(sum(c.failed), 0)::bigint as failed from agent_activity_counts c
            where c.skill = s.name and c.span = 'hour' and c.start > s.hour and c.kind = 'call') later
     cross join lateral (
           select count(*) as failed from tail t where t.skill = s.name and t.hour > s.hour and t.telling and t.status = 'error') live
      left join lateral (
           select k.id from agent_skill_calls k
            where k.skill_name between s.name and s.name and k.status = 'success'
              and k.id >= agent_uuid7_floor(s.hour) and k.id < agent_uuid7_floor(s.hour + interval '1 hour')
            order by k.skill_name desc, k.id desc limit 1) ok on true
     cross join lateral (
           select count(*) as failed from agent_skill_calls k
            where k.skill_name = s.name and k.status = 'error' and k.id >= coalesce(ok.id, agent_uuid7_floor(s.hour))
              and k.id < agent_uuid7_floor(s.hour + interval '1 hour')
              and k.created_at > s.enabled_at and k.created_at >= (select b.since from began b)) within),
  lasted as (
    select y.skill, y.bucket, sum(y.calls) as calls
      from (select d.skill, d.bucket, d.calls from agent_activity_durations d
             where d.day >= (select (b.since at time zone 'UTC')::date from began b) and d.skill in (select m.name from many m)
            union all
            select t.skill, agent_duration_bucket(t.duration_ms), 1 from tail t
             where t.telling and t.duration_ms is not null and t.skill in (select m.name from many m)) y
     group by y.skill, y.bucket),
  ladder as (
    select l.skill, l.bucket, sum(l.calls) over (partition by l.skill order by l.bucket)::float8 as upto,
           sum(l.calls) over (partition by l.skill)::float8 - 1 as last
      from lasted l),
  steps as (
    select l.skill, 0.5 * l.last as half, 0.95 * l.last as most,
           agent_bucket_duration(min(l.bucket) filter (where l.upto > floor(0.5 * l.last))) as half_low,
           agent_bucket_duration(min(l.bucket) filter (where l.upto > ceil(0.5 * l.last))) as half_high,
           agent_bucket_duration(min(l.bucket) filter (where l.upto > floor(0.95 * l.last))) as most_low,
           agent_bucket_duration(min(l.bucket) filter (where l.upto > ceil(0.95 * l.last))) as most_high
      from ladder l group by l.skill, l.last)
  select l.* from little l
  union all
  select m.name, m.worked, m.failed, coalesce(f.failed, 0),
         s.half_low + (s.half_high - s.half_low) * (s.half - floor(s.half)), s.most_low + (s.most_high - s.most_low) * (s.most - floor(s.most))
    from many m left join failures f on f.name = m.name left join steps s on s.skill = m.name
$$;
comment on function agent_skill_figures is
  'The last 7 days of each skill that was called. Skills are read call by call as long as those that are called least have p_read rows of the '
  'log together; beyond, they are added up of what is counted, and p50 and p95 are right to 2.5 per cent, over whole days (UTC).';

create or replace view agent_skill_health as
  select s.name as skill, coalesce(f.calls, 0) as calls,
         case when f.calls > 0 then round((f.calls - f.failed)::numeric / f.calls, 3) end as success_rate,
         coalesce(f.streak, 0) as streak, f.p50_ms, f.p95_ms,
         case when s.enabled then 'enabled' when s.trial_at is not null then 'on trial' else 'disabled' end as state,
         s.disabled_by, s.disabled_reason, s.disabled_at
    from agent_skills s left join agent_skill_figures() f on f.skill = s.name;
comment on view agent_skill_health is
  'The last 7 days of each skill: calls, success rate, failures in a row, p50 and p95, state. Where there are very many calls, p50 and p95 are '
  'right to 2.5 per cent, over whole days (UTC).';
