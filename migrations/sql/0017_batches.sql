-- What waits goes on sooner: an event ends its wait and claims the execution in one statement; ends, and events, that come at the same
-- time share a commit; and timers that are due together are resumed together.
--
-- Every function of before stays, with its rules: those for several rows do what those for one do, each row under its own fence, and
-- leave to them whatever is not plain. They never wait for a lock of somebody else: a row that is locked is left as well. Locks are taken
-- in the order of everywhere: the advisory locks of waits, executions, events.

-- Going on ------------------------------------------------------------------------------------------

create function agent_event_kind(p_event text) returns text language sql immutable as $$
  select case p_event when 'MESSAGE_RECEIVED' then 'response' when 'AGENT_COMPLETED' then 'agent' when 'DOCUMENT_UPLOADED' then 'document'
    when 'SIGNATURE_COMPLETED' then 'signature' when 'TEST_COMPLETED' then 'test' when 'EVENT_COMPLETED' then 'event'
    when 'APPROVAL_DECIDED' then 'approval' end
$$;
comment on function agent_event_kind is 'The kind of wait that an event ends: agent_wait_event the other way round.';

create function check_agent_delivery(p_event text, p_key text, p_data jsonb, p_id text) returns text
language plpgsql immutable as $$
declare
  kind constant text := agent_event_kind(p_event);
begin
  if kind is null then
    raise exception 'event % is not known', coalesce(quote_literal(p_event), 'null') using errcode = '22023';
  elsif p_key is null or p_key = '' then
    raise exception 'event % needs a key', p_event using errcode = '22023';
  elsif p_id like 'completed %' then
    raise exception 'id % of an event is reserved for the end of an execution', quote_literal(p_id) using errcode = '22023';
  end if;
  if kind <> 'event' then
    perform check_agent_event(kind, p_event, coalesce(p_data, '{}'));
  end if;
  return kind;
end $$;
comment on function check_agent_delivery is 'The kind of wait that an event ends; one that cannot be delivered is refused with 22023.';

create or replace function deliver_agent_event(p_event text, p_key text, p_data jsonb default '{}', p_id text default null)
returns table (event_id uuid, execution_id uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  kind constant text := check_agent_delivery(p_event, p_key, p_data, p_id);
  event_row uuid;
  waiter record;
  last_one uuid;
  asked_by uuid;
  outcome jsonb;
begin
  if kind in ('agent', 'document', 'signature', 'test') then
    p_key := coalesce(agent_uuid(p_key)::text, p_key);
  end if;
  perform agent_wait_lock(kind, p_key);
  insert into agent_events as v (event, key, data, external_id) values (p_event, p_key, coalesce(p_data, '{}'), p_id)
  on conflict (external_id) do nothing returning v.id into event_row;
  if event_row is null then
    return query select v.id, null::uuid from agent_events v where v.external_id = p_id;
    return;
  end if;
  outcome := jsonb_build_object('event', p_event, 'event_id', event_row, 'data', coalesce(p_data, '{}'), 'timed_out', false);
  if kind in ('document', 'signature', 'test') then
    -- Executions before requests, because the end of one closes what it asked for.
    perform 1 from agent_executions x
      where x.waiting_for = kind and x.waiting_key = p_key and (x.status = 'waiting') is true order by x.id for no key update;
    asked_by := answer_agent_request(kind, p_key, event_row, coalesce(p_data, '{}'));
    if asked_by is not null then                            -- the request keeps it from here on
      update agent_events v set consumed_by = asked_by where v.id = event_row;
      outcome := agent_request_outcome(kind, p_key);
    end if;
  end if;
  for waiter in
    select x.id, x.wait_number from agent_executions x
     where x.waiting_for = kind and x.waiting_key = p_key and (x.status = 'waiting') is true and outcome is not null
       and (kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false))
     order by x.id for no key update
  loop
    perform resume_agent_execution(waiter.id, waiter.wait_number, outcome);
    last_one := waiter.id;
    return query select event_row, waiter.id;
  end loop;
  if last_one is null then
    return query select event_row, null::uuid;
  else
    update agent_events v set consumed_by = last_one where v.id = event_row;          -- once, however many woke
  end if;
