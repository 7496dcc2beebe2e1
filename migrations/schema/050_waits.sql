-- Waits and events: how an execution pauses and resumes.
--
-- An execution that waits is a row, and needs no process. Every wait has a number. Event, timer and cancel compete for
-- it under the row's lock, so exactly one wins. agent_events keeps an event that comes before its wait. Wait and event
-- take one advisory lock on kind and key, so no wake-up is lost. A request (agent_requests) asks people for documents,
-- a signature or a test; its answer is the event that the execution waits for.

create table agent_events (
  id uuid default lanekeeper.agent_uuid7() primary key, event text not null check (event <> ''), key text not null,
  data jsonb not null default '{}', external_id text, execution_id uuid,
  consumed_by uuid, created_at timestamptz not null default clock_timestamp(),
  constraint agent_events_once unique (external_id)
);
create index agent_events_untaken on agent_events (event, key, id) with (deduplicate_items=off)
  where consumed_by is null and execution_id is null;
comment on index agent_events_untaken is 'Finds an event that arrived before its wait.';
alter index agent_events_once set (deduplicate_items=off);
alter index agent_events_pkey set (deduplicate_items=off);
comment on table agent_events is
  'Events, in order. An event without a waiter is kept for the first wait with its kind and key.';
comment on column agent_events.event is 'The kind of event, such as MESSAGE_RECEIVED or AGENT_COMPLETED.';
comment on column agent_events.key is 'The subject of the event. Kind and key together find the waits that it ends.';
comment on column agent_events.data is 'The content, which becomes the outcome of the wait.';
comment on column agent_events.external_id is
  'The id from the sender. A repeat of the event is ignored, and another event with the id is refused.';
comment on column agent_events.execution_id is 'The execution that emitted it.';
comment on column agent_events.consumed_by is 'The execution whose wait consumed the event.';

