-- What many executions do at the same time costs each of them less: what follows an end is done once for all that a statement ends,
-- and a start, a step, a wait and an event share a statement with those of others. What is said for 0017 holds here: each function for
-- several does what the one for one does, each row under its own fence, waits for no lock of somebody else, and leaves what is not plain.

-- Ids ------------------------------------------------------------------------------------------------

-- As before, in a form that is expanded where it is called. Of the 60 bits of time the last 12 are the part of a millisecond.
create or replace function agent_uuid7(p_at timestamptz default clock_timestamp()) returns uuid
language sql volatile parallel safe as $$
  select (overlay(lpad(to_hex(floor(extract(epoch from p_at) * 4096000)::bigint), 15, '0') placing '7' from 13 for 0)
          || right(replace(gen_random_uuid()::text, '-', ''), 16))::uuid
$$;

-- Ends -----------------------------------------------------------------------------------------------

-- As before, and it marks what has to follow once the statement is done: most changes of executions have nothing to follow.
create or replace function agent_executions_guard() returns trigger language plpgsql as $$
begin
  if tg_op = 'INSERT' then
    if new.status not in ('pending', 'running') then
      raise exception 'an execution begins pending or running, not %', new.status using errcode = 'LK002';
    end if;
    return new;
  elsif old.status = new.status then
    return new;
  end if;
  if not (old.status, new.status) in (
       ('pending', 'running'), ('pending', 'cancelled'),
       ('running', 'waiting'), ('running', 'completed'), ('running', 'failed'), ('running', 'timeout'),
       ('running', 'cancelled'),
       ('waiting', 'running'), ('waiting', 'timeout'), ('waiting', 'failed'), ('waiting', 'cancelled')) then
    raise exception 'execution % cannot go from % to %', old.id, old.status, new.status using errcode = 'LK002';
  end if;
  new.updated_at := clock_timestamp();
  if new.status = 'running' then
    new.started_at := coalesce(new.started_at, clock_timestamp());
  end if;
  if new.status = 'waiting' then
    new.claimed_by := null;
    new.waiting_until := coalesce(new.waiting_until, clock_timestamp() + interval '7 days');  -- no wait is for ever
  elsif num_nonnulls(new.waiting_for, new.waiting_key, new.waiting_until, new.waiting_data, new.waiting_step) > 0 then
    new.waiting_for := null; new.waiting_key := null; new.waiting_until := null;
    new.waiting_data := null; new.waiting_step := null;
  end if;
  if new.status in ('completed', 'failed', 'timeout', 'cancelled') then
    new.claimed_by := null;
    new.completed_at := coalesce(new.completed_at, clock_timestamp());
    new.result_type := case new.status when 'completed' then 'success' when 'failed' then 'failure' else new.status end;
  end if;
  if new.claimed_by is null or new.flow = 'external' or new.flow like 'external:%' then
    perform set_config('lanekeeper.changed', 'yes', true);
  end if;
  return new;
end $$;

-- What follows, once for each statement.
create function agent_executions_changed() returns trigger
language plpgsql set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
declare
  over uuid[];                      -- those that have ended
  odd uuid[];                       -- those of them that have more than a result
  seen record;
  has record;
  e agent_executions;
  freed jsonb := '{}';              -- by execution: how many lanes its end freed
begin
  perform set_config('lanekeeper.changed', '', true);
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
         array(select r.execution_id from agent_requests r where r.execution_id = any (over) and r.status = 'pending') as requests,
         array(select b.execution_id from agent_budget_reservations b where b.execution_id = any (over)) as budgets,
         array(select x.waiting_key from agent_executions x
                where x.waiting_for = 'agent' and x.waiting_key = any (over::text[]) and (x.status = 'waiting') is true) as awaited
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
    insert into agent_untold_ends (execution_id) select distinct t.key::uuid from unnest(has.awaited) t (key) order by 1 on conflict do nothing;
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

drop trigger agent_executions_ended on agent_executions;
create trigger agent_executions_changed after update on agent_executions
  referencing old table as was new table as changed for each statement
  when (current_setting('lanekeeper.changed', true) <> '') execute function agent_executions_changed();
drop function agent_executions_ended();

-- Given back without an end or a wait.
create function agent_place_freed() returns trigger language plpgsql as $$
begin
  if exists (select from agent_limits l where (l.kind = 'flow' and l.name = new.flow) or (l.kind = 'surface' and l.name = new.surface)) then
    perform pg_notify('agent_ready', '');
  end if;
  return null;
