-- A thread has an owner: the chat key, the visitor of a key, the flow, the webhook endpoint, the channel or the admin that began it. Its
-- public name is scoped by the owner. `agent_threads.id` is internal: admins, flows and SQL use it, and nobody outside can choose it.
--
-- Admins and flows choose ids, so an id is its own name there. A key, a visitor or a webhook chooses a name, and the id is a salted hash of
-- owner and name. A name that the agent gives out (th_ and 26 characters) cannot be guessed and is the id as well.
--
-- Others get into a thread by a row of agent_thread_access: it names a key, a flow or an endpoint, or it has the digest of a join token.
-- An empty owner_kind is a thread that an earlier release began; `owner` is the chat key then, or empty.

alter table agent_threads
  add column owner_kind text not null default '',
  add column visitor text not null default '',
  add column name text not null default '',
  add constraint agent_threads_owner_kind check (owner_kind in ('', 'key', 'visitor', 'flow', 'webhook', 'channel', 'admin')) not valid;
comment on column agent_threads.owner_kind is 'What began the thread: key, visitor, flow, webhook, channel or admin. Empty: an earlier release began it.';
comment on column agent_threads.owner is
  'The chat key, flow, endpoint or channel that began the thread. For an admin''s thread: the chat key that it was opened to, or admin.';
comment on column agent_threads.visitor is 'Of owner_kind visitor: SHA-256 of the secret of the visitor, in hexadecimal.';
comment on column agent_threads.name is 'The public name, scoped by the owner. Empty: the id is the name.';

create table agent_secrets (
  name  text primary key,
  value bytea not null
);
comment on table agent_secrets is 'Random values of this database that no client may know.';
insert into agent_secrets (name, value) values ('thread ids', uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()));

create table agent_thread_access (
  id           uuid primary key default agent_uuid7(),
  thread_id    text not null references agent_threads (id) on delete cascade,
  kind         text not null check (kind in ('key', 'visitor', 'flow', 'webhook', 'token')),
  owner        text not null default '',
  visitor      text not null default '',
  name         text not null default '',
  token_digest bytea unique,
  reusable     boolean not null default false,
  execution_id uuid,
  expires_at   timestamptz,
  used_at      timestamptz,
  joined_with  uuid references agent_thread_access (id) on delete cascade,
  created_by   text not null default '',
  created_at   timestamptz not null default clock_timestamp(),
  check ((kind = 'token') = (token_digest is not null))
);
create unique index agent_thread_access_name on agent_thread_access (kind, owner, visitor, name) where kind <> 'token';
create index agent_thread_access_thread on agent_thread_access (thread_id, id);
create index agent_thread_access_joined on agent_thread_access (joined_with) where joined_with is not null;
comment on table agent_thread_access is
  'Who besides the owner may read and speak in a thread. A row names a participant, or it is a join token: who presents the token becomes one.';
comment on column agent_thread_access.name is 'What the participant calls the thread. Unique for a participant.';
comment on column agent_thread_access.token_digest is 'SHA-256 of a join token.';
comment on column agent_thread_access.reusable is 'The token lets any number of visitors in until its end. Otherwise it lets in one.';
comment on column agent_thread_access.execution_id is 'The token ends with this execution.';
comment on column agent_thread_access.joined_with is 'The token that let the participant in. Revoking the token ends the access.';

create function agent_thread_id(p_kind text, p_owner text, p_visitor text, p_name text) returns text
language sql stable as $$
  select case when p_kind in ('flow', 'channel', 'admin') or p_name ~ '^th_[0-9A-HJKMNP-TV-Z]{26}$' then p_name
         else 'th_' || substr(encode(sha256((select s.value from agent_secrets s where s.name = 'thread ids')
                || convert_to(jsonb_build_array(p_kind, p_owner, p_visitor, p_name)::text, 'UTF8')), 'hex'), 1, 32) end
$$;
comment on function agent_thread_id is 'The id of the thread that an owner begins under a name.';

