-- Executions: durable runs. The rules for claims, checkpoints, waits and ends live here, so that they
-- hold whoever writes; the Go package `executions` is a client of these functions.

create table agent_workers (
  id          uuid primary key default agent_uuid7(),
  name        text not null default '',
  kind        text not null default 'process' check (kind in ('process', 'outside')),
  ttl_seconds int not null default 30 check (ttl_seconds > 0),
  started_at  timestamptz not null default clock_timestamp(),
  expires_at  timestamptz not null
) with (fillfactor = 50);
create index agent_workers_expiry on agent_workers (expires_at);

create table agent_executions (
  id               uuid not null default agent_uuid7(),
  trace_id         text not null check (trace_id <> ''),
  surface          text not null check (surface in ('heartbeat', 'operate', 'chat', 'webhook', 'flow')),
  agent            text not null default 'flowpilot',
  flow             text not null check (flow <> ''),
  parent_id        uuid,
  awaited          boolean not null default false,
  thread_id        text,
  queue            text not null default 'background' check (queue in ('background', 'interactive')),
  priority         smallint not null default 2 check (priority between 1 and 4),
  status           text not null default 'pending'
                   check (status in ('pending', 'running', 'waiting', 'completed', 'failed', 'timeout', 'cancelled')),
  claimed_by       uuid,
  claim            bigint not null default 0,
  input            jsonb not null default '{}',
  variables        jsonb not null default '{}',
  waiting_for      text check (waiting_for in
                   ('response', 'agent', 'document', 'signature', 'test', 'event', 'delay', 'approval', 'lane')),
  waiting_key      text,
  waiting_until    timestamptz,
  waiting_data     jsonb,
  waiting_step     text,
  wait_number      int not null default 0,
  wake             int not null default 0,
  hinted_at        timestamptz not null default clock_timestamp(),
  attempt          int not null default 0,
  max_attempts     int not null default 5 check (max_attempts > 0),
  on_lost          text not null default 'resume' check (on_lost in ('resume', 'fail', 'hand_on')),
  progress_seconds int not null default 0 check (progress_seconds >= 0),
  result_type      text check (result_type in ('success', 'failure', 'timeout', 'cancelled')),
  result_summary   text not null default '',
  result           jsonb,
  error_message    text,
  failed_step      text,
  cancelled_by     text,
  cancel_reason    text,
  dedupe_key       text,
  created_at       timestamptz not null default clock_timestamp(),
  started_at       timestamptz,
  updated_at       timestamptz not null default clock_timestamp(),
  completed_at     timestamptz,
  primary key (id),
  constraint agent_executions_fence unique (id, claim),
  constraint agent_executions_dedupe unique (dedupe_key),
  constraint agent_executions_claimed check (claimed_by is null or status = 'running')
) with (fillfactor = 70);
create index agent_executions_trace on agent_executions (trace_id, id);
create index agent_executions_status on agent_executions (status, id);
create index agent_executions_surface on agent_executions (surface, id) where parent_id is null;
create index agent_executions_flow on agent_executions (flow, id);
create index agent_executions_parent on agent_executions (parent_id) where parent_id is not null;
create index agent_executions_ready on agent_executions (hinted_at)
  where claimed_by is null and status in ('pending', 'running');
create index agent_executions_claimed on agent_executions (claimed_by) where claimed_by is not null;
create index agent_executions_waiting_key on agent_executions (waiting_for, waiting_key) where status = 'waiting';
create index agent_executions_waiting_until on agent_executions (waiting_until) where status = 'waiting';
comment on column agent_executions.claim is 'The fencing token of the run: every durable write carries it.';
comment on column agent_executions.claimed_by is 'The worker that runs it; null means ready.';
comment on column agent_executions.attempt is 'Claims lost since the last checkpoint.';
comment on column agent_executions.awaited is 'Its parent waits for it: it is cancelled with the parent.';

create table agent_checkpoints (
  execution_id uuid not null,
  step         text not null,
  claim        bigint not null,
  fingerprint  text not null default '',
  failed       boolean not null default false,
  output       jsonb,
  created_at   timestamptz not null default clock_timestamp(),
  primary key (execution_id, step)
);
comment on column agent_checkpoints.failed is 'The step ended with an error, which is a result too; output describes it.';

