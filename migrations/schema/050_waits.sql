-- Waits and events: how an execution pauses, and what ends the pause.
--
-- An execution that waits is a row, and needs no process. Every wait has a number. Event, timer and cancel compete for it under
-- the row's lock, so exactly one wins. An event that comes before its wait is kept (agent_events). Wait and event take one
-- advisory lock on kind and key, so no wake-up is lost. A request (agent_requests) asks people for documents, a signature or a
-- test; its answer is the event that the execution waits for.

create table agent_events (
  id           uuid default lanekeeper.agent_uuid7() primary key,
  event        text not null check (event <> ''),
  key          text not null,
  data         jsonb not null default '{}',
  external_id  text,
  execution_id uuid,
  consumed_by  uuid,
  created_at   timestamptz not null default clock_timestamp(),
  constraint agent_events_once unique (external_id)
);
create index agent_events_untaken on agent_events (event, key, id) with (deduplicate_items=off) where consumed_by is null and execution_id is null;
comment on index agent_events_untaken is 'Finds an event that came before its wait.';
alter index agent_events_once set (deduplicate_items=off);
alter index agent_events_pkey set (deduplicate_items=off);
comment on table agent_events is
  'Events, in order. One that nobody waits for is kept for the first wait that asks for it.';
comment on column agent_events.event is 'The kind of event, such as MESSAGE_RECEIVED or AGENT_COMPLETED.';
comment on column agent_events.key is 'The subject of the event. Kind and key together find the waits that it ends.';
comment on column agent_events.data is 'The content, which becomes the outcome of the wait.';
comment on column agent_events.external_id is
  'The id that the sender gave it. A second delivery with the id counts for nothing.';
comment on column agent_events.execution_id is 'The execution that emitted it.';
comment on column agent_events.consumed_by is 'The execution whose wait took it.';

create table agent_requests (
  id           uuid default lanekeeper.agent_uuid7() primary key,
  kind         text not null check (kind in ('document', 'signature', 'test')),
  execution_id uuid not null,
  trace_id     text not null,
  thread_id    text,
  title        text not null default '',
  details      jsonb not null default '{}',
  items        text[] not null default '{}'::text[],
  received     jsonb not null default '{}',
  unexpected   jsonb not null default '{}',
  answer       jsonb,
  event_id     uuid,
  status       text not null default 'pending' check (status in ('pending', 'completed', 'closed')),
  created_at   timestamptz not null default clock_timestamp(),
  completed_at timestamptz,
  documents    jsonb not null default '{}',
  constraint agent_requests_check check ((kind <> 'document') OR (cardinality(items) > 0))
);
create index agent_requests_execution on agent_requests (execution_id, id);
comment on index agent_requests_execution is 'Lists the requests of an execution.';
create index agent_requests_kind on agent_requests (kind, id);
comment on index agent_requests_kind is 'Lists requests of a kind.';
create index agent_requests_pending on agent_requests (id) where status = 'pending';
comment on index agent_requests_pending is 'Lists open requests.';
create index agent_requests_thread on agent_requests (thread_id, id) where thread_id is not null;
comment on index agent_requests_thread is 'Lists the requests of a thread.';
comment on table agent_requests is
  'Documents, signatures and tests that people are asked for. The id is the key of the event that answers it.';
comment on column agent_requests.kind is 'The thing that is asked for.';
comment on column agent_requests.details is 'Details for the people who answer.';
comment on column agent_requests.items is 'The names of the documents asked for.';
comment on column agent_requests.received is 'The documents that have come: name and URL.';
comment on column agent_requests.unexpected is 'Documents that have come and were not asked for.';
comment on column agent_requests.answer is 'The data of the outcome. Null: something is missing.';
comment on column agent_requests.event_id is 'The event that completed it.';
comment on column agent_requests.status is 'pending: open. completed: answered. closed: the execution ended first.';
comment on column agent_requests.completed_at is 'When it was answered or closed.';
comment on column agent_requests.documents is
  'The documents that have come, each with {document, url}; a stored one also with id, name, content_type, size.';

-- Code

create or replace function lanekeeper.agent_wait_event(p_kind text) returns text language sql immutable as $$
  select case p_kind when 'response' then 'MESSAGE_RECEIVED' when 'agent' then 'AGENT_COMPLETED'
    when 'document' then 'DOCUMENT_UPLOADED' when 'signature' then 'SIGNATURE_COMPLETED'
    when 'test' then 'TEST_COMPLETED' when 'event' then 'EVENT_COMPLETED' when 'delay' then 'SCHEDULE_REACHED'
    when 'approval' then 'APPROVAL_DECIDED' when 'lane' then 'LANE_FREED' end
$$;

create or replace function lanekeeper.agent_wait_lock(p_kind text, p_key text) returns void language plpgsql volatile as $$
begin
  perform pg_advisory_xact_lock(hashtextextended('wait ' || p_kind || ' ' || p_key, 0));
end $$;

create or replace function lanekeeper.resume_agent_execution(p_id uuid, p_wait_number int, p_outcome jsonb) returns boolean
language plpgsql volatile as $$
begin
  return lanekeeper.resume_agent_execution_for(p_id, p_wait_number, p_outcome, null);
end $$;
comment on function lanekeeper.resume_agent_execution is
  'End a wait with an outcome, which becomes the wait''s checkpoint. Exactly one caller per wait number gets '
  'true.';

