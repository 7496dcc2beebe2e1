-- The outbox of threads: what executions say in a conversation, one at a time and in order.
--
-- A send takes the lane of its thread, or finds that the execution has it or may borrow it; then the message gets its
-- place (seq) and is on its way. Anybody else's message is queued, and so is one that comes while others stand in the queue. When
-- the lane frees, the head of the queue takes it for itself, and the messages of that execution leave. A message's way out
-- depends on its channel: chat is there to be read (sent), webhook and log are carried out by a process (sending, then
-- delivered or failed). It may be delivered twice, under one id.
--
-- The lane of a thread is renewed by sends alone: after ten minutes without one (agent_threads.idle_seconds) it is anybody's,
-- unless its holder waits durably. Locks: executions by id, the lane, the thread, its messages.

alter table agent_messages
  add column target text not null default '',              -- of channel webhook: the name of an outgoing target
  add column dedupe_key text,                              -- makes a send from outside count once
  add column next_attempt_at timestamptz,                  -- while sending; null: one before it has to be settled first
  add column delivered_at timestamptz;
drop index agent_messages_queue;
create unique index agent_messages_dedupe on agent_messages (dedupe_key) where dedupe_key is not null;
create index agent_messages_queued on agent_messages (thread_id, id) include (execution_id) where status = 'queued';
create index agent_messages_sending on agent_messages (thread_id, seq) where status = 'sending';
create index agent_messages_due on agent_messages (next_attempt_at) where status = 'sending' and next_attempt_at is not null;
alter table agent_threads
  add column target text not null default '',              -- of channel webhook: where its messages go by default
  add column idle_seconds int not null default 600 check (idle_seconds between 1 and 2592000),
  add column watched_until timestamptz not null default 'epoch';
comment on column agent_threads.idle_seconds is 'How long its lane lasts without a send. What holds it keeps the time it was taken or renewed with.';
comment on column agent_threads.watched_until is 'Somebody looks at this thread until then: a message notifies on agent_messages.';

-- What may expire. Parking changes the key of the row anyway, so that this index costs renewals nothing.
create index agent_locks_threads on agent_locks (lane) where lane like 'thread:%' and locked_by <> '' and not parked;

create or replace view agent_thread_locks as
  select substr(l.lane, 8) as thread_id, l.execution_id as active_execution_id, s.at as execution_locked_at,
         floor(extract(epoch from clock_timestamp() - s.at) / 60)::int as lock_minutes,
         coalesce(t.participant, '') as participant_name, l.parked, l.expires_at <= clock_timestamp() as stale,
         l.locked_by as holder,
         (select count(*) from agent_messages m where m.thread_id = substr(l.lane, 8) and m.status = 'queued') as queued
    from agent_locks l
    cross join lateral (select case when l.parked then l.locked_at
                                    else l.expires_at - make_interval(secs => l.ttl_seconds) end as at) s
    left join agent_threads t on t.id = substr(l.lane, 8)
   where l.lane like 'thread:%' and l.locked_by <> '';

create function agent_thread_lane(p_thread text) returns text language sql immutable as $$ select 'thread:' || p_thread $$;

create function agent_thread_idle(p_thread text) returns int language sql stable as $$
  select coalesce((select t.idle_seconds from agent_threads t where t.id = p_thread), 600)
$$;

create function lock_agent_thread(p_thread text, p_wait boolean default true) returns boolean
language plpgsql volatile as $$
declare
  lane_ text := agent_thread_lane(p_thread);
  key_ bigint := hashtextextended('lane ' || agent_thread_lane(p_thread), 0);
