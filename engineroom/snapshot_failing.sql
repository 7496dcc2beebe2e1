-- The newest runs of failing flows and the newest calls of failing names, with states. A recovery changes the text.
select f.name || ' ' || x.id || ' ' || x.status as newest
  from unnest(@flows::text[]) f (name)
 cross join lateral (
   select e.id, e.flow, e.status from agent_executions e
    -- Read the index of flows backwards, as in outcomes.sql.
    where (e.flow, e.id) <= (f.name, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid) and e.claimed_by is null
    order by e.flow desc, e.id desc limit 3) x
 where x.flow = f.name
union all
select c.name || ' ' || x.id || ' ' || x.status
  from unnest(@calls::text[]) c (name)
 cross join lateral (
   select a.id, a.status from agent_activity a
    where a.skill_name between c.name and c.name order by a.skill_name desc, a.id desc limit 3) x
