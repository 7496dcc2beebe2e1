-- Starts, steps and ends cost less. PostgreSQL takes longer to begin a statement, and to make a trigger's condition ready, than to write a row:
-- so an insert of an execution has one trigger instead of four, the functions for several executions have fewer statements, and they answer
-- with what their caller cannot know instead of with rows of forty columns. The rules are those that were; so are the functions of the version
-- before, for its processes.

-- The rules of a row ----------------------------------------------------------------------------------

-- A claim of autonomous work, as agent_executions_held treats it, for one that begins claimed.
create function refuse_while_paused() returns void language plpgsql as $$
begin
  if pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0)) then
    -- Another statement, so that it sees every pause that had the lock before.
    perform 1 from agent_pauses p where p.resumed_at is null;
    if not found then
      return;
    end if;
  end if;
  raise exception 'autonomous work is paused%', coalesce((
      select ' since ' || to_char(p.paused_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC by ' || p.paused_by || ': ' || p.reason
        from agent_pauses p where p.resumed_at is null), '')
    using errcode = 'LK003', hint = 'Nothing begins until it is resumed: agent resume, or select resume_agent().';
end $$;
comment on function refuse_while_paused is 'Refuse to begin autonomous work while the agent is paused, or is about to be (SQLSTATE LK003).';

create or replace function agent_executions_held() returns trigger language plpgsql as $$
begin
  if pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0)) then
    -- Another statement, so that it sees every pause that had the lock before.
    perform 1 from agent_pauses p where p.resumed_at is null;
    if not found then
      return new;
    end if;
  end if;
  if not old.outside then
    if old.status = 'waiting' then
      new.claimed_by := null;                                -- its wait has ended all the same
      return new;
    end if;
    return null;                                             -- it stays in the queue
  end if;
  perform refuse_while_paused();
  return new;
end $$;

-- What holds of every row, and of how one begins.
create or replace function agent_executions_valid() returns trigger language plpgsql as $$
declare
  bad text;
begin
  if tg_op = 'INSERT' then
    if new.status not in ('pending', 'running') then
      raise exception 'an execution begins pending or running, not %', new.status using errcode = 'LK002';
    end if;
    if new.claimed_by is not null and new.surface not in ('operate', 'chat')
       and coalesce(current_setting('lanekeeper.unpaused', true), '') <> 'yes' then
      perform refuse_while_paused();
    end if;
    if new.flow = 'external' or new.flow like 'external:%' then
      if new.status <> 'pending' or new.claimed_by is not null then
        raise exception 'an execution for workers outside begins pending, not % with a worker', new.status using errcode = 'LK002';
      end if;
      new.hinted_at := 'infinity';
      if new.on_lost = 'resume' then
        new.on_lost := 'fail';                               -- nobody here could resume it
      end if;
    end if;
  end if;
  bad := case
    when new.trace_id = '' then 'trace_id'
    when new.surface not in ('heartbeat', 'operate', 'chat', 'webhook', 'flow') then 'surface'
    when new.flow = '' then 'flow'
    when new.queue not in ('background', 'interactive') then 'queue'
    when new.priority not between 1 and 4 then 'priority'
    when new.max_attempts <= 0 then 'max_attempts'
    when new.on_lost not in ('resume', 'fail', 'hand_on') then 'on_lost'
    when new.progress_seconds < 0 then 'progress_seconds'
    when new.waiting_for not in ('response', 'agent', 'document', 'signature', 'test', 'event', 'delay', 'approval', 'lane') then 'waiting_for'
    when new.result_type not in ('success', 'failure', 'timeout', 'cancelled') then 'result_type'
  end;
  if bad is not null then
    raise exception 'new row for relation "agent_executions" violates check constraint "agent_executions_%_check"', bad
      using errcode = 'check_violation', table = 'agent_executions', constraint = 'agent_executions_' || bad || '_check',
            detail = format('%s is %s', bad, to_jsonb(new) -> bad);
  end if;
  return new;
end $$;

create or replace function agent_executions_outside() returns trigger language plpgsql as $$
begin
  new.hinted_at := 'infinity';
  return new;
end $$;

-- Which state follows which. What follows an end is the business of agent_executions_changed, but for statements that do it themselves.
create or replace function agent_executions_guard() returns trigger language plpgsql as $$
declare
  done text;
