-- Run locks: an execution that a worker outside of this program runs, in any language, over HTTP or SQL.
--
-- A lock is a worker of its own (agent_workers, kind outside) with one claim on one execution, so the fence, the sweep and what a
-- loss means are those of every execution. Its id is a secret: whoever knows it may write as the run. A heartbeat touches the
-- worker's row alone, and a checkpoint only reads it, so neither ever waits for the other.
--
-- Locks are taken in one order: the advisory lock of who locks a run, workers, waits, executions by id, lanes by name. A worker
-- comes before its executions because the sweep comes from there; nothing that holds an execution waits for a worker.

alter table agent_workers
  add column lock_id text unique,
  add column owner text not null default '',
  add column execution_id uuid,
  add column claim bigint;
comment on column agent_workers.lock_id is 'The secret of a run lock: whoever knows it may write as the run. Never listed, never logged.';
alter table agent_executions add column outside boolean generated always as (flow = 'external' or flow like 'external:%') stored;
comment on column agent_executions.outside is 'Run by a worker outside, under a lock: no process of this program claims it.';
create index agent_executions_outside on agent_executions (id) where outside and status in ('pending', 'running') and claimed_by is null;
comment on index agent_executions_outside is 'Runs that workers outside may lock now.';
create index agent_executions_progress on agent_executions (id) where claimed_by is not null and progress_seconds > 0;

-- Whoever makes such a run ready, also a function that knows nothing of them: nobody here is to be told.
create function agent_executions_outside() returns trigger language plpgsql as $$
begin
  new.hinted_at := 'infinity';
  if tg_op = 'INSERT' then
    if new.status <> 'pending' or new.claimed_by is not null then
      raise exception 'an execution for workers outside begins pending, not % with a worker', new.status using errcode = 'LK002';
    end if;
    if new.on_lost = 'resume' then
      new.on_lost := 'fail';                                 -- nobody here could resume it
    end if;
  end if;
  return new;
end $$;
create trigger agent_executions_outside before insert or update of hinted_at on agent_executions
  for each row when (new.flow = 'external' or new.flow like 'external:%') execute function agent_executions_outside();

create table agent_status_changes (
  execution_id uuid not null,
  n            int not null,
  status       text not null,
  waiting_for  text,
  at           timestamptz not null default clock_timestamp(),
  primary key (execution_id, n)
);
comment on table agent_status_changes is
  'Every status that an execution for workers outside has had: who follows one misses none, however quickly they follow one another.';

create function agent_status_changed() returns trigger language plpgsql as $$
begin
  insert into agent_status_changes (execution_id, n, status, waiting_for)
  values (new.id, (select coalesce(max(c.n), 0) + 1 from agent_status_changes c where c.execution_id = new.id), new.status, new.waiting_for);
  return null;
end $$;
create trigger agent_status_begins after insert on agent_executions
  for each row when (new.flow = 'external' or new.flow like 'external:%') execute function agent_status_changed();
create trigger agent_status_changed after update of status on agent_executions
  for each row when (new.outside and old.status is distinct from new.status) execute function agent_status_changed();

create function lock_agent_execution(p_id uuid, p_owner text, p_ttl_seconds int default 30)
returns table (lock_id text, expires_at timestamptz, claim bigint, status text, holder text, refused text)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  e agent_executions;
  w agent_workers;
