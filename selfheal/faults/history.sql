-- Incidents since @since in which self-heal or a person disabled a skill. verdict: true if disabling was right, false if
-- a person enabled the skill within the cool-down, null if the next change, if any, does not decide it.
with acts as (
  select a.skill_name as act, a.input ->> 'skill' as skill, a.created_at as at, a.input ->> 'success' as success,
         (a.output #>> '{evidence,since}')::timestamptz as since
    from agent_activity a
   where a.skill_name in ('heal_skill', 'enable_skill', 'disable_skill', 'settle_trial') and a.kind = 'note'
     and a.id >= lanekeeper.agent_uuid7_floor(@since::timestamptz)),
ordered as (
  select a.*, lead(a.act) over w as next_act, lead(a.at) over w as next_at, lead(a.success) over w as next_success,
         lag(a.act) over w as act_before
    from acts a window w as (partition by a.skill order by a.at))
select h.skill, h.at, coalesce(h.since, h.at - @window::interval) as since,
       case when h.act = 'disable_skill' then true
            when h.next_act = 'enable_skill' then h.next_at >= h.at + @cooldown::interval
            when h.next_act = 'disable_skill' or h.next_success = 'false' then true end as verdict
  from ordered h
 where h.act = 'heal_skill' or h.act = 'disable_skill' and h.act_before is distinct from 'heal_skill'
 order by h.at desc limit @limit
