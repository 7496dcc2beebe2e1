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
  unexpected   jsonb not null default '{}',                -- documents that came and were not asked for
  answer       jsonb,                                      -- the data of the outcome; null as long as something is missing
  event_id     uuid,                                       -- the event that completed it
  status       text not null default 'pending' check (status in ('pending', 'completed', 'closed')),
  created_at   timestamptz not null default clock_timestamp(),
  completed_at timestamptz,
  check (kind <> 'document' or cardinality(items) > 0)
);
create index agent_requests_execution on agent_requests (execution_id, id);
create index agent_requests_pending on agent_requests (id) where status = 'pending';
create index agent_requests_kind on agent_requests (kind, id);
create index agent_requests_thread on agent_requests (thread_id, id) where thread_id is not null;
comment on table agent_requests is
  'What was asked of people: documents, a signature, a test. Its id is the key of the event that answers it. Closed: the '
  'execution ended before it was answered.';

create function close_agent_requests(p_execution_id uuid) returns void language sql volatile as $$
  update agent_requests r set status = 'closed', completed_at = clock_timestamp()
   where r.execution_id = p_execution_id and r.status = 'pending'
$$;

create function answer_agent_request(p_kind text, p_key text, p_event uuid, p_data jsonb) returns uuid
language plpgsql volatile as $$
declare
  r agent_requests;
  doc jsonb;
  urls jsonb;
  name_ text;
begin
  select x.* into r from agent_requests x where x.id = agent_uuid(p_key) and x.kind = p_kind for update;
  if not found or r.answer is not null then                 -- it is answered once
    return r.execution_id;
  end if;
  if p_kind = 'document' then
    urls := coalesce(p_data -> 'documentUrls', p_data -> 'document_urls');
    if jsonb_typeof(urls) = 'array' and jsonb_array_length(urls) = cardinality(r.items) and not p_data ?| array['documents', 'document', 'name'] then
      p_data := jsonb_build_object('documents', (select jsonb_agg(jsonb_build_object('document', i, 'url', urls -> (n::int - 1)) order by n)
                                                   from unnest(r.items) with ordinality u (i, n)));
    end if;
    for doc in select * from jsonb_array_elements(
        case when jsonb_typeof(p_data -> 'documents') = 'array' then p_data -> 'documents' else jsonb_build_array(p_data) end) loop
      continue when jsonb_typeof(doc) <> 'object';
      name_ := coalesce(doc ->> 'document', doc ->> 'name', case when cardinality(r.items) = 1 then r.items[1] end, '');
      if name_ = any (r.items) then
        r.received := r.received || jsonb_build_object(name_, coalesce(doc ->> 'url', ''));
      else
        r.unexpected := r.unexpected || jsonb_build_object(name_, coalesce(doc ->> 'url', ''));
      end if;
    end loop;
    if r.received ?& r.items then
      r.answer := jsonb_build_object('documents', r.received, 'documentUrls',
        (select jsonb_agg(r.received -> i order by n) from unnest(r.items) with ordinality u (i, n)));
    end if;
  else
    r.answer := p_data;
  end if;
  update agent_requests x
     set received = r.received, unexpected = r.unexpected, answer = r.answer,
         event_id = case when r.answer is not null then p_event end,
         status = case when x.status = 'pending' and r.answer is not null then 'completed' else x.status end,
         completed_at = case when r.answer is not null then coalesce(x.completed_at, clock_timestamp()) end
   where x.id = r.id;
  return r.execution_id;
end $$;
comment on function answer_agent_request is
  'Note what came for a request; the execution that made it, or null when the key is not that of a request. A document is '
  '{document, url}, several are {documents: [{document, url}]}, all of them in the order of the request {documentUrls: [url]}; the '
  'request is answered when all that were asked for are there. A '
  'signature or a test is answered by its first event. What comes after the answer changes nothing.';

create function agent_request_outcome(p_kind text, p_key text) returns jsonb
language sql volatile as $$
  select jsonb_build_object('event', agent_wait_event(p_kind), 'event_id', r.event_id, 'data', r.answer, 'timed_out', false)
    from agent_requests r where r.id = agent_uuid(p_key) and r.kind = p_kind and r.answer is not null
