-- The calls of each enabled skill that count: inside the window and since the skill was last enabled.
-- What a call is, is said by the view agent_skill_calls. The floors turn times into ranges of ids, so each
-- skill is one range of the index (skill_name, id). A streak is counted by time, so that rows which were written
-- late, by SQL, count where they belong.
with counted as materialized (
  select s.id, s.name, s.enabled_at, s.revision,
         greatest(s.enabled_at, (select clock_timestamp() - @window::interval)) as since
    from agent_skills s
   where s.enabled and (@skill::text = '' or s.name = @skill)),
measured as (
  select k.*, n.calls, n.errors, n.streak,
         n.streak >= @failures::bigint as by_streak,
         n.calls >= @rate_calls::bigint and n.errors >= @rate::float8 * n.calls as by_rate
    from counted k
   cross join lateral (
         select count(*) as calls, count(*) filter (where x.status = 'error') as errors,
                coalesce(min(x.nth) filter (where x.status = 'success') - 1, count(*)) as streak
           from (select c.status, row_number() over (order by c.created_at desc, c.id desc) as nth
                   from agent_skill_calls c
                  where c.skill_name = k.name and c.id >= lanekeeper.agent_uuid7_floor(k.since) and c.created_at >= k.since) x) n)
select m.name as skill, m.id as skill_id, m.calls, m.errors, m.streak, m.since, m.by_streak, m.by_rate,
       coalesce(f.failures, '[]') as failures, coalesce(g.classes, '{}') as classes
  from measured m
  left join lateral (
       select jsonb_agg(jsonb_build_object('activity_id', x.id, 'trace_id', x.trace_id, 'at', x.created_at,
                'error_class', x.error_class, 'error_message', left(coalesce(x.error_message, ''), 300)) order by x.id desc) as failures
         from (select c.id, c.trace_id, c.created_at, c.error_class, c.error_message
                 from agent_skill_calls c
                where c.skill_name = m.name and c.id >= lanekeeper.agent_uuid7_floor(m.since) and c.created_at >= m.since
                  and c.status = 'error'
                order by c.id desc limit greatest(@failures::bigint, 10)) x) f on m.by_streak or m.by_rate
  left join lateral (
       select jsonb_object_agg(x.error_class, x.n) as classes
         from (select c.error_class, count(*) as n
                 from agent_skill_calls c
                where c.skill_name = m.name and c.id >= lanekeeper.agent_uuid7_floor(m.since) and c.created_at >= m.since
                  and c.status = 'error'
                group by c.error_class) x) g on m.by_streak or m.by_rate
 order by m.name
