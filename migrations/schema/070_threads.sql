-- Threads: conversations, each with an owner and an order.
--
-- A message gets its number when it joins its thread. A received message joins at once. While the lane thread:ID is
-- held, its holder and the executions that may borrow the lane send. Messages of other senders are queued.
-- agent_thread_access lists the other participants of a thread.

create table agent_threads (
  id text primary key check (id ~ '^[^[:cntrl:]]{1,200}$' and id ~ '[^[:space:]]'),
  channel text not null check (channel <> ''), agent text not null default 'agent', owner text not null default '',
  participant text not null default '', next_seq bigint not null default 1, summary text not null default '',
  summary_through bigint not null default 0, created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(), target text not null default '',
  idle_seconds int not null default 600 check (idle_seconds between 1 and 2592000),
  watched_until timestamptz not null default '1970-01-01 00:00:00+00'::timestamptz,
  owner_kind text not null default '', visitor text not null default '', name text not null default '',
  title text not null default '',
  constraint agent_threads_check check (summary_through >= 0 and summary_through < next_seq),
  constraint agent_threads_owner_kind
    check (owner_kind in ('', 'key', 'visitor', 'flow', 'webhook', 'channel', 'admin'))
) with (fillfactor = 70);
create index agent_threads_name on agent_threads (name, id) where name <> '';
comment on index agent_threads_name is 'Finds a thread by its public name.';
create index agent_threads_of_agent on agent_threads (agent, updated_at, id)
  where agent <> 'agent' and agent <> 'visitor_chat';
comment on index agent_threads_of_agent is
  'Lists the threads of an agent. The two agents of most threads have no entry.';
create index agent_threads_owner on agent_threads (owner, updated_at, id);
comment on index agent_threads_owner is 'Lists the threads of an owner, by their last message.';
create index agent_threads_recent on agent_threads (updated_at, id);
comment on index agent_threads_recent is 'Lists threads by their last message.';
comment on table agent_threads is 'Conversations. The lane thread:ID says who may speak.';
comment on column agent_threads.channel is 'The channel that the thread was begun on.';
comment on column agent_threads.agent is 'The agent that answers.';
comment on column agent_threads.owner is
  'The chat key, flow, endpoint or channel that began the thread. An admin''s thread: the chat key it was opened to, '
  'or admin.';
comment on column agent_threads.participant is 'The other side of the conversation, as people know it.';
comment on column agent_threads.next_seq is 'The number of the next message.';
comment on column agent_threads.summary is 'A summary of the turns up to summary_through.';
comment on column agent_threads.summary_through is 'The last message that the summary covers.';
comment on column agent_threads.target is
  'On channel webhook: the default target of its messages. On telegram, slack and email: the name of the channel.';
comment on column agent_threads.idle_seconds is
  'The lease of the thread''s lane. A holder keeps the lease that it acquired or renewed with.';
comment on column agent_threads.watched_until is
  'A reader watches until then, so each message notifies channel agent_messages.';
comment on column agent_threads.owner_kind is
  'The kind of owner: key, visitor, flow, webhook, channel or admin. Empty: a release without kinds began it.';
comment on column agent_threads.visitor is 'For owner_kind visitor: SHA-256 of the visitor''s secret, in hexadecimal.';
comment on column agent_threads.name is 'The public name, scoped by the owner. Empty: the id is the name.';
comment on column agent_threads.title is 'A name that a person gave the conversation. Empty: none.';

create table agent_documents (
  id uuid default lanekeeper.agent_uuid7() primary key,
  name text not null check (name <> '' and name !~ '[[:cntrl:]/\\]'),
  content_type text not null check (content_type <> ''), size bigint not null check (size > 0),
  sha256 bytea not null check (octet_length(sha256) = 32), is_text boolean not null, content bytea not null,
  thread_id text references agent_threads(id) on delete cascade, execution_id uuid, trace_id text not null default '',
  owner_kind text not null check (owner_kind in ('admin', 'key', 'visitor')), owner text not null,
  visitor text not null default '', created_at timestamptz not null default clock_timestamp(), expires_at timestamptz,
  constraint agent_documents_check check (octet_length(content) = size),
  constraint agent_documents_check1 check ((owner_kind = 'visitor') = (visitor <> '')),
  constraint agent_documents_check2 check (expires_at is null or thread_id is null and execution_id is null)
);
alter table agent_documents alter column content set storage external;
create index agent_documents_own on agent_documents (owner_kind, owner, visitor, id);
comment on index agent_documents_own is 'Lists the documents of an owner.';
create index agent_documents_execution on agent_documents (execution_id, id) where execution_id is not null;
comment on index agent_documents_execution is 'Lists the documents of an execution.';
create index agent_documents_expiry on agent_documents (expires_at) where expires_at is not null;
comment on index agent_documents_expiry is 'Finds expired uploads.';
create index agent_documents_free on agent_documents (id)
  where thread_id is null and execution_id is null and owner_kind = 'admin';