begin
  if p_owner is null or p_owner !~ '^[^[:cntrl:]]{1,255}$' or p_owner !~ '[^[:space:]]' then
    raise exception 'owner % is not valid: an owner is 1 to 255 printable characters', coalesce(quote_literal(left(p_owner, 40)), 'null')
      using errcode = '22023';
  elsif p_ttl_seconds is null or p_ttl_seconds <= 0 or p_ttl_seconds > 86400 then
    raise exception 'ttl of % seconds is not valid: give 1 to 86400 (a day)', coalesce(p_ttl_seconds::text, 'null') using errcode = '22023';
  end if;
  -- One at a time, so that from here on the run can lose its worker and not get another one.
  perform pg_advisory_xact_lock(hashtextextended('run lock ' || p_id, 0));
  select x.* into e from agent_executions x where x.id = p_id;
  if not found then
    return;
  elsif not e.outside then
    return query select null::text, null::timestamptz, e.claim, e.status, null::text, 'inside'::text;
    return;
  end if;
  select k.* into w from agent_workers k where k.id = e.claimed_by for update;
  select x.* into e from agent_executions x where x.id = p_id for no key update;      -- passes checkpoints in flight
  if e.claimed_by is not null and w.expires_at > clock_timestamp() then
    if w.owner = p_owner then
      update agent_workers k set expires_at = clock_timestamp() + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds
       where k.id = w.id returning k.* into w;
    end if;
    return query select case when w.owner = p_owner then w.lock_id end, w.expires_at, e.claim, e.status, w.owner,
                        case when w.owner <> p_owner then 'held' end;
    return;
  end if;
  perform 1 from agent_executions x where x.id = p_id for update;                    -- waits for what the old lock still writes
  if e.claimed_by is not null then
    perform lose_agent_claims(e.claimed_by);                 -- what its end means is settled before this answers
    delete from agent_workers k where k.id = e.claimed_by;
    select x.* into e from agent_executions x where x.id = p_id;
  end if;
  if e.status not in ('pending', 'running') then
    return query select null::text, null::timestamptz, e.claim, e.status, null::text,
                        case when e.status = 'waiting' then 'waiting' else 'ended' end;
    return;
  end if;
  insert into agent_workers as k (name, kind, ttl_seconds, expires_at, lock_id, owner, execution_id, claim)
  values (p_owner, 'outside', p_ttl_seconds, clock_timestamp() + make_interval(secs => p_ttl_seconds),
          translate(encode(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()), 'base64'), '+/=', '-_'), p_owner, p_id, e.claim + 1)
  returning k.* into w;
  update agent_executions x set status = 'running', claimed_by = w.id, claim = x.claim + 1, updated_at = clock_timestamp()
   where x.id = p_id;
  if e.claim > 0 then
    perform reown_agent_locks(p_id, p_id || '#' || (e.claim + 1));
    perform recover_agent_activity(p_id, e.claim + 1);
  end if;
  return query select w.lock_id, w.expires_at, e.claim + 1, 'running'::text, p_owner, null::text;
end $$;
comment on function lock_agent_execution is
  'Lock an execution for a worker outside. No row for an unknown id. refused says why there is no lock_id: held (by holder, until '
  'expires_at), waiting, ended, or inside (no run for workers outside). The same live owner gets the same lock again, prolonged.';

create function beat_agent_locks(p_lock_ids text[], p_id uuid default null)
returns table (lock_id text, execution_id uuid, trace_id text, live boolean, expires_at timestamptz, status text, cancel_requested boolean)
language plpgsql volatile as $$
#variable_conflict use_column
begin
  perform 1 from agent_workers k
    where k.lock_id = any (p_lock_ids) and (p_id is null or k.execution_id = p_id) and k.expires_at > clock_timestamp()
    order by k.id for no key update;
  return query
  with beaten as (
    update agent_workers k set expires_at = clock_timestamp() + make_interval(secs => k.ttl_seconds)
      from agent_executions x
     where k.lock_id = any (p_lock_ids) and (p_id is null or k.execution_id = p_id) and k.expires_at > clock_timestamp()
       and x.id = k.execution_id and x.claimed_by = k.id
    returning k.id, k.expires_at),
  told as (                                                  -- once: with that the lock is over
    delete from agent_workers k using agent_executions x
     where k.lock_id = any (p_lock_ids) and (p_id is null or k.execution_id = p_id) and k.expires_at > clock_timestamp()
       and x.id = k.execution_id and x.status = 'cancelled' and x.claim = k.claim + 1
    returning k.id)
  select a.id, k.execution_id, x.trace_id, b.id is not null or t.id is not null, coalesce(b.expires_at, case when t.id is not null then k.expires_at end),
         x.status, t.id is not null
    from unnest(p_lock_ids) with ordinality a (id, n)
    left join agent_workers k on k.lock_id = a.id and (p_id is null or k.execution_id = p_id)
    left join agent_executions x on x.id = k.execution_id
    left join beaten b on b.id = k.id
    left join told t on t.id = k.id
   order by a.n;
end $$;
comment on function beat_agent_locks is
  'Prolong locks, with p_id only those of one execution. live is false for one that is void; cancel_requested says, once, that the '
  'execution was cancelled: stop the work.';

