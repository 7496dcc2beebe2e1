-- The outbox of threads: what executions say in a conversation, one at a time and in order.
--
-- A send takes the lane of its thread, or finds that the execution has it or may borrow it; then the message gets its
-- place (seq) and is on its way. Anybody else's message is queued, and so is one that comes while others stand in the queue. When
-- the lane frees, the head of the queue takes it for itself, and the messages of that execution leave. A message's way out
-- depends on its channel: chat is there to be read (sent), webhook and log are carried out by a process (sending, then
-- delivered or failed). It may be delivered twice, under one id.
--
-- The lane of a thread is renewed by sends alone: after ten minutes without one it is anybody's, unless its holder
-- waits durably. Locks: executions by id, the lane, the thread, its messages.

alter table agent_messages
  add column target text not null default '',              -- of channel webhook: the name of an outgoing target
  add column next_attempt_at timestamptz,
  add column delivered_at timestamptz;
create index agent_messages_sending on agent_messages (next_attempt_at, id) where status = 'sending';
create index agent_messages_queued on agent_messages (thread_id, id) where status = 'queued';
alter table agent_threads add column watched_until timestamptz not null default 'epoch';
comment on column agent_threads.watched_until is 'Somebody looks at this thread until then: a message notifies on agent_messages.';

create function agent_thread_lane(p_thread text) returns text language sql immutable as $$ select 'thread:' || p_thread $$;

create function lock_agent_thread(p_thread text) returns void
language plpgsql volatile as $$
begin
  -- Also where the lane has no row yet; acquire_agent_lock takes the same lock for its first hold.
  perform pg_advisory_xact_lock(hashtextextended('lane ' || agent_thread_lane(p_thread), 0));
  perform 1 from agent_locks l where l.lane = agent_thread_lane(p_thread) for update;
  perform 1 from agent_threads t where t.id = p_thread for no key update;
  if not found then
    raise exception 'there is no thread %', quote_literal(p_thread) using errcode = 'P0002';
  end if;
end $$;

create function place_agent_message(p_id uuid) returns bigint
language plpgsql volatile as $$
declare
  m record;
  place bigint;
  watched timestamptz;
begin
  select x.thread_id, x.channel, x.execution_id into m from agent_messages x where x.id = p_id;
  update agent_threads t set next_seq = t.next_seq + 1, updated_at = clock_timestamp()
   where t.id = m.thread_id returning t.next_seq - 1, t.watched_until into place, watched;
  update agent_messages x
     set seq = place, sent_at = clock_timestamp(),
         turn = coalesce((select max(y.turn) from agent_messages y where y.thread_id = m.thread_id), place),
         status = case when m.channel in ('webhook', 'log') then 'sending' else 'sent' end,
         next_attempt_at = case when m.channel in ('webhook', 'log') then clock_timestamp() end
   where x.id = p_id;
  if m.channel in ('webhook', 'log') then
    perform pg_notify('agent_outbox', m.thread_id);
  end if;
  if watched > clock_timestamp() then
    perform pg_notify('agent_messages', m.thread_id);
  end if;
  return place;
end $$;
comment on function place_agent_message is 'Give a message its place in its thread, whose row the caller has locked.';

create function send_agent_message(p_thread text, p_execution_id uuid, p_claim bigint, p_content text,
                                   p_channel text default 'chat', p_target text default '', p_tokens int default 0)
returns table (message_id uuid, seq bigint, queued boolean, acquired boolean, holder text, lender uuid, stale_ms bigint)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  lane_ text := agent_thread_lane(p_thread);
  owner_ text := p_execution_id || '#' || p_claim;
  held agent_locks;
  live boolean;
  mine boolean := false;
  waiting boolean;                                          -- others stand in the queue
  got record;
begin
  if p_channel not in ('chat', 'webhook', 'log') then
    raise exception 'channel % is not known: give chat, webhook or log', quote_literal(p_channel) using errcode = '22023';
  end if;
  acquired := false;
  if p_execution_id is not null then
    perform fence_agent_execution(p_execution_id, p_claim);
  end if;
  perform lock_agent_thread(p_thread);
  select l.* into held from agent_locks l where l.lane = lane_;
  live := found and held.expires_at > clock_timestamp();
  if live and held.execution_id = p_execution_id then
    mine := true;
    if not held.parked then
      update agent_locks l set expires_at = clock_timestamp() + interval '10 minutes', ttl_seconds = 600 where l.lane = lane_;
    end if;
  elsif live and p_execution_id is not null then
    select b.acquired, b.lender into got from borrow_agent_lock(lane_, p_execution_id, p_claim, 600) b;
    mine := got.acquired;
    lender := got.lender;
  elsif not live then
    waiting := exists (select from agent_messages m where m.thread_id = p_thread and m.status = 'queued');
    if not waiting and p_execution_id is null then
      mine := agent_lane_open(lane_);
    elsif not waiting then
      if held.locked_by <> '' then
        stale_ms := extract(epoch from clock_timestamp() - held.expires_at + make_interval(secs => held.ttl_seconds)) * 1000;
      end if;
      select a.acquired into got from acquire_agent_lock(lane_, owner_, 600) a;
      mine := got.acquired;
      acquired := mine;
    end if;
  end if;
  if mine then                                              -- its own earlier ones leave first
    mine := not exists (select from agent_messages m
                         where m.thread_id = p_thread and m.status = 'queued' and m.execution_id = p_execution_id);
  end if;
  insert into agent_messages as m (thread_id, role, content, channel, target, execution_id, trace_id, status, tokens)
  values (p_thread, 'assistant', p_content, p_channel, coalesce(p_target, ''), p_execution_id,
          coalesce((select x.trace_id from agent_executions x where x.id = p_execution_id), ''), 'queued', coalesce(p_tokens, 0))
  returning m.id into message_id;
  if mine then
    seq := place_agent_message(message_id);
  elsif not coalesce(live and held.execution_id is distinct from p_execution_id, false) then
    perform flush_agent_thread(p_thread);
    select m.seq into seq from agent_messages m where m.id = message_id;
  end if;
  queued := seq is null;
  if queued then
    select l.locked_by into holder from agent_locks l where l.lane = lane_ and l.expires_at > clock_timestamp();
  end if;
  return next;