comment on index agent_documents_free is 'Lists the documents of admins that belong to no thread and no execution.';
create index agent_documents_thread on agent_documents (thread_id, id) where thread_id is not null;
comment on index agent_documents_thread is 'Lists the documents of a thread.';
create index agent_documents_unused on agent_documents (owner, visitor) where expires_at is not null;
comment on index agent_documents_unused is 'Counts the unused uploads of a visitor.';
comment on table agent_documents is 'Files that admins and visitors gave to the agent, with their content.';
comment on column agent_documents.name is 'The file name, without folders and control characters.';
comment on column agent_documents.content_type is
  'The media type, derived from content and name. The client''s type is only a hint.';
comment on column agent_documents.size is 'In bytes.';
comment on column agent_documents.sha256 is 'Of the content.';
comment on column agent_documents.is_text is 'The content is UTF-8 text, which models and flows can read.';
comment on column agent_documents.content is 'The bytes of the file.';
comment on column agent_documents.thread_id is
  'The thread whose visitors, flows and models see the document. The document is deleted with the thread.';
comment on column agent_documents.execution_id is
  'The execution that sees the document. The document is deleted with the execution.';
comment on column agent_documents.trace_id is 'The trace of the upload.';
comment on column agent_documents.owner_kind is 'The kind of uploader, as in agent_threads.';
comment on column agent_documents.owner is 'The chat key of the uploader, or admin.';
comment on column agent_documents.visitor is 'For a visitor: SHA-256 of the secret, in hexadecimal.';
comment on column agent_documents.expires_at is 'When an unused upload is deleted. Null: it stays.';

create table agent_thread_access (
  id uuid default lanekeeper.agent_uuid7() primary key,
  thread_id text not null references agent_threads(id) on delete cascade,
  kind text not null check (kind in ('key', 'visitor', 'flow', 'webhook', 'token')), owner text not null default '',
  visitor text not null default '', name text not null default '', token_digest bytea unique,
  reusable boolean not null default false, execution_id uuid, expires_at timestamptz,
  used_at timestamptz, joined_with uuid references agent_thread_access(id) on delete cascade,
  created_by text not null default '', created_at timestamptz not null default clock_timestamp(),
  constraint agent_thread_access_check check ((kind = 'token') = (token_digest is not null))
);
create index agent_thread_access_joined on agent_thread_access (joined_with) where joined_with is not null;
comment on index agent_thread_access_joined is 'Finds the participants that joined by a token.';
create unique index agent_thread_access_name on agent_thread_access (kind, owner, visitor, name) where kind <> 'token';
comment on index agent_thread_access_name is
  'Finds a participant''s thread by name, and allows one thread for each name.';
create index agent_thread_access_thread on agent_thread_access (thread_id, id);
comment on index agent_thread_access_thread is 'Lists the participants of a thread.';
comment on table agent_thread_access is
  'Participants besides the owner, and join tokens. The bearer of a token becomes a participant.';
comment on column agent_thread_access.kind is 'token: a join token. Else the kind of participant.';
comment on column agent_thread_access.owner is 'As in agent_threads.';
comment on column agent_thread_access.visitor is 'As in agent_threads.';
comment on column agent_thread_access.name is 'The participant''s name for the thread. Unique for a participant.';
comment on column agent_thread_access.token_digest is 'SHA-256 of a join token.';
comment on column agent_thread_access.reusable is
  'Any number of visitors may join by the token until it ends. Otherwise one visitor may.';
