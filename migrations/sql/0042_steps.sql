-- Steps cost less: rows are locked, compared and read in one statement instead of two for each row, and are written as new ones. The rules
-- are those that were.

comment on constraint agent_executions_fence on agent_executions is
  'Not for looking up: it makes the claim a part of a key, so that whoever takes a claim away waits for those who hold FOR KEY SHARE, which is how a write under a claim is fenced.';

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
  good int[];                       -- places of the steps that count
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
  good := array(
    select t.i from (select i, array_position(locked, p_ids[i]) as x from generate_series(1, several) i offset 0) t
     where claims[t.x] = p_claims[t.i] and workers[t.x] = any (alive));
  if showing <> '{}' then
    update agent_executions x
       set variables = (select p_variables[g.i] from unnest(good) g (i) where p_ids[g.i] = x.id and p_variables[g.i] is not null
                         order by g.i desc limit 1)
     where x.id = any (showing)
       and exists (select from unnest(good) g (i) where p_ids[g.i] = x.id and p_variables[g.i] is not null);
  end if;
  done := set_config('lanekeeper.fenced', 'yes', true);
  insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
  select p_ids[g.i], p_steps[g.i], p_claims[g.i], coalesce(p_prints[g.i], ''), coalesce(p_failed[g.i], false), p_outputs[g.i]
    from unnest(good) g (i);
  done := set_config('lanekeeper.fenced', '', true);
  for i in 1 .. several loop
    n := i;
    verdict := case when i = any (good) then 'kept' else 'alone' end;
    return next;
  end loop;
end $$;
comment on function record_agent_steps is
  'Record the results of steps of several executions, each under its claim, as an insert into agent_checkpoints would. verdict alone: nothing was written, because the row is locked or its claim is not live; record it by itself. Where one is on record already nothing is written at all (SQLSTATE 23505): record each by itself.';