end $$;
comment on function send_agent_message is
  'Say something in a thread, on behalf of an execution or, with null, of nobody who could hold it. The execution that holds or '
  'may borrow the lane of the thread sends at once; anyone else''s message is queued and leaves first-in-first-out.';

create function flush_agent_thread(p_thread text, p_limit int default 100) returns int
language plpgsql volatile as $$
declare
  lane_ text := agent_thread_lane(p_thread);
  head record;
  who agent_executions;
  held agent_locks;
  n int := 0;
begin
  while n < p_limit loop
    select m.id, m.execution_id into head from agent_messages m
     where m.thread_id = p_thread and m.status = 'queued' order by m.id limit 1;
    exit when not found;
    who := null;
    if head.execution_id is not null then
      -- Executions before lanes. One that is being claimed or ended now is left to the next call.
      select x.* into who
        from agent_executions x where x.id = head.execution_id for no key update skip locked;
      exit when not found and exists (select from agent_executions x where x.id = head.execution_id);
    end if;
    perform lock_agent_thread(p_thread);
    perform 1 from agent_messages m where m.id = head.id and m.status = 'queued' for update;
    continue when not found;
    select l.* into held from agent_locks l where l.lane = lane_;
    if found and held.expires_at > clock_timestamp() then
      exit when held.execution_id is distinct from head.execution_id;
    elsif who.id is null or who.completed_at is not null then
      exit when not agent_lane_open(lane_);
    else
      exit when not (select a.acquired from acquire_agent_lock(lane_, who.id || '#' || who.claim, 600) a);
      if who.status = 'waiting' then
        perform park_agent_locks(who.id, true);
      end if;
    end if;
    perform place_agent_message(head.id);
    if who.status = 'waiting' and who.waiting_data ->> 'queued_message' = head.id::text then
      update agent_executions x                             -- its question is out: now it waits for the answer
         set waiting_until = clock_timestamp() + make_interval(secs => (who.waiting_data ->> 'timeout_seconds')::float8),
             waiting_data = x.waiting_data - 'queued_message'
       where x.id = who.id;
    end if;
    n := n + 1;
  end loop;
  return n;
end $$;
comment on function flush_agent_thread is
  'Send what is queued in a thread and may leave now, in its order. Called whenever the thread changes hands; by the sweep, too.';

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
    select v.id, v.data into came from agent_events v where v.external_id = p_id;
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
  update agent_messages m set status = 'withdrawn' where m.execution_id = p_execution_id and m.status = 'queued'
$$;

create function clean_agent_threads() returns table (thread_id text, locked_by text, execution_id uuid, idle_seconds bigint)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  l agent_locks;
begin
  for l in
    select k.* from agent_locks k left join agent_executions x on x.id = k.execution_id
     where k.lane like 'thread:%' and k.locked_by <> ''
       and (k.expires_at <= clock_timestamp() or x.completed_at is not null
            or k.execution_id is not null and x.id is null)
     order by k.lane for update of k skip locked
  loop
    thread_id := substr(l.lane, 8);
    locked_by := l.locked_by;
    execution_id := l.execution_id;
    idle_seconds := extract(epoch from clock_timestamp() - case when l.parked then l.locked_at
                                         else l.expires_at - make_interval(secs => l.ttl_seconds) end);
    if return_agent_lock(l.lane) is null then
      update agent_locks k set locked_by = '', fencing_token = k.fencing_token + 1, parked = false, execution_id = null,
             expires_at = least(k.expires_at, clock_timestamp()) where k.lane = l.lane;
      perform agent_lane_freed(l.lane);
    end if;
    return next;
  end loop;
end $$;
comment on function clean_agent_threads is
  'Free the threads whose holder has ended, is gone, or has not sent anything for the time of the lease. The sweep does it, too.';