comment on column agent_thread_access.execution_id is 'The token ends with this execution.';
comment on column agent_thread_access.expires_at is 'When the token ends.';
comment on column agent_thread_access.used_at is 'When the token was last used.';
comment on column agent_thread_access.joined_with is
  'The token that the participant joined by. Revoking the token ends the access.';
comment on column agent_thread_access.created_by is 'The person or program that granted the access.';

create table agent_messages (
  id uuid default lanekeeper.agent_uuid7() primary key,
  thread_id text not null references agent_threads(id) on delete cascade, seq bigint check (seq > 0), turn bigint,
  role text not null check (role in ('user', 'assistant', 'system', 'tool')), content text not null,
  channel text not null default '', execution_id uuid, trace_id text not null default '',
  status          text not null
                  check (status in ('queued', 'sending', 'sent', 'delivered', 'received', 'failed', 'withdrawn')),
  interrupted boolean not null default false, tokens int not null default 0, attempts int not null default 0,
  error_message text, created_at timestamptz not null default clock_timestamp(), sent_at timestamptz,
  target text not null default '', dedupe_key text, next_attempt_at timestamptz,
  delivered_at timestamptz,
  constraint agent_messages_order unique (thread_id, seq),
  constraint agent_messages_check check (turn > 0 and turn <= seq),
  constraint agent_messages_check1 check ((seq is null) = (turn is null)),
  constraint agent_messages_check2 check (
    case when seq is null then status in ('queued', 'failed', 'withdrawn') else status <> 'queued' end)
);
create unique index agent_messages_dedupe on agent_messages (dedupe_key) where dedupe_key is not null;
comment on index agent_messages_dedupe is 'Finds the message of a dedupe_key.';
create index agent_messages_due on agent_messages (next_attempt_at)
  where status = 'sending' and next_attempt_at is not null;
comment on index agent_messages_due is 'Finds messages to send again.';
create index agent_messages_execution on agent_messages (execution_id) where execution_id is not null;
comment on index agent_messages_execution is 'Lists the messages of an execution.';
create index agent_messages_failed on agent_messages (id) where status = 'failed';
comment on index agent_messages_failed is 'Lists failed messages.';
create index agent_messages_queued on agent_messages (thread_id, id) include (execution_id) where status = 'queued';
comment on index agent_messages_queued is 'Finds the next queued message of a thread.';
create index agent_messages_sending on agent_messages (thread_id, seq) where status = 'sending';
comment on index agent_messages_sending is 'Finds the first message of a thread that is being sent.';
create index agent_messages_turns on agent_messages (thread_id, turn, seq);
comment on index agent_messages_turns is 'Reads a thread turn by turn.';
comment on table agent_messages is
  'Messages of threads. A message gets its number when it is delivered to the thread, in the order of the thread.';
comment on column agent_messages.seq is 'The place in the thread. Null: not in the thread yet.';
comment on column agent_messages.turn is 'The seq of the message that began the exchange.';
comment on column agent_messages.role is 'The speaker.';
comment on column agent_messages.content is 'The text.';
comment on column agent_messages.channel is 'The channel of its origin or destination.';
comment on column agent_messages.status is
  'queued: waits for the lane. sending: its channel delivers it. sent: in the thread. delivered: the channel confirmed '
  'it. received: a visitor wrote it. failed: no further attempt. withdrawn: cancelled before it was sent.';
comment on column agent_messages.interrupted is 'The answer was cut short.';
comment on column agent_messages.tokens is 'An estimate of its length for a model.';
comment on column agent_messages.attempts is 'How often it was sent to its channel.';
comment on column agent_messages.sent_at is 'When it joined the thread.';
comment on column agent_messages.target is 'On channel webhook: the name of an outgoing target.';
comment on column agent_messages.dedupe_key is 'A second send with the same key adds nothing.';
comment on column agent_messages.next_attempt_at is
  'On channels webhook and log: when the next attempt is due. Null: none is, or an earlier message comes first.';
comment on column agent_messages.delivered_at is 'When the channel confirmed it.';

create table agent_message_drafts (
  execution_id uuid primary key, claim bigint not null, content text not null,
  settled int not null default 0, updated_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);
comment on table agent_message_drafts is
  'The answer of a running turn. Other processes show it. Another claim continues it. An interruption truncates it.';
