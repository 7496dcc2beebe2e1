-- The gate of a lane with as few statements as its rules allow, for one lane and for many.
--
-- Taking a free lane is two statements: lock the row, then, after reading the clock, change it. Only when the first finds
-- nothing to lock is the row read, to tell why. Neither that read nor a first statement that finds nothing writes, so a
-- failed try leaves no trace, not even in the WAL. Releasing is two statements as well.
--
-- The same for many lanes at once is for a process whose callers want different lanes at the same time: they share the
-- statements and the commit. What is not plain, such as a lane that is promised to a waiter, goes through the gate for one.

-- It is not immutable, because an epoch of a timestamptz is not; declared so it could not be inlined, and was parsed at each call.
create or replace function agent_lock_token(p_old bigint, p_now timestamptz) returns bigint
language sql stable parallel safe as $$
  select greatest(p_old + 1, (extract(epoch from p_now) * 1000000)::bigint)
$$;

-- A bound in a regular expression, such as {1,255}, costs more than all the rest of a try for a busy lane.
create function agent_lock_fits(p_lane text, p_locked_by text) returns boolean
language sql immutable parallel safe as $$
  select (length(p_lane) between 1 and 255 and p_lane !~ '[[:cntrl:]]' and p_lane ~ '[^[:space:]]'
          and length(p_locked_by) between 1 and 255 and p_locked_by !~ '[[:cntrl:]]' and p_locked_by ~ '[^[:space:]]') is true
$$;
comment on function agent_lock_fits is 'Whether the names of a lane and of an owner are 1 to 255 printable characters each.';

create or replace function agent_lock_execution(p_locked_by text) returns uuid
language sql immutable parallel safe as $$
  select case when substr(p_locked_by, 37, 1) = '#'
               and p_locked_by ~ '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}#[0-9]+$'
              then left(p_locked_by, 36)::uuid end
$$;

create type agent_lock_answer as (
  acquired      boolean,
  fencing_token bigint,
  expires_at    timestamptz,
  locked_by     text,
  was_holder    text,                               -- whose lease had ended without a release; '' when it was free
  was_until     timestamptz                         -- when that ended
);

-- A table of few lanes is analysed as one page, and would be read from end to end, with all the versions that a busy lane leaves.
create function ask_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int) returns agent_lock_answer
language plpgsql volatile set enable_seqscan = off as $$
declare
  now_   timestamptz;
  at_    tid;
  token  bigint;
  holder text;
  ends   timestamptz;
  waited timestamptz;
  head   text;
  until_ timestamptz;
  got    agent_lock_answer;
begin
  if not agent_lock_fits(p_lane, p_locked_by) or (p_ttl_seconds between 1 and 2592000) is not true then
    perform agent_lock_check(p_lane, p_locked_by, p_ttl_seconds);                     -- says what is wrong
  end if;
  -- Free or expired, and promised to nobody else: the full lock, for which nobody is waited for.
  select l.ctid, l.fencing_token, l.locked_by, l.expires_at, l.waited_until into at_, token, holder, ends, waited
    from agent_locks l
   where l.lane = p_lane and l.expires_at <= clock_timestamp()
     and (l.waited_until <= clock_timestamp() or coalesce(agent_lock_head(l.lane, clock_timestamp()), p_locked_by) = p_locked_by)
     for update skip locked;

  if at_ is null then
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
    if ends <= now_ then
      head := case when waited > now_ then agent_lock_head(p_lane, now_) end;
      if head <> p_locked_by then
        return row(false, token, ends, head, null, null)::agent_lock_answer;          -- promised to who waits
      end if;
      return row(false, null, null, null, null, null)::agent_lock_answer;             -- being changed right now
    elsif holder <> p_locked_by then
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
    -- It ended between the read and the lock, which is too weak to change the key.
    select l.ctid, l.fencing_token, l.locked_by, l.expires_at, l.waited_until into at_, token, holder, ends, waited
      from agent_locks l where l.lane = p_lane for update skip locked;
    if not found then
      return row(false, null, null, null, null, null)::agent_lock_answer;
    end if;
  end if;

  now_ := clock_timestamp();                                                          -- after the lock
  if ends > now_ then
    return row(false, token, ends, holder, null, null)::agent_lock_answer;            -- the clock was set back
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
  until_ := now_ + make_interval(secs => p_ttl_seconds);
  update agent_locks l
     set locked_by = p_locked_by, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
         expires_at = until_, ttl_seconds = p_ttl_seconds, parked = false, execution_id = agent_lock_execution(p_locked_by)
   where l.ctid = at_                                                                 -- ours, so it stays where it is
  returning l.fencing_token into token;
  return row(true, token, until_, p_locked_by, holder, ends)::agent_lock_answer;
