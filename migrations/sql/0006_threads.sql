-- Threads: conversations, with people or systems, over any channel. The package `threads` owns both tables.
--
-- A message gets its place (seq) under the row lock of its thread, so that places have no gaps, never change
-- hands and grow in the order of the commits. A turn is a message and what was said in answer to it; its number
-- is the place of the message that began it. A question that came while an earlier one was being answered has a
-- smaller place than that answer, and still follows it in the order of (turn, seq), which is how a conversation
-- is read. A message that waits in the queue has no place yet.

create table agent_threads (
  id              text primary key check (id ~ '^[^[:cntrl:]]{1,200}$' and id ~ '[^[:space:]]'),
  channel         text not null check (channel <> ''),       -- where it was begun
  agent           text not null default 'flowpilot',
  owner           text not null default '',                  -- who may speak in it: a key's name, an admin
  participant     text not null default '',                  -- who the agent talks with, for people
  next_seq        bigint not null default 1,
  summary         text not null default '',                  -- of the turns up to summary_through
  summary_through bigint not null default 0,
  created_at      timestamptz not null default clock_timestamp(),
  updated_at      timestamptz not null default clock_timestamp(),
  check (summary_through >= 0 and summary_through < next_seq)
) with (fillfactor = 70);
create index agent_threads_recent on agent_threads (updated_at, id);
create index agent_threads_owner on agent_threads (owner, updated_at, id);

create table agent_messages (
  id            uuid primary key default agent_uuid7(),
  thread_id     text not null references agent_threads (id) on delete cascade,
  seq           bigint check (seq > 0),                       -- null: not sent yet
  turn          bigint check (turn > 0 and turn <= seq),
  role          text not null check (role in ('user', 'assistant', 'system', 'tool')),
  content       text not null,
  channel       text not null default '',
  execution_id  uuid,
  trace_id      text not null default '',
  status        text not null
                check (status in ('queued', 'sending', 'sent', 'delivered', 'received', 'failed', 'withdrawn')),
  interrupted   boolean not null default false,               -- the speaker was cut short
  tokens        int not null default 0,                       -- an estimate
  attempts      int not null default 0,
  error_message text,
  created_at    timestamptz not null default clock_timestamp(),
  sent_at       timestamptz,
  constraint agent_messages_order unique (thread_id, seq),
  check ((seq is null) = (turn is null)),
  check (case when seq is null then status in ('queued', 'failed', 'withdrawn') else status <> 'queued' end)
);
create index agent_messages_turns on agent_messages (thread_id, turn, seq);
create index agent_messages_execution on agent_messages (execution_id) where execution_id is not null;
create index agent_messages_queue on agent_messages (thread_id, id) where status in ('queued', 'sending');
comment on column agent_messages.turn is 'The seq of the message that began the exchange this one belongs to.';

create view agent_thread_locks as
  select substr(l.lane, 8) as thread_id, l.execution_id as active_execution_id, s.at as execution_locked_at,
         floor(extract(epoch from clock_timestamp() - s.at) / 60)::int as lock_minutes,
         coalesce(t.participant, '') as participant_name, l.parked, l.expires_at <= clock_timestamp() as stale
    from agent_locks l
    cross join lateral (select case when l.parked then l.locked_at
                                    else l.expires_at - make_interval(secs => l.ttl_seconds) end as at) s
    left join agent_threads t on t.id = substr(l.lane, 8)
   where l.lane like 'thread:%' and l.locked_by <> '';
comment on view agent_thread_locks is
  'Who holds which thread, since its last sign of life. Stale: nothing was sent for the time of the lease, and the next '
  'who wants the thread gets it. A parked one belongs to a waiting execution and does not expire.';

-- What a turn under way has said so far: for those who look on from another process, for the turn itself when it
-- goes on elsewhere, and for who interrupts it. settled is how much of it will not change any more, in characters.
create table agent_message_drafts (
  execution_id uuid primary key,
  claim        bigint not null,
  content      text not null,
  settled      int not null default 0,
  updated_at   timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

-- Which turns of a thread are under way.
create index agent_executions_thread on agent_executions (thread_id) where thread_id is not null and completed_at is null;
