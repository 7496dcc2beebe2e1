-- Who stood in the queue of a lane, and then takes it by a plain try, has no place there any more. It stayed until the patience of the
-- first call was over, which may be days, and each release handed the lane to somebody who was not there.

create or replace function ask_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int) returns agent_lock_answer
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  now_   timestamptz;
  at_    tid;
  token  bigint;
  holder text;
  ends   timestamptz;
  waited timestamptz;
  head   text;
  got    agent_lock_answer;
begin
  select l.ctid into at_ from agent_locks l
   where l.lane = p_lane and l.locked_by = '' and l.expires_at <= clock_timestamp() and l.waited_until <= clock_timestamp()
     and p_locked_by ~ '^[!-~]+$' and length(p_locked_by) < 256 and p_ttl_seconds between 1 and 2592000
     for update skip locked;
  if at_ is not null then
    now_ := clock_timestamp();                                                        -- after the lock
    update agent_locks l
       set locked_by = p_locked_by, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
           expires_at = now_ + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds, parked = false,
           execution_id = agent_lock_execution(p_locked_by)
     where l.ctid = at_ and l.expires_at <= now_                                      -- ours, so it stays where it is
    returning true, l.fencing_token, l.expires_at, p_locked_by, '', now_ into got;
    if got.acquired then
      return got;
    end if;
  elsif not agent_lock_fits(p_lane, p_locked_by) or (p_ttl_seconds between 1 and 2592000) is not true then
    perform agent_lock_check(p_lane, p_locked_by, p_ttl_seconds);                     -- says what is wrong
  end if;

  select l.fencing_token, l.locked_by, l.expires_at, l.waited_until into token, holder, ends, waited
    from agent_locks l where l.lane = p_lane;
  if not found then
    -- The very first hold of this lane: no row to lock yet, so racers are told apart by an advisory lock.
    if not pg_try_advisory_xact_lock(hashtextextended('lane ' || p_lane, 0)) then
      return row(false, null, null, null, null, null)::agent_lock_answer;
    end if;
    now_ := clock_timestamp();
    insert into agent_locks as l (lane, locked_by, fencing_token, locked_at, expires_at, ttl_seconds, execution_id)
    values (p_lane, p_locked_by, agent_lock_token(0, now_), now_, now_ + make_interval(secs => p_ttl_seconds),
            p_ttl_seconds, agent_lock_execution(p_locked_by))
    on conflict (lane) do nothing
    returning true, l.fencing_token, l.expires_at, l.locked_by, '', now_ into got;
    return case when got.acquired then got else row(false, null, null, null, null, null)::agent_lock_answer end;
  end if;
  now_ := clock_timestamp();
  if ends > now_ then
    if holder <> p_locked_by then
      return row(false, token, ends, holder, null, null)::agent_lock_answer;          -- busy: a read, no write
    end if;
    -- Ours already. A refresh leaves the key alone, so writes under this token do not hold it up.
    select l.fencing_token, l.locked_by, l.expires_at into token, holder, ends
      from agent_locks l where l.lane = p_lane for no key update skip locked;
    if not found then
      return row(false, null, null, null, null, null)::agent_lock_answer;
    end if;
    now_ := clock_timestamp();                                                        -- after the lock
    if ends > now_ and holder <> p_locked_by then
      return row(false, token, ends, holder, null, null)::agent_lock_answer;
    elsif ends > now_ then
      update agent_locks l
         set expires_at = case when l.parked then l.expires_at else now_ + make_interval(secs => p_ttl_seconds) end,
             ttl_seconds = p_ttl_seconds
       where l.lane = p_lane
      returning true, l.fencing_token, l.expires_at, l.locked_by, '', now_ into got;
      return got;
    end if;
  elsif waited > now_ then
    head := agent_lock_head(p_lane, now_);
    if head <> p_locked_by then
      return row(false, token, ends, head, null, null)::agent_lock_answer;            -- promised to who waits
    end if;
  end if;

  -- Free or expired, and promised to nobody else: the full lock, for which nobody is waited for.
  select l.ctid, l.fencing_token, l.locked_by, l.expires_at, l.waited_until into at_, token, holder, ends, waited
    from agent_locks l where l.lane = p_lane for update skip locked;
  if not found then
    return row(false, null, null, null, null, null)::agent_lock_answer;               -- being changed right now
  end if;
  now_ := clock_timestamp();                                                          -- after the lock
  if ends > now_ then
    return row(false, token, ends, holder, null, null)::agent_lock_answer;            -- taken meanwhile
  elsif waited > now_ then
    head := agent_lock_head(p_lane, now_);
    if head <> p_locked_by then
      return row(false, token, ends, head, null, null)::agent_lock_answer;            -- somebody came just now
    end if;
  end if;
  if holder <> '' and return_agent_lock(p_lane) is not null then
    -- The borrower let it expire, and who lent it is alive: it has gone back.
    select l.locked_by = p_locked_by, l.fencing_token, l.expires_at, l.locked_by, holder, ends into got
      from agent_locks l where l.lane = p_lane;
    return got;
  end if;
  if holder <> '' and agent_lock_execution(holder) is not null then
    perform note_agent_hold(p_lane, 'expired', p_locked_by);
  end if;
  if waited > now_ then
    delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by;
  end if;
  update agent_locks l
     set locked_by = p_locked_by, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
         expires_at = now_ + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds, parked = false,
         execution_id = agent_lock_execution(p_locked_by)
   where l.ctid = at_
  returning true, l.fencing_token, l.expires_at, p_locked_by, holder, ends into got;
  return got;
end $$;