end $$;
comment on function ask_agent_lock is
  'acquire_agent_lock, with whose expired lease was taken over and since when it was over; cheaper to call from plpgsql.';

create or replace function acquire_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text)
language plpgsql volatile as $$
declare
  a agent_lock_answer := ask_agent_lock(p_lane, p_locked_by, p_ttl_seconds);
begin
  acquired := a.acquired;
  fencing_token := a.fencing_token;
  expires_at := a.expires_at;
  locked_by := a.locked_by;
  return next;
end $$;

create or replace function try_acquire_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300)
returns boolean language plpgsql volatile as $$
begin
  return (ask_agent_lock(p_lane, p_locked_by, p_ttl_seconds)).acquired;
end $$;

create or replace function release_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint default null)
returns boolean language plpgsql volatile set enable_seqscan = off as $$
declare
  at_    tid;
  ends   timestamptz;
  waited timestamptz;
  kept   boolean;
  of     uuid;
begin
  if not agent_lock_fits(p_lane, p_locked_by) then
    perform agent_lock_check(p_lane, p_locked_by, 1);
  end if;
  select l.ctid, l.expires_at, l.waited_until, l.parked, l.execution_id into at_, ends, waited, kept, of
    from agent_locks l
   where l.lane = p_lane and l.locked_by = p_locked_by and l.expires_at > clock_timestamp()
     and (p_fencing_token is null or l.fencing_token = p_fencing_token) for update;
  if at_ is null or kept or ends <= clock_timestamp() then                            -- after the lock
    return false;
  end if;
  -- Only an execution borrows, and few lanes are lent. Not one condition: with a query in it, it would be one for every lane.
  if of is not null then
    if exists (select from agent_lock_loans n where n.lane = p_lane) and return_agent_lock(p_lane) is not null then
      return true;                                                                    -- to the ancestor who lent it
    end if;
  end if;
  update agent_locks l
     set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp(), parked = false,
         execution_id = null
   where l.ctid = at_;
  if waited > clock_timestamp() then
    perform pg_notify('agent_lanes', p_lane);
  end if;
  if p_lane like 'thread:%' then
    perform agent_lane_freed(p_lane);
  end if;
  return true;
end $$;

create function acquire_many_agent_locks(p_lanes text[], p_owners text[], p_ttls int[])
returns table (n bigint, acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text, was_holder text, was_until timestamptz)
language plpgsql volatile
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off as $$
#variable_conflict use_column
declare
  free_ text[];
  now_  timestamptz;
  a     agent_lock_answer;
begin
  if (cardinality(p_owners), cardinality(p_ttls)) is distinct from (cardinality(p_lanes), cardinality(p_lanes)) then
    raise exception 'taking % lanes needs as many owners and ttls', coalesce(cardinality(p_lanes), 0) using errcode = '22023';
  end if;
  for i in 1 .. cardinality(p_lanes) loop
    if not agent_lock_fits(p_lanes[i], p_owners[i]) or (p_ttls[i] between 1 and 2592000) is not true then
      perform agent_lock_check(p_lanes[i], p_owners[i], p_ttls[i]);
    end if;
  end loop;
  -- Those that are free and wanted by nobody, whom to ask or to tell.
  select coalesce(array_agg(t.lane), '{}') into free_ from (
    select l.lane from agent_locks l
     where l.lane = any (p_lanes) and l.locked_by = '' and l.expires_at <= clock_timestamp() and l.waited_until <= clock_timestamp()
     order by l.lane for update skip locked) t;
  now_ := clock_timestamp();
  if free_ <> '{}' then
    return query
    update agent_locks l
       set locked_by = w.owner, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
           expires_at = now_ + make_interval(secs => w.ttl), ttl_seconds = w.ttl, parked = false,
           execution_id = agent_lock_execution(w.owner)
      from (select distinct on (u.lane) u.lane, u.owner, u.ttl, u.n
              from unnest(p_lanes, p_owners, p_ttls) with ordinality u (lane, owner, ttl, n) order by u.lane, u.n) w
     where l.lane = any (free_) and l.lane = w.lane and l.expires_at <= now_ and l.waited_until <= now_
    returning w.n, true, l.fencing_token, l.expires_at, l.locked_by, '', now_;
  end if;
  for i in 1 .. cardinality(p_lanes) loop
    continue when p_lanes[i] = any (free_) and array_position(p_lanes, p_lanes[i]) = i;
    a := ask_agent_lock(p_lanes[i], p_owners[i], p_ttls[i]);
    n := i;
    acquired := a.acquired;
    fencing_token := a.fencing_token;
    expires_at := a.expires_at;
    locked_by := a.locked_by;
    was_holder := a.was_holder;
    was_until := a.was_until;
    return next;
  end loop;