create table agent_events (
  id           uuid primary key default agent_uuid7(),
  event        text not null check (event <> ''),
  key          text not null,
  data         jsonb not null default '{}',
  external_id  text,
  execution_id uuid,                         -- the execution that emitted it
  consumed_by  uuid,                         -- the execution whose wait took it
  created_at   timestamptz not null default clock_timestamp(),
  constraint agent_events_once unique (external_id)
);
create index agent_events_inbox on agent_events (event, key, id) where consumed_by is null;

create table agent_schedules (
  name        text primary key,
  flow        text not null,
  surface     text not null,
  cron        text not null,
  timezone    text not null,
  input       jsonb not null default '{}',
  next_run_at timestamptz not null,
  last_run_at timestamptz,
  updated_at  timestamptz not null default clock_timestamp()
);
create index agent_schedules_due on agent_schedules (next_run_at);

-- Workers -----------------------------------------------------------------------------------------

create function renew_agent_worker(p_worker uuid) returns boolean
language plpgsql volatile as $$
declare
  w agent_workers;
begin
  select x.* into w from agent_workers x where x.id = p_worker for no key update;
  if not found or w.expires_at <= clock_timestamp() then
    return false;
  end if;
  update agent_workers x set expires_at = clock_timestamp() + make_interval(secs => w.ttl_seconds) where x.id = p_worker;
  return true;
end $$;
comment on function renew_agent_worker is
  'Prolong a worker''s lease. False once it has ended: the worker has lost its claims and registers anew.';

-- The fence ---------------------------------------------------------------------------------------

create function fence_agent_execution(p_id uuid, p_claim bigint) returns boolean
language plpgsql volatile as $$
declare
  e record;
begin
  select x.status, x.claimed_by into e from agent_executions x
   where x.id = p_id and x.claim = p_claim for key share;
  if found and (e.status = 'waiting' or (e.status = 'running' and exists (
       select 1 from agent_workers w where w.id = e.claimed_by and w.expires_at > clock_timestamp()))) then
    return true;
  end if;
  raise exception 'claim % of execution % is stale: the run was handed on, ended, or its worker''s lease expired',
    p_claim, p_id using errcode = 'LK001', hint = 'Stop the work: it goes on elsewhere, or has ended.';
end $$;
comment on function fence_agent_execution is
  'Guard a write of a run: true while the claim is the execution''s live one, else LK001. A takeover waits for the '
  'transaction that called it.';

create function agent_checkpoints_fence() returns trigger language plpgsql as $$
begin
  perform fence_agent_execution(new.execution_id, new.claim);
  return new;
end $$;
create trigger agent_checkpoints_fence before insert or update on agent_checkpoints
  for each row execute function agent_checkpoints_fence();

-- The state machine -------------------------------------------------------------------------------

create function agent_executions_guard() returns trigger language plpgsql as $$
begin
  if tg_op = 'INSERT' then
    if new.status not in ('pending', 'running') then
      raise exception 'an execution begins pending or running, not %', new.status using errcode = 'LK002';
    end if;
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
  else
    new.waiting_for := null; new.waiting_key := null; new.waiting_until := null;
    new.waiting_data := null; new.waiting_step := null;
  end if;
  if new.status in ('completed', 'failed', 'timeout', 'cancelled') then
    new.claimed_by := null;
    new.completed_at := coalesce(new.completed_at, clock_timestamp());
    new.result_type := case new.status when 'completed' then 'success' when 'failed' then 'failure' else new.status end;
  end if;
  return new;
end $$;
create trigger agent_executions_begin before insert on agent_executions
  for each row execute function agent_executions_guard();
create trigger agent_executions_guard before update of status on agent_executions
  for each row when (old.status is distinct from new.status) execute function agent_executions_guard();

create function agent_executions_ended() returns trigger language plpgsql as $$
declare
  freed int;
begin
  freed := release_agent_locks(new.id);
  perform close_agent_activity(new.id, new.status);
  perform void_agent_approvals(new.id);
  insert into agent_events (event, key, data, external_id, execution_id)
  values ('AGENT_COMPLETED', new.id::text,
          jsonb_build_object('execution_id', new.id, 'status', new.status, 'result_type', new.result_type,
                             'result_summary', new.result_summary, 'locks_released', freed),
          'completed ' || new.id, new.id)
  on conflict (external_id) do nothing;      -- an end must not fail because somebody used this id
  if new.status = 'cancelled' and exists (select from agent_executions x where x.parent_id = new.id and x.awaited) then
    perform cancel_agent_execution(c.id, new.cancelled_by, 'its parent was cancelled: ' || coalesce(new.cancel_reason, ''))
       from (select x.id from agent_executions x
              where x.parent_id = new.id and x.awaited and x.status in ('pending', 'running', 'waiting')
              order by x.id) c;
  end if;
  return null;