create function agent_thread_is_of(p_thread text, p_kind text, p_owner text, p_visitor text) returns boolean
language plpgsql stable as $$
declare
  t record;
begin
  select x.owner_kind, x.owner, x.visitor, x.channel into t from agent_threads x where x.id = p_thread;
  if not found then
    return false;
  elsif p_kind = 'admin' then
    return true;
  elsif t.owner_kind <> '' then
    return (t.owner_kind, t.owner, t.visitor) = (p_kind, p_owner, p_visitor);
  end if;
  -- An earlier release began it, and a visitor proves its right by a name that nobody can guess.
  return case p_kind
    when 'key' then t.channel = 'chat' and t.owner = p_owner
    when 'visitor' then t.channel = 'chat' and t.owner = p_owner and p_owner <> '' and p_thread ~ '^th_[0-9A-HJKMNP-TV-Z]{26}$'
    when 'webhook' then exists (
      select from agent_messages m join agent_executions x on x.id = m.execution_id
       where m.thread_id = p_thread and x.trace_id like 'wh\_%')
    else agent_thread_had_flows(p_thread) end;
end $$;
comment on function agent_thread_is_of is 'Whether a thread belongs to a principal. Everything belongs to admins.';

create function agent_thread_had_flows(p_thread text) returns boolean
language sql stable as $$
  select exists (
    select from agent_threads t
     where t.id = p_thread and t.owner_kind = ''
       and (t.owner = '' or t.channel <> 'chat' or exists (
         select from agent_messages m join agent_executions x on x.id = m.execution_id
          where m.thread_id = t.id and m.role = 'assistant' and x.flow not in ('chat', 'chat_relay', 'chat_summary'))))
$$;
comment on function agent_thread_had_flows is 'Whether flows have used a thread that an earlier release began. They may go on.';

create function agent_thread_for(p_kind text, p_owner text, p_visitor text, p_name text) returns text
language sql stable as $$
  select coalesce(
    (select a.thread_id from agent_thread_access a
      where a.kind = p_kind and a.owner = p_owner and a.visitor = p_visitor and a.name = p_name and a.kind <> 'token'),
    (select i.id from (values (1, agent_thread_id(p_kind, p_owner, p_visitor, p_name)), (2, p_name)) i (place, id)
      where agent_thread_is_of(i.id, p_kind, p_owner, p_visitor) order by i.place limit 1))
$$;
comment on function agent_thread_for is 'The id of the thread that a principal means by a name. Null: it has none, whoever else may have one of that name.';

create function open_agent_thread(p_kind text, p_owner text, p_visitor text, p_name text, p_channel text default 'chat', p_target text default '',
                                  p_agent text default 'flowpilot', p_participant text default '', p_idle_seconds int default 600)
returns table (thread_id text, made boolean)
language plpgsql volatile as $$
#variable_conflict use_column
begin
  if p_kind is null or p_kind not in ('key', 'visitor', 'flow', 'webhook', 'channel', 'admin') or p_owner is null or p_visitor is null
     or (p_kind = 'visitor') <> (p_visitor <> '') then
    raise exception 'a thread is begun by key, visitor, flow, webhook, channel or admin; a visitor has a secret, and nobody else has'
      using errcode = '22023';
  end if;
  thread_id := agent_thread_for(p_kind, p_owner, p_visitor, p_name);
  made := false;
  if thread_id is null then
    thread_id := agent_thread_id(p_kind, p_owner, p_visitor, p_name);
    insert into agent_threads as t (id, channel, target, agent, owner, participant, idle_seconds, owner_kind, visitor, name)
    values (thread_id, p_channel, p_target, p_agent, p_owner, p_participant, p_idle_seconds, p_kind, p_visitor, p_name)
    on conflict (id) do nothing;
    made := found;
    if not made and not agent_thread_is_of(thread_id, p_kind, p_owner, p_visitor) then
      raise exception 'there is no thread %', quote_literal(p_name) using errcode = 'P0002';      -- another owner's is not told apart
    end if;
  end if;
  return next;
