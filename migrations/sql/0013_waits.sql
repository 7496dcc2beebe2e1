-- Waits: eight kinds, each with the event that ends it, a standard and a longest time. And what is asked of people: a
-- request for documents, a signature or a test is a row, whose id is the key of the wait for it.

create function agent_wait_standard(p_kind text) returns interval language sql immutable as $$
  select case p_kind when 'response' then interval '24 hours' when 'agent' then interval '1 hour' when 'delay' then null
    else interval '7 days' end
$$;
comment on function agent_wait_standard is 'How long a wait of a kind lasts when nothing is said; null: it has to be said.';

create function agent_wait_longest(p_kind text) returns interval language sql immutable as $$
  select case p_kind when 'response' then interval '7 days' when 'agent' then interval '24 hours' else interval '30 days' end
$$;
comment on function agent_wait_longest is 'How long a wait of a kind may last.';

create function agent_uuid(p_text text) returns uuid language sql immutable as $$
  select case when p_text ~ '^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$' then p_text::uuid end
$$;

create table agent_requests (
  id           uuid primary key default agent_uuid7(),
  kind         text not null check (kind in ('document', 'signature', 'test')),
  execution_id uuid not null,
  trace_id     text not null,
  thread_id    text,
  title        text not null default '',
  details      jsonb not null default '{}',
  items        text[] not null default '{}',               -- the documents asked for
  received     jsonb not null default '{}',                -- document: its url
  answer       jsonb,                                      -- what ended a signature or a test
  status       text not null default 'pending' check (status in ('pending', 'completed', 'closed')),
  created_at   timestamptz not null default clock_timestamp(),
  completed_at timestamptz,
  check (kind <> 'document' or cardinality(items) > 0)
);
create index agent_requests_execution on agent_requests (execution_id);
create index agent_requests_pending on agent_requests (id) where status = 'pending';
create index agent_requests_thread on agent_requests (thread_id, id) where thread_id is not null;
comment on table agent_requests is
  'What was asked of people: documents, a signature, a test. Its id is the key of the event that answers it. Closed: the '
  'execution ended before it was answered.';

create function close_agent_requests(p_execution_id uuid) returns void language sql volatile as $$
  update agent_requests r set status = 'closed', completed_at = clock_timestamp()
   where r.execution_id = p_execution_id and r.status = 'pending'
$$;

create function record_agent_document(p_key text, p_event uuid, p_data jsonb) returns boolean
language plpgsql volatile as $$
declare
  r agent_requests;
  doc jsonb;
  name_ text;
begin
  select x.* into r from agent_requests x where x.id = agent_uuid(p_key) and x.kind = 'document' for update;
  if not found then
    return false;
  end if;
  for doc in select * from jsonb_array_elements(
      case when jsonb_typeof(p_data -> 'documents') = 'array' then p_data -> 'documents' else jsonb_build_array(p_data) end) loop
    continue when jsonb_typeof(doc) <> 'object';
    name_ := coalesce(doc ->> 'document', doc ->> 'name', case when cardinality(r.items) = 1 then r.items[1] end);
    if name_ = any (r.items) and r.status = 'pending' then
      r.received := r.received || jsonb_build_object(name_, coalesce(doc ->> 'url', ''));
    end if;
  end loop;
  update agent_requests x
     set received = r.received,
         status = case when x.status = 'pending' and r.received ?& r.items then 'completed' else x.status end,
         completed_at = case when x.status = 'pending' and r.received ?& r.items then clock_timestamp() else x.completed_at end
   where x.id = r.id;
  return true;
end $$;
comment on function record_agent_document is
  'Note an uploaded document of a request: data is {document, url}, or {documents: [{document, url}]}. False when the key is not that of a '
  'request.';

create function agent_document_outcome(p_key text) returns jsonb
language plpgsql volatile as $$
declare
  r agent_requests;
  came record;
begin
  select x.* into r from agent_requests x where x.id = agent_uuid(p_key) and x.kind = 'document';
  if found then
    return case when r.received ?& r.items then jsonb_build_object('event', 'DOCUMENT_UPLOADED', 'timed_out', false,
      'data', jsonb_build_object('documents', r.received, 'documentUrls',
                (select jsonb_agg(r.received -> i order by n) from unnest(r.items) with ordinality u (i, n)))) end;
  end if;
  select v.id, v.data into came from agent_events v          -- asked for by other means: one event is all
   where v.event = 'DOCUMENT_UPLOADED' and v.key = p_key and v.consumed_by is null order by v.id limit 1;
  if not found then
    return null;
  end if;
  return jsonb_build_object('event', 'DOCUMENT_UPLOADED', 'event_id', came.id, 'data', came.data, 'timed_out', false);