end $$;

create or replace function tell_agent_parents(p_child uuid, p_wait boolean) returns int
language plpgsql volatile as $$
declare
  came record;
  waiters uuid[];
  id_ uuid;
  number int;
begin
  if p_wait then
    perform agent_wait_lock('agent', p_child::text);
  elsif not pg_try_advisory_xact_lock(hashtextextended('wait agent ' || p_child, 0)) then
    return 0;
  end if;
  select v.id, v.event, v.data into came from agent_events v where v.external_id = 'completed ' || p_child;
  if not found then
    return 0;
  end if;
  if p_wait then
    waiters := array(select w.id from (
      select x.id from agent_executions x where x.waiting_for = 'agent' and x.waiting_key = p_child::text and (x.status = 'waiting') is true
       order by x.id for no key update) w);
  else
    waiters := array(select w.id from (
      select x.id from agent_executions x where x.waiting_for = 'agent' and x.waiting_key = p_child::text and (x.status = 'waiting') is true
       order by x.id for no key update skip locked) w);
  end if;
  foreach id_ in array waiters loop
    select x.wait_number into number from agent_executions x where x.id = id_;
    perform resume_agent_execution(id_, number,
      jsonb_build_object('event', came.event, 'event_id', came.id, 'data', came.data, 'timed_out', false));
    update agent_events v set consumed_by = id_ where v.id = came.id;
  end loop;
  delete from agent_untold_ends u
   where u.execution_id = p_child and (p_wait or not exists (
           select from agent_executions x
            where x.waiting_for = 'agent' and x.waiting_key = p_child::text and (x.status = 'waiting') is true));
  return cardinality(waiters);
end $$;

create function resume_agent_execution_for(p_id uuid, p_wait_number int, p_outcome jsonb, p_worker uuid) returns boolean
language plpgsql volatile as $$
declare
  e record;
begin
  if p_worker is null then
    select x.claim, x.waiting_step, x.waiting_for, x.waiting_key, x.outside into e from agent_executions x
     where x.id = p_id and x.status = 'waiting' and x.wait_number = p_wait_number for no key update;
  else                                                       -- a claim is part of the key
    select x.claim, x.waiting_step, x.waiting_for, x.waiting_key, x.outside into e from agent_executions x
     where x.id = p_id and x.status = 'waiting' and x.wait_number = p_wait_number for update;
  end if;
  if not found then
    return false;
  end if;
  insert into agent_checkpoints (execution_id, step, claim, output)
  values (p_id, coalesce(e.waiting_step, 'wait ' || p_wait_number), e.claim, p_outcome)
  on conflict (execution_id, step) do nothing;
  update agent_executions x
     set status = 'running', wake = x.wake + 1, attempt = 0, claimed_by = p_worker, claim = x.claim + (p_worker is not null)::int
   where x.id = p_id;
  if e.waiting_for = 'agent' then                           -- a child that still runs acts under lanes of its own from here on
    update agent_executions x set inherits = false, awaited = false
     where x.id = agent_uuid(e.waiting_key) and x.parent_id = p_id and (x.inherits or x.awaited) and x.completed_at is null;
    perform recall_agent_loans(p_id);
  end if;
  if exists (select from agent_locks l where l.execution_id = p_id) then
    perform park_agent_locks(p_id, false);
  end if;
  return true;
end $$;
comment on function resume_agent_execution_for is
  'resume_agent_execution, and with a worker a claim for it in the same update. Whether it may be claimed, its lanes given to the new '
  'claim, and its calls looked after, is the caller''s to see to.';

create or replace function resume_agent_execution(p_id uuid, p_wait_number int, p_outcome jsonb) returns boolean
language plpgsql volatile as $$
begin
  return resume_agent_execution_for(p_id, p_wait_number, p_outcome, null);