end $$;
comment on function acquire_many_agent_locks is
  'acquire_agent_lock for each of many lanes, in one commit; n counts them from 1. Never waits, and each try succeeds or fails for itself, '
  'but a bad name or ttl among them is an error for all. Ask for one without an answer by itself.';

create function release_many_agent_locks(p_lanes text[], p_owners text[], p_tokens bigint[]) returns table (n bigint)
language plpgsql volatile
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  mine  text[];
  now_  timestamptz;
  freed record;
begin
  select coalesce(array_agg(t.lane), '{}') into mine from (
    select l.lane from agent_locks l
      join unnest(p_lanes, p_owners, p_tokens) w (lane, owner, token)
        on l.lane = w.lane and l.locked_by = w.owner and l.fencing_token = w.token
     where l.lane = any (p_lanes) and l.expires_at > clock_timestamp() and not l.parked and l.execution_id is null
       and l.lane not like 'thread:%'
     order by l.lane for update of l skip locked) t;
  now_ := clock_timestamp();                                                          -- after the lock
  for freed in
    update agent_locks l
       set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = now_
      from unnest(p_lanes, p_owners, p_tokens) with ordinality w (lane, owner, token, n)
     where l.lane = any (mine) and l.lane = w.lane and l.locked_by = w.owner and l.fencing_token = w.token and l.expires_at > now_
    returning w.n, l.lane, l.waited_until
  loop
    if freed.waited_until > now_ then
      perform pg_notify('agent_lanes', freed.lane);
    end if;
    n := freed.n;
    return next;
  end loop;
end $$;
comment on function release_many_agent_locks is
  'release_agent_lock for each of many lanes of jobs, in one commit: answers the numbers, from 1, of those that were released. Never '
  'waits. Any other is untouched: release it by itself, it may be somebody else''s, an execution''s, or in use by a fenced write.';

create or replace function await_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300, p_patience_seconds int default 5)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  got  agent_lock_answer;
  mark timestamptz;
begin
  if p_patience_seconds is null or p_patience_seconds <= 0 or p_patience_seconds > 2592000 then
    raise exception 'a place kept for % seconds in the queue of lane % is not valid: give 1 to 2592000 (30 days)',
      coalesce(p_patience_seconds::text, 'null'), coalesce(quote_literal(left(p_lane, 40)), 'null') using errcode = '22023';
  end if;
  got := ask_agent_lock(p_lane, p_locked_by, p_ttl_seconds);
  if not got.acquired then
    -- Stand in the queue, leave the mark that makes a release notify, and look once more: a release
    -- that committed before the mark is seen by this second try, one after it sees the mark.
    mark := clock_timestamp() + make_interval(secs => p_patience_seconds);
    insert into agent_lock_waiters as w (lane, owner, expires_at) values (p_lane, p_locked_by, mark)
    on conflict (lane, owner) do update set expires_at = excluded.expires_at;
    perform 1 from agent_locks l where l.lane = p_lane for no key update skip locked;
    if found then
      update agent_locks l set waited_until = mark where l.lane = p_lane and l.waited_until < mark;
    end if;
    got := ask_agent_lock(p_lane, p_locked_by, p_ttl_seconds);
  end if;
  if got.acquired then
    delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by;
  end if;
  return query select got.acquired, got.fencing_token, got.expires_at, got.locked_by;
end $$;

alter function fence_agent_lock(text, bigint) set enable_seqscan = off;
alter function renew_agent_lock(text, text, bigint, int) set enable_seqscan = off;
alter function renew_agent_locks(text[], text[], bigint[], int[]) set enable_seqscan = off;
