-- The newest calls of each enabled skill that count: inside the window and since the skill was last enabled.
-- The view agent_skill_calls defines these calls. The floors turn times into ranges of ids, so the query
-- reads for each skill the end of one range of the index (skill_name, id).
with counted as materialized (
  select s.id, s.name, greatest(s.enabled_at, (select clock_timestamp() - @window::interval)) as since
    from agent_skills s
   where s.enabled and (@skill::text = '' or s.name = @skill))
select k.name as skill, k.id as skill_id, k.since, n.calls, n.errors
  from counted k
 cross join lateral (
       select count(*) as calls, count(*) filter (where o.status = 'error') as errors
         from (select c.status from agent_skill_calls c
                where c.skill_name = k.name and c.id >= lanekeeper.agent_uuid7_floor(k.since) and c.created_at >= k.since
                order by c.id desc limit @own) o) n
 order by k.name