end $$;

create function resume_agent_executions(p_ids uuid[], p_outcomes jsonb[], p_worker uuid, p_claimed uuid[])
returns void language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
declare
  lanes text[];
  id_ uuid;
begin
  -- No joins with what is given: a plan that was made while the table was small would go through it from the other side.
  insert into agent_checkpoints (execution_id, step, claim, output)
  select x.id, coalesce(x.waiting_step, 'wait ' || x.wait_number), x.claim, p_outcomes[array_position(p_ids, x.id)]
    from agent_executions x where x.id = any (p_ids)
  on conflict (execution_id, step) do nothing;
  update agent_executions x
     set status = 'running', wake = x.wake + 1, attempt = 0,
         claimed_by = case when x.id = any (p_claimed) then p_worker end, claim = x.claim + (x.id = any (p_claimed))::int
   where x.id = any (p_ids);
  lanes := array(select l.lane from agent_locks l where l.execution_id = any (p_ids)
                 union select n.lane from agent_lock_loans n where n.lender = any (p_ids) order by 1);
  if lanes <> '{}' then
    perform 1 from agent_locks l where l.lane = any (lanes) order by l.lane for update;    -- in one order, whosever they are
    foreach id_ in array p_ids loop
      perform park_agent_locks(id_, false);
    end loop;
  end if;
end $$;
comment on function resume_agent_executions is
  'resume_agent_execution for several that wait, for other things than agents, each with its outcome; those of p_claimed are claimed. '
  'The caller has locked the rows, for update where it claims, and made sure that they wait.';

create function agent_next_in_line(p_queue text, p_flow text, p_surface text, p_skip text[]) returns boolean
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
begin
  if p_flow = any (p_skip)
     or exists (select from agent_limits l where (l.kind = 'flow' and l.name = p_flow) or (l.kind = 'surface' and l.name = p_surface)) then
    return false;                                            -- a limit is counted under its lock, with all that is ready
  end if;
  -- Nearly always nothing else is ready, or only what a limit holds back.
  return not exists (select from agent_executions x
                      where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside and x.queue = p_queue)
      or not exists (select from agent_ready_kinds(p_queue, p_skip) k
                      where agent_free_places('flow', k.flow, false) > 0 and agent_free_places('surface', k.surface, false) > 0);
end $$;
comment on function agent_next_in_line is
  'Whether an execution that becomes ready now would be claimed next: no limit concerns it, and nothing else of its queue could be claimed.';

create function hand_agent_event(p_event text, p_key text, p_data jsonb, p_id text, p_worker uuid, p_background int, p_interactive int,
                                 p_skip text[] default '{}')
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean,
               steps text[], claims bigint[], prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile as $$
#variable_conflict use_column
declare
  kind constant text := check_agent_delivery(p_event, p_key, p_data, p_id);
  waiter record;
  ids uuid[] := '{}';
  mine boolean;