end $$;
create trigger agent_place_freed after update of claimed_by on agent_executions
  for each row when (old.claimed_by is not null and new.claimed_by is null and new.status = old.status)
  execute function agent_place_freed();

-- As 0013 has it, once for each statement.
create or replace function agent_events_start_automations() returns trigger language plpgsql as $$
declare
  new agent_events;
  names text[];
  emitter record;
  made int;
  n int := 0;
begin
  if not exists (select from agent_automations a where a.enabled and a.trigger = 'event') then
    return null;
  end if;
  for new in select c.* from came c order by c.id loop
    -- EVENT_COMPLETED says by its key what happened, so that is a name too.
    names := case when new.event = 'EVENT_COMPLETED' then array[new.event, new.key] else array[new.event] end;
    continue when not exists (select from agent_automations a where a.enabled and a.trigger = 'event' and a.event = any (names));
    select x.flow, x.trace_id into emitter from agent_executions x where x.id = new.execution_id;
    continue when emitter.flow = 'automation';               -- else the end of a run would cause the next one, without end
    insert into agent_automation_runs (automation_id, cause, scheduled_for, event_id, payload, status, trace_id)
    select a.id, 'event', new.created_at, new.id,
           jsonb_build_object('event', new.event, 'key', new.key, 'data', new.data), 'due',
           coalesce(nullif(current_setting('lanekeeper.trace_id', true), ''), emitter.trace_id, '')
      from agent_automations a
     where a.enabled and a.trigger = 'event' and a.event = any (names)
       -- And the end of a flow that an automation started would start the next flow.
       and (a.flow = '' or new.execution_id is null or not agent_from_automation(new.execution_id))
     order by a.id
    on conflict (automation_id, event_id) do nothing;
    get diagnostics made = row_count;
    n := n + made;
  end loop;
  if n > 0 then
    perform pg_notify('agent_automations', '');
  end if;
  return null;
end $$;
drop trigger agent_events_start_automations on agent_events;
create trigger agent_events_start_automations after insert on agent_events
  referencing new table as came for each statement execute function agent_events_start_automations();

-- The fence -------------------------------------------------------------------------------------------

-- Functions that have locked the executions and looked at their claims say so for the insert that follows: it is not done again for each
-- row. The fence is against writers that are late, not against ones that lie.
drop trigger agent_checkpoints_fence on agent_checkpoints;
create trigger agent_checkpoints_fence before insert or update on agent_checkpoints
  for each row when (coalesce(current_setting('lanekeeper.fenced', true), '') <> 'yes')
  execute function agent_checkpoints_fence();

-- And whether the agent is paused: asked once, under the same lock.
drop trigger agent_executions_held_begin on agent_executions;
create trigger agent_executions_held_begin before insert on agent_executions
  for each row when (new.claimed_by is not null and new.surface not in ('operate', 'chat')
                     and coalesce(current_setting('lanekeeper.unpaused', true), '') <> 'yes')
  execute function agent_executions_held();
drop trigger agent_executions_held on agent_executions;
create trigger agent_executions_held before update of claimed_by on agent_executions
  for each row when (old.claimed_by is null and new.claimed_by is not null and new.surface not in ('operate', 'chat')
                     and coalesce(current_setting('lanekeeper.unpaused', true), '') <> 'yes')
  execute function agent_executions_held();

-- Events ----------------------------------------------------------------------------------------------