$$;
comment on function agent_request_outcome is 'How a wait for a request ends, null as long as something is missing.';

-- The ends that somebody waits for and has not been told of. An end writes the row in its own transaction, so that it never waits
-- for who waits; who tells them deletes it.
create table agent_untold_ends (
  execution_id uuid primary key
);
insert into agent_untold_ends
  select distinct v.execution_id from agent_executions x join agent_events v on v.external_id = 'completed ' || x.waiting_key
   where x.status = 'waiting' and x.waiting_for = 'agent' and v.execution_id is not null;

create function tell_agent_parents(p_child uuid, p_wait boolean) returns int
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
      select x.id from agent_executions x where x.status = 'waiting' and x.waiting_for = 'agent' and x.waiting_key = p_child::text
       order by x.id for no key update) w);
  else
    waiters := array(select w.id from (
      select x.id from agent_executions x where x.status = 'waiting' and x.waiting_for = 'agent' and x.waiting_key = p_child::text
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
            where x.status = 'waiting' and x.waiting_for = 'agent' and x.waiting_key = p_child::text));
  return cardinality(waiters);
end $$;
comment on function tell_agent_parents is
  'Resume who waits for an execution that has ended. Without waiting it leaves those that somebody works on to the next call.';

create or replace function wake_agent_parents(p_child uuid) returns int language sql volatile as $$
  select tell_agent_parents(p_child, true)
$$;

create function agent_patience(p_child uuid) returns timestamptz
language sql stable as $$
  with recursive line as (
    select x.waiting_until, x.waiting_for, x.waiting_key, x.waiting_data, 1 as depth
      from agent_executions x where x.id = p_child and x.status = 'waiting'
    union all
    select c.waiting_until, c.waiting_for, c.waiting_key, c.waiting_data, l.depth + 1
      from line l join agent_executions c on c.id = agent_uuid(l.waiting_key) and c.status = 'waiting'
     where l.waiting_for = 'agent' and l.waiting_data ->> 'patient' = 'true' and l.depth < 100)
  select max(waiting_until) + agent_wait_standard('agent') from line
$$;
comment on function agent_patience is
  'Until when somebody waits for a child without having said how long, while the child itself waits: that long, and the standard '
  'time after it. Null when the child does not wait.';

create or replace function fence_agent_execution(p_id uuid, p_claim bigint) returns boolean
language plpgsql volatile as $$
declare
  e record;