create function agent_lock_claim(p_id uuid, p_lock_id text) returns bigint
language sql stable as $$
  select k.claim from agent_workers k where k.lock_id = p_lock_id and k.execution_id = p_id and k.expires_at > clock_timestamp()
$$;
comment on function agent_lock_claim is 'The claim that a live lock stands for; null when it is void or another execution''s. Use it with the fence.';

create function checkpoint_agent_execution(p_id uuid, p_lock_id text, p_step text, p_output jsonb) returns text
language plpgsql volatile as $$
declare
  claim_ bigint := agent_lock_claim(p_id, p_lock_id);
  old jsonb;
begin
  if p_step is null or p_step !~ '^[^[:cntrl:]]+$' or length(p_step) > 500 then
    raise exception 'step % is not valid: a step is 1 to 500 printable characters', coalesce(quote_literal(left(p_step, 40)), 'null')
      using errcode = '22023';
  end if;
  perform fence_agent_execution(p_id, coalesce(claim_, -1));
  insert into agent_checkpoints (execution_id, step, claim, output) values (p_id, p_step, claim_, p_output)
  on conflict (execution_id, step) do nothing;
  if found then
    return 'created';
  end if;
  select c.output into old from agent_checkpoints c where c.execution_id = p_id and c.step = p_step;
  return case when old is not distinct from p_output then 'same' else 'different' end;
end $$;
comment on function checkpoint_agent_execution is
  'Record a step under a lock: created, same (it was recorded with this output) or different (with another; nothing changed). LK001 when the '
  'lock is void.';

create function unlock_agent_execution(p_id uuid, p_lock_id text, p_status text, p_summary text default '', p_error text default null,
                                       p_kind text default null, p_key text default null, p_timeout interval default null,
                                       p_result jsonb default null)
returns text language plpgsql volatile as $$
declare
  claim_ bigint;
  outcome jsonb;
  step_ text;
begin
  if p_status is null or p_status not in ('completed', 'failed', 'waiting') then
    raise exception 'a lock is released with status completed, failed or waiting, not %', coalesce(quote_literal(p_status), 'null')
      using errcode = '22023';
  elsif p_status = 'waiting' and (p_kind is null or p_kind not in
       ('response', 'agent', 'document', 'signature', 'test', 'event', 'delay', 'approval')) then
    raise exception 'a run can wait for response, agent, document, signature, test, event, delay or approval, not %',
      coalesce(quote_literal(p_kind), 'null') using errcode = '22023';
  end if;
  perform 1 from agent_workers k where k.lock_id = p_lock_id and k.execution_id = p_id for update;
  if p_status = 'waiting' then
    p_key := coalesce(case p_kind when 'delay' then p_id::text when 'agent' then lower(p_key) else p_key end,
                      case when p_kind = 'response' then (select x.thread_id from agent_executions x where x.id = p_id) end, '');
    perform agent_wait_lock(p_kind, p_key);
  end if;
  perform 1 from agent_executions x where x.id = p_id for update;
  claim_ := agent_lock_claim(p_id, p_lock_id);               -- after the lock: its time may have run out meanwhile
  perform fence_agent_execution(p_id, coalesce(claim_, -1));
  if p_status = 'waiting' then
    select 'wait ' || p_kind || ' ' || (x.wait_number + 1) into step_ from agent_executions x where x.id = p_id;
    outcome := park_agent_execution(p_id, claim_, step_, p_kind, p_key, p_timeout, null);
    if outcome is not null then                              -- it has come already: ready again
      update agent_executions x
         set claimed_by = null, claim = x.claim + 1, wait_number = x.wait_number + 1, attempt = 0, updated_at = clock_timestamp()
       where x.id = p_id;
    end if;
  else
    perform finish_agent_execution(p_id, claim_, p_status, p_summary, p_result, p_error, null);
  end if;
  delete from agent_workers k where k.lock_id = p_lock_id;
  return (select x.status from agent_executions x where x.id = p_id);