begin
  n := 1;
  held := false;
  if kind in ('agent', 'document', 'signature', 'test') then -- these keep more than the event
    for event_id, execution_id in select d.event_id, d.execution_id from deliver_agent_event(p_event, p_key, p_data, p_id) d loop
      queue := (select x.queue from agent_executions x where x.id = execution_id);
      return next;
    end loop;
    return;
  end if;
  p_data := coalesce(p_data, '{}');
  perform pg_advisory_xact_lock(hashtextextended('wait ' || kind || ' ' || p_key, 0));
  -- Executions before the event, which is written once, with who takes it. Of several the one that comes first in the queue is next.
  for waiter in
    select x.id, x.wait_number, x.queue, x.flow, x.surface, x.outside from agent_executions x
     where x.waiting_for = kind and x.waiting_key = p_key and (x.status = 'waiting') is true
       and (kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false))
     order by x.id for update
  loop
    ids := ids || waiter.id;
  end loop;
  insert into agent_events as v (event, key, data, external_id, consumed_by) values (p_event, p_key, p_data, p_id, ids[cardinality(ids)])
  on conflict (external_id) do nothing returning v.id into event_id;
  if event_id is null then                                   -- it came before
    event_id := (select v.id from agent_events v where v.external_id = p_id);
    ids := '{}';
  end if;
  if ids = '{}' then
    return next;
    return;
  end if;
  p_data := jsonb_build_object('event', p_event, 'event_id', event_id, 'data', p_data, 'timed_out', false);
  if cardinality(ids) > 1 then                               -- which of them is first is for those who claim from the queue
    return query select 1, event_id, x.id, x.queue, null::agent_executions, false, null::text[], null::bigint[], null::text[],
                        null::boolean[], null::jsonb[], null::timestamptz[]
                   from agent_executions x where x.id = any (ids) order by x.id;
    perform resume_agent_execution_for(x.id, x.wait_number, p_data, null) from agent_executions x where x.id = any (ids) order by x.id;
    return;
  end if;
  mine := p_worker is not null and not waiter.outside and case waiter.queue when 'background' then p_background else p_interactive end > 0
    and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp())
    and agent_next_in_line(waiter.queue, waiter.flow, waiter.surface, p_skip);
  perform resume_agent_execution_for(waiter.id, waiter.wait_number, p_data, case when mine then p_worker end);
  execution_id := waiter.id;
  queue := waiter.queue;
  if mine then
    select x.* into execution from agent_executions x where x.id = waiter.id and x.claimed_by = p_worker;
    mine := found;                                           -- a pause leaves it in the queue
  end if;
  if mine then
    select array_agg(k.step), array_agg(k.claim), array_agg(k.fingerprint), array_agg(k.failed), array_agg(k.output), array_agg(k.created_at)
      into steps, claims, prints, failed, outputs, times
      from agent_checkpoints k where k.execution_id = waiter.id;
    held := execution.claim > 2 * execution.wait_number + 1 or exists (select from agent_locks l where l.execution_id = waiter.id)
         or exists (select from agent_activity_open o where o.execution_id = waiter.id);
  end if;
  return next;
end $$;
comment on function hand_agent_event is
  'deliver_agent_event by a process that has free workers, so many in each queue: an execution that goes on, and would be claimed next, '
  'is claimed in the same statement, and the answer has its row and all that it has recorded. held: recover_agent_claim, and a look at what '
  'was interrupted, come before anything else is done with it. Rows: the event, and each execution it woke (null when none).';

create function hand_agent_events(p_events text[], p_keys text[], p_data jsonb[], p_ids text[], p_worker uuid, p_background int,
                                  p_interactive int, p_skip text[] default '{}')
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean,
               steps text[], claims bigint[], prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  kinds text[] := '{}';
  here boolean[] := '{}';           -- by event: delivered by this statement
  rows_ uuid[] := array_fill(null::uuid, array[cardinality(p_events)]);   -- by event: its row; null when it had come before
  takers uuid[] := rows_;           -- by event: the last execution that it wakes
  woken uuid[] := '{}';             -- the executions that go on, and by which event: side by side
  by_ int[] := '{}';
  taken uuid[] := '{}';             -- those of them that are claimed
  places jsonb := jsonb_build_object('background', p_background, 'interactive', p_interactive);
  next jsonb := '{}';               -- by queue, flow and surface
  line text;
  w record;
