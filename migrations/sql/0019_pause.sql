-- Pause all: the agent does nothing by itself until somebody says so.
--
-- Attended work (surfaces operate and chat: a person waits for it) goes on. All other executions are autonomous: while the
-- agent is paused none of them is claimed, whoever asks, and those that run are handed back by their processes before their next
-- step. What arrives is kept: events, timers, deliveries and messages make executions ready, which are then in the queue.
--
-- The rule is a trigger, so that no claim can pass it by. A claim shares a lock that a pause takes alone: a pause waits for the claims
-- that are being made and, once it has returned, there are no others. A claim never waits for a pause; it finds the lock taken, and
-- lets the execution be.

create table agent_pauses (
  id           bigint generated always as identity primary key,
  paused_at    timestamptz not null default clock_timestamp(),
  paused_by    text not null,
  reason       text not null,
  trace_id     text not null,
  resumed_at   timestamptz,                                -- null: the agent is paused
  resumed_by   text not null default '',
  resume_reason text not null default ''
);
create unique index agent_pauses_open on agent_pauses ((true)) where resumed_at is null;
comment on table agent_pauses is 'When autonomous work was paused, by whom and why. The one row without resumed_at is the pause that is on.';

create function agent_attended(p_surface text) returns boolean language sql immutable as $$
  select p_surface in ('operate', 'chat')
$$;
comment on function agent_attended is 'Whether a person waits for the executions of a surface. All others are autonomous.';

create function agent_autonomous_paused() returns boolean language plpgsql stable as $$
begin
  return exists (select from agent_pauses p where p.resumed_at is null);
end $$;
comment on function agent_autonomous_paused is 'Whether autonomous work is paused.';

create function agent_pause_check(p_by text, p_reason text) returns void language plpgsql immutable as $$
begin
  if p_by is null or p_by !~ '^[^[:cntrl:]]{1,255}$' or p_by !~ '[^[:space:]]' then
    raise exception 'by % is not valid: name who does it, in 1 to 255 printable characters', coalesce(quote_literal(left(p_by, 40)), 'null')
      using errcode = '22023';
  elsif length(p_reason) > 1000 or p_reason ~ '[\x01-\x08\x0b-\x1f\x7f]' then
    raise exception 'the reason is not valid: it has at most 1000 printable characters' using errcode = '22023';
  end if;
end $$;

create function pause_agent(p_reason text, p_by text default 'admin')
returns table (changed boolean, paused_at timestamptz, paused_by text, reason text, trace_id text, activity_id uuid)
language plpgsql volatile set lock_timeout = '2s' as $$
#variable_conflict use_column
declare
  p agent_pauses;
  note_ uuid;
begin
  perform agent_pause_check(p_by, p_reason);
  if p_reason is null or p_reason !~ '[^[:space:]]' then
    raise exception 'a pause needs a reason: say why, it is shown to everybody' using errcode = '22023';
  end if;
  begin
    perform pg_advisory_xact_lock(hashtextextended('agent pause', 0));
  exception when lock_not_available then
    null;         -- somebody keeps a claim in an open transaction: what it claims stops before its first step
  end;
  insert into agent_pauses as n (paused_by, reason, trace_id) values (p_by, p_reason, agent_trace_id('op'))
  on conflict do nothing returning n.* into p;
  if not found then
    return query select false, n.paused_at, n.paused_by, n.reason, n.trace_id, null::uuid from agent_pauses n where n.resumed_at is null;
    return;
  end if;
  insert into agent_activity as a (trace_id, kind, agent, surface, skill_name, purpose, status, input, finished_at, duration_ms)
  values (p.trace_id, 'note', p_by, 'operate', 'pause_agent', p_reason, 'success', jsonb_build_object('reason', p_reason, 'by', p_by),
          clock_timestamp(), 0)
  returning a.id into note_;
  perform pg_notify('agent_pause', 'paused');
  return query select true, p.paused_at, p.paused_by, p.reason, p.trace_id, note_;