end $$;
comment on function agent_document_outcome is 'How a wait for documents ends, null as long as one is missing.';

create or replace function fence_agent_execution(p_id uuid, p_claim bigint) returns boolean
language plpgsql volatile as $$
declare
  e record;
begin
  select x.status, x.claimed_by into e from agent_executions x
   where x.id = p_id and x.claim = p_claim for key share;
  if found and (e.status in ('waiting', 'pending') or (e.status = 'running' and exists (
       select 1 from agent_workers w where w.id = e.claimed_by and w.expires_at > clock_timestamp()))) then
    return true;
  end if;
  raise exception 'claim % of execution % is stale: the run was handed on, ended, or its worker''s lease expired',
    p_claim, p_id using errcode = 'LK001', hint = 'Stop the work: it goes on elsewhere, or has ended.';
end $$;

create or replace function park_agent_execution(p_id uuid, p_claim bigint, p_step text, p_kind text, p_key text,
                                     p_timeout interval, p_data jsonb) returns jsonb
language plpgsql volatile as $$
declare
  came record;
  outcome jsonb;
  unsent uuid;
begin
  if agent_wait_event(p_kind) is null then
    raise exception 'wait for % is not known', coalesce(quote_literal(p_kind), 'null') using errcode = '22023';
  elsif p_step is null or p_key is null or (p_key = '' and p_kind <> 'delay') then
    raise exception 'wait for % needs a step and a key', p_kind using errcode = '22023';
  elsif p_kind = 'delay' and p_timeout is null then
    raise exception 'a delay needs its time' using errcode = '22023';
  end if;
  p_timeout := coalesce(p_timeout, agent_wait_standard(p_kind));
  if p_timeout < interval '0' or p_timeout > agent_wait_longest(p_kind) then
    raise exception 'timeout % of the wait for % is not valid: give up to %', p_timeout, p_kind, agent_wait_longest(p_kind)
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
  if p_kind = 'document' then
    outcome := agent_document_outcome(p_key);
  elsif p_kind not in ('delay', 'lane') then
    if p_kind = 'response' then
      unsent := agent_queued_message(p_id, p_key);
    end if;
    select v.id, v.event, v.data into came from agent_events v
     where v.event = agent_wait_event(p_kind) and v.key = p_key and v.consumed_by is null and unsent is null
       and (p_kind <> 'response' or v.created_at > agent_last_sent(p_id, p_key))
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
         waiting_for = p_kind, waiting_key = p_key, waiting_step = p_step,
         -- A question that still stands in the queue cannot be answered: the time runs from when it leaves.
         waiting_until = clock_timestamp() + case when unsent is null then p_timeout else interval '30 days' end,
         waiting_data = case when unsent is null then p_data
                             else coalesce(p_data, '{}') || jsonb_build_object('queued_message', unsent,
                                    'timeout_seconds', extract(epoch from p_timeout)) end
   where x.id = p_id and x.claim = p_claim;
  perform park_agent_locks(p_id, true);
  return null;
end $$;

create or replace function resume_agent_execution(p_id uuid, p_wait_number int, p_outcome jsonb) returns boolean
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
  update agent_executions x set status = 'running', wake = x.wake + 1, attempt = 0,
         hinted_at = case when e.outside then timestamptz 'infinity' else 'epoch' end
   where x.id = e.id;
  if e.waiting_for = 'agent' then                           -- a child that still runs acts under lanes of its own from here on
    update agent_executions x set inherits = false
     where x.id = agent_uuid(e.waiting_key) and x.parent_id = e.id and x.inherits and x.completed_at is null;
    perform recall_agent_loans(e.id);
  end if;
  perform park_agent_locks(e.id, false);
  return true;
end $$;