end $$;
comment on function open_agent_thread is 'The thread that a principal means by a name, begun when there is none. P0002: the id is another owner''s.';

create function agent_flow_may_join(p_thread text, p_flow text, p_execution_id uuid default null) returns boolean
language plpgsql stable as $$
declare
  t record;
begin
  select x.owner_kind, x.owner into t from agent_threads x where x.id = p_thread;
  if not found then
    return false;
  elsif t.owner_kind in ('channel', 'admin') or exists (
      select from agent_executions x where x.id = p_execution_id and x.thread_id = p_thread) then
    return true;
  elsif t.owner_kind = '' and agent_thread_had_flows(p_thread) then
    return true;
  end if;
  return (
    with recursive line as (
      select x.parent_id, x.flow, x.thread_id from agent_executions x where x.id = p_execution_id
      union all
      select x.parent_id, x.flow, x.thread_id from line l join agent_executions x on x.id = l.parent_id),
    flows as (select p_flow as flow where p_flow is not null union select l.flow from line l)
    select exists (select from line l where l.thread_id = p_thread)
        or t.owner_kind = 'flow' and t.owner in (select f.flow from flows f)
        or exists (select from agent_thread_access a
                    where a.kind = 'flow' and a.visitor = '' and a.name = p_thread and a.owner in (select f.flow from flows f)));
end $$;
comment on function agent_flow_may_join is
  'Whether a flow, or an execution of one, may speak in a thread: an admin began it, the flow did, the execution or one above it was started in it, '
  'or it was opened to the flow.';

create function open_agent_thread_for_flow(p_thread text, p_flow text, p_parent_id uuid default null, p_agent text default 'flowpilot') returns boolean
language plpgsql volatile as $$
declare
  made boolean := false;
begin
  if p_flow is null or p_flow = '' then
    raise exception 'name the flow that begins the thread' using errcode = '22023';
  end if;
  perform 1 from agent_threads t where t.id = p_thread;
  if not found and p_thread !~ '^th_([0-9A-HJKMNP-TV-Z]{26}|[0-9a-f]{32})$' then        -- such an id is given out, not chosen
    insert into agent_threads (id, channel, agent, owner, owner_kind) values (p_thread, 'chat', p_agent, p_flow, 'flow')
    on conflict (id) do nothing;
    made := found;
  end if;
  -- Who starts a flow in a thread that another flow began opens the thread to it.
  if not made and not exists (select from agent_threads t where t.id = p_thread and t.owner_kind = 'flow')
     and not agent_flow_may_join(p_thread, p_flow, p_parent_id) then
    raise exception 'there is no thread %', quote_literal(p_thread) using errcode = 'P0002';    -- another owner's is not told apart
  end if;
  return made;
end $$;
comment on function open_agent_thread_for_flow is
  'The thread in which an admin starts a flow. True: the flow begins it. P0002: it belongs to a key, a visitor or an endpoint, and was not opened.';

create function let_into_agent_thread(p_thread text, p_kind text, p_owner text, p_visitor text, p_name text, p_by text) returns uuid
language plpgsql volatile as $$
declare
  a agent_thread_access;
begin
  perform 1 from agent_threads t where t.id = p_thread for key share;
  if not found then
    raise exception 'there is no thread %', quote_literal(p_thread) using errcode = 'P0002';
  elsif p_kind is null or p_kind not in ('key', 'visitor', 'flow', 'webhook') or coalesce(p_owner, '') = '' then
    raise exception 'a thread is opened to a key, a visitor, a flow or a webhook by name' using errcode = '22023';
  end if;
  if p_kind <> 'flow' and agent_thread_for(p_kind, p_owner, p_visitor, p_name) <> p_thread then
    raise exception '% % has another thread %', p_kind, p_owner, quote_literal(left(p_name, 40)) using errcode = '23505';
  end if;
  insert into agent_thread_access (thread_id, kind, owner, visitor, name, created_by)
  values (p_thread, p_kind, p_owner, p_visitor, p_name, p_by) on conflict do nothing;
  select x.* into a from agent_thread_access x
   where x.kind = p_kind and x.owner = p_owner and x.visitor = p_visitor and x.name = p_name and x.kind <> 'token';
  if a.thread_id <> p_thread then
    raise exception '% % has another thread %', p_kind, p_owner, quote_literal(left(p_name, 40)) using errcode = '23505';
  end if;
  return a.id;
