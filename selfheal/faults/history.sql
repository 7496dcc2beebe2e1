-- Skills that self-heal or a person took out of service since @since, and what followed within the time for which a
-- skill rests. fault: true, false, or null while nobody has judged.
with acts as materialized (
  select a.skill_name as act, a.input ->> 'skill' as skill, a.created_at as at, a.input ->> 'success' as success,
         (a.output #>> '{evidence,since}')::timestamptz as since
    from agent_activity a
   where a.skill_name in ('heal_skill', 'enable_skill', 'disable_skill', 'settle_trial') and a.kind = 'note'
     and a.id >= lanekeeper.agent_uuid7_floor(@since::timestamptz))
select h.skill, h.at, coalesce(h.since, h.at - @window::interval) as since,
       case when h.act = 'disable_skill' then true
            when n.act = 'enable_skill' then n.at >= h.at + @cooldown::interval
            when n.act = 'disable_skill' or n.success = 'false' then true end as fault
  from acts h
  left join lateral (select l.* from acts l where l.skill = h.skill and l.at > h.at order by l.at limit 1) n on true
  left join lateral (select l.* from acts l where l.skill = h.skill and l.at < h.at order by l.at desc limit 1) b on true
 where h.act = 'heal_skill' or h.act = 'disable_skill' and b.act is distinct from 'heal_skill'
 order by h.at
