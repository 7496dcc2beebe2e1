-- Steps: the recorded results of an execution, which it does not compute again.
--
-- Each finished step is a checkpoint (agent_checkpoints). It is durable before the next step, wait or end of the run.
-- The next claim of the run reads the results and does not repeat the steps. A step is recorded once. A loop replaces
-- the checkpoints of its iterations by one snapshot, and renews the snapshot. A fork begins with the steps of another
-- execution.

create table agent_checkpoints (
  execution_id uuid not null, step text not null, claim bigint not null,
  fingerprint text not null default '', failed boolean not null default false, output jsonb,
  created_at timestamptz not null default clock_timestamp(), waited_for text, waited_key text,
  waited_since timestamptz, waits jsonb,
  primary key (execution_id, step)
);
alter index agent_checkpoints_pkey set (deduplicate_items=off);
comment on table agent_checkpoints is
  'Recorded results of steps. A process that continues the run reads the rows instead of repeating the steps.';
comment on column agent_checkpoints.step is 'The name of the step, unique in its execution.';
comment on column agent_checkpoints.claim is 'The claim that recorded the step.';
comment on column agent_checkpoints.fingerprint is
  'Hash of the step''s input. A run that reaches the step with another input fails, and repeats nothing.';
comment on column agent_checkpoints.failed is
  'The step ended with an error, which is a result too. output describes it.';
comment on column agent_checkpoints.output is 'The result of the step.';
comment on column agent_checkpoints.waited_for is 'The kind of wait whose outcome the step is. Null: not a wait.';
comment on column agent_checkpoints.waited_key is 'The key of that wait.';
comment on column agent_checkpoints.waited_since is 'When that wait began.';
comment on column agent_checkpoints.waits is
  'Of a loop: the first 1,000 ended waits of the iterations that this snapshot has replaced. See agent_past_waits.';

-- Code

-- The trigger checks all rows of a statement after the write: no other transaction sees them before the commit. The
-- lock on each execution waits for a takeover in progress. The clock is read after the lock.
create or replace function lanekeeper.agent_checkpoints_fence() returns trigger
language plpgsql security definer set search_path from current set enable_seqscan = off set jit = off as $$
declare
  stale record;
begin
  select n.execution_id, n.claim into stale from written n
   where not exists (
     select from (select e.status, e.claimed_by, e.forked_from from agent_executions e
                   where e.id = n.execution_id and e.claim = n.claim for key share) x
      where x.status = 'waiting' or x.status = 'pending' and x.forked_from is not null
         or x.status = 'running' and exists (
              select from agent_workers w where w.id = x.claimed_by and w.expires_at > clock_timestamp()))
   limit 1;
  if found then
    perform fence_agent_execution(stale.execution_id, stale.claim);
  end if;
  return null;
end $$;
comment on function lanekeeper.agent_checkpoints_fence is
  'Refuse a checkpoint whose claim is not the live claim of its execution (SQLSTATE LK001).';

create or replace function checkpoint_agent_execution(p_id uuid, p_lock_id text, p_step text, p_output jsonb)
returns text
language plpgsql volatile security definer set search_path from current as $$
declare
  claim_ bigint := agent_lock_claim(p_id, p_lock_id);
  old jsonb;
begin
  if p_step is null or p_step !~ '^[^[:cntrl:]]+$' or length(p_step) > 500 then
    raise exception 'step % is not valid: a step is 1 to 500 printable characters',
      coalesce(quote_literal(left(p_step, 40)), 'null')
      using errcode = '22023';
  elsif p_step ~ '^wait [a-z]+ [0-9]+$' then
    raise exception 'step % is not valid: steps named wait KIND NUMBER are reserved for the outcomes of waits',
      quote_literal(left(p_step, 40)) using errcode = '22023';
  end if;
  perform lanekeeper.check_agent_size('the output', p_output::text);
  perform fence_agent_execution(p_id, coalesce(claim_, -1));
  insert into agent_checkpoints (execution_id, step, claim, output) values (p_id, p_step, claim_, p_output)
  on conflict (execution_id, step) do nothing;
  if found then
    return 'created';
  end if;
  select c.output into old from agent_checkpoints c where c.execution_id = p_id and c.step = p_step;
  return case when old is not distinct from p_output then 'same' else 'different' end;
end $$;
comment on function checkpoint_agent_execution is
  'Record a step under a lock. created: recorded. same: recorded before with this output. different: recorded before '
  'with another output, which stays. LK001: the lock is void.';

-- Nearly always the whole batch is valid. A batch in the order of execution ids, which is the lock order, needs one
-- comparison for all steps. The answer has only the steps that were not written.
create or replace function lanekeeper.checkpoint_agent_executions(p_ids uuid[], p_claims bigint[], p_steps text[],
                                              p_prints text[], p_failed boolean[], p_outputs jsonb[],
                                              p_variables jsonb[])
returns table (n int, verdict text)
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set jit = off
set lock_timeout = '50ms' as $$
#variable_conflict use_column
declare
  several constant int := cardinality(p_ids);
  showing uuid[] := '{}';           -- executions with new variables, which need a stronger lock
  locked uuid[];
  claims bigint[];                  -- of the locked executions
  workers uuid[];                   -- of the locked executions; null: not running
  alive uuid[];
  good int[];                       -- places of the valid steps; null: all
begin
  -- Skip locked rows. PostgreSQL compares a row again if it was changed before it was locked. Read the clock after the
  -- locks.
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
                         where p_ids[i] = x.id and p_variables[i] is not null and (good is null or i = any (good))
                         order by i desc
                         limit 1)
     where x.id = any (showing)
       and exists (select from generate_series(1, several) i
                    where p_ids[i] = x.id and p_variables[i] is not null and (good is null or i = any (good)));
  end if;
  insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
  select p_ids[i], p_steps[i], p_claims[i], coalesce(p_prints[i], ''), coalesce(p_failed[i], false), p_outputs[i]
    from generate_series(1, several) i where good is null or i = any (good);
  if good is not null then
    return query select i, 'alone' from generate_series(1, several) i where i <> all (good);
  end if;
end $$;
comment on function lanekeeper.checkpoint_agent_executions is
  'Record results of steps of several executions under their claims. Rows: steps that were not written, because the '
  'execution is locked or its claim is stale. Record each alone. SQLSTATE 23505: a step was recorded before, and '
  'nothing is written. The call is cheapest in the order of p_ids.';

create or replace trigger agent_checkpoints_fence after insert on agent_checkpoints
  referencing new table as written for each statement execute function lanekeeper.agent_checkpoints_fence();

create or replace trigger agent_checkpoints_fence_update after update on agent_checkpoints
  referencing new table as written for each statement execute function lanekeeper.agent_checkpoints_fence();