create table agent_requests (
  id uuid default lanekeeper.agent_uuid7() primary key,
  kind text not null check (kind in ('document', 'signature', 'test')), execution_id uuid not null,
  trace_id text not null, thread_id text, title text not null default '',
  details jsonb not null default '{}', items text[] not null default '{}'::text[],
  received jsonb not null default '{}', unexpected jsonb not null default '{}', answer jsonb,
  event_id uuid, status text not null default 'pending' check (status in ('pending', 'completed', 'closed')),
  created_at timestamptz not null default clock_timestamp(), completed_at timestamptz,
  documents jsonb not null default '{}',
  constraint agent_requests_check check (kind <> 'document' or cardinality(items) > 0)
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
  'Requests to people for documents, signatures and tests. The id is the key of the event that answers the request.';
comment on column agent_requests.kind is 'The requested thing.';
comment on column agent_requests.details is 'Details for the people who answer.';
comment on column agent_requests.items is 'The names of the requested documents.';
comment on column agent_requests.received is 'The received documents: name and URL.';
comment on column agent_requests.unexpected is 'Received documents that were not requested.';
comment on column agent_requests.answer is 'The data of the outcome. Null: something is missing.';
comment on column agent_requests.event_id is 'The event that completed it.';
comment on column agent_requests.status is
  'pending: open. completed: answered. closed: the execution ended, or its action timed out, first.';
comment on column agent_requests.completed_at is 'When it was answered or closed.';
comment on column agent_requests.documents is
  'The received documents, each with {document, url}; a stored one also with id, name, content_type, size.';

-- Code

create or replace view lanekeeper.agent_wait_events as
select k.kind, k.event
  from (values ('response', 'MESSAGE_RECEIVED'), ('agent', 'AGENT_COMPLETED'), ('document', 'DOCUMENT_UPLOADED'),
  ('signature', 'SIGNATURE_COMPLETED'), ('test', 'TEST_COMPLETED'), ('event', 'EVENT_COMPLETED'),
  ('delay', 'SCHEDULE_REACHED'), ('approval', 'APPROVAL_DECIDED'), ('lane', 'LANE_FREED')) k (kind, event);
comment on view lanekeeper.agent_wait_events is 'The event that ends a wait of each kind.';

-- Waiting

create or replace function lanekeeper.agent_wait_outcome(p_id uuid, p_kind text, p_key text) returns jsonb
language plpgsql volatile as $$
declare
  sent record;
  e agent_events;
begin
  if p_kind = 'delay' then
    return null;
  elsif p_kind = 'lane' then
    return (select jsonb_build_object('event', 'LANE_FREED', 'data', '{}'::jsonb, 'timed_out', false)
             where not exists (select from lanekeeper.agent_lock_holders h where h.lane = p_key)
                -- The execution itself holds the lane.
                or exists (select from agent_locks l where l.lane = p_key and l.execution_id = p_id));
  elsif p_kind in ('document', 'signature', 'test')
        and exists (select from agent_requests r where r.id = lanekeeper.agent_uuid(p_key) and r.kind = p_kind) then
    return (select jsonb_build_object('event', (select k.event from lanekeeper.agent_wait_events k
                                                 where k.kind = p_kind),
                                      'event_id', r.event_id, 'data', r.answer, 'timed_out', false)
              from agent_requests r where r.id = lanekeeper.agent_uuid(p_key) and r.answer is not null);
  elsif p_kind = 'response' then
    -- Only a message after the last message of the execution in this thread, and after its start, can answer it.
    select coalesce((select m.sent_at from agent_messages m
                      where m.execution_id = p_id and m.thread_id = p_key and m.role = 'assistant'
                        and m.sent_at is not null
                      order by m.id desc limit 1),
                    (select x.created_at from agent_executions x where x.id = p_id)) as at,
           (select max(m.seq) from agent_messages m
             where m.execution_id = p_id and m.thread_id = p_key and m.role = 'assistant'
               and m.seq is not null) as seq into sent;
    -- The order of the thread decides. For an event without a message of the thread the clock decides.
    select v.* into e from agent_events v
     where v.event = 'MESSAGE_RECEIVED' and v.key = p_key and v.consumed_by is null and v.execution_id is null
       and v.id >= lanekeeper.agent_uuid7_floor(sent.at - interval '1 minute')
       and coalesce((select m.seq > sent.seq from agent_messages m
                      where m.id = lanekeeper.agent_uuid(v.data ->> 'message_id')
                        and m.thread_id = p_key), v.created_at > sent.at)
     order by v.id limit 1 for update;
  else
    if p_kind = 'agent' then                                 -- the end of a child answers every wait for it
      select v.* into e from agent_events v where v.external_id = 'completed ' || p_key;
    end if;
    if e.id is null then
      select v.* into e from agent_events v
       where v.event = (select k.event from lanekeeper.agent_wait_events k where k.kind = p_kind) and v.key = p_key
         and v.consumed_by is null and v.execution_id is null
       order by v.id limit 1 for update;
    end if;
  end if;
  if e.id is null then
    return null;
  end if;
  update agent_events v set consumed_by = p_id where v.id = e.id;
  insert into agent_links (cause, kind, effect)              -- an end answers several waits; consumed_by names one
  select 'event ' || e.id, 'woke', 'execution ' || t.id from unnest(array[e.consumed_by, p_id]) t (id)
   where e.consumed_by <> p_id
  on conflict do nothing;
  return jsonb_build_object('event', e.event, 'event_id', e.id, 'data', e.data, 'timed_out', false);
end $$;
comment on function lanekeeper.agent_wait_outcome is
  'The outcome of a wait that is about to begin, if its event has come; the event is then consumed. Null: no event.';

create or replace function lanekeeper.wait_agent_execution(p_id uuid, p_claim bigint, p_step text, p_kind text,
                                     p_key text, p_timeout interval, p_data jsonb) returns jsonb
language plpgsql volatile as $$
declare
  longest constant interval := case p_kind
                                 when 'response' then interval '7 days'
                                 when 'agent' then interval '24 hours'
                                 else interval '30 days' end;
  target uuid;
  outcome jsonb;
  unsent uuid;                      -- the last queued message of the execution in the thread
begin
  if p_kind is null or not exists (select from lanekeeper.agent_wait_events k where k.kind = p_kind) then
    raise exception 'wait for % is not known', coalesce(quote_literal(p_kind), 'null') using errcode = '22023';
  elsif p_step is null or p_key is null or (p_key = '' and p_kind <> 'delay') then
    raise exception 'wait for % needs a key', p_kind using errcode = '22023';
  elsif octet_length(p_key) > 2400 then                     -- the index entry of its event also has the event's name
    raise exception 'the key of a wait has at most 2400 bytes' using errcode = '22023';
  elsif p_kind = 'delay' and p_timeout is null then
    raise exception 'wait for delay needs a timeout' using errcode = '22023';
  elsif p_timeout < interval '0' or p_timeout > longest then
    raise exception 'timeout % of the wait for % is not valid: give up to %', justify_hours(p_timeout), p_kind, longest
      using errcode = '22023';
  end if;
  if p_kind in ('agent', 'document', 'signature', 'test') then
    target := lanekeeper.agent_uuid(p_key);
    p_key := coalesce(target::text, p_key);                 -- the form that events use
  end if;
  p_data := case when p_kind = 'agent' and p_timeout is null then coalesce(p_data, '{}') || '{"patient": true}'
                 else p_data end;
  p_timeout := coalesce(p_timeout,
                        case p_kind
                          when 'response' then interval '24 hours'
                          when 'agent' then interval '1 hour'
                          else interval '7 days' end);
  perform pg_advisory_xact_lock(hashtextextended('wait ' || p_kind || ' ' || p_key, 0));
  -- Lock executions by id. If the child has ended before, the query below sees its event. If it ends later, its end
  -- finds this wait. For update, because the claim is part of the key: two waits that shared the row would deadlock.
  perform 1 from agent_executions x where p_kind = 'agent' and x.id = target and target < p_id for share;
  perform 1 from agent_executions x where x.id = p_id and x.claim = p_claim for update;
  perform 1 from agent_executions x where p_kind = 'agent' and x.id = target and target > p_id for share;
  perform fence_agent_execution(p_id, p_claim);
  select c.output into outcome from agent_checkpoints c where c.execution_id = p_id and c.step = p_step;
  if found then                                             -- an earlier try had its answer lost
    return outcome;
  end if;
  if p_kind = 'response' then
    unsent := (select m.id from agent_messages m
                where m.execution_id = p_id and m.thread_id = p_key and m.status = 'queued' order by m.id desc limit 1);
  end if;
  if unsent is null then
    outcome := lanekeeper.agent_wait_outcome(p_id, p_kind, p_key);
  else
    -- The question is not sent yet: the timeout begins when it is.
    p_data := coalesce(nullif(p_data, 'null'), '{}')
              || jsonb_build_object('queued_message', unsent, 'timeout_seconds', extract(epoch from p_timeout));
    p_timeout := interval '30 days';
  end if;
  if outcome is not null then
    insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
    values (p_id, p_step, p_claim, outcome, p_kind, p_key, clock_timestamp());
    return outcome;
  end if;
  update agent_executions x
     set status = 'waiting', claim = x.claim + 1, wait_number = x.wait_number + 1, attempt = 0, waiting_for = p_kind,
         waiting_key = p_key, waiting_step = p_step,
         waiting_until = clock_timestamp() + make_interval(secs => extract(epoch from p_timeout)::float8),
         waiting_data = p_data
   where x.id = p_id and x.claim = p_claim;
  -- A second wait for the child, after a timeout, sets awaited again.
  update agent_executions x set awaited = true
   where p_kind = 'agent' and x.id = target and x.parent_id = p_id and not x.awaited and x.completed_at is null;
  perform lanekeeper.claim_agent_locks(p_id, true);
  return null;
end $$;
comment on function lanekeeper.wait_agent_execution is
  'Wait durably. Null: the execution is now waiting and needs no process. Otherwise the outcome: the event had '
  'already come.';

create or replace function lanekeeper.wait_agent_executions(p_ids uuid[], p_claims bigint[], p_steps text[],
                                      p_kinds text[], p_keys text[], p_seconds float8[], p_data jsonb[],
                                      p_variables jsonb[]) returns setof int
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set jit = off
set lock_timeout = '50ms' as $$
declare
  ready uuid[];
  plain uuid[];
begin
  -- Waits that need only an event or a time, and whose advisory lock is free.
  ready := array(
    select t.id
      from unnest(p_ids, p_claims, p_steps, p_kinds, p_keys, p_seconds)
             with ordinality t (id, claim, step, kind, key, seconds, n)
     where t.kind in ('event', 'approval', 'delay')
       and t.step is not null
       and (t.key <> '' or t.kind = 'delay' and t.key is not null)
       and octet_length(t.key) <= 2400
       and t.seconds between 0 and extract(epoch from interval '30 days') and t.n = array_position(p_ids, t.id)
       and (t.kind = 'delay' or pg_try_advisory_xact_lock(hashtextextended('wait ' || t.kind || ' ' || t.key, 0))));
  -- For update, because the claim is part of the key. Executions whose row is locked are left out.
  ready := array(select x.id
                   from agent_executions x
                  where x.id = any (ready) and x.claim = p_claims[array_position(p_ids, x.id)]
                    for update skip locked);
  plain := array(
    select x.id from agent_executions x
     where x.id = any (ready) and (x.status = 'running') is true and x.claim = p_claims[array_position(p_ids, x.id)]
       and exists (select from agent_workers w where w.id = x.claimed_by and w.expires_at > clock_timestamp())
       and not exists (select from agent_locks l where l.execution_id = x.id)
       and not exists (select from agent_lock_loans k where k.lender = x.id)
       and not exists (select from agent_checkpoints c
                        where c.execution_id = x.id and c.step = p_steps[array_position(p_ids, x.id)])
       and (p_kinds[array_position(p_ids, x.id)] = 'delay' or not exists (
         select from agent_events v
          where v.event = (select k.event
                             from lanekeeper.agent_wait_events k
                            where k.kind = p_kinds[array_position(p_ids, x.id)])
                                      and v.key = p_keys[array_position(p_ids, x.id)] and v.consumed_by is null
                                      and v.execution_id is null)));
  update agent_executions x
     set (status, claim, wait_number, attempt, waiting_for, waiting_key, waiting_step, waiting_until, waiting_data,
          variables) = (
       select 'waiting', x.claim + 1, x.wait_number + 1, 0, p_kinds[a.i], p_keys[a.i], p_steps[a.i],
              clock_timestamp() + make_interval(secs => p_seconds[a.i]), p_data[a.i],
              coalesce(p_variables[a.i], x.variables)
         from (select array_position(p_ids, x.id) as i offset 0) a)
   where x.id = any (plain);
  return query
  select t.n::int from unnest(p_ids) with ordinality t (id, n)
   where not (t.id = any (plain) and t.n = array_position(p_ids, t.id));
end $$;
comment on function lanekeeper.wait_agent_executions is
  'wait_agent_execution for several executions. Rows: places, from 1, of waits that were not written. Their event may '
  'have come, or the execution has lanes, is locked, or is not valid. Call wait_agent_execution for each.';

create or replace function lanekeeper.resume_agent_executions(p_ids uuid[], p_outcomes jsonb[],
                                                   p_claimed uuid[] default '{}', p_worker uuid default null,
                                                   p_child uuid default null)
returns table (execution_id uuid, queue text, execution agent_executions, held boolean, steps text[], claims bigint[],
               prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  lanes constant text[] := array(select l.lane from agent_locks l where l.execution_id = any (p_ids)
                                 union select k.lane from agent_lock_loans k where k.lender = any (p_ids) order by 1);
  id_ uuid;
  parent uuid;                      -- of a child that continues without a waiting parent
  back record;                      -- a lane that returns to the parent
begin
  -- No join with the arrays: a plan made while the table was small would scan the whole table later.
  insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
  select x.id, coalesce(x.waiting_step, 'wait ' || x.wait_number), x.claim, p_outcomes[array_position(p_ids, x.id)],
         x.waiting_for, x.waiting_key, x.updated_at
    from agent_executions x where x.id = any (p_ids)
  on conflict (execution_id, step) do nothing;
  return query
  with x as (
    update agent_executions x
       set status = 'running', wake = x.wake + 1, attempt = 0,
           claimed_by = case when x.id = any (p_claimed) then p_worker end,
           claim = x.claim + (x.id = any (p_claimed))::int
     where x.id = any (p_ids) returning x.*)
  select x.id, x.queue::text, case when x.id = any (p_claimed) then x::agent_executions end,
         x.id = any (p_claimed) and (lanes <> '{}' or x.claim > 2 * x.wait_number + 1
           or exists (select from agent_activity_open o where o.execution_id = x.id)), c.*
    from x left join lateral (
      select array_agg(k.step), array_agg(k.claim), array_agg(k.fingerprint), array_agg(k.failed), array_agg(k.output),
             array_agg(k.created_at)
        from agent_checkpoints k where k.execution_id = x.id and x.id = any (p_claimed)) c on true;
  if p_child is not null then                                -- from now on the child uses its own lanes
    update agent_executions x set inherits = false, awaited = false
     where x.id = p_child and x.parent_id = any (p_ids) and (x.inherits or x.awaited) and x.completed_at is null
    returning x.parent_id
      into parent;
  end if;
  if lanes <> '{}' then
    -- Lock all lanes in one order, regardless of their holder.
    perform 1 from agent_locks l where l.lane = any (lanes) order by l.lane for update;
  end if;
  if p_child is not null then
    perform lanekeeper.return_agent_lock(k.lane, k.lender) from agent_lock_loans k where k.lender = any (p_ids);
  end if;
  if parent is not null then
    for back in                     -- the threads that the child holds or has lent, and in which the parent speaks
      select a.lane, a.ttl_seconds from agent_locks a
       where a.lane in (select c.lane from agent_locks c where c.execution_id = p_child
                        union all select n.lane from agent_lock_loans n where n.lender = p_child and n.depth = 1)
         and a.lane like 'thread:%'
         and (exists (select from agent_executions x where x.id = parent and x.thread_id = substr(a.lane, 8))
              or exists (select from agent_messages m
                          where m.execution_id = parent and m.thread_id = substr(a.lane, 8)))
       order by a.lane for update of a
    loop
      delete from agent_lock_loans n where n.lane = back.lane;
      insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds)
      values (back.lane, 1, parent, p_child, back.ttl_seconds);
      perform lanekeeper.return_agent_lock(back.lane, parent);       -- as a loan of the parent
    end loop;
  end if;
  if lanes <> '{}' or parent is not null then
    foreach id_ in array p_ids loop
      perform lanekeeper.claim_agent_locks(id_);
    end loop;
  end if;
end $$;
comment on function lanekeeper.resume_agent_executions is
  'Resume waiting executions. Each outcome becomes the checkpoint of its wait. p_worker claims the executions of '
  'p_claimed, and their rows have their checkpoints; held: recover the claim first. The caller has locked the rows, '
  'for update where it claims. p_child: the execution that all of them waited for.';

-- Events

create or replace function lanekeeper.agent_events_lock_id() returns trigger language plpgsql as $$
begin
  perform pg_advisory_xact_lock_shared(1818324581, (hashtextextended(new.external_id, 0) & 2047)::int);
  return new;
end $$;
comment on function lanekeeper.agent_events_lock_id is
  'Hold the id of an event until the transaction ends, so that no batch waits for it. Ids share 2,048 locks.';

create or replace function lanekeeper.check_agent_event_id(p_event text, p_key text, p_id text) returns void
language plpgsql immutable as $$
begin
  if p_event is null or p_event = '' or p_key is null then
    raise exception 'an event needs a name, and a key that is not null' using errcode = '22023';
  elsif p_id like 'completed %' or p_id like 'approval %' and p_event <> 'APPROVAL_DECIDED' then
    raise exception 'id % of an event is reserved', quote_literal(left(p_id, 60)) using errcode = '22023',
      hint = 'The end of an execution and the decision on an approval have such ids.';
  elsif greatest(octet_length(p_event) + octet_length(p_key), octet_length(p_id)) > 2500 then
    raise exception 'name and key of an event, and its id, have at most 2500 bytes' using errcode = '22023';
  end if;
end $$;
comment on function lanekeeper.check_agent_event_id is
  'Refuse with 22023 an event without a name, with a null key, with a reserved id, or too long for the indexes.';

create or replace function lanekeeper.check_agent_event(p_event text, p_key text, p_data jsonb, p_id text) returns text
language plpgsql stable as $$
declare
  kind constant text := case p_event
    when 'MESSAGE_RECEIVED' then 'response'
    when 'AGENT_COMPLETED' then 'agent'
    when 'DOCUMENT_UPLOADED' then 'document'
    when 'SIGNATURE_COMPLETED' then 'signature'
    when 'TEST_COMPLETED' then 'test'
    when 'EVENT_COMPLETED' then 'event'
    when 'APPROVAL_DECIDED' then 'approval' end;
  score constant jsonb :=
    case kind when 'test' then coalesce(p_data -> 'testScore', p_data -> 'test_score', p_data -> 'score') end;
begin
  if kind is null then
    raise exception 'event % is not known', coalesce(quote_literal(left(p_event, 60)), 'null') using errcode = '22023',
      hint = 'MESSAGE_RECEIVED, DOCUMENT_UPLOADED, SIGNATURE_COMPLETED, TEST_COMPLETED or EVENT_COMPLETED. '
             'raise_agent_event records any other.';
  elsif p_key is null or p_key = '' then
    raise exception 'event % needs a key', p_event using errcode = '22023';
  elsif octet_length(p_key) > 2400                          -- no wait begins with such a key; one may have begun earlier
        and not exists (select from agent_executions x where x.waiting_for = kind and x.waiting_key = p_key) then
    raise exception 'the key of % has at most 2400 bytes', p_event using errcode = '22023';
  end if;
  perform lanekeeper.check_agent_event_id(p_event, p_key, p_id);
  if kind in ('response', 'document', 'signature', 'test') and jsonb_typeof(p_data) <> 'object' then
    raise exception 'the data of % is an object such as %, not %', p_event, case kind
        when 'response' then '{"content": "…"}' when 'document' then '{"document": "…", "url": "…"}'
        when 'signature' then '{"url": "…"}' else '{"score": 85}' end, left(p_data::text, 60) using errcode = '22023';
  elsif score #>> '{}' !~ '^[-+]?([0-9]{1,200}([.][0-9]*)?|[.][0-9]+)([eE][-+]?[0-9]{1,2})?$' then  -- a float64
    raise exception 'the score of % is a number, not %', p_event, left(score::text, 60) using errcode = '22023';
  end if;
  return kind;
end $$;
comment on function lanekeeper.check_agent_event is
  'The kind of wait that an event ends. Refuses with 22023 a bad key or id, and data that would fail the waiting '
  'execution.';

create or replace function lanekeeper.answer_agent_request(p_kind text, p_event agent_events) returns agent_requests
language plpgsql volatile as $$
declare
  r agent_requests;
  data jsonb := p_event.data;
  urls constant jsonb := coalesce(data -> 'documentUrls', data -> 'document_urls');
  doc jsonb;
  stored jsonb;
  name_ text;
begin
  select x.* into r from agent_requests x
   where x.id = lanekeeper.agent_uuid(p_event.key) and x.kind = p_kind for update;
  if not found or r.answer is not null then                 -- only the first answer counts
    return r;
  end if;
  if p_kind = 'document' then
    if jsonb_typeof(urls) = 'array'
       and jsonb_array_length(urls) = cardinality(r.items)
       and not data ?| array['documents', 'document', 'name'] then
      data := jsonb_build_object('documents', (
                select jsonb_agg(jsonb_build_object('document', i, 'url', urls -> (n::int - 1)) order by n)
                  from unnest(r.items) with ordinality u (i, n)));
    end if;
    for doc in select * from jsonb_array_elements(
        case when jsonb_typeof(data -> 'documents') = 'array' and data -> 'documents' <> '[]' then data -> 'documents'
             else jsonb_build_array(data) end) loop
      stored := '{}';
      name_ := coalesce(doc ->> 'document', doc ->> 'name', case when cardinality(r.items) = 1 then r.items[1] end, '');
      if name_ = ''
         or jsonb_typeof(doc) <> 'object'
         or coalesce(urls, doc -> 'documents') <> 'null' and not doc ?| array['url', 'document_id'] then
        raise exception '% is missing in %', case when name_ = '' then 'document' else 'url' end, left(doc::text, 60)
          using errcode = '22023',
          detail = format(
            'a document is {"document": "…", "url": "…"}, several are {"documents": […]}; the request asks for %s',
            left(array_to_string(r.items, ', '), 300));
      end if;
      -- A document of the request's thread or execution, or an admin's document without either.
      if doc ? 'document_id' then
        update agent_documents x set execution_id = r.execution_id
         where x.id = lanekeeper.agent_uuid(doc ->> 'document_id') and x.owner_kind = 'admin' and x.thread_id is null
           and x.execution_id is null;
        select jsonb_build_object('id', x.id, 'name', x.name, 'content_type', x.content_type, 'size', x.size,
                                  'url', '/v1/documents/' || x.id || '/content')
          into stored from agent_documents x
         where x.id = lanekeeper.agent_uuid(doc ->> 'document_id')
           and (x.thread_id = r.thread_id or x.execution_id = r.execution_id);
        if not found then
          raise exception 'there is no document % that the request may take',
            coalesce(quote_literal(left(doc ->> 'document_id', 60)), 'null')
            using errcode = '22023',
                  hint = 'Give a document of the request''s thread, or one that an admin has uploaded.';
        end if;
      end if;
      doc := jsonb_build_object('document', name_, 'url', coalesce(doc ->> 'url', '')) || stored;
      if name_ = any (r.items) then
        r.received := r.received || jsonb_build_object(name_, doc ->> 'url');
        r.documents := r.documents || jsonb_build_object(name_, doc);
      else
        r.unexpected := r.unexpected || jsonb_build_object(name_, doc ->> 'url');
      end if;
    end loop;
    if r.received ?& r.items then
      r.answer := (
        select jsonb_build_object('documents', r.received, 'documentUrls', jsonb_agg(r.received -> i order by n),
                                  'files', jsonb_agg(coalesce(r.documents -> i,
                                                              jsonb_build_object('document', i, 'url', r.received -> i))
                                                     order by n))
          from unnest(r.items) with ordinality u (i, n));
    end if;
  else
    r.answer := data;
  end if;
  update agent_requests x
     set received = r.received, documents = r.documents, unexpected = r.unexpected, answer = r.answer,
         event_id = case when r.answer is not null then p_event.id end,
         status = case when x.status = 'pending' and r.answer is not null then 'completed' else x.status end,
         completed_at = case when r.answer is not null then coalesce(x.completed_at, clock_timestamp()) end
   where x.id = r.id returning x.* into r;
  return r;
end $$;
comment on function lanekeeper.answer_agent_request is
  'Record an answer to a request and return the request; null: the key is not a request. A document is {document, '
  'url} or {document, document_id}; several are {documents: [...]}, or {documentUrls: [url]} in the order of the '
  'request. A signature or a test needs one event. Later events change nothing. 22023: the document belongs to '
  'somebody else, or it lacks its name or url.';

create or replace function lanekeeper.agent_end_for_worker(p_data jsonb, p_id uuid, p_ended uuid) returns jsonb
language sql stable as $$
  with recursive run as (
    select x.id, x.forked_from from agent_executions x where x.id = p_id
    union
    select x.id, x.forked_from from agent_executions x join run r on x.id = r.forked_from)
  select case when exists (select from run r where r.id = c.parent_id)
                then p_data || jsonb_build_object('variables', c.variables, 'result', c.result,
                                                  'error_message', c.error_message)
                else p_data - 'result_summary' end
    from agent_executions c where c.id = p_ended
$$;
comment on function lanekeeper.agent_end_for_worker is
  'The data of AGENT_COMPLETED for the run p_id of a worker outside, which cannot read p_ended. The data of its child, '
  'and of a child of the execution that it was forked from, has the values. Data of another execution has no text of '
  'it.';

create or replace function lanekeeper.resume_agent_waiters(p_kind text, p_key text, p_event_id uuid default null,
                                                           p_wait boolean default true)
returns table (id uuid, queue text)
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  lock_ constant bigint := hashtextextended('wait ' || p_kind || ' ' || p_key, 0);
  v agent_events;
  r agent_requests;
  outcome jsonb;
  ids uuid[];
  takers uuid[];
begin
  if p_wait then
    perform pg_advisory_xact_lock(lock_);
  elsif not pg_try_advisory_xact_lock(lock_) then
    return;
  end if;
  if p_event_id is not null then
    select e.* into v from agent_events e where e.id = p_event_id;
  else
    select e.* into v from agent_events e where e.external_id = 'completed ' || p_key;
  end if;
  if not found then
    return;
  elsif p_wait then
    ids := array(select x.id
                   from agent_executions x
                  where x.waiting_for = p_kind and x.waiting_key = p_key and (x.status = 'waiting') is true
                    and (p_kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false))
                  order by x.id
                  for no key update);
  else
    ids := array(select x.id
                   from agent_executions x
                  where x.waiting_for = p_kind and x.waiting_key = p_key and (x.status = 'waiting') is true
                  order by x.id for no key update skip locked);
  end if;
  outcome := jsonb_build_object('event', v.event, 'event_id', v.id, 'data', v.data, 'timed_out', false);
  -- Lock executions before requests, because the end of an execution closes its requests.
  if p_kind in ('document', 'signature', 'test') then
    r := lanekeeper.answer_agent_request(p_kind, v);
    if r.id is not null then                                -- the request consumes the event
      update agent_events e set consumed_by = r.execution_id where e.id = v.id;
      outcome := case when r.answer is not null
                        then outcome || jsonb_build_object('event_id', r.event_id, 'data', r.answer) end;
    end if;
  end if;
  if outcome is not null and ids <> '{}' then
    return query
    select w.execution_id, w.queue from lanekeeper.resume_agent_executions(ids, array(
      select case when not x.is_external or v.external_id is distinct from 'completed ' || p_key then outcome
                  else outcome || jsonb_build_object('data',
                         lanekeeper.agent_end_for_worker(v.data, x.id, p_key::uuid)) end
        from agent_executions x where x.id = any (ids) order by x.id),
      '{}', null, case when p_kind = 'agent' then lanekeeper.agent_uuid(p_key) end) w;
    update agent_events e set consumed_by = ids[cardinality(ids)] where e.id = v.id;  -- one id, even if several resumed
    takers :=
      array(select distinct t.id from unnest(ids || v.consumed_by || r.execution_id) t (id) where t.id is not null);
    insert into agent_links (cause, kind, effect)
    select 'event ' || v.id, 'woke', 'execution ' || t.id from unnest(takers) t (id) where cardinality(takers) > 1
    on conflict do nothing;
  end if;
  delete from agent_unpublished_completions u
   where p_event_id is null and u.execution_id = p_key::uuid and (p_wait or not exists (
           select from agent_executions x
            where x.waiting_for = 'agent' and x.waiting_key = p_key and (x.status = 'waiting') is true));
