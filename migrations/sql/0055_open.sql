-- What a client does in a transaction that it leaves open holds up its own work, and nobody else's.
--
-- A batch of events waited for an id that another transaction had inserted and not committed, and so did all that were in it. Who inserts an
-- event with an id now holds a shared lock for it until its transaction ends, whichever way it is inserted, and a batch leaves out what it cannot lock
-- for itself alone. Ids share a few slots, so that a transaction which inserts many takes few locks; two ids of one slot cost no more than a
-- statement of its own for one of them.
--
-- What still may meet a lock waits for it for a moment only, and then fails with SQLSTATE 55P03. The process tries again, and holds no
-- connection in between.

create function agent_event_id_class() returns int language sql immutable parallel safe as $$ select 1818324581 $$;
comment on function agent_event_id_class is 'The first key of the advisory locks of event ids.';

create function agent_event_id_slot(p_id text) returns int language sql immutable parallel safe as $$
  select (hashtextextended(p_id, 0) & 2047)::int
$$;
comment on function agent_event_id_slot is 'The second key of the advisory lock of an event id: ids share 2,048 of them.';

create function agent_events_lock_id() returns trigger language plpgsql as $$
begin
  perform pg_advisory_xact_lock_shared(agent_event_id_class(), agent_event_id_slot(new.external_id));
  return new;
end $$;
comment on function agent_events_lock_id is 'Hold the id of an event until the transaction ends, so that no batch waits for it.';
create trigger agent_events_lock_id before insert on agent_events
  for each row when (new.external_id is not null and new.execution_id is null) execute function agent_events_lock_id();

-- As before, but it leaves out what has an id that another transaction holds.
create or replace function hand_agent_events(p_events text[], p_keys text[], p_data jsonb[], p_ids text[], p_worker uuid, p_background int,
                                  p_interactive int, p_skip text[] default '{}')
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean, steps text[], claims bigint[],
               prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan
set jit = off set lock_timeout = '50ms' as $$
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
  since_ timestamptz[] := '{}';
  several boolean := false;         -- an event wakes more than one
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
                then pg_try_advisory_xact_lock(hashtextextended('wait ' || t.kind || ' ' || t.key, 0))
                 and (t.id is null or pg_try_advisory_xact_lock(agent_event_id_class(), agent_event_id_slot(t.id))) else false end
      from (select u.*, row_number() over (partition by u.kind, u.key order by u.n) as nth_of_key,
                   row_number() over (partition by u.id order by u.n) as nth_of_id
              from unnest(kinds, p_keys, p_ids) with ordinality u (kind, key, id, n)) t
     order by t.n);
  for w in
    select l.*, t.n from unnest(kinds, p_keys, here) with ordinality t (kind, key, here, n)
     cross join lateral (
       select x.id, coalesce(x.waiting_step, 'wait ' || x.wait_number) as step, x.claim, x.priority, x.updated_at,
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
    since_ := since_ || w.updated_at;
    several := several or takers[w.n] is not null;
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
  insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
  select t.id, t.at_, t.under_, jsonb_build_object('event', p_events[t.n], 'event_id', rows_[t.n], 'data', coalesce(p_data[t.n], '{}'),
                                                   'timed_out', false), kinds[t.n], p_keys[t.n], t.since_
    from unnest(woken, by_, at_, under_, since_) t (id, n, at_, under_, since_) where t.id is not null
  on conflict (execution_id, step) do nothing;
  if several then
    perform link_agent_wakes(rows_[u.n], u.ids)
       from (select t.n, array_agg(t.id) as ids from unnest(woken, by_) t (id, n) where t.id is not null group by t.n having count(*) > 1) u;
  end if;
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

-- None of these waits for a lock as a rule: they pass over what is locked.
alter function begin_agent_executions(text[], text[], text[], boolean[], uuid, int, int, text[], jsonb[], text[], text[], uuid[], boolean[], boolean[],
  text[], int[], text[], int[], int[]) set lock_timeout = '50ms';
alter function record_agent_steps(uuid[], bigint[], text[], text[], boolean[], jsonb[], jsonb[]) set lock_timeout = '50ms';
alter function close_agent_executions(uuid[], bigint[], text[], text[], jsonb[], text[], text[], jsonb[], boolean[], text[], text[], boolean[],
  jsonb[]) set lock_timeout = '50ms';
alter function park_agent_executions(uuid[], bigint[], text[], text[], text[], float8[], jsonb[], jsonb[]) set lock_timeout = '50ms';

-- Cancels ---------------------------------------------------------------------------------------------
--
-- A cancel waits for the lock of its execution, which a step in a transaction (StepTx) has until it ends, and the notification that would end it
-- leaves with the cancel's commit. So a cancel is requested first, in a transaction of its own, and the process that runs the step stops it.
-- What does not stop delays nobody: the cancel answers, and the request is completed when the lock is free: by that process, or by the sweep.

create table agent_cancel_requests (
  execution_id  uuid primary key,
  cancelled_by  text not null,
  cancel_reason text not null default '',
  requested_at  timestamptz not null default clock_timestamp()
);
comment on table agent_cancel_requests is 'Executions that are to be cancelled as soon as no transaction has them locked.';

create function agent_cancel_line(p_id uuid, p_reason text) returns table (id uuid, reason text)
language plpgsql stable set enable_seqscan = off set jit = off as $$
begin
  return query
  with recursive line (id, reason) as (
    select x.id, coalesce(p_reason, '') from agent_executions x where x.id = p_id and x.completed_at is null
    union all
    select x.id, case when l.reason like 'its parent was cancelled: %' then l.reason else 'its parent was cancelled: ' || l.reason end
      from line l join agent_executions x on x.parent_id = l.id
     where x.awaited and x.status in ('pending', 'running', 'waiting'))
  select l.id, l.reason from line l;
end $$;
comment on function agent_cancel_line is 'An execution that has not ended and the children it waits for, which end with it, each with the reason of its cancel.';

create function lock_agent_line(p_ids uuid[]) returns boolean
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  lanes text[];
begin
  if cardinality(p_ids) <> cardinality(array(select x.id from agent_executions x where x.id = any (p_ids) order by x.id for update skip locked)) then
    return false;
  end if;
  lanes := array(select l.lane from agent_locks l where l.execution_id = any (p_ids)
                 union select n.lane from agent_lock_loans n where n.lender = any (p_ids));
  return cardinality(lanes) = cardinality(array(select l.lane from agent_locks l where l.lane = any (lanes) order by l.lane for update skip locked));
end $$;
comment on function lock_agent_line is 'Lock executions and their lanes without waiting: false where another transaction has locked one of them.';

create function request_agent_cancel(p_id uuid, p_cancelled_by text, p_reason text, p_always boolean default false) returns boolean
language plpgsql volatile set lock_timeout = '50ms' as $$
declare
  line uuid[];
  reasons text[];
begin
  select array_agg(l.id), array_agg(l.reason) into line, reasons from agent_cancel_line(p_id, p_reason) l;
  if line is null or not p_always and lock_agent_line(line) then
    return false;
  end if;
  insert into agent_cancel_requests (execution_id, cancelled_by, cancel_reason)
  select t.id, coalesce(p_cancelled_by, ''), t.reason from unnest(line, reasons) t (id, reason) order by t.id on conflict do nothing;
  perform pg_notify('agent_cancel', t.id::text) from unnest(line) t (id);
  return true;
end $$;
comment on function request_agent_cancel is
  'Note that an execution is to be cancelled, with the children it waits for, and tell the processes that run them, where another transaction has '
  'one of them locked, or always. False, and nothing is noted, where none has, or it has ended. Commit it before the cancel.';

create or replace function cancel_agent_execution(p_id uuid, p_cancelled_by text, p_reason text) returns text
language plpgsql volatile set lock_timeout = '50ms' as $$
declare
  e record;
begin
  for try in 1 .. 10 loop                                    -- what others write of it takes a moment
    exit when lock_agent_line(array(select l.id from agent_cancel_line(p_id, '') l));
    if try = 10 then
      perform request_agent_cancel(p_id, p_cancelled_by, p_reason, true);
      raise notice 'execution % cannot be cancelled yet: another transaction has it locked, or a child or a lane of it', p_id
        using hint = 'The cancel is requested, and completed within seconds of that transaction''s end.';
      return (select x.status from agent_executions x where x.id = p_id);
    end if;
    perform pg_sleep(0.005);
  end loop;
  select x.status, x.claimed_by, x.flow, x.trace_id into e from agent_executions x where x.id = p_id for update;
  if not found then
    return null;
  end if;
  delete from agent_cancel_requests r where r.execution_id = p_id;
  if e.status in ('completed', 'failed', 'timeout', 'cancelled') then
    return e.status;
  end if;
  update agent_executions x
     set status = 'cancelled', claim = x.claim + 1, cancelled_by = p_cancelled_by, cancel_reason = p_reason
   where x.id = p_id;
  if e.claimed_by is not null then
    perform pg_notify('agent_cancel', p_id::text);
  end if;
  if p_cancelled_by = 'admin' and coalesce(p_reason, '') not like 'its parent was cancelled: %' then
    insert into agent_activity (trace_id, kind, agent, surface, skill_name, purpose, status, input, output, finished_at, duration_ms)
    values (agent_trace_id('op'), 'note', 'admin', 'operate', 'cancel_execution', coalesce(p_reason, ''), 'success',
            jsonb_build_object('execution', p_id, 'flow', e.flow, 'reason', p_reason),
            jsonb_build_object('was', e.status, 'trace_id', e.trace_id), clock_timestamp(), 0);
  end if;
  return 'cancelled';
end $$;
comment on function cancel_agent_execution is
  'End an execution now. Its claim is void at once, so a step in flight cannot be recorded. Answers the status it has afterwards, null for an '
  'unknown id. One that has not ended is locked by another transaction, such as a step of StepTx: the cancel is requested, its process is told '
  'when this commits, and it is completed when that transaction has ended. It never waits: what else is locked is SQLSTATE 55P03.';

create function complete_agent_cancel(p_id uuid) returns boolean
language plpgsql volatile set lock_timeout = '50ms' as $$
declare
  r record;
begin
  select c.cancelled_by, c.cancel_reason into r from agent_cancel_requests c where c.execution_id = p_id;
  if not found then
    return true;
  elsif not lock_agent_line(array(select l.id from agent_cancel_line(p_id, '') l)) then
    return false;
  end if;
  perform cancel_agent_execution(p_id, r.cancelled_by, r.cancel_reason);
  delete from agent_cancel_requests c where c.execution_id = p_id;
  return true;
end $$;
comment on function complete_agent_cancel is
  'Cancel an execution that a cancel was requested for, if no transaction has it locked any more: else false, and nothing is waited for.';

-- As before, and a worker outside hears of a cancel that is requested. Its lock lives until the cancel is completed.
create or replace function beat_agent_locks(p_lock_ids text[], p_id uuid default null)
returns table (lock_id text, execution_id uuid, trace_id text, live boolean, expires_at timestamptz, status text, cancel_requested boolean)
language plpgsql volatile as $$
#variable_conflict use_column
begin
  perform 1 from agent_workers k
    where k.lock_id = any (p_lock_ids) and (p_id is null or k.execution_id = p_id) and k.expires_at > clock_timestamp()
    order by k.id for no key update;
  return query
  with beaten as (
    update agent_workers k set expires_at = clock_timestamp() + make_interval(secs => k.ttl_seconds)
      from agent_executions x
     where k.lock_id = any (p_lock_ids) and (p_id is null or k.execution_id = p_id) and k.expires_at > clock_timestamp()
       and x.id = k.execution_id and x.claimed_by = k.id
    returning k.id, k.expires_at),
  told as (                                                  -- once: with that the lock is over
    delete from agent_workers k using agent_executions x
     where k.lock_id = any (p_lock_ids) and (p_id is null or k.execution_id = p_id) and k.expires_at > clock_timestamp()
       and x.id = k.execution_id and x.status = 'cancelled' and x.claim = k.claim + 1
    returning k.id)
  select a.id, k.execution_id, x.trace_id, b.id is not null or t.id is not null, coalesce(b.expires_at, case when t.id is not null then k.expires_at end),
         x.status, t.id is not null or b.id is not null and exists (select from agent_cancel_requests c where c.execution_id = k.execution_id)
    from unnest(p_lock_ids) with ordinality a (id, n)
    left join agent_workers k on k.lock_id = a.id and (p_id is null or k.execution_id = p_id)
    left join agent_executions x on x.id = k.execution_id
    left join beaten b on b.id = k.id
    left join told t on t.id = k.id
   order by a.n;
end $$;

-- Parents -----------------------------------------------------------------------------------------------
--
-- A child that took its parent's thread while the parent waited, and not from the parent, kept it when the parent's time was up: whatever the
-- parent said then stood in the queue behind a child that might wait for days.

create function recall_agent_thread(p_parent uuid, p_child uuid) returns void
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  l record;
  claim_ bigint;
begin
  for l in                                                   -- of the child, or lent by it
    select a.lane, a.ttl_seconds from agent_locks a
     where a.lane in (select c.lane from agent_locks c where c.execution_id = p_child
                      union all select n.lane from agent_lock_loans n where n.lender = p_child and n.depth = 1)
       and a.lane like 'thread:%'
       and (exists (select from agent_executions x where x.id = p_parent and x.thread_id = substr(a.lane, 8))
            or exists (select from agent_messages m where m.execution_id = p_parent and m.thread_id = substr(a.lane, 8)))
     order by a.lane for update of a
  loop
    select x.claim into claim_ from agent_executions x where x.id = p_parent;
    delete from agent_lock_loans n where n.lane = l.lane;
    perform hand_agent_lock(l.lane, p_parent, claim_, false, l.ttl_seconds);
    perform agent_lane_freed(l.lane);
  end loop;
end $$;
comment on function recall_agent_thread is
  'Give a parent, which does not wait any longer for a child that goes on, the threads that it speaks in and that the child has taken meanwhile.';

-- As before, and the thread comes back with what was lent.
create or replace function resume_agent_execution_for(p_id uuid, p_wait_number int, p_outcome jsonb, p_worker uuid) returns boolean
language plpgsql volatile as $$
declare
  e record;
  late boolean;                     -- its time has passed, and the child goes on
begin
  if p_worker is null then
    select x.claim, x.waiting_step, x.waiting_for, x.waiting_key, x.outside, x.updated_at into e from agent_executions x
     where x.id = p_id and x.status = 'waiting' and x.wait_number = p_wait_number for no key update;
  else                                                       -- a claim is part of the key
    select x.claim, x.waiting_step, x.waiting_for, x.waiting_key, x.outside, x.updated_at into e from agent_executions x
     where x.id = p_id and x.status = 'waiting' and x.wait_number = p_wait_number for update;
  end if;
  if not found then
    return false;
  end if;
  insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
  values (p_id, coalesce(e.waiting_step, 'wait ' || p_wait_number), e.claim, p_outcome, e.waiting_for, e.waiting_key, e.updated_at)
  on conflict (execution_id, step) do nothing;
  update agent_executions x
     set status = 'running', wake = x.wake + 1, attempt = 0, claimed_by = p_worker, claim = x.claim + (p_worker is not null)::int
   where x.id = p_id;
  if e.waiting_for = 'agent' then                           -- a child that still runs acts under lanes of its own from here on
    update agent_executions x set inherits = false, awaited = false
     where x.id = agent_uuid(e.waiting_key) and x.parent_id = p_id and (x.inherits or x.awaited) and x.completed_at is null;
    late := found;
    perform recall_agent_loans(p_id);
    if late then
      perform recall_agent_thread(p_id, agent_uuid(e.waiting_key));
    end if;
  end if;
  if exists (select from agent_locks l where l.execution_id = p_id) then
    perform park_agent_locks(p_id, false);
  end if;
  return true;
end $$;

create function agent_child_outcome(p_child uuid) returns jsonb language sql stable as $$
  select jsonb_build_object('variables', x.variables, 'result', x.result, 'error_message', x.error_message) from agent_executions x where x.id = p_child
$$;
comment on function agent_child_outcome is 'What a worker outside learns of an execution that it waited for, beside what the event of its end says.';

-- Both as before, and who waits outside learns what the child has come to.
create or replace function tell_agent_parents(p_child uuid, p_wait boolean) returns int
language plpgsql volatile as $$
declare
  came record;
  waiters uuid[];
  id_ uuid;
  number int;
  outside boolean;
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
    select x.wait_number, x.outside into number, outside from agent_executions x where x.id = id_;
    perform resume_agent_execution(id_, number, jsonb_build_object('event', came.event, 'event_id', came.id, 'data',
      came.data || case when outside then agent_child_outcome(p_child) else '{}' end, 'timed_out', false));
    update agent_events v set consumed_by = id_ where v.id = came.id;
  end loop;
  delete from agent_untold_ends u
   where u.execution_id = p_child and (p_wait or not exists (
           select from agent_executions x
            where x.waiting_for = 'agent' and x.waiting_key = p_child::text and (x.status = 'waiting') is true));
  return cardinality(waiters);
end $$;

create or replace function unlock_agent_execution(p_id uuid, p_lock_id text, p_status text, p_summary text default '', p_error text default null,
                                       p_kind text default null, p_key text default null, p_timeout interval default null,
                                       p_result jsonb default null)
returns text language plpgsql volatile as $$
declare
  claim_ bigint;
  outcome jsonb;
  step_ text;
begin
  if p_status is null or p_status not in ('completed', 'failed', 'waiting') then
    raise exception 'a lock is released with status completed, failed or waiting, not %', coalesce(quote_literal(p_status), 'null')
      using errcode = '22023';
  elsif p_status = 'waiting' and (p_kind is null or p_kind not in
       ('response', 'agent', 'document', 'signature', 'test', 'event', 'delay', 'approval')) then
    raise exception 'a run can wait for response, agent, document, signature, test, event, delay or approval, not %',
      coalesce(quote_literal(p_kind), 'null') using errcode = '22023';
  end if;
  perform 1 from agent_workers k where k.lock_id = p_lock_id and k.execution_id = p_id for update;
  if p_status = 'waiting' then
    p_key := coalesce(case p_kind when 'delay' then p_id::text when 'agent' then lower(p_key) else p_key end,
                      case when p_kind = 'response' then (select x.thread_id from agent_executions x where x.id = p_id) end, '');
    perform agent_wait_lock(p_kind, p_key);
  end if;
  perform 1 from agent_executions x where x.id = p_id for update;
  claim_ := agent_lock_claim(p_id, p_lock_id);               -- after the lock: its time may have run out meanwhile
  perform fence_agent_execution(p_id, coalesce(claim_, -1));
  if p_status = 'waiting' then
    select 'wait ' || p_kind || ' ' || (x.wait_number + 1) into step_ from agent_executions x where x.id = p_id;
    outcome := park_agent_execution(p_id, claim_, step_, p_kind, p_key, p_timeout, null);
    if outcome is not null and p_kind = 'agent' then
      update agent_checkpoints c set output = jsonb_set(outcome, '{data}', outcome -> 'data' || agent_child_outcome(agent_uuid(p_key)))
       where c.execution_id = p_id and c.step = step_;
    end if;
    if outcome is not null then                              -- it has come already: ready again
      update agent_executions x
         set claimed_by = null, claim = x.claim + 1, wait_number = x.wait_number + 1, attempt = 0, updated_at = clock_timestamp()
       where x.id = p_id;
    end if;
  else
    perform finish_agent_execution(p_id, claim_, p_status, p_summary, p_result, p_error, null);
  end if;
  delete from agent_workers k where k.lock_id = p_lock_id;
  return (select x.status from agent_executions x where x.id = p_id);
end $$;

-- Refused writes of workers outside ---------------------------------------------------------------------

create function record_stale_agent_write(p_id uuid, p_lock_id text, p_write text, p_step text default '', p_output jsonb default null) returns boolean
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  most constant int := 5;           -- rows of one lock, and of an execution ten times as many: the last one counts the rest
  lock_ text;
  n int;
  of_lock int;
  last_ uuid;
begin
  if p_write is null or p_write not in ('checkpoint', 'beat', 'release', 'message') then
    raise exception 'a refused write is a checkpoint, a beat, a release or a message, not %', coalesce(quote_literal(left(p_write, 40)), 'null')
      using errcode = '22023';
  end if;
  perform pg_advisory_xact_lock(hashtextextended('stale write ' || p_id, 0));
  lock_ := left(encode(sha256(convert_to(coalesce(p_lock_id, ''), 'UTF8')), 'hex'), 12);       -- the lock itself is a secret
  select count(*), count(*) filter (where a.input ->> 'lock' = lock_) into n, of_lock
    from agent_activity a where a.execution_id = p_id and a.skill_name = 'stale_write' and a.input ? 'lock';
  if of_lock < most and n < 10 * most then
    insert into agent_activity (trace_id, execution_id, kind, agent, surface, skill_name, status, step, thread_id, finished_at, input, output, error_class,
                                error_message)
    select x.trace_id, x.id, 'note', x.agent, x.surface, 'stale_write', 'error', coalesce(left(p_step, 500), ''), x.thread_id, clock_timestamp(),
           jsonb_build_object('rejected_write', p_write, 'step', coalesce(left(p_step, 500), ''), 'lock', lock_,
             'claim', (select k.claim from agent_workers k where k.lock_id = p_lock_id and k.execution_id = x.id)),
           jsonb_build_object('status', '', 'error', '', 'output', case when length(p_output::text) <= 16384 then p_output end),
           'stale', 'the lock is void: the write was refused'
      from agent_executions x where x.id = p_id;
    return found;
  end if;
  select a.id into last_ from agent_activity a
   where a.execution_id = p_id and a.skill_name = 'stale_write' and a.input ? 'lock' and (of_lock = 0 or a.input ->> 'lock' = lock_)
   order by a.id desc limit 1;
  update agent_activity a
     set input = a.input || jsonb_build_object('more', coalesce((a.input ->> 'more')::int, 0) + 1, 'last_write', p_write, 'last_at', clock_timestamp())
   where a.id = last_;
  return true;
end $$;
comment on function record_stale_agent_write is
  'Record that a write of a worker outside was refused, because its lock is void: a stale_write of the activity log. Of one lock the first five have '
  'a row each, and the fifth counts the rest (more). False for an unknown execution. A refusal (LK001) rolls back the transaction it is raised in: '
  'call this in the next one. What is given as output is kept as it is: without secrets.';

-- As before, and it says what a worker outside wanted to write, and how often.
create or replace function agent_why_log(p_trace text, p_most int, p_rows int) returns table (part text, reason agent_reason)
language plpgsql stable as $$
begin
  return query
  with log as materialized (
    select a.id, a.created_at, a.execution_id, a.kind, a.skill_name, a.status, a.error_class, a.error_message, a.step, a.model, a.token_usage, a.cost_usd,
           case when a.error_class = 'stale' then a.input end as input
      from agent_activity a where a.trace_id = p_trace order by a.created_at limit p_rows),
  wrong as (
    select 'trouble' as part, 1 as rank, l.created_at as at,
           (l.created_at,
            case when l.error_class = 'stale' then 'stale' else 'unknown' end,
            case when l.error_class = 'stale'
                 then format('a write under %s was refused: %s%s%s', coalesce('claim ' || (l.input ->> 'claim'), 'a void lock'), l.input ->> 'rejected_write',
                        coalesce(' in step ' || nullif(l.input ->> 'step', ''), ''), coalesce(', and ' || (l.input ->> 'more') || ' more', ''))
                 else format('nobody knows whether %s took effect: %s', l.skill_name, left(l.error_message, 300)) end,
            case when l.execution_id is null then 'trace ' || p_trace else 'execution ' || l.execution_id end,
            'step ' || case when l.error_class = 'stale' then coalesce(l.input ->> 'step', '') else l.step end,
            p_trace, l.execution_id, jsonb_strip_nulls(jsonb_build_object('activity', l.id, 'skill', coalesce(l.input ->> 'rejected_write', l.skill_name),
              'claim', l.input -> 'claim')))::agent_reason as reason
      from log l where l.error_class = 'stale' and l.skill_name = 'stale_write' or l.status = 'unknown'
     order by l.created_at, l.id limit p_most),
  models as (
    select m.model, count(*) as calls, min(m.created_at) as at, sum(agent_tokens(m.token_usage, 'prompt_tokens')) as prompt,
           sum(agent_tokens(m.token_usage, 'completion_tokens')) as completion, sum(agent_tokens(m.token_usage, 'total_tokens')) as tokens, sum(nullif(m.cost_usd, 'NaN')) as usd
      from log m where m.kind = 'model' group by m.model),
  spent as (
    select 'spend', 2, m.at,
           (m.at, 'spend', format('%s: %s, %s tokens, $%s', coalesce(nullif(m.model, ''), 'a model without a name'),
              case when m.calls = 1 then '1 call' else m.calls || ' calls' end, to_char(m.tokens, 'FM999,999,999,999,990'), m.usd),
            'trace ' || p_trace, 'model ' || m.model, p_trace, null, jsonb_build_object('calls', m.calls, 'prompt_tokens', m.prompt,
              'completion_tokens', m.completion, 'tokens', m.tokens, 'cost_usd', m.usd))::agent_reason
      from models m order by m.usd desc, m.tokens desc, m.model limit p_most),
  beyond as (
    select 'spend', 3, null::timestamptz,
           (null, 'more', format('… and more than %s actions, which were not looked through', to_char(p_rows, 'FM999,999,990')), '', '', p_trace, null,
            '{}')::agent_reason
      from log having count(*) >= p_rows)
  select u.part, u.reason from (select * from wrong union all select * from spent union all select * from beyond) u order by u.rank, u.at, (u.reason).to_ref;
end $$;