begin
  if old.status = new.status then
    return new;
  end if;
  if (case old.status
        when 'running' then new.status not in ('completed', 'failed', 'timeout', 'waiting', 'cancelled')
        when 'waiting' then new.status not in ('running', 'timeout', 'failed', 'cancelled')
        when 'pending' then new.status not in ('running', 'cancelled')
        else true end) is not false then
    raise exception 'execution % cannot go from % to %', old.id, old.status, new.status using errcode = 'LK002';
  end if;
  new.updated_at := clock_timestamp();
  if new.status = 'running' then
    new.started_at := coalesce(new.started_at, new.updated_at);
  end if;
  if new.status = 'waiting' then
    new.claimed_by := null;
    new.waiting_until := coalesce(new.waiting_until, new.updated_at + interval '7 days');  -- no wait is for ever
  elsif num_nonnulls(new.waiting_for, new.waiting_key, new.waiting_until, new.waiting_data, new.waiting_step) > 0 then
    new.waiting_for := null; new.waiting_key := null; new.waiting_until := null;
    new.waiting_data := null; new.waiting_step := null;
  end if;
  if new.status in ('completed', 'failed', 'timeout', 'cancelled') then
    new.claimed_by := null;
    new.completed_at := coalesce(new.completed_at, new.updated_at);
    new.result_type := case new.status when 'completed' then 'success' when 'failed' then 'failure' else new.status end;
    if current_setting('lanekeeper.follows', true) = 'yes' then
      return new;
    end if;
  end if;
  if new.claimed_by is null or new.flow = 'external' or new.flow like 'external:%' then
    done := set_config('lanekeeper.changed', 'yes', true);   -- an assignment costs less than a statement
  end if;
  return new;
end $$;

drop trigger agent_executions_held_begin on agent_executions;
create or replace trigger agent_executions_begin before insert on agent_executions
  for each row execute function agent_executions_valid();
create or replace trigger agent_executions_valid before update of trace_id, surface, flow, queue, priority, max_attempts, on_lost,
  progress_seconds, waiting_for, result_type on agent_executions for each row execute function agent_executions_valid();
create or replace trigger agent_executions_outside before update of hinted_at on agent_executions
  for each row when (new.flow = 'external' or new.flow like 'external:%') execute function agent_executions_outside();
create or replace trigger agent_status_begins after insert on agent_executions
  for each row when (new.outside) execute function agent_status_changed();

-- What follows an end that has not said to do it itself. As before, but what it looks for is found by the ids of what has ended, also by a plan
-- that was made when nobody waited and nothing was asked for.
create or replace function agent_executions_changed() returns trigger
language plpgsql set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  over uuid[];                      -- those that have ended
  odd uuid[];                       -- those of them that have more than a result
  seen record;
  has record;
  e agent_executions;
  freed jsonb := '{}';              -- by execution: how many lanes its end freed
  done text;
