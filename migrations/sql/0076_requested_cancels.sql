-- An execution whose cancel is requested is not claimed: whoever had it locked when the cancel came may have left it
-- ready.

create or replace function claim_agent_executions(p_worker uuid, p_queue text, p_limit int, p_skip text[] default '{}')
returns table (execution agent_executions, held boolean)
language plpgsql volatile set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  kinds text[] := '{}';             -- flow, surface and how many of them: three arrays side by side
  surfaces text[] := '{}';
  quotas int[] := '{}';
  limits jsonb := '{}';             -- free places by limit
  l record;
  k record;
  c record;
  quota int;
  ids uuid[] := '{}';
begin
  if p_limit <= 0 or not exists (select from agent_workers w where w.id = p_worker and w.expires_at > clock_timestamp()) then
    return;
  end if;
  for k in select r.flow, r.surface from agent_ready_kinds(p_queue, p_skip) r loop
    kinds := kinds || k.flow;
    surfaces := surfaces || k.surface;
  end loop;
  if kinds = '{}' then
    return;
  end if;
  -- Where nothing is free, nobody is waited for; the others are counted under their locks, in one order.
  for l in select n.kind, n.name, agent_free_places(n.kind, n.name, false) as free from agent_limits n
            where (n.kind = 'flow' and n.name = any (kinds)) or (n.kind = 'surface' and n.name = any (surfaces)) order by n.kind, n.name loop
    limits := limits || jsonb_build_object(l.kind || ' ' || l.name,
      case when l.free > 0 then agent_free_places(l.kind, l.name, true) else 0 end);
  end loop;
  for i in 1 .. cardinality(kinds) loop
    quotas := quotas || least(p_limit, coalesce((limits ->> ('flow ' || kinds[i]))::int, p_limit),
                              coalesce((limits ->> ('surface ' || surfaces[i]))::int, p_limit));
  end loop;
  for c in
    select r.id, t.flow, t.surface
      from unnest(kinds, surfaces, quotas) t (flow, surface, quota)
     cross join lateral (
       select x.id, x.priority from agent_executions x
        where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside
          and x.queue = p_queue and x.flow = t.flow and x.surface = t.surface
          and not exists (select from agent_cancel_requests q where q.execution_id = x.id)
        order by x.priority, x.id limit greatest(t.quota, 0) for update skip locked) r
     where t.quota > 0
     order by r.priority, r.id
  loop
    if limits <> '{}' then
      quota := least(coalesce((limits ->> ('flow ' || c.flow))::int, 1), coalesce((limits ->> ('surface ' || c.surface))::int, 1));
      continue when quota <= 0;
      if limits ? ('flow ' || c.flow) then
        limits := jsonb_set(limits, array['flow ' || c.flow], to_jsonb((limits ->> ('flow ' || c.flow))::int - 1));
      end if;
      if limits ? ('surface ' || c.surface) then
        limits := jsonb_set(limits, array['surface ' || c.surface], to_jsonb((limits ->> ('surface ' || c.surface))::int - 1));
      end if;
    end if;
    ids := ids || c.id;
    exit when cardinality(ids) >= p_limit;
  end loop;
  -- A row that somebody has locked for a moment, such as a parent that parks, is passed over: the caller asks again
  -- soon.
  if cardinality(ids) < p_limit then
    perform set_config('lanekeeper.missed', 'yes', true)
       from unnest(kinds, surfaces) t (flow, surface)
      where coalesce((limits ->> ('flow ' || t.flow))::int, 1) > 0 and coalesce((limits ->> ('surface ' || t.surface))::int, 1) > 0
        and exists (select from agent_executions x
                     where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside
                       and x.queue = p_queue and x.flow = t.flow and x.surface = t.surface and x.id <> all (ids)
                       and not exists (select from agent_cancel_requests q where q.execution_id = x.id));
  end if;
  if ids = '{}' then
    return;
  end if;
  perform set_config('lanekeeper.claimed', ids::text, true);
  return query
  update agent_executions x
     set status = 'running', claimed_by = p_worker, claim = x.claim + 1, updated_at = clock_timestamp()
   where x.id = any (ids)
  returning x, x.claim > 1 and (exists (select from agent_locks n where n.execution_id = x.id)
                                or exists (select from agent_activity_open o where o.execution_id = x.id));
end $$;
