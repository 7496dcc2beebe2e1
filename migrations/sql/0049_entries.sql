-- Starts and ends write a third fewer entries in indexes, and cost less to begin: one trigger looks at a changed execution instead of four,
-- what an end has to ask is asked once, and the rows that were locked are found again by their place. The rules are those that were.

-- Indexes ---------------------------------------------------------------------------------------------

-- The file before made what serves instead. What is completed is found among the newest, or by its flow.
alter table agent_executions drop constraint agent_executions_dedupe;
drop index agent_executions_status;
drop index agent_executions_claimed;
drop index agent_executions_places;
drop index agent_executions_flow;
drop index agent_executions_surface;
drop index agent_events_inbox;

-- The rules of a row ----------------------------------------------------------------------------------

-- What holds of every execution, of how one begins, and of what it may become. A function for several that has looked at all of them, and writes
-- what this would, passes it by: begin_agent_executions by lanekeeper.valid, close_agent_executions by lanekeeper.follows.
create or replace function agent_executions_valid() returns trigger language plpgsql as $$
declare
  bad text;
  done text;
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
  else
    if (old.status = new.status) is not true then
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
      end if;
      if new.claimed_by is null or new.flow = 'external' or new.flow like 'external:%' then
        done := set_config('lanekeeper.changed', 'yes', true);   -- an assignment costs less than a statement
      end if;
    elsif old.claimed_by is not null and new.claimed_by is null and exists (
          select from agent_limits l where (l.kind = 'flow' and l.name = new.flow) or (l.kind = 'surface' and l.name = new.surface)) then
      perform pg_notify('agent_ready', '');                  -- a place is free
    end if;
    if old.claimed_by is null and new.claimed_by is not null and new.surface not in ('operate', 'chat')
       and coalesce(current_setting('lanekeeper.unpaused', true), '') <> 'yes' and agent_is_held_back() then
      if old.outside then
        perform refuse_while_paused();
      elsif old.status <> 'waiting' then
        return null;                                         -- it stays in the queue
      else
        new.claimed_by := null;                              -- its wait has ended all the same
      end if;
    end if;
  end if;
  new.outside := new.flow = 'external' or new.flow like 'external:%';
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
    when new.claimed_by is not null and new.status <> 'running' then 'claimed_by'
  end;
  if bad is not null then
    raise exception 'new row for relation "agent_executions" violates check constraint "agent_executions_%_check"', bad
      using errcode = 'check_violation', table = 'agent_executions', constraint = 'agent_executions_' || bad || '_check',
            detail = format('%s is %s', bad, to_jsonb(new) -> bad);
  end if;
  return new;
end $$;

-- Whether the agent is paused, or is about to be. Each of the two is a statement of its own, so that the second sees every pause that had the
-- lock before.
create function agent_is_held_back() returns boolean language plpgsql volatile as $$
begin
  if pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0)) then
    perform 1 from agent_pauses p where p.resumed_at is null;
    return found;
  end if;
  return true;
end $$;
comment on function agent_is_held_back is 'Whether the agent is paused, or is about to be: then nothing but attended work begins.';

create or replace trigger agent_executions_valid before update of status, claimed_by, trace_id, surface, flow, outside, queue, priority,
  max_attempts, on_lost, progress_seconds, waiting_for, result_type on agent_executions
  for each row when (current_setting('lanekeeper.follows', true) is distinct from 'yes') execute function agent_executions_valid();
drop trigger agent_executions_guard on agent_executions;
drop trigger agent_executions_held on agent_executions;
drop trigger agent_place_freed on agent_executions;
drop function agent_executions_guard();
drop function agent_executions_held();
drop function agent_place_freed();
alter table agent_executions drop constraint agent_executions_claimed;

create or replace trigger agent_checkpoints_fence before insert or update on agent_checkpoints
  for each row when (current_setting('lanekeeper.fenced', true) is distinct from 'yes') execute function agent_checkpoints_fence();

-- Starts ----------------------------------------------------------------------------------------------

