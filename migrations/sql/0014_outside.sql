-- Run locks: an execution that a worker outside of this program runs, in any language, over HTTP or SQL.
--
-- A lock is a worker of its own (agent_workers, kind outside) with one claim on one execution, so the fence, the sweep and what a
-- loss means are those of every execution. Its id is a secret: whoever knows it may write as the run. A heartbeat touches the
-- worker's row alone, so it never waits behind a checkpoint, nor a checkpoint behind it.

alter table agent_workers
  add column lock_id text unique,
  add column owner text not null default '',
  add column execution_id uuid,
  add column claim bigint;
alter table agent_executions add column outside boolean generated always as (flow = 'external' or flow like 'external:%') stored;
comment on column agent_executions.outside is 'Run by a worker outside, under a lock: no process of this program claims it.';
create index agent_executions_outside on agent_executions (id) where outside and status in ('pending', 'running') and claimed_by is null;

create function agent_executions_outside() returns trigger language plpgsql as $$
begin
  new.hinted_at := 'infinity';                               -- nobody here is to be told
  return new;
end $$;
create trigger agent_executions_outside before insert on agent_executions
  for each row when (new.flow = 'external' or new.flow like 'external:%') execute function agent_executions_outside();

create function lock_agent_execution(p_id uuid, p_owner text, p_ttl_seconds int default 30)
returns table (lock_id text, expires_at timestamptz, claim bigint, status text, holder text)
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
  select x.* into e from agent_executions x where x.id = p_id for update;
  if not found then
    return;
  end if;
  if not e.outside then
    return query select null::text, null::timestamptz, e.claim, e.status, null::text;
    return;
  end if;
  if e.claimed_by is not null then
    select k.* into w from agent_workers k where k.id = e.claimed_by for no key update;
    if found and w.expires_at > clock_timestamp() then
      if w.owner = p_owner then
        update agent_workers k set expires_at = clock_timestamp() + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds
         where k.id = w.id returning k.* into w;
        return query select w.lock_id, w.expires_at, e.claim, e.status, w.owner;
      else
        return query select null::text, w.expires_at, e.claim, e.status, w.owner;
      end if;
      return;
    end if;
    perform lose_agent_claims(e.claimed_by);                 -- what its end means is settled before this answers
    delete from agent_workers k where k.id = e.claimed_by;
    select x.* into e from agent_executions x where x.id = p_id;
  end if;
  if e.status not in ('pending', 'running') then
    return query select null::text, null::timestamptz, e.claim, e.status, null::text;
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
  return query select w.lock_id, w.expires_at, e.claim + 1, 'running'::text, p_owner;
end $$;
comment on function lock_agent_execution is
  'Lock an execution for a worker outside. No row for an unknown id; a row without lock_id when somebody else holds it (holder, expires_at), it '
  'waits or has ended (status), or it is not one for workers outside. The same live owner gets the same lock again.';

create function beat_agent_locks(p_lock_ids text[])
returns table (lock_id text, execution_id uuid, live boolean, expires_at timestamptz, status text, cancel_requested boolean)
language plpgsql volatile as $$
#variable_conflict use_column
begin
  perform 1 from agent_workers k where k.lock_id = any (p_lock_ids) order by k.id for no key update;
  return query
  with beaten as (
    update agent_workers k set expires_at = clock_timestamp() + make_interval(secs => k.ttl_seconds)
      from agent_executions x
     where k.lock_id = any (p_lock_ids) and k.expires_at > clock_timestamp() and x.id = k.execution_id
       and (x.claimed_by = k.id or x.status = 'cancelled')
    returning k.lock_id, k.expires_at)
  select a.id, k.execution_id, b.lock_id is not null, b.expires_at, x.status, b.lock_id is not null and x.status = 'cancelled'
    from unnest(p_lock_ids) with ordinality a (id, n)
    left join agent_workers k on k.lock_id = a.id
    left join agent_executions x on x.id = k.execution_id
    left join beaten b on b.lock_id = a.id
   order by a.n;
end $$;
comment on function beat_agent_locks is
  'Prolong locks. live is false for one that is void; cancel_requested says that the execution was cancelled: stop the work.';

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
  end if;
  if p_status = 'waiting' then
    perform agent_wait_lock(coalesce(p_kind, ''), coalesce(p_key, ''));          -- before the execution
  end if;
  perform 1 from agent_executions x where x.id = p_id for update;
  claim_ := agent_lock_claim(p_id, p_lock_id);
  perform fence_agent_execution(p_id, coalesce(claim_, -1));
  if p_status = 'waiting' then
    select 'wait ' || p_kind || ' ' || (x.wait_number + 1) into step_ from agent_executions x where x.id = p_id;
    outcome := park_agent_execution(p_id, claim_, step_, p_kind, case when p_kind = 'delay' then p_id::text else p_key end, p_timeout, null);
    if outcome is not null then                              -- it has come already: ready again
      update agent_executions x set claimed_by = null, claim = x.claim + 1, wait_number = x.wait_number + 1 where x.id = p_id;
    end if;
  else
    perform finish_agent_execution(p_id, claim_, p_status, p_summary, p_result, p_error, null);
  end if;
  delete from agent_workers k where k.lock_id = p_lock_id;
  return (select x.status from agent_executions x where x.id = p_id);
end $$;
comment on function unlock_agent_execution is
  'Give a lock back: end the run, or let it wait for something, after which any worker may lock it. Answers the status it has then. LK001 '
  'when the lock is void.';

-- Admission ---------------------------------------------------------------------------------------

create table agent_limits (
  kind    text not null check (kind in ('flow', 'surface')),
  name    text not null check (name <> ''),
  running int not null check (running >= 0),
  primary key (kind, name)
);
comment on table agent_limits is 'How many executions of a flow, or of a surface, may run at once. The others are pending: a queue by priority and age.';

create function agent_admits(p_flow text, p_surface text) returns boolean
language plpgsql volatile as $$
declare
  l record;
begin
  for l in select x.kind, x.name, x.running from agent_limits x
            where (x.kind, x.name) in (('flow', p_flow), ('surface', p_surface)) order by x.kind, x.name loop
    perform pg_advisory_xact_lock(hashtextextended('admit ' || l.kind || ' ' || l.name, 0));
    if l.running <= (select count(*) from agent_executions x
                      where x.claimed_by is not null and l.name = case l.kind when 'flow' then x.flow else x.surface end) then
      return false;
    end if;
  end loop;
  return true;
end $$;
comment on function agent_admits is 'Whether one more execution may begin now. Whoever asks has a place until the transaction ends.';

create or replace function claim_agent_execution(p_id uuid, p_worker uuid) returns setof agent_executions
language plpgsql volatile as $$
declare
  e agent_executions;
begin
  if not coalesce((select x.status = 'running' or agent_admits(x.flow, x.surface) from agent_executions x where x.id = p_id), false) then
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