comment on column agent_message_drafts.claim is 'The claim that writes it.';
comment on column agent_message_drafts.content is 'The text so far.';
comment on column agent_message_drafts.settled is 'The number of characters at its beginning that will not change.';

create table agent_message_images (
  message_id uuid not null references agent_messages(id) on delete cascade, place int not null check (place > 0),
  url text check (url like 'https://%' and length(url) <= 2048),
  media_type text check (media_type in ('image/png', 'image/jpeg', 'image/gif', 'image/webp')),
  data bytea check (octet_length(data) between 1 and 5242880),
  detail text not null default '' check (detail in ('', 'low', 'high', 'auto')),
  primary key (message_id, place),
  constraint agent_message_images_check check ((url is null) = (data is not null)),
  constraint agent_message_images_check1 check ((media_type is null) = (data is null))
);
alter table agent_message_images alter column data set storage external;
comment on table agent_message_images is 'Images of messages, in order. An image is deleted with its message.';
comment on column agent_message_images.message_id is 'The message of the image.';
comment on column agent_message_images.place is 'The order of the images of a message, from 1.';
comment on column agent_message_images.url is
  'Where the model''s server finds the image. The runtime never fetches it.';
comment on column agent_message_images.media_type is 'The format of data.';
comment on column agent_message_images.data is 'The image, if the client sent it.';
comment on column agent_message_images.detail is 'The level of detail that the client requested of the model.';

create table agent_chat_requests (
  id uuid default lanekeeper.agent_uuid7() primary key, fingerprint bytea not null, execution_id uuid not null,
  connection text not null check (connection <> ''), worker uuid not null,
  attempt int not null default 0 check (attempt >= 0),
  state text not null default 'open' check (state in ('open', 'left', 'delivered')),
  created_at timestamptz not null default clock_timestamp(),
  changed_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null default (clock_timestamp() + '00:15:00'::interval)
);
create index agent_chat_requests_expiry on agent_chat_requests (expires_at);
comment on index agent_chat_requests_expiry is 'Finds rows to delete.';
create index agent_chat_requests_fingerprint on agent_chat_requests (fingerprint, created_at);
comment on index agent_chat_requests_fingerprint is 'Finds the turn of a retry.';
comment on table agent_chat_requests is
  'Requests of the last minutes that began a turn. A client''s retry finds its turn here.';
comment on column agent_chat_requests.fingerprint is
  'SHA-256 of the caller, the thread as the caller names it, and the body.';
comment on column agent_chat_requests.execution_id is 'The turn that the request began.';
comment on column agent_chat_requests.connection is
  'The trace of the request that receives the answer, the latest retry.';
comment on column agent_chat_requests.worker is
  'The process that has the connection. The connection dies with the process.';
comment on column agent_chat_requests.attempt is 'As the client counts: 0 is the first.';
comment on column agent_chat_requests.state is
  'open: the connection is open. left: it ended before the answer was sent. delivered: the answer was sent.';
comment on column agent_chat_requests.changed_at is 'When state or connection changed.';
comment on column agent_chat_requests.expires_at is 'When the row may be deleted.';

-- Code

-- Lock order: the row of the lane, then the advisory lock, as a write under the token takes them. Only a row that was
-- inserted meanwhile is locked after the advisory lock.

create or replace function lanekeeper.lock_agent_thread(p_thread text, p_wait boolean default true) returns boolean
language plpgsql volatile as $$
declare
  lane_ text := 'thread:' || p_thread;
  key_ bigint := hashtextextended('lane ' || 'thread:' || p_thread, 0);
begin
  -- The advisory lock is for a lane without a row. acquire_agent_lock takes the same lock for the first row.
  if p_wait then
    perform 1 from agent_locks l where l.lane = lane_ for update;
    if not found then
      perform pg_advisory_xact_lock(key_);
      perform 1 from agent_locks l where l.lane = lane_ for update;    -- another transaction may have inserted it
    end if;
    perform 1 from agent_threads t where t.id = p_thread for no key update;
    if not found then
      raise exception 'there is no thread %', quote_literal(p_thread) using errcode = 'P0002';
    end if;
    return true;
  end if;
  perform 1 from agent_locks l where l.lane = lane_ for update skip locked;
  if not found then
    perform 1 from agent_locks l where l.lane = lane_;
    if found or not pg_try_advisory_xact_lock(key_) then
      return false;
    end if;
    perform 1 from agent_locks l where l.lane = lane_ for update skip locked;
    if not found and exists (select from agent_locks l where l.lane = lane_) then
      return false;
    end if;
  end if;
  perform 1 from agent_threads t where t.id = p_thread for no key update skip locked;
  return found;