begin
  -- The advisory lock is for a lane that has no row yet; acquire_agent_lock takes the same for its first hold.
  if p_wait then
    perform pg_advisory_xact_lock(key_);
    perform 1 from agent_locks l where l.lane = lane_ for update;
    perform 1 from agent_threads t where t.id = p_thread for no key update;
    if not found then
      raise exception 'there is no thread %', quote_literal(p_thread) using errcode = 'P0002';
    end if;
    return true;
  end if;
  if not pg_try_advisory_xact_lock(key_) then
    return false;
  end if;
  perform 1 from agent_locks l where l.lane = lane_ for update skip locked;
  if not found and exists (select from agent_locks l where l.lane = lane_) then
    return false;
  end if;
  perform 1 from agent_threads t where t.id = p_thread for no key update skip locked;
  return found;
end $$;
comment on function lock_agent_thread is
  'Lock the lane and the row of a thread. Without waiting it answers false when somebody else works on them.';

create function place_agent_message(p_id uuid) returns bigint
language plpgsql volatile as $$
declare
  m record;
  place bigint;
  watched timestamptz;
  carried boolean;
begin
  select x.thread_id, x.channel, x.target into m from agent_messages x where x.id = p_id;
  carried := m.channel in ('webhook', 'log');
  update agent_threads t set next_seq = t.next_seq + 1, updated_at = clock_timestamp()
   where t.id = m.thread_id returning t.next_seq - 1, t.watched_until into place, watched;
  update agent_messages x
     set seq = place, sent_at = clock_timestamp(),
         turn = coalesce((select max(y.turn) from agent_messages y where y.thread_id = m.thread_id), place),
         status = case when carried then 'sending' else 'sent' end,
         -- It stands behind those of its thread that go the same way and are not settled yet.
         next_attempt_at = case when carried and not exists (
           select from agent_messages y where y.thread_id = m.thread_id and y.status = 'sending' and y.channel = m.channel
              and y.target = m.target) then clock_timestamp() end
   where x.id = p_id;
  if carried then
    perform pg_notify('agent_outbox', '');
  end if;
  if watched > clock_timestamp() then
    perform pg_notify('agent_messages', m.thread_id);
  end if;
  return place;
end $$;
comment on function place_agent_message is 'Give a message its place in its thread, whose row the caller has locked.';

create function settle_agent_message(p_id uuid, p_attempt int, p_status text, p_error text, p_retry interval) returns boolean
language plpgsql volatile as $$
declare
  m record;
begin
  if p_status is null or p_status not in ('sending', 'delivered', 'failed') or p_status = 'sending' and p_retry is null then
    raise exception 'an attempt ends as delivered, failed, or sending with the time until the next one, not %', coalesce(quote_literal(p_status), 'null')
      using errcode = '22023';
  end if;
  select x.thread_id, x.channel, x.target into m from agent_messages x where x.id = p_id;
  perform 1 from agent_threads t where t.id = m.thread_id for no key update;      -- a new message sees this one settled, or is seen here
  update agent_messages x
     set status = p_status, error_message = nullif(p_error, ''),
         delivered_at = case when p_status = 'delivered' then clock_timestamp() end,
         next_attempt_at = case when p_status = 'sending' then clock_timestamp() + p_retry end
   where x.id = p_id and x.status = 'sending' and x.attempts = p_attempt;
  if not found then
    return false;
  end if;
  if p_status <> 'sending' then
    update agent_messages x set next_attempt_at = clock_timestamp()
     where x.id = (select y.id from agent_messages y where y.thread_id = m.thread_id and y.status = 'sending'
                      and y.channel = m.channel and y.target = m.target order by y.seq limit 1)
       and x.next_attempt_at is null;
    if found then
      perform pg_notify('agent_outbox', '');
    end if;
  end if;
  return true;
end $$;
comment on function settle_agent_message is
  'Record how an attempt to carry a message ended; the next one of its thread may go then. False when the attempt was outlived by another.';

create function send_agent_message(p_thread text, p_execution_id uuid, p_claim bigint, p_content text,
                                   p_channel text default null, p_target text default '', p_tokens int default 0)
