-- A batch of steps costs less where all of it counts, which is nearly always: its process sends it in the order of its executions, which is the order
-- in which rows are locked, and then one comparison does for all. Only those that are not written are answered.
create or replace function record_agent_steps(p_ids uuid[], p_claims bigint[], p_steps text[], p_prints text[], p_failed boolean[],
                                              p_outputs jsonb[], p_variables jsonb[])
returns table (n int, verdict text)
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  several constant int := cardinality(p_ids);
  showing uuid[] := '{}';           -- those whose variables are written beside the step, which needs a stronger lock
  locked uuid[];
  claims bigint[];                  -- of what is locked, as are workers, of which only what runs has one
  workers uuid[];
  alive uuid[];
  good int[];                       -- places of the steps that count; null: all do
  done text;
begin
  -- Locked rows are passed over. One that was changed before it was locked is compared again; the clock that ends a lease is read after
  -- the locks.
  if num_nonnulls(variadic p_variables) > 0 then
    showing := array(select p_ids[i] from generate_series(1, several) i where p_variables[i] is not null);
    select array_agg(x.id), array_agg(x.claim), array_agg(x.claimed_by) into locked, claims, workers
      from (select * from (
              select x.id, x.claim, x.claimed_by from agent_executions x
               where x.id = any (p_ids) and x.id <> all (showing) for key share skip locked) plain
            union all
            select * from (
              select x.id, x.claim, x.claimed_by from agent_executions x
               where x.id = any (showing) for no key update skip locked) shown) x;
  else
    select array_agg(x.id), array_agg(x.claim), array_agg(x.claimed_by) into locked, claims, workers
      from (select x.id, x.claim, x.claimed_by from agent_executions x
             where x.id = any (p_ids) for key share skip locked) x;
  end if;
  alive := array(select k.id from agent_workers k where k.id = any (workers) and k.expires_at > clock_timestamp());
  if (locked = p_ids and claims = p_claims and workers <@ alive) is not true then
    good := array(
      select t.i from (select i, array_position(locked, p_ids[i]) as x from generate_series(1, several) i offset 0) t
       where claims[t.x] = p_claims[t.i] and workers[t.x] = any (alive));
  end if;
  if showing <> '{}' then
    update agent_executions x
       set variables = (select p_variables[i] from generate_series(1, several) i
                         where p_ids[i] = x.id and p_variables[i] is not null and (good is null or i = any (good)) order by i desc limit 1)
     where x.id = any (showing)
       and exists (select from generate_series(1, several) i
                    where p_ids[i] = x.id and p_variables[i] is not null and (good is null or i = any (good)));
  end if;
  done := set_config('lanekeeper.fenced', 'yes', true);
  insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
  select p_ids[i], p_steps[i], p_claims[i], coalesce(p_prints[i], ''), coalesce(p_failed[i], false), p_outputs[i]
    from generate_series(1, several) i where good is null or i = any (good);
  done := set_config('lanekeeper.fenced', '', true);
  if good is not null then
    return query select i, 'alone' from generate_series(1, several) i where i <> all (good);
  end if;
end $$;
comment on function record_agent_steps is
  'Record the results of steps of several executions, each under its claim, as an insert into agent_checkpoints would. A row for each of which nothing was written (verdict alone), because the row is locked or its claim is not live; record it by itself. Where one is on record already nothing is written at all (SQLSTATE 23505): record each by itself. Cheapest in the order of p_ids.';

-- Ends cost less, too: the arrays are joined by their places, what is written is taken as new, and the event's JSON is put together as text. Where
-- the last step, or the event, is on record already nothing of the batch is written, and each is ended by itself.

create or replace function close_agent_executions(p_ids uuid[], p_claims bigint[], p_statuses text[], p_summaries text[], p_results jsonb[],
                                                  p_errors text[], p_failed_steps text[], p_variables jsonb[], p_wanted boolean[],
                                                  p_steps text[], p_prints text[], p_failed boolean[], p_outputs jsonb[])
returns table (n int, updated_at timestamptz, completed_at timestamptz, result jsonb, variables jsonb, inherits boolean, flow_version int)
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  several constant int := cardinality(p_ids);
  ending uuid[];
  claims bigint[];
  workers uuid[];
  alive uuid[];
  bound uuid[];                     -- they have lanes or budgets
  odd boolean;                      -- more follows than is done here
  freed boolean;                    -- a place of a limit
  flows text[];
  surfaces text[];
  awaited uuid[];                   -- by a parent
  at_ timestamptz;
  done text;