-- An execution that waits for a lane is found by its wait, and marks nothing.
create or replace function lanekeeper.park_agent_execution(p_id uuid, p_claim bigint, p_step text, p_kind text, p_key text,
                                     p_timeout interval, p_data jsonb) returns jsonb
language plpgsql volatile as $$
declare
  came agent_events;
  outcome jsonb;
  unsent uuid;
  sent record;
  target uuid;
begin
  if lanekeeper.agent_wait_event(p_kind) is null then
    raise exception 'wait for % is not known', coalesce(quote_literal(p_kind), 'null') using errcode = '22023';
  elsif p_step is null or p_key is null or (p_key = '' and p_kind <> 'delay') then
    raise exception 'wait for % needs a step and a key', p_kind using errcode = '22023';
  elsif p_kind = 'delay' and p_timeout is null then
    raise exception 'a delay needs its time' using errcode = '22023';
  end if;
  if p_kind in ('agent', 'document', 'signature', 'test') then
    target := lanekeeper.agent_uuid(p_key);
    p_key := coalesce(target::text, p_key);                 -- as the events have it
  end if;
  if p_kind = 'agent' and p_timeout is null then
    p_data := coalesce(p_data, '{}') || '{"patient": true}';
  end if;
  p_timeout := coalesce(p_timeout, lanekeeper.agent_wait_standard(p_kind));
  if p_timeout < interval '0' or p_timeout > lanekeeper.agent_wait_longest(p_kind) then
    raise exception 'timeout % of the wait for % is not valid: give up to %', p_timeout, p_kind, lanekeeper.agent_wait_longest(p_kind)
      using errcode = '22023';
  end if;
  perform lanekeeper.agent_wait_lock(p_kind, p_key);
  -- The end of what is waited for either comes before this, and its event is seen below, or finds who waits.
  if p_kind = 'agent' and target < p_id then
    perform 1 from agent_executions x where x.id = target for share;
  end if;
  -- For update, because the claim is part of the key: two parks that shared the row would deadlock here.
  perform 1 from agent_executions x where x.id = p_id and x.claim = p_claim for update;
  if p_kind = 'agent' and target > p_id then
    perform 1 from agent_executions x where x.id = target for share;
  end if;
  perform lanekeeper.fence_agent_execution(p_id, p_claim);
  -- A try before this one had an outcome at once, and its answer was lost on the way.
  select c.output into outcome from agent_checkpoints c where c.execution_id = p_id and c.step = p_step;
  if found then
    return outcome;
  end if;
  if p_kind in ('document', 'signature', 'test') and exists (select from agent_requests r where r.id = target and r.kind = p_kind) then
    outcome := lanekeeper.agent_request_outcome(p_kind, p_key);
  elsif p_kind = 'response' then
    unsent := lanekeeper.agent_queued_message(p_id, p_key);
    select lanekeeper.agent_last_sent(p_id, p_key) as at, max(m.seq) as seq into sent from agent_messages m
     where m.execution_id = p_id and m.thread_id = p_key and m.role = 'assistant' and m.seq is not null;
    -- The order of the thread decides what an answer can be; the clock only where the event is of no message of it.
    select v.* into came from agent_events v
     where v.event = 'MESSAGE_RECEIVED' and v.key = p_key and v.consumed_by is null and v.execution_id is null and unsent is null
       and v.id >= lanekeeper.agent_uuid7_floor(sent.at - interval '1 minute')
       and coalesce((select m.seq > sent.seq from agent_messages m
                      where m.id = lanekeeper.agent_uuid(v.data ->> 'message_id') and m.thread_id = p_key), v.created_at > sent.at)
     order by v.id limit 1 for update;
  elsif p_kind = 'agent' and exists (select from agent_events v where v.external_id = 'completed ' || p_key) then
    -- An end is a fact, not a message: it answers everyone who waits for it, however often.
    select v.* into came from agent_events v where v.external_id = 'completed ' || p_key;
  elsif p_kind not in ('delay', 'lane') then
    select v.* into came from agent_events v
     where v.event = lanekeeper.agent_wait_event(p_kind) and v.key = p_key and v.consumed_by is null and v.execution_id is null
     order by v.id limit 1 for update;
  elsif p_kind = 'lane' then
    if lanekeeper.agent_lane_open(p_key)
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
  perform lanekeeper.park_agent_locks(p_id, true);
  return null;
end $$;
comment on function lanekeeper.park_agent_execution is
  'Wait durably: null when the execution is now waiting and needs no process; an outcome when what it waits for '
  'has come already.';