create or replace function begin_agent_executions(p_traces text[], p_surfaces text[], p_flows text[], p_here boolean[], p_worker uuid, p_background int,
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
  time_ bigint;
  high text;                        -- the first half of their ids: the time
  low bigint;                       -- the second
  valid boolean;
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
  at_ := clock_timestamp();
  -- As agent_uuid7 makes them, but one after the other: what is random is so once for all, and then counted.
  time_ := floor(extract(epoch from at_) * 4096000)::bigint;
  high := '0' || to_hex((time_ >> 12 << 16) | 28672 | (time_ & 4095));
  low := (hashtextextended(gen_random_uuid()::text, 0) & 4611686018427322368) | -9223372036854775808;
  for i in 1 .. several loop
    ids[i] := (high || to_hex(low + i))::uuid;
  end loop;
  -- What agent_executions_valid looks at.
  valid := p_surfaces <@ array['heartbeat', 'operate', 'chat', 'webhook', 'flow'] and '' <> all (p_traces) and '' <> all (p_flows)
           and 'external' <> all (p_flows) and array_to_string(p_flows, ' ') not like '%external:%' and not held_back
           and (p_queues is null or p_queues <@ array['background', 'interactive']) and (p_priorities is null or p_priorities <@ array[1, 2, 3, 4])
           and (p_on_lost is null or p_on_lost <@ array['resume', 'fail', 'hand_on'])
           and (p_max_attempts is null or 0 < all (p_max_attempts)) and (p_progress is null or 0 <= all (p_progress));
  done := set_config('lanekeeper.unpaused', case when held_back then '' else 'yes' end, true)
       || set_config('lanekeeper.valid', case when valid then 'yes' else '' end, true);
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
  done := set_config('lanekeeper.unpaused', '', true) || set_config('lanekeeper.valid', '', true);
end $$;

-- Ends ------------------------------------------------------------------------------------------------

create or replace function close_agent_executions(p_ids uuid[], p_claims bigint[], p_statuses text[], p_summaries text[], p_results jsonb[],
                                                  p_errors text[], p_failed_steps text[], p_variables jsonb[], p_wanted boolean[],
                                                  p_steps text[], p_prints text[], p_failed boolean[], p_outputs jsonb[])
returns table (n int, updated_at timestamptz, completed_at timestamptz, result jsonb, variables jsonb, inherits boolean, flow_version int)
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  several constant int := cardinality(p_ids);
  ending uuid[];                    -- what is locked, in the order of ids, as are the next three
  claims bigint[];
  workers uuid[];
  places tid[];
  alive uuid[];
  together boolean;                 -- they began within a quarter of a second
  rich boolean;                     -- one of them may have more than a result
  bound uuid[] := '{}';             -- they have lanes or budgets
  odd boolean;                      -- more follows than is done here
  hooks boolean;
  limited boolean;
  parents boolean;                  -- somebody waits for an execution
  awaited uuid[] := '{}';           -- by a parent
  at_ timestamptz;
  ended int;
  done text;
begin
  if (p_statuses <@ array['completed', 'failed', 'timeout']) is not true then
    raise exception 'executions can finish as completed, failed or timeout' using errcode = '22023';
  end if;
  -- For update: nothing is written under these claims afterwards. One with a write under way is passed over, and waits for it by
  -- itself. A row that was changed before it was locked is compared again; the clock that ends a lease is read after the locks.
  select array_agg(x.id), array_agg(x.claim), array_agg(x.claimed_by), array_agg(x.ctid),
         bool_or(x.outside or x.flow = 'webhook' and p_statuses[array_position(p_ids, x.id)] <> 'completed')
    into ending, claims, workers, places, odd
    from (select y.* from (
            select x.id, x.claim, x.claimed_by, x.ctid, x.flow, x.outside from agent_executions x
             where x.id = any (p_ids) for update skip locked) y order by y.id) x;
  if ending is null then
    return;
  end if;
  -- Most batches began together: one look at each table then tells that none has anything there. None of this comes or goes while its execution
  -- is locked, but for the targets.
  together := left(ending[1]::text, 11) = left(ending[cardinality(ending)]::text, 11);
  select array(select k.id from agent_workers k where k.id = any (workers) and k.expires_at > clock_timestamp()),
         not together
         or exists (select from agent_locks l where l.execution_id between ending[1] and ending[cardinality(ending)])
         or exists (select from agent_lock_loans k where k.lender between ending[1] and ending[cardinality(ending)])
         or exists (select from agent_budget_reservations b where b.execution_id between ending[1] and ending[cardinality(ending)])
         or exists (select from agent_activity_open o where o.execution_id between ending[1] and ending[cardinality(ending)])
         or exists (select from agent_approvals a where a.parked and a.execution_id between ending[1] and ending[cardinality(ending)])
         or exists (select from agent_requests r where r.execution_id between ending[1] and ending[cardinality(ending)]),
         exists (select from agent_webhook_targets t where t.enabled),
         exists (select from agent_limits),
         exists (select from agent_executions x where x.waiting_for = 'agent')
    into alive, rich, hooks, limited, parents;
  if rich then
    -- Lanes and budgets have an order of their own, which is kept for one execution at a time: those that have any end by themselves.
    select array(
             select l.execution_id from agent_locks l where l.execution_id = any (ending)
             union all select k.lender from agent_lock_loans k where k.lender = any (ending)
             union all select b.execution_id from agent_budget_reservations b where b.execution_id = any (ending)),
           odd or exists (select from agent_activity_open o where o.execution_id = any (ending))
               or exists (select from agent_approvals a where a.execution_id = any (ending) and a.parked and a.status in ('pending', 'approved'))
               or exists (select from agent_requests r where r.execution_id = any (ending) and (r.status = 'pending') is true)
      into bound, odd;
  end if;
  odd := odd or hooks;
  if limited then
    limited := exists (select from agent_executions x join agent_limits l
                           on l.kind = 'flow' and l.name = x.flow or l.kind = 'surface' and l.name = x.surface where x.id = any (ending));
  end if;
  if parents then
    awaited := array(select t.id from unnest(ending) t (id) where exists (
      select from agent_executions x where x.waiting_for = 'agent' and x.waiting_key = t.id::text and (x.status = 'waiting') is true offset 0));
  end if;
  if bound <> '{}' or (ending = p_ids and claims = p_claims and workers <@ alive) is not true then    -- which one that does not run is not in
    places := array(
      select case when claims[t.x] = p_claims[t.i] and workers[t.x] = any (alive) and p_ids[t.i] <> all (bound)
                       and not exists (select from generate_series(1, t.i - 1) e where p_ids[e] = p_ids[t.i] and p_claims[e] = p_claims[t.i])
                  then places[t.x] end
        from (select i, array_position(ending, p_ids[i]) as x from generate_series(1, several) i offset 0) t order by t.i);
  end if;
  at_ := clock_timestamp();
  -- Where none is odd, the update writes what agent_executions_valid would, and agent_executions_changed has nothing to do.
  done := set_config('lanekeeper.fenced', 'yes', true) || set_config('lanekeeper.follows', case when odd then '' else 'yes' end, true);
  return query
  update agent_executions x
     set status = p_statuses[i], updated_at = at_, completed_at = at_, claimed_by = null,
         result_type = case p_statuses[i] when 'completed' then 'success' when 'failed' then 'failure' else p_statuses[i] end,
         result_summary = coalesce(p_summaries[i], ''), result = p_results[i], error_message = p_errors[i],
         failed_step = p_failed_steps[i], variables = coalesce(p_variables[i], x.variables)
    from generate_series(1, several) i
   where x.ctid = places[i]
  returning i, x.updated_at, x.completed_at, case when p_wanted[i] then x.result end, case when p_wanted[i] then x.variables end,
            x.inherits, x.flow_version;
  get diagnostics ended = row_count;
  if ended <> num_nonnulls(variadic places) then
    raise exception '% of % executions were found where they were locked', ended, num_nonnulls(variadic places) using errcode = '40001';
  end if;
  insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output, created_at)
  select p_ids[i], p_steps[i], p_claims[i], coalesce(p_prints[i], ''), coalesce(p_failed[i], false), p_outputs[i], at_
    from generate_series(1, several) i where places[i] is not null and p_steps[i] is not null;
  if not odd then
    -- The first half of an id is the time, read under the statement's lock of the table: who follows the events by their ids relies on that.
    insert into agent_events (id, event, key, data, external_id, execution_id, created_at)
    select ((select '0' || to_hex((c.time >> 12 << 16) | 28672 | (c.time & 4095))
               from (select floor(extract(epoch from clock_timestamp()) * 4096000)::bigint as time offset 0) c)
            || to_hex((uuid_hash_extended(p_ids[t.i], 0) & 4611686018427387903) | -9223372036854775808))::uuid, 'AGENT_COMPLETED', t.key,
           jsonb_build_object('execution_id', t.key, 'result_summary', coalesce(p_summaries[t.i], ''))
             || case p_statuses[t.i] when 'completed' then '{"status": "completed", "result_type": "success", "locks_released": 0}'::jsonb
                  when 'failed' then '{"status": "failed", "result_type": "failure", "locks_released": 0}'::jsonb
                  else '{"status": "timeout", "result_type": "timeout", "locks_released": 0}'::jsonb end,
           'completed ' || t.key, p_ids[t.i], at_
      from (select i, p_ids[i]::text as key from generate_series(1, several) i where places[i] is not null offset 0) t;
  end if;
  done := set_config('lanekeeper.fenced', '', true) || set_config('lanekeeper.follows', '', true);
  if odd then
    return;
  end if;
  if awaited <> '{}' then
    insert into agent_untold_ends (execution_id)
    select p_ids[i] from generate_series(1, several) i where places[i] is not null and p_ids[i] = any (awaited) order by 1 on conflict do nothing;
  end if;
  if limited and num_nonnulls(variadic places) > 0 then
    perform pg_notify('agent_ready', '');                    -- a place is free
  end if;