begin
  done := set_config('lanekeeper.changed', '', true);
  select array_agg(n.id order by n.id) filter (where n.ended) as over,
         coalesce(array_agg(n.id) filter (where n.ended and (n.status = 'cancelled' or n.outside or n.flow = 'webhook' and n.status <> 'completed')),
                  '{}') as odd,
         bool_or(n.ended and n.status = 'cancelled') as cancelled, bool_or(n.outside) as outside,
         exists (select from agent_limits) as limited, exists (select from agent_webhook_targets t where t.enabled) as hooks
    into seen
    from (select c.*, c.status in ('completed', 'failed', 'timeout', 'cancelled')
                 and c.id not in (select o.id from was o where o.status in ('completed', 'failed', 'timeout', 'cancelled')) as ended
            from changed c) n;
  if seen.limited and exists (
       select from was o join changed n on n.id = o.id
        where o.claimed_by is not null and n.claimed_by is null and exists (
          select from agent_limits l where (l.kind = 'flow' and l.name = n.flow) or (l.kind = 'surface' and l.name = n.surface))) then
    perform pg_notify('agent_ready', '');                    -- a place is free
  end if;
  if seen.over is null then
    if seen.outside then
      perform note_agent_status(n.id, n.status, n.waiting_for)
         from changed n join was o on o.id = n.id where n.outside and n.status <> o.status;
    end if;
    return null;
  end if;
  over := seen.over;
  if seen.cancelled then
    perform lock_agent_children(n.id) from changed n where n.id = any (over) and n.status = 'cancelled';   -- executions before lanes
  end if;
  select array(select l.execution_id from agent_locks l where l.execution_id = any (over)
               union all select n.lender from agent_lock_loans n where n.lender = any (over)) as lanes,
         array(select o.execution_id from agent_activity_open o where o.execution_id = any (over)) as calls,
         array(select a.execution_id from agent_approvals a
                where a.execution_id = any (over) and a.parked and a.status in ('pending', 'approved')) as approvals,
         array(select r.execution_id from agent_requests r where r.execution_id = any (over) and (r.status = 'pending') is true) as requests,
         array(select b.execution_id from agent_budget_reservations b where b.execution_id = any (over)) as budgets,
         array(select t.id from unnest(over) t (id) where exists (
           select from agent_executions x
            where x.waiting_for = 'agent' and x.waiting_key = t.id::text and (x.status = 'waiting') is true offset 0)) as awaited
    into has;
  odd := case when seen.hooks then over else seen.odd || has.lanes || has.calls || has.approvals || has.requests || has.budgets end;
  if odd <> '{}' then
    for e in select n.* from changed n where n.id = any (odd) order by n.id loop
      -- Runs of the webhook surface tell nothing here: a target that is our own endpoint would go round for ever.
      if seen.hooks and e.surface <> 'webhook' then
        perform emit_agent_execution_end(e);
      end if;
      if e.id = any (has.lanes) then
        freed := freed || jsonb_build_object(e.id, release_agent_locks(e.id));
      end if;
      if e.id = any (has.calls) then
        perform close_agent_activity(e.id, e.status);
      end if;
      if e.id = any (has.approvals) then
        perform void_agent_approvals(e.id);
      end if;
      if e.id = any (has.requests) then
        perform close_agent_requests(e.id);
      end if;
      if e.status = 'cancelled' then
        perform withdraw_agent_messages(e.id);
      end if;
    end loop;
  end if;
  insert into agent_events (event, key, data, external_id, execution_id)
  select 'AGENT_COMPLETED', n.id::text,
         jsonb_build_object('execution_id', n.id, 'status', n.status, 'result_type', n.result_type,
                            'result_summary', n.result_summary, 'locks_released', coalesce((freed ->> n.id::text)::int, 0)),
         'completed ' || n.id, n.id
    from changed n where n.id = any (over) order by n.id
  on conflict (external_id) do nothing;      -- an end must not fail because somebody used this id
  if has.awaited <> '{}' then
    insert into agent_untold_ends (execution_id) select t.id from unnest(has.awaited) t (id) order by 1 on conflict do nothing;
  end if;
  if odd <> '{}' then
    for e in select n.* from changed n where n.id = any (odd) order by n.id loop
      if e.status = 'cancelled' and exists (select from agent_executions x where x.parent_id = e.id and x.awaited) then
        perform cancel_agent_execution(c.id, e.cancelled_by, case when e.cancel_reason like 'its parent was cancelled: %'
            then e.cancel_reason else 'its parent was cancelled: ' || coalesce(e.cancel_reason, '') end)
           from (select x.id from agent_executions x
                  where x.parent_id = e.id and x.awaited and x.status in ('pending', 'running', 'waiting')
                  order by x.id) c;
      end if;
      if e.id = any (has.budgets) then
        perform settle_agent_budgets(e.id);
      end if;
      if e.flow = 'webhook' and e.status <> 'completed' then
        perform close_agent_webhook(e);
      end if;
      if e.outside then
        perform note_agent_status(e.id, e.status, e.waiting_for);
      end if;
    end loop;
  end if;
  if seen.outside then
    perform note_agent_status(n.id, n.status, n.waiting_for)
       from changed n join was o on o.id = n.id where n.outside and n.status <> o.status and n.id <> all (over);
  end if;
  return null;
end $$;

-- Starts ----------------------------------------------------------------------------------------------

create function begin_agent_executions(p_traces text[], p_surfaces text[], p_flows text[], p_here boolean[], p_worker uuid, p_background int,
                                       p_interactive int, p_skip text[], p_inputs jsonb[], p_queues text[], p_agents text[], p_parents uuid[],
                                       p_awaited boolean[], p_inherits boolean[], p_threads text[], p_priorities int[], p_on_lost text[],
                                       p_max_attempts int[], p_progress int[])