end $$;
comment on function lanekeeper.resume_agent_waiters is
  'Resume the executions that wait for a kind and key, by an event. An event of a request answers the request first. '
  'Without p_event_id the event is the end of the execution p_key: an end only records the event, so ends never wait '
  'for one another. Without p_wait it skips locked rows.';

create or replace function lanekeeper.agent_next_in_line(p_queue text, p_flow text, p_surface text, p_skip text[])
returns boolean
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan
set jit = off as $$
begin
  if p_flow = any (p_skip)
     or exists (select from agent_limits l
                 where (l.kind = 'flow' and l.name = p_flow) or (l.kind = 'surface' and l.name = p_surface)) then
    -- A claimer counts a limit under its lock, together with all ready executions.
    return false;
  end if;
  -- Usually no other execution is ready, or only executions above a limit.
  return not exists (select from agent_executions x
                      where x.claimed_by is null and x.status in ('pending', 'running') and not x.is_external
                        and x.queue = p_queue)
      or not exists (select from lanekeeper.agent_ready_kinds k
                      where k.queue = p_queue and k.flow <> all (p_skip) and (k.places > 0) is not false);
end $$;
comment on function lanekeeper.agent_next_in_line is
  'Whether workers would claim an execution next if it became ready now: no limit concerns it, and nothing else in '
  'its queue can be claimed.';