create or replace function hand_agent_events(p_events text[], p_keys text[], p_data jsonb[], p_ids text[], p_worker uuid, p_background int,
                                  p_interactive int, p_skip text[] default '{}')
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean, steps text[], claims bigint[],
               prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  kinds text[] := '{}';
  here boolean[] := '{}';           -- by event: delivered by this statement
  rows_ uuid[] := '{}';             -- by event: its row; null when it had come before
  takers uuid[] := array_fill(null::uuid, array[cardinality(p_events)]);   -- by event: the last execution that it wakes
  woken uuid[] := '{}';             -- the executions that go on, side by side: by which event, and what they waited at
  by_ int[] := '{}';
  at_ text[] := '{}';
  under_ bigint[] := '{}';
  lines text[] := '{}';             -- queue, surface and flow of those that may be claimed here; null for the others
  ranks int[] := '{}';
  came uuid[];
  taken uuid[] := '{}';             -- those of them that are claimed
  places jsonb := jsonb_build_object('background', p_background, 'interactive', p_interactive);
  next jsonb := '{}';               -- by queue, flow and surface
  steady boolean;                   -- the agent is not paused, and nobody pauses it meanwhile
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
    select l.*, t.n from unnest(kinds, p_keys, here) with ordinality t (kind, key, here, n)
     cross join lateral (
       select x.id, coalesce(x.waiting_step, 'wait ' || x.wait_number) as step, x.claim, x.priority,
              case when not x.outside then x.queue || ' ' || x.surface || ' ' || x.flow end as line from agent_executions x
        where x.waiting_for = t.kind and x.waiting_key = t.key and (x.status = 'waiting') is true
          and (t.kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false))
          for update skip locked) l
     where t.here
  loop
    woken := woken || w.id;
    by_ := by_ || w.n::int;
    at_ := at_ || w.step;
    under_ := under_ || w.claim;
    lines := lines || w.line;
    ranks := ranks || w.priority::int;
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
  rows_ := array(select case when t.here then agent_uuid7() end from unnest(here) with ordinality t (here, n) order by t.n);
  with v as (
    insert into agent_events as v (id, event, key, data, external_id, consumed_by)
    select t.row_, t.event, t.key, coalesce(t.data, '{}'), t.id, t.taker
      from unnest(rows_, p_events, p_keys, p_data, p_ids, takers) t (row_, event, key, data, id, taker)
     where t.row_ is not null order by t.id, t.key
    on conflict (external_id) do nothing
    returning v.id)
  select array_agg(v.id) into came from v;
  if coalesce(cardinality(came), 0) < (select count(t.id) from unnest(rows_) t (id)) then    -- some came before
    rows_ := array(select case when t.id = any (came) then t.id end from unnest(rows_) with ordinality t (id, n) order by t.n);
    woken := array(select case when rows_[t.n] is not null then t.id end from unnest(woken, by_) with ordinality t (id, n, i) order by t.i);
  end if;
  steady := pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0));
  if p_worker is not null and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp()) then
    steady := steady and not exists (select from agent_pauses p where p.resumed_at is null);
    for w in
      select t.id, t.line, split_part(t.line, ' ', 1) as queue from unnest(woken, lines, ranks) t (id, line, rank)
       where t.id is not null and t.line is not null order by t.rank, t.id
    loop
      continue when (places ->> w.queue)::int <= 0 or not steady and split_part(w.line, ' ', 2) not in ('operate', 'chat');
      if not next ? w.line then
        next := next || jsonb_build_object(w.line, agent_next_in_line(w.queue, split_part(w.line, ' ', 3), split_part(w.line, ' ', 2), p_skip));
      end if;
      if (next ->> w.line)::boolean then
        taken := taken || w.id;
        places := places || jsonb_build_object(w.queue, (places ->> w.queue)::int - 1);
      end if;
    end loop;
  end if;
  perform set_config('lanekeeper.fenced', 'yes', true),      -- their rows are locked, and they wait
          set_config('lanekeeper.unpaused', 'yes', true);
  insert into agent_checkpoints (execution_id, step, claim, output)
  select t.id, t.at_, t.under_, jsonb_build_object('event', p_events[t.n], 'event_id', rows_[t.n], 'data', coalesce(p_data[t.n], '{}'),
                                                   'timed_out', false)
    from unnest(woken, by_, at_, under_) t (id, n, at_, under_) where t.id is not null
  on conflict (execution_id, step) do nothing;
  return query
  with x as (
    update agent_executions x
       set status = 'running', wake = x.wake + 1, attempt = 0,
           claimed_by = case when x.id = any (taken) then p_worker end, claim = x.claim + (x.id = any (taken))::int
     where x.id = any (woken)
    returning x.*)
  select by_[array_position(woken, x.id)], rows_[by_[array_position(woken, x.id)]], x.id, x.queue,
         case when x.claimed_by = p_worker then x::agent_executions end,
         coalesce(x.claimed_by = p_worker and (
           x.claim > 2 * x.wait_number + 1 or exists (select from agent_activity_open o where o.execution_id = x.id)), false),
         c.steps, c.claims, c.prints, c.failed, c.outputs, c.times
    from x
    left join lateral (
      select array_agg(k.step) as steps, array_agg(k.claim) as claims, array_agg(k.fingerprint) as prints, array_agg(k.failed) as failed,
             array_agg(k.output) as outputs, array_agg(k.created_at) as times
        from agent_checkpoints k where k.execution_id = x.id and x.claimed_by = p_worker) c on true
  union all
  select t.n::int, coalesce(t.event_id, v.id), null, null, null, false, null, null, null, null, null, null
    from unnest(p_ids, rows_, here) with ordinality t (id, event_id, here, n)
    left join lateral (select r.id from agent_events r where t.here and t.event_id is null and r.external_id = t.id limit 1) v on true
   where not exists (select from unnest(woken, by_) o (id, n) where o.n = t.n and o.id is not null);
  perform set_config('lanekeeper.fenced', '', true), set_config('lanekeeper.unpaused', '', true);