returns table (n int, id uuid, claimed boolean, at timestamptz, parent_id uuid, on_lost text, input jsonb)
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  several constant int := cardinality(p_flows);
  ids uuid[];
  mine boolean[];
  live boolean := false;
  asked boolean;
  held_back boolean := true;        -- the agent is paused, or is about to be
  places jsonb := '{}';
  next jsonb := '{}';
  line text;
  queue_ text;
  at_ timestamptz;
  done text;
begin
  if p_worker is not null then
    asked := pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0));
    -- Another statement, so that it sees every pause that had the lock before.
    select exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp()),
           not (asked and not exists (select from agent_pauses p where p.resumed_at is null))
      into live, held_back;
  end if;
  if live then
    mine := p_here;
    if false = any (p_here) then
      places := jsonb_build_object('background', p_background, 'interactive', p_interactive);
      for i in 1 .. several loop
        queue_ := coalesce(p_queues[i], 'background');
        continue when p_here[i] or (places ->> queue_)::int <= 0 or p_flows[i] = 'external' or p_flows[i] like 'external:%'
                   or held_back and p_surfaces[i] not in ('operate', 'chat');
        line := queue_ || ' ' || p_surfaces[i] || ' ' || p_flows[i];
        if not next ? line then
          next := next || jsonb_build_object(line, agent_next_in_line(queue_, p_flows[i], p_surfaces[i], p_skip));
        end if;
        if (next ->> line)::boolean then
          mine[i] := true;
          places := places || jsonb_build_object(queue_, (places ->> queue_)::int - 1);
        end if;
      end loop;
    end if;
  end if;
  for i in 1 .. several loop
    ids[i] := agent_uuid7();
  end loop;
  at_ := clock_timestamp();
  done := set_config('lanekeeper.unpaused', case when held_back then '' else 'yes' end, true);
  -- Series and subscripts: unnest with so many arrays makes a table of each first.
  return query
  insert into agent_executions as x (id, trace_id, surface, agent, flow, parent_id, awaited, inherits, thread_id, queue, priority, status,
         claimed_by, claim, created_at, started_at, updated_at, hinted_at, input, on_lost, max_attempts, progress_seconds)
  select ids[i], p_traces[i], p_surfaces[i], coalesce(p_agents[i], 'flowpilot'), p_flows[i], p_parents[i], coalesce(p_awaited[i], false),
         coalesce(p_inherits[i], false), p_threads[i], coalesce(p_queues[i], 'background'), coalesce(p_priorities[i], 2),
         case when mine[i] then 'running' else 'pending' end, case when mine[i] then p_worker end, case when mine[i] then 1 else 0 end,
         at_, case when mine[i] then at_ end, at_, at_, coalesce(p_inputs[i], '{}'), coalesce(p_on_lost[i], 'resume'),
         coalesce(p_max_attempts[i], 5), coalesce(p_progress[i], 0)
    from generate_series(1, several) i
  returning array_position(ids, x.id), x.id, x.claimed_by is not null, x.created_at, x.parent_id, x.on_lost, x.input;
  done := set_config('lanekeeper.unpaused', '', true);
end $$;
comment on function begin_agent_executions is
  'Start several executions, as start_agent_executions does. What is null, of one or of all, is as it is by default. at is when they were created, and started where they begin claimed.';

-- Steps -----------------------------------------------------------------------------------------------

create or replace function record_agent_steps(p_ids uuid[], p_claims bigint[], p_steps text[], p_prints text[], p_failed boolean[],
                                              p_outputs jsonb[], p_variables jsonb[])
returns table (n int, verdict text)
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan
set jit = off as $$
#variable_conflict use_column
declare
  several constant int := cardinality(p_ids);
  showing uuid[] := '{}';           -- those whose variables are written beside the step, which needs a stronger lock
  locked uuid[];
  good int[];                       -- places of the steps that count
  done text;