create or replace function lanekeeper.agent_repeated_event(p_event text, p_key text, p_id text) returns uuid
language plpgsql stable as $$
declare
  e agent_events;
begin
  select v.* into e from agent_events v where v.external_id = p_id;
  if (e.event, e.key) <> (p_event, p_key) then
    raise exception 'id % was used for another event: give each event its own id', quote_literal(left(p_id, 60))
      using errcode = '22023';
  end if;
  return e.id;
end $$;
comment on function lanekeeper.agent_repeated_event is
  'The earlier event with an id. Refuses with 22023 the id of an event with another name or key.';

-- Usually one execution waits for an event. Starting a statement costs more than its work, so there are four:
-- lock the execution; write the event and decide whether this process may claim; write the outcome; claim.
create or replace function lanekeeper.deliver_agent_event(p_event text, p_key text, p_data jsonb default '{}',
                                    p_id text default null, p_worker uuid default null, p_queues text[] default '{}',
                                    p_skip text[] default '{}')
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean,
               steps text[], claims bigint[], prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  kind constant text := lanekeeper.check_agent_event(p_event, p_key, p_data, p_id);
  plain boolean := kind not in ('agent', 'document', 'signature', 'test');    -- the other kinds do more than resume
  -- True: a pause waits up to 2 seconds for this transaction. False: a session holds or awaits the lock of a pause.
  steady constant boolean := pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0));
  w record;                         -- the waiting execution
  mine boolean;                     -- this process claims it