end $$;

-- Waits -----------------------------------------------------------------------------------------------

-- Both as they were, but they say that what they look for is not what the runtime tells of an end: the index of what nobody has taken has none of it.
create or replace function park_agent_execution(p_id uuid, p_claim bigint, p_step text, p_kind text, p_key text,
                                     p_timeout interval, p_data jsonb) returns jsonb
language plpgsql volatile as $$
declare
  came agent_events;
  outcome jsonb;
  unsent uuid;
  sent record;
  target uuid;
begin
  if agent_wait_event(p_kind) is null then
    raise exception 'wait for % is not known', coalesce(quote_literal(p_kind), 'null') using errcode = '22023';
  elsif p_step is null or p_key is null or (p_key = '' and p_kind <> 'delay') then
    raise exception 'wait for % needs a step and a key', p_kind using errcode = '22023';
  elsif p_kind = 'delay' and p_timeout is null then
    raise exception 'a delay needs its time' using errcode = '22023';
  end if;
  if p_kind in ('agent', 'document', 'signature', 'test') then
    target := agent_uuid(p_key);
    p_key := coalesce(target::text, p_key);                 -- as the events have it
  end if;
  if p_kind = 'agent' and p_timeout is null then
    p_data := coalesce(p_data, '{}') || '{"patient": true}';
  end if;
  p_timeout := coalesce(p_timeout, agent_wait_standard(p_kind));
  if p_timeout < interval '0' or p_timeout > agent_wait_longest(p_kind) then
    raise exception 'timeout % of the wait for % is not valid: give up to %', p_timeout, p_kind, agent_wait_longest(p_kind)
      using errcode = '22023';
  end if;
  perform agent_wait_lock(p_kind, p_key);
  -- The end of what is waited for either comes before this, and its event is seen below, or finds who waits.
  if p_kind = 'agent' and target < p_id then
    perform 1 from agent_executions x where x.id = target for share;
  end if;
  -- For update, because the claim is part of the key: two parks that shared the row would deadlock here.
  perform 1 from agent_executions x where x.id = p_id and x.claim = p_claim for update;
  if p_kind = 'agent' and target > p_id then
    perform 1 from agent_executions x where x.id = target for share;
  end if;
  perform fence_agent_execution(p_id, p_claim);
  -- A try before this one had an outcome at once, and its answer was lost on the way.
  select c.output into outcome from agent_checkpoints c where c.execution_id = p_id and c.step = p_step;
  if found then
    return outcome;
  end if;
  if p_kind in ('document', 'signature', 'test') and exists (select from agent_requests r where r.id = target and r.kind = p_kind) then
    outcome := agent_request_outcome(p_kind, p_key);
  elsif p_kind = 'response' then
    unsent := agent_queued_message(p_id, p_key);
    select agent_last_sent(p_id, p_key) as at, max(m.seq) as seq into sent from agent_messages m
     where m.execution_id = p_id and m.thread_id = p_key and m.role = 'assistant' and m.seq is not null;
    -- The order of the thread decides what an answer can be; the clock only where the event is of no message of it.
    select v.* into came from agent_events v
     where v.event = 'MESSAGE_RECEIVED' and v.key = p_key and v.consumed_by is null and v.execution_id is null and unsent is null
       and v.id >= agent_uuid7_floor(sent.at - interval '1 minute')
       and coalesce((select m.seq > sent.seq from agent_messages m
                      where m.id = agent_uuid(v.data ->> 'message_id') and m.thread_id = p_key), v.created_at > sent.at)
     order by v.id limit 1 for update;
  elsif p_kind = 'agent' and exists (select from agent_events v where v.external_id = 'completed ' || p_key) then
    -- An end is a fact, not a message: it answers everyone who waits for it, however often.
    select v.* into came from agent_events v where v.external_id = 'completed ' || p_key;
  elsif p_kind not in ('delay', 'lane') then
    select v.* into came from agent_events v
     where v.event = agent_wait_event(p_kind) and v.key = p_key and v.consumed_by is null and v.execution_id is null
     order by v.id limit 1 for update;
  elsif p_kind = 'lane' then
    update agent_locks l set waited_until = greatest(l.waited_until, clock_timestamp() + p_timeout) where l.lane = p_key;
    if agent_lane_open(p_key)
       or exists (select from agent_locks l where l.lane = p_key and l.execution_id = p_id) then    -- it is its own
      outcome := jsonb_build_object('event', 'LANE_FREED', 'data', '{}'::jsonb, 'timed_out', false);
    end if;
  end if;
  if came.id is not null then
    update agent_events v set consumed_by = p_id where v.id = came.id;
    outcome := jsonb_build_object('event', came.event, 'event_id', came.id, 'data', came.data, 'timed_out', false);
  end if;
  if outcome is not null then
    insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
    values (p_id, p_step, p_claim, outcome, p_kind, p_key, clock_timestamp());
    return outcome;
  end if;
  update agent_executions x
     set status = 'waiting', claim = x.claim + 1, wait_number = x.wait_number + 1, attempt = 0,
         waiting_for = p_kind, waiting_key = p_key, waiting_step = p_step,
         -- A question that still stands in the queue cannot be answered: the time runs from when it leaves.
         waiting_until = clock_timestamp() + case when unsent is null then p_timeout else interval '30 days' end,
         waiting_data = case when unsent is null then p_data
                             else coalesce(nullif(p_data, 'null'), '{}') || jsonb_build_object('queued_message', unsent,
                                    'timeout_seconds', extract(epoch from p_timeout)) end
   where x.id = p_id and x.claim = p_claim;
  if p_kind = 'agent' then                                  -- also when it waits again, after a time that was too short
    update agent_executions x set awaited = true
     where x.id = target and x.parent_id = p_id and not x.awaited and x.completed_at is null;
  end if;
  perform park_agent_locks(p_id, true);
  return null;