begin
  kinds := array(select check_agent_delivery(t.event, t.key, t.data, t.id)
                   from unnest(p_events, p_keys, p_data, p_ids) with ordinality t (event, key, data, id, n) order by t.n);
  -- One that has to wait for somebody, or for another of this batch, comes again by itself: the others do not wait with it.
  here := array(
    select case when t.kind not in ('agent', 'document', 'signature', 'test') and t.nth_of_key = 1 and (t.id is null or t.nth_of_id = 1)
                then pg_try_advisory_xact_lock(hashtextextended('wait ' || t.kind || ' ' || t.key, 0)) else false end
      from (select u.*, row_number() over (partition by u.kind, u.key order by u.n) as nth_of_key,
                   row_number() over (partition by u.id order by u.n) as nth_of_id
              from unnest(kinds, p_keys, p_ids) with ordinality u (kind, key, id, n)) t
     order by t.n);
  for w in
    select l.id, t.n from unnest(kinds, p_keys, here) with ordinality t (kind, key, here, n)
     cross join lateral (
       select x.id from agent_executions x
        where x.waiting_for = t.kind and x.waiting_key = t.key and (x.status = 'waiting') is true
          and (t.kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false))
          for update skip locked) l
     where t.here
  loop
    woken := woken || w.id;
    by_ := by_ || w.n::int;
    takers[w.n] := w.id;
  end loop;
  -- Waiters that somebody has locked, or that have lanes, which have an order of their own.
  for w in
    select t.n from unnest(kinds, p_keys, here) with ordinality t (kind, key, here, n)
     cross join lateral (
       select from agent_executions x
        where x.waiting_for = t.kind and x.waiting_key = t.key and (x.status = 'waiting') is true
          and (t.kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false)) and x.id <> all (woken) limit 1) l
     where t.here
    union all
    select by_[array_position(woken, l.execution_id)] from agent_locks l where l.execution_id = any (woken)
    union all
    select by_[array_position(woken, k.lender)] from agent_lock_loans k where k.lender = any (woken)
  loop
    here[w.n] := false;
    for i in 1 .. cardinality(woken) loop
      if by_[i] = w.n then
        woken[i] := null;
      end if;
    end loop;
  end loop;
  for w in
    with came as (
      insert into agent_events as v (event, key, data, external_id, consumed_by)
      select t.event, t.key, coalesce(t.data, '{}'), t.id, t.taker
        from unnest(p_events, p_keys, p_data, p_ids, takers, here) t (event, key, data, id, taker, here) where t.here order by t.id, t.key
      on conflict (external_id) do nothing
      returning v.id, v.event, v.key)
    select c.id, t.n from came c join unnest(p_events, p_keys, here) with ordinality t (event, key, here, n)
        on t.event = c.event and t.key = c.key and t.here
  loop
    rows_[w.n] := w.id;
  end loop;
  woken := array(select case when rows_[t.n] is not null then t.id end from unnest(woken, by_) with ordinality t (id, n, i) order by t.i);
  if p_worker is not null and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp()) then
    for w in
      select x.id, x.queue, x.flow, x.surface from agent_executions x
       where x.id = any (woken) and not x.outside order by x.priority, x.id
    loop
      continue when (places ->> w.queue)::int <= 0;
      line := w.queue || ' ' || w.surface || ' ' || w.flow;
      if not next ? line then
        next := next || jsonb_build_object(line, agent_next_in_line(w.queue, w.flow, w.surface, p_skip));
      end if;
      if (next ->> line)::boolean then
        taken := taken || w.id;
        places := places || jsonb_build_object(w.queue, (places ->> w.queue)::int - 1);
      end if;
    end loop;
  end if;
  perform resume_agent_executions(u.ids, u.outcomes, p_worker, taken)
     from (select array_agg(t.id) as ids,
                  array_agg(jsonb_build_object('event', p_events[t.n], 'event_id', rows_[t.n], 'data', coalesce(p_data[t.n], '{}'),
                                               'timed_out', false)) as outcomes
             from unnest(woken, by_) t (id, n) where t.id is not null having count(*) > 0) u;
  return query
  select t.n::int, coalesce(t.event_id, v.id), x.id, x.queue, case when x.id = any (taken) and x.claimed_by = p_worker then x::agent_executions end,
         coalesce(x.id = any (taken) and x.claimed_by = p_worker and (
           x.claim > 2 * x.wait_number + 1 or exists (select from agent_locks l where l.execution_id = x.id)
           or exists (select from agent_activity_open o where o.execution_id = x.id)), false),
         c.steps, c.claims, c.prints, c.failed, c.outputs, c.times
    from unnest(p_ids, rows_, here) with ordinality t (id, event_id, here, n)
    left join lateral (select r.id from agent_events r where t.here and t.event_id is null and r.external_id = t.id limit 1) v on true
    left join unnest(woken, by_) o (id, n) on o.n = t.n and o.id is not null
    left join lateral (select y.* from agent_executions y where y.id = o.id limit 1) x on true
    left join lateral (
      select array_agg(k.step) as steps, array_agg(k.claim) as claims, array_agg(k.fingerprint) as prints, array_agg(k.failed) as failed,
             array_agg(k.output) as outputs, array_agg(k.created_at) as times
        from agent_checkpoints k where k.execution_id = x.id and x.id = any (taken)) c on true;