end $$;

create or replace function hand_agent_event(p_event text, p_key text, p_data jsonb, p_id text, p_worker uuid, p_background int, p_interactive int,
                                 p_skip text[] default '{}')
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean, steps text[], claims bigint[],
               prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  kind constant text := check_agent_delivery(p_event, p_key, p_data, p_id);
  waiter record;
  ids uuid[] := '{}';
  mine boolean;
  lanes boolean;
  steady boolean;                   -- nobody pauses the agent meanwhile
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
  -- The pause is looked at by another statement, which sees every one that had the lock before.
  steady := pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0));
  perform pg_advisory_xact_lock(hashtextextended('wait ' || kind || ' ' || p_key, 0));
  -- Executions before the event, which is written once, with who takes it. Of several the one that comes first in the queue is next.
  for waiter in
    select x.id, x.wait_number, x.queue, x.flow, x.surface, x.outside, x.claim, coalesce(x.waiting_step, 'wait ' || x.wait_number) as step
      from agent_executions x
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
  select p_worker is not null and not waiter.outside and case waiter.queue when 'background' then p_background else p_interactive end > 0
         and (waiter.surface in ('operate', 'chat') or steady and not exists (select from agent_pauses p where p.resumed_at is null))
         and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp())
         -- Nearly always nothing is ready, and nothing is limited: then nobody is before it in the queue.
         and (waiter.flow <> all (p_skip) and not exists (select from agent_limits)
              and not exists (select from agent_executions x where x.claimed_by is null and x.status in ('pending', 'running')
                                                               and not x.outside and x.queue = waiter.queue)
              or agent_next_in_line(waiter.queue, waiter.flow, waiter.surface, p_skip)),
         exists (select from agent_locks l where l.execution_id = waiter.id) or exists (select from agent_lock_loans k where k.lender = waiter.id)
    into mine, lanes;
  perform set_config('lanekeeper.fenced', 'yes', true), set_config('lanekeeper.unpaused', case when mine then 'yes' else '' end, true);
  insert into agent_checkpoints (execution_id, step, claim, output) values (waiter.id, waiter.step, waiter.claim, p_data)
  on conflict (execution_id, step) do nothing;
  return query
  with x as (
    update agent_executions x
       set status = 'running', wake = x.wake + 1, attempt = 0, claimed_by = case when mine then p_worker end, claim = x.claim + mine::int
     where x.id = waiter.id
    returning x.*)
  select 1, event_id, x.id, x.queue, case when x.claimed_by = p_worker then x::agent_executions end,
         coalesce(x.claimed_by = p_worker and (
           lanes or x.claim > 2 * x.wait_number + 1 or exists (select from agent_activity_open o where o.execution_id = x.id)), false),
         c.steps, c.claims, c.prints, c.failed, c.outputs, c.times
    from x
    left join lateral (
      select array_agg(k.step) as steps, array_agg(k.claim) as claims, array_agg(k.fingerprint) as prints, array_agg(k.failed) as failed,
             array_agg(k.output) as outputs, array_agg(k.created_at) as times
        from agent_checkpoints k where k.execution_id = x.id and x.claimed_by = p_worker) c on true;
  perform set_config('lanekeeper.fenced', '', true), set_config('lanekeeper.unpaused', '', true);
  if lanes then
    perform park_agent_locks(waiter.id, false);
  end if;
end $$;

-- Steps -----------------------------------------------------------------------------------------------

create function record_agent_steps(p_ids uuid[], p_claims bigint[], p_steps text[], p_prints text[], p_failed boolean[], p_outputs jsonb[],
                                   p_variables jsonb[])
