-- Who has fenced a write by the token of a thread's lane, and then speaks in the thread, met who takes the thread in a deadlock: one had
-- the row of the lane and wanted the advisory lock, the other had that and waited for the row. Now nobody waits for the row under the
-- advisory lock, unless the row came in that moment.

create or replace function lock_agent_thread(p_thread text, p_wait boolean default true) returns boolean
language plpgsql volatile as $$
declare
  lane_ text := agent_thread_lane(p_thread);
  key_ bigint := hashtextextended('lane ' || agent_thread_lane(p_thread), 0);
begin
  -- The advisory lock is for a lane that has no row yet; acquire_agent_lock takes the same for its first hold.
  if p_wait then
    perform 1 from agent_locks l where l.lane = lane_ for update;
    if not found then
      perform pg_advisory_xact_lock(key_);
      perform 1 from agent_locks l where l.lane = lane_ for update;    -- it may have come meanwhile
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

-- Who takes a claim away waits for the writes under it that are under way, with the lock that it needs from the beginning: one with a weaker
-- lock and one with a write that wants more, such as to speak in a thread that its parent has lent, waited for each other.

create or replace function give_up_agent_claim(p_id uuid, p_claim bigint) returns void
language plpgsql volatile as $$
declare
  e agent_executions;
begin
  select x.* into e from agent_executions x where x.id = p_id for update;                -- a claim is part of the key
  update agent_executions x
     set claimed_by = null, claim = x.claim + 1, wake = x.wake + 1, hinted_at = 'epoch', updated_at = clock_timestamp(),
         attempt = case when exists (select 1 from agent_checkpoints c where c.execution_id = x.id and c.claim = p_claim)
                        then 0 else x.attempt end
   where x.id = p_id and x.claim = p_claim and x.status = 'running' and x.claimed_by is not null;
  if found then
    perform note_agent_claim(e, 'handed back');
    perform free_agent_locks(p_id, false);
    perform reown_agent_locks(p_id, p_id || '#' || (p_claim + 1));
  end if;
end $$;

create or replace function lock_agent_execution(p_id uuid, p_owner text, p_ttl_seconds int default 30)
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
  if w.expires_at > clock_timestamp() then
    select x.* into e from agent_executions x where x.id = p_id for no key update;    -- passes checkpoints in flight
  end if;
  if e.claimed_by is not null and w.expires_at > clock_timestamp() then
    if w.owner = p_owner then
      update agent_workers k set expires_at = clock_timestamp() + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds
       where k.id = w.id returning k.* into w;
    end if;
    return query select case when w.owner = p_owner then w.lock_id end, w.expires_at, e.claim, e.status, w.owner,
                        case when w.owner <> p_owner then 'held' end;
    return;
  end if;
  select x.* into e from agent_executions x where x.id = p_id for update;            -- waits for what the old lock still writes
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