end $$;
comment on function unlock_agent_execution is
  'Give a lock back: end the run, or let it wait for something, after which any worker may lock it and finds the outcome as step '
  '''wait KIND N'' (N counts the run''s waits). Answers the status it has then: running when what it waits for has come already. LK001 '
  'when the lock is void.';

-- Admission ---------------------------------------------------------------------------------------
--
-- What is ready (claimed_by is null, status pending or running) is a queue: priority, then age. A flow or a surface may have a limit on
-- how many of its executions are claimed at once. Every claim that a process makes from the queue keeps within it, a run's first and
-- those after a wait, so two processes together never exceed it: they count one after the other, under a lock for each limit. What a
-- process inserts already claimed, because somebody waits for it, and what a worker outside locks is not held up, but is counted.
--
-- The index goes by flow and surface first, so that one entry is looked at for each kind of work that must not start now, however many
-- rows of it there are.

drop index agent_executions_ready;
create index agent_executions_ready on agent_executions (queue, flow, surface, priority, id)
  where claimed_by is null and status in ('pending', 'running') and not outside;
create index agent_executions_places on agent_executions (flow, surface) where claimed_by is not null;

create table agent_limits (
  kind    text not null check (kind in ('flow', 'surface')),
  name    text not null check (name <> ''),
  running int not null check (running >= 0),
  primary key (kind, name)
);
comment on table agent_limits is
  'How many executions of a flow, or of a surface, may be claimed at once; 0 stops them. The others stay in the queue.';

create function agent_limits_changed() returns trigger language plpgsql as $$
begin
  perform pg_notify('agent_ready', '');
  return null;
end $$;
create trigger agent_limits_changed after insert or update or delete on agent_limits
  for each statement execute function agent_limits_changed();

create function set_agent_limits(p_limits jsonb) returns void
language plpgsql volatile as $$
begin
  lock table agent_limits in share row exclusive mode;
  delete from agent_limits l where not exists (
    select from jsonb_to_recordset(p_limits) as n (kind text, name text) where n.kind = l.kind and n.name = l.name);
  insert into agent_limits as l (kind, name, running)
  select n.kind, n.name, n.running from jsonb_to_recordset(p_limits) as n (kind text, name text, running int) order by 1, 2
  on conflict (kind, name) do update set running = excluded.running where l.running <> excluded.running;
end $$;
comment on function set_agent_limits is 'Make the limits what is given, [{"kind", "name", "running"}], and nothing else.';

create function agent_free_places(p_kind text, p_name text, p_lock boolean) returns int
language plpgsql volatile set enable_seqscan = off as $$
declare
  most int;
begin
  if p_lock then
    perform pg_advisory_xact_lock(hashtextextended('admit ' || p_kind || ' ' || p_name, 0));
  end if;
  select l.running into most from agent_limits l where l.kind = p_kind and l.name = p_name;
  if not found then
    return 1000000;
  elsif p_kind = 'flow' then
    return most - (select count(*) from agent_executions x where x.claimed_by is not null and x.flow = p_name);
  end if;
  return most - (select count(*) from agent_executions x where x.claimed_by is not null and x.surface = p_name);
end $$;
comment on function agent_free_places is
  'How many more executions of a flow or surface may be claimed. With the lock nobody else claims any until the transaction ends.';

create function agent_place_freed() returns trigger language plpgsql as $$
begin
  if exists (select from agent_limits l where (l.kind = 'flow' and l.name = new.flow) or (l.kind = 'surface' and l.name = new.surface)) then
    perform pg_notify('agent_ready', '');
  end if;
  return null;
end $$;
create trigger agent_place_freed after update of status, claimed_by on agent_executions
  for each row when (old.claimed_by is not null and new.claimed_by is null) execute function agent_place_freed();

-- These are planned once in a session, which may be while the table is small, and must not read all of it when it has grown.
create function agent_ready_kinds(p_queue text, p_skip text[] default '{}') returns table (flow text, surface text)
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
  select k.flow, k.surface from kinds k where k.flow <> all (p_skip);
end $$;
comment on function agent_ready_kinds is 'The flows and surfaces of which anything is ready, without a look at each row.';

create function claim_agent_executions(p_worker uuid, p_queue text, p_limit int, p_skip text[] default '{}')
returns table (execution agent_executions, held boolean)
language plpgsql volatile set enable_seqscan = off as $$
#variable_conflict use_column
declare
  kinds text[] := '{}';             -- flow, surface and how many of them: three arrays side by side
  surfaces text[] := '{}';
  quotas int[] := '{}';
  limits jsonb := '{}';             -- free places by limit
  l record;
  k record;
  c record;
  quota int;
  ids uuid[] := '{}';
begin
  if p_limit <= 0 or not exists (select from agent_workers w where w.id = p_worker and w.expires_at > clock_timestamp()) then
    return;
  end if;
  for k in select r.flow, r.surface from agent_ready_kinds(p_queue, p_skip) r loop
    kinds := kinds || k.flow;
    surfaces := surfaces || k.surface;
  end loop;
  if kinds = '{}' then
    return;
  end if;
  -- Where nothing is free, nobody is waited for; the others are counted under their locks, in one order.
  for l in select n.kind, n.name, agent_free_places(n.kind, n.name, false) as free from agent_limits n
            where (n.kind = 'flow' and n.name = any (kinds)) or (n.kind = 'surface' and n.name = any (surfaces)) order by n.kind, n.name loop
    limits := limits || jsonb_build_object(l.kind || ' ' || l.name,
      case when l.free > 0 then agent_free_places(l.kind, l.name, true) else 0 end);
  end loop;
  for i in 1 .. cardinality(kinds) loop
    quotas := quotas || least(p_limit, coalesce((limits ->> ('flow ' || kinds[i]))::int, p_limit),
                              coalesce((limits ->> ('surface ' || surfaces[i]))::int, p_limit));
  end loop;
  for c in
    select r.id, t.flow, t.surface
      from unnest(kinds, surfaces, quotas) t (flow, surface, quota)
     cross join lateral (
       select x.id, x.priority from agent_executions x
        where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside
          and x.queue = p_queue and x.flow = t.flow and x.surface = t.surface
        order by x.priority, x.id limit greatest(t.quota, 0) for update skip locked) r
     where t.quota > 0
     order by r.priority, r.id
  loop
    if limits <> '{}' then
      quota := least(coalesce((limits ->> ('flow ' || c.flow))::int, 1), coalesce((limits ->> ('surface ' || c.surface))::int, 1));
      continue when quota <= 0;
      if limits ? ('flow ' || c.flow) then
        limits := jsonb_set(limits, array['flow ' || c.flow], to_jsonb((limits ->> ('flow ' || c.flow))::int - 1));
      end if;
      if limits ? ('surface ' || c.surface) then
        limits := jsonb_set(limits, array['surface ' || c.surface], to_jsonb((limits ->> ('surface ' || c.surface))::int - 1));
      end if;
    end if;
    ids := ids || c.id;
    exit when cardinality(ids) >= p_limit;
  end loop;
  -- A row that somebody has locked for a moment, such as a parent that parks, is passed over: the caller asks again soon.
  if cardinality(ids) < p_limit then
    perform set_config('lanekeeper.missed', 'yes', true)
       from unnest(kinds, surfaces) t (flow, surface)
      where coalesce((limits ->> ('flow ' || t.flow))::int, 1) > 0 and coalesce((limits ->> ('surface ' || t.surface))::int, 1) > 0
        and exists (select from agent_executions x
                     where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside
                       and x.queue = p_queue and x.flow = t.flow and x.surface = t.surface and x.id <> all (ids));
  end if;
  if ids = '{}' then
    return;
  end if;
  perform set_config('lanekeeper.claimed', ids::text, true);
  return query
  update agent_executions x
     set status = 'running', claimed_by = p_worker, claim = x.claim + 1, updated_at = clock_timestamp()
   where x.id = any (ids)
  returning x, x.claim > 1 and (exists (select from agent_locks n where n.execution_id = x.id)
                                or exists (select from agent_activity_open o where o.execution_id = x.id));
end $$;
comment on function claim_agent_executions is
  'Take up to p_limit ready executions of a queue for a live worker, by priority and age, within the limits, none of the flows in p_skip. One '
  'that is held has lanes or calls of an earlier claim: recover_agent_claim comes before anything else is done with it. Until '
  'the transaction ends the setting lanekeeper.claimed has their ids, to load what they have recorded, and lanekeeper.missed is yes when some '
  'were locked by others: ask again soon.';

create function recover_agent_claim(p_id uuid, p_claim bigint) returns void
language plpgsql volatile as $$
begin
  perform fence_agent_execution(p_id, p_claim);
  perform reown_agent_locks(p_id, p_id || '#' || p_claim);
  perform recover_agent_activity(p_id, p_claim);
end $$;
comment on function recover_agent_claim is 'Give the lanes of an execution to its new claim, and close the calls that an earlier one left in flight.';

create or replace function claim_agent_execution(p_id uuid, p_worker uuid) returns setof agent_executions
language plpgsql volatile as $$
declare
  e agent_executions;
  kind record;
begin
  select x.flow, x.surface into kind from agent_executions x
   where x.id = p_id and x.claimed_by is null and x.status in ('pending', 'running') and not x.outside;
  if not found then
    return;
  end if;
  if exists (select from agent_limits l where (l.kind = 'flow' and l.name = kind.flow) or (l.kind = 'surface' and l.name = kind.surface))
     and (agent_free_places('flow', kind.flow, true) <= 0 or agent_free_places('surface', kind.surface, true) <= 0) then
    return;                                                  -- it stays in the queue
  end if;
  update agent_executions x
     set status = 'running', claimed_by = p_worker, claim = x.claim + 1, updated_at = clock_timestamp()
   where x.id = p_id and x.claimed_by is null and x.status in ('pending', 'running') and not x.outside
     and exists (select 1 from agent_workers w where w.id = p_worker and w.expires_at > clock_timestamp())
  returning x.* into e;
  if not found then
    return;
  end if;
  if e.claim > 1 then
    perform reown_agent_locks(e.id, e.id || '#' || e.claim);
    perform recover_agent_activity(e.id, e.claim);
  end if;
  return next e;
end $$;

create function ready_agent_executions(p_limit int) returns table (id uuid, wake int, queue text, priority smallint, trace_id text, reason text)
language plpgsql stable set enable_seqscan = off as $$
#variable_conflict use_column
begin
  return query
  select r.id, r.wake, q.queue, r.priority, r.trace_id, 'ready'::text
    from (values ('background'), ('interactive')) q (queue)
   cross join lateral agent_ready_kinds(q.queue) k
   cross join lateral (
     select x.id, x.wake, x.priority, x.trace_id from agent_executions x
      where x.claimed_by is null and x.status in ('pending', 'running') and not x.outside
        and x.queue = q.queue and x.flow = k.flow and x.surface = k.surface
      order by x.priority, x.id limit p_limit) r
   where (not exists (select from agent_limits l where (l.kind = 'flow' and l.name = k.flow) or (l.kind = 'surface' and l.name = k.surface))
          or agent_free_places('flow', k.flow, false) > 0 and agent_free_places('surface', k.surface, false) > 0)
   order by r.priority, r.id limit p_limit;
end $$;
comment on function ready_agent_executions is 'What could be claimed now, first come first; nothing that a limit holds back.';

-- Speed -------------------------------------------------------------------------------------------
--
-- A function in SQL that is not inlined is planned anew in every statement that calls it; one in PL/pgSQL once in a session.


create or replace function agent_uuid7(p_at timestamptz default clock_timestamp()) returns uuid
language plpgsql volatile parallel safe as $$
declare
  us bigint := (extract(epoch from p_at) * 1000000)::bigint;
begin
  return encode(set_bit(set_bit(overlay(
           uuid_send(gen_random_uuid())
           placing substring(int8send(us / 1000) from 3 for 6)
                || substring(int4send((28672 + (us % 1000) * 4096 / 1000)::int) from 3 for 2)
           from 1 for 8), 64, 0), 71, 1), 'hex')::uuid;
end $$;

create or replace function agent_wait_lock(p_kind text, p_key text) returns void language plpgsql volatile as $$
begin
  perform pg_advisory_xact_lock(hashtextextended('wait ' || p_kind || ' ' || p_key, 0));
end $$;

create or replace function void_agent_approvals(p_execution_id uuid) returns void language plpgsql volatile as $$
begin
  update agent_approvals a set status = 'expired', reason = 'its execution has ended'
   where a.execution_id = p_execution_id and a.parked and a.status in ('pending', 'approved');
end $$;

create or replace function close_agent_requests(p_execution_id uuid) returns void language plpgsql volatile as $$
begin
  update agent_requests r set status = 'closed', completed_at = clock_timestamp()
   where r.execution_id = p_execution_id and r.status = 'pending';
end $$;

create or replace function agent_webhook_wanted(p_event text) returns boolean language plpgsql stable as $$
begin
  return exists (select from agent_webhook_targets t
                  where t.enabled and t.events && array[p_event, split_part(p_event, '.', 1) || '.*', '*']);
end $$;