create or replace function lanekeeper.deliver_agent_event(p_event text, p_key text, p_data jsonb default '{}', p_id text default null)
returns table (event_id uuid, execution_id uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  kind constant text := lanekeeper.check_agent_delivery(p_event, p_key, p_data, p_id);
  event_row uuid;
  waiter record;
  last_one uuid;
  woken uuid[] := '{}';
  asked_by uuid;
  outcome jsonb;
begin
  if kind in ('agent', 'document', 'signature', 'test') then
    p_key := coalesce(lanekeeper.agent_uuid(p_key)::text, p_key);
  end if;
  perform lanekeeper.agent_wait_lock(kind, p_key);
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
    asked_by := lanekeeper.answer_agent_request(kind, p_key, event_row, coalesce(p_data, '{}'));
    if asked_by is not null then                            -- the request keeps it from here on
      update agent_events v set consumed_by = asked_by where v.id = event_row;
      outcome := lanekeeper.agent_request_outcome(kind, p_key);
    end if;
  end if;
  for waiter in
    select x.id, x.wait_number from agent_executions x
     where x.waiting_for = kind and x.waiting_key = p_key and (x.status = 'waiting') is true and outcome is not null
       and (kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false))
     order by x.id for no key update
  loop
    perform lanekeeper.resume_agent_execution(waiter.id, waiter.wait_number, outcome);
    last_one := waiter.id;
    woken := woken || waiter.id;
    return query select event_row, waiter.id;
  end loop;
  if last_one is null then
    return query select event_row, null::uuid;
  else
    update agent_events v set consumed_by = last_one where v.id = event_row;          -- once, however many woke
    if cardinality(woken) > 1 then
      perform lanekeeper.link_agent_wakes(event_row, woken);
    end if;
  end if;
end $$;
comment on function lanekeeper.deliver_agent_event is 'The work of the contract''s function of this name.';

create or replace function deliver_agent_event(p_event text, p_key text, p_data jsonb default '{}', p_id text default null)
returns table (event_id uuid, execution_id uuid) language plpgsql volatile security definer set search_path from current as $$
begin
  return query select * from lanekeeper.deliver_agent_event(p_event, p_key, p_data, p_id);
end $$;
comment on function deliver_agent_event is
  'Record an event and resume every execution that waits for it. Without one, the event is kept for the first that '
  'will wait. The same p_id twice counts once. Rows: the event, with each execution that it resumed (null: none).';

create or replace function lanekeeper.wake_agent_parents(p_child uuid) returns int language sql volatile as $$
  select lanekeeper.tell_agent_parents(p_child, true)
$$;
comment on function lanekeeper.wake_agent_parents is
  'Resume who waits for an execution that has ended. The end itself only records the event, so that ends never '
  'wait for one another; whoever ended it calls this afterwards, and the sweep does where nobody could.';

create or replace function raise_agent_event(p_event text, p_key text, p_data jsonb, p_id text, p_trace_id text)
returns table (event_id uuid, execution_id uuid)
language plpgsql volatile security definer set search_path from current as $$
#variable_conflict use_column
begin
  if p_trace_id <> '' and p_trace_id !~ '^(hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}$' then
    raise exception '% is not a trace id', quote_literal(p_trace_id) using errcode = '22023';
  end if;
  perform set_config('lanekeeper.trace_id', coalesce(p_trace_id, ''), true);   -- for this transaction; the trigger reads it
  if exists (select from unnest(array['response', 'agent', 'document', 'signature', 'test', 'event', 'approval']) k
              where lanekeeper.agent_wait_event(k) = p_event) then
    return query select d.event_id, d.execution_id from lanekeeper.deliver_agent_event(p_event, p_key, p_data, p_id) d;
  else
    return query
      insert into agent_events as v (event, key, data, external_id) values (p_event, p_key, coalesce(p_data, '{}'), p_id)
      on conflict (external_id) do nothing returning v.id, null::uuid;
  end if;
  perform set_config('lanekeeper.trace_id', '', true);
end $$;
comment on function raise_agent_event is
  'Record an event of any name for a trace (empty: none). Automations that it starts belong to that trace. It '
  'resumes executions as deliver_agent_event does. The same p_id twice counts once.';

-- Waits: eight kinds, each with the event that ends it, a standard and a longest time. And what is asked of people: a
-- request for documents, a signature or a test is a row, whose id is the key of the wait for it.

create or replace function lanekeeper.agent_wait_standard(p_kind text) returns interval language sql immutable as $$
  select case p_kind when 'response' then interval '24 hours' when 'agent' then interval '1 hour' when 'delay' then null
    else interval '7 days' end
$$;
comment on function lanekeeper.agent_wait_standard is
  'How long a wait of a kind lasts when nothing is said; null: it has to be said.';

create or replace function lanekeeper.agent_wait_longest(p_kind text) returns interval language sql immutable as $$
  select case p_kind when 'response' then interval '7 days' when 'agent' then interval '24 hours' else interval '30 days' end
$$;
comment on function lanekeeper.agent_wait_longest is 'How long a wait of a kind may last.';

create or replace function lanekeeper.close_agent_requests(p_execution_id uuid) returns void language plpgsql volatile as $$
begin
  update agent_requests r set status = 'closed', completed_at = clock_timestamp()
   where r.execution_id = p_execution_id and r.status = 'pending';
end $$;

-- As before, and a document may be named by its id.
create or replace function lanekeeper.answer_agent_request(p_kind text, p_key text, p_event uuid, p_data jsonb) returns uuid
language plpgsql volatile as $$
declare
  r agent_requests;
  doc jsonb;
  urls jsonb;
  name_ text;
  given jsonb;