end $$;
comment on function lanekeeper.lock_agent_thread is
  'Lock the lane and the row of a thread. Without p_wait: false if another transaction has locked either.';

create or replace function lanekeeper.append_agent_message(p_id uuid) returns bigint
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
         status = case when carried or m.channel in ('telegram', 'slack', 'email') then 'sending' else 'sent' end,
         -- It waits behind earlier messages of the thread to the same target that are still being sent.
         next_attempt_at = case when carried and not exists (
           select from agent_messages y
            where y.thread_id = m.thread_id and y.status = 'sending' and y.channel = m.channel
              and y.target = m.target) then clock_timestamp() end
   where x.id = p_id;
  if carried then
    perform pg_notify('agent_outbox', '');
  elsif m.channel in ('telegram', 'slack', 'email') then
    insert into agent_channel_sends (message_id, channel, thread_id, seq) values (p_id, m.target, m.thread_id, place);
    perform pg_notify('agent_channels', m.target);
  end if;
  if watched > clock_timestamp() then
    perform pg_notify('agent_messages', m.thread_id);
  end if;
  return place;
end $$;
comment on function lanekeeper.append_agent_message is
  'Give a message its place in its thread. The caller has locked the thread''s row.';

create or replace function lanekeeper.send_agent_message(p_thread text, p_execution_id uuid, p_claim bigint,
                                   p_content text, p_channel text default null, p_target text default '',
                                   p_tokens int default 0)
returns table (message_id uuid, seq bigint, queued boolean, acquired boolean, holder text, lender uuid,
               stale_holder text, stale_ms bigint)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  lane_ text := 'thread:' || p_thread;
  t record;
  held agent_locks;
  live boolean;
  mine boolean := false;
  people boolean;