begin
  perform lanekeeper.refuse_agent_trial('agent_events');
  p_key := case when plain then p_key else coalesce(lanekeeper.agent_uuid(p_key)::text, p_key) end;
  perform pg_advisory_xact_lock(hashtextextended('wait ' || kind || ' ' || p_key, 0));
  select x.id, x.queue, x.flow, x.surface, x.is_external,
         exists (select from agent_executions o
                  where o.waiting_for = kind and o.waiting_key = p_key and o.id <> x.id) as several
    into w from agent_executions x
   where x.waiting_for = kind and x.waiting_key = p_key and (x.status = 'waiting') is true
     and (kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false)) order by x.id for update;
  plain := plain and w.several is not true;
  p_data := coalesce(p_data, '{}');
  n := 1;
  held := false;
  with v as (
    insert into agent_events as v (event, key, data, external_id, consumed_by)
    values (p_event, p_key, p_data, p_id, case when plain then w.id end)
    on conflict (external_id) do nothing returning v.id)
  select v.id, w.queue = any (p_queues) and not w.is_external
         and (w.surface in ('operate', 'chat')
              or steady and not exists (select from agent_pauses p where p.resumed_at is null))
         and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp())
         and lanekeeper.agent_next_in_line(w.queue, w.flow, w.surface, p_skip)
    into event_id, mine from v;
  if event_id is null or plain and w.id is null then         -- a duplicate, or an event without a waiter
    event_id := coalesce(event_id, lanekeeper.agent_repeated_event(p_event, p_key, p_id));
    return next;
  -- With several waiters, the claim from the queue decides their order.
  elsif not plain then
    for execution_id, queue in
      select r.id, r.queue
        from lanekeeper.resume_agent_waiters(kind, p_key, event_id, true) r loop
      return next;
    end loop;
    if execution_id is null then return next; end if;
  else
    return query
      select 1, event_id, r.*
        from lanekeeper.resume_agent_executions(
               array[w.id],
               array[jsonb_build_object('event', p_event, 'event_id', event_id, 'data', p_data, 'timed_out', false)],
               case when mine then array[w.id] else '{}' end, p_worker) r;
  end if;