returns table (message_id uuid, seq bigint, queued boolean, acquired boolean, holder text, lender uuid, stale_holder text,
               stale_ms bigint)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  lane_ text := agent_thread_lane(p_thread);
  t record;
  held agent_locks;
  live boolean;
  mine boolean := false;
  got record;
begin
  acquired := false;
  if p_execution_id is not null then
    perform 1 from agent_executions x where x.id = p_execution_id and x.inherits for no key update;    -- for a loan; before lanes
    perform fence_agent_execution(p_execution_id, p_claim);
  end if;
  perform lock_agent_thread(p_thread);
  select x.channel, x.target, x.idle_seconds as idle into t from agent_threads x where x.id = p_thread;
  p_channel := coalesce(nullif(p_channel, ''), case when t.channel in ('webhook', 'log') then t.channel else 'chat' end);
  p_target := case when p_channel = 'webhook' then coalesce(nullif(p_target, ''), t.target) else '' end;
  if p_channel not in ('chat', 'webhook', 'log') then
    raise exception 'channel % is not known: give chat, webhook or log', quote_literal(p_channel) using errcode = '22023';
  elsif coalesce(btrim(p_content), '') = '' then
    raise exception 'a message needs a content' using errcode = '22023';
  elsif p_channel = 'webhook' and not exists (select from agent_webhook_targets w where w.name = p_target) then
    raise exception 'there is no outgoing webhook target %', quote_literal(p_target) using errcode = '22023',
      hint = 'Declare it in the workspace, and name it as the target of the message or of the thread.';
  end if;
  select l.* into held from agent_locks l where l.lane = lane_;
  live := found and held.expires_at > clock_timestamp();
  if live and held.execution_id = p_execution_id then
    mine := true;
    if not held.parked then
      update agent_locks l set expires_at = clock_timestamp() + make_interval(secs => t.idle), ttl_seconds = t.idle where l.lane = lane_;
    end if;
  elsif live and p_execution_id is not null then
    select b.acquired, b.lender into got from borrow_agent_lock(lane_, p_execution_id, p_claim, t.idle) b;
    mine := got.acquired;
    lender := got.lender;
  elsif not live and not exists (select from agent_messages m where m.thread_id = p_thread and m.status = 'queued') then
    if p_execution_id is null then
      mine := agent_lane_open(lane_);
    else
      if held.locked_by <> '' then
        stale_holder := held.locked_by;
        stale_ms := extract(epoch from clock_timestamp() - held.expires_at + make_interval(secs => held.ttl_seconds)) * 1000;
      end if;
      select a.acquired, a.lender into got from take_agent_lock(lane_, p_execution_id || '#' || p_claim, t.idle) a;
      mine := got.acquired;
      lender := got.lender;
      acquired := mine and lender is null;
    end if;
  end if;
  mine := mine and agent_thread_own(p_thread, p_execution_id) is null;               -- its own earlier ones leave first
  insert into agent_messages as m (thread_id, role, content, channel, target, execution_id, trace_id, status, tokens)
  values (p_thread, 'assistant', p_content, p_channel, p_target, p_execution_id,
          coalesce((select x.trace_id from agent_executions x where x.id = p_execution_id), ''), 'queued', coalesce(p_tokens, 0))
  returning m.id into message_id;
  if mine then
    seq := place_agent_message(message_id);
  else
    perform flush_agent_thread(p_thread);                    -- what may leave; it may be among that
    select m.seq into seq from agent_messages m where m.id = message_id;
  end if;
  queued := seq is null;
  if queued then
    holder := coalesce((select l.locked_by from agent_locks l where l.lane = lane_ and l.expires_at > clock_timestamp()),
                       agent_lock_head(lane_, clock_timestamp()));
  end if;
  return next;