begin
  select x.* into r from agent_requests x where x.id = lanekeeper.agent_uuid(p_key) and x.kind = p_kind for update;
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
      given := jsonb_build_object('document', name_, 'url', coalesce(doc ->> 'url', ''));
      if doc ? 'document_id' then
        given := given || lanekeeper.take_agent_document(doc ->> 'document_id', r.execution_id, r.thread_id);
      end if;
      if name_ = any (r.items) then
        r.received := r.received || jsonb_build_object(name_, given ->> 'url');
        r.documents := r.documents || jsonb_build_object(name_, given);
      else
        r.unexpected := r.unexpected || jsonb_build_object(name_, given ->> 'url');
      end if;
    end loop;
    if r.received ?& r.items then
      r.answer := (
        select jsonb_build_object('documents', r.received, 'documentUrls', jsonb_agg(r.received -> i order by n),
                                  'files', jsonb_agg(coalesce(r.documents -> i, jsonb_build_object('document', i, 'url', r.received -> i)) order by n))
          from unnest(r.items) with ordinality u (i, n));
    end if;
  else
    r.answer := p_data;
  end if;
  update agent_requests x
     set received = r.received, documents = r.documents, unexpected = r.unexpected, answer = r.answer,
         event_id = case when r.answer is not null then p_event end,
         status = case when x.status = 'pending' and r.answer is not null then 'completed' else x.status end,
         completed_at = case when r.answer is not null then coalesce(x.completed_at, clock_timestamp()) end
   where x.id = r.id;
  return r.execution_id;
end $$;
comment on function lanekeeper.answer_agent_request is
  'Note what came for a request; the execution that made it, or null when the key is not that of a request. A '
  'document is {document, url}, or {document, document_id} for a stored one; several are {documents: [...]}, '
  'all of them in the order of the request {documentUrls: [url]}; the request is answered when all that were '
  'asked for are there. A signature or a test is answered by its first event. What comes after the answer '
  'changes nothing.';

create or replace function lanekeeper.agent_request_outcome(p_kind text, p_key text) returns jsonb
language sql volatile as $$
  select jsonb_build_object('event', lanekeeper.agent_wait_event(p_kind), 'event_id', r.event_id, 'data', r.answer, 'timed_out', false)
    from agent_requests r where r.id = lanekeeper.agent_uuid(p_key) and r.kind = p_kind and r.answer is not null
$$;
comment on function lanekeeper.agent_request_outcome is 'How a wait for a request ends, null as long as something is missing.';

-- Both as before, and who waits outside learns what the child has come to.
create or replace function lanekeeper.tell_agent_parents(p_child uuid, p_wait boolean) returns int
language plpgsql volatile as $$
declare
  came record;
  waiters uuid[];
  id_ uuid;
  number int;
  outside boolean;
begin
  if p_wait then
    perform lanekeeper.agent_wait_lock('agent', p_child::text);
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
    perform lanekeeper.resume_agent_execution(id_, number, jsonb_build_object('event', came.event, 'event_id', came.id, 'data',
      came.data || case when outside then lanekeeper.agent_child_outcome(p_child) else '{}' end, 'timed_out', false));
    update agent_events v set consumed_by = id_ where v.id = came.id;
  end loop;
  delete from agent_untold_ends u
   where u.execution_id = p_child and (p_wait or not exists (
           select from agent_executions x
            where x.waiting_for = 'agent' and x.waiting_key = p_child::text and (x.status = 'waiting') is true));
  return cardinality(waiters);
end $$;
comment on function lanekeeper.tell_agent_parents is
  'Resume who waits for an execution that has ended. Without waiting it leaves those that somebody works on to '
  'the next call.';

create or replace function lanekeeper.check_agent_event(p_kind text, p_event text, p_data jsonb) returns void
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
comment on function lanekeeper.check_agent_event is 'Refuse data that would end who waits for the event, with 22023.';

create or replace function lanekeeper.agent_event_kind(p_event text) returns text language sql immutable as $$
  select case p_event when 'MESSAGE_RECEIVED' then 'response' when 'AGENT_COMPLETED' then 'agent' when 'DOCUMENT_UPLOADED' then 'document'
    when 'SIGNATURE_COMPLETED' then 'signature' when 'TEST_COMPLETED' then 'test' when 'EVENT_COMPLETED' then 'event'
    when 'APPROVAL_DECIDED' then 'approval' end
$$;
comment on function lanekeeper.agent_event_kind is 'The kind of wait that an event ends: agent_wait_event the other way round.';

create or replace function lanekeeper.check_agent_delivery(p_event text, p_key text, p_data jsonb, p_id text) returns text
language plpgsql immutable as $$
declare
  kind constant text := lanekeeper.agent_event_kind(p_event);
begin
  if kind is null then
    raise exception 'event % is not known', coalesce(quote_literal(p_event), 'null') using errcode = '22023';
  elsif p_key is null or p_key = '' then
    raise exception 'event % needs a key', p_event using errcode = '22023';
  elsif p_id like 'completed %' then
    raise exception 'id % of an event is reserved for the end of an execution', quote_literal(p_id) using errcode = '22023';
  end if;
  if kind <> 'event' then
    perform lanekeeper.check_agent_event(kind, p_event, coalesce(p_data, '{}'));
  end if;
  return kind;
end $$;
comment on function lanekeeper.check_agent_delivery is
  'The kind of wait that an event ends; one that cannot be delivered is refused with 22023.';

-- As before, and the thread comes back with what was lent.
create or replace function lanekeeper.resume_agent_execution_for(p_id uuid, p_wait_number int, p_outcome jsonb, p_worker uuid) returns boolean
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
     where x.id = lanekeeper.agent_uuid(e.waiting_key) and x.parent_id = p_id and (x.inherits or x.awaited) and x.completed_at is null;
    late := found;
    perform lanekeeper.recall_agent_loans(p_id);
    if late then
      perform lanekeeper.recall_agent_thread(p_id, lanekeeper.agent_uuid(e.waiting_key));
    end if;
  end if;
  if exists (select from agent_locks l where l.execution_id = p_id) then
    perform lanekeeper.park_agent_locks(p_id, false);
  end if;
  return true;