end $$;

create or replace function park_agent_executions(p_ids uuid[], p_claims bigint[], p_steps text[], p_kinds text[], p_keys text[], p_seconds float8[],
                                      p_data jsonb[], p_variables jsonb[])
returns table (n int, verdict text)
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  ready uuid[];
  plain uuid[];
begin
  -- Those of the kinds that need nothing but an event or a time, and whose wait nobody else is about to end.
  ready := array(
    select t.id from unnest(p_ids, p_claims, p_steps, p_kinds, p_keys, p_seconds) with ordinality t (id, claim, step, kind, key, seconds, n)
     where t.kind in ('event', 'approval', 'delay') and t.step is not null and (t.key <> '' or t.kind = 'delay' and t.key is not null)
       and t.seconds >= 0 and t.seconds <= extract(epoch from agent_wait_longest(t.kind)) and t.n = array_position(p_ids, t.id)
       and (t.kind = 'delay' or pg_try_advisory_xact_lock(hashtextextended('wait ' || t.kind || ' ' || t.key, 0))));
  -- For update, because the claim is part of the key; one that is locked by somebody waits for it by itself.
  ready := array(select x.id from agent_executions x where x.id = any (ready) and x.claim = p_claims[array_position(p_ids, x.id)]
                    for update skip locked);
  plain := array(
    select x.id from agent_executions x
     where x.id = any (ready) and (x.status = 'running') is true and x.claim = p_claims[array_position(p_ids, x.id)]
       and exists (select from agent_workers w where w.id = x.claimed_by and w.expires_at > clock_timestamp())
       and not exists (select from agent_locks l where l.execution_id = x.id)
       and not exists (select from agent_lock_loans k where k.lender = x.id)
       and not exists (select from agent_checkpoints c where c.execution_id = x.id and c.step = p_steps[array_position(p_ids, x.id)])
       and (p_kinds[array_position(p_ids, x.id)] = 'delay' or not exists (
         select from agent_events v where v.event = agent_wait_event(p_kinds[array_position(p_ids, x.id)])
                                      and v.key = p_keys[array_position(p_ids, x.id)] and v.consumed_by is null and v.execution_id is null)));
  update agent_executions x
     set (status, claim, wait_number, attempt, waiting_for, waiting_key, waiting_step, waiting_until, waiting_data, variables) = (
       select 'waiting', x.claim + 1, x.wait_number + 1, 0, p_kinds[a.i], p_keys[a.i], p_steps[a.i],
              clock_timestamp() + make_interval(secs => p_seconds[a.i]), p_data[a.i], coalesce(p_variables[a.i], x.variables)
         from (select array_position(p_ids, x.id) as i offset 0) a)
   where x.id = any (plain);
  return query
  select t.n::int, case when t.id = any (plain) and t.n = array_position(p_ids, t.id) then 'waits' else 'alone' end
    from unnest(p_ids) with ordinality t (id, n);