end $$;
comment on function lanekeeper.deliver_agent_event is
  'Record an event and resume the executions that wait for it. p_worker has free slots in p_queues: an execution that '
  'it would claim next is claimed at once, and the row has its checkpoints. held: recover the claim first. Rows: the '
  'event with each execution (null: none).';

create or replace function lanekeeper.deliver_agent_events(p_events text[], p_keys text[], p_data jsonb[], p_ids text[],
                                     p_worker uuid, p_background int, p_interactive int, p_skip text[])
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean,
               steps text[], claims bigint[], prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set jit = off
set lock_timeout = '50ms' as $$
#variable_conflict use_column
declare
  kinds text[];                                                           -- by place: the kind of wait
  free int[];                                                             -- places of the locked events
  events uuid[] := array_fill(null::uuid, array[cardinality(p_events)]);    -- by place: the row that is written
  ids uuid[] := events;                                                   -- by place: the waiting execution
  inserted uuid[];
  mine uuid[];                                                            -- executions that the worker would claim next
  -- True: a pause waits up to 2 seconds for this transaction. False: a session holds or awaits the lock of a pause.
  steady constant boolean := pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0));
begin
  perform lanekeeper.refuse_agent_trial('agent_events');
  kinds := array(select lanekeeper.check_agent_event(t.event, t.key, t.data, t.id)
                   from unnest(p_events, p_keys, p_data, p_ids) with ordinality t (event, key, data, id, n)
                  order by t.n);
  -- Lock each event that at most one execution waits for, and that execution.
  free := array(
    select t.n from (select u.*, row_number() over (partition by u.kind, u.key order by u.n) as nth_of_key,
                            row_number() over (partition by u.id order by u.n) as nth_of_id
                       from unnest(kinds, p_keys, p_ids) with ordinality u (kind, key, id, n)) t
     where t.kind not in ('agent', 'document', 'signature', 'test')
       and t.nth_of_key = 1
       and (t.id is null or t.nth_of_id = 1)
       and pg_try_advisory_xact_lock(hashtextextended('wait ' || t.kind || ' ' || t.key, 0))
       and (t.id is null or pg_try_advisory_xact_lock(1818324581, (hashtextextended(t.id, 0) & 2047)::int)));
  for n, execution_id in
    select t.n, w.id from unnest(kinds, p_keys) with ordinality t (kind, key, n)
     cross join lateral (
       select x.id from agent_executions x
        where x.waiting_for = t.kind and x.waiting_key = t.key and (x.status = 'waiting') is true
          and (t.kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false)) for update skip locked) w
     where t.n = any (free)
  loop
    ids[n] := execution_id;
  end loop;
  -- Leave out an event with a second or a locked waiter. Leave out executions with lanes, because lanes have their own
  -- lock order. Without the offsets the planner might read all waits.
  for n in
    select t.n from unnest(kinds, p_keys, ids) with ordinality t (kind, key, id, n)
     where t.n = any (free)
       and not exists (select from agent_executions x
                        where x.waiting_for = t.kind and x.waiting_key = t.key and (x.status = 'waiting') is true
                          and x.id is distinct from t.id
                          and (t.kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false)) offset 0)
       and not exists (select from agent_locks l where l.execution_id = t.id offset 0)
       and not exists (select from agent_lock_loans k where k.lender = t.id offset 0)
  loop
    events[n] := lanekeeper.agent_uuid7();
  end loop;
  with v as (
    insert into agent_events as v (id, event, key, data, external_id, consumed_by)
    select t.row_, t.event, t.key, coalesce(t.data, '{}'), t.id, t.taker
      from unnest(events, p_events, p_keys, p_data, p_ids, ids) t (row_, event, key, data, id, taker)
     where t.row_ is not null order by t.id, t.key
    on conflict (external_id) do nothing returning v.id)
  select array_agg(v.id) into inserted from v;
  ids := array(select case when t.row_ = any (inserted) then t.id end
                 from unnest(events, ids) with ordinality t (row_, id, n)
                order by t.n);
  mine := array(
    with x as materialized (
      select x.id, x.queue, x.flow, x.surface,
             row_number() over (partition by x.queue order by x.priority, x.id) as place
        from agent_executions x
       where x.id = any (ids) and not x.is_external
         and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp())
         and (x.surface in ('operate', 'chat')
              or steady and not exists (select from agent_pauses p where p.resumed_at is null))),
    next as materialized (
      select k.*, lanekeeper.agent_next_in_line(k.queue, k.flow, k.surface, p_skip) as is_next
        from (select distinct x.queue, x.flow, x.surface from x) k)
    select x.id from x join next k on (k.queue, k.flow, k.surface) = (x.queue, x.flow, x.surface)
     where k.is_next and x.place <= case x.queue when 'background' then p_background else p_interactive end);
  return query
  select array_position(ids, r.execution_id), events[array_position(ids, r.execution_id)], r.*
    from lanekeeper.resume_agent_executions(ids, array(
           select jsonb_build_object('event', t.event, 'event_id', t.row_, 'data', coalesce(t.data, '{}'),
                                     'timed_out', false)
             from unnest(p_events, events, p_data) with ordinality t (event, row_, data, n)
            order by t.n), mine, p_worker) r
  union all
  select t.n::int,
         case when t.row_ = any (inserted) then t.row_
              else (select v.id from agent_events v
                     where v.external_id = t.id and v.event = t.event and v.key = t.key and t.row_ is not null) end,
         null, null, null, false, null, null, null, null, null, null
    from unnest(events, p_ids, ids, p_events, p_keys) with ordinality t (row_, id, waiter, event, key, n)
   where t.waiter is null;