end $$;
comment on function lanekeeper.resume_agent_execution_for is
  'resume_agent_execution, and with a worker a claim for it in the same update. Whether it may be claimed, its '
  'lanes given to the new claim, and its calls looked after, is the caller''s to see to.';

create or replace function lanekeeper.resume_agent_executions(p_ids uuid[], p_outcomes jsonb[], p_worker uuid, p_claimed uuid[])
returns void language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan
set jit = off as $$
declare
  lanes text[];
  id_ uuid;
begin
  -- No joins with what is given: a plan that was made while the table was small would go through it from the other side.
  insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
  select x.id, coalesce(x.waiting_step, 'wait ' || x.wait_number), x.claim, p_outcomes[array_position(p_ids, x.id)],
         x.waiting_for, x.waiting_key, x.updated_at
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
      perform lanekeeper.park_agent_locks(id_, false);
    end loop;
  end if;
end $$;
comment on function lanekeeper.resume_agent_executions is
  'resume_agent_execution for several that wait, for other things than agents, each with its outcome; those of '
  'p_claimed are claimed. The caller has locked the rows, for update where it claims, and made sure that they '
  'wait.';

create or replace function lanekeeper.agent_next_in_line(p_queue text, p_flow text, p_surface text, p_skip text[]) returns boolean
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan
set jit = off as $$
begin
  if p_flow = any (p_skip)
     or exists (select from agent_limits l where (l.kind = 'flow' and l.name = p_flow) or (l.kind = 'surface' and l.name = p_surface)) then
    return false;                                            -- a limit is counted under its lock, with all that is ready
  end if;
  -- Nearly always nothing else is ready, or only what a limit holds back.
  return not exists (select from agent_executions x
                      where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside and x.queue = p_queue)
      or not exists (select from lanekeeper.agent_ready_kinds(p_queue, p_skip) k
                      where lanekeeper.agent_free_places('flow', k.flow, false) > 0 and lanekeeper.agent_free_places('surface', k.surface, false) > 0);
end $$;
comment on function lanekeeper.agent_next_in_line is
  'Whether an execution that becomes ready now would be claimed next: no limit concerns it, and nothing else of '
  'its queue could be claimed.';

create or replace function lanekeeper.hand_agent_event(p_event text, p_key text, p_data jsonb, p_id text, p_worker uuid, p_background int, p_interactive int,
                                 p_skip text[] default '{}')
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean, steps text[], claims bigint[],
               prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan
set jit = off as $$
#variable_conflict use_column
declare
  kind constant text := lanekeeper.check_agent_delivery(p_event, p_key, p_data, p_id);
  waiter record;
  ids uuid[] := '{}';
  mine boolean;
  lanes boolean;
  steady boolean;                   -- nobody pauses the agent meanwhile
begin
  n := 1;
  held := false;
  if kind in ('agent', 'document', 'signature', 'test') then -- these keep more than the event
    for event_id, execution_id in select d.event_id, d.execution_id from lanekeeper.deliver_agent_event(p_event, p_key, p_data, p_id) d loop
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
    select x.id, x.wait_number, x.queue, x.flow, x.surface, x.outside, x.claim, coalesce(x.waiting_step, 'wait ' || x.wait_number) as step,
           x.updated_at
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
    return query select 1, event_id, x.id, x.queue::text, null::agent_executions, false, null::text[], null::bigint[], null::text[],
                        null::boolean[], null::jsonb[], null::timestamptz[]
                   from agent_executions x where x.id = any (ids) order by x.id;
    perform lanekeeper.resume_agent_execution_for(x.id, x.wait_number, p_data, null) from agent_executions x where x.id = any (ids) order by x.id;
    perform lanekeeper.link_agent_wakes(event_id, ids);
    return;
  end if;
  select p_worker is not null and not waiter.outside and case waiter.queue when 'background' then p_background else p_interactive end > 0
         and (waiter.surface in ('operate', 'chat') or steady and not exists (select from agent_pauses p where p.resumed_at is null))
         and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp())
         -- Nearly always nothing is ready, and nothing is limited: then nobody is before it in the queue.
         and (waiter.flow <> all (p_skip) and not exists (select from agent_limits)
              and not exists (select from agent_executions x where x.claimed_by is null and x.status in ('pending', 'running')
                                                               and not x.outside and x.queue = waiter.queue)
              or lanekeeper.agent_next_in_line(waiter.queue, waiter.flow, waiter.surface, p_skip)),
         exists (select from agent_locks l where l.execution_id = waiter.id) or exists (select from agent_lock_loans k where k.lender = waiter.id)
    into mine, lanes;
  insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
  values (waiter.id, waiter.step, waiter.claim, p_data, kind, p_key, waiter.updated_at)
  on conflict (execution_id, step) do nothing;
  return query
  with x as (
    update agent_executions x
       set status = 'running', wake = x.wake + 1, attempt = 0, claimed_by = case when mine then p_worker end, claim = x.claim + mine::int
     where x.id = waiter.id
    returning x.*)
  select 1, event_id, x.id, x.queue::text, case when x.claimed_by = p_worker then x::agent_executions end,
         coalesce(x.claimed_by = p_worker and (
           lanes or x.claim > 2 * x.wait_number + 1 or exists (select from agent_activity_open o where o.execution_id = x.id)), false),
         c.steps, c.claims, c.prints, c.failed, c.outputs, c.times
    from x
    left join lateral (
      select array_agg(k.step) as steps, array_agg(k.claim) as claims, array_agg(k.fingerprint) as prints, array_agg(k.failed) as failed,
             array_agg(k.output) as outputs, array_agg(k.created_at) as times
        from agent_checkpoints k where k.execution_id = x.id and x.claimed_by = p_worker) c on true;
  if lanes then
    perform lanekeeper.park_agent_locks(waiter.id, false);
  end if;