begin
  select x.status, x.claimed_by, x.forked_from into e from agent_executions x
   where x.id = p_id and x.claim = p_claim for key share;
  -- A fork is given what it begins with while it is pending; nobody writes as any other that is.
  if found and (e.status = 'waiting' or e.status = 'pending' and e.forked_from is not null or (e.status = 'running' and exists (
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
     where v.event = 'MESSAGE_RECEIVED' and v.key = p_key and v.consumed_by is null and unsent is null
       and v.id >= agent_uuid7_floor(sent.at - interval '1 minute')
       and coalesce((select m.seq > sent.seq from agent_messages m
                      where m.id = agent_uuid(v.data ->> 'message_id') and m.thread_id = p_key), v.created_at > sent.at)
     order by v.id limit 1 for update;
  elsif p_kind = 'agent' and exists (select from agent_events v where v.external_id = 'completed ' || p_key) then
    -- An end is a fact, not a message: it answers everyone who waits for it, however often.
    select v.* into came from agent_events v where v.external_id = 'completed ' || p_key;
  elsif p_kind not in ('delay', 'lane') then
    select v.* into came from agent_events v
     where v.event = agent_wait_event(p_kind) and v.key = p_key and v.consumed_by is null
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
    insert into agent_checkpoints (execution_id, step, claim, output) values (p_id, p_step, p_claim, outcome);
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
    update agent_executions x set inherits = false, awaited = false
     where x.id = agent_uuid(e.waiting_key) and x.parent_id = e.id and (x.inherits or x.awaited) and x.completed_at is null;
    perform recall_agent_loans(e.id);
  end if;
  perform park_agent_locks(e.id, false);
  return true;
end $$;

create function check_agent_event(p_kind text, p_event text, p_data jsonb) returns void
language plpgsql immutable as $$
declare
  score jsonb := coalesce(p_data -> 'testScore', p_data -> 'test_score', p_data -> 'score');
begin
  if p_kind in ('response', 'document', 'signature', 'test') and jsonb_typeof(p_data) <> 'object' then
    raise exception 'the data of % is an object such as %, not %', p_event, case p_kind
        when 'response' then '{"content": "…"}' when 'document' then '{"document": "…", "url": "…"}'
        when 'signature' then '{"url": "…"}' else '{"score": 85}' end, left(p_data::text, 60) using errcode = '22023';
  elsif p_kind = 'test' and jsonb_typeof(score) not in ('number', 'null')
        and (jsonb_typeof(score) <> 'string' or score #>> '{}' !~ '^[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]{1,2})?$') then
    raise exception 'the score of % is a number, not %', p_event, left(score::text, 60) using errcode = '22023';
  end if;
end $$;
comment on function check_agent_event is 'Refuse data that would end who waits for the event, with 22023.';

create or replace function deliver_agent_event(p_event text, p_key text, p_data jsonb default '{}', p_id text default null)
returns table (event_id uuid, execution_id uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  kind text;
  event_row uuid;
  waiter record;
  last_one uuid;
  asked_by uuid;
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
  perform check_agent_event(kind, p_event, coalesce(p_data, '{}'));
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
      where x.status = 'waiting' and x.waiting_for = kind and x.waiting_key = p_key order by x.id for no key update;
    asked_by := answer_agent_request(kind, p_key, event_row, coalesce(p_data, '{}'));
    if asked_by is not null then                            -- the request keeps it from here on
      update agent_events v set consumed_by = asked_by where v.id = event_row;
      outcome := agent_request_outcome(kind, p_key);
    end if;
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
  if new.status = 'cancelled' then
    perform lock_agent_children(new.id);                     -- executions before lanes
  end if;
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
  insert into agent_untold_ends (execution_id)
  select new.id where exists (
    select from agent_executions x where x.status = 'waiting' and x.waiting_for = 'agent' and x.waiting_key = new.id::text)
  on conflict do nothing;
  if new.status = 'cancelled' and exists (select from agent_executions x where x.parent_id = new.id and x.awaited) then
    perform cancel_agent_execution(c.id, new.cancelled_by, case when new.cancel_reason like 'its parent was cancelled: %'
        then new.cancel_reason else 'its parent was cancelled: ' || coalesce(new.cancel_reason, '') end)
       from (select x.id from agent_executions x
              where x.parent_id = new.id and x.awaited and x.status in ('pending', 'running', 'waiting')
              order by x.id) c;
  end if;
  return null;
end $$;

create function lose_agent_claim(p_id uuid, p_why text) returns void
language plpgsql volatile as $$
declare
  e agent_executions;
  spent int;
begin
  select x.* into e from agent_executions x where x.id = p_id;
  spent := case when exists (select 1 from agent_checkpoints c where c.execution_id = e.id and c.claim = e.claim)
                then 1 else e.attempt + 1 end;
  if e.on_lost = 'fail' then
    update agent_executions x set status = 'failed', claim = x.claim + 1, attempt = spent, error_message = p_why where x.id = e.id;
  elsif spent >= e.max_attempts then
    update agent_executions x set status = 'failed', claim = x.claim + 1, attempt = spent,
           error_message = format('given up after %s workers were lost without a checkpoint between', spent)
     where x.id = e.id;
  else
    update agent_executions x set claimed_by = null, claim = x.claim + 1, attempt = spent, wake = x.wake + 1,
           hinted_at = case when e.outside then timestamptz 'infinity' else 'epoch' end, updated_at = clock_timestamp() where x.id = e.id;
  end if;
end $$;
comment on function lose_agent_claim is 'What the loss of its worker means to an execution that the caller has locked: on_lost says so.';

create or replace function lose_agent_claims(p_worker uuid) returns int
language plpgsql volatile as $$
declare
  e record;
  n int := 0;
begin
  -- One that is written to at this moment comes next time: a sweep that waited for it would hold up all others.
  for e in select x.id from agent_executions x where x.claimed_by = p_worker order by x.id for update skip locked loop
    n := n + 1;
    perform lose_agent_claim(e.id, 'the worker''s lease expired');
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
    select x.id, x.wait_number, x.waiting_for, x.waiting_key, x.waiting_data from agent_executions x
     where x.status = 'waiting' and x.waiting_until <= now_
     order by x.waiting_until limit p_limit for no key update skip locked
  loop
    if e.waiting_for = 'agent' then
      if e.waiting_data ->> 'patient' = 'true' then
        update agent_executions x set waiting_until = agent_patience(agent_uuid(e.waiting_key))
         where x.id = e.id and agent_patience(agent_uuid(e.waiting_key)) > now_;
        continue when found;
      end if;
      -- It is told that its parent has gone on: what somebody works on comes next time.
      perform 1 from agent_executions x where x.id = agent_uuid(e.waiting_key) for no key update skip locked;
      continue when not found and exists (select from agent_executions x where x.id = agent_uuid(e.waiting_key));
    end if;
    perform resume_agent_execution(e.id, e.wait_number, jsonb_build_object(
      'event', agent_wait_event(e.waiting_for), 'data', '{}'::jsonb, 'timed_out', e.waiting_for <> 'delay'));
  end loop;
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

drop function agent_last_message(uuid);

create or replace function decide_agent_approval(p_id uuid, p_approve boolean, p_by text, p_reason text) returns setof agent_approvals
language plpgsql volatile as $$
declare
  a agent_approvals;
begin
  -- Who waits before the approval, because the end of an execution voids its approvals.
  perform agent_wait_lock('approval', p_id::text);
  perform 1 from agent_executions x
    where x.status = 'waiting' and x.waiting_for = 'approval' and x.waiting_key = p_id::text order by x.id for no key update;
  update agent_approvals x
     set status = case when p_approve then 'approved' else 'rejected' end, decided_by = p_by,
         reason = coalesce(p_reason, ''), decided_at = clock_timestamp()
   where x.id = p_id and x.status = 'pending' and x.expires_at > clock_timestamp()
     and (not p_approve or exists (
            select from agent_skills s where s.name = x.skill_name and s.revision = x.skill_revision))
  returning x.* into a;
  if not found then
    return;
  end if;
  if a.parked then
    perform deliver_agent_event('APPROVAL_DECIDED', a.id::text,
      jsonb_build_object('status', a.status, 'by', a.decided_by, 'reason', a.reason), 'approval ' || a.id);
    perform pg_notify('agent_wake', a.execution_id::text);
  end if;
  return next a;
end $$;

-- Time travel -------------------------------------------------------------------------------------

alter table agent_executions add column forked_from uuid;
alter table agent_executions add column forked_step text;
create index agent_executions_forks on agent_executions (forked_from) where forked_from is not null;
comment on column agent_executions.forked_from is 'The execution whose recorded steps, up to forked_step, this one began with.';

create function agent_fork_cut(p_id uuid, p_step text) returns timestamptz
language plpgsql stable as $$
declare
  cut timestamptz;
begin
  if coalesce(p_step, '') = '' then
    return 'infinity';
  end if;
  select c.created_at into cut from agent_checkpoints c where c.execution_id = p_id and c.step = p_step;
  if cut is null then                                        -- a scope, or a step that is still under way
    select min(c.created_at) into cut from agent_checkpoints c
     where c.execution_id = p_id and (starts_with(c.step, p_step || '/') or starts_with(c.step, p_step || '@'));
  end if;
  if cut is null and exists (select from agent_executions x where x.id = p_id and (x.waiting_step = p_step or x.failed_step = p_step)) then
    return 'infinity';                                       -- it is the next to be recorded
  end if;
  if cut is null then
    raise exception 'execution % has not recorded a step %', p_id, quote_literal(p_step) using errcode = '22023',
      hint = 'Name a recorded step, a scope of recorded steps, or the step that it waits in.';
  end if;
  return cut;
end $$;
comment on function agent_fork_cut is 'The moment before which a fork keeps what was recorded: when a step was, or the first of those in a scope.';

create function agent_fork_steps(p_id uuid, p_step text) returns setof agent_checkpoints
language plpgsql stable as $$
declare
  cut timestamptz := agent_fork_cut(p_id, p_step);
  before_ text := regexp_replace(coalesce(p_step, ''), '([^/]*)$', 'before \1/');
begin
  return query
  with kept as (
    select c.*, regexp_replace(c.step, '[^/]*$', '') as scope from agent_checkpoints c
     where c.execution_id = p_id and c.created_at < cut
       -- What a step, a phase, a scope or a loop consists of, and what was waited for before it, is done anew with it.
       and (coalesce(p_step, '') = '' or not (c.step = p_step or starts_with(c.step, p_step || '/')
            or starts_with(c.step, p_step || '@') or starts_with(c.step, before_)))),
  -- Leave is given to one execution, for one call: who has not made the call asks anew.
  asked as (
    select a.id, a.step from agent_approvals a
     where a.execution_id = p_id and a.parked
       and not exists (select from kept k where a.consumed_at is not null
              and (k.step = substr(a.consumed_for, 38) or right(k.step, length(a.consumed_for) - 36) = '/' || substr(a.consumed_for, 38)))
       and not (a.status in ('rejected', 'expired') and exists (
              select from kept k where k.step <> a.step and (strpos(k.step, a.id::text) > 0 or exists (
                select from agent_events v where v.id = agent_uuid(k.output ->> 'event_id') and v.event = 'APPROVAL_DECIDED'
                   and v.key = a.id::text))))),
  -- And so is what was asked of people, as long as nothing that follows is kept.
  open as (
    select distinct on (r.id) k.step from agent_requests r
      join kept k on strpos(k.output::text, r.id::text) > 0
     where r.execution_id = p_id
       and not exists (select from kept later where later.scope = k.scope and later.created_at > k.created_at)
     order by r.id, k.created_at)
  select k.execution_id, k.step, k.claim, k.fingerprint, k.failed, k.output, k.created_at from kept k
   where not exists (select from asked a where a.step = k.step)
     and not exists (select from open o where o.step = k.step)
     and not exists (select from asked a join agent_events v on v.event = 'APPROVAL_DECIDED' and v.key = a.id::text
                      where v.id = agent_uuid(k.output ->> 'event_id'));
end $$;
comment on function agent_fork_steps is
  'What a fork from a step of an execution begins with: what was recorded before it. A parallel branch keeps what it had by '
  'then. A request for leave that was not used by then, or one to people that nothing followed, is left out: it is made anew.';

create function fork_agent_execution(p_id uuid, p_step text, p_input jsonb, p_trace_id text, p_latest boolean default false)
returns uuid language plpgsql volatile as $$
declare
  was agent_executions;
  version_ int;
  fork uuid;
begin
  select x.* into was from agent_executions x where x.id = p_id;
  if not found then
    return null;
  end if;
  version_ := was.flow_version;
  if p_latest then
    version_ := coalesce((select f.version from agent_flows f where f.name = was.flow and f.current), version_);
  end if;
  -- Its claim begins at 1, so that the first who claims it loads what it begins with.
  insert into agent_executions (trace_id, surface, agent, flow, flow_version, thread_id, queue, priority, status, claim, input, on_lost,
         max_attempts, progress_seconds, forked_from, forked_step)
  values (p_trace_id, 'flow', was.agent, was.flow, version_, was.thread_id, 'background',
          was.priority, 'pending', 1, coalesce(p_input, was.input), was.on_lost, was.max_attempts, was.progress_seconds, p_id, p_step)
  returning id into fork;
  insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output, created_at)
  select fork, c.step, 1, c.fingerprint, c.failed,
         case when c.step = 'flow version' and was.flow_version is not null and not c.failed then to_jsonb(version_) else c.output end,
         c.created_at from agent_fork_steps(p_id, p_step) c;
  return fork;
end $$;
comment on function fork_agent_execution is
  'A new execution of the same flow, in the version that the other began with unless p_latest, that begins with what the other had '
  'recorded before a step (all of it when null), and does the rest anew. The other is not touched. Null for an unknown id. The '
  'caller sends the hint.';