end $$;
comment on function lanekeeper.deliver_agent_events is
  'deliver_agent_event for several events, without waiting. n is the place of the event, from 1. A row without '
  'event_id was not delivered, because of a lock, several waiters or a used id: deliver it alone.';

create or replace function lanekeeper.refuse_agent_own_event(p_event text) returns void
language plpgsql immutable as $$
begin
  if p_event in ('AGENT_COMPLETED', 'APPROVAL_DECIDED') then
    raise exception 'event % is reserved', p_event using errcode = '22023',
      hint = 'The end of an execution and the decision on an approval are such events.';
  end if;
end $$;
comment on function lanekeeper.refuse_agent_own_event is 'Refuse with 22023 the events that only the agent raises.';

create or replace function deliver_agent_event(p_event text, p_key text, p_data jsonb default '{}',
                                               p_id text default null)
returns table (event_id uuid, execution_id uuid)
language plpgsql volatile security definer set search_path from current as $$
begin
  perform lanekeeper.check_agent_size('the data', p_data::text);
  perform lanekeeper.refuse_agent_own_event(p_event);
  return query select d.event_id, d.execution_id
                 from lanekeeper.deliver_agent_event(p_event, p_key, p_data, nullif(p_id, '')) d;
end $$;
comment on function deliver_agent_event is
  'Record an event, such as EVENT_COMPLETED, and resume every execution that waits for its key. Without a waiter the '
  'event is kept for the first wait. The same p_id twice counts once (empty: none). Rows: the event, with each '
  'execution that it resumed (null: none). 22023: AGENT_COMPLETED and APPROVAL_DECIDED, which only the agent raises, '
  'the p_id of another name or key, and bad input.';