end $$;
comment on function lanekeeper.hand_agent_event is
  'deliver_agent_event by a process that has free workers, so many in each queue: an execution that goes on, '
  'and would be claimed next, is claimed in the same statement, and the answer has its row and all that it has '
  'recorded. held: recover_agent_claim, and a look at what was interrupted, come before anything else is done '
  'with it. Rows: the event, and each execution it woke (null when none).';

-- As before, but it leaves out what has an id that another transaction holds.
create or replace function lanekeeper.hand_agent_events(p_events text[], p_keys text[], p_data jsonb[], p_ids text[], p_worker uuid, p_background int,
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
  kinds := array(select lanekeeper.check_agent_delivery(t.event, t.key, t.data, t.id)
                   from unnest(p_events, p_keys, p_data, p_ids) with ordinality t (event, key, data, id, n) order by t.n);
  -- One that has to wait for somebody, or for another of this batch, comes again by itself: the others do not wait with it.
  here := array(
    select case when t.kind not in ('agent', 'document', 'signature', 'test') and t.nth_of_key = 1 and (t.id is null or t.nth_of_id = 1)
                then pg_try_advisory_xact_lock(hashtextextended('wait ' || t.kind || ' ' || t.key, 0))
                 and (t.id is null or pg_try_advisory_xact_lock(lanekeeper.agent_event_id_class(), lanekeeper.agent_event_id_slot(t.id))) else false end
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
  rows_ := array(select case when t.here then lanekeeper.agent_uuid7() end from unnest(here) with ordinality t (here, n) order by t.n);
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
        next := next || jsonb_build_object(w.line, lanekeeper.agent_next_in_line(w.queue, split_part(w.line, ' ', 3), split_part(w.line, ' ', 2), p_skip));
      end if;
      if (next ->> w.line)::boolean then
        taken := taken || w.id;
        places := places || jsonb_build_object(w.queue, (places ->> w.queue)::int - 1);
      end if;
    end loop;
  end if;
  insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
  select t.id, t.at_, t.under_, jsonb_build_object('event', p_events[t.n], 'event_id', rows_[t.n], 'data', coalesce(p_data[t.n], '{}'),
                                                   'timed_out', false), kinds[t.n], p_keys[t.n], t.since_
    from unnest(woken, by_, at_, under_, since_) t (id, n, at_, under_, since_) where t.id is not null
  on conflict (execution_id, step) do nothing;
  if several then
    perform lanekeeper.link_agent_wakes(rows_[u.n], u.ids)
       from (select t.n, array_agg(t.id) as ids from unnest(woken, by_) t (id, n) where t.id is not null group by t.n having count(*) > 1) u;
  end if;
  return query
  with x as (
    update agent_executions x
       set status = 'running', wake = x.wake + 1, attempt = 0,
           claimed_by = case when x.id = any (taken) then p_worker end, claim = x.claim + (x.id = any (taken))::int
     where x.id = any (woken)
    returning x.*)
  select by_[array_position(woken, x.id)], rows_[by_[array_position(woken, x.id)]], x.id, x.queue::text,
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
end $$;
comment on function lanekeeper.hand_agent_events is
  'hand_agent_event for several events in one transaction, each under its own rules. Rows: n is the place of '
  'the event, from 1. One without event_id would have had to wait for somebody, or for another of the batch, '
  'and was not delivered: send it by itself.';

create or replace function lanekeeper.park_agent_executions(p_ids uuid[], p_claims bigint[], p_steps text[], p_kinds text[], p_keys text[], p_seconds float8[],
                                      p_data jsonb[], p_variables jsonb[])
returns table (n int, verdict text)
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan set jit = off
set lock_timeout = '50ms' as $$
#variable_conflict use_column
declare
  ready uuid[];
  plain uuid[];
begin
  -- Those of the kinds that need nothing but an event or a time, and whose wait nobody else is about to end.
  ready := array(
    select t.id from unnest(p_ids, p_claims, p_steps, p_kinds, p_keys, p_seconds) with ordinality t (id, claim, step, kind, key, seconds, n)
     where t.kind in ('event', 'approval', 'delay') and t.step is not null and (t.key <> '' or t.kind = 'delay' and t.key is not null)
       and t.seconds >= 0 and t.seconds <= extract(epoch from lanekeeper.agent_wait_longest(t.kind)) and t.n = array_position(p_ids, t.id)
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
         select from agent_events v where v.event = lanekeeper.agent_wait_event(p_kinds[array_position(p_ids, x.id)])
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
comment on function lanekeeper.park_agent_executions is
  'Let several executions wait, each under its claim, as park_agent_execution does. verdict alone: nothing was '
  'written, because what it waits for may be there, it has lanes, its row is locked, or it is not valid; park '
  'it by itself.';

-- One event for one execution that waits takes fewer statements. hand_over_agent_event does what hand_agent_event does, under the same
-- locks in the same order, and leaves to it whatever is not plain: the kinds that keep more than the event, and several who wait for one.
-- A statement costs more to begin than what it does here. Hence there are three: lock who waits; write the event, and look whether the
-- execution may be claimed; write the outcome and the claim. The record is read only where there is one from before the wait.

create or replace function lanekeeper.hand_over_agent_event(p_event text, p_key text, p_data jsonb, p_id text, p_raiser text, p_worker uuid, p_background int,
                                      p_interactive int, p_skip text[])
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean, steps text[], claims bigint[],
               prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  -- Nearly every event is one; who checks them all says what is wrong with another.
  kind constant text := case when p_event = 'EVENT_COMPLETED' and p_key <> '' and (p_id like 'completed %') is not true then 'event'
                             else lanekeeper.check_agent_delivery(p_event, p_key, p_data, p_id) end;
  steady boolean;                   -- nobody pauses the agent meanwhile
  id_ uuid;                         -- who waits, and how
  queue_ text;
  flow_ text;
  surface_ text;
  outside_ boolean;
  claim_ bigint;
  step_ text;
  since timestamptz;
  several boolean;
  mine boolean;
  lanes boolean;
  recorded boolean;                 -- before the wait
  ended timestamptz;
  void text;                        -- of functions that begin no statement when they are called like this
begin
  if p_raiser <> '' then
    void := set_config('lanekeeper.raised_by', p_raiser, true);
  end if;
  if kind not in ('agent', 'document', 'signature', 'test') then
    -- The pause is looked at by another statement, which sees every one that had the lock before.
    steady := pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0));
    void := pg_advisory_xact_lock(hashtextextended('wait ' || kind || ' ' || p_key, 0));
    -- Executions before the event, which is written once, with who takes it.
    select x.id, x.queue, x.flow, x.surface, x.outside, x.claim, coalesce(x.waiting_step, 'wait ' || x.wait_number), x.updated_at,
           exists (select from agent_executions o where o.waiting_for = kind and o.waiting_key = p_key and o.id <> x.id)
      into id_, queue_, flow_, surface_, outside_, claim_, step_, since, several
      from agent_executions x
     where x.waiting_for = kind and x.waiting_key = p_key and (x.status = 'waiting') is true
       and (kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false))
     order by x.id for update;
  end if;
  if several or kind in ('agent', 'document', 'signature', 'test') then
    return query select * from lanekeeper.hand_agent_event(p_event, p_key, p_data, p_id, p_worker, p_background, p_interactive, p_skip);
    if p_raiser <> '' then
      void := set_config('lanekeeper.raised_by', '', true);
    end if;
    return;
  end if;
  p_data := coalesce(p_data, '{}');
  -- Another statement than the one that locked, so that it sees what was written under the lock before.
  with v as (
    insert into agent_events as v (event, key, data, external_id, consumed_by) values (p_event, p_key, p_data, p_id, id_)
    on conflict (external_id) do nothing returning v.id)
  select v.id,
         p_worker is not null and not outside_ and case queue_ when 'background' then p_background else p_interactive end > 0
         and (surface_ in ('operate', 'chat') or steady and not exists (select from agent_pauses p where p.resumed_at is null))
         and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp())
         -- Nearly always nothing is ready, and nothing is limited: then nobody is before it in the queue.
         and (flow_ <> all (p_skip) and not exists (select from agent_limits)
              and not exists (select from agent_executions x where x.claimed_by is null and x.status in ('pending', 'running')
                                                               and not x.outside and x.queue = queue_)
              or lanekeeper.agent_next_in_line(queue_, flow_, surface_, p_skip)),
         exists (select from agent_locks l where l.execution_id = id_) or exists (select from agent_lock_loans k where k.lender = id_),
         exists (select from agent_checkpoints k where k.execution_id = id_)
    into event_id, mine, lanes, recorded from v;
  if p_raiser <> '' then
    void := set_config('lanekeeper.raised_by', '', true);
  end if;
  if event_id is null or id_ is null then
    if event_id is null then                                 -- it came before
      event_id := (select v.id from agent_events v where v.external_id = p_id);
    end if;
    n := 1;
    held := false;
    return next;
    return;
  end if;
  p_data := jsonb_build_object('event', p_event, 'event_id', event_id, 'data', p_data, 'timed_out', false);
  ended := clock_timestamp();
  if recorded then
    select array_agg(k.step), array_agg(k.claim), array_agg(k.fingerprint), array_agg(k.failed), array_agg(k.output), array_agg(k.created_at)
      into steps, claims, prints, failed, outputs, times
      from (select c.step, c.claim, c.fingerprint, c.failed, c.output, c.created_at from agent_checkpoints c
             where c.execution_id = id_
            union all select step_, claim_, '', false, p_data, ended
             where not exists (select from agent_checkpoints c where c.execution_id = id_ and c.step = step_)) k;
  end if;
  insert into agent_checkpoints (execution_id, step, claim, output, created_at, waited_for, waited_key, waited_since)
  values (id_, step_, claim_, p_data, ended, kind, p_key, since)
  on conflict (execution_id, step) do nothing;
  return query
  update agent_executions x
     set status = 'running', wake = x.wake + 1, attempt = 0, claimed_by = case when mine then p_worker end, claim = x.claim + mine::int
   where x.id = id_
  returning 1, event_id, x.id, x.queue::text, case when x.claimed_by = p_worker then x end,
            coalesce(x.claimed_by = p_worker and (
              lanes or x.claim > 2 * x.wait_number + 1 or exists (select from agent_activity_open o where o.execution_id = x.id)), false),
            coalesce(steps, array[step_]), coalesce(claims, array[claim_]), coalesce(prints, array['']), coalesce(failed, array[false]),
            coalesce(outputs, array[p_data]), coalesce(times, array[ended]);
  if lanes then
    perform lanekeeper.park_agent_locks(id_, false);
  end if;