begin
  -- Locked rows are passed over; the claims are looked at by another statement, and the clock that ends a lease is read after the locks.
  if num_nonnulls(variadic p_variables) > 0 then
    showing := array(select p_ids[i] from generate_series(1, several) i where p_variables[i] is not null);
    locked := array(select x.id from agent_executions x where x.id = any (p_ids) and x.id <> all (showing) for key share skip locked)
           || array(select x.id from agent_executions x where x.id = any (showing) for no key update skip locked);
  else
    locked := array(select x.id from agent_executions x where x.id = any (p_ids) for key share skip locked);
  end if;
  good := array(
    select t.i from generate_series(1, several) t (i), lateral (
      select from agent_executions x
       where x.id = p_ids[t.i] and x.claim = p_claims[t.i] and (x.status = 'running') is true
         and exists (select from agent_workers w where w.id = x.claimed_by and w.expires_at > clock_timestamp()) offset 0) live
     where p_ids[t.i] = any (locked));
  if showing <> '{}' then
    update agent_executions x
       set variables = (select p_variables[g.i] from unnest(good) g (i) where p_ids[g.i] = x.id and p_variables[g.i] is not null
                         order by g.i desc limit 1)
     where x.id = any (showing)
       and exists (select from unnest(good) g (i) where p_ids[g.i] = x.id and p_variables[g.i] is not null);
  end if;
  done := set_config('lanekeeper.fenced', 'yes', true);
  return query
  with kept as (
    insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
    select p_ids[g.i], p_steps[g.i], p_claims[g.i], coalesce(p_prints[g.i], ''), coalesce(p_failed[g.i], false), p_outputs[g.i]
      from unnest(good) g (i)
    on conflict (execution_id, step) do nothing)
  select i, case when i = any (good) then 'kept' else 'alone' end from generate_series(1, several) i;
  done := set_config('lanekeeper.fenced', '', true);
end $$;

-- Ends ------------------------------------------------------------------------------------------------

create function close_agent_executions(p_ids uuid[], p_claims bigint[], p_statuses text[], p_summaries text[], p_results jsonb[], p_errors text[],
                                       p_failed_steps text[], p_variables jsonb[], p_wanted boolean[], p_steps text[], p_prints text[],
                                       p_failed boolean[], p_outputs jsonb[])
returns table (n int, updated_at timestamptz, completed_at timestamptz, result jsonb, variables jsonb, inherits boolean, flow_version int)
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  ending uuid[];
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
  select array_agg(x.id), array_agg(x.claimed_by), array_agg(x.flow), array_agg(x.surface),
         bool_or(x.outside or x.flow = 'webhook' and p_statuses[array_position(p_ids, x.id)] <> 'completed')
    into ending, workers, flows, surfaces, odd
    from (select x.id, x.claimed_by, x.flow, x.surface, x.outside from agent_executions x
           where x.id = any (p_ids) and x.claim = p_claims[array_position(p_ids, x.id)] for update skip locked) x;
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
       set (status, result_summary, result, error_message, failed_step, variables) = (
         select p_statuses[a.i], coalesce(p_summaries[a.i], ''), p_results[a.i], p_errors[a.i], p_failed_steps[a.i],
                coalesce(p_variables[a.i], x.variables)
           from (select array_position(p_ids, x.id) as i offset 0) a)
     where x.id = any (ending)
    returning array_position(p_ids, x.id) as i, x.id, x.claim, x.status, x.result_type, x.result_summary, x.updated_at, x.completed_at,
              x.result, x.variables, x.inherits, x.flow_version),
  last as (
    insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output, created_at)
    select u.id, p_steps[u.i], u.claim, coalesce(p_prints[u.i], ''), coalesce(p_failed[u.i], false), p_outputs[u.i], at_
      from u where p_steps[u.i] is not null
    on conflict (execution_id, step) do nothing),
  told as (
    insert into agent_events (event, key, data, external_id, execution_id)
    select 'AGENT_COMPLETED', u.id::text,
           jsonb_build_object('execution_id', u.id, 'status', u.status, 'result_type', u.result_type,
                              'result_summary', u.result_summary, 'locks_released', 0),
           'completed ' || u.id, u.id
      from u
    on conflict (external_id) do nothing)    -- an end must not fail because somebody used this id
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
  'Finish several executions, each under its claim and together with the result of its last step (none where p_steps is null), as finish_agent_execution does. Of one that is not in the answer nothing was written, because it has lanes or budgets, its row is locked, or its claim is not live; finish it by itself. The answer has what the caller does not know; result and variables where p_wanted.';