end $$;
comment on function let_into_agent_thread is
  'Open a thread to a key, a visitor, a flow or a webhook endpoint, who calls it by a name; of a flow the name is the id. 23505: the name is taken there.';

create function join_agent_thread(p_digest bytea, p_kind text, p_owner text, p_visitor text, p_name text, p_given boolean)
returns table (thread_id text, name text)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  k agent_thread_access;
  known text;
begin
  select a.* into k from agent_thread_access a where a.token_digest = p_digest for update;
  if not found or k.expires_at <= clock_timestamp()
     or k.execution_id is not null and not exists (
       select from agent_executions x where x.id = k.execution_id and x.completed_at is null) then
    return;
  end if;
  -- Who has joined with it may present it again, whatever became of the token.
  select a.name into known from agent_thread_access a
   where a.joined_with = k.id and a.kind = p_kind and a.owner = p_owner and a.visitor = p_visitor
     and (a.name = p_name or not p_given) order by a.id limit 1;
  if known is not null then
    return query select k.thread_id, known;
    return;
  elsif k.used_at is not null and not k.reusable then
    return;
  elsif agent_thread_for(p_kind, p_owner, p_visitor, p_name) is not null then
    raise exception 'the name % is taken by another thread of yours', quote_literal(left(p_name, 40)) using errcode = '23505';
  end if;
  update agent_thread_access a set used_at = clock_timestamp() where a.id = k.id;
  insert into agent_thread_access (thread_id, kind, owner, visitor, name, joined_with, created_by)
  values (k.thread_id, p_kind, p_owner, p_visitor, p_name, k.id, 'join token');
  return query select k.thread_id, p_name;
end $$;
comment on function join_agent_thread is
  'Let the bearer of a join token into its thread, under a name of the bearer''s. No row: the token is unknown, used, expired or revoked. '
  'A second try of the same bearer finds the first. p_given false: the name was made up, and one that the bearer has stays.';

-- A message of an execution is refused in a thread that its flow may not join.

create or replace function send_agent_message(p_thread text, p_execution_id uuid, p_claim bigint, p_content text,
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
    if not agent_flow_may_join(p_thread, null, p_execution_id) then
      raise exception 'there is no thread %', quote_literal(p_thread) using errcode = 'P0002';    -- another owner's is not told apart
    end if;
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

-- Whoever waits for the words of a worker outside does not wait while no worker has the run.

create or replace function agent_thread_busy(p_thread text, p_execution_id uuid, p_except text[]) returns boolean
language plpgsql volatile as $$
declare
  id_ uuid := p_execution_id;
  seen uuid[] := '{}';
  x record;
begin
  while id_ is not null and id_ <> all (seen) loop
    seen := seen || id_;
    select e.id, e.status, e.waiting_for, e.waiting_key, e.completed_at, e.outside, e.claimed_by, e.updated_at into x from agent_executions e where e.id = id_;
    if x.completed_at is not null or x.id is null then        -- who has the thread now goes on
      id_ := (select l.execution_id from agent_locks l join agent_executions e on e.id = l.execution_id
               where l.lane = agent_thread_lane(p_thread) and l.expires_at > clock_timestamp() and e.completed_at is null
                 and e.flow <> all (p_except));
      continue;
    elsif x.outside and x.status <> 'waiting' then            -- a worker that is away says nothing; one that follows takes the run soon
      return x.updated_at > clock_timestamp() - interval '1 second'
          or exists (select from agent_workers w where w.id = x.claimed_by and w.expires_at > clock_timestamp());
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
