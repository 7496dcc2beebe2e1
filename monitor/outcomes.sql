-- The outcomes of the newest @max_outcomes runs of some flows, by agent, and of the newest @max_outcomes calls since @since of some
-- names. The streak is the failures after the last success. Skipped heartbeats do not count, nor do executions whose call
-- a person rejected, nor evals, nor calls before their skill was enabled again. The query searches only flows and names whose
-- newest row failed.
with ended as materialized (
  select 'flow' as kind, f.name, left(w.agent, 300) as agent, w.id, w.at, w.status <> 'completed' as failed
    from unnest(@flows::text[]) f(name)
   cross join lateral (
     select x.id, x.flow, x.agent, x.status, x.result_summary, coalesce(x.completed_at, x.updated_at) as at from agent_executions x
      -- Read the index of flows backwards from the flow's newest run. PostgreSQL could plan equality as a scan by id.
      where (x.flow, x.id) <= (f.name, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid) and x.claimed_by is null
      order by x.flow desc, x.id desc limit @max_outcomes::int) w
   where w.flow = f.name and w.status in ('completed', 'failed', 'timeout') and w.result_summary not like 'skipped:%'
     and w.id not in (select lanekeeper.agent_rejected_executions(@rejections))
  union all
  select 'call', s.name, '', k.id, k.created_at, k.status = 'error'
    from (select c.name, lanekeeper.agent_uuid7_floor(greatest(@since::timestamptz, e.enabled_at)) as first, e.enabled_at
            from unnest(@calls::text[]) c(name) left join agent_skills e on e.name = c.name) s
   cross join lateral (
     select k.status from agent_skill_calls k
      where k.skill_name between s.name and s.name and k.id >= s.first
      order by k.skill_name desc, k.id desc limit 1) newest
   cross join lateral (
     select k.id, k.status, k.created_at from agent_skill_calls k
      where k.skill_name between s.name and s.name and k.id >= s.first
      order by k.skill_name desc, k.id desc limit case when newest.status = 'error' then @max_outcomes::int else 1 end) k
   where s.enabled_at is null or k.created_at > s.enabled_at
  union all
  select 'call', m.name, '', m.id, m.created_at, m.status = 'error'
    from (
     select 'model_call' as name, a.id, a.kind, a.status, a.error_class, a.created_at from agent_activity a
      where @models and a.skill_name between 'model_call' and 'model_call' and a.id >= (select lanekeeper.agent_uuid7_floor(@since::timestamptz)) and a.surface <> 'eval'
      order by a.skill_name desc, a.id desc limit @max_outcomes::int) m
   where m.kind = 'model' and m.status in ('success', 'error')
     and m.error_class not in ('cancelled', 'interrupted', 'stale', 'yielded', 'budget')),
numbered as (
  select e.*, row_number() over newest as n,
         sum((not e.failed)::int) over newest as won -- successes so far, this one included
    from ended e window newest as (partition by e.kind, e.name, e.agent order by e.id desc))
select n.kind, n.name, n.agent, bool_or(n.n = 1 and n.failed) as latest_failed,
       count(*) filter (where n.won = 0) as streak, min(n.at) filter (where n.won = 0) as since,
       count(*) filter (where n.at > @hour::timestamptz) as hour_all,
       count(*) filter (where n.at > @hour::timestamptz and n.failed) as hour_failed
  from numbered n group by n.kind, n.name, n.agent