create or replace function deliver_agent_event(p_event text, p_key text, p_data jsonb default '{}', p_id text default null)
returns table (event_id uuid, execution_id uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  kind text;
  event_row uuid;
  waiter record;
  last_one uuid;
  outcome jsonb;
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
  outcome := jsonb_build_object('event', p_event, 'event_id', event_row, 'data', coalesce(p_data, '{}'), 'timed_out', false);
  if kind = 'document' and record_agent_document(p_key, event_row, coalesce(p_data, '{}')) then
    update agent_events v set consumed_by = r.execution_id from agent_requests r
     where v.id = event_row and r.id = agent_uuid(p_key);
    outcome := agent_document_outcome(p_key);               -- null as long as one is missing
  elsif kind in ('signature', 'test') then
    update agent_requests r set status = 'completed', completed_at = clock_timestamp(), answer = coalesce(p_data, '{}')
     where r.id = agent_uuid(p_key) and r.kind = kind and r.status = 'pending';
  end if;
  for waiter in
    select x.id, x.wait_number from agent_executions x
     where x.status = 'waiting' and x.waiting_for = kind and x.waiting_key = p_key and outcome is not null
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

create or replace function agent_executions_ended() returns trigger language plpgsql as $$
declare
  freed int;
begin
  freed := release_agent_locks(new.id);
  perform close_agent_activity(new.id, new.status);
  perform void_agent_approvals(new.id);
  perform close_agent_requests(new.id);
  if new.status = 'cancelled' then
    perform withdraw_agent_messages(new.id);
  end if;
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

create or replace function lose_agent_claims(p_worker uuid) returns int
language plpgsql volatile as $$
declare
  e record;
  spent int;
  n int := 0;
begin
  for e in
    select x.id, x.claim, x.attempt, x.max_attempts, x.on_lost, x.outside from agent_executions x
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
             hinted_at = case when e.outside then timestamptz 'infinity' else 'epoch' end, updated_at = clock_timestamp() where x.id = e.id;
    end if;
  end loop;
  return n;
end $$;

create or replace function sweep_agent_executions(p_limit int default 500)
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
  -- Timers. Who waits for a child without having said how long waits as long as the child has reason to wait itself.
  for e in
    select x.id, x.wait_number, x.waiting_for, x.waiting_key, x.waiting_data from agent_executions x
     where x.status = 'waiting' and x.waiting_until <= clock_timestamp()
     order by x.waiting_until limit p_limit for no key update skip locked
  loop
    if e.waiting_for = 'agent' and e.waiting_data ->> 'patient' = 'true' then
      update agent_executions x set waiting_until = c.waiting_until + interval '1 minute'
        from agent_executions c
       where x.id = e.id and c.id = agent_uuid(e.waiting_key) and c.status = 'waiting' and c.waiting_until > clock_timestamp();
      continue when found;
    end if;
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
  -- Threads whose holder has gone, and what is queued in those that are free.
  perform clean_agent_threads();
  perform flush_agent_thread(q.thread_id)
     from (select distinct m.thread_id from agent_messages m where m.status = 'queued' order by m.thread_id limit p_limit) q;
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

drop function agent_last_message(uuid);

-- Time travel -------------------------------------------------------------------------------------

alter table agent_executions add column forked_from uuid;
alter table agent_executions add column forked_step text;
comment on column agent_executions.forked_from is 'The execution whose recorded steps, up to forked_step, this one began with.';

create function fork_agent_execution(p_id uuid, p_step text, p_input jsonb, p_trace_id text) returns uuid
language plpgsql volatile as $$
declare
  was agent_executions;
  cut timestamptz;
  fork uuid;
begin
  select x.* into was from agent_executions x where x.id = p_id;
  if not found then
    return null;
  end if;
  if p_step is not null and p_step <> '' then
    select c.created_at into cut from agent_checkpoints c where c.execution_id = p_id and c.step = p_step;
    if not found then
      raise exception 'execution % has not recorded a step %', p_id, quote_literal(p_step) using errcode = '22023';
    end if;
  end if;
  -- Its claim begins at 1, so that the first who claims it loads what it begins with.
  insert into agent_executions (trace_id, surface, agent, flow, thread_id, queue, priority, status, claim, input, on_lost,
         max_attempts, progress_seconds, forked_from, forked_step)
  values (p_trace_id, 'flow', was.agent, was.flow, was.thread_id, 'background', was.priority, 'pending', 1,
          coalesce(p_input, was.input), was.on_lost, was.max_attempts, was.progress_seconds, p_id, p_step)
  returning id into fork;
  insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output, created_at)
  select fork, c.step, 1, c.fingerprint, c.failed, c.output, c.created_at from agent_checkpoints c
   where c.execution_id = p_id and (cut is null or c.created_at < cut and not starts_with(c.step, p_step || '/'));
  return fork;
end $$;
comment on function fork_agent_execution is
  'A new execution of the same flow that begins with what another had recorded before a step (all of it when null), and does '
  'the rest anew. The other is not touched. Null for an unknown id. The caller sends the hint.';