end $$;
create trigger agent_executions_ended after update of status on agent_executions
  for each row when (old.status is distinct from new.status
                     and new.status in ('completed', 'failed', 'timeout', 'cancelled'))
  execute function agent_executions_ended();

-- Claims ------------------------------------------------------------------------------------------

create function claim_agent_execution(p_id uuid, p_worker uuid) returns setof agent_executions
language plpgsql volatile as $$
declare
  e agent_executions;
begin
  update agent_executions x
     set status = 'running', claimed_by = p_worker, claim = x.claim + 1, updated_at = clock_timestamp()
   where x.id = p_id and x.claimed_by is null and x.status in ('pending', 'running')
     and exists (select 1 from agent_workers w where w.id = p_worker and w.expires_at > clock_timestamp())
  returning x.* into e;
  if not found then
    return;
  end if;
  if e.claim > 1 then
    perform reown_agent_locks(e.id, e.id || '#' || e.claim);
    perform recover_agent_activity(e.id, e.claim);
  end if;
  return next e;
end $$;
comment on function claim_agent_execution is
  'Take a ready execution for a live worker: a new claim, its lanes re-owned, calls left in flight closed as unknown. '
  'No row when it is not ready.';

create function finish_agent_execution(p_id uuid, p_claim bigint, p_status text, p_summary text, p_result jsonb,
                                       p_error text, p_failed_step text) returns int
language plpgsql volatile as $$
begin
  if p_status is null or p_status not in ('completed', 'failed', 'timeout') then
    raise exception 'execution % cannot finish as %: give completed, failed or timeout', p_id, coalesce(p_status, 'null')
      using errcode = '22023';
  end if;
  -- For update: the end waits for writes of this claim that are under way, and none comes after it.
  perform 1 from agent_executions x where x.id = p_id and x.claim = p_claim for update;
  perform fence_agent_execution(p_id, p_claim);
  update agent_executions x
     set status = p_status, result_summary = coalesce(p_summary, ''), result = p_result,
         error_message = p_error, failed_step = p_failed_step
   where x.id = p_id and x.claim = p_claim;
  return (select (v.data ->> 'locks_released')::int from agent_events v where v.external_id = 'completed ' || p_id);
end $$;
comment on function finish_agent_execution is
  'End a run: completed, failed or timeout. Its lanes are freed and AGENT_COMPLETED is emitted in this transaction. '
  'Answers how many lanes were freed.';

create function cancel_agent_execution(p_id uuid, p_cancelled_by text, p_reason text) returns text
language plpgsql volatile as $$
declare
  e record;
begin
  select x.status, x.claimed_by into e from agent_executions x where x.id = p_id for update;
  if not found then
    return null;
  end if;
  if e.status in ('completed', 'failed', 'timeout', 'cancelled') then
    return e.status;
  end if;
  update agent_executions x
     set status = 'cancelled', claim = x.claim + 1, cancelled_by = p_cancelled_by, cancel_reason = p_reason
   where x.id = p_id;
  if e.claimed_by is not null then
    perform pg_notify('agent_cancel', p_id::text);
  end if;
  return 'cancelled';
end $$;
comment on function cancel_agent_execution is
  'End an execution now. Its claim is void at once, so a step in flight cannot be recorded. Answers the status it has '
  'afterwards, null for an unknown id.';

-- Waits -------------------------------------------------------------------------------------------

create function agent_wait_event(p_kind text) returns text language sql immutable as $$
  select case p_kind when 'response' then 'MESSAGE_RECEIVED' when 'agent' then 'AGENT_COMPLETED'
    when 'document' then 'DOCUMENT_UPLOADED' when 'signature' then 'SIGNATURE_COMPLETED'
    when 'test' then 'TEST_COMPLETED' when 'event' then 'EVENT_COMPLETED' when 'delay' then 'SCHEDULE_REACHED'
    when 'approval' then 'APPROVAL_DECIDED' when 'lane' then 'LANE_FREED' end
$$;

create function agent_wait_lock(p_kind text, p_key text) returns void language sql volatile as $$
  select pg_advisory_xact_lock(hashtextextended('wait ' || p_kind || ' ' || p_key, 0))