returns table (n int, verdict text)
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  showing uuid[] := array(select t.id from unnest(p_ids, p_variables) t (id, variables) where t.variables is not null);
  locked uuid[];
  live uuid[];
  under bigint[];
  good boolean[];                   -- by step
begin
  -- What is written beside the steps needs a stronger lock. Locked rows are passed over; the claims are looked at by another statement,
  -- and the clock that ends a lease is read after the locks.
  locked := array(select x.id from agent_executions x where x.id = any (p_ids) and x.id <> all (showing) for key share skip locked);
  if showing <> '{}' then
    locked := locked || array(select x.id from agent_executions x where x.id = any (showing) for no key update skip locked);
  end if;
  select array_agg(x.id), array_agg(x.claim) into live, under from agent_executions x
   where x.id = any (locked) and (x.status = 'running') is true
     and exists (select from agent_workers w where w.id = x.claimed_by and w.expires_at > clock_timestamp());
  good := array(select coalesce(t.claim = under[array_position(live, t.id)], false)
                  from unnest(p_ids, p_claims) with ordinality t (id, claim, n) order by t.n);
  if showing <> '{}' then
    update agent_executions x
       set variables = (select t.variables from unnest(p_ids, p_variables, good) with ordinality t (id, variables, good, n)
                         where t.id = x.id and t.good and t.variables is not null order by t.n desc limit 1)
     where x.id = any (showing) and x.id = any (live)
       and exists (select from unnest(p_ids, p_variables, good) t (id, variables, good) where t.id = x.id and t.good and t.variables is not null);
  end if;
  perform set_config('lanekeeper.fenced', 'yes', true);
  insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
  select t.id, t.step, t.claim, t.print, t.failed, t.output
    from unnest(p_ids, p_claims, p_steps, p_prints, p_failed, p_outputs, good) t (id, claim, step, print, failed, output, good)
   where t.good
  on conflict (execution_id, step) do nothing;
  perform set_config('lanekeeper.fenced', '', true);
  return query
  select t.n::int, case when t.good then 'kept' else 'alone' end from unnest(good) with ordinality t (good, n);
end $$;
comment on function record_agent_steps is
  'Record the results of steps of several executions, each under its claim, as an insert into agent_checkpoints would. verdict alone: nothing was written, because the row is locked or its claim is not live; record it by itself.';

-- Waits -----------------------------------------------------------------------------------------------

create function park_agent_executions(p_ids uuid[], p_claims bigint[], p_steps text[], p_kinds text[], p_keys text[], p_seconds float8[],
                                      p_data jsonb[], p_variables jsonb[])
returns table (n int, verdict text)
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
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
                                      and v.key = p_keys[array_position(p_ids, x.id)] and v.consumed_by is null)));
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
comment on function park_agent_executions is
  'Let several executions wait, each under its claim, as park_agent_execution does. verdict alone: nothing was written, because what it waits for may be there, it has lanes, its row is locked, or it is not valid; park it by itself.';

-- Starts ----------------------------------------------------------------------------------------------

create function start_agent_executions(p_traces text[], p_surfaces text[], p_agents text[], p_flows text[], p_parents uuid[], p_awaited boolean[],
  p_inherits boolean[], p_threads text[], p_queues text[], p_priorities int[], p_inputs jsonb[], p_on_lost text[], p_max_attempts int[],
  p_progress int[], p_here boolean[], p_worker uuid, p_background int, p_interactive int, p_skip text[])
returns table (n int, execution agent_executions)
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  ids uuid[] := array(select agent_uuid7() from generate_series(1, cardinality(p_flows)));
  places jsonb := jsonb_build_object('background', p_background, 'interactive', p_interactive);
  next jsonb := '{}';
  line text;
  held_back boolean := true;        -- the agent is paused, or is about to be
  mine boolean[] := array_fill(false, array[cardinality(p_flows)]);