end $$;
comment on function hand_agent_events is
  'hand_agent_event for several events in one transaction, each under its own rules. Rows: n is the place of the event, from 1. One without '
  'event_id would have had to wait for somebody, or for another of the batch, and was not delivered: send it by itself.';

-- Ends ----------------------------------------------------------------------------------------------

create function finish_agent_executions(p_ids uuid[], p_claims bigint[], p_statuses text[], p_summaries text[], p_results jsonb[],
                                        p_errors text[], p_failed_steps text[], p_variables jsonb[])
returns table (n int, verdict text)
language plpgsql volatile
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  locked uuid[];
  plain uuid[];
begin
  if exists (select from unnest(p_statuses) s where s is null or s not in ('completed', 'failed', 'timeout')) then
    raise exception 'executions can finish as completed, failed or timeout' using errcode = '22023';
  end if;
  -- For update: nothing is written under these claims afterwards. One with a write under way is passed over, and waits for it by
  -- itself. The claims are compared again once the rows are locked, and the clock that ends a lease is read after that.
  locked := array(select w.id from (
    select x.id from agent_executions x where x.id = any (p_ids) and x.claim = p_claims[array_position(p_ids, x.id)]
       for update skip locked) w);
  -- Lanes and budgets have an order of their own, which is kept for one execution at a time: those that have any end by themselves.
  plain := array(select x.id from agent_executions x
    where x.id = any (locked) and x.status = 'running'
      and exists (select from agent_workers w where w.id = x.claimed_by and w.expires_at > clock_timestamp())
      and not exists (select from agent_locks l where l.execution_id = x.id)
      and not exists (select from agent_lock_loans k where k.lender = x.id)
      and not exists (select from agent_budget_reservations b where b.execution_id = x.id)
    order by x.id);
  update agent_executions x
     set status = p_statuses[array_position(p_ids, x.id)], result_summary = coalesce(p_summaries[array_position(p_ids, x.id)], ''),
         result = p_results[array_position(p_ids, x.id)], error_message = p_errors[array_position(p_ids, x.id)],
         failed_step = p_failed_steps[array_position(p_ids, x.id)],
         variables = coalesce(p_variables[array_position(p_ids, x.id)], x.variables)
   where x.id = any (plain);
  return query
  select t.n::int, case when t.id = any (plain) and t.n = array_position(p_ids, t.id) then 'ended' else 'alone' end
    from unnest(p_ids) with ordinality t (id, n);
end $$;
comment on function finish_agent_executions is
  'finish_agent_execution for several runs that hold no lanes, in one transaction, each under its own fence, with its variables where they '
  'are not null. ended: it is. alone: nothing was changed, because the claim is not live or the run holds something; call '
  'finish_agent_execution for it, which says so.';

-- Claims --------------------------------------------------------------------------------------------

-- Planned once in a session, not for each call: planning took as long as claiming.
alter function claim_agent_executions(uuid, text, int, text[]) set plan_cache_mode = force_generic_plan;