end $$;
comment on function send_agent_message is
  'Say something in a thread, on behalf of an execution or, with null, of nobody who could hold it. The execution that holds or '
  'may borrow the lane of the thread sends at once; anyone else''s message is queued and leaves first-in-first-out. Without a '
  'channel it is the thread''s, or chat. lender is set when the lane was borrowed just now, stale_holder when it was taken from one '
  'whose lease had ended.';

create function agent_speaks_for(p_ended uuid, p_holder uuid) returns boolean
language sql volatile as $$
  with recursive line as (
    select x.parent_id, x.inherits and x.completed_at is not null as may from agent_executions x where x.id = p_ended
    union all
    select x.parent_id, x.inherits and x.completed_at is not null from line l join agent_executions x on x.id = l.parent_id
     where l.may and l.parent_id <> p_holder)
  select exists (select from line l where l.may and l.parent_id = p_holder)
$$;
comment on function agent_speaks_for is
  'Whether an execution that has ended was a child that a holder had waited for, over any number of those between that have ended, '
  'too: what it still has in the queue is said before what the holder says next.';

create function agent_thread_own(p_thread text, p_holder uuid) returns uuid
language sql volatile as $$
  select m.id from agent_messages m left join agent_executions x on x.id = m.execution_id
   where m.thread_id = p_thread and m.status = 'queued'
     and (m.execution_id = p_holder or x.inherits and x.completed_at is not null and agent_speaks_for(x.id, p_holder))
   order by m.id limit 1
$$;
comment on function agent_thread_own is
  'The first queued message that leaves in the name of a holder: its own, or that of a child that it had waited for and that has ended.';

create function agent_thread_next(p_thread text, p_live boolean, p_holder uuid) returns uuid
language sql volatile as $$
  select case when not p_live then
    (select m.id from agent_messages m where m.thread_id = p_thread and m.status = 'queued' order by m.id limit 1)
  else coalesce(
    agent_thread_own(p_thread, p_holder),
    (select m.id from agent_messages m join agent_executions x on x.id = m.execution_id
      where m.thread_id = p_thread and m.status = 'queued' and x.inherits and x.completed_at is null
        and agent_lends(x.id, p_holder, agent_thread_lane(p_thread)) order by m.id limit 1))
  end
$$;
comment on function agent_thread_next is
  'The message that leaves next: of a free thread the first one; of one that is held, the first in the name of its holder, or of who '
  'may borrow from it.';

create function flush_agent_thread(p_thread text, p_limit int default 100, p_wait boolean default true) returns int
language plpgsql volatile as $$
declare
  lane_ text := agent_thread_lane(p_thread);
  head uuid;
  of uuid;
  who agent_executions;
  held agent_locks;
  live boolean;
  n int := 0;
begin
  for tries in 1..p_limit loop
    select l.* into held from agent_locks l where l.lane = lane_;
    live := found and held.expires_at > clock_timestamp();
    head := agent_thread_next(p_thread, live, held.execution_id);
    exit when head is null;
    select m.execution_id into of from agent_messages m where m.id = head;
    who := null;
    if of is not null then
      -- Executions before lanes. One that is being claimed or ended now is left to the next call.
      select x.* into who from agent_executions x where x.id = of for no key update skip locked;
      exit when not found and exists (select from agent_executions x where x.id = of);
    end if;
    exit when not lock_agent_thread(p_thread, p_wait);
    select l.* into held from agent_locks l where l.lane = lane_;
    live := found and held.expires_at > clock_timestamp();
    continue when head is distinct from agent_thread_next(p_thread, live, held.execution_id);    -- it has changed meanwhile
    exit when not take_agent_thread(p_thread, who, live, held.execution_id);
    -- An answer that comes in this moment must find the wait begun, or the question not yet out.
    exit when who.status = 'waiting' and who.waiting_data ->> 'queued_message' = head::text
      and not pg_try_advisory_xact_lock(hashtextextended('wait response ' || p_thread, 0));
    perform place_agent_message(head);
    n := n + 1;
    if who.status = 'waiting' and who.waiting_data ->> 'queued_message' = head::text then
      update agent_executions x                             -- its question is out: now it waits for the answer
         set waiting_until = clock_timestamp() + make_interval(secs => (who.waiting_data ->> 'timeout_seconds')::float8),
             waiting_data = x.waiting_data - 'queued_message' - 'timeout_seconds'
       where x.id = who.id;
    end if;
  end loop;
  return n;