end $$;
comment on function lanekeeper.hand_over_agent_event is
  'hand_agent_event, with who raised the event (as why() has it, or empty), in fewer statements for one '
  'execution that waits.';

create or replace function lanekeeper.agent_events_lock_id() returns trigger language plpgsql as $$
begin
  perform pg_advisory_xact_lock_shared(lanekeeper.agent_event_id_class(), lanekeeper.agent_event_id_slot(new.external_id));
  return new;
end $$;
comment on function lanekeeper.agent_events_lock_id is
  'Hold the id of an event until the transaction ends, so that no batch waits for it.';

create or replace function lanekeeper.agent_child_outcome(p_child uuid) returns jsonb language sql stable as $$
  select jsonb_build_object('variables', x.variables, 'result', x.result, 'error_message', x.error_message) from agent_executions x where x.id = p_child
$$;
comment on function lanekeeper.agent_child_outcome is
  'What a worker outside learns of an execution that it waited for, beside what the event of its end says.';

create or replace function lanekeeper.take_agent_document(p_document text, p_execution uuid, p_thread text) returns jsonb
language plpgsql volatile as $$
declare
  d record;
begin
  update agent_documents x set execution_id = p_execution
   where x.id = lanekeeper.agent_uuid(p_document) and x.owner_kind = 'admin' and x.thread_id is null and x.execution_id is null;
  select x.id, x.name, x.content_type, x.size into d from agent_documents x
   where x.id = lanekeeper.agent_uuid(p_document) and (x.thread_id = p_thread or x.execution_id = p_execution);
  if not found then
    raise exception 'there is no document % that the request may take', coalesce(quote_literal(left(p_document, 60)), 'null')
      using errcode = '22023', hint = 'Give a document of the request''s thread, or one that an admin has uploaded.';
  end if;
  return jsonb_build_object('id', d.id, 'name', d.name, 'content_type', d.content_type, 'size', d.size,
                            'url', '/v1/documents/' || d.id || '/content');