begin
  if (p_statuses <@ array['completed', 'failed', 'timeout']) is not true then
    raise exception 'executions can finish as completed, failed or timeout' using errcode = '22023';
  end if;
  -- For update: nothing is written under these claims afterwards. One with a write under way is passed over, and waits for it by
  -- itself. A row that was changed before it was locked is compared again; the clock that ends a lease is read after the locks.
  select array_agg(x.id), array_agg(x.claim), array_agg(x.claimed_by), array_agg(x.flow), array_agg(x.surface),
         bool_or(x.outside or x.flow = 'webhook' and p_statuses[array_position(p_ids, x.id)] <> 'completed')
    into ending, claims, workers, flows, surfaces, odd
    from (select x.id, x.claim, x.claimed_by, x.flow, x.surface, x.outside from agent_executions x
           where x.id = any (p_ids) for update skip locked) x;
  if (ending = p_ids and claims = p_claims) is not true then
    select array_agg(t.id), array_agg(t.worker) into ending, workers
      from unnest(ending, claims, workers) t (id, claim, worker) where t.claim = p_claims[array_position(p_ids, t.id)];
  end if;
  if ending is null then
    return;
  end if;
  select array(select k.id from agent_workers k where k.id = any (workers) and k.expires_at > clock_timestamp()),
         -- Lanes and budgets have an order of their own, which is kept for one execution at a time: those that have any end by themselves.
         array(select l.execution_id from agent_locks l where l.execution_id = any (ending)
               union all select k.lender from agent_lock_loans k where k.lender = any (ending)
               union all select b.execution_id from agent_budget_reservations b where b.execution_id = any (ending)),
         -- None of these comes or goes while its execution is locked, but for the targets.
         odd or exists (select from agent_webhook_targets t where t.enabled)
             or exists (select from agent_activity_open o where o.execution_id = any (ending))
             or exists (select from agent_approvals a where a.execution_id = any (ending) and a.parked and a.status in ('pending', 'approved'))
             or exists (select from agent_requests r where r.execution_id = any (ending) and (r.status = 'pending') is true),
         exists (select from agent_limits l where l.kind = 'flow' and l.name = any (flows) or l.kind = 'surface' and l.name = any (surfaces)),
         array(select t.id from unnest(ending) t (id) where exists (
           select from agent_executions x where x.waiting_for = 'agent' and x.waiting_key = t.id::text and (x.status = 'waiting') is true offset 0))
    into alive, bound, odd, freed, awaited;
  if bound <> '{}' or not workers <@ alive then              -- which one that does not run has none of
    ending := array(select t.id from unnest(ending, workers) t (id, worker) where t.worker = any (alive) and t.id <> all (bound));
  end if;
  at_ := clock_timestamp();
  done := set_config('lanekeeper.fenced', 'yes', true);
  if not odd then
    done := set_config('lanekeeper.follows', 'yes', true);   -- agent_executions_changed has nothing to do
  end if;
  return query
  with u as (
    update agent_executions x
       set status = p_statuses[i], result_summary = coalesce(p_summaries[i], ''), result = p_results[i], error_message = p_errors[i],
           failed_step = p_failed_steps[i], variables = coalesce(p_variables[i], x.variables)
      from generate_series(1, several) i
     where x.id = p_ids[i] and x.claim = p_claims[i] and x.id = any (ending)
    returning i, x.id, x.claim, x.status, x.result_type, x.result_summary, x.updated_at, x.completed_at, x.result, x.variables, x.inherits,
              x.flow_version),
  last as (
    insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output, created_at)
    select u.id, p_steps[u.i], u.claim, coalesce(p_prints[u.i], ''), coalesce(p_failed[u.i], false), p_outputs[u.i], at_
      from u where p_steps[u.i] is not null),
  told as (
    insert into agent_events (event, key, data, external_id, execution_id)
    select 'AGENT_COMPLETED', t.key,
           ('{"execution_id": "' || t.key || '", "status": "' || t.status || '", "result_type": "' || t.result_type
              || '", "locks_released": 0, "result_summary": ' || to_json(t.result_summary) || '}')::jsonb,
           'completed ' || t.key, t.id
      from (select u.id::text as key, u.* from u offset 0) t)
  select u.i, u.updated_at, u.completed_at, case when p_wanted[u.i] then u.result end, case when p_wanted[u.i] then u.variables end,
         u.inherits, u.flow_version
    from u;
  done := set_config('lanekeeper.fenced', '', true);
  if odd then
    return;
  end if;
  done := set_config('lanekeeper.follows', '', true);
  if awaited <> '{}' then
    insert into agent_untold_ends (execution_id) select t.id from unnest(awaited) t (id) where t.id = any (ending) order by 1 on conflict do nothing;
  end if;
  if freed and ending <> '{}' then
    perform pg_notify('agent_ready', '');                    -- a place is free
  end if;
end $$;
comment on function close_agent_executions is
  'Finish several executions, each under its claim and together with the result of its last step (none where p_steps is null), as finish_agent_execution does. Of one that is not in the answer nothing was written, because it has lanes or budgets, its row is locked, or its claim is not live; finish it by itself. Where a last step or an event is on record already nothing is written at all (SQLSTATE 23505): finish each by itself. The answer has what the caller does not know; result and variables where p_wanted. Cheapest in the order of p_ids.';

-- What a lost worker had is taken from it all at once, where it goes on; what ends with that ends one by one, as before.

create or replace function lose_agent_claims(p_worker uuid) returns int
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  lost uuid[];
  e record;
begin
  -- One that is written to at this moment comes next time: a sweep that waited for it would hold up all others.
  lost := array(select x.id from agent_executions x where x.claimed_by = p_worker order by x.id for update skip locked);
  if lost = '{}' then
    return 0;
  end if;
  for e in
    select x.id from agent_executions x
     where x.id = any (lost)
       and (x.on_lost = 'fail' or x.max_attempts <= case when exists (
              select from agent_checkpoints c where c.execution_id = x.id and c.claim = x.claim) then 1 else x.attempt + 1 end)
     order by x.id
  loop
    perform lose_agent_claim(e.id, 'the worker''s lease expired');
  end loop;
  insert into agent_claims_lost (execution_id, claim, worker, worker_name, how)
  select x.id, x.claim, p_worker, coalesce((select coalesce(nullif(w.owner, ''), w.name) from agent_workers w where w.id = p_worker), ''), 'lost'
    from agent_executions x where x.id = any (lost) and x.claimed_by = p_worker
      on conflict do nothing;
  update agent_executions x
     set claimed_by = null, claim = x.claim + 1, wake = x.wake + 1, updated_at = clock_timestamp(),
         hinted_at = case when x.outside then timestamptz 'infinity' else 'epoch' end,
         attempt = case when exists (select from agent_checkpoints c where c.execution_id = x.id and c.claim = x.claim) then 1 else x.attempt + 1 end
   where x.id = any (lost) and x.claimed_by = p_worker;
  return cardinality(lost);
end $$;