begin
  acquired := false;
  if p_execution_id is not null then
    -- The lane may be lent. Lock executions before lanes.
    perform 1 from agent_executions x where x.id = p_execution_id and x.inherits for no key update;
    perform fence_agent_execution(p_execution_id, p_claim);
    if not lanekeeper.agent_flow_may_join(p_thread, null, p_execution_id) then
      -- The error for another owner's thread is the same.
      raise exception 'there is no thread %', quote_literal(p_thread) using errcode = 'P0002';
    end if;
  end if;
  perform lanekeeper.lock_agent_thread(p_thread);
  select x.channel, x.target, x.idle_seconds as idle into t from agent_threads x where x.id = p_thread;
  -- A conversation on a channel of people sends all its messages there.
  people := t.channel in ('telegram', 'slack', 'email');
  p_channel := coalesce(nullif(p_channel, ''),
                        case when t.channel in ('webhook', 'log') or people then t.channel else 'chat' end);
  p_target :=
    case when p_channel = 'webhook' then coalesce(nullif(p_target, ''), t.target) when people then t.target else '' end;
  if people and p_channel = 'chat' then p_channel := t.channel; end if;
  if p_channel not in ('chat', 'webhook', 'log') and (not people or p_channel <> t.channel)
     or coalesce(btrim(p_content), '') = '' then
    raise exception 'a message of % characters on channel % is not valid: give content, and the channel chat, webhook, '
      'log or the thread''s', coalesce(length(btrim(p_content)), 0), quote_literal(p_channel)
      using errcode = '22023';
  elsif p_channel = 'webhook' and not exists (select from agent_webhook_targets w where w.name = p_target) then
    raise exception 'there is no outgoing webhook target %', quote_literal(p_target) using errcode = '22023',
      hint = 'Declare it in the workspace, and name it as the target of the message or of the thread.';
  end if;
  select l.* into held from agent_locks l where l.lane = lane_;
  live := found and held.expires_at > clock_timestamp();
  if live and held.execution_id = p_execution_id then
    mine := true;
    update agent_locks l set expires_at = clock_timestamp() + make_interval(secs => t.idle), ttl_seconds = t.idle
     where l.lane = lane_ and not held.parked;
  elsif live and p_execution_id is not null then
    select b.acquired, b.lender into mine, lender
      from lanekeeper.lend_agent_lock(lane_, p_execution_id, p_claim, t.idle) b;
  elsif not live and not exists (select from agent_messages m where m.thread_id = p_thread and m.status = 'queued') then
    if p_execution_id is null then
      mine := not exists (select from lanekeeper.agent_lock_holders h where h.lane = lane_);
    else
      select a.acquired, a.lender into mine, lender
        from lanekeeper.acquire_agent_execution_lock(lane_, p_execution_id || '#' || p_claim, t.idle) a;
      acquired := mine and lender is null;
    end if;
  end if;
  mine := mine and not exists (                              -- its earlier messages are sent first
    select from lanekeeper.agent_queued_messages q where q.thread_id = p_thread and q.speaker = p_execution_id);
  insert into agent_messages as m (thread_id, role, content, channel, target, execution_id, trace_id, status, tokens)
  values (p_thread, 'assistant', p_content, p_channel, p_target, p_execution_id, coalesce((
    select x.trace_id from agent_executions x
     where x.id = p_execution_id), ''), 'queued', coalesce(p_tokens, 0)) returning m.id into message_id;
  if mine then seq := lanekeeper.append_agent_message(message_id);
  else
    perform lanekeeper.flush_agent_thread(p_thread);                    -- send the allowed messages, perhaps this one
    select m.seq into seq from agent_messages m where m.id = message_id;
    acquired := acquired or not live and exists (
      select from agent_locks l where l.lane = lane_ and l.execution_id = p_execution_id
                                  and l.expires_at > clock_timestamp());
  end if;
  if not live and held.locked_by <> '' and exists (
    select from agent_locks l where l.lane = lane_ and l.fencing_token <> held.fencing_token) then
    stale_holder := held.locked_by;
    stale_ms := extract(epoch from clock_timestamp() - held.expires_at + make_interval(secs => held.ttl_seconds)) * 1000;
  end if;
  queued := seq is null;
  holder := case when queued then (select h.holder from lanekeeper.agent_lock_holders h where h.lane = lane_) end;
  return next;
end $$;
comment on function lanekeeper.send_agent_message is
  'Send a message to a thread for an execution or, with null, for a sender that cannot hold the lane. The execution '
  'that holds or may borrow the lane of the thread sends at once. Other messages are queued, first in, first out. The '
  'default channel is the thread''s, or chat. lender: the lane was borrowed now. stale_holder: the former holder of an '
  'ended lease.';

create or replace view lanekeeper.agent_queued_messages as
select m.id, m.thread_id, h.id as speaker from agent_messages m cross join lateral (
  with recursive ancestors as (
    select m.execution_id as id
    union all
    select x.parent_id from ancestors p join agent_executions x on x.id = p.id
     where x.inherits and x.completed_at is not null)
  select p.id from ancestors p) h
 where m.status = 'queued';
comment on view lanekeeper.agent_queued_messages is
  'The sender of each queued message: its execution or, after the end of a child, the parent that waited for it. '
  'Restrict it by thread.';

create or replace function lanekeeper.agent_thread_next(p_thread text, p_live boolean, p_holder uuid) returns uuid
language sql volatile as $$
  select case when not p_live then
    (select m.id from agent_messages m where m.thread_id = p_thread and m.status = 'queued' order by m.id limit 1)
  else coalesce(
    (select q.id
       from lanekeeper.agent_queued_messages q
      where q.thread_id = p_thread and q.speaker = p_holder
      order by q.id
      limit 1),
    (select m.id from agent_messages m join agent_executions x on x.id = m.execution_id
      where m.thread_id = p_thread and m.status = 'queued' and x.inherits and x.completed_at is null
        and lanekeeper.agent_lenders(x.id, p_holder, true) is not null order by m.id limit 1))
  end
$$;
comment on function lanekeeper.agent_thread_next is
  'The queued message to send next. A free thread: the first one. A held thread: the first of its holder, or of an '
  'execution that may borrow from the holder.';

create or replace function lanekeeper.flush_agent_thread(p_thread text, p_limit int default 100,
                                                         p_wait boolean default true) returns int