end $$;

-- Retention -------------------------------------------------------------------------------------------

-- As it was, but it says which states it asks for: the index has no others.
create or replace function old_agent_events(p_before timestamptz, p_keep interval, p_after uuid, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  bound uuid := agent_uuid7_floor(p_before);
  -- Of the executions that have not ended. By state too, as the index has it: by id alone they would be looked for among all others.
  oldest text := (
    select min(f.id::text collate "C") from unnest(array['pending', 'running', 'waiting']) s (status)
     cross join lateral (select x.id from agent_executions x where x.status in ('pending', 'running', 'waiting') and x.status between s.status and s.status
                         order by x.status, x.id limit 1) f);
  o agent_old_rows;
begin
  with looked as materialized (
    select v.id, v.event, v.key, v.execution_id, v.consumed_by, v.created_at from agent_events v
     where v.id > p_after and v.id < bound order by v.id limit p_most)
  select array_agg(l.id::text order by l.id) filter (where l.created_at < p_before
           -- Nobody reads it, who goes on.
           and not exists (select from agent_executions x where x.id = l.consumed_by and x.completed_at is null)
           and case
             -- An end, and a decision, belong to their execution, and go with it: who waits for it later, or forks it, asks for them.
             when l.event = 'AGENT_COMPLETED' then
               not exists (select from agent_executions x where x.id = coalesce(l.execution_id, agent_uuid(l.key)))
             when l.event = 'APPROVAL_DECIDED' then
               not exists (select from agent_approvals a join agent_executions x on x.id = a.execution_id where a.id = agent_uuid(l.key))
             -- What nobody has taken may be for any execution that has not ended and began before it, or while it was to be kept.
             when l.consumed_by is null and agent_event_kind(l.event) is not null then
               coalesce(oldest >= (agent_uuid7_floor(l.created_at + p_keep))::text collate "C", true)
             else true end),
         null::timestamptz, max(l.id::text collate "C"), count(*)
    into o from looked l;
  return o;
end $$;