end $$;
comment on function flush_agent_thread is
  'Send what is queued in a thread and may leave now, in its order, at most p_limit messages. Called whenever the thread changes '
  'hands. Without p_wait it does nothing where somebody else works on the thread.';

create function take_agent_thread(p_thread text, p_who agent_executions, p_live boolean, p_holder uuid) returns boolean
language plpgsql volatile as $$
declare
  lane_ text := agent_thread_lane(p_thread);
begin
  if p_live and p_holder = p_who.id then
    return true;
  elsif p_who.id is null or p_who.completed_at is not null then
    -- Nobody who could hold it: of a thread that is held it is a child's of the holder.
    return case when p_live then agent_speaks_for(p_who.id, p_holder) else agent_lane_open(lane_) end;
  elsif p_live then
    if p_who.status = 'running' and not exists (
         select from agent_workers w where w.id = p_who.claimed_by and w.expires_at > clock_timestamp()) then
      return false;                                          -- it borrows when somebody runs it
    end if;
    if not (select b.acquired from borrow_agent_lock(lane_, p_who.id, p_who.claim, agent_thread_idle(p_thread)) b) then
      return false;
    end if;
  elsif not (select a.acquired from acquire_agent_lock(lane_, p_who.id || '#' || p_who.claim, agent_thread_idle(p_thread)) a) then
    return false;
  end if;
  if p_who.status = 'waiting' then
    update agent_locks l set parked = true, expires_at = '9000-01-01 00:00+00',
           fencing_token = agent_lock_token(l.fencing_token, clock_timestamp())
     where l.lane = lane_;
  end if;
  return true;
end $$;
comment on function take_agent_thread is 'Take the lane of a thread for the execution whose queued message leaves; for flush_agent_thread.';

create function flush_agent_threads(p_limit int default 500) returns int
language plpgsql volatile as $$
declare
  q record;
  n int := 0;
begin
  for q in
    with recursive due as (                                  -- each thread once, by an index of what is queued alone
      (select m.thread_id from agent_messages m where m.status = 'queued' order by m.thread_id limit 1)
      union all
      select (select m.thread_id from agent_messages m where m.status = 'queued' and m.thread_id > d.thread_id
               order by m.thread_id limit 1) from due d where d.thread_id is not null)
    select d.thread_id from due d left join agent_locks l on l.lane = agent_thread_lane(d.thread_id) and l.expires_at > clock_timestamp()
     where d.thread_id is not null
       and (l.lane is null or exists (
         select from agent_messages m join agent_executions x on x.id = m.execution_id
          where m.thread_id = d.thread_id and m.status = 'queued' and (x.id = l.execution_id or x.inherits)))
     order by random() limit p_limit                         -- one that cannot leave holds up no other
  loop
    n := n + flush_agent_thread(q.thread_id, 100, false);
  end loop;
  return n;
end $$;
comment on function flush_agent_threads is 'flush_agent_thread for every thread where something may leave. For the sweep: it waits for nobody.';

create function receive_agent_message(p_thread text, p_content text, p_channel text default 'chat', p_data jsonb default '{}',
                                      p_id text default null, p_execution_id uuid default null, p_tokens int default 0)