create or replace function raise_agent_event(
  p_event text, p_key text, p_data jsonb default '{}', p_id text default null, p_trace_id text default '')
returns table (event_id uuid, execution_id uuid)
language plpgsql volatile security definer set search_path from current as $$
#variable_conflict use_column
begin
  if p_trace_id <> '' and p_trace_id !~ '^(hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}$' then
    raise exception '% is not a trace id', quote_literal(left(p_trace_id, 60)) using errcode = '22023';
  end if;
  p_id := nullif(p_id, '');
  perform lanekeeper.check_agent_size('the data', p_data::text);
  perform lanekeeper.refuse_agent_own_event(p_event);
  perform lanekeeper.check_agent_event_id(p_event, p_key, p_id);
  -- For this transaction; the trigger reads it.
  perform set_config('lanekeeper.trace_id', coalesce(p_trace_id, ''), true);
  if exists (select from lanekeeper.agent_wait_events k
              where k.event = p_event and k.kind not in ('delay', 'lane')) then
    return query select d.event_id, d.execution_id from lanekeeper.deliver_agent_event(p_event, p_key, p_data, p_id) d;
  else
    return query
      insert into agent_events as v (event, key, data, external_id)
      values (p_event, p_key, coalesce(p_data, '{}'), p_id)
      on conflict (external_id) do nothing returning v.id, null::uuid;
    if not found then
      return query select lanekeeper.agent_repeated_event(p_event, p_key, p_id), null::uuid;
    end if;
  end if;
  perform set_config('lanekeeper.trace_id', '', true);
end $$;
comment on function raise_agent_event is
  'Record an event of any other name for a trace (empty: none). Automations that it starts belong to that trace. It '
  'resumes executions and refuses events as deliver_agent_event does. The same p_id twice counts once.';

create or replace trigger agent_events_lock_id before insert on agent_events
  for each row when (new.external_id is not null and new.execution_id is null)
  execute function lanekeeper.agent_events_lock_id();