language plpgsql volatile as $$
declare
  lane_ text := 'thread:' || p_thread;
  head uuid;
  who agent_executions;             -- the sender
  asks boolean;                     -- the sender waits for the answer
  held agent_locks;
  live boolean;
  idle int;
  n int := 0;
begin
  for tries in 1..p_limit loop
    select l.* into held from agent_locks l where l.lane = lane_;
    live := found and held.expires_at > clock_timestamp();
    head := lanekeeper.agent_thread_next(p_thread, live, held.execution_id);
    exit when head is null;
    -- Lock executions before lanes. The next call handles an execution that is being claimed or ended.
    select x.* into who from agent_messages m join agent_executions x on x.id = m.execution_id
     where m.id = head for no key update of x skip locked;
    exit when not found
              and exists (select from agent_messages m
                            join agent_executions x on x.id = m.execution_id
                           where m.id = head);
    exit when not lanekeeper.lock_agent_thread(p_thread, p_wait);
    select l.* into held from agent_locks l where l.lane = lane_;
    live := found and held.expires_at > clock_timestamp();
    -- The next message has changed meanwhile.
    continue when head is distinct from lanekeeper.agent_thread_next(p_thread, live, held.execution_id);
    if who.id is null or who.completed_at is not null then   -- in a held thread it is sent in the holder's name
      exit when not live and exists (select from lanekeeper.agent_lock_holders h where h.lane = lane_);
    elsif not live or held.execution_id is distinct from who.id then
      select t.idle_seconds into idle from agent_threads t where t.id = p_thread;
      -- A running execution borrows only under a live worker.
      exit when live and who.status = 'running' and not exists (
        select from agent_workers w where w.id = who.claimed_by and w.expires_at > clock_timestamp());
      exit when not (case when live
                            then (select b.acquired from lanekeeper.lend_agent_lock(lane_, who.id, who.claim, idle) b)
                          else (select a.acquired
                                  from lanekeeper.acquire_agent_lock(lane_, who.id || '#' || who.claim, idle) a) end);
      update agent_locks l set parked = true, expires_at = '9000-01-01 00:00+00',
             fencing_token = greatest(l.fencing_token + 1, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
       where l.lane = lane_ and who.status = 'waiting';
    end if;
    -- A concurrent answer must find either the wait begun or the question unsent.
    asks := who.status = 'waiting' and who.waiting_data ->> 'queued_message' = head::text;
    exit when asks and not pg_try_advisory_xact_lock(hashtextextended('wait response ' || p_thread, 0));
    perform lanekeeper.append_agent_message(head);
    n := n + 1;
    update agent_executions x
       set waiting_until = clock_timestamp() + make_interval(secs => (who.waiting_data ->> 'timeout_seconds')::float8),
           waiting_data = x.waiting_data - 'queued_message' - 'timeout_seconds'
     where x.id = who.id and asks;
  end loop;
  return n;
end $$;
comment on function lanekeeper.flush_agent_thread is
  'Send the queued messages of a thread that may be sent now, in order, at most p_limit. Call it whenever the lane of '
  'the thread changes hands. It stops at a sender whose execution another transaction has locked. Without p_wait it '
  'does nothing if another transaction has locked the thread.';

create or replace function lanekeeper.receive_agent_message(p_thread text, p_content text,
                                      p_channel text default 'chat', p_data jsonb default '{}', p_id text default null,
                                      p_execution_id uuid default null, p_tokens int default 0)
returns table (message_id uuid, seq bigint, event_id uuid, execution_id uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  message uuid := lanekeeper.agent_uuid7();
  place bigint;
  watched timestamptz;
  delivery record;
  first_ boolean := true;
begin
  -- Take this lock before executions, lanes and the thread.
  perform pg_advisory_xact_lock(hashtextextended('wait response ' || p_thread, 0));
  if p_id is not null then
    select v.id, v.data into delivery from agent_events v
     where v.external_id = p_id and v.event = 'MESSAGE_RECEIVED' and v.key = p_thread;
    if found then                                           -- a duplicate
      return query select (delivery.data ->> 'message_id')::uuid,
                          (select m.seq from agent_messages m where m.id = (delivery.data ->> 'message_id')::uuid),
                          delivery.id, null::uuid;
      return;
    end if;
  end if;
  for delivery in
    select d.event_id, d.execution_id from lanekeeper.deliver_agent_event('MESSAGE_RECEIVED', p_thread,
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
      insert into agent_messages (id, thread_id, seq, turn, role, content, channel, execution_id, trace_id, status,
                                  tokens, sent_at)
      values (message, p_thread, place, place, 'user', p_content, p_channel, p_execution_id,
              coalesce((select x.trace_id from agent_executions x where x.id = p_execution_id), ''), 'received',
              coalesce(p_tokens, 0), clock_timestamp());
      if watched > clock_timestamp() then
        perform pg_notify('agent_messages', p_thread);
      end if;
      perform pg_notify('agent_threads', p_thread) from agent_messages m     -- a flush may have skipped the thread
        where m.thread_id = p_thread and m.status = 'queued' limit 1;
    end if;
    return query select message, place, delivery.event_id, delivery.execution_id;
  end loop;
end $$;
comment on function lanekeeper.receive_agent_message is
  'Record a message of the other side of a thread, and end the waits for it by MESSAGE_RECEIVED: its data is p_data '
  'with message_id, thread_id, content and channel. Rows: the message with each execution that it resumed (null: '
  'none). The same p_id twice counts once.';

create or replace function lanekeeper.agent_thread_id(p_kind text, p_owner text, p_visitor text, p_name text)
returns text
language plpgsql stable as $$
begin
  return case when p_kind in ('flow', 'channel', 'admin')
              or starts_with(p_name, 'th_') and p_name ~ '^th_[0-9A-HJKMNP-TV-Z]{26}$' then p_name
         else 'th_' || substr(encode(sha256((select s.value from agent_secrets s where s.name = 'thread ids')
                || convert_to(jsonb_build_array(p_kind, p_owner, p_visitor, p_name)::text, 'UTF8')), 'hex'), 1, 32) end;
end $$;
comment on function lanekeeper.agent_thread_id is 'The id of the thread that an owner begins under a name.';

create or replace view lanekeeper.agent_flow_threads as
select t.id from agent_threads t
 where t.owner_kind = ''
   and (t.owner = '' or t.channel <> 'chat' or exists (
     select from agent_messages m join agent_executions x on x.id = m.execution_id
      where m.thread_id = t.id and m.role = 'assistant' and x.flow not in ('chat', 'chat_relay', 'chat_summary')));
comment on view lanekeeper.agent_flow_threads is
  'Threads without a kind of owner that flows have used. Flows may continue them.';

create or replace function lanekeeper.agent_thread_for(p_kind text, p_owner text, p_visitor text, p_name text)
returns text
language plpgsql stable set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
set jit = off as $$
declare
  t record;
begin
  select a.thread_id as id into t from agent_thread_access a
   where a.kind = p_kind and a.owner = p_owner and a.visitor = p_visitor and a.name = p_name and a.kind <> 'token';
  if found then
    return t.id;
  end if;
  for t in
    select x.id, x.owner_kind, x.owner, x.visitor, x.channel
      from (values (1, lanekeeper.agent_thread_id(p_kind, p_owner, p_visitor, p_name)), (2, p_name)) i (place, id)
      join agent_threads x on x.id = i.id order by i.place
  loop
    if (case
      when p_kind = 'admin' then true
      when t.owner_kind <> '' then (t.owner_kind, t.owner, t.visitor) = (p_kind, p_owner, p_visitor)
      -- An earlier release began the thread. A visitor proves its right by an unguessable name.
      when p_kind = 'key' then t.channel = 'chat' and t.owner = p_owner
      when p_kind = 'visitor'
        then t.channel = 'chat' and t.owner = p_owner and p_owner <> '' and t.id ~ '^th_[0-9A-HJKMNP-TV-Z]{26}$'
      when p_kind = 'webhook' then exists (
        select from agent_messages m join agent_executions x on x.id = m.execution_id
         where m.thread_id = t.id and x.trace_id like 'wh\_%')
      else exists (select from lanekeeper.agent_flow_threads f where f.id = t.id) end)
    then
      return t.id;
    end if;
  end loop;
  return null;
end $$;
comment on function lanekeeper.agent_thread_for is 'The id of a principal''s thread with a name. Null: no such thread.';