end $$;
comment on function lanekeeper.take_agent_document is
  'The document that answers a request, as flows see it. Refused with 22023 when it is somebody else''s.';

create or replace function lanekeeper.lock_agent_document_request(p_thread text) returns table (request_id uuid, missing text[], waiter uuid)
language plpgsql volatile as $$
begin
  select r.id into request_id from agent_requests r
   where r.thread_id = p_thread and r.kind = 'document' and r.status = 'pending' order by r.id limit 1;
  if not found then
    return;
  end if;
  -- The order in which an event that answers it locks: the wait, executions, the request.
  perform lanekeeper.agent_wait_lock('document', request_id::text);
  select x.id into waiter from agent_executions x
   where x.waiting_for = 'document' and x.waiting_key = request_id::text and (x.status = 'waiting') is true
   order by x.id limit 1 for no key update;
  select array_agg(i order by n) into missing
    from agent_requests r cross join unnest(r.items) with ordinality u (i, n)
   where r.id = request_id and r.status = 'pending' and not r.received ? i;
  if missing is not null then
    return next;
  end if;
end $$;
comment on function lanekeeper.lock_agent_document_request is
  'The oldest request of a thread that documents are missing for, locked as an event locks it: what is missing, '
  'and who waits.';

create or replace function lanekeeper.agent_readable_documents(p_execution uuid, p_document uuid default null) returns setof uuid
language sql stable as $$
  with recursive run as (
    select x.id, x.parent_id, x.thread_id, x.surface, 0 as depth from agent_executions x where x.id = p_execution
    union all
    select x.id, x.parent_id, x.thread_id, x.surface, r.depth + 1 from run r join agent_executions x on x.id = r.parent_id where r.depth < 100)
  select d.id from run r join agent_documents d on d.thread_id = r.thread_id where r.depth = 0 and d.id = coalesce(p_document, d.id)
  union
  select d.id from run r join agent_documents d on d.execution_id = r.id where d.id = coalesce(p_document, d.id)
  union
  select d.id from run r join agent_documents d on d.thread_id is null and d.execution_id is null and d.owner_kind = 'admin'
   where r.depth = 0 and r.thread_id is null and d.id = coalesce(p_document, d.id)
  union
  select d.id from run r join agent_documents d on d.id = p_document where r.depth = 0 and r.surface = 'operate'
$$;
comment on function lanekeeper.agent_readable_documents is
  'The documents that an execution may read; with an id, that one or none.';

create or replace trigger agent_events_lock_id before insert on agent_events
  for each row when (new.external_id is not null and new.execution_id is null) execute function lanekeeper.agent_events_lock_id();