$$;

create function resume_agent_execution(p_id uuid, p_wait_number int, p_outcome jsonb) returns boolean
language plpgsql volatile as $$
declare
  e agent_executions;
begin
  select x.* into e from agent_executions x
   where x.id = p_id and x.status = 'waiting' and x.wait_number = p_wait_number for no key update;
  if not found then
    return false;
  end if;
  insert into agent_checkpoints (execution_id, step, claim, output)
  values (e.id, coalesce(e.waiting_step, 'wait ' || e.wait_number), e.claim, p_outcome)
  on conflict (execution_id, step) do nothing;
  update agent_executions x set status = 'running', wake = x.wake + 1, attempt = 0, hinted_at = 'epoch'
   where x.id = e.id;
  perform park_agent_locks(e.id, false);
  return true;
end $$;
comment on function resume_agent_execution is
  'End a wait with an outcome, which becomes the wait''s checkpoint. Exactly one caller per wait number gets true.';

create function agent_lane_open(p_lane text) returns boolean
language sql volatile as $$
  select not is_agent_lock_held(p_lane) and agent_lock_head(p_lane, clock_timestamp()) is null
$$;
comment on function agent_lane_open is 'Whether nobody holds a lane and nobody stands in its queue.';

create function agent_last_message(p_id uuid) returns uuid
language plpgsql volatile as $$
begin
  return coalesce((select m.id from agent_messages m where m.execution_id = p_id order by m.id desc limit 1), p_id);
end $$;
comment on function agent_last_message is
  'The execution''s own last message, or its beginning: what came before cannot answer it.';

create function park_agent_execution(p_id uuid, p_claim bigint, p_step text, p_kind text, p_key text,
                                     p_timeout interval, p_data jsonb) returns jsonb
language plpgsql volatile as $$
declare
  came record;
  outcome jsonb;
begin
  if agent_wait_event(p_kind) is null then
    raise exception 'wait for % is not known', coalesce(quote_literal(p_kind), 'null') using errcode = '22023';
  elsif p_step is null or p_key is null or (p_key = '' and p_kind <> 'delay') then
    raise exception 'wait for % needs a step and a key', p_kind using errcode = '22023';
  elsif p_timeout is null or p_timeout < interval '0' or p_timeout > interval '30 days' then
    raise exception 'timeout % of the wait for % is not valid: give up to 30 days', coalesce(p_timeout::text, 'null'), p_kind
      using errcode = '22023';
  end if;
  perform agent_wait_lock(p_kind, p_key);
  -- For update, because the claim is part of the key: two parks that shared the row would deadlock here.
  perform 1 from agent_executions x where x.id = p_id and x.claim = p_claim for update;
  perform fence_agent_execution(p_id, p_claim);
  -- A try before this one had an outcome at once, and its answer was lost on the way.
  select c.output into outcome from agent_checkpoints c where c.execution_id = p_id and c.step = p_step;
  if found then
    return outcome;
  end if;
  if p_kind not in ('delay', 'lane') then
    select v.id, v.event, v.data into came from agent_events v
     where v.event = agent_wait_event(p_kind) and v.key = p_key and v.consumed_by is null
       and (p_kind <> 'response' or v.id > agent_last_message(p_id))
     order by v.id limit 1 for update;
    if found then
      update agent_events v set consumed_by = p_id where v.id = came.id;
      outcome := jsonb_build_object('event', came.event, 'event_id', came.id, 'data', came.data, 'timed_out', false);
    end if;
  elsif p_kind = 'lane' then
    update agent_locks l set waited_until = greatest(l.waited_until, clock_timestamp() + p_timeout) where l.lane = p_key;
    if agent_lane_open(p_key)
       or exists (select from agent_locks l where l.lane = p_key and l.execution_id = p_id) then    -- it is its own
      outcome := jsonb_build_object('event', 'LANE_FREED', 'data', '{}'::jsonb, 'timed_out', false);
    end if;
  end if;
  if outcome is not null then
    insert into agent_checkpoints (execution_id, step, claim, output) values (p_id, p_step, p_claim, outcome);
    return outcome;
  end if;
  update agent_executions x
     set status = 'waiting', claim = x.claim + 1, wait_number = x.wait_number + 1, attempt = 0,
         waiting_for = p_kind, waiting_key = p_key, waiting_until = clock_timestamp() + p_timeout,
         waiting_data = p_data, waiting_step = p_step
   where x.id = p_id and x.claim = p_claim;
  perform park_agent_locks(p_id, true);
  return null;