create function take_agent_executions(p_worker uuid, p_queue text, p_limit int, p_skip text[] default '{}')
returns table (execution agent_executions, held boolean, missed boolean,
               steps text[], claims bigint[], prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile as $$
#variable_conflict use_column
declare
  c record;
begin
  missed := false;
  for c in select t.execution, t.held from claim_agent_executions(p_worker, p_queue, p_limit, p_skip) t loop
    execution := c.execution;
    held := c.held;
    -- Another statement, which sees all that was recorded before the claim.
    if execution.claim > 1 then
      select array_agg(k.step), array_agg(k.claim), array_agg(k.fingerprint), array_agg(k.failed), array_agg(k.output), array_agg(k.created_at)
        into steps, claims, prints, failed, outputs, times
        from agent_checkpoints k where k.execution_id = execution.id;
      held := held or execution.claim > 2 * execution.wait_number + 1;
    else
      steps := null;
    end if;
    return next;
  end loop;
  if coalesce(current_setting('lanekeeper.missed', true), '') = 'yes' then
    execution := null;
    held := false;
    missed := true;
    steps := null;
    return next;
  end if;
end $$;
comment on function take_agent_executions is
  'claim_agent_executions, with all that each has recorded. held also where an earlier claim may have left a call in flight: every claim '
  'but those that a wait ended was lost or given up. missed: a row of its own, some were locked by others; ask again soon.';

-- Lanes: most have none.

create or replace function park_agent_locks(p_execution_id uuid, p_parked boolean) returns void
language plpgsql volatile as $$
declare
  mine text[] := lock_agent_locks(p_execution_id);
begin
  if mine = '{}' then
    return;
  end if;
  -- Parking changes the key: the claim that parked may write nothing more under its token.
  update agent_locks l
     set parked = p_parked,
         locked_by = (select x.id || '#' || x.claim from agent_executions x where x.id = p_execution_id),
         fencing_token = agent_lock_token(l.fencing_token, clock_timestamp()),
         expires_at = case when p_parked then timestamptz '9000-01-01 00:00+00'
                           else clock_timestamp() + make_interval(secs => l.ttl_seconds) end
   where l.lane = any (mine) and l.execution_id = p_execution_id and agent_lock_parks(l.lane) and l.parked <> p_parked
     and l.expires_at > clock_timestamp();
end $$;

-- The sweep -----------------------------------------------------------------------------------------

create or replace function sweep_agent_executions(p_limit int default 500)
returns table (id uuid, wake int, queue text, priority smallint, trace_id text, reason text)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  w record;
  e record;
  now_ timestamptz := clock_timestamp();                    -- a bound that an index can be searched with
begin
  if not pg_try_advisory_xact_lock(hashtextextended('sweep executions', 0)) then
    return;
  end if;
  -- Workers before executions, in every path. The lock makes sure that the worker is not renewed now.
  for w in
    select x.id from agent_workers x where x.expires_at < clock_timestamp() order by x.expires_at
     for update skip locked
  loop
    perform lose_agent_claims(w.id);
    delete from agent_workers x where x.id = w.id and not exists (select from agent_executions y where y.claimed_by = w.id);
  end loop;
  -- A claim by a worker that is not registered at all is lost as well.
  for w in
    select distinct x.claimed_by as id from agent_executions x
     where x.claimed_by is not null and not exists (select 1 from agent_workers k where k.id = x.claimed_by)
  loop
    perform lose_agent_claims(w.id);
  end loop;
  -- A worker that beats but gets nowhere.
  for e in
    select x.id, x.on_lost, x.progress_seconds from agent_executions x
     where x.claimed_by is not null and x.status = 'running' and x.progress_seconds > 0
       and x.updated_at < clock_timestamp() - make_interval(secs => x.progress_seconds)
       and not exists (select 1 from agent_checkpoints c where c.execution_id = x.id
                        and c.created_at > clock_timestamp() - make_interval(secs => x.progress_seconds))
     order by x.id for update skip locked
  loop
    continue when exists (select 1 from agent_checkpoints c where c.execution_id = e.id       -- before it was locked
                           and c.created_at > clock_timestamp() - make_interval(secs => e.progress_seconds));
    if e.on_lost = 'hand_on' then
      perform lose_agent_claim(e.id, '');
    else
      update agent_executions x set status = 'failed', claim = x.claim + 1,
             error_message = format('no progress within progress_seconds (%s)', e.progress_seconds) where x.id = e.id;
    end if;
  end loop;
  -- Ends that nobody has told the parent of: before timers, because who has ended was not too late.
  perform tell_agent_parents(t.child, false)
     from (select u.execution_id as child from agent_untold_ends u order by u.execution_id limit p_limit) t;
  -- Timers. Who waits for a child without having said how long waits as long as the child has reason to wait itself.
  for e in
    select x.id, x.wait_number, x.waiting_key, x.waiting_data from agent_executions x
     where x.status = 'waiting' and x.waiting_until <= now_ and x.waiting_for = 'agent'
     order by x.waiting_until limit p_limit for no key update skip locked
  loop
    if e.waiting_data ->> 'patient' = 'true' then
      update agent_executions x set waiting_until = agent_patience(agent_uuid(e.waiting_key))
       where x.id = e.id and agent_patience(agent_uuid(e.waiting_key)) > now_;
      continue when found;
    end if;
    -- It is told that its parent has gone on: what somebody works on comes next time.
    perform 1 from agent_executions x where x.id = agent_uuid(e.waiting_key) for no key update skip locked;
    continue when not found and exists (select from agent_executions x where x.id = agent_uuid(e.waiting_key));
    perform resume_agent_execution(e.id, e.wait_number, jsonb_build_object(
      'event', 'AGENT_COMPLETED', 'data', '{}'::jsonb, 'timed_out', true));
  end loop;
  perform resume_agent_executions(t.ids, t.outcomes, null, '{}') from (
    select array_agg(w.id) as ids, array_agg(jsonb_build_object(
             'event', agent_wait_event(w.waiting_for), 'data', '{}'::jsonb, 'timed_out', w.waiting_for <> 'delay')) as outcomes
      from (select x.id, x.waiting_for from agent_executions x
             where x.status = 'waiting' and x.waiting_until <= now_ and x.waiting_for <> 'agent'
             order by x.waiting_until limit p_limit for no key update skip locked) w
    having count(*) > 0) t;
  -- Lanes that have become free.
  for e in
    with recursive wanted as (                              -- one step of the index for each lane, however many wait for it
      (select x.waiting_key as lane from agent_executions x
        where x.status = 'waiting' and x.waiting_for = 'lane' order by x.waiting_key limit 1)
      union all
      select (select x.waiting_key from agent_executions x
               where x.status = 'waiting' and x.waiting_for = 'lane' and x.waiting_key > w.lane order by x.waiting_key limit 1)
        from wanted w where w.lane is not null),
    open as materialized (select w.lane from wanted w where w.lane is not null and agent_lane_open(w.lane))
    select x.id, x.wait_number from agent_executions x join open o on x.waiting_key = o.lane
     where x.status = 'waiting' and x.waiting_for = 'lane' limit p_limit for no key update of x skip locked
  loop
    perform resume_agent_execution(e.id, e.wait_number,
      jsonb_build_object('event', 'LANE_FREED', 'data', '{}'::jsonb, 'timed_out', false));
  end loop;
  -- Threads whose holder has gone, and what is queued in those that are free.
  perform clean_agent_threads(interval '10 seconds', interval '5 minutes');    -- the courier is sooner, and logs it
  perform flush_agent_threads(p_limit);
  -- Whoever swept looks at the queue afterwards, so that a hint that was lost is made good.
  return query select * from ready_agent_executions(p_limit);
end $$;