begin
  if p_worker is not null and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp()) then
    if pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0)) then
      held_back := exists (select from agent_pauses p where p.resumed_at is null);
    end if;
    for i in 1 .. cardinality(p_flows) loop
      mine[i] := p_here[i];
      continue when p_here[i] or (places ->> p_queues[i])::int <= 0 or p_flows[i] = 'external' or p_flows[i] like 'external:%'
                 or held_back and p_surfaces[i] not in ('operate', 'chat');
      line := p_queues[i] || ' ' || p_surfaces[i] || ' ' || p_flows[i];
      if not next ? line then
        next := next || jsonb_build_object(line, agent_next_in_line(p_queues[i], p_flows[i], p_surfaces[i], p_skip));
      end if;
      if (next ->> line)::boolean then
        mine[i] := true;
        places := places || jsonb_build_object(p_queues[i], (places ->> p_queues[i])::int - 1);
      end if;
    end loop;
  end if;
  perform set_config('lanekeeper.unpaused', case when held_back then '' else 'yes' end, true);
  return query
  with x as (
    insert into agent_executions as x (id, trace_id, surface, agent, flow, parent_id, awaited, inherits, thread_id, queue, priority, status, claimed_by,
           claim, started_at, input, on_lost, max_attempts, progress_seconds)
    select t.id, t.trace, t.surface, t.agent, t.flow, t.parent, t.awaited, t.inherits, t.thread, t.queue, t.priority,
           case when t.mine then 'running' else 'pending' end, case when t.mine then p_worker end, t.mine::int,
           case when t.mine then clock_timestamp() end, t.input, t.on_lost, t.max_attempts, t.progress
      from unnest(ids, p_traces, p_surfaces, p_agents, p_flows, p_parents, p_awaited, p_inherits, p_threads, p_queues, p_priorities, p_inputs,
                  p_on_lost, p_max_attempts, p_progress, mine)
           with ordinality t (id, trace, surface, agent, flow, parent, awaited, inherits, thread, queue, priority, input, on_lost, max_attempts, progress, mine, n)
     order by t.n
    returning x.*)
  select array_position(ids, x.id), x::agent_executions from x;
  perform set_config('lanekeeper.unpaused', '', true);
end $$;
comment on function start_agent_executions is
  'Start several executions. Those that are to run here begin claimed by the worker; so do those that it would take next, as far as so many places are free. The others are pending.';

-- Ends of several -------------------------------------------------------------------------------------

-- As finish_agent_executions, and it answers the rows of those for which they are wanted.
create function end_agent_executions(p_ids uuid[], p_claims bigint[], p_statuses text[], p_summaries text[], p_results jsonb[],
  p_errors text[], p_failed_steps text[], p_variables jsonb[], p_wanted boolean[])
returns table (n int, ended boolean, execution agent_executions)
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
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
  locked := array(select x.id from agent_executions x where x.id = any (p_ids) and x.claim = p_claims[array_position(p_ids, x.id)]
                     for update skip locked);
  -- Lanes and budgets have an order of their own, which is kept for one execution at a time: those that have any end by themselves.
  plain := array(select x.id from agent_executions x
    where x.id = any (locked) and (x.status = 'running') is true
      and exists (select from agent_workers w where w.id = x.claimed_by and w.expires_at > clock_timestamp())
      and not exists (select from agent_locks l where l.execution_id = x.id)
      and not exists (select from agent_lock_loans k where k.lender = x.id)
      and not exists (select from agent_budget_reservations b where b.execution_id = x.id));
  return query
  with u as (
    update agent_executions x
       set (status, result_summary, result, error_message, failed_step, variables) = (
         select p_statuses[a.i], coalesce(p_summaries[a.i], ''), p_results[a.i], p_errors[a.i], p_failed_steps[a.i],
                coalesce(p_variables[a.i], x.variables)
           from (select array_position(p_ids, x.id) as i offset 0) a)
     where x.id = any (plain)
    returning x.*)
  select array_position(p_ids, u.id), true, case when p_wanted[array_position(p_ids, u.id)] then u::agent_executions end from u;
end $$;
comment on function end_agent_executions is
  'Finish several executions, each under its claim, as finish_agent_execution does. Of one that is not in the answer nothing was written, because it has lanes or budgets, its row is locked, or its claim is not live; finish it by itself.';

-- Recovery --------------------------------------------------------------------------------------------

-- As before, but what was lost in the middle of nothing has nothing to be asked for.
create or replace function take_agent_executions(p_worker uuid, p_queue text, p_limit int, p_skip text[] default '{}')
returns table (execution agent_executions, held boolean, missed boolean,
               steps text[], claims bigint[], prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off as $$
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
      held := held or execution.claim > 2 * execution.wait_number + 1 and exists (
        select from agent_activity a
         where a.execution_id = execution.id and a.status = 'unknown' and a.error_class = 'interrupted');
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
  'claim_agent_executions, with all that each has recorded. held where lanes or calls of an earlier claim are open, or a call was interrupted. missed: a row of its own, some were locked by others; ask again soon.';