end $$;
comment on function park_agent_execution is
  'Wait durably: null when the execution is now waiting and needs no process; an outcome when what it waits for has '
  'come already.';

create function deliver_agent_event(p_event text, p_key text, p_data jsonb default '{}', p_id text default null)
returns table (event_id uuid, execution_id uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  kind text;
  event_row uuid;
  waiter record;
  last_one uuid;
begin
  select k into kind from unnest(array['response', 'agent', 'document', 'signature', 'test', 'event', 'approval']) k
   where agent_wait_event(k) = p_event;
  if kind is null then
    raise exception 'event % is not known', coalesce(quote_literal(p_event), 'null') using errcode = '22023';
  elsif p_key is null or p_key = '' then
    raise exception 'event % needs a key', p_event using errcode = '22023';
  elsif p_id like 'completed %' then
    raise exception 'id % of an event is reserved for the end of an execution', quote_literal(p_id) using errcode = '22023';
  end if;
  perform agent_wait_lock(kind, p_key);
  insert into agent_events as v (event, key, data, external_id) values (p_event, p_key, coalesce(p_data, '{}'), p_id)
  on conflict (external_id) do nothing returning v.id into event_row;
  if event_row is null then
    return query select v.id, null::uuid from agent_events v where v.external_id = p_id;
    return;
  end if;
  for waiter in
    select x.id, x.wait_number from agent_executions x
     where x.status = 'waiting' and x.waiting_for = kind and x.waiting_key = p_key order by x.id for no key update
  loop
    perform resume_agent_execution(waiter.id, waiter.wait_number,
      jsonb_build_object('event', p_event, 'event_id', event_row, 'data', coalesce(p_data, '{}'), 'timed_out', false));
    last_one := waiter.id;
    return query select event_row, waiter.id;
  end loop;
  if last_one is null then
    return query select event_row, null::uuid;
  else
    update agent_events v set consumed_by = last_one where v.id = event_row;          -- once, however many woke
  end if;
end $$;
comment on function deliver_agent_event is
  'Record an event and resume every execution that waits for it; one that nobody waits for is kept for the first that '
  'will. The same p_id twice counts once. Rows: the event, and each execution it woke (null when none).';

create function wake_agent_parents(p_child uuid) returns int
language plpgsql volatile as $$
declare
  came record;
  waiter record;
  n int := 0;
begin
  perform agent_wait_lock('agent', p_child::text);
  select v.id, v.event, v.data, v.consumed_by into came from agent_events v where v.external_id = 'completed ' || p_child;
  if not found then
    return 0;
  end if;
  for waiter in
    select x.id, x.wait_number from agent_executions x
     where x.status = 'waiting' and x.waiting_for = 'agent' and x.waiting_key = p_child::text order by x.id for no key update
  loop
    perform resume_agent_execution(waiter.id, waiter.wait_number,
      jsonb_build_object('event', came.event, 'event_id', came.id, 'data', came.data, 'timed_out', false));
    update agent_events v set consumed_by = waiter.id where v.id = came.id;
    n := n + 1;
  end loop;
  return n;
end $$;
comment on function wake_agent_parents is
  'Resume who waits for an execution that has ended. The end itself only records the event, so that ends never wait '
  'for one another; whoever ended it calls this afterwards, and the sweep does where nobody could.';

-- The sweep ---------------------------------------------------------------------------------------

create function lose_agent_claims(p_worker uuid) returns int
language plpgsql volatile as $$
declare
  e record;
  spent int;
  n int := 0;
begin
  for e in
    select x.id, x.claim, x.attempt, x.max_attempts, x.on_lost from agent_executions x
     where x.claimed_by = p_worker order by x.id for update
  loop
    n := n + 1;
    spent := case when exists (select 1 from agent_checkpoints c where c.execution_id = e.id and c.claim = e.claim)
                  then 1 else e.attempt + 1 end;
    if e.on_lost = 'fail' then
      update agent_executions x set status = 'failed', claim = x.claim + 1, attempt = spent,
             error_message = 'the worker''s lease expired' where x.id = e.id;
    elsif spent >= e.max_attempts then
      update agent_executions x set status = 'failed', claim = x.claim + 1, attempt = spent,
             error_message = format('given up after %s workers were lost without a checkpoint between', spent)
       where x.id = e.id;
    else
      update agent_executions x set claimed_by = null, claim = x.claim + 1, attempt = spent, wake = x.wake + 1,
             hinted_at = 'epoch', updated_at = clock_timestamp() where x.id = e.id;
    end if;
  end loop;
  return n;
end $$;

create function give_up_agent_claim(p_id uuid, p_claim bigint) returns void
language plpgsql volatile as $$
begin
  update agent_executions x
     set claimed_by = null, claim = x.claim + 1, wake = x.wake + 1, hinted_at = 'epoch', updated_at = clock_timestamp(),
         attempt = case when exists (select 1 from agent_checkpoints c where c.execution_id = x.id and c.claim = p_claim)
                        then 0 else x.attempt end
   where x.id = p_id and x.claim = p_claim and x.status = 'running' and x.claimed_by is not null;
  if found then
    perform release_agent_locks(p_id);
  end if;
end $$;
comment on function give_up_agent_claim is
  'Hand a run back unfinished, at a shutdown: ready again, no attempt spent, its lanes free for others meanwhile.';

create function sweep_agent_executions(p_limit int default 500)
returns table (id uuid, wake int, queue text, priority smallint, trace_id text, reason text)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  w record;
  e record;
begin
  if not pg_try_advisory_xact_lock(hashtextextended('sweep executions', 0)) then
    return;
  end if;
  -- Executions before workers, in every path: lock the worker only to be sure that it is not renewed now.
  for w in
    select x.id from agent_workers x where x.expires_at < clock_timestamp() order by x.expires_at
     for update skip locked
  loop
    perform lose_agent_claims(w.id);
    delete from agent_workers x where x.id = w.id;
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
    select x.id, x.claim from agent_executions x
     where x.claimed_by is not null and x.status = 'running' and x.progress_seconds > 0
       and x.updated_at < clock_timestamp() - make_interval(secs => x.progress_seconds)
       and not exists (select 1 from agent_checkpoints c where c.execution_id = x.id
                        and c.created_at > clock_timestamp() - make_interval(secs => x.progress_seconds))
     order by x.id for update skip locked
  loop
    update agent_executions x set status = 'failed', claim = x.claim + 1,
           error_message = 'no progress within progress_seconds' where x.id = e.id;
  end loop;
  -- Timers.
  for e in
    select x.id, x.wait_number, x.waiting_for from agent_executions x
     where x.status = 'waiting' and x.waiting_until <= clock_timestamp()
     order by x.waiting_until limit p_limit for no key update skip locked
  loop
    perform resume_agent_execution(e.id, e.wait_number, jsonb_build_object(
      'event', agent_wait_event(e.waiting_for), 'data', '{}'::jsonb, 'timed_out', e.waiting_for <> 'delay'));
  end loop;
  -- Lanes that have become free.
  for e in
    select x.id, x.wait_number from agent_executions x
     where x.status = 'waiting' and x.waiting_for = 'lane' and agent_lane_open(x.waiting_key)
     order by x.id limit p_limit for no key update skip locked
  loop
    perform resume_agent_execution(e.id, e.wait_number,
      jsonb_build_object('event', 'LANE_FREED', 'data', '{}'::jsonb, 'timed_out', false));
  end loop;
  -- Ends that nobody could tell the parent of.
  perform wake_agent_parents(t.child) from (
    select v.execution_id as child
      from agent_executions x join agent_events v on v.external_id = 'completed ' || x.waiting_key
     where x.status = 'waiting' and x.waiting_for = 'agent' order by v.execution_id limit p_limit) t;
  -- Ready rows whose hint was lost, or that have none yet.
  return query
  with ready as (
    select x.id from agent_executions x
     where x.claimed_by is null and x.status in ('pending', 'running')
       and x.hinted_at < clock_timestamp() - interval '5 seconds'
     order by x.hinted_at limit p_limit for no key update skip locked)
  update agent_executions x set hinted_at = clock_timestamp()
    from ready where x.id = ready.id
  returning x.id, x.wake, x.queue, x.priority, x.trace_id, 'ready'::text;
end $$;
comment on function sweep_agent_executions is
  'Take claims from workers whose lease ended, fire due timers, resume waits for lanes, and name the ready executions '
  'that want a hint. One caller at a time does the work; the others return at once.';