end $$;
comment on function pause_agent is
  'Pause autonomous work, everywhere, until resume_agent. Of two at once one is the pause; the other gets it with changed false.';

create function resume_agent(p_by text default 'admin', p_reason text default '')
returns table (changed boolean, paused_at timestamptz, paused_by text, reason text, resumed_at timestamptz, trace_id text, activity_id uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  p agent_pauses;
  trace_ text := agent_trace_id('op');
  note_ uuid;
begin
  perform agent_pause_check(p_by, p_reason);
  update agent_pauses n set resumed_at = clock_timestamp(), resumed_by = p_by, resume_reason = coalesce(p_reason, '')
   where n.resumed_at is null returning n.* into p;
  if not found then
    return query select false, null::timestamptz, '', '', null::timestamptz, '', null::uuid;
    return;
  end if;
  insert into agent_activity as a (trace_id, kind, agent, surface, skill_name, purpose, status, input, output, finished_at, duration_ms)
  values (trace_, 'note', p_by, 'operate', 'resume_agent', p.resume_reason, 'success', jsonb_build_object('reason', p.resume_reason, 'by', p_by),
          jsonb_build_object('paused_at', p.paused_at, 'paused_by', p.paused_by, 'paused_for', p.reason, 'paused_trace', p.trace_id),
          clock_timestamp(), 0)
  returning a.id into note_;
  perform pg_notify('agent_pause', 'resumed');
  perform pg_notify('agent_ready', '');                     -- for processes that know nothing of pauses
  perform pg_notify('agent_automations', '');
  return query select true, p.paused_at, p.paused_by, p.reason, p.resumed_at, trace_, note_;
end $$;
comment on function resume_agent is 'End the pause; what is ready is taken at once. changed is false when the agent is not paused.';

create function agent_executions_held() returns trigger language plpgsql as $$
begin
  if pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0)) then
    -- Another statement, so that it sees every pause that had the lock before.
    perform 1 from agent_pauses p where p.resumed_at is null;
    if not found then
      return new;
    end if;
  end if;
  if tg_op = 'UPDATE' and not old.outside then
    if old.status = 'waiting' then
      new.claimed_by := null;                                -- its wait has ended all the same
      return new;
    end if;
    return null;                                             -- it stays in the queue
  end if;
  raise exception 'autonomous work is paused%', coalesce((
      select ' since ' || to_char(p.paused_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC by ' || p.paused_by || ': ' || p.reason
        from agent_pauses p where p.resumed_at is null), '')
    using errcode = 'LK003', hint = 'Nothing begins until it is resumed: agent resume, or select resume_agent().';
end $$;
create trigger agent_executions_held_begin before insert on agent_executions
  for each row when (new.claimed_by is not null and new.surface not in ('operate', 'chat'))
  execute function agent_executions_held();
create trigger agent_executions_held before update of claimed_by on agent_executions
  for each row when (old.claimed_by is null and new.claimed_by is not null and new.surface not in ('operate', 'chat'))
  execute function agent_executions_held();

-- What is held back must not fill the places of what is not.
create or replace function agent_ready_kinds(p_queue text, p_skip text[] default '{}') returns table (flow text, surface text)
language plpgsql stable set enable_seqscan = off as $$
#variable_conflict use_column
begin
  return query
  with recursive kinds as (
    (select x.flow, x.surface from agent_executions x
      where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside and x.queue = p_queue
      order by x.flow, x.surface limit 1)
    union all
    select n.flow, n.surface from kinds k cross join lateral (
      select x.flow, x.surface from agent_executions x
       where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside and x.queue = p_queue
         and (x.flow, x.surface) > (k.flow, k.surface)
       order by x.flow, x.surface limit 1) n)
  select k.flow, k.surface from kinds k
   where k.flow <> all (p_skip)
     and (k.surface in ('operate', 'chat') or not exists (select from agent_pauses p where p.resumed_at is null));
end $$;
comment on function agent_ready_kinds is
  'The flows and surfaces of which anything may be claimed, without a look at each row: while the agent is paused, those of attended surfaces.';