returns table (message_id uuid, seq bigint, event_id uuid, execution_id uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  message uuid := agent_uuid7();
  place bigint;
  watched timestamptz;
  came record;
  first_ boolean := true;
begin
  perform agent_wait_lock('response', p_thread);            -- before executions, lanes and the thread
  if p_id is not null then
    select v.id, v.data into came from agent_events v where v.external_id = p_id and v.event = 'MESSAGE_RECEIVED' and v.key = p_thread;
    if found then                                           -- it counts once
      return query select (came.data ->> 'message_id')::uuid,
                          (select m.seq from agent_messages m where m.id = (came.data ->> 'message_id')::uuid), came.id, null::uuid;
      return;
    end if;
  end if;
  for came in
    select d.event_id, d.execution_id from deliver_agent_event('MESSAGE_RECEIVED', p_thread,
      coalesce(p_data, '{}') || jsonb_build_object('message_id', message, 'thread_id', p_thread, 'content', p_content,
                                                   'channel', p_channel), p_id) d
  loop
    if first_ then
      first_ := false;
      if p_id is not null and not exists (select from agent_events v where v.id = came.event_id and v.data ->> 'message_id' = message::text) then
        raise exception 'id % was used for another event', quote_literal(p_id) using errcode = '22023';
      end if;
      update agent_threads t set next_seq = t.next_seq + 1, updated_at = clock_timestamp()
       where t.id = p_thread returning t.next_seq - 1, t.watched_until into place, watched;
      if place is null then
        raise exception 'there is no thread %', quote_literal(p_thread) using errcode = 'P0002';
      end if;
      insert into agent_messages (id, thread_id, seq, turn, role, content, channel, execution_id, trace_id, status, tokens, sent_at)
      values (message, p_thread, place, place, 'user', p_content, p_channel, p_execution_id,
              coalesce((select x.trace_id from agent_executions x where x.id = p_execution_id), ''), 'received',
              coalesce(p_tokens, 0), clock_timestamp());
      if watched > clock_timestamp() then
        perform pg_notify('agent_messages', p_thread);
      end if;
      perform agent_lane_freed(agent_thread_lane(p_thread)); -- a flush may have given way to this
    end if;
    return query select message, place, came.event_id, came.execution_id;
  end loop;
end $$;
comment on function receive_agent_message is
  'Record what the other side said in a thread, and end the waits for it: MESSAGE_RECEIVED, its data p_data with message_id, '
  'thread_id, content and channel. Rows: the message, and each execution it woke (null when none). The same p_id counts once.';

create function agent_last_sent(p_id uuid, p_thread text) returns timestamptz
language sql stable as $$
  select coalesce((select m.sent_at from agent_messages m
                    where m.execution_id = p_id and m.thread_id = p_thread and m.role = 'assistant' and m.sent_at is not null
                    order by m.id desc limit 1),
                  (select x.created_at from agent_executions x where x.id = p_id))
$$;
comment on function agent_last_sent is
  'When an execution last said something in a thread, or its beginning: what came before cannot answer it.';

create function agent_queued_message(p_id uuid, p_thread text) returns uuid
language sql stable as $$
  select m.id from agent_messages m
   where m.execution_id = p_id and m.thread_id = p_thread and m.status = 'queued' order by m.id desc limit 1
$$;
comment on function agent_queued_message is 'The execution''s last message of those that still stand in the queue of a thread.';

create function withdraw_agent_messages(p_execution_id uuid) returns void language sql volatile as $$
  with gone as (
    update agent_messages m set status = 'withdrawn' where m.execution_id = p_execution_id and m.status = 'queued' returning m.thread_id)
  select pg_notify('agent_threads', g.thread_id) from (select distinct thread_id from gone) g
$$;
comment on function withdraw_agent_messages is 'Take back what a cancelled execution has queued. What stood behind it may leave.';

create function agent_thread_listener(p_thread text, p_except text[]) returns uuid
language sql volatile as $$
  select coalesce(
    (select x.id from agent_executions x
      where x.status = 'waiting' and x.waiting_for = 'response' and x.waiting_key = p_thread
        and not coalesce(x.waiting_data ? 'queued_message', false) and x.flow <> all (p_except) order by x.id limit 1),
    (select x.id from agent_locks l join agent_executions x on x.id = l.execution_id
      where l.lane = agent_thread_lane(p_thread) and l.expires_at > clock_timestamp() and x.completed_at is null
        and x.flow <> all (p_except)))
$$;
comment on function agent_thread_listener is
  'The execution that what is said in a thread is for: one that waits for it, else the one that has the thread. Flows in p_except do not count.';

create function agent_thread_busy(p_thread text, p_execution_id uuid, p_except text[]) returns boolean
language plpgsql volatile as $$
declare
  id_ uuid := p_execution_id;
  seen uuid[] := '{}';
  x record;
begin
  while id_ is not null and id_ <> all (seen) loop
    seen := seen || id_;
    select e.id, e.status, e.waiting_for, e.waiting_key, e.completed_at into x from agent_executions e where e.id = id_;
    if x.completed_at is not null or x.id is null then        -- who has the thread now goes on
      id_ := (select l.execution_id from agent_locks l join agent_executions e on e.id = l.execution_id
               where l.lane = agent_thread_lane(p_thread) and l.expires_at > clock_timestamp() and e.completed_at is null
                 and e.flow <> all (p_except));
      continue;
    elsif x.status <> 'waiting' then
      return true;
    elsif x.waiting_for <> 'agent' then
      return false;
    end if;
    id_ := agent_uuid(x.waiting_key);                        -- its child speaks for it
    if exists (select from agent_executions e where e.id = id_ and e.completed_at is not null) then
      return true;                                           -- and is woken next
    end if;
  end loop;
  return false;
end $$;
comment on function agent_thread_busy is
  'Whether more may come in a thread without anything from outside: an execution, or those it waits for, are at work.';

create function clean_agent_threads(p_overdue interval default '0', p_unwanted interval default '0')
returns table (thread_id text, locked_by text, execution_id uuid, idle_seconds bigint)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  l agent_locks;
  lane_ text;
begin
  for lane_ in
    select k.lane from agent_locks k
     where k.lane like 'thread:%' and k.locked_by <> '' and not k.parked
       and (k.expires_at <= clock_timestamp() - p_overdue
            and (k.expires_at <= clock_timestamp() - p_unwanted or exists (
              select from agent_messages m where m.thread_id = substr(k.lane, 8) and m.status = 'queued'))
            or k.execution_id is not null and not exists (
              select from agent_executions x where x.id = k.execution_id and x.completed_at is null))
     order by k.lane
  loop
    -- Look again under the lock: it may have been taken over since.
    select k.* into l from agent_locks k where k.lane = lane_ for update skip locked;
    continue when not found or l.locked_by = '' or l.parked
      or l.expires_at > clock_timestamp() - p_overdue and (l.execution_id is null or exists (
           select from agent_executions x where x.id = l.execution_id and x.completed_at is null));
    thread_id := substr(l.lane, 8);
    locked_by := l.locked_by;
    execution_id := l.execution_id;
    idle_seconds := extract(epoch from clock_timestamp() - l.expires_at + make_interval(secs => l.ttl_seconds));
    if return_agent_lock(l.lane) is null then
      update agent_locks k set locked_by = '', fencing_token = k.fencing_token + 1, parked = false, execution_id = null,
             expires_at = least(k.expires_at, clock_timestamp()) where k.lane = l.lane;
      if l.waited_until > clock_timestamp() then
        perform pg_notify('agent_lanes', l.lane);
      end if;
      perform agent_lane_freed(l.lane);
    end if;
    return next;
  end loop;
end $$;
comment on function clean_agent_threads is
  'Free the threads whose holder has ended, is gone, or has not sent anything for the time of the lease, and p_overdue longer; where '
  'no message waits for that, p_unwanted longer, so that a stale thread is seen, and who sends in it next takes it over and says '
  'so. The sweep does it, too.';
